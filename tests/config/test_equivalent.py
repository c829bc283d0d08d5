"""The model of our own that a plan takes in the place of a model of transformers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from nanoscale.config.hf import any_model
from nanoscale.config.hf.equivalent import as_own, has_recurrences
from nanoscale.config.model_math import parameters
from nanoscale.config.schema import Model
from tests.support.measured_memory import SHAPE, Row, config_of

SIZES = {
    "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
    "head_dim": 128, "intermediate_size": 8192, "vocab_size": 32000, "max_position_embeddings": 4096,
}  # fmt: skip
EXPERTS = {"num_local_experts": 16, "num_experts_per_tok": 4, "moe_intermediate_size": 1024}
LATENT = {"kv_lora_rank": 512, "q_lora_rank": 1536, "qk_rope_head_dim": 64, "v_head_dim": 128}


def own(parameters: int | None, **document: Any) -> Model:
    document = SIZES | document
    sizes = any_model.sizes(document)
    shape = Model(source="hf", hf_config=document, parameters=parameters, **sizes)
    return as_own(replace(config_of(Row("", shape=SHAPE)), model=shape)).model


@pytest.mark.parametrize(
    ("count", "document"),
    [
        (6 * 10**9, {}),
        (9 * 10**9, {}),
        (10 * 10**9, EXPERTS),
        (7 * 10**9, EXPERTS),
        (10 * 10**9, EXPERTS | LATENT | {"first_k_dense_replace": 3, "n_shared_experts": 1}),
    ],
)
def test_it_has_as_many_parameters(count: int, document: dict[str, Any]) -> None:
    model = own(count, **document)
    assert parameters(model) == pytest.approx(count, rel=0.01)
    assert model.experts == document.get("num_local_experts", 0)
    assert model.kv_rank == document.get("kv_lora_rank")
    assert own(None, **document).source == "own", "before they are counted"


def test_a_family_of_ours_has_its_own_shape() -> None:
    model = own(1, model_type="llama", architectures=["LlamaForCausalLM"], hidden_act="silu")
    assert (model.source, model.ffn, model.mlp) == ("own", 8192, "swiglu")


def test_recurrent_layers_count_as_short_windows() -> None:
    kinds = ["linear_attention", "linear_attention", "linear_attention", "full_attention"] * 8
    model = own(9 * 10**9, layer_types=kinds)
    assert [model.has_window(layer) for layer in range(4)] == [True, True, True, False]
    assert has_recurrences(Model(hf_config={"layer_types": kinds})) and not has_recurrences(model)

"""Tiny models that nanoscale has no family for: folders of them, and what training them should give."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch.nn import functional as F

from nanoscale.config.hf import any_model
from nanoscale.config.hf.text_part import read_config
from nanoscale.config.schema import Model
from nanoscale.models.hf_model import named_tensors
from nanoscale.runs.directory import RunDirectory
from tests.support.jobs import SAMPLES, SEQ_LEN, SHAPE, STEPS, run_of_bytes
from tests.support.reference import CURVE

COMMON: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 32,
    "initializer_range": 0.2,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "pad_token_id": 0,
}
EXPERTS: dict[str, Any] = {
    "num_key_value_heads": 2,
    "moe_intermediate_size": 16,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "first_k_dense_replace": 1,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "gpt_neox": COMMON | {"attention_dropout": 0.5, "hidden_dropout": 0.5},
    "falcon": COMMON | {"alibi": False},
    "qwen3": COMMON | {"num_key_value_heads": 2, "head_dim": 8, "tie_word_embeddings": True},
    "gemma2": COMMON | {"num_key_value_heads": 2, "head_dim": 8, "tie_word_embeddings": True},
    "cohere": COMMON | {"num_key_value_heads": 2},
    "gpt_oss": COMMON
    | {"num_key_value_heads": 2, "head_dim": 8, "num_local_experts": 4, "num_experts_per_tok": 2},
    "mixtral": COMMON | {"num_key_value_heads": 2, "num_local_experts": 4},
    # a decoder without its encoder: the attention to the encoder is never used
    "bart": COMMON
    | {"d_model": 32, "decoder_layers": 2, "decoder_ffn_dim": 48, "decoder_attention_heads": 4},
    # published with a matrix of each expert, or otherwise than transformers holds them
    "minimax_m2": COMMON | EXPERTS | {"num_local_experts": 4, "head_dim": 8, "rotary_dim": 8},
    "glm4_moe": COMMON | EXPERTS | {"head_dim": 8, "n_group": 1, "topk_group": 1},
    "qwen3_next": COMMON
    | EXPERTS
    | {
        "head_dim": 8,
        "num_experts": 4,
        "shared_expert_intermediate_size": 16,
        "layer_types": ["linear_attention", "full_attention"],
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
    },
    "nemotron_h": COMMON
    | EXPERTS
    | {
        "head_dim": 8,
        "num_hidden_layers": 3,
        "layers_block_type": ["mamba", "attention", "moe"],
        "moe_shared_expert_intermediate_size": 16,
        "mamba_num_heads": 4,
        "mamba_head_dim": 8,
        "ssm_state_size": 8,
        "n_groups": 2,
        "n_group": 1,
        "topk_group": 1,
    },
    "gemma3_text": COMMON
    | {"num_hidden_layers": 3, "num_key_value_heads": 2, "head_dim": 8, "sliding_window": 4}
    | {"layer_types": ["sliding_attention", "sliding_attention", "full_attention"]},
    "deepseek_v3": COMMON
    | EXPERTS
    | {"num_key_value_heads": 4, "q_lora_rank": 16, "kv_lora_rank": 16, "v_head_dim": 8}
    | {"qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "n_group": 1, "topk_group": 1}
    | {"n_shared_experts": 1},
    "hrm_text": COMMON | {"num_key_value_heads": 4, "head_dim": 8},
    "inkling2_text": COMMON
    | EXPERTS
    | {"head_dim": 8, "num_key_value_heads": 2, "n_group": 1, "topk_group": 1}
    | {"unpadded_vocab_size": 64},
    "gemma4_text": COMMON
    | {
        "num_key_value_heads": 2,
        "head_dim": 8,
        "global_head_dim": 8,
        "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": 64,
        "num_kv_shared_layers": 0,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "gpt2": {"vocab_size": 64, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 32}
    | {"initializer_range": 0.2},
}

DEPTH = {"gpt2": "n_layer"}
"""The names of the number of blocks in config.json; mostly `num_hidden_layers`."""

DIVIDED: dict[str, dict[str, Any]] = {
    family: COMMON | {"num_key_value_heads": 2, "head_dim": 8} | settings
    for family, settings in {
        "mixtral": {"num_local_experts": 4},
        "qwen3": {},
        "gemma2": {},
        "apertus": {},
        "granite_swa": {},
        "minicpm3": {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "v_head_dim": 8}
        | {"qk_nope_head_dim": 8, "num_key_value_heads": 4},
        "olmo_hybrid": {"linear_num_key_heads": 2, "linear_num_value_heads": 2}
        | {"linear_key_head_dim": 8, "linear_value_head_dim": 8}
        | {"layer_types": ["linear_attention", "full_attention"]},
        "nemotron_h": FAMILIES["nemotron_h"] | {"n_routed_experts": 16},
    }.items()
}
"""Settings of families whose plans of tensor parallelism have different kinds."""


def config_of(family: str, settings: dict[str, Any]) -> dict[str, Any]:
    """Return the content of config.json."""
    from transformers import CONFIG_MAPPING

    document: dict[str, Any] = json.loads(CONFIG_MAPPING[family](**settings).to_json_string())
    return document


def save(family: str, folder: Path, **changes: Any) -> Any:
    """Save a model with random weights, norms and biases too, in several files; return the model."""
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM

    torch.manual_seed(0)
    settings = FAMILIES[family] | changes
    config = CONFIG_MAPPING[family](**settings)
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for _, tensor in named_tensors(model):
            if tensor.ndim == 1:
                tensor += 0.3 * torch.randn_like(tensor)
    model.save_pretrained(folder, max_shard_size="20KB")
    return model


def shape_of(folder: Path, *, loaded: bool = True) -> Model:
    """Return the shape that the launcher makes of a folder."""
    from transformers import AutoConfig

    document = read_config(folder)
    sizes = any_model.sizes(document)
    sizes["tie_embeddings"] = getattr(
        AutoConfig.from_pretrained(folder), "tie_word_embeddings", False
    )
    begin = str(folder) if loaded else None
    return Model(source="hf", name=str(folder), init_from=begin, hf_config=document, **sizes)


def run_of_transformers(family: str, folder: Path, **changes: Any) -> RunDirectory:
    """Create a run of bytes of such a model, with a checkpoint of its weights."""
    sizes = {it: 257 for it in FAMILIES[family] if it.startswith("vocab_size")}
    sizes |= {"n_positions": 48, "max_position_embeddings": 48}
    model = save(family, folder / family, **sizes | changes)
    return run_of_bytes(folder, shape_of(folder / family), f"run-{family}", model)


def plain_loop(folder: Path, dtype: torch.dtype, steps: int = STEPS) -> CURVE:
    """Train like `tests.support.reference`, with transformers' model."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()
    tokens = np.random.default_rng(7).integers(0, SHAPE.vocab, SAMPLES * SEQ_LEN + 1)
    windows = [tokens[i * SEQ_LEN : (i + 1) * SEQ_LEN + 1] for i in range(SAMPLES)]
    batch = torch.tensor(np.stack(windows))
    matrices = [p for p in model.parameters() if p.ndim > 1]
    vectors = [p for p in model.parameters() if p.ndim == 1]
    groups = [{"params": matrices}, {"params": vectors, "weight_decay": 0.0}]
    update = torch.optim.AdamW(groups, lr=1e-2, betas=(0.9, 0.95), weight_decay=0.1)
    curve = []
    for step in range(1, steps + 1):
        falling = 0.1 + 0.9 * (1 + math.cos(math.pi * (step - 3) / (steps - 3))) / 2
        for group in update.param_groups:
            group["lr"] = 1e-2 * (step / 3 if step < 3 else falling)
        logits = model(batch[:, :-1]).logits
        loss = F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
        update.zero_grad()
        loss.backward()
        norm = torch.sqrt(sum((p.grad**2).sum() for p in model.parameters()))
        for parameter in model.parameters():
            parameter.grad *= min(1.0, 0.5 / (norm.item() + 1e-6))
        update.step()
        lr = update.param_groups[0]["lr"]
        curve.append((loss.item(), norm.item(), lr, step * SAMPLES * SEQ_LEN))
    return curve


@contextmanager
def without_rounding() -> Iterator[None]:
    """Let transformers' code that computes in fp32, whatever the model's dtype is, compute in fp64."""

    def widened(run: Any) -> Any:
        def call(*args: Any, **named: Any) -> Any:
            if not sys._getframe(1).f_globals["__name__"].startswith("transformers."):
                return run(*args, **named)
            named = {
                name: torch.float64 if it is torch.float32 else it for name, it in named.items()
            }
            exact = torch.Tensor.double if run is narrow else run
            return exact(*(torch.float64 if it is torch.float32 else it for it in args), **named)

        return call

    narrow = torch.Tensor.float
    with ExitStack() as stack:
        for it in (torch.Tensor.to, torch.Tensor.type, narrow, F.softmax):
            owner = F if it is F.softmax else torch.Tensor
            stack.enter_context(patch.object(owner, it.__name__, widened(it)))
        yield

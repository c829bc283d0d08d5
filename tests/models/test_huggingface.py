"""Models of transformers in our words, and ours in theirs: the same logits of the same random weights."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from huggingface_hub import split_torch_state_dict_into_shards
from safetensors.torch import load_file, save_file
from transformers import CONFIG_MAPPING, AutoModelForCausalLM
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from nanoscale.checkpoint.hf import load
from nanoscale.checkpoint.hf.adapters import merging
from nanoscale.checkpoint.hf.names import shapes
from nanoscale.config.composing.compose import compose
from nanoscale.config.hf.any_model import sizes
from nanoscale.config.hf.families import UnsupportedError, families
from nanoscale.config.hf.safetensors_headers import BadFileError, read_folder
from nanoscale.config.hf.shape import read_shape, write_shape
from nanoscale.config.hf.text_part import HEAD, text_config
from nanoscale.config.model_math import parameters
from nanoscale.config.schema import Config, Model
from nanoscale.generate.weights import state_of
from nanoscale.models.transformer import Transformer
from tests.support.hf_families import COMMON, FAMILIES, logits, make, save, tokens
from tests.support.wrappers import save_wrapper

BOUND = 1e-5


def ours_of(folder: Path) -> Transformer:
    shape = read_shape(folder)
    model = Transformer(shape)
    for parameter in model.parameters():
        parameter.data.fill_(float("nan"))
    load.load(folder, shape, dict(state_of(model)))
    return model


def assert_equal_logits(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    assert theirs.std() > 0.1, "random weights of any use"
    assert (ours - theirs).abs().max() <= BOUND * theirs.abs().max()


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_equal_those_of_transformers(family: str, tmp_path: Path) -> None:
    theirs = save(family, tmp_path, shard="20KB")
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 2, "several files"
    ours = ours_of(tmp_path)
    assert_equal_logits(ours(tokens()), logits(theirs, tokens()))
    assert {name: tuple(p.shape) for name, p in ours.named_parameters()} == shapes(ours.shape)
    assert parameters(ours.shape) == sum(p.numel() for p in theirs.parameters())
    assert read_back(ours.shape, tmp_path / "again") == replace(ours.shape, name="again")


def read_back(shape: Model, folder: Path) -> Model:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(write_shape(shape)))
    return read_shape(folder)


def test_a_file_in_bf16_is_read(tmp_path: Path) -> None:
    save("llama", tmp_path, dtype=torch.bfloat16)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    assert_equal_logits(ours_of(tmp_path)(tokens()), logits(theirs, tokens()))


def test_the_older_words_for_rotation(tmp_path: Path) -> None:
    theirs = save("llama tied, llama3", tmp_path)
    file = tmp_path / "config.json"
    document = json.loads(file.read_text())
    rope = document.pop("rope_parameters")
    document |= {"rope_theta": rope.pop("rope_theta"), "rope_scaling": rope}
    file.write_text(json.dumps(document))
    assert read_shape(tmp_path).rope_scaling is not None
    assert_equal_logits(ours_of(tmp_path)(tokens()), logits(theirs, tokens()))


def test_names_without_the_prefix_of_the_trunk(tmp_path: Path) -> None:
    """The names are from the published GPT-2's files, with its masks."""
    theirs = save("gpt2", tmp_path)
    file = tmp_path / "model.safetensors"
    held = {name.removeprefix("transformer."): value for name, value in load_file(file).items()}
    held |= {f"h.{layer}.attn.bias": torch.ones(1, 1, 32, 32) for layer in range(2)}
    save_file(held, file)
    assert_equal_logits(ours_of(tmp_path)(tokens()), logits(theirs, tokens()))


def test_layers_that_predict_further_tokens_are_left_out(tmp_path: Path) -> None:
    theirs = save("glm4_moe", tmp_path)
    file = tmp_path / "model.safetensors"
    held = load_file(file)
    save_file(held | {"model.layers.2.enorm.weight": torch.ones(32)}, file)
    assert_equal_logits(ours_of(tmp_path)(tokens()), logits(theirs, tokens()))


def test_gradients_of_sinks_and_biases_equal_those_of_transformers(tmp_path: Path) -> None:
    theirs = save("gpt_oss", tmp_path)
    ours = ours_of(tmp_path)
    ours(tokens()).square().sum().backward()
    theirs(tokens()).logits.square().sum().backward()
    mine, block = dict(ours.layers["0"].named_parameters()), theirs.model.layers[0]
    for name, gradient in (
        ("attention.sinks", block.self_attn.sinks.grad),
        ("mlp.router.bias", block.mlp.router.bias.grad),
        ("mlp.experts.up_bias", block.mlp.experts.gate_up_proj_bias.grad[:, 1::2]),
        ("mlp.experts.down_bias", block.mlp.experts.down_proj_bias.grad),
        ("mlp.experts.gate", block.mlp.experts.gate_up_proj.grad[..., ::2].mT),
    ):
        found = mine[name].grad
        assert found is not None and (found - gradient).abs().max() <= 1e-4 * gradient.abs().max()


@pytest.mark.parametrize("shard", ["5GB", "8KB"])
def test_matrices_in_mxfp4_are_read(tmp_path: Path, shard: str) -> None:
    """Blocks and scales are in one file, or in several."""
    theirs = make("gpt_oss, mxfp4")
    state = theirs.state_dict()
    draws = torch.Generator().manual_seed(1)
    for name in [name for name in state if name.endswith("_proj") and ".experts." in name]:
        experts, inputs, rows = state.pop(name).shape
        blocks = torch.randint(256, (experts, rows, inputs // 32, 16), generator=draws).byte()
        scales = torch.randint(120, 127, blocks.shape[:3], generator=draws).byte()
        state[f"{name}_blocks"], state[f"{name}_scales"] = blocks, scales
        theirs.get_parameter(name).data = convert_moe_packed_tensors(blocks, scales).float()
    split = split_torch_state_dict_into_shards(state, max_shard_size=shard)
    for file, names in split.filename_to_tensors.items():
        save_file({name: state[name] for name in names}, tmp_path / file)
    if split.is_sharded:
        index = {"weight_map": split.tensor_to_filename}
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    document = theirs.config.to_dict() | {"quantization_config": {"quant_method": "mxfp4"}}
    (tmp_path / "config.json").write_text(json.dumps(document))
    ours = ours_of(tmp_path)
    assert_equal_logits(ours(tokens()), logits(theirs, tokens()))
    assert load.fingerprint(tmp_path, ours.shape)
    base = Config(model=replace(ours.shape, init_from=str(tmp_path)))  # of adapters that are merged
    for name in ("layers.1.mlp.experts.up", "layers.1.mlp.experts.down"):
        adapters: Any = SimpleNamespace(tensors={})
        frozen = merging(base, adapters)(name)
        assert torch.equal(frozen.float(), ours.get_parameter(name))


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe"])
def test_merged_experts_are_read(family: str, tmp_path: Path) -> None:
    """transformers 5 uses merged experts, and writes them with save_original_format=False."""
    theirs = save(family, tmp_path, shard="20KB", merged=True)
    held = read_folder(tmp_path)
    assert held["model.layers.1.mlp.experts.gate_up_proj"].shape[0] == theirs.config.num_experts
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(logits(again, tokens()), logits(theirs, tokens()))
    assert_equal_logits(ours_of(tmp_path)(tokens()), logits(theirs, tokens()))


def test_what_is_wrong_with_merged_experts_is_said_from_their_headers(tmp_path: Path) -> None:
    save("mixtral", tmp_path, merged=True)
    shape, file = read_shape(tmp_path), tmp_path / "model.safetensors"
    whole = load_file(file)
    name = "model.layers.0.mlp.experts.gate_up_proj"
    for value, said in (
        (None, f"{name} is missing"),
        (whole[name][:, :-1], f"{name} is 4 × 95 × 32"),
    ):
        held = {key: it for key, it in whole.items() if key != name}
        save_file(held | ({} if value is None else {name: value.contiguous()}), file)
        with pytest.raises(BadFileError, match=said):
            load.find(tmp_path, shape)


TIED = {"llama tied, llama3": "model.embed_tokens.weight", "qwen2": "model.embed_tokens.weight",
        "gpt2": "transformer.wte.weight"}  # fmt: skip
"""Families whose config.json ties the head, and the name of the embedding."""


@pytest.mark.parametrize("family", TIED)
def test_embeddings_are_tied_where_transformers_ties_them(family: str, tmp_path: Path) -> None:
    """Two tensors that differ are two, in spite of config.json."""
    save(family, tmp_path)
    file, name = tmp_path / "model.safetensors", TIED[family]
    plain = load_file(file)
    other = torch.randn_like(plain[name])
    without = {key: value for key, value in plain.items() if key != name}
    for held, tied in (
        (plain | {HEAD: other}, False),
        (plain | {HEAD: plain[name].clone()}, True),
        (without | {HEAD: other}, True),
    ):
        save_file(held, file, metadata={"format": "pt"})
        theirs, ours = AutoModelForCausalLM.from_pretrained(tmp_path), ours_of(tmp_path)
        assert (theirs.get_input_embeddings().weight is theirs.lm_head.weight) is tied
        assert ours.shape.tie_embeddings is tied
        assert_equal_logits(ours(tokens()), logits(theirs, tokens()))


def test_a_tied_head_can_begin_a_life_of_its_own(tmp_path: Path) -> None:
    theirs = save("qwen2", tmp_path)
    shape = replace(read_shape(tmp_path), tie_embeddings=False)
    model = Transformer(shape)
    load.load(tmp_path, shape, {f"model.{n}": p for n, p in model.named_parameters()})
    assert_equal_logits(model(tokens()), logits(theirs, tokens()))


# mistralai/Mixtral-8x7B-v0.1, mistralai/Mistral-7B-v0.3, Qwen/Qwen3-30B-A3B and Qwen/Qwen3-0.6B to -32B at the
# hub, what of their config.json is of the shape
QWEN3 = {
    "model_type": "qwen3",
    "attention_bias": False,
    "head_dim": 128,
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "max_position_embeddings": 40960,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": None,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
QWEN3_SIZES = {
    "0.6b": (28, 1024, 16, 3072, True),
    "1.7b": (28, 2048, 16, 6144, True),
    "4b": (36, 2560, 32, 9728, True),
    "8b": (36, 4096, 32, 12288, False),
    "14b": (40, 5120, 40, 17408, False),
    "32b": (64, 5120, 64, 25600, False),
}
"""Layers, hidden size, heads, intermediate size, tied head."""
PUBLISHED: dict[str, dict[str, Any]] = {
    **{
        f"qwen3-{size}": QWEN3
        | {
            "num_hidden_layers": layers,
            "max_window_layers": layers,
            "hidden_size": hidden,
            "num_attention_heads": heads,
            "intermediate_size": ffn,
            "tie_word_embeddings": tied,
        }
        for size, (layers, hidden, heads, ffn, tied) in QWEN3_SIZES.items()
    },
    "mistral-7b": {
        "model_type": "mistral",
        "hidden_act": "silu",
        "hidden_size": 4096,
        "initializer_range": 0.02,
        "intermediate_size": 14336,
        "max_position_embeddings": 32768,
        "num_attention_heads": 32,
        "num_hidden_layers": 32,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-05,
        "rope_theta": 1000000.0,
        "sliding_window": None,
        "tie_word_embeddings": False,
        "vocab_size": 32768,
    },
    "mixtral-8x7b": {
        "model_type": "mixtral",
        "hidden_act": "silu",
        "hidden_size": 4096,
        "initializer_range": 0.02,
        "intermediate_size": 14336,
        "max_position_embeddings": 32768,
        "num_attention_heads": 32,
        "num_experts_per_tok": 2,
        "num_hidden_layers": 32,
        "num_key_value_heads": 8,
        "num_local_experts": 8,
        "output_router_logits": False,
        "rms_norm_eps": 1e-05,
        "rope_theta": 1000000.0,
        "router_aux_loss_coef": 0.02,
        "sliding_window": None,
        "tie_word_embeddings": False,
        "vocab_size": 32000,
    },
    "qwen3-30b-a3b": {
        "model_type": "qwen3_moe",
        "attention_bias": False,
        "decoder_sparse_step": 1,
        "head_dim": 128,
        "hidden_act": "silu",
        "hidden_size": 2048,
        "initializer_range": 0.02,
        "intermediate_size": 6144,
        "max_position_embeddings": 40960,
        "mlp_only_layers": [],
        "moe_intermediate_size": 768,
        "norm_topk_prob": True,
        "num_attention_heads": 32,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "num_hidden_layers": 48,
        "num_key_value_heads": 4,
        "output_router_logits": False,
        "rms_norm_eps": 1e-06,
        "rope_scaling": None,
        "rope_theta": 1000000.0,
        "router_aux_loss_coef": 0.001,
        "sliding_window": None,
        "tie_word_embeddings": False,
        "use_sliding_window": False,
        "vocab_size": 151936,
    },
}


@pytest.mark.parametrize("recipe", PUBLISHED)
def test_recipes_have_the_published_shapes(recipe: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(PUBLISHED[recipe]))
    ours = compose([f"recipe={recipe}"]).config.model
    published = read_shape(tmp_path)
    assert ours == replace(published, name=recipe, balance=ours.balance)


def test_a_window_is_kept(tmp_path: Path) -> None:
    save("mistral, window", tmp_path)
    assert read_shape(tmp_path).sliding_window == 24
    save("mistral", tmp_path / "all")
    assert read_shape(tmp_path / "all").sliding_window is None


@pytest.mark.parametrize("family", sorted(families()))
def test_missing_settings_are_those_of_transformers(family: str, tmp_path: Path) -> None:
    whole = CONFIG_MAPPING[family]().to_dict() | {"norm_topk_prob": True}
    needed = {"model_type", "norm_topk_prob", "vocab_size", "rope_parameters", "hidden_size"}
    needed |= {"num_hidden_layers", "num_attention_heads", "max_position_embeddings"}
    needed |= {"intermediate_size", "n_embd", "n_layer", "n_head"}
    shapes = []
    for document in (whole, {key: value for key, value in whole.items() if key in needed}):
        (tmp_path / "config.json").write_text(json.dumps(document))
        shapes.append(read_shape(tmp_path))
    assert shapes[0] == shapes[1]


def test_a_wrapper_has_the_shape_of_its_part_for_texts(tmp_path: Path) -> None:
    """The published config.json of Gemma 3 4B leaves out what transformers fills in."""
    text = {"model_type": "gemma3_text", "hidden_size": 2560, "intermediate_size": 10240}
    text |= {"num_hidden_layers": 34, "sliding_window": 1024}
    text |= {"rope_scaling": {"rope_type": "linear", "factor": 8.0}}
    wrapper = {"model_type": "gemma3", "text_config": text, "eos_token_id": [1, 106]}
    whole = CONFIG_MAPPING["gemma3"].from_dict(wrapper).text_config.to_dict()
    shapes = []
    for document in (wrapper, whole):
        (tmp_path / "config.json").write_text(json.dumps(document))
        shapes.append(read_shape(tmp_path))
    assert shapes[0] == shapes[1]
    assert sizes(text_config(wrapper))["vocab"] == shapes[0].vocab == 262208
    assert text_config(wrapper)["eos_token_id"] == [1, 106]


@pytest.mark.parametrize(
    "prefix", ["language_model.", "language_model.model.", "model.language_model.model.", ""]
)
def test_older_names_of_a_wrappers_part_for_texts(prefix: str, tmp_path: Path) -> None:
    theirs = save_wrapper("mistral3", tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    plain = {"model.language_model.": "model.", "language_model.": ""}
    for begin, short in plain.items():
        tensors = {
            short + name.removeprefix(begin) if name.startswith(begin) else name: tensor
            for name, tensor in tensors.items()
        }
    renamed = {
        prefix + name.removeprefix("model." if prefix.endswith("model.model.") else "")
        if name.startswith("model.")
        else name: tensor
        for name, tensor in tensors.items()
    }
    save_file(renamed, file)
    assert_equal_logits(ours_of(tmp_path)(tokens()), logits(theirs, tokens()))


LLAMA = COMMON | {"model_type": "llama"}
MIXTRAL = COMMON | {"model_type": "mixtral"}
QWEN3_MOE = COMMON | {"model_type": "qwen3_moe", "norm_topk_prob": True}


@pytest.mark.parametrize(
    ("document", "word"),
    [
        ({"model_type": "bert"}, "model_type=bert"),
        (LLAMA | {"hidden_act": "gelu"}, "hidden_act=gelu"),
        (LLAMA | {"attention_bias": True}, "mlp_bias"),
        (LLAMA | {"rope_scaling": {"rope_type": "xpos", "factor": 4.0}}, "rope_type=xpos"),
        (LLAMA | {"rope_scaling": {"type": "linear"}}, "config.json has no factor"),
        (LLAMA | {"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
        (
            COMMON | {"model_type": "gemma2", "layer_types": ["chunked_attention"] * 2},
            "layer_types=",
        ),
        (LLAMA | {"quantization_config": {"bits": 4}}, "quantized"),
        (LLAMA | {"hidden_size": "wide"}, "model.hidden=wide"),
        ({k: v for k, v in LLAMA.items() if k != "vocab_size"}, "no vocab_size"),
        (LLAMA | {"model_type": "qwen2", "use_sliding_window": True}, "use_sliding_window=true"),
        ({"model_type": "gpt2", "activation_function": "relu"}, "activation_function=relu"),
        (MIXTRAL | {"router_jitter_noise": 0.1}, "router_jitter_noise=0.1"),
        (MIXTRAL | {"output_router_logits": True}, "output_router_logits=true"),
        (QWEN3_MOE | {"decoder_sparse_step": 2}, "decoder_sparse_step=2"),
        (QWEN3_MOE | {"mlp_only_layers": [0]}, "mlp_only_layers"),
        (COMMON | {"model_type": "deepseek_v3", "qk_nope_head_dim": -64}, "model.head_dim=0"),
        (
            COMMON | {"model_type": "deepseek_v3", "rope_scaling": [4]},
            "rope_scaling is not an object",
        ),
        (QWEN3_MOE | {"model_type": "llama4_text"}, "llama4_text is not one of the families"),
    ],
)
def test_what_we_cannot_compute_is_refused(
    document: dict[str, Any], word: str, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(document))
    with pytest.raises(UnsupportedError, match=word):
        read_shape(tmp_path)


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"experts": 4, "qkv_bias": True}, "mixtral is the nearest, but for model.qkv_bias=true"),
        ({"experts": 4, "qk_norm": True, "sliding_window": 8}, "but for model"),
        ({"mlp": "gelu"}, "model.mlp=gelu"),
        ({"position": "learned"}, "model.norm"),
        ({"qk_norm": True, "bias": True}, "model.qk_norm=true"),
        ({"qkv_bias": True, "sliding_window": 8}, "mistral is the nearest, but for model.qkv_bias"),
    ],
)
def test_what_transformers_cannot_compute_is_refused(changes: dict[str, Any], word: str) -> None:
    with pytest.raises(UnsupportedError, match=word):
        write_shape(Model(**changes))

"""Conversion between the config.json of a Hugging Face model and `config.schema.Model`.

Settings that our shape cannot express are refused by name: nothing is dropped silently.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from nanoscale.config.hf.safetensors_headers import BadFileError, are_equal, read_folder
from nanoscale.config.schema import Model, RopeScaling
from nanoscale.config.values.convert import convert
from nanoscale.config.violations import shown

Json = dict[str, Any]
_SHARED = ("shared_expert_intermediate_size", "n_shared_experts", "num_shared_experts")
"""The names in Qwen2-MoE and DeepSeek."""
_CAUSAL = ("ForCausalLM", "LMHeadModel")
"""The endings of the class names of causal language models."""


HEAD = "lm_head.weight"
_EMBEDDINGS = ("embed_tokens.weight", "wte.weight")
"""The endings of the names of their embeddings."""


class UnsupportedError(Exception):
    """A model that the other side cannot express; the text names the setting."""


def read_shape(folder: Path) -> Model:
    """Return the shape of the model in a folder.

    Embeddings are tied if config.json says so and the files do not hold a head of other values: transformers 5
    ties no two tensors that differ. Without files, config.json alone counts.

    Raises:
        UnsupportedError: there is no config.json, or it describes something other than our families.
    """
    document = read_config(folder)
    family = document.get("model_type")
    for key in _SHARED:
        if document.get(key):
            shared = f"{key}={document[key]}: shared experts are not supported"
            raise UnsupportedError(f"model_type={shown(family)}, {shared}")
    if family not in _READ:
        families = ", ".join(_READ)
        raise UnsupportedError(f"model_type={shown(family)} is not one of the families {families}")
    if "quantization_config" in document:
        raise UnsupportedError("quantization_config: its weights are quantized")
    values = _READ[family](document) | {"name": folder.name}
    config, violations = convert({"model": values}, lambda _: "config.json")
    if violations:
        wrong = "; ".join(f"{it.key}={shown(it.value)} {it.message}" for it in violations)
        raise UnsupportedError(f"its sizes are not valid: {wrong}")
    found = config.model
    return replace(
        found,
        kv_heads=found.kv_head_count,
        head_dim=found.head_width,
        tie_embeddings=found.tie_embeddings and not has_own_head(folder),
    )


def has_own_head(folder: Path) -> bool:
    """True if the files of a folder hold an output head and an embedding of other values."""
    try:
        held = read_folder(folder)
        embedding = next((held[name] for name in held if name.endswith(_EMBEDDINGS)), None)
        return HEAD in held and embedding is not None and not are_equal(held[HEAD], embedding)
    except (BadFileError, OSError):  # the code that needs the weights reports it
        return False


def require_causal(document: Json) -> None:
    """Raise an UnsupportedError for models that are not trained here."""
    if "model_type" not in document:
        raise UnsupportedError("config.json has no model_type")
    if document.get("is_encoder_decoder"):
        raise UnsupportedError("is_encoder_decoder=true: only decoders are trained")
    if document.get("quantization_config"):
        raise UnsupportedError("quantization_config: its weights are quantized")
    if "text_config" in document:
        raise UnsupportedError("text_config: it is a multimodal model")
    classes = document.get("architectures") or []
    if classes and not any(str(name).endswith(_CAUSAL) for name in classes):
        raise UnsupportedError(
            f"architectures={shown(classes)}: no causal language model, whose class ends with "
            f"{' or '.join(_CAUSAL)}"
        )


def read_config(folder: Path) -> Json:
    """Return the config.json of a folder. Raises UnsupportedError if it is missing or no JSON object."""
    try:
        document = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except OSError as error:
        raise UnsupportedError(f"config.json cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise UnsupportedError(f"config.json is not JSON: {error}") from error
    if not isinstance(document, dict):
        raise UnsupportedError("config.json holds no object")
    return document


def write_shape(model: Model) -> Json:
    """Return the config.json of a resolved shape, without the numbers of special tokens.

    Raises:
        UnsupportedError: no family of transformers has this shape.
    """
    if model.position == "learned":
        return _write_gpt2(model)
    return _write_llama(model)


def _need(document: Json, key: str) -> Any:
    if key not in document:
        raise UnsupportedError(f"config.json has no {key}")
    return document[key]


def _require(document: Json, key: str, usual: Any, *others: Any) -> None:
    """Refuse a value that changes the computation."""
    value = document.get(key, usual)
    if value not in (usual, *others):
        raise UnsupportedError(f"{key}={shown(value)}: only {shown(usual)} is supported")


# --- Llama, Mistral, Qwen2, Qwen3, Mixtral, Qwen3-MoE ---------------------------------------------------


def _read_llama(document: Json) -> Json:
    bias = document.get("attention_bias", False)
    if document.get("mlp_bias", False) != bias:
        raise UnsupportedError(f"attention_bias={shown(bias)} and mlp_bias differ")
    return _read_common(document, kv_heads=None) | {"bias": bias}


def _read_mistral(document: Json) -> Json:
    window = document.get("sliding_window", 4096)
    longest = document.get("max_position_embeddings", 131072)
    idle = window is None or window >= longest
    values = _read_common(document | {"max_position_embeddings": longest}, kv_heads=8)
    return values | {"sliding_window": None if idle else window}


def _read_qwen2(document: Json) -> Json:
    _require(document, "use_sliding_window", False)
    return _read_common(document, kv_heads=32) | {"qkv_bias": True}


def _read_qwen3(document: Json) -> Json:
    _require(document, "use_sliding_window", False)
    _require(document, "attention_bias", False)
    values = _read_common(document, kv_heads=32) | {"qk_norm": True}
    return values | {"head_dim": document.get("head_dim", 128)}


def _read_mixtral(document: Json) -> Json:
    usual = {"sliding_window": None, "rope_theta": 1e6, "rms_norm_eps": 1e-5}
    values = _read_mistral(usual | document)
    return values | _read_experts(document, "num_local_experts", experts=8, taken=2)


def _read_qwen3_moe(document: Json) -> Json:
    """Read a Qwen3-MoE; its `intermediate_size` is that of blocks without experts, of which there must be
    none."""
    _require(document, "use_sliding_window", False)
    _require(document, "attention_bias", False)
    _require(document, "decoder_sparse_step", 1)
    _require(document, "mlp_only_layers", [], None)
    if document.get("norm_topk_prob", False) is not True:
        raise UnsupportedError(
            "norm_topk_prob=false: only true is supported: the weights of a token add up to 1"
        )
    key = "num_experts" if "num_experts" in document else "num_local_experts"
    ffn = document.get("moe_intermediate_size", 768)
    values = _read_common(document | {"intermediate_size": ffn}, kv_heads=4) | {"qk_norm": True}
    return values | _read_experts(document, key, experts=128, taken=8)


def _read_experts(document: Json, key: str, experts: int, taken: int) -> Json:
    """Read the experts' keys; `experts` and `taken` are transformers' defaults."""
    _require(document, "router_jitter_noise", 0.0)
    _require(document, "output_router_logits", False)  # with it their loss has another part
    return {
        "experts": document.get(key, experts),
        "experts_per_token": document.get("num_experts_per_tok", taken),
    }


def _read_common(document: Json, kv_heads: int | None) -> Json:
    """Read the shared keys; `kv_heads` is transformers' default."""
    _require(document, "hidden_act", "silu", "swish")
    return {
        "layers": _need(document, "num_hidden_layers"),
        "hidden": _need(document, "hidden_size"),
        "heads": _need(document, "num_attention_heads"),
        "kv_heads": document.get("num_key_value_heads", kv_heads),
        "head_dim": document.get("head_dim"),
        "ffn": _need(document, "intermediate_size"),
        "vocab": _need(document, "vocab_size"),
        "max_seq_len": _need(document, "max_position_embeddings"),
        "norm": "rmsnorm",
        "norm_eps": document.get("rms_norm_eps", 1e-6),
        "mlp": "swiglu",
        "position": "rope",
        "tie_embeddings": document.get("tie_word_embeddings", False),
        "init_std": document.get("initializer_range", 0.02),
        **_read_rope(document),
    }


def _read_rope(document: Json) -> Json:
    """Read `rope_parameters`, or the older `rope_theta` and `rope_scaling`."""
    rope = document.get("rope_parameters") or document.get("rope_scaling") or {}
    if not isinstance(rope, dict):
        raise UnsupportedError("rope_scaling is not an object")
    _require(document | rope, "partial_rotary_factor", 1.0, None)
    theta = rope.get("rope_theta", document.get("rope_theta", 10000.0))
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind not in ("default", "llama3"):
        raise UnsupportedError(f"rope_type={shown(kind)}: only default and llama3 are supported")
    scaling = None
    if kind == "llama3":
        scaling = {
            "factor": _need(rope, "factor"),
            "low_freq_factor": _need(rope, "low_freq_factor"),
            "high_freq_factor": _need(rope, "high_freq_factor"),
            "original_seq_len": _need(rope, "original_max_position_embeddings"),
        }
    return {"rope_theta": theta, "rope_scaling": scaling}


def _write_llama(model: Model) -> Json:
    if (model.norm, model.mlp) != ("rmsnorm", "swiglu"):
        raise UnsupportedError(
            f"no family has rotary positions with model.norm={model.norm} and model.mlp={model.mlp}"
        )
    document = {
        "num_hidden_layers": model.layers,
        "hidden_size": model.hidden,
        "num_attention_heads": model.heads,
        "num_key_value_heads": model.kv_head_count,
        "head_dim": model.head_width,
        "intermediate_size": model.ffn,
        "vocab_size": model.vocab,
        "max_position_embeddings": model.max_seq_len,
        "rms_norm_eps": model.norm_eps,
        "hidden_act": "silu",
        "rope_theta": model.rope_theta,
        "rope_scaling": _write_scaling(model.rope_scaling),
        "tie_word_embeddings": model.tie_embeddings,
        # larger values are refused, and it initializes nothing here
        "initializer_range": min(model.init_std, 1.0),
        "attention_dropout": 0.0,
    }
    return _family(model) | document


def _family(model: Model) -> Json:
    """Return the keys by which families differ; no family has several of these options together."""
    if model.experts:
        return _family_of_experts(model)
    options = {
        "model.bias": model.bias,
        "model.qkv_bias": model.qkv_bias,
        "model.qk_norm": model.qk_norm,
        "model.sliding_window": model.sliding_window is not None,
    }
    taken = [key for key, is_set in options.items() if is_set]
    if len(taken) > 1:
        raise UnsupportedError(f"no family has both {' and '.join(taken)}")
    if model.qkv_bias:
        return _named("qwen2", "Qwen2ForCausalLM") | {"use_sliding_window": False}
    if model.qk_norm:
        return _named("qwen3", "Qwen3ForCausalLM") | {
            "use_sliding_window": False,
            "attention_bias": False,
        }
    # Llama's configuration refuses heads that do not divide the hidden size. A Mistral without a window
    # computes the same, and accepts any head_dim.
    uneven = model.hidden % model.heads != 0
    if model.sliding_window is not None or (uneven and not model.bias):
        return _named("mistral", "MistralForCausalLM") | {"sliding_window": model.sliding_window}
    if uneven:
        raise UnsupportedError(
            f"Llama is the family with model.bias, and its model.hidden={model.hidden} must be a multiple "
            f"of model.heads={model.heads}"
        )
    bias = {"attention_bias": model.bias, "mlp_bias": model.bias}
    return _named("llama", "LlamaForCausalLM") | bias


def _family_of_experts(model: Model) -> Json:
    for key, idle in (("bias", False), ("qkv_bias", False)):
        if getattr(model, key) != idle:
            raise UnsupportedError(f"no family has both model.experts and model.{key}")
    taken = {"num_experts_per_tok": model.experts_per_token, "output_router_logits": False}
    if not model.qk_norm:
        return (
            _named("mixtral", "MixtralForCausalLM")
            | taken
            | {
                "num_local_experts": model.experts,
                "sliding_window": model.sliding_window,
                "router_jitter_noise": 0.0,
            }
        )
    if model.sliding_window is not None:
        raise UnsupportedError(
            "no family has model.experts, model.qk_norm and model.sliding_window"
        )
    return (
        _named("qwen3_moe", "Qwen3MoeForCausalLM")
        | taken
        | {
            "num_experts": model.experts,
            "moe_intermediate_size": model.ffn,
            "norm_topk_prob": True,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
            "use_sliding_window": False,
            "attention_bias": False,
        }
    )


def _named(family: str, architecture: str) -> Json:
    return {"model_type": family, "architectures": [architecture]}


def _write_scaling(scaling: RopeScaling | None) -> Json | None:
    if scaling is None:
        return None
    values = asdict(scaling)
    original = values.pop("original_seq_len")
    return {"rope_type": "llama3", **values, "original_max_position_embeddings": original}


# --- GPT-2 ----------------------------------------------------------------------------------------


def _read_gpt2(document: Json) -> Json:
    # `gelu_pytorch_tanh` is the same function.
    _require(document, "activation_function", "gelu_new", "gelu_pytorch_tanh")
    _require(document, "scale_attn_weights", True)
    _require(document, "scale_attn_by_inverse_layer_idx", False)
    _require(document, "add_cross_attention", False)
    hidden = _need(document, "n_embd")
    return {
        "layers": _need(document, "n_layer"),
        "hidden": hidden,
        "heads": _need(document, "n_head"),
        "kv_heads": document["n_head"],
        "ffn": document.get("n_inner") or 4 * hidden,
        "vocab": _need(document, "vocab_size"),
        "max_seq_len": document.get("n_positions", 1024),
        "norm": "layernorm",
        "norm_eps": document.get("layer_norm_epsilon", 1e-5),
        "mlp": "gelu",
        "position": "learned",
        "bias": True,
        "tie_embeddings": document.get("tie_word_embeddings", True),
        "init_std": document.get("initializer_range", 0.02),
    }


def _write_gpt2(model: Model) -> Json:
    theirs = {
        "model.norm": (model.norm, "layernorm"),
        "model.mlp": (model.mlp, "gelu"),
        "model.bias": (model.bias, True),
        "model.qk_norm": (model.qk_norm, False),
        "model.sliding_window": (model.sliding_window, None),
        "model.kv_heads": (model.kv_head_count, model.heads),
        "model.head_dim": (model.head_width * model.heads, model.hidden),
    }  # fmt: skip
    unlike = [key for key, (ours, usual) in theirs.items() if ours != usual]
    if unlike:
        raise UnsupportedError(
            f"GPT-2 is the family with learned positions, and {', '.join(unlike)} differs from it"
        )
    return _named("gpt2", "GPT2LMHeadModel") | {
        "n_layer": model.layers,
        "n_embd": model.hidden,
        "n_head": model.heads,
        "n_inner": model.ffn,
        "vocab_size": model.vocab,
        "n_positions": model.max_seq_len,
        "layer_norm_epsilon": model.norm_eps,
        "activation_function": "gelu_new",
        "tie_word_embeddings": model.tie_embeddings,
        "initializer_range": model.init_std,
        "attn_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "resid_pdrop": 0.0,
    }


_READ: dict[str, Callable[[Json], Json]] = {
    "llama": _read_llama,
    "mistral": _read_mistral,
    "qwen2": _read_qwen2,
    "qwen3": _read_qwen3,
    "mixtral": _read_mixtral,
    "qwen3_moe": _read_qwen3_moe,
    "gpt2": _read_gpt2,
}
FAMILIES = frozenset(_READ)
"""The values of `model_type` that our own transformer supports."""

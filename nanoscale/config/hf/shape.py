"""Conversion between the config.json of a Hugging Face model and `config.schema.Model`.

Settings that our shape cannot express are refused by name: nothing is dropped silently.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from nanoscale.common.errors import reason
from nanoscale.config.hf.safetensors_headers import BadFileError, are_equal, read_folder
from nanoscale.config.schema import Model
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


@dataclass(frozen=True)
class _Key:
    """A setting that is a key of the model."""

    name: str
    usual: Any = ...
    """transformers' default; an ellipsis if the setting must be present."""


@dataclass(frozen=True)
class _Only:
    """A setting with one supported value, and other spellings of it."""

    value: Any
    others: tuple[Any, ...] = ()
    is_read: bool = True
    is_written: bool = True


Settings = dict[str, _Key | _Only]
_LLAMA: Settings = {
    "num_hidden_layers": _Key("layers"),
    "hidden_size": _Key("hidden"),
    "num_attention_heads": _Key("heads"),
    "num_key_value_heads": _Key("kv_heads", None),
    "head_dim": _Key("head_dim", None),
    "intermediate_size": _Key("ffn"),
    "vocab_size": _Key("vocab"),
    "max_position_embeddings": _Key("max_seq_len"),
    "rms_norm_eps": _Key("norm_eps", 1e-6),
    "hidden_act": _Only("silu", ("swish",)),
    "rope_theta": _Key("rope_theta", 10000.0),
    "rope_scaling": _Key("rope_scaling", None),
    "tie_word_embeddings": _Key("tie_embeddings", False),
    "initializer_range": _Key("init_std", 0.02),
    "attention_dropout": _Only(0.0, is_read=False),
}
_GPT2: Settings = {
    "scale_attn_weights": _Only(True, is_written=False),
    "scale_attn_by_inverse_layer_idx": _Only(False, is_written=False),
    "add_cross_attention": _Only(False, is_written=False),
    "n_layer": _Key("layers"),
    "n_embd": _Key("hidden"),
    "n_head": _Key("heads"),
    "n_inner": _Key("ffn", None),
    "vocab_size": _Key("vocab"),
    "n_positions": _Key("max_seq_len", 1024),
    "layer_norm_epsilon": _Key("norm_eps", 1e-5),
    "activation_function": _Only("gelu_new", ("gelu_pytorch_tanh",)),  # the same function
    "tie_word_embeddings": _Key("tie_embeddings", True),
    "initializer_range": _Key("init_std", 0.02),
    **dict.fromkeys(("attn_pdrop", "embd_pdrop", "resid_pdrop"), _Only(0.0, is_read=False)),
}
_NO_WINDOW: Settings = {"use_sliding_window": _Only(False)}
_NO_WINDOW_OR_BIAS = _NO_WINDOW | {"attention_bias": _Only(False)}
_EXPERTS: Settings = {
    "num_experts_per_tok": _Key("experts_per_token"),
    "output_router_logits": _Only(False),  # with it their loss has another part
}
_ROPE = {"norm": "rmsnorm", "mlp": "swiglu", "position": "rope"}


@dataclass(frozen=True)
class _Family:
    """One `model_type`: its config.json, which is read and written by the same table."""

    architecture: str
    settings: Settings
    """The settings, in the order in which they are written."""
    implied: Json
    """The keys of the model that have the same value in the whole family."""


def _like_llama(architecture: str, own: Settings, usual: Json, **implied: Any) -> _Family:
    """Return a family with settings of its own, and other defaults by the keys of the model."""
    settings = {
        name: replace(it, usual=usual.get(it.name, it.usual)) if isinstance(it, _Key) else it
        for name, it in (own | _LLAMA).items()
    }
    return _Family(architecture, settings, _ROPE | implied)


_BIAS = _Key("bias", False)
_WINDOW: Settings = {"sliding_window": _Key("sliding_window", None)}
_FAMILIES = {
    "llama": _like_llama("LlamaForCausalLM", {"attention_bias": _BIAS, "mlp_bias": _BIAS}, {}),
    "mistral": _like_llama(
        "MistralForCausalLM",
        _WINDOW,
        {"kv_heads": 8, "max_seq_len": 131072, "sliding_window": 4096},
    ),
    "qwen2": _like_llama("Qwen2ForCausalLM", _NO_WINDOW, {"kv_heads": 32}, qkv_bias=True),
    "qwen3": _like_llama(
        "Qwen3ForCausalLM", _NO_WINDOW_OR_BIAS, {"kv_heads": 32, "head_dim": 128}, qk_norm=True
    ),
    "mixtral": _like_llama(
        "MixtralForCausalLM",
        _EXPERTS
        | {"num_local_experts": _Key("experts", 8)}
        | _WINDOW
        | {"router_jitter_noise": _Only(0.0)},
        {
            "kv_heads": 8,
            "max_seq_len": 131072,
            "norm_eps": 1e-5,
            "rope_theta": 1e6,
            "experts_per_token": 2,
        },
    ),
    "qwen3_moe": _like_llama(
        "Qwen3MoeForCausalLM",
        _EXPERTS
        | {
            "num_experts": _Key("experts", 128),
            "moe_intermediate_size": _Key("ffn", 768),
            "norm_topk_prob": _Only(True),
            "decoder_sparse_step": _Only(1),
            "mlp_only_layers": _Only([], (None,)),
            "router_jitter_noise": _Only(0.0, is_written=False),
        }
        | _NO_WINDOW_OR_BIAS,
        {"kv_heads": 4, "experts_per_token": 8},
        qk_norm=True,
    ),
    "gpt2": _Family(
        "GPT2LMHeadModel",
        _GPT2,
        {"norm": "layernorm", "mlp": "gelu", "position": "learned", "bias": True},
    ),
}
FAMILIES = frozenset(_FAMILIES)
"""The values of `model_type` that our own transformer supports."""
_LLAMA3 = {
    "factor": "factor",
    "low_freq_factor": "low_freq_factor",
    "high_freq_factor": "high_freq_factor",
    "original_seq_len": "original_max_position_embeddings",
}
"""The keys of `model.rope_scaling`, and their names in config.json."""


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
    if family not in _FAMILIES:
        families = ", ".join(_FAMILIES)
        raise UnsupportedError(f"model_type={shown(family)} is not one of the families {families}")
    if "quantization_config" in document:
        raise UnsupportedError("quantization_config: its weights are quantized")
    values = _read(_FAMILIES[family], document) | {"name": folder.name}
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
        raise UnsupportedError(f"config.json cannot be read: {reason(error)}") from error
    except ValueError as error:
        raise UnsupportedError(f"config.json is not JSON: {error}") from error
    if not isinstance(document, dict):
        raise UnsupportedError("config.json holds no object")
    return document


def _need(document: Json, key: str) -> Any:
    if key not in document:
        raise UnsupportedError(f"config.json has no {key}")
    return document[key]


def _require(document: Json, key: str, value: Any, others: tuple[Any, ...] = ()) -> None:
    """Refuse a value that changes the computation."""
    given = document.get(key, value)
    if given not in (value, *others):
        raise UnsupportedError(f"{key}={shown(given)}: only {shown(value)} is supported")


def _read(family: _Family, document: Json) -> Json:
    """Return the keys of the model that config.json sets, or that its family has by default."""
    if "norm_topk_prob" in family.settings and document.get("norm_topk_prob") is not True:
        raise UnsupportedError(
            "norm_topk_prob=false: only true is supported: the weights of a token add up to 1"
        )
    for name, setting in family.settings.items():
        if isinstance(setting, _Only) and setting.is_read:
            _require(document, name, setting.value, setting.others)
    if "n_inner" in family.settings:
        document = document | {"n_inner": document.get("n_inner") or 4 * _need(document, "n_embd")}
    if "moe_intermediate_size" in family.settings:
        # Its `intermediate_size` is that of blocks without experts, and there are none.
        document = {"num_experts": document.get("num_local_experts", 128)} | document
        document["intermediate_size"] = document.get("moe_intermediate_size", 768)
    values: Json = dict(family.implied)
    for name, setting in family.settings.items():
        if isinstance(setting, _Key):
            needed = setting.usual is ...
            given = _need(document, name) if needed else document.get(name, setting.usual)
            if name == "mlp_bias" and given != values["bias"]:
                raise UnsupportedError(
                    f"attention_bias={shown(values['bias'])} and mlp_bias differ"
                )
            values.setdefault(setting.name, given)
    values.setdefault("kv_heads", values["heads"])
    if values["position"] == "rope":
        values |= _read_rope(document, values["rope_theta"])
    window = values.get("sliding_window")
    if window is not None and window >= values["max_seq_len"]:
        values["sliding_window"] = None
    return values


def _read_rope(document: Json, theta: Any) -> Json:
    """Read `rope_parameters`, or the older `rope_theta` and `rope_scaling`."""
    rope = document.get("rope_parameters") or document.get("rope_scaling") or {}
    if not isinstance(rope, dict):
        raise UnsupportedError("rope_scaling is not an object")
    _require(document | rope, "partial_rotary_factor", 1.0, (None,))
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind not in ("default", "llama3"):
        raise UnsupportedError(f"rope_type={shown(kind)}: only default and llama3 are supported")
    scaling = None
    if kind == "llama3":
        scaling = {key: _need(rope, name) for key, name in _LLAMA3.items()}
    return {"rope_theta": rope.get("rope_theta", theta), "rope_scaling": scaling}


def write_shape(model: Model) -> Json:
    """Return the config.json of a resolved shape, without the numbers of special tokens.

    Raises:
        UnsupportedError: no family of transformers has this shape.
    """
    name = _family_of(model)
    family, values = _FAMILIES[name], asdict(model)
    values |= {"kv_heads": model.kv_head_count, "head_dim": model.head_width}
    if model.rope_scaling is not None:
        scaling = {hf: values["rope_scaling"][key] for key, hf in _LLAMA3.items()}
        values["rope_scaling"] = {"rope_type": "llama3", **scaling}
    if model.position == "rope":  # larger values are refused, and it initializes nothing here
        values["init_std"] = min(model.init_std, 1.0)
    return {"model_type": name, "architectures": [family.architecture]} | {
        hf: values[setting.name] if isinstance(setting, _Key) else setting.value
        for hf, setting in family.settings.items()
        if isinstance(setting, _Key) or setting.is_written
    }


def _family_of(model: Model) -> str:
    """Return the family with this shape; no family has several of the options together.

    Raises:
        UnsupportedError: there is none.
    """
    if model.position == "learned":
        _require_gpt2(model)
        return "gpt2"
    if (model.norm, model.mlp) != ("rmsnorm", "swiglu"):
        raise UnsupportedError(
            f"no family has rotary positions with model.norm={model.norm} and model.mlp={model.mlp}"
        )
    names = ("bias", "qkv_bias", "qk_norm", "sliding_window")
    options = [f"model.{name}" for name in names if getattr(model, name)]
    if model.experts:
        return _family_of_experts(options)
    if len(options) > 1:
        raise UnsupportedError(f"no family has both {' and '.join(options)}")
    if model.qkv_bias:
        return "qwen2"
    if model.qk_norm:
        return "qwen3"
    # Llama's configuration refuses heads that do not divide the hidden size. A Mistral without a window
    # computes the same, and accepts any head_dim.
    is_uneven = model.hidden % model.heads != 0
    if model.sliding_window is not None or (is_uneven and not model.bias):
        return "mistral"
    if is_uneven:
        raise UnsupportedError(
            f"Llama is the family with model.bias, and its model.hidden={model.hidden} must be a multiple "
            f"of model.heads={model.heads}"
        )
    return "llama"


def _family_of_experts(options: list[str]) -> str:
    for key in ("model.bias", "model.qkv_bias"):
        if key in options:
            raise UnsupportedError(f"no family has both model.experts and {key}")
    if options == ["model.qk_norm", "model.sliding_window"]:
        raise UnsupportedError(f"no family has model.experts, {' and '.join(options)}")
    return "qwen3_moe" if "model.qk_norm" in options else "mixtral"


def _require_gpt2(model: Model) -> None:
    pairs = {
        "model.norm": (model.norm, "layernorm"),
        "model.mlp": (model.mlp, "gelu"),
        "model.bias": (model.bias, True),
        "model.qk_norm": (model.qk_norm, False),
        "model.sliding_window": (model.sliding_window, None),
        "model.kv_heads": (model.kv_head_count, model.heads),
        "model.head_dim": (model.head_width * model.heads, model.hidden),
    }  # fmt: skip
    unlike = [key for key, (ours, usual) in pairs.items() if ours != usual]
    if unlike:
        raise UnsupportedError(
            f"GPT-2 is the family with learned positions, and {', '.join(unlike)} differs from it"
        )

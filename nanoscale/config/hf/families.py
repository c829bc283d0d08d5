"""The families of transformers that our transformer computes: a row for each `model_type`.

A row says how a config.json of the family is read and written. `config.hf.shape` needs nothing else of a
family, and `checkpoint.hf.names` needs the names of its tensors.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from nanoscale.config.schema import Model
from nanoscale.config.violations import shown

Json = dict[str, Any]


class UnsupportedError(Exception):
    """A model that the other side cannot express; the text names the setting."""


def _same(value: Any) -> Any:
    return value


@dataclass(frozen=True)
class HFKey:
    """A setting that is a key of the model."""

    name: str
    usual: Any = ...
    """transformers' default; an ellipsis if the setting must be present."""
    read: Callable[[Any], Any] = _same
    """A function from the setting to the key."""
    write: Callable[[Any], Any] = _same


@dataclass(frozen=True)
class HFOnly:
    """A setting with one supported value, and other spellings of it."""

    value: Any
    others: tuple[Any, ...] = ()
    is_read: bool = True
    is_written: bool = True


@dataclass(frozen=True)
class HFRule:
    """Keys that follow from several settings, or settings that follow from several keys."""

    read: Callable[[Json, Json], Json]
    """A function from config.json and the keys read so far to further keys. It may raise UnsupportedError."""
    write: Callable[[Model, Json], Json] = lambda *_: {}
    """A function from a model and the settings written so far to further settings."""


Settings = Mapping[str, HFKey | HFOnly]


@dataclass(frozen=True)
class Family:
    """One `model_type`: its config.json, which is read and written by the same table."""

    architecture: str
    settings: Settings
    """The settings, in the order in which they are written."""
    implied: Json
    """The keys of the model that have the same value in the whole family."""
    rules: tuple[HFRule, ...] = ()


_LLAMA: Settings = {
    "num_hidden_layers": HFKey("layers"),
    "hidden_size": HFKey("hidden"),
    "num_attention_heads": HFKey("heads"),
    "num_key_value_heads": HFKey("kv_heads", None),
    "head_dim": HFKey("head_dim", None),
    "intermediate_size": HFKey("ffn"),
    "vocab_size": HFKey("vocab"),
    "max_position_embeddings": HFKey("max_seq_len"),
    "rms_norm_eps": HFKey("norm_eps", 1e-6),
    "hidden_act": HFOnly("silu", ("swish",)),
    "rope_theta": HFKey("rope_theta", 10000.0),
    "tie_word_embeddings": HFKey("tie_embeddings", False),
    "initializer_range": HFKey("init_std", 0.02),
    "attention_dropout": HFOnly(0.0, is_read=False),
}
_GPT2: Settings = {
    "scale_attn_weights": HFOnly(True, is_written=False),
    "scale_attn_by_inverse_layer_idx": HFOnly(False, is_written=False),
    "add_cross_attention": HFOnly(False, is_written=False),
    "n_layer": HFKey("layers"),
    "n_embd": HFKey("hidden"),
    "n_head": HFKey("heads"),
    "n_inner": HFKey("ffn", None),
    "vocab_size": HFKey("vocab"),
    "n_positions": HFKey("max_seq_len", 1024),
    "layer_norm_epsilon": HFKey("norm_eps", 1e-5),
    "activation_function": HFOnly("gelu_new", ("gelu_pytorch_tanh",)),  # the same function
    "tie_word_embeddings": HFKey("tie_embeddings", True),
    "initializer_range": HFKey("init_std", 0.02),
    **dict.fromkeys(("attn_pdrop", "embd_pdrop", "resid_pdrop"), HFOnly(0.0, is_read=False)),
}
_NO_WINDOW: Settings = {"use_sliding_window": HFOnly(False)}
_NO_BIAS: Settings = {"attention_bias": HFOnly(False)}
_BIASES: Settings = {"attention_bias": HFKey("bias", False), "mlp_bias": HFKey("bias", False)}
_WINDOW: Settings = {"sliding_window": HFKey("sliding_window", None)}
_EXPERTS: Settings = {
    "num_experts_per_tok": HFKey("experts_per_token"),
    "output_router_logits": HFOnly(False),  # with it their loss has another part
}
# Their `intermediate_size` is the width of blocks without experts, and there are none.
_QWEN_EXPERTS: Settings = {
    **_EXPERTS,
    "num_experts": HFKey("experts"),
    "moe_intermediate_size": HFKey("ffn"),
    "norm_topk_prob": HFKey("normalize_experts", False),
    "decoder_sparse_step": HFOnly(1),
    "mlp_only_layers": HFOnly([], (None,)),
    "router_jitter_noise": HFOnly(0.0, is_written=False),
    **_NO_WINDOW,
}


_GROUPED_EXPERTS: Settings = {
    **_EXPERTS,
    "n_routed_experts": HFKey("experts"),
    "moe_intermediate_size": HFKey("ffn"),
    "intermediate_size": HFKey("dense_ffn"),
    "first_k_dense_replace": HFKey("dense_layers"),
    "norm_topk_prob": HFKey("normalize_experts", True),
    "routed_scaling_factor": HFKey("expert_scale"),
    "n_group": HFKey("expert_groups"),
    "topk_group": HFKey("expert_groups_per_token"),
}


def _both_biases(document: Json, values: Json) -> Json:
    if document.get("mlp_bias", False) != values["bias"]:
        raise UnsupportedError(f"attention_bias={shown(values['bias'])} and mlp_bias differ")
    return {}


def _whole_heads(_: Json, values: Json) -> Json:
    if values["hidden"] % values["heads"]:
        raise UnsupportedError(
            f"hidden_size={values['hidden']} must be a multiple of num_attention_heads={values['heads']}"
        )
    return {}


def _four_times_hidden(_: Json, values: Json) -> Json:
    return {"ffn": values["ffn"] or 4 * values["hidden"]}


def _expert_number(document: Json, values: Json) -> Json:
    """transformers reads `num_local_experts` as another name of their number."""
    return {
        "experts": document.get("num_experts", document.get("num_local_experts", values["experts"]))
    }


def _write_shared_experts(model: Model, _: Json) -> Json:
    if model.shared_ffn % model.ffn:
        text = f"model.shared_ffn={model.shared_ffn} must be a multiple of model.ffn={model.ffn}"
        raise UnsupportedError(text)
    return {"n_shared_experts": model.shared_ffn // model.ffn}


_SHARED_EXPERTS = HFRule(
    lambda document, values: {"shared_ffn": document.get("n_shared_experts", 1) * values["ffn"]},
    _write_shared_experts,
)


def _layer_types(every: int) -> HFRule:
    """Return the rule of `layer_types`: every n-th layer has no window; `every` is the family's default."""

    def read(document: Json, values: Json) -> Json:
        layers = values["layers"]
        default = [_name(every, layer) for layer in range(layers)]
        kinds = document.get("layer_types") or default
        if set(kinds) == {"full_attention"}:
            return {"full_attention_every": 0, "sliding_window": None}
        found = kinds.index("full_attention") + 1 if "full_attention" in kinds else 0
        if kinds != [_name(found, layer) for layer in range(layers)]:
            raise UnsupportedError(
                f"layer_types={shown(kinds)}: only full attention in every n-th layer is supported"
            )
        return {"full_attention_every": found}

    def write(model: Model, _: Json) -> Json:
        kinds = [model.has_window(layer) for layer in range(model.layers)]
        names = ["sliding_attention" if each else "full_attention" for each in kinds]
        return {"layer_types": names} | ({} if any(kinds) else {"sliding_window": 4096})

    return HFRule(read, write)


def _name(every: int, layer: int) -> str:
    return "full_attention" if every and (layer + 1) % every == 0 else "sliding_attention"


def _read_rotated_layers(document: Json, values: Json) -> Json:
    every, layers = document.get("no_rope_layer_interval", 4), values["layers"]
    kinds = document.get("no_rope_layers") or [int((i + 1) % every != 0) for i in range(layers)]
    found = kinds.index(0) + 1 if 0 in kinds else 0
    if kinds != [int(not found or (i + 1) % found != 0) for i in range(layers)]:
        raise UnsupportedError(
            f"no_rope_layers={shown(kinds)}: only every n-th layer without positions is supported"
        )
    return {"rope_skip": found}


def _write_rotated_layers(model: Model, _: Json) -> Json:
    return {"no_rope_layers": [int(model.has_rotation(layer)) for layer in range(model.layers)]}


def _read_latent_heads(document: Json, values: Json) -> Json:
    """Their `head_dim` is the rotated part; YaRN's `mscale_all_dim` scales attention's scores twice."""
    width = document.get("qk_nope_head_dim", 128) + values["rope_head_dim"]
    rope = document.get("rope_parameters") or document.get("rope_scaling") or {}
    if width < 1 or not isinstance(rope, dict):  # refused when they are converted
        return {"head_dim": width}
    return {"head_dim": width, "attention_scale": width**-0.5 * _length_scale(rope) ** 2}


def _length_scale(rope: Json) -> float:
    factor, scale = rope.get("factor") or 1.0, rope.get("mscale_all_dim") or 0.0
    return float(0.1 * scale * math.log(factor) + 1) if factor > 1 else 1.0


def _write_latent_heads(model: Model, document: Json) -> Json:
    rope, scale = document["rope_scaling"], model.attention_scale
    if scale is not None and rope is not None and rope["factor"] > 1:
        length_scale = math.sqrt(scale * math.sqrt(model.head_width))
        rope = rope | {"mscale_all_dim": (length_scale - 1) / (0.1 * math.log(rope["factor"]))}
    return {"qk_nope_head_dim": model.head_width - model.rope_head_dim, "rope_scaling": rope}


def _inverse_square(scale: float | None) -> Any:
    """Return the setting for a scale: 1 / scale², a whole number."""
    return None if scale is None else round(scale**-2)


# transformers reads `rope_theta` and `rope_scaling` for the layers without a window alone.
_UNSCALED_WINDOWS = HFRule(lambda *_: {"rope_theta_local": 500000.0})
# Without `rope_scaling` it would have YaRN.
_PLAIN_ROPE = HFRule(
    lambda *_: {},
    lambda _, document: {"rope_scaling": document["rope_scaling"] or {"rope_type": "default"}},
)
_SCALED_EMBEDDING = HFRule(lambda _, values: {"embed_scale": math.sqrt(values["hidden"])})


def _like_llama(
    architecture: str,
    own: Settings,
    usual: Json,
    *rules: HFRule,
    without: tuple[str, ...] = (),
    **implied: Any,
) -> Family:
    """Return a family with settings of its own, and other defaults by the keys of the model."""
    settings = {
        name: replace(it, usual=usual.get(it.name, it.usual)) if isinstance(it, HFKey) else it
        for name, it in {**own, **_LLAMA, **own}.items()
        if name not in without
    }
    return Family(architecture, settings, implied, rules)


_GEMMA: Json = {"norm": "rmsnorm1p", "mlp": "geglu"}
_GEMMA_USUAL: Json = {"kv_heads": 4, "head_dim": 256, "max_seq_len": 8192, "tie_embeddings": True}
_GEMMA_SETTINGS: Settings = {
    "hidden_activation": HFOnly("gelu_pytorch_tanh"),
    "query_pre_attn_scalar": HFKey("attention_scale", 256, lambda x: x**-0.5, _inverse_square),
    "sliding_window": HFKey("sliding_window", 4096),
    "final_logit_softcapping": HFKey("logit_softcap", 30.0),
    "attn_logit_softcapping": HFKey("attention_softcap", 50.0),
    "use_bidirectional_attention": HFOnly(False, (None,)),
    **_NO_BIAS,
}
_GLM_USUAL: Json = {"kv_heads": 2, "head_dim": 128, "norm_eps": 1.5625e-07, "max_seq_len": 131072}
_GLM_SETTINGS: Settings = {
    "attention_bias": HFKey("qkv_bias", True),
    "partial_rotary_factor": HFKey("rope_fraction", 0.5),
}
FAMILIES: dict[str, Family] = {
    "llama": _like_llama(
        "LlamaForCausalLM", _BIASES, {}, HFRule(_both_biases), HFRule(_whole_heads)
    ),
    "mistral": _like_llama(
        "MistralForCausalLM",
        _WINDOW,
        {"kv_heads": 8, "max_seq_len": 131072, "sliding_window": 4096},
    ),
    "qwen2": _like_llama("Qwen2ForCausalLM", _NO_WINDOW, {"kv_heads": 32}, qkv_bias=True),
    "qwen3": _like_llama(
        "Qwen3ForCausalLM",
        {**_NO_WINDOW, **_NO_BIAS},
        {"kv_heads": 32, "head_dim": 128},
        qk_norm=True,
    ),
    "mixtral": _like_llama(
        "MixtralForCausalLM",
        {
            **_EXPERTS,
            "num_local_experts": HFKey("experts", 8),
            **_WINDOW,
            "router_jitter_noise": HFOnly(0.0),
        },
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
        {**_QWEN_EXPERTS, **_NO_BIAS},
        {"kv_heads": 4, "experts": 128, "experts_per_token": 8, "ffn": 768},
        HFRule(_expert_number),
        qk_norm=True,
    ),
    "qwen2_moe": _like_llama(
        "Qwen2MoeForCausalLM",
        {
            **_QWEN_EXPERTS,
            "qkv_bias": HFKey("qkv_bias", True),
            "shared_expert_intermediate_size": HFKey("shared_ffn", 5632),
        },
        {"kv_heads": 16, "experts": 60, "experts_per_token": 4, "ffn": 1408, "max_seq_len": 32768},
        HFRule(_expert_number),
        shared_gate=True,
    ),
    "phi3": _like_llama(
        "Phi3ForCausalLM",
        {
            **_WINDOW,
            "partial_rotary_factor": HFKey("rope_fraction", 1.0),
            **dict.fromkeys(("resid_pdrop", "embd_pdrop"), HFOnly(0.0, is_read=False)),
        },
        {"norm_eps": 1e-5},
    ),
    "smollm3": _like_llama(
        "SmolLM3ForCausalLM",
        {**_NO_WINDOW, **_BIASES},
        {"kv_heads": 4, "rope_theta": 2e6, "tie_embeddings": True},
        HFRule(_both_biases),
        HFRule(_read_rotated_layers, _write_rotated_layers),
        HFRule(_whole_heads),
        without=("head_dim",),
    ),
    "granite": _like_llama(
        "GraniteForCausalLM",
        {
            **_BIASES,
            "embedding_multiplier": HFKey("embed_scale", 1.0),
            "attention_multiplier": HFKey("attention_scale", 1.0),
            "residual_multiplier": HFKey("residual_scale", 1.0),
            "logits_scaling": HFKey("logit_scale", 1.0, lambda x: 1 / x, lambda x: 1 / x),
        },
        {},
        HFRule(_both_biases),
    ),
    "glm": _like_llama("GlmForCausalLM", _GLM_SETTINGS, _GLM_USUAL, rope_pairs="neighbors"),
    "glm4": _like_llama(
        "Glm4ForCausalLM", _GLM_SETTINGS, _GLM_USUAL, rope_pairs="neighbors", norm_position="both"
    ),
    "glm4_moe": _like_llama(
        "Glm4MoeForCausalLM",
        {
            **_GROUPED_EXPERTS,
            "attention_bias": HFKey("qkv_bias", False),
            "use_qk_norm": HFKey("qk_norm", False),
            "partial_rotary_factor": HFKey("rope_fraction", 0.5),
        },
        {
            "kv_heads": 8,
            "norm_eps": 1e-5,
            "max_seq_len": 131072,
            "experts": 128,
            "experts_per_token": 8,
            "ffn": 1408,
            "dense_ffn": 10944,
            "dense_layers": 1,
            "expert_scale": 1.0,
            "expert_groups": 1,
            "expert_groups_per_token": 1,
        },
        _SHARED_EXPERTS,
        router="sigmoid",
    ),
    "deepseek_v3": _like_llama(
        "DeepseekV3ForCausalLM",
        {
            **_GROUPED_EXPERTS,
            **_NO_BIAS,
            "kv_lora_rank": HFKey("kv_rank", 512),
            "q_lora_rank": HFKey("q_rank", 1536),
            "qk_rope_head_dim": HFKey("rope_head_dim", 64),
            "v_head_dim": HFKey("v_head_dim", 128),
            "rope_interleave": HFKey(
                "rope_pairs",
                True,
                lambda is_interleaved: "neighbors" if is_interleaved else "halves",
                lambda pairs: pairs == "neighbors",
            ),
        },
        {
            "max_seq_len": 4096,
            "experts": 256,
            "experts_per_token": 8,
            "ffn": 2048,
            "dense_ffn": 18432,
            "dense_layers": 3,
            "expert_scale": 2.5,
            "expert_groups": 8,
            "expert_groups_per_token": 4,
        },
        _SHARED_EXPERTS,
        HFRule(_read_latent_heads, _write_latent_heads),
        without=("head_dim",),
        router="sigmoid",
    ),
    "gpt_oss": _like_llama(
        "GptOssForCausalLM",
        {
            **_EXPERTS,
            "num_local_experts": HFKey("experts", 128),
            "attention_bias": HFOnly(True),
            "sliding_window": HFKey("sliding_window", 128),
            "swiglu_limit": HFOnly(7.0),
            "swiglu_alpha": HFOnly(1.702, is_written=False),
        },
        {
            "kv_heads": 8,
            "head_dim": 64,
            "norm_eps": 1e-5,
            "max_seq_len": 131072,
            "rope_theta": 150000.0,
            "experts_per_token": 4,
        },
        _layer_types(2),
        _PLAIN_ROPE,
        mlp="swiglu-clamped",
        bias=True,
        attention_sinks=True,
    ),
    "olmo2": _like_llama(
        "Olmo2ForCausalLM",
        _NO_BIAS,
        {"norm_eps": 1e-5},
        qk_norm=True,
        qk_norm_whole=True,
        norm_position="after",
    ),
    "olmo3": _like_llama(
        "Olmo3ForCausalLM",
        {**_NO_BIAS, "sliding_window": HFKey("sliding_window", 4096)},
        {"norm_eps": 1e-5, "rope_theta": 500000.0},
        _layer_types(4),
        _UNSCALED_WINDOWS,
        qk_norm=True,
        qk_norm_whole=True,
        norm_position="after",
    ),
    "gemma": _like_llama(
        "GemmaForCausalLM",
        {
            "hidden_act": HFOnly("gelu_pytorch_tanh", ("gelu",)),
            "use_bidirectional_attention": HFOnly(False, (None,)),
            **_NO_BIAS,
        },
        _GEMMA_USUAL | {"kv_heads": 16},
        _SCALED_EMBEDDING,
        **_GEMMA,
    ),
    "gemma2": _like_llama(
        "Gemma2ForCausalLM",
        _GEMMA_SETTINGS,
        _GEMMA_USUAL,
        _layer_types(2),
        _SCALED_EMBEDDING,
        without=("hidden_act",),
        norm_position="both",
        **_GEMMA,
    ),
    "gemma3_text": _like_llama(
        "Gemma3ForCausalLM",
        {
            **_GEMMA_SETTINGS,
            "final_logit_softcapping": HFKey("logit_softcap", None),
            "attn_logit_softcapping": HFOnly(None),  # its code does not apply it
            "rope_local_base_freq": HFKey("rope_theta_local", 10000.0),
        },
        _GEMMA_USUAL
        | {"max_seq_len": 131072, "rope_theta": 1e6, "layers": 26, "hidden": 2304, "heads": 8}
        | {"ffn": 9216, "vocab": 262208},
        _layer_types(6),
        _SCALED_EMBEDDING,
        without=("hidden_act",),
        norm_position="both",
        qk_norm=True,
        **_GEMMA,
    ),
    "gpt2": Family(
        "GPT2LMHeadModel",
        _GPT2,
        {"norm": "layernorm", "mlp": "gelu", "position": "learned", "bias": True},
        (HFRule(_whole_heads), HFRule(_four_times_hidden)),
    ),
}
"""The families by `model_type`. A model that several of them compute is written as the first one."""

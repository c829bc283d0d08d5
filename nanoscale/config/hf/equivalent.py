"""The transformer of our own that a plan takes in the place of a model of transformers."""

import math
from contextlib import suppress
from dataclasses import replace
from typing import Any

from nanoscale.common.json_text import Json
from nanoscale.config.hf.families import UnsupportedError, families
from nanoscale.config.hf.shape import shape_of
from nanoscale.config.model_math import experts, parameters
from nanoscale.config.resolved import ResolvedConfig
from nanoscale.config.schema import Model

_RECURRENT_REACH = 256
"""The window of attention, in tokens, that costs as much as a layer with a recurrence."""
_UNIT = 64
"""Inner widths are multiples of it."""
_NAMES = {
    "experts_per_token": "num_experts_per_tok moe_topk moe_top_k top_k_experts",
    "ffn": "moe_intermediate_size expert_ffn_hidden_size",
    "shared_ffn": "shared_expert_intermediate_size moe_shared_expert_intermediate_size",
    "dense_layers": "first_k_dense_replace num_dense_layers",
    "kv_rank": "kv_lora_rank",
    "q_rank": "q_lora_rank",
    "rope_head_dim": "qk_rope_head_dim",
    "v_head_dim": "v_head_dim",
    "sliding_window": "sliding_window",
}
"""Keys of our own models, and their names in config.json."""
_known: dict[int, tuple[Model, Model]] = {}


def as_own(config: ResolvedConfig) -> ResolvedConfig:
    """Return the configuration with a model of our own that needs about as much memory and time.

    A family that we know has its own shape. Of others the sizes of attention and experts are taken from
    config.json, and a dense feed-forward layer has the parameters that are left. Layers with a recurrence
    count as attention with a short window.
    """
    model = config.model
    if model.source != "hf":
        return config
    if id(model) not in _known:
        _known[id(model)] = model, _equivalent(model)
    return replace(config, model=_known[id(model)][1], lora=replace(config.lora, targets=None))


def has_recurrences(model: Model) -> bool:
    """Return True if config.json names layers that pass a state from token to token."""
    names = ("linear", "mamba", "conv", "recurrent", "hybrid")
    return any(name in kind for kind in _kinds(model.hf_config) for name in names)


def _kinds(document: Json) -> list[str]:
    return document.get("layer_types") or document.get("layers_block_type") or []


def _equivalent(model: Model) -> Model:
    if model.hf_config.get("model_type") in families():
        with suppress(UnsupportedError):
            return replace(shape_of(model.hf_config), name=model.name)
    whole = _like(model)
    if not model.parameters:
        return whole
    filled = "shared_ffn" if whole.experts else "ffn"
    per_unit = 3 * model.hidden * (model.layers - whole.dense_layers)
    width = getattr(whole, filled) + (model.parameters - parameters(whole)) / per_unit
    if whole.experts and width < 0:  # some layers have no experts
        ffn = max(1, math.floor((whole.ffn + width / whole.experts) / _UNIT)) * _UNIT
        width += (whole.ffn - ffn) * whole.experts
        whole = replace(whole, ffn=ffn)
    least = 0 if whole.experts else _UNIT
    return replace(whole, **{filled: max(least, round(width / _UNIT) * _UNIT)})


def _like(model: Model) -> Model:
    document = model.hf_config
    values: dict[str, Any] = {}
    for key, names in _NAMES.items():
        numbers = [it for it in map(document.get, names.split()) if type(it) is int and it > 0]
        values |= {key: numbers[0]} if numbers else {}
    if count := experts(model):
        values |= {"experts": count, "dense_ffn": model.ffn}
        shared = document.get("n_shared_experts")
        if type(shared) is int and "shared_ffn" not in values:
            values["shared_ffn"] = shared * values.get("ffn", model.ffn)
        values["dense_layers"] = min(values.get("dense_layers", 0), model.layers - 1)
    else:
        of_experts = ("ffn", "shared_ffn", "dense_layers")
        values = {key: it for key, it in values.items() if key not in of_experts}
    if "kv_rank" in values:
        values["head_dim"] = values.get("rope_head_dim", 64) + document.get("qk_nope_head_dim", 128)
    kinds = _kinds(document)
    attending = sum("full" in it or it == "attention" for it in kinds)
    if kinds and attending < len(kinds):
        values["sliding_window"] = values.get("sliding_window") or _RECURRENT_REACH
        values["full_attention_every"] = round(len(kinds) / attending) if attending else 0
    elif kinds:
        values.pop("sliding_window", None)
    return replace(model, **({"source": "own", "hf_config": {}, "parameters": None} | values))

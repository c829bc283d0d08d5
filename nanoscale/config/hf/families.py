"""The families of transformers that our transformer computes: `families.yaml` has a row for each `model_type`.

A row says how a config.json of the family is read and written. `config.hf.shape` needs nothing else of a
family, and `checkpoint.hf.names` needs the names of its tensors.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from nanoscale.common.json_text import Json
from nanoscale.config.schema import Model
from nanoscale.config.values import yaml_file
from nanoscale.config.violations import shown


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


@dataclass(frozen=True)
class Family:
    """One `model_type`: its config.json, which is read and written by the same table."""

    architecture: str
    settings: Mapping[str, HFKey | HFOnly]
    """The settings, in the order in which they are written."""
    implied: Json
    """The keys of the model that have the same value in the whole family."""
    rules: tuple[HFRule, ...] = ()


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


_CONVERSIONS: dict[str, tuple[Callable[[Any], Any], Callable[[Any], Any]]] = {
    "inverse": (lambda x: 1 / x, lambda x: 1 / x),
    "inverse square": (lambda x: x**-0.5, _inverse_square),
    "pairs": (
        lambda neighbors: "neighbors" if neighbors else "halves",
        lambda it: it == "neighbors",
    ),
}
"""Functions from a setting to a key, and back."""
RULES = {
    "equal biases": HFRule(_both_biases),
    "whole heads": HFRule(_whole_heads),
    "four times hidden": HFRule(_four_times_hidden),
    "number of experts": HFRule(_expert_number),
    "shared experts": HFRule(
        lambda document, values: {
            "shared_ffn": document.get("n_shared_experts", 1) * values["ffn"]
        },
        _write_shared_experts,
    ),
    "full attention in each 2nd layer": _layer_types(2),
    "full attention in each 4th layer": _layer_types(4),
    "full attention in each 6th layer": _layer_types(6),
    "rotated layers": HFRule(_read_rotated_layers, _write_rotated_layers),
    "latent heads": HFRule(_read_latent_heads, _write_latent_heads),
    # transformers reads `rope_theta` and `rope_scaling` for the layers without a window alone.
    "unscaled windows": HFRule(lambda *_: {"rope_theta_local": 500000.0}),
    # Without `rope_scaling` it would have YaRN.
    "plain rope": HFRule(
        lambda *_: {},
        lambda _, document: {"rope_scaling": document["rope_scaling"] or {"rope_type": "default"}},
    ),
    "scaled embedding": HFRule(lambda _, values: {"embed_scale": math.sqrt(values["hidden"])}),
}


@cache
def families() -> dict[str, Family]:
    """Return the families by `model_type`, in the order of `families.yaml`."""
    table = yaml_file.read(Path(__file__).with_suffix(".yaml")).content
    return {name: _family(row, table["shared"]) for name, row in table["families"].items()}


def _family(row: Json, shared: Json) -> Family:
    own: Json = {}
    for name in row.get("shared", ()):
        own |= shared[name]
    own |= row.get("settings", {})
    usual, without = row.get("usual", {}), row.get("without", ())
    settings = {
        name: _setting(it, usual)
        for name, it in {**own, **shared[row.get("base", "llama")], **own}.items()
        if name not in without
    }
    rules = tuple(RULES[name] for name in row.get("rules", ()))
    return Family(row["architecture"], settings, row.get("implied", {}), rules)


def _setting(row: Any, usual: Json) -> HFKey | HFOnly:
    if isinstance(row, str):
        row = {"key": row}
    if "only" in row:
        others, is_read, is_written = row.get("others", ()), row.get("read"), row.get("written")
        return HFOnly(row["only"], tuple(others), is_read is not False, is_written is not False)
    conversion = _CONVERSIONS.get(row.get("as"), (_same, _same))
    return HFKey(row["key"], usual.get(row["key"], row.get("usual", ...)), *conversion)

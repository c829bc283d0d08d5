"""Conversion between the config.json of a Hugging Face model and `config.schema.Model`.

Settings that our shape cannot express are refused by name: nothing is dropped silently.
"""

import math
import re
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from nanoscale.common.json_text import Json
from nanoscale.config.hf.families import Family, HFKey, HFOnly, UnsupportedError, families
from nanoscale.config.hf.quantized_files import METHODS
from nanoscale.config.hf.safetensors_headers import BadFileError, are_equal
from nanoscale.config.hf.text_part import HEAD, read_config, read_tensors
from nanoscale.config.objectives import CLASSIFIER, made_for
from nanoscale.config.schema import Model
from nanoscale.config.values.convert import convert
from nanoscale.config.violations import shown

_CAUSAL = ("ForCausalLM", "LMHeadModel")
"""The endings of the class names of causal language models."""

_OF_LABELS = ("id2label", "label2id")
EMBEDDINGS = ("embed_tokens.weight", "wte.weight")
"""The endings of the names of their embeddings."""

_ROPE_KINDS = {
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_seq_len"),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "yarn": (
        "factor", "original_seq_len", "beta_fast", "beta_slow", "truncate", "attention_factor"),
    "longrope": ("factor", "original_seq_len", "short_factor", "long_factor", "attention_factor"),
}  # fmt: skip
"""The keys of `model.rope_scaling` by `rope_type`."""
_ORIGINAL = "original_max_position_embeddings"
_NOT_SHAPE = ("name", "init_std", "init_from", "balance", "balance_rate")
"""Keys of the model that do not affect what it computes."""


def read_shape(folder: Path) -> Model:
    """Return the shape of the model in a folder.

    Embeddings are tied if config.json says so and the files do not hold a head of other values: transformers 5
    ties no two tensors that differ. Without files, config.json alone counts.

    Raises:
        UnsupportedError: there is no config.json, or it describes something other than our families.
    """
    found = shape_of(read_config(folder))
    tied = found.tie_embeddings and not has_own_head(folder)
    return replace(found, name=folder.name, tie_embeddings=tied)


def shape_of(document: Json) -> Model:
    """Return the shape that the content of config.json describes.

    Raises:
        UnsupportedError: it describes something other than our families.
    """
    family = document.get("model_type")
    if family not in families():
        names = ", ".join(families())
        raise UnsupportedError(f"model_type={shown(family)} is not one of the families {names}")
    _require_readable(document)
    values = _read(families()[family], document)
    config, violations = convert({"model": values}, lambda _: "config.json")
    if violations:
        wrong = "; ".join(f"{it.key}={shown(it.value)} {it.message}" for it in violations)
        raise UnsupportedError(f"its sizes are not valid: {wrong}")
    found = config.model
    plain = _shape_keys(asdict(found))
    simpler = ("attention_scale", "sliding_window", "full_attention_every", "rope_theta_local")
    return replace(found, **{key: plain[key] for key in ("kv_heads", "head_dim", *simpler)})


def has_own_head(folder: Path) -> bool:
    """True if the files of a folder hold an output head and an embedding of other values."""
    try:
        held = read_tensors(folder)
        embedding = next((held[name] for name in held if name.endswith(EMBEDDINGS)), None)
        return HEAD in held and embedding is not None and not are_equal(held[HEAD], embedding)
    except (BadFileError, OSError):  # the code that needs the weights reports it
        return False


def as_classifier(document: Json, labels: int) -> Json:
    """Return the config.json of the model that classifies with these layers; texts' ends pad by default."""
    classes, end = document.get("architectures"), document.get("eos_token_id")
    name = re.sub(r"(For[A-Z]\w*|LMHeadModel|Model)$", "", str((classes or ["Auto"])[0]))
    changed: Json = {"architectures": [name + CLASSIFIER], "num_labels": labels}
    names = {key: it for key, it in (document.get("id2label") or {}).items() if int(key) < labels}
    known = len(names) == labels  # otherwise they are names of another task
    document = {key: it for key, it in document.items() if known or key not in _OF_LABELS}
    if known:
        both = names, {name: int(key) for key, name in names.items()}
        changed |= dict(zip(_OF_LABELS, both, strict=True))
    if document.get("pad_token_id") is None and end is not None:
        changed["pad_token_id"] = end[0] if isinstance(end, list) else end
    return document | changed


def require_causal(document: Json, *, or_masked: bool = False) -> None:
    """Raise an UnsupportedError for models that are not trained here; with `or_masked`, encoders are."""
    if "model_type" not in document:
        raise UnsupportedError("config.json has no model_type")
    if document.get("is_encoder_decoder"):
        raise UnsupportedError("is_encoder_decoder=true: only decoders are trained")
    _require_readable(document)
    classes = document.get("architectures") or []
    if or_masked and made_for(document) != "next-token":
        return
    if classes and not any(str(name).endswith(_CAUSAL) for name in classes):
        raise UnsupportedError(
            f"architectures={shown(classes)}: no causal language model, whose class ends with "
            f"{' or '.join(_CAUSAL)}"
        )


def _require_readable(document: Json) -> None:
    settings = document.get("quantization_config") or {"quant_method": METHODS[0]}
    method = settings.get("quant_method") if isinstance(settings, dict) else settings
    if method not in METHODS:
        what = f"weights quantized by {method} are not read, only by {', '.join(METHODS)}"
        raise UnsupportedError(f"quantization_config: {what}")


def _need(document: Json, key: str) -> Any:
    if key not in document:
        raise UnsupportedError(f"config.json has no {key}")
    return document[key]


def _require(document: Json, key: str, value: Any, others: tuple[Any, ...] = ()) -> None:
    """Refuse a value that changes the computation."""
    given = document.get(key, value)
    if given not in (value, *others):
        raise UnsupportedError(f"{key}={shown(given)}: only {shown(value)} is supported")


def _read(family: Family, document: Json) -> Json:
    """Return the keys of the model that config.json sets, or that its family has by default."""
    for name, setting in family.settings.items():
        if isinstance(setting, HFOnly) and setting.is_read:
            _require(document, name, setting.value, setting.others)
    values: Json = {}
    for name, setting in family.settings.items():
        if isinstance(setting, HFKey):
            usual = setting.usual
            given = _need(document, name) if usual is ... else document.get(name, usual)
            try:
                values.setdefault(setting.name, setting.read(given))
            except (TypeError, ArithmeticError) as error:
                raise UnsupportedError(f"{name}={shown(given)} is not valid") from error
    for rule in family.rules:
        with suppress(TypeError):  # a value of a wrong type, which is refused when it is converted
            values |= rule.read(document, values)
    values = family.implied | values
    if values.get("dense_layers") == 0:
        values.pop("dense_ffn")  # the width of no layer
    if "rope_theta" in values:
        values |= _read_rope(document, values)
    return values


def _read_rope(document: Json, values: Json) -> Json:
    """Read `rope_parameters`, or the older `rope_theta` and `rope_scaling`."""
    rope = document.get("rope_parameters") or document.get("rope_scaling") or {}
    if not isinstance(rope, dict):
        raise UnsupportedError("rope_scaling is not an object")
    local: Json = {}
    if "full_attention" in rope or "sliding_attention" in rope:
        local, rope = rope.get("sliding_attention") or {}, rope.get("full_attention") or {}
        if local.get("rope_type", "default") != "default":
            raise UnsupportedError(f"rope_type={shown(local['rope_type'])} in layers with a window")
    result: Json = {
        "rope_theta": rope.get("rope_theta", values["rope_theta"]),
        "rope_scaling": None,
    }
    if "rope_fraction" in values:
        result["rope_fraction"] = rope.get("partial_rotary_factor", values["rope_fraction"])
    else:
        _require(document | rope, "partial_rotary_factor", 1.0, (None,))
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "su":
        kind = "longrope"  # its name in the first files of Phi-3
    if kind not in ("default", *_ROPE_KINDS):
        kinds = ", ".join(("default", *_ROPE_KINDS))
        raise UnsupportedError(f"rope_type={shown(kind)}: only {kinds} are supported")
    if kind != "default":
        result["rope_scaling"] = _read_scaling(kind, rope, document)
    theta = local.get("rope_theta", values.get("rope_theta_local", result["rope_theta"]))
    # Layers with a window are not scaled, in families in which they have a rotation of their own.
    if local or "rope_theta_local" in values:
        is_same = theta == result["rope_theta"] and result["rope_scaling"] is None
        result["rope_theta_local"] = None if is_same else theta
    return result


def _read_scaling(kind: str, rope: Json, document: Json) -> Json:
    length = document.get("max_position_embeddings")
    original = document.get(_ORIGINAL, rope.get(_ORIGINAL, length))
    usual = {"original_seq_len": original, "truncate": True, "beta_fast": 32.0, "beta_slow": 1.0}
    values = usual | {name: value for name, value in rope.items() if value is not None}
    if kind in ("yarn", "longrope"):
        try:
            values["factor"] = values.get("factor") or float(length or 0) / float(original or 0)
            values["attention_factor"] = _attention_factor(kind, values)
        except (TypeError, ArithmeticError, ValueError) as error:
            raise UnsupportedError(f"rope_scaling: its {kind} factors are not valid") from error
    return {"kind": kind} | {name: _need(values, name) for name in _ROPE_KINDS[kind]}


def _attention_factor(kind: str, values: Json) -> float:
    """Return the given factor, or the factor of the papers (arXiv:2309.00071, eq. 22; arXiv:2402.13753)."""
    factor, original = values["factor"], values["original_seq_len"]
    if (given := values.get("attention_factor")) is not None:
        return float(given)
    if factor <= 1:
        return 1.0
    if kind == "longrope":
        return math.sqrt(1 + math.log(factor) / math.log(original))
    if values.get("mscale") and values.get("mscale_all_dim"):
        scales = values["mscale"], values["mscale_all_dim"]
        one, all_dims = (0.1 * scale * math.log(factor) + 1 for scale in scales)
        return float(one / all_dims)
    return 0.1 * math.log(factor) + 1


def write_shape(model: Model) -> Json:
    """Return the config.json of a resolved shape, without the numbers of special tokens.

    Raises:
        UnsupportedError: no family of transformers has this shape.
    """
    return _write(family_of(model), model)


def _write(name: str, model: Model) -> Json:
    family, values = families()[name], asdict(model)
    values |= {"kv_heads": model.kv_head_count, "head_dim": model.head_width}
    values["attention_scale"] = model.attention_scale or model.head_width**-0.5
    document: Json = {"model_type": name, "architectures": [family.architecture]}
    for hf, setting in family.settings.items():
        if isinstance(setting, HFKey):
            document[hf] = setting.write(values[setting.name])
        elif setting.is_written:
            document[hf] = setting.value
    if "rope_theta" in document:
        document["rope_scaling"] = _write_scaling(values["rope_scaling"])
        # larger values are refused, and it initializes nothing here
        document["initializer_range"] = min(model.init_std, 1.0)
    if model.rope_scaling is not None and name == "phi3":
        document[_ORIGINAL] = model.rope_scaling.original_seq_len
    if "rope_local_base_freq" in document:
        document["rope_local_base_freq"] = model.rope_theta_local or model.rope_theta
    for rule in family.rules:
        document |= rule.write(model, document)
    return document


def _write_scaling(scaling: Json | None) -> Json | None:
    if scaling is None:
        return None
    names = {"original_seq_len": _ORIGINAL}
    values = {names.get(key, key): scaling[key] for key in _ROPE_KINDS[scaling["kind"]]}
    return {"rope_type": scaling["kind"], **values}


def family_of(model: Model) -> str:
    """Return the first family whose config.json, read again, has this shape.

    Raises:
        UnsupportedError: there is none; the text names what the nearest one lacks.
    """
    differences = {name: _differences(name, model) for name in families()}
    family, differing = min(
        differences.items(), key=lambda item: ("position" in item[1], len(item[1]))
    )
    if not differing:
        return family
    values = " and ".join(f"model.{key}={shown(getattr(model, key))}" for key in differing)
    raise UnsupportedError(f"no family has this shape: {family} is the nearest, but for {values}")


def _differences(name: str, model: Model) -> list[str]:
    """Return the keys of a shape that config.json of a family cannot express."""
    try:
        stored = _shape_keys(asdict(Model()) | _read(families()[name], _write(name, model)))
    except UnsupportedError:
        return ["hidden", "heads", "head_dim"]
    wanted = _shape_keys(asdict(model))
    return [key for key, value in wanted.items() if not _equal(stored[key], value)]


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, float) and isinstance(other, float):
        return math.isclose(one, other, rel_tol=1e-12)
    return bool(one == other)


def _shape_keys(values: Json) -> Json:
    """Return the keys that determine what a model computes, with the same values for equal models."""
    values = {key: value for key, value in values.items() if key not in _NOT_SHAPE}
    values["kv_heads"] = values["kv_heads"] or values["heads"]
    values["head_dim"] = width = values["head_dim"] or values["hidden"] // values["heads"]
    if _equal(values["attention_scale"], width**-0.5):
        values["attention_scale"] = None
    window = values["sliding_window"]
    if window is None or window >= values["max_seq_len"]:
        values |= {"sliding_window": None, "full_attention_every": 0, "rope_theta_local": None}
    if values["kv_rank"]:
        values["v_head_dim"] = values["v_head_dim"] or width
    else:
        values |= dict.fromkeys(("q_rank", "rope_head_dim", "v_head_dim"))
    if values["position"] != "rope":
        values["rope_theta"] = None
    if not values["experts"]:
        values["experts_per_token"] = None
    if not values["dense_layers"]:
        values["dense_ffn"] = None
    if (scaling := values["rope_scaling"]) is not None:
        kept = ("kind", *_ROPE_KINDS[scaling["kind"]])
        values["rope_scaling"] = {key: scaling[key] for key in kept}
    return values

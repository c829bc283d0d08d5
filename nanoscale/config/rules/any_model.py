"""Rules for models with transformers' code: settings that need to know a model's structure are refused."""

from __future__ import annotations

from nanoscale.config.hf.shape import FAMILIES
from nanoscale.config.reference import value_of
from nanoscale.config.rules.resolution import Resolution, Rule
from nanoscale.config.schema import Config, Parallel
from nanoscale.config.violations import override

_KEYS = ("model.trust_remote_code", "model.hf_config", "model.parameters")
_AXES = {
    "tp": "divides matrices that it finds by their names",
    "pp": "splits a model between blocks that it can call one by one",
    "cp": "replaces the attention with one that exchanges keys and values between ranks",
    "ep": "distributes experts that it finds by their names",
}
_BESIDE = {
    "tp": ("sequence_parallel",),
    "pp": ("schedule", "virtual_stages", "layers_per_stage"),
    "cp": ("cp_method",),
    "ep": (),
}
"""Keys of a single axis, which must be removed with it."""


def check_foreign(resolution: Resolution) -> None:
    model = resolution.config.model
    if model.source == "own":
        for key in _KEYS:
            resolution.refuse_idle("config", key, "model.source=own", "model=hf")
        return
    resolution.require("model.source", "transformers", "transformers")
    resolution.apply(RULES)
    if resolution.config.precision.fp8:
        message = "replaces linear layers, and those of model=hf belong to transformers"
        resolution.refuse("config", "precision.fp8", message, "precision=bf16")
    if resolution.config.lora.rank:
        why = "adds adapters to layers that it finds by their names"
        message = (
            f"{why}, and those of model=hf belong to transformers{_own_model(resolution.config)}"
        )
        resolution.refuse("config", "lora.rank", message, "lora.rank=0")
    _check_documents(resolution)


def _check_documents(resolution: Resolution) -> None:
    data = resolution.config.data
    why = "keeps attention within documents, and the attention of model=hf belongs to transformers"
    if data.packing == "whole":
        stream = "data.packing=stream" + (" data.document_mask=false" if data.document_mask else "")
        resolution.refuse("data", "data.packing", why, stream)
    elif data.document_mask:
        resolution.refuse("data", "data.document_mask", why, "data.document_mask=false")


def _own_model(config: Config) -> str:
    """Return advice, to follow a reason, if nanoscale implements the model itself."""
    family = config.model.hf_config["model_type"]
    advice = f"; nanoscale's own transformer supports it for {family}: use model.init_from instead of model=hf"
    return advice if family in FAMILIES else ""


def _axis(axis: str, why: str) -> Rule:
    """Return the rule that an axis needs a model of nanoscale."""
    key = f"parallel.{axis}"
    return Rule(
        key,
        (key, "model.source"),
        lambda config: config.model.source == "own" or value_of(config, key) == 1,
        lambda config: f"{why}, and those of model=hf belong to transformers{_own_model(config)}",
        lambda config: [_without(config.parallel, axis)],
    )


RULES = (
    *(_axis(axis, why) for axis, why in _AXES.items()),
    Rule(
        "parallel.activation_checkpointing",
        ("parallel.activation_checkpointing", "model.source"),
        lambda config: (
            config.model.source == "own" or config.parallel.activation_checkpointing != "sqrt"
        ),
        lambda _: "runs groups of blocks, and transformers runs the blocks of model=hf itself",
        lambda _: ["parallel.activation_checkpointing=full"],
    ),
)


def _without(layout: Parallel, axis: str) -> str:
    usual = Parallel()
    moved = [name for name in _BESIDE[axis] if getattr(layout, name) != getattr(usual, name)]
    return " ".join(
        [f"parallel.{axis}=1"]
        + [override(f"parallel.{name}", getattr(usual, name)) for name in moved]
    )

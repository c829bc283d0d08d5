"""Rules for models with transformers' code: settings that need to know a model's structure are refused."""

from __future__ import annotations

from nanoscale.config.hf.shape import FAMILIES
from nanoscale.config.rules.resolution import Resolution
from nanoscale.config.schema import Parallel
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
    model, layout = resolution.config.model, resolution.config.parallel
    if model.source == "own":
        for key in _KEYS:
            resolution.refuse_idle("config", key, "model.source=own", "model=hf")
        return
    resolution.require("model.source", "transformers", "transformers")
    family = model.hf_config["model_type"]
    ours = f"; nanoscale's own transformer supports it for {family}: use model.init_from instead of model=hf"
    known = ours if family in FAMILIES else ""
    for axis, why in _AXES.items():
        if getattr(layout, axis) > 1:
            message = f"{why}, and those of model=hf belong to transformers{known}"
            resolution.refuse("layout", f"parallel.{axis}", message, _without(layout, axis))
    if layout.activation_checkpointing == "sqrt":
        message = "runs groups of blocks, and transformers runs the blocks of model=hf itself"
        full = "parallel.activation_checkpointing=full"
        resolution.refuse("layout", "parallel.activation_checkpointing", message, full)
    if resolution.config.precision.fp8:
        message = "replaces linear layers, and those of model=hf belong to transformers"
        resolution.refuse("config", "precision.fp8", message, "precision=bf16")
    if resolution.config.lora.rank:
        why = "adds adapters to layers that it finds by their names"
        message = f"{why}, and those of model=hf belong to transformers{known}"
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


def _without(layout: Parallel, axis: str) -> str:
    usual = Parallel()
    moved = [name for name in _BESIDE[axis] if getattr(layout, name) != getattr(usual, name)]
    return " ".join(
        [f"parallel.{axis}=1"]
        + [override(f"parallel.{name}", getattr(usual, name)) for name in moved]
    )

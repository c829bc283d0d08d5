"""Laws of how blocks are run: what is kept, what is computed again, what is compiled."""

from __future__ import annotations

from typing import Literal

from nanoscale.config.rules.case import Case
from nanoscale.config.schema import Parallel
from nanoscale.config.stages import SPLIT_BACKWARD

_USUAL_KEEP = f" parallel.selective_keep={Parallel().selective_keep}"


def check_recomputation(case: Case) -> None:
    """Activation checkpointing and the keys that belong to one of its modes."""
    layout = case.config.parallel
    mode = layout.activation_checkpointing
    beside = f"parallel.activation_checkpointing={mode}"
    if mode != "full":
        case.refuse_idle("layout", "parallel.checkpoint_every", beside)
    elif layout.checkpoint_every > case.config.model.layers:
        layers = case.config.model.layers
        message = f"is more than model.layers={layers}: nothing would be recomputed"
        every = f"parallel.checkpoint_every={layers}"
        case.refuse("layout", "parallel.checkpoint_every", message, every)
    if mode != "selective":
        case.refuse_idle("layout", "parallel.selective_keep", beside)
    if mode == "selective" and layout.pp > 1 and layout.schedule in SPLIT_BACKWARD:
        kept = "" if layout.selective_keep == Parallel().selective_keep else _USUAL_KEEP
        case.refuse(
            "layout",
            "parallel.activation_checkpointing",
            f"cannot hold with parallel.schedule={layout.schedule}: it goes backward through a block twice, "
            "for the gradients of inputs and of weights, and what selective kept is gone after the first",
            f"parallel.activation_checkpointing=full{kept}",
            f"parallel.activation_checkpointing=none{kept}",
            "parallel.schedule=interleaved-1f1b",
        )


def resolve_compile(case: Case, device: Literal["cpu", "cuda"]) -> Literal["on", "off"]:
    """Whether blocks are compiled."""
    layout, asked = case.config.parallel, case.config.backend.compile
    split = layout.pp > 1 and layout.schedule in SPLIT_BACKWARD
    experts = case.config.model.experts > 0
    if asked == "auto":
        possible = device == "cuda" and not (split or layout.offload_activations or experts)
        return "on" if possible else "off"
    if asked == "on" and split:
        case.refuse(
            "layout",
            "backend.compile",
            f"cannot hold with parallel.schedule={layout.schedule}: the backward pass of a compiled block "
            "cannot be split",
            "backend.compile=off",
            "parallel.schedule=interleaved-1f1b",
        )
    if asked == "on" and layout.offload_activations:
        case.refuse(
            "layout",
            "backend.compile",
            "cannot hold with parallel.offload_activations=true: a compiled block keeps its activations "
            "itself",
            "backend.compile=off",
            "parallel.offload_activations=false",
        )
    if asked == "on" and experts:
        case.refuse(
            "layout",
            "backend.compile",
            f"cannot hold with model.experts={case.config.model.experts}: how many tokens an expert has is "
            "known only when a block runs",
            "backend.compile=off",
        )
    return asked

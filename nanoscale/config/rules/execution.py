"""Rules of the execution of blocks: kept activations, recomputation, compilation."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from nanoscale.config.rules.numbers import device_names, lacks_bf16
from nanoscale.config.rules.resolution import Resolution, listed
from nanoscale.config.schema import Parallel
from nanoscale.config.stages import SPLIT_BACKWARD

_FUSED = {"flash": 256, "cudnn": 128}
"""The widest heads that the kernels support on GPUs, backward too (PyTorch's sdp_utils.cpp)."""
_USUAL_KEEP = f" parallel.selective_keep={Parallel().selective_keep}"


def check_recomputation(resolution: Resolution) -> None:
    """Check activation checkpointing and the keys of its modes."""
    layout = resolution.config.parallel
    mode = layout.activation_checkpointing
    beside = f"parallel.activation_checkpointing={mode}"
    if mode != "full":
        resolution.refuse_idle("layout", "parallel.checkpoint_every", beside)
    elif layout.checkpoint_every > resolution.config.model.layers:
        layers = resolution.config.model.layers
        message = f"is more than model.layers={layers}: nothing would be recomputed"
        every = f"parallel.checkpoint_every={layers}"
        resolution.refuse("layout", "parallel.checkpoint_every", message, every)
    if mode != "selective":
        resolution.refuse_idle("layout", "parallel.selective_keep", beside)
    if mode == "selective" and layout.pp > 1 and layout.schedule in SPLIT_BACKWARD:
        kept = "" if layout.selective_keep == Parallel().selective_keep else _USUAL_KEEP
        resolution.refuse(
            "layout",
            "parallel.activation_checkpointing",
            f"cannot hold with parallel.schedule={layout.schedule}: it goes backward through a block twice, "
            "for the gradients of inputs and of weights, and the activations that selective "
            "stores are freed after the first",
            f"parallel.activation_checkpointing=full{kept}",
            f"parallel.activation_checkpointing=none{kept}",
            "parallel.schedule=interleaved-1f1b",
        )


def resolve_compile(resolution: Resolution, device: Literal["cpu", "cuda"]) -> Literal["on", "off"]:
    """Return `on` if blocks are compiled, else `off`."""
    layout, asked = resolution.config.parallel, resolution.config.backend.compile
    split = layout.pp > 1 and layout.schedule in SPLIT_BACKWARD
    experts = resolution.config.model.experts
    if asked == "auto":
        possible = device == "cuda" and not (split or layout.offload_activations or experts)
        return "on" if possible else "off"
    if asked == "on" and split:
        resolution.refuse(
            "layout",
            "backend.compile",
            f"cannot hold with parallel.schedule={layout.schedule}: the backward pass of a compiled block "
            "cannot be split",
            "backend.compile=off",
            "parallel.schedule=interleaved-1f1b",
        )
    if asked == "on" and layout.offload_activations:
        resolution.refuse(
            "layout",
            "backend.compile",
            "cannot hold with parallel.offload_activations=true: a compiled block keeps its activations "
            "itself",
            "backend.compile=off",
            "parallel.offload_activations=false",
        )
    if asked == "on" and experts:
        resolution.refuse(
            "layout",
            "backend.compile",
            f"cannot hold with model.experts={experts}: how many tokens an expert has is "
            "known only when a block runs",
            "backend.compile=off",
        )
    return asked


def check_attention(resolution: Resolution, device: Literal["cpu", "cuda"]) -> None:
    """Refuse an attention kernel that does not support the configuration, or that the backend chooses."""
    config = resolution.config
    key, asked, layout = "backend.attention", config.backend.attention, config.parallel
    if asked == "auto":
        return
    if layout.cp > 1 and layout.cp_method == "ring":
        message = "would be ignored by parallel.cp_method=ring, which has kernels of its own"
        resolution.refuse("layout", key, message, f"{key}=auto", "parallel.cp_method=ulysses")
    if config.model.source == "hf":
        message = "would be ignored by model=hf, whose code chooses its kernels itself"
        resolution.refuse("config", key, message, f"{key}=auto")
    if asked == "cudnn" and device == "cpu":
        resolution.refuse("config", key, "needs a GPU, and launcher.device is cpu", f"{key}=auto")
    elif asked != "math" and device == "cuda":
        for problem in _unfused(resolution, asked):
            resolution.refuse("config", key, f"cannot hold {problem}", f"{key}=auto", f"{key}=math")


def _unfused(resolution: Resolution, kernel: Literal["cudnn", "flash"]) -> Iterator[str]:
    """Yield why a kernel cannot compute the attention on a GPU."""
    model, data, compute = (
        resolution.config.model,
        resolution.config.data,
        resolution.config.precision.compute,
    )
    if compute not in ("bf16", "fp16"):
        yield f"with precision.compute={compute}: it takes bf16 and fp16"
    head_dim = model.head_dim or model.hidden // model.heads
    if head_dim > _FUSED[kernel] or (kernel == "cudnn" and head_dim % 8):
        multiples = "multiples of 8" if kernel == "cudnn" else "heads"
        yield f"with model.head_dim={head_dim}: it takes {multiples} up to {_FUSED[kernel]}"
    if kernel == "flash" and (data.document_mask or data.packing == "whole"):
        on = "data.packing=whole" if data.packing == "whole" else "data.document_mask=true"
        yield f"with {on}: it takes no mask"
    if weak := sorted(set(filter(lacks_bf16, device_names(resolution)))):
        yield f"on {listed(weak)}: it needs an A100 or newer"

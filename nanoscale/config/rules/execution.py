"""Rules of the execution of blocks: kept activations, recomputation, compilation."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from nanoscale.common.units import listed
from nanoscale.config.rules.numbers import device_names, lacks_bf16
from nanoscale.config.rules.pipeline import splits_backward
from nanoscale.config.rules.resolution import Resolution, Rule, idle
from nanoscale.config.schema import Config, Parallel

_FUSED = {"flash": 256, "cudnn": 128}
"""The widest heads that the kernels support on GPUs, backward too (PyTorch's sdp_utils.cpp)."""
_USUAL_KEEP = f" parallel.selective_keep={Parallel().selective_keep}"


_MODE = "parallel.activation_checkpointing"
_SPLIT = ("parallel.pp", "parallel.schedule")


def _loses_kept(config: Config) -> bool:
    return config.parallel.activation_checkpointing == "selective" and splits_backward(config)


def _near_modes(config: Config) -> list[str]:
    kept = "" if config.parallel.selective_keep == Parallel().selective_keep else _USUAL_KEEP
    return [
        f"{_MODE}=full{kept}",
        f"{_MODE}=none{kept}",
        "parallel.schedule=interleaved-1f1b",
    ]


def _every_block_is_kept(config: Config) -> bool:
    layout = config.parallel
    full = layout.activation_checkpointing == "full"
    return full and layout.checkpoint_every > config.model.layers


def _is_compiled(config: Config) -> bool:
    return config.backend.compile == "on"


def _chooses_kernel(config: Config) -> bool:
    layout = config.parallel
    return config.backend.attention != "auto" and layout.cp > 1 and layout.cp_method == "ring"


RULES = (
    idle(
        "parallel.checkpoint_every",
        (_MODE,),
        lambda config: config.parallel.activation_checkpointing == "full",
        f"{_MODE}={{c.parallel.activation_checkpointing}}",
    ),
    Rule(
        "parallel.checkpoint_every",
        ("parallel.checkpoint_every", _MODE, "model.layers"),
        lambda config: not _every_block_is_kept(config),
        lambda config: (
            f"is more than model.layers={config.model.layers}: nothing would be recomputed"
        ),
        lambda config: [f"parallel.checkpoint_every={config.model.layers}"],
    ),
    idle(
        "parallel.selective_keep",
        (_MODE,),
        lambda config: config.parallel.activation_checkpointing == "selective",
        f"{_MODE}={{c.parallel.activation_checkpointing}}",
    ),
    Rule(
        _MODE,
        (_MODE, *_SPLIT),
        lambda config: not _loses_kept(config),
        lambda config: (
            f"cannot hold with parallel.schedule={config.parallel.schedule}: it goes backward through a block "
            "twice, for the gradients of inputs and of weights, and the activations that selective "
            "stores are freed after the first"
        ),
        _near_modes,
    ),
    Rule(
        "backend.compile",
        ("backend.compile", *_SPLIT),
        lambda config: not (_is_compiled(config) and splits_backward(config)),
        lambda config: (
            f"cannot hold with parallel.schedule={config.parallel.schedule}: the backward pass of a compiled "
            "block cannot be split"
        ),
        lambda _: ["backend.compile=off", "parallel.schedule=interleaved-1f1b"],
    ),
    Rule(
        "backend.compile",
        ("backend.compile", "parallel.offload_activations"),
        lambda config: not (_is_compiled(config) and config.parallel.offload_activations),
        lambda _: (
            "cannot hold with parallel.offload_activations=true: a compiled block keeps its activations itself"
        ),
        lambda _: ["backend.compile=off", "parallel.offload_activations=false"],
    ),
    Rule(
        "backend.compile",
        ("backend.compile", "model.experts"),
        lambda config: not (_is_compiled(config) and config.model.experts),
        lambda config: (
            f"cannot hold with model.experts={config.model.experts}: how many tokens an expert has is known "
            "only when a block runs"
        ),
        lambda _: ["backend.compile=off"],
    ),
    Rule(
        "backend.attention",
        ("backend.attention", "parallel.cp", "parallel.cp_method"),
        lambda config: not _chooses_kernel(config),
        lambda _: "would be ignored by parallel.cp_method=ring, which has kernels of its own",
        lambda _: ["backend.attention=auto", "parallel.cp_method=ulysses"],
    ),
)


def check_attention(resolution: Resolution, device: Literal["cpu", "cuda"]) -> None:
    """Refuse an attention kernel that does not support the configuration, or that the backend chooses."""
    config = resolution.config
    key, asked = "backend.attention", config.backend.attention
    if asked == "auto":
        return
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
    head_dim = model.head_width
    if head_dim > _FUSED[kernel] or (kernel == "cudnn" and head_dim % 8):
        multiples = "multiples of 8" if kernel == "cudnn" else "heads"
        yield f"with model.head_dim={head_dim}: it takes {multiples} up to {_FUSED[kernel]}"
    if kernel == "flash" and data.document_mask:
        on = "data.packing=whole" if data.packing == "whole" else "data.document_mask=true"
        yield f"with {on}: it takes no mask"
    if weak := sorted(set(filter(lacks_bf16, device_names(resolution)))):
        yield f"on {listed(weak)}: it needs an A100 or newer"

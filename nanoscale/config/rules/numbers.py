"""Rules of precision and of the optimizer."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import replace
from typing import Literal

from nanoscale.common.units import listed
from nanoscale.config.optimizers import KEYS, rule_of
from nanoscale.config.rules.resolution import Resolution, Rule
from nanoscale.config.schema import Config, Precision

_HAS_FP8 = re.compile(
    r"\b(H100|H200|H800|H20|B100|B200|B300|GB200|GB300|GH200|L4|L40S?|MI300[AX]?|MI325X|MI35[05]X"
    r"|RTX [45]0[5-9]0|Ada|Blackwell)\b",
    re.IGNORECASE,
)
"""Names of GPUs of compute capability 8.9 or newer, or of AMD's with 8-bit products."""

_BEFORE_AMPERE = re.compile(
    r"\b([VP]100\w*|GV100|[KMP]\d{1,2}[mcX]?|T4G?|T\d{3,4}|TITAN|GTX|Quadro|CMP|RTX 20[5-8]0"
    r"|MI(25|50|60))\b",
    re.IGNORECASE,
)
"""Names of GPUs without products in bf16 or TF32: NVIDIA's of compute capability below 8.0, AMD's before the
MI100; no future GPU is among them."""
_AMD = re.compile(r"\bMI\d{2,3}[A-Z]?\b", re.IGNORECASE)
"""Names of GPUs on which PyTorch computes fp32 products without TF32."""


def resolve_precision(resolution: Resolution, device: Literal["cpu", "cuda"]) -> Precision:
    """Return the precision with the dtypes that `auto` means on the devices.

    GPUs of different kinds train in a dtype that all of them support. The GPUs of other hosts are unknown
    here, unless `cluster` describes them, and are assumed to support bf16; the preflight checks verify that.
    """
    precision, names = resolution.config.precision, device_names(resolution)
    compute = precision.compute
    if compute == "auto":
        compute = "fp32" if device == "cpu" else "bf16" if _has_bf16(resolution, names) else "fp16"
    possible = device == "cuda" and compute == "fp32"
    tf32 = precision.tf32
    if tf32 is True and not possible:
        other = "launcher.device=cpu" if device == "cpu" else f"precision.compute={compute}"
        message = f"is for fp32 on a GPU, and would be ignored with {other}"
        resolution.refuse("config", "precision.tf32", message, "precision.tf32=auto")
    if tf32 == "auto":
        tf32 = possible and not any(lacks_bf16(name) or _AMD.search(name) for name in names)
    return replace(precision, compute=compute, tf32=tf32)


def lacks_bf16(name: str) -> bool:
    """True if a GPU of this name has no products in bf16."""
    return _BEFORE_AMPERE.search(name) is not None


def _has_bf16(resolution: Resolution, names: Iterable[str]) -> bool:
    peaks = resolution.config.cluster.peaks
    if resolution.config.cluster.device is not None and (peaks.bf16 or peaks.fp16):
        return bool(peaks.bf16)
    return not any(map(lacks_bf16, names))


def device_names(resolution: Resolution) -> tuple[str, ...]:
    """Return the names of the GPUs to train on, as far as they are known."""
    if resolution.config.cluster.device is not None:
        return (resolution.config.cluster.device,)
    return () if resolution.remote else resolution.devices.names


def check_precision(resolution: Resolution, device: Literal["cpu", "cuda"]) -> None:
    """Check that the dtypes are compatible."""
    precision = resolution.config.precision
    if (precision.params == "fp64") != (precision.compute == "fp64"):
        narrow = "params" if precision.compute == "fp64" else "compute"
        wide = "compute" if narrow == "params" else "params"
        resolution.refuse(
            "config",
            "precision.compute",
            f"and precision.params={precision.params} do not fit together: use fp64 for both",
            f"precision.{narrow}=fp64 precision.reduce=fp64",
            f"precision.{wide}=fp32 precision.reduce=fp32",
        )
    elif (precision.params == "fp64") != (precision.reduce == "fp64"):
        resolution.refuse(
            "config",
            "precision.reduce",
            f"would sum gradients of {precision.compute} in another type than the weights ({precision.params})",
            f"precision.reduce={precision.params}",
        )
    elif precision.reduce in ("bf16", "fp16") and precision.reduce != precision.compute:
        resolution.refuse(
            "config",
            "precision.reduce",
            f"would round gradients that were computed in {precision.compute}",
            "precision.reduce=fp32",
        )
    if precision.compute != "fp16":
        for key in ("precision.loss_scale", "precision.loss_scale_window"):
            resolution.refuse_idle("config", key, f"precision.compute={precision.compute}")
    if precision.fp8:
        _fp8(resolution, device)
    else:
        resolution.refuse_idle("config", "precision.fp8_recipe", "precision.fp8=false")


def check_mask(resolution: Resolution, device: Literal["cpu", "cuda"]) -> None:
    """Check masked attention: on an H100 PyTorch hands it to cuDNN, whose gradients may be NaN at such
    lengths.

    Source: pytorch issue 196678.
    """
    data, length = resolution.config.data, resolution.config.train.seq_len
    by_cudnn = resolution.config.backend.attention in ("auto", "cudnn")
    narrow = resolution.config.precision.compute in ("bf16", "fp16")
    if device == "cuda" and data.document_mask and by_cudnn and narrow and length % 128 == 64:
        resolution.refuse(
            "data",
            "train.seq_len",
            "may give NaN gradients with document masks: cuDNN's kernels fail "
            "at 64 above a multiple of 128",
            *(f"train.seq_len={near}" for near in (length - 64, length + 64) if near),
            "backend.attention=math",
        )


def _fp8(resolution: Resolution, device: Literal["cpu", "cuda"]) -> None:
    key, off = "precision.fp8", "precision.fp8=false"
    compute = resolution.config.precision.compute
    needed = "needs GPUs with 8-bit products (H100, L40S, RTX 4090 or newer)"
    weak = sorted({name for name in resolution.devices.names if not _HAS_FP8.search(name)})
    if device == "cpu":
        resolution.refuse("config", key, f"{needed}, and launcher.device is cpu", off)
    elif weak and not resolution.remote:
        resolution.refuse("config", key, f"{needed}, and this machine has {listed(weak)}", off)
    if compute != "bf16":
        message = f"needs precision.compute=bf16 around its products, which is {compute}"
        bf16 = "precision.params=fp32 precision.compute=bf16 precision.reduce=fp32"
        resolution.refuse("config", key, message, bf16, off)
    resolution.require_for_ranks(key, "torchao", "torchao", off)


def _odd_sizes(config: Config) -> list[str]:
    """List the sizes of the blocks' products that 8-bit hardware does not support."""
    model, train = config.model, config.train
    sizes = {
        "model.hidden": model.hidden,
        "model.ffn": model.ffn,
        "the query heads together": model.q_width,
        "the key heads together": model.kv_width,
        "the tokens of a rank": train.seq_len // config.parallel.cp,
    }
    return [f"{name} = {size}" for name, size in sizes.items() if size % 16]


RULES = (
    Rule(
        "precision.fp8",
        ("precision.fp8", "parallel.tp"),
        lambda config: not config.precision.fp8 or config.parallel.tp == 1,
        lambda config: (
            f"cannot hold with parallel.tp={config.parallel.tp}: products of tensor-parallel layers stay in "
            "bf16"
        ),
        lambda _: ["precision.fp8=false"],
        "config",
    ),
    Rule(
        "precision.fp8",
        (
            *("precision.fp8", "parallel.cp", "train.seq_len", "model.hidden", "model.ffn"),
            *("model.heads", "model.kv_heads", "model.head_dim"),
        ),
        lambda config: not (config.precision.fp8 and _odd_sizes(config)),
        lambda config: (
            f"multiplies in tiles of 16, and {listed(_odd_sizes(config))} are not multiples of 16"
        ),
        lambda _: ["precision.fp8=false"],
        "config",
    ),
)


def check_optimizer(resolution: Resolution) -> None:
    """Check the keys of the chosen update rule."""
    optimizer = resolution.config.optimizer
    rule = rule_of(optimizer)
    for name in (key for key in KEYS if key not in rule.keys):
        resolution.refuse_idle("config", f"optimizer.{name}", f"optimizer.name={optimizer.name}")
    for name in ("beta1", "beta2"):
        if getattr(optimizer, name) >= 1:
            message = "must be below 1: at 1 the moment never changes"
            resolution.refuse("config", f"optimizer.{name}", message, f"optimizer.{name}=0.95")
    if rule.package:
        chosen = ("optimizer.name", rule.package, rule.package, "optimizer.name=adamw")
        resolution.require_for_ranks(*chosen)
    if not rule.quantized:
        return
    if (params := resolution.config.precision.params) != "fp32":
        message = f"has moments of fp32 weights in 8 bits, and precision.params={params}"
        resolution.refuse("config", "optimizer.name", message, "optimizer.name=adamw")

"""Rules of precision, of attention kernels and of the optimizer."""

import re
from contextlib import suppress
from dataclasses import replace
from fnmatch import fnmatchcase
from importlib.metadata import PackageNotFoundError, version
from typing import Literal

from nanoscale.common.units import listed
from nanoscale.config.dtypes import fp8_tile
from nanoscale.config.optimizers import OPTIMIZERS, optimizers_with, rule_of
from nanoscale.config.parameters import named
from nanoscale.config.rules.resolution import Resolution
from nanoscale.config.rules.rule import Rule, of_kind, other_than, refused
from nanoscale.config.schema import Config, Precision
from nanoscale.config.violations import nearest, override

_HAS_FP8 = re.compile(
    r"\b(H100|H200|H800|H20|B100|B200|B300|GB200|GB300|GH200|L4|L40S?|MI300[AX]?|MI325X|MI35[05]X"
    r"|RTX [45]0[5-9]0|Ada|Blackwell)\b",
    re.IGNORECASE,
)
"""Names of GPUs of compute capability 8.9 or newer, or of AMD's with 8-bit products."""

_KERNELS = {
    9: (
        "multiplies by experts on GPUs of compute capability 9 (H100, H200, GH200)",
        re.compile(r"\b(GH200|H[128]00|H20)\b", re.IGNORECASE),
    ),
    10: (
        "needs GPUs of compute capability 10 (B200, B300, GB200, GB300)",
        re.compile(r"\bG?B[123]00\b", re.IGNORECASE),
    ),
}
"""Compute capability → what a recipe needs, and names of GPUs. PyTorch's grouped products of rows in fp8 are
written for 9, and torchao's kernels of MXFP8 and NVFP4 are made for 10."""

_NEWEST = ("mxfp8", "nvfp4")
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
        cluster, has_bf16 = resolution.config.cluster, not any(map(lacks_bf16, names))
        if cluster.device is not None and (cluster.peaks.bf16 or cluster.peaks.fp16):
            has_bf16 = bool(cluster.peaks.bf16)
        compute = "fp32" if device == "cpu" else "bf16" if has_bf16 else "fp16"
    possible = device == "cuda" and compute == "fp32"
    tf32 = precision.tf32
    if tf32 is True and not possible:
        other = "launcher.device=cpu" if device == "cpu" else f"precision.compute={compute}"
        message = f"is for fp32 on a GPU, and would be ignored with {other}"
        resolution.refuse("precision.tf32", message, "precision.tf32=auto")
    if tf32 == "auto":
        tf32 = possible and not any(lacks_bf16(name) or _AMD.search(name) for name in names)
    return replace(precision, compute=compute, tf32=tf32)


def lacks_bf16(name: str) -> bool:
    """True if a GPU of this name has no products in bf16."""
    return _BEFORE_AMPERE.search(name) is not None


def device_names(resolution: Resolution) -> tuple[str, ...]:
    """Return the names of the GPUs to train on, as far as they are known."""
    if resolution.config.cluster.device is not None:
        return (resolution.config.cluster.device,)
    return () if resolution.remote else resolution.devices.names


# --- dtypes ---------------------------------------------------------------------------------------

_FP8 = {"precision.fp8": True}
_NO_FP8 = "precision.fp8=false"
_NEEDS_FP8 = "needs GPUs with 8-bit products (H100, L40S, RTX 4090 or newer)"
_BF16 = "precision.params=fp32 precision.compute=bf16 precision.reduce=fp32"


def _odd_sizes(config: Config) -> list[str]:
    """List the sizes of the blocks' products that 8-bit hardware does not support."""
    model, train, tp = config.model, config.train, config.parallel.tp
    expert_tp = config.parallel.expert_tp if model.experts else tp
    of_rank, tile = f" / {tp}" * (tp > 1), fp8_tile(config.precision.fp8_recipe)
    sizes = {
        "model.hidden": model.hidden,
        f"model.ffn{f' / {expert_tp}' * (expert_tp > 1)}": model.ffn // expert_tp,
        f"model.shared_ffn{of_rank}": model.shared_ffn // tp,
        f"model.dense_ffn{of_rank}": model.dense_ffn // tp if model.dense_layers else 0,
        f"the query heads together{of_rank}": model.q_width // tp,
        f"the key heads together{of_rank}": model.kv_width // tp,
        "the tokens of a rank": train.seq_len // config.parallel.cp,
    }
    if model.kv_rank:
        sizes |= {
            "model.q_rank": model.q_rank or 0,
            "model.kv_rank": model.kv_rank,
            "model.rope_head_dim": model.rope_head_dim,
            f"the values of all heads{of_rank}": model.heads * model.value_width // tp,
        }
    return [f"{name} = {size}" for name, size in sizes.items() if size % tile]


RULES = of_kind("config",
    Rule("precision.fp8",
        (
            *("precision.fp8", "precision.fp8_recipe", "parallel.tp", "parallel.cp", "train.seq_len"),
            *("model.hidden", "model.ffn", "model.shared_ffn", "model.dense_ffn", "model.dense_layers"),
            *("model.experts", "parallel.ep_over_tp"),
            *(f"model.{name}" for name in ("heads", "kv_heads", "head_dim", "v_head_dim")),
            *("model.q_rank", "model.kv_rank", "model.rope_head_dim"),
        ), lambda config: not (config.precision.fp8 and _odd_sizes(config)),
        lambda config: (
            f"multiplies in tiles of {fp8_tile(config.precision.fp8_recipe)}, and "
            f"{listed(_odd_sizes(config))} are not multiples of it"
        ), (_NO_FP8,)),
)  # fmt: skip
_TYPES = ("precision.params", "precision.compute", "precision.reduce")


def _fit_together(config: Config) -> bool:
    return (config.precision.params == "fp64") == (config.precision.compute == "fp64")


def _sums_in_fp64(config: Config) -> bool:
    precision = config.precision
    wide = (precision.params == "fp64") == (precision.reduce == "fp64")
    return wide or not _fit_together(config)


def _keeps_width(config: Config) -> bool:
    precision = config.precision
    wide = "fp64" in (precision.params, precision.compute)
    return wide or precision.reduce in ("fp32", "fp64", precision.compute)


def _one_width(config: Config) -> list[str]:
    is_wide = config.precision.params == "fp64"
    wide, narrow = ("params", "compute") if is_wide else ("compute", "params")
    return [
        f"precision.{narrow}=fp64 precision.reduce=fp64",
        f"precision.{wide}=fp32 precision.reduce=fp32",
    ]


PRECISION = of_kind("config",
    Rule("precision.compute", _TYPES[:2], _fit_together,
        "and precision.params={c.precision.params} do not fit together: use fp64 for both",
        _one_width),
    refused("precision.params",  # weights in bf16 are the operands of the products
        {"precision.params": "bf16", "precision.compute": other_than("bf16")},
        "keeps no more than the products read, and precision.compute={c.precision.compute}",
        "precision.compute=bf16", _BF16),
    Rule("precision.reduce", _TYPES, _sums_in_fp64,
        "would sum gradients of {c.precision.compute} in another type than the weights "
        "({c.precision.params})", ("precision.reduce={c.precision.params}",)),
    Rule("precision.reduce", _TYPES, _keeps_width,
        "would round gradients that were computed in {c.precision.compute}",
        ("precision.reduce=fp32",)),
    *(refused("precision.fp8", {**_FP8, "launcher.device": "cpu", "precision.fp8_recipe": recipe},
        f"{needs}, and launcher.device is cpu", _NO_FP8)
        for recipe, needs in ((_NEWEST, _KERNELS[10][0]), (other_than(*_NEWEST), _NEEDS_FP8))),
    refused("precision.fp8", {**_FP8, "precision.compute": other_than("bf16")},
        "needs precision.compute=bf16 around its products, which is {c.precision.compute}",
        _BF16, _NO_FP8),
    refused("precision.deterministic",
        {**_FP8, "precision.fp8_recipe": "nvfp4", "precision.deterministic": True},
        "cannot hold with precision.fp8_recipe=nvfp4: torchao chooses its kernels by timings, and the "
        "rounding of gradients depends on them", "precision.deterministic=false", "precision.fp8_recipe=mxfp8"),
)  # fmt: skip


def check_fp8(resolution: Resolution) -> None:
    """Check the package that weights in 4 bits need, and the GPUs and the package of products in 8 bits."""
    if resolution.config.lora.base == "nf4":
        resolution.require_for_ranks("lora.base", "torchao", "lora.base=whole")
    if not resolution.config.precision.fp8:
        return
    weak = sorted({name for name in resolution.devices.names if not _HAS_FP8.search(name)})
    without = resolution.completed(_NO_FP8)
    if weak and resolution.config.launcher.device == "cuda" and not resolution.remote:
        message = f"{_NEEDS_FP8}, and this machine has {listed(weak)}"
        resolution.refuse("precision.fp8", message, without)
    elif (
        is_newest := resolution.config.precision.fp8_recipe in _NEWEST
    ) or resolution.config.model.experts:
        _check_kernels(resolution, without, 10 if is_newest else 9)
    resolution.require_for_ranks("precision.fp8", "torchao", without)


def _check_kernels(resolution: Resolution, without: str, capability: int) -> None:
    """Check the GPUs and the package of kernels that torchao has for one compute capability."""
    cluster = resolution.config.cluster
    advice = (
        without if resolution.config.model.experts else "precision.fp8_recipe=tensorwise",
        without,
    )
    needs, names = _KERNELS[capability]
    weak = sorted({name for name in device_names(resolution) if not names.search(name)})
    is_described = cluster.device is not None and int(cluster.compute_capability or 0) == capability
    if weak and not is_described and resolution.config.launcher.device == "cuda":
        message = f"{needs}, not {listed(weak)}"
        resolution.refuse("precision.fp8_recipe", message, *advice)
    with suppress(PackageNotFoundError):
        installed = version("torchao")
        if resolution.same_python and [*map(int, installed.split(".")[:2])] < [0, 18]:
            message = f"needs torchao 0.18 or newer, and this is {installed}"
            resolution.refuse("precision.fp8_recipe", message, *advice)


# --- attention kernels ----------------------------------------------------------------------------

_KERNEL = "backend.attention"
_FREE = f"{_KERNEL}=auto"
_ON_GPU = {"launcher.device": "cuda"}
_NARROW = ("bf16", "fp16")
_CHOICES = (_FREE, f"{_KERNEL}=flash", f"{_KERNEL}=math")
_CUDNN = {_KERNEL: "cudnn", **_ON_GPU}


def _unfused(kernel: str, widest: int, multiple: int, heads: str) -> tuple[Rule, ...]:
    """Return the rules of a fused kernel on GPUs; its widest heads, backward too, are PyTorch's
    (sdp_utils.cpp)."""

    def is_odd(width: int | None) -> bool:
        return width is not None and (width > widest or width % multiple > 0)

    on_gpu = {_KERNEL: kernel, **_ON_GPU}
    return (
        refused(_KERNEL, {**on_gpu, "precision.compute": other_than(*_NARROW)},
            "cannot hold with precision.compute={c.precision.compute}: it takes bf16 and fp16",
            *_CHOICES),
        refused(_KERNEL, {**on_gpu, "model.head_dim": is_odd},
            f"cannot hold with model.head_dim={{c.model.head_dim}}: it takes {heads} up to {widest}",
            *_CHOICES),
    )  # fmt: skip


def _takes_window(config: Config) -> bool:
    is_cudnn = config.backend.attention == "cudnn" and config.launcher.device == "cuda"
    return not is_cudnn or not config.model.is_windowed(config.train.seq_len)


ATTENTION = of_kind("config",
    refused(_KERNEL, {_KERNEL: other_than("auto"), "model.source": other_than("own")},
        "would be ignored by model={c.model.source}, whose code chooses its kernels itself", _FREE),
    refused("backend.empty_cache", {"backend.empty_cache": bool, "launcher.device": "cpu"},
        "is of a GPU's memory, and launcher.device=cpu has none", "backend.empty_cache=0"),
    refused(_KERNEL, {_KERNEL: "cudnn", "launcher.device": "cpu"},
        "needs a GPU, and launcher.device is cpu", _FREE),
    *_unfused("flash", 256, 1, "heads"),
    *_unfused("cudnn", 128, 8, "multiples of 8"),
    refused(_KERNEL, {**_CUDNN, "precision.deterministic": True},
        "cannot hold with precision.deterministic=true: cuDNN's backward pass does not repeat exactly",
        *_CHOICES),
    *(refused(_KERNEL, {**_CUDNN, **limit},
        f"cannot hold with {word}: cuDNN's kernel takes whole rows", *_CHOICES)
        for word, limit in (
            ("data.packing=whole", {"data.packing": "whole"}),
            ("data.document_mask=true", {"data.packing": "stream", "data.document_mask": True}),
            ("model.attention_sinks=true", {"model.attention_sinks": True}))),
    Rule(_KERNEL,
        ("launcher.device", _KERNEL, "model.sliding_window", "model.full_attention_every", "train.seq_len"),
        _takes_window,
        "cannot hold with model.sliding_window={c.model.sliding_window}: cuDNN's kernel takes no window",
        _CHOICES),
)  # fmt: skip


def check_kernel(resolution: Resolution) -> None:
    """Check that the GPUs support a fused attention kernel."""
    on_gpu = resolution.config.launcher.device == "cuda"
    weak = sorted(set(filter(lacks_bf16, device_names(resolution))))
    if weak and on_gpu and resolution.config.backend.attention in ("cudnn", "flash"):
        message = f"cannot hold on {listed(weak)}: it needs an A100 or newer"
        resolution.refuse(_KERNEL, message, _FREE, f"{_KERNEL}=math")


# --- optimizer ------------------------------------------------------------------------------------

_QUANTIZED = tuple(name for name, rule in OPTIMIZERS.items() if rule.quantized)
_AVERAGED = tuple(name for name, rule in OPTIMIZERS.items() if rule.averages)
_UNROUNDED = tuple(name for name, rule in OPTIMIZERS.items() if not rule.rounded)
OPTIMIZER = of_kind("config",
    *(refused(f"optimizer.{name}", {f"optimizer.{name}": 1, "optimizer.name": optimizers_with(name)},
        "must be below 1: at 1 the moment never changes", f"optimizer.{name}=0.95")
        for name in ("beta1", "beta2")),
    refused("optimizer.name",
        {"optimizer.name": _QUANTIZED, "precision.params": other_than("fp32")},
        "has moments of fp32 weights in 8 bits, and precision.params={c.precision.params}",
        "optimizer.name=adamw", _BF16),
    refused("optimizer.name", {"optimizer.name": _UNROUNDED, "precision.params": "bf16"},
        "does not round stochastically, which weights in bf16 need (precision.params=bf16)",
        "optimizer=adamw", _BF16),
    refused("optimizer.moments_dtype",
        {"optimizer.name": _UNROUNDED, "optimizer.moments_dtype": "bf16"},
        "is for adamw, whose update rounds stochastically, and optimizer.name={c.optimizer.name}",
        "optimizer.moments_dtype=params"),
    refused("optimizer.ema_decay",
        {"optimizer.name": _AVERAGED, "optimizer.ema_decay": other_than(None)},
        "would average weights that optimizer.name={c.optimizer.name} averages itself",
        "optimizer.ema_decay=null", "optimizer=adamw"),
    refused("optimizer.ema_decay", {"optimizer.ema_decay": 1},
        "must be below 1: at 1 the average stays at the first step's weights",
        "optimizer.ema_decay=0.999"),
    refused("optimizer.moments_dtype",
        {"optimizer.moments_dtype": "bf16", "precision.params": "fp64"},
        "has weights in fp32 or bf16, and precision.params=fp64", "optimizer.moments_dtype=params"),
)  # fmt: skip


def check_optimizer(resolution: Resolution) -> None:
    """Check that the package of the chosen update is installed, and the groups of parameters."""
    for name, entry in resolution.config.optimizer.groups.items():
        _check_match(resolution, f"optimizer.groups.{name}.match", entry.match)
    package = rule_of(resolution.config.optimizer).package
    if package:
        resolution.require_for_ranks("optimizer.name", package, "optimizer.name=adamw")


def _check_match(resolution: Resolution, key: str, pattern: str) -> None:
    """Refuse a group of parameters that matches none."""
    if not pattern:
        message = "is needed: a pattern of the names of parameters"
        resolution.refuse_value(key, pattern, message, f"{key}='*norm*'")
        return
    config = resolution.config
    if config.model.source != "own" or config.lora.rank:
        return  # its names are known once it is built
    names = list(named(config.model))
    if not any(fnmatchcase(name, pattern) for name in names):
        modules = {part for name in names for part in name.split(".") if not part.isdecimal()}
        near = nearest(pattern.strip("*."), modules) or ("norm",)
        advice = [override(key, f"*{module}*") for module in near]
        resolution.refuse_value(key, pattern, "matches no parameter", *advice)

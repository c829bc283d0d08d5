"""The abilities of each backend: the rules that refuse all other settings, and the table of both."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import reduce
from operator import getitem
from pathlib import Path
from typing import Any, Literal

from nanoscale.common.units import listed
from nanoscale.config import reference
from nanoscale.config.deepspeed import owner, unowned
from nanoscale.config.optimizers import OPTIMIZERS
from nanoscale.config.reference import value_of
from nanoscale.config.rules.resolution import Resolution, Rule, data_parallel, idle, near_divisors
from nanoscale.config.schema import Backend, Config, Zero
from nanoscale.config.values.convert import fits
from nanoscale.config.violations import override

OUTSIDE = (
    "run", "scheduler", "data", "checkpoint", "cluster", "launcher", "logger", "profile", "train",
)  # fmt: skip
"""Sections of the launcher or the training loop: they apply to every backend."""


@dataclass(frozen=True, eq=False)
class Limit(Rule):
    """The values of one key that a backend supports."""

    supported: str = ""
    """These values, for the table of backends."""


def _limit(
    backend: str,
    key: str,
    beside: tuple[str, ...],
    takes: Callable[[Config], bool],
    supported: str,
    why: str,
    instead: tuple[str, ...],
) -> Limit:
    """Return the limit of a key.

    Args:
        beside: the other keys that `takes` reads.
        takes: True if the backend supports the value.
        why: the problem of all other values, to follow the key and its value.
        instead: overrides to paste.
    """

    def holds(config: Config) -> bool:
        return config.backend.name != backend or takes(config)

    reads = ("backend.name", key, *beside)
    return Limit(key, reads, holds, lambda _: why, lambda _: instead, supported=supported)


def limits(backend: str) -> list[Limit]:
    return {"native": NATIVE, "deepspeed": DEEPSPEED}[backend]


def check_backend(resolution: Resolution) -> None:
    """Check what DeepSpeed needs; the rules of the layout refuse what a backend does not support."""
    if resolution.config.backend.name == "deepspeed":
        resolution.require("backend.name", "deepspeed", "DeepSpeed", "backend=native")
        _check_extra(resolution)


def table() -> list[tuple[str, str, str]]:
    """Return, for every key that concerns a backend, the values that native and DeepSpeed support."""
    return [
        (name, _supported("native", name), _supported("deepspeed", name))
        for name in reference.declared()
        if name.partition(".")[0] not in OUTSIDE
    ]


def _supported(backend: str, key: str) -> str:
    return " · ".join(limit.supported for limit in limits(backend) if limit.key == key) or "yes"


def _only(backend: str, key: str, *values: Any, why: str, instead: tuple[str, ...]) -> Limit:
    """Return the limit of a key of which a backend supports some values."""
    named = [each for each in values if isinstance(each, str) and each not in ("none", "auto")]
    supported = " or ".join(named) or "no"
    return _limit(
        backend, key, (), lambda config: value_of(config, key) in values, supported, why, instead
    )


def _check_extra(resolution: Resolution) -> None:
    extra = resolution.config.backend.extra
    owned = owner(extra)
    if owned:
        named = [f"{path} (set {key} instead)" for path, key in owned.items()]
        message = f"sets what a key of nanoscale sets: {listed(named)}"
        resolution.refuse("config", "backend.extra", message, _by_our_keys(extra, owned))


def _by_our_keys(extra: Mapping[str, Any], owned: Mapping[str, str]) -> str | None:
    """Return equivalent overrides of our keys that keep the rest; None if a value has no equivalent."""
    values = [(key, reduce(getitem, path.split("."), extra)) for path, key in owned.items()]
    if not all(fits(key, it) for key, it in values):
        return None
    rest = unowned(extra)
    overrides = ["~backend.extra", *(override(key, it) for key, it in values)]
    return " ".join(overrides + ([override("backend.extra", rest)] if rest else []))


# --- native ---------------------------------------------------------------------------------------

_DEEPSPEEDS = [
    *(f"zero.{name}" for name in reference.members(Zero) if name != "stage"),
    *(
        f"backend.{name}"
        for name in reference.members(Backend)
        if name not in ("name", "compile", "attention")
    ),
]

NATIVE = [
    *(
        _only(
            "native",
            name,
            usual,
            why="is a setting of DeepSpeed, and backend=native would ignore it",
            instead=(override(name, usual), "backend=deepspeed"),
        )
        for name in _DEEPSPEEDS
        for usual in (reference.declared()[name].default,)
    ),
]

# --- deepspeed ------------------------------------------------------------------------------------


def _of_stages(key: str, stages: tuple[int, ...], supported: str) -> Limit:
    """Return the limit of a key that has a meaning with some stages only."""
    usual = reference.declared()[key].default
    return _limit(
        "deepspeed",
        key,
        ("zero.stage",),
        lambda config: config.zero.stage in stages or value_of(config, key) == usual,
        supported,
        f"belongs to {supported.removeprefix('with ')} and would be ignored",
        (override(key, usual), f"zero.stage={stages[-1]}"),
    )


def _is_narrow(config: Config) -> bool:
    return config.precision.compute in ("bf16", "fp16")


DEEPSPEED = [
    _limit(
        "deepspeed",
        "parallel.sequence_parallel",
        ("parallel.tp",),
        lambda config: config.parallel.tp == 1 or not config.parallel.sequence_parallel,
        "false with tp > 1",
        "divides the sequence between tensor-parallel layers, which DeepSpeed's do not",
        ("parallel.sequence_parallel=false", "backend=native"),
    ),
    _limit(
        "deepspeed",
        "model.qk_norm",
        ("parallel.tp",),
        lambda config: config.parallel.tp == 1 or not config.model.qk_norm,
        "with tp = 1",
        "has weights that the heads of all ranks share, and DeepSpeed's layers would not sum their gradients",
        ("parallel.tp=1 parallel.sequence_parallel=true", "backend=native"),
    ),
    _limit(
        "deepspeed",
        "parallel.schedule",
        ("parallel.pp",),
        lambda config: config.parallel.pp == 1 or config.parallel.schedule == "1f1b",
        "1f1b",
        "is not among DeepSpeed's pipeline schedules",
        ("parallel.schedule=1f1b parallel.virtual_stages=auto", "backend=native"),
    ),
    _limit(
        "deepspeed",
        "zero.stage",
        ("parallel.pp",),
        lambda config: config.parallel.pp == 1 or config.zero.stage <= 1,
        "0 and 1 with pp > 1",
        "shards gradients, which DeepSpeed's pipeline does not",
        ("zero.stage=1", "backend=native"),
    ),
    _limit(
        "deepspeed",
        "precision.compute",
        ("zero.stage", "parallel.pp", "parallel.tp"),
        lambda config: (
            config.zero.stage > 0
            or not _is_narrow(config)
            or config.parallel.pp * config.parallel.tp == 1
        ),
        "fp32 with stage 0 and tp or pp > 1",
        "is done by autocast in DeepSpeed's stage 0, which takes data and context parallel only",
        ("zero.stage=1", "precision=fp32", "backend=native"),
    ),
    _limit(
        "deepspeed",
        "backend.compile",
        ("zero.stage", "parallel.pp", "parallel.tp"),
        lambda config: (
            config.backend.compile != "on"
            or (config.zero.stage < 3 and config.parallel.tp * config.parallel.pp == 1)
        ),
        "with stages 0 to 2, tp = pp = 1",
        "would compile around layers that DeepSpeed gathers, or that communicate behind the compiler's back",
        ("backend.compile=off", "backend=native"),
    ),
    _only(
        "deepspeed",
        "precision.params",
        "fp32",
        why="is not supported by DeepSpeed, whose master weights are fp32",
        instead=("precision=fp32", "backend=native"),
    ),
    _only(
        "deepspeed",
        "precision.fp8",
        False,
        why="is done by torchao, whose layers DeepSpeed's engine does not know",
        instead=("precision=bf16", "backend=native"),
    ),
    _limit(
        "deepspeed",
        "precision.reduce",
        ("zero.stage",),
        lambda config: config.zero.stage > 0 or config.precision.reduce in ("fp32", "fp64"),
        "fp32 with stage 0",
        "rounds gradients that DeepSpeed's stage 0 sums in fp32",
        ("precision.reduce=fp32", "zero.stage=1", "backend=native"),
    ),
    _only(
        "deepspeed",
        "optimizer.name",
        *(name for name, rule in OPTIMIZERS.items() if rule.deepspeed),
        why="keeps its moments in blocks of 8 bits, which DeepSpeed's flat shards would split",
        instead=("optimizer=adamw", "backend=native"),
    ),
    _only(
        "deepspeed",
        "parallel.dp_replicate",
        1,
        why="is for FSDP2; DeepSpeed shards over all ranks of dp, and ZeRO++ within a subset of them",
        instead=("parallel.dp_replicate=1", "backend=native"),
    ),
    _only(
        "deepspeed",
        "parallel.ep",
        1,
        why="distributes experts, which DeepSpeed's engine would treat as copies of each other",
        instead=("parallel.ep=1", "backend=native"),
    ),
    _only(
        "deepspeed",
        "model.balance",
        "none",
        "bias",
        why="adds a loss inside the blocks, and DeepSpeed sets its scale",
        instead=("model.balance=bias", "backend=native"),
    ),
    _limit(
        "deepspeed",
        "model.experts",
        ("parallel.tp",),
        lambda config: config.parallel.tp == 1 or config.model.experts == 0,
        "with tp = 1",
        "cannot be divided by DeepSpeed's tensor-parallel layers",
        ("parallel.tp=1 parallel.sequence_parallel=true", "backend=native"),
    ),
    _limit(
        "deepspeed",
        "lora.rank",
        ("parallel.tp",),
        lambda config: config.parallel.tp == 1 or not config.lora.rank,
        "with tp = 1",
        "has no adapters for DeepSpeed's tensor-parallel layers",
        ("parallel.tp=1 parallel.sequence_parallel=true", "backend=native", "lora.rank=0"),
    ),
    _limit(
        "deepspeed",
        "zero.offload_optimizer",
        ("zero.stage",),
        lambda config: config.zero.offload_optimizer == "none" or config.zero.stage > 0,
        "with stages 1 to 3",
        "needs sharded optimizer states, and zero.stage=0 shards nothing",
        ("zero.stage=1", "zero.offload_optimizer=none"),
    ),
    _limit(
        "deepspeed",
        "zero.offload_param",
        ("zero.stage",),
        lambda config: config.zero.offload_param == "none" or config.zero.stage == 3,
        "with stage 3",
        "needs sharded parameters, which only zero.stage=3 has",
        ("zero.stage=3", "zero.offload_param=none"),
    ),
    *(
        _of_stages(name, stages, supported)
        for name, stages, supported in (
            ("backend.overlap_comm", (1, 2, 3), "with stages 1 to 3"),
            ("backend.reduce_bucket", (1, 2, 3), "with stages 1 to 3"),
            ("backend.allgather_bucket", (1, 2), "with stages 1 and 2"),
            ("backend.prefetch_bucket", (3,), "with stage 3"),
            ("zero.hpz", (3,), "with stage 3"),
            ("zero.quantized_weights", (3,), "with stage 3"),
            ("zero.quantized_gradients", (3,), "with stage 3"),
        )
    ),
]


def honored(config: Config) -> bool:
    """Return True if the backend can do all that is asked."""
    return all(limit.holds(config) for limit in limits(config.backend.name))


# --- DeepSpeed's offload and ZeRO++ ---------------------------------------------------------------

_OFFLOADS = ("zero.offload_optimizer", "zero.offload_param")


def _offloads_to_nvme(config: Config) -> bool:
    return any(value_of(config, key) == "nvme" for key in _OFFLOADS)


def _is_deepspeed(config: Config) -> bool:
    return config.backend.name == "deepspeed"


RULES = (
    *NATIVE,
    *DEEPSPEED,
    idle(
        "zero.nvme_path",
        (*_OFFLOADS, "backend.name"),
        lambda config: not _is_deepspeed(config) or _offloads_to_nvme(config),
        "zero.offload_optimizer={c.zero.offload_optimizer} and zero.offload_param={c.zero.offload_param}",
        "config",
    ),
    Rule(
        "zero.offload_optimizer",
        ("zero.offload_optimizer", "zero.stage", "backend.name"),
        lambda config: (
            not _is_deepspeed(config)
            or config.zero.offload_optimizer != "nvme"
            or config.zero.stage == 3
        ),
        lambda _: "is for zero.stage=3; the lower stages offload to host memory",
        lambda _: ["zero.offload_optimizer=cpu zero.nvme_path=null", "zero.stage=3"],
    ),
    Rule(
        "zero.hpz",
        ("zero.hpz", "parallel.dp", "backend.name"),
        lambda config: not _is_deepspeed(config) or data_parallel(config) % config.zero.hpz == 0,
        lambda config: f"must divide parallel.dp, which is {config.parallel.dp}",
        lambda config: (
            f"zero.hpz={n}" for n in near_divisors(data_parallel(config), config.zero.hpz)
        ),
    ),
)


def check_zero(resolution: Resolution, device: Literal["cpu", "cuda"]) -> None:
    if resolution.config.backend.name != "deepspeed":
        return
    _check_nvme(resolution)
    _check_zero_plus(resolution, device)


def _check_nvme(resolution: Resolution) -> None:
    zero = resolution.config.zero
    offloaded = [key for key in _OFFLOADS if value_of(resolution.config, key) == "nvme"]
    if not offloaded:
        return
    if zero.nvme_path is None:
        message = f"is needed by {' and '.join(offloaded)}: a folder on a fast disk"
        resolution.refuse("config", "zero.nvme_path", message, "zero.nvme_path=/local_nvme")
    elif resolution.remote:
        return  # a folder of each host, which only the host can check
    elif not Path(zero.nvme_path).is_dir() or not os.access(zero.nvme_path, os.W_OK):
        resolution.refuse("config", "zero.nvme_path", "is not a writable folder")


def _check_zero_plus(resolution: Resolution, device: Literal["cpu", "cuda"]) -> None:
    zero = resolution.config.zero
    for name in ("quantized_weights", "quantized_gradients"):
        if getattr(zero, name) and device == "cpu":
            message = "needs GPU kernels, and launcher.device is cpu"
            resolution.refuse("config", f"zero.{name}", message, f"zero.{name}=false")

"""The abilities of each backend: the rules that refuse all other settings, and the table of both."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import reduce
from operator import getitem
from typing import Any

from nanoscale.config import reference
from nanoscale.config.deepspeed import owner, unowned
from nanoscale.config.rules.resolution import Resolution, listed
from nanoscale.config.schema import Backend, Config, Zero
from nanoscale.config.values.convert import fits
from nanoscale.config.violations import override

OUTSIDE = (
    "run", "scheduler", "data", "checkpoint", "cluster", "launcher", "logger", "profile", "train",
)  # fmt: skip
"""Sections of the launcher or the training loop: they apply to every backend."""


@dataclass(frozen=True)
class Limit:
    """The values of one key that a backend supports."""

    key: str
    takes: Callable[[Config], bool]
    words: str
    """The supported values, for the table."""
    why: str
    """The problem of all other values, to follow the key and its value."""
    instead: tuple[str, ...] = ()


def limits(backend: str) -> list[Limit]:
    return {"native": NATIVE, "deepspeed": DEEPSPEED}[backend]


def check_backend(resolution: Resolution) -> None:
    """Refuse every setting that the chosen backend does not support, all at once."""
    config = resolution.config
    name = config.backend.name
    for limit in limits(name):
        if not limit.takes(config):
            resolution.refuse("layout", limit.key, limit.why, *limit.instead)
    if name == "deepspeed":
        resolution.require("backend.name", "deepspeed", "DeepSpeed", "backend=native")
        _check_extra(resolution)


def table() -> list[tuple[str, str, str]]:
    """Return, for every key that concerns a backend, the values that native and DeepSpeed support."""
    return [
        (name, _words("native", name), _words("deepspeed", name))
        for name in reference.declared()
        if name.partition(".")[0] not in OUTSIDE
    ]


def _words(backend: str, key: str) -> str:
    return " · ".join(limit.words for limit in limits(backend) if limit.key == key) or "yes"


def value(config: Config, key: str) -> Any:
    return reduce(getattr, key.split("."), config)


def _only(key: str, *values: Any, why: str, instead: tuple[str, ...]) -> Limit:
    """Return the limit of a key of which a backend supports some values."""

    def takes(config: Config) -> bool:
        return value(config, key) in values

    named = [each for each in values if isinstance(each, str) and each not in ("none", "auto")]
    words = " or ".join(named) or "no"
    return Limit(key, takes, words, why, instead)


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


def _is_narrow(config: Config) -> bool:
    return config.precision.compute in ("bf16", "fp16")


DEEPSPEED = [
    Limit(
        "parallel.sequence_parallel",
        lambda config: config.parallel.tp == 1 or not config.parallel.sequence_parallel,
        "false with tp > 1",
        "divides the sequence between tensor-parallel layers, which DeepSpeed's do not",
        ("parallel.sequence_parallel=false", "backend=native"),
    ),
    Limit(
        "model.qk_norm",
        lambda config: config.parallel.tp == 1 or not config.model.qk_norm,
        "with tp = 1",
        "has weights that the heads of all ranks share, and DeepSpeed's layers would not sum their gradients",
        ("parallel.tp=1 parallel.sequence_parallel=true", "backend=native"),
    ),
    Limit(
        "parallel.schedule",
        lambda config: config.parallel.pp == 1 or config.parallel.schedule == "1f1b",
        "1f1b",
        "is not among DeepSpeed's pipeline schedules",
        ("parallel.schedule=1f1b parallel.virtual_stages=auto", "backend=native"),
    ),
    Limit(
        "zero.stage",
        lambda config: config.parallel.pp == 1 or config.zero.stage <= 1,
        "0 and 1 with pp > 1",
        "shards gradients, which DeepSpeed's pipeline does not",
        ("zero.stage=1", "backend=native"),
    ),
    Limit(
        "precision.compute",
        lambda config: (
            config.zero.stage > 0
            or not _is_narrow(config)
            or config.parallel.pp * config.parallel.tp == 1
        ),
        "fp32 with stage 0 and tp or pp > 1",
        "is done by autocast in DeepSpeed's stage 0, which takes data and context parallel only",
        ("zero.stage=1", "precision=fp32", "backend=native"),
    ),
    Limit(
        "backend.compile",
        lambda config: (
            config.backend.compile != "on"
            or (config.zero.stage < 3 and config.parallel.tp * config.parallel.pp == 1)
        ),
        "with stages 0 to 2, tp = pp = 1",
        "would compile around layers that DeepSpeed gathers, or that communicate behind the compiler's back",
        ("backend.compile=off", "backend=native"),
    ),
    _only(
        "precision.params",
        "fp32",
        why="is not supported by DeepSpeed, whose master weights are fp32",
        instead=("precision=fp32", "backend=native"),
    ),
    _only(
        "precision.fp8",
        False,
        why="is done by torchao, whose layers DeepSpeed's engine does not know",
        instead=("precision=bf16", "backend=native"),
    ),
    Limit(
        "precision.reduce",
        lambda config: config.zero.stage > 0 or config.precision.reduce in ("fp32", "fp64"),
        "fp32 with stage 0",
        "rounds gradients that DeepSpeed's stage 0 sums in fp32",
        ("precision.reduce=fp32", "zero.stage=1", "backend=native"),
    ),
    _only(
        "optimizer.name",
        "adamw",
        "sgd",
        why="keeps its moments in blocks of 8 bits, which DeepSpeed's flat shards would split",
        instead=("optimizer=adamw", "backend=native"),
    ),
    _only(
        "parallel.dp_replicate",
        1,
        why="is for FSDP2; DeepSpeed shards over all ranks of dp, and ZeRO++ within a subset of them",
        instead=("parallel.dp_replicate=1", "backend=native"),
    ),
    _only(
        "parallel.ep",
        1,
        why="distributes experts, which DeepSpeed's engine would treat as copies of each other",
        instead=("parallel.ep=1", "backend=native"),
    ),
    _only(
        "model.balance",
        "none",
        "bias",
        why="adds a loss inside the blocks, and DeepSpeed sets its scale",
        instead=("model.balance=bias", "backend=native"),
    ),
    Limit(
        "model.experts",
        lambda config: config.parallel.tp == 1 or config.model.experts == 0,
        "with tp = 1",
        "cannot be divided by DeepSpeed's tensor-parallel layers",
        ("parallel.tp=1 parallel.sequence_parallel=true", "backend=native"),
    ),
    Limit(
        "lora.rank",
        lambda config: config.parallel.tp == 1 or not config.lora.rank,
        "with tp = 1",
        "has no adapters for DeepSpeed's tensor-parallel layers",
        ("parallel.tp=1 parallel.sequence_parallel=true", "backend=native", "lora.rank=0"),
    ),
    Limit(
        "zero.offload_optimizer",
        lambda config: config.zero.offload_optimizer == "none" or config.zero.stage > 0,
        "with stages 1 to 3",
        "needs sharded optimizer states, and zero.stage=0 shards nothing",
        ("zero.stage=1", "zero.offload_optimizer=none"),
    ),
    Limit(
        "zero.offload_param",
        lambda config: config.zero.offload_param == "none" or config.zero.stage == 3,
        "with stage 3",
        "needs sharded parameters, which only zero.stage=3 has",
        ("zero.stage=3", "zero.offload_param=none"),
    ),
    *(
        Limit(
            name,
            lambda config, name=name, stages=stages, usual=usual: (  # type: ignore[misc]
                config.zero.stage in stages or value(config, name) == usual
            ),
            words,
            f"belongs to {words.removeprefix('with ')} and would be ignored",
            (override(name, usual), f"zero.stage={stages[-1]}"),
        )
        for name, stages, words in (
            ("backend.overlap_comm", (1, 2, 3), "with stages 1 to 3"),
            ("backend.reduce_bucket", (1, 2, 3), "with stages 1 to 3"),
            ("backend.allgather_bucket", (1, 2), "with stages 1 and 2"),
            ("backend.prefetch_bucket", (3,), "with stage 3"),
            ("zero.hpz", (3,), "with stage 3"),
            ("zero.quantized_weights", (3,), "with stage 3"),
            ("zero.quantized_gradients", (3,), "with stage 3"),
        )
        for usual in (reference.declared()[name].default,)
    ),
]


def honoured(config: Config) -> bool:
    """Return True if the backend can do all that is asked."""
    return all(limit.takes(config) for limit in limits(config.backend.name))

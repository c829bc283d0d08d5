"""The abilities of each backend: the rules that refuse all other settings, and the table of both."""

import os
from functools import reduce
from operator import getitem
from pathlib import Path

from nanoscale.common.units import listed
from nanoscale.config import reference
from nanoscale.config.deepspeed import STAGES, owner, unowned
from nanoscale.config.optimizers import OPTIMIZERS
from nanoscale.config.reference import value_of
from nanoscale.config.rules.resolution import Resolution
from nanoscale.config.rules.rule import (
    Rule,
    Where,
    data_parallel,
    of_kind,
    other_than,
    refused,
    reset,
    several,
)
from nanoscale.config.schema import Backend, Config, Zero
from nanoscale.config.values.convert import fits
from nanoscale.config.violations import override

OUTSIDE = (
    "run", "scheduler", "data", "checkpoint", "cluster", "launcher", "logger", "profile", "train", "guard",
    "hooks",
)  # fmt: skip
"""Sections of the launcher or the training loop: they apply to every backend."""

_ON = {"backend.name": "deepspeed"}
_TENSOR = {"parallel.tp": several}
_PIPELINE = {"parallel.pp": several}
_NATIVE = "backend=native"


def table() -> list[tuple[str, str, str]]:
    """Return, for every key that concerns a backend, the values that native and DeepSpeed support."""
    return [
        (name, _supported(NATIVE, name), _supported(DEEPSPEED, name))
        for name in reference.declared()
        if name.partition(".")[0] not in OUTSIDE
    ]


def _supported(limits: tuple[Rule, ...], key: str) -> str:
    return " · ".join(limit.supported for limit in limits if limit.key == key) or "yes"


def honored(config: Config) -> bool:
    """Return True if the backend can do all that is asked."""
    limits = {"native": NATIVE, "deepspeed": DEEPSPEED}[config.backend.name]
    return all(limit.holds(config) for limit in limits)


# --- native ---------------------------------------------------------------------------------------

_OFFLOAD, _OFFLOAD_PARAM = "zero.offload_optimizer", "zero.offload_param"
_DEEPSPEEDS = [
    *(
        f"zero.{name}"
        for name in reference.members(Zero)
        if name not in ("stage", "prefetch", "offload_optimizer", "offload_param")
    ),
    *(
        f"backend.{name}"
        for name in reference.members(Backend)
        if name not in ("name", "compile", "attention", "empty_cache")
    ),
]


def _native_limit(key: str, supported: str, where: Where, why: str, *instead: str) -> Rule:
    """Return the limit of a key: `where` are the values that the native backend does not support."""
    where = {"backend.name": "native", **where}
    return refused(key, where, why, *instead, "backend=deepspeed", supported=supported)


NATIVE = (
    *(
        _native_limit(name, "no", {name: other_than(default)},
            "is a setting of DeepSpeed, and backend=native would ignore it",
            override(name, default))
        for name in _DEEPSPEEDS
        for default in (reference.declared()[name].default,)
    ),
    *(
        _native_limit(one, "none or cpu", {one: "nvme"},
            "keeps states on a disk, which only DeepSpeed does", f"{one}=cpu", f"{one}=none")
        for one in (_OFFLOAD, _OFFLOAD_PARAM)
    ),
    *(
        _native_limit(one, f"as {other}", {one: "cpu", other: "none"},
            f"goes with {other}: FSDP2 keeps parameters, gradients and optimizer states in one place",
            f"{other}=cpu", f"{one}=none")
        for one, other in ((_OFFLOAD, _OFFLOAD_PARAM), (_OFFLOAD_PARAM, _OFFLOAD))
    ),
    _native_limit(_OFFLOAD_PARAM, "with stage 3", {_OFFLOAD_PARAM: "cpu", "zero.stage": other_than(3)},
        "gathers the parameters of a block for its passes alone, which zero.stage=3 does",
        "zero.stage=3", f"{_OFFLOAD_PARAM}=none"),
    _native_limit(_OFFLOAD_PARAM, "without muon and adamw8bit",
        {_OFFLOAD_PARAM: "cpu", "optimizer.name": ("muon", "adamw8bit")},
        "updates on the CPU, and this optimizer's update needs a GPU", "optimizer=adamw",
        f"{_OFFLOAD_PARAM}=none"),
    _native_limit(_OFFLOAD_PARAM, "without lora.base=nf4",
        {_OFFLOAD_PARAM: "cpu", "lora.rank": bool, "lora.base": "nf4"},
        "shards weights, and those in 4 bits are whole", "lora.base=whole", f"{_OFFLOAD_PARAM}=none"),
)  # fmt: skip

# --- deepspeed ------------------------------------------------------------------------------------


def _limit(key: str, supported: str, where: Where, why: str, *instead: str) -> Rule:
    """Return the limit of a key: `where` are the values that DeepSpeed does not support."""
    return refused(key, {**_ON, **where}, why, *instead, supported=supported)


def _of_stages(key: str, stages: tuple[int, ...]) -> Rule:
    where = {"zero.stage": other_than(*stages), key: other_than(reference.declared()[key].default)}
    among = f"stages {stages[0]} {'to' if len(stages) > 2 else 'and'} {stages[-1]}"
    among = among if len(stages) > 1 else f"stage {stages[0]}"
    why = f"belongs to {among} and would be ignored"
    return _limit(key, f"with {among}", where, why, reset(key), f"zero.stage={stages[-1]}")


DEEPSPEED = (
    _limit("parallel.sequence_parallel", "false with tp > 1",
        {**_TENSOR, "parallel.sequence_parallel": True},
        "divides the sequence between tensor-parallel layers, which DeepSpeed's do not",
        "parallel.sequence_parallel=false", _NATIVE),
    _limit("model.qk_norm", "with tp = 1", {**_TENSOR, "model.qk_norm": True},
        "has weights that the heads of all ranks share, and DeepSpeed's layers would not sum their "
        "gradients", "parallel.tp=1", _NATIVE),
    _limit("model.attention_sinks", "with tp = 1", {**_TENSOR, "model.attention_sinks": True},
        "are scores of heads, and DeepSpeed divides only the layers before and after them",
        "parallel.tp=1", _NATIVE),
    _limit("parallel.schedule", "1f1b", {**_PIPELINE, "parallel.schedule": other_than("1f1b")},
        "is not among DeepSpeed's pipeline schedules", "parallel.schedule=1f1b", _NATIVE),
    _limit("model.tie_embeddings", "false with pp > 1", {**_PIPELINE, "model.tie_embeddings": True},
        "shares weights of the first stage and the last, whose gradients DeepSpeed's pipeline would not sum",
        "parallel.pp=1", "model.tie_embeddings=false", _NATIVE),
    _limit("zero.stage", "0 and 1 with pp > 1", {**_PIPELINE, "zero.stage": (2, 3)},
        "shards gradients, which DeepSpeed's pipeline does not", "zero.stage=1", _NATIVE),
    Rule("precision.compute",
        ("backend.name", "precision.compute", "zero.stage", "parallel.pp", "parallel.tp"),
        lambda config: (
            config.backend.name != "deepspeed"
            or config.zero.stage > 0
            or config.precision.compute not in ("bf16", "fp16")
            or config.parallel.pp * config.parallel.tp == 1
        ),
        "is done by autocast in DeepSpeed's stage 0, which takes data and context parallel only",
        ("zero.stage=1", "precision=fp32", _NATIVE),
        supported="fp32 with stage 0 and tp or pp > 1"),
    Rule("backend.compile",
        ("backend.name", "backend.compile", "zero.stage", "parallel.pp", "parallel.tp"),
        lambda config: (
            config.backend.name != "deepspeed"
            or config.backend.compile != "on"
            or (config.zero.stage < 3 and config.parallel.tp * config.parallel.pp == 1)
        ),
        "would compile around layers that DeepSpeed gathers, or that communicate behind the "
        "compiler's back",
        ("backend.compile=off", _NATIVE), supported="with stages 0 to 2, tp = pp = 1"),
    _limit("precision.params", "fp32", {"precision.params": other_than("fp32")},
        "is not supported by DeepSpeed, whose master weights are fp32", "precision=fp32", _NATIVE),
    _limit("precision.fp8", "no", {"precision.fp8": True},
        "is done by torchao, whose layers DeepSpeed's engine does not know",
        "precision=bf16", _NATIVE),
    _limit("precision.reduce", "fp32 with stage 0",
        {"zero.stage": 0, "precision.reduce": ("bf16", "fp16")},
        "rounds gradients that DeepSpeed's stage 0 sums in fp32",
        "precision.reduce=fp32", "zero.stage=1", _NATIVE),
    _limit("optimizer.name",
        " or ".join(name for name, rule in OPTIMIZERS.items() if rule.deepspeed),
        {"optimizer.name": tuple(name for name, rule in OPTIMIZERS.items() if not rule.deepspeed)},
        "needs whole matrices, blocks of 8 bits or averages of weights, which DeepSpeed's flat shards lack",
        "optimizer=adamw", _NATIVE),
    *(_limit(key, "no", {key: other_than(reference.declared()[key].default)}, why, reset(key), _NATIVE)
        for key, why in (
            ("optimizer.ema_decay", "averages weights on each step, which DeepSpeed's engine does not do"),
            ("optimizer.qk_clip", "changes weights, which DeepSpeed keeps in buffers of its own"),
            ("zero.prefetch", "is for FSDP2; DeepSpeed decides itself what it gathers ahead"),
            ("optimizer.moments_dtype",
                "is rounded by an update of the native backend, which DeepSpeed's engine does not run"),
            ("parallel.ep_over_tp", "distributes experts, which DeepSpeed's engine does not do"),
            ("parallel.tp_overlap", "is for the layers that the native backend divides over ranks"),
            ("parallel.dp_replicate",
                "is for FSDP2; DeepSpeed shards over all ranks of dp, and ZeRO++ within a subset of them"),
            ("parallel.ep",
                "distributes experts, which DeepSpeed's engine would treat as copies of each other"))),
    _limit("model.balance", "bias", {"model.balance": "aux"},
        "adds a loss inside the blocks, and DeepSpeed sets its scale",
        "model.balance=bias", _NATIVE),
    _limit("model.experts", "with tp = 1", {**_TENSOR, "model.experts": bool},
        "cannot be divided by DeepSpeed's tensor-parallel layers", "parallel.tp=1", _NATIVE),
    _limit("lora.rank", "with tp = 1", {**_TENSOR, "lora.rank": bool},
        "has no adapters for DeepSpeed's tensor-parallel layers",
        "parallel.tp=1", _NATIVE, "lora.rank=0"),
    _limit("lora.base", "whole", {"lora.rank": bool, "lora.base": "nf4"},
        "keeps weights in tensors of torchao, which DeepSpeed's engine does not know",
        "lora.base=whole", _NATIVE),
    _limit("lora.dora", "no", {"lora.rank": bool, "lora.dora": True},
        "needs the norms of whole rows, which DeepSpeed's flat shards lack",
        "lora.dora=false", _NATIVE),
    _limit("zero.offload_optimizer", "with stages 1 to 3",
        {"zero.stage": 0, "zero.offload_optimizer": other_than("none")},
        "needs sharded optimizer states, and zero.stage=0 shards nothing",
        "zero.stage=1", "zero.offload_optimizer=none"),
    _limit("zero.offload_param", "with stage 3",
        {"zero.stage": other_than(3), "zero.offload_param": other_than("none")},
        "needs sharded parameters, which only zero.stage=3 has",
        "zero.stage=3", "zero.offload_param=none"),
    *(_of_stages(key, stages) for key, stages in STAGES.items()),
)  # fmt: skip

RULES = (
    *NATIVE,
    *DEEPSPEED,
    refused("zero.offload_optimizer",
        {**_ON, "zero.offload_optimizer": "nvme", "zero.stage": other_than(3)},
        "is for zero.stage=3; the lower stages offload to host memory",
        "zero.offload_optimizer=cpu", "zero.stage=3"),
    Rule("zero.hpz", ("zero.hpz", "parallel.dp", "backend.name"),
        lambda config: (
            config.backend.name != "deepspeed" or data_parallel(config) % config.zero.hpz == 0
        ),
        "must divide parallel.dp, which is {c.parallel.dp}", ("zero.hpz",)),
    refused("zero.offload_param", {**_ON, "lora.rank": bool, "zero.offload_param": "nvme"},
        "keeps frozen weights on a disk, and a model cannot be loaded there",
        "zero.offload_param=cpu", "lora.rank=0"),
)  # fmt: skip
JOB = of_kind("config",
    *(refused(f"zero.{name}", {**_ON, f"zero.{name}": True, "launcher.device": "cpu"},
        "needs GPU kernels, and launcher.device is cpu", f"zero.{name}=false")
        for name in ("quantized_weights", "quantized_gradients")),
)  # fmt: skip


# --- what DeepSpeed needs --------------------------------------------------------------------------


def check_backend(resolution: Resolution) -> None:
    """Check what DeepSpeed needs; the rules of the layout refuse what a backend does not support."""
    if resolution.config.backend.name != "deepspeed":
        return
    resolution.require("backend.name", "deepspeed", _NATIVE)
    extra = resolution.config.backend.extra
    if owned := owner(extra):
        named = [f"{path} (set {key} instead)" for path, key in owned.items()]
        message = f"sets what a key of nanoscale sets: {listed(named)}"
        values = [(key, reduce(getitem, path.split("."), extra)) for path, key in owned.items()]
        overrides = ["~backend.extra", *(override(key, it) for key, it in values)]
        if rest := unowned(extra):
            overrides.append(override("backend.extra", rest))
        has_equivalents = all(fits(key, it) for key, it in values)
        advice = " ".join(overrides) if has_equivalents else None
        resolution.refuse("backend.extra", message, advice)
    keys, path = ("zero.offload_optimizer", "zero.offload_param"), resolution.config.zero.nvme_path
    offloaded = [key for key in keys if value_of(resolution.config, key) == "nvme"]
    if not offloaded:
        return
    if path is None:
        message = f"is needed by {' and '.join(offloaded)}: a folder on a fast disk"
        resolution.refuse("zero.nvme_path", message, "zero.nvme_path=/local_nvme")
    elif not resolution.remote and not (Path(path).is_dir() and os.access(path, os.W_OK)):
        # a folder of another host is one that only the host can check
        resolution.refuse("zero.nvme_path", "is not a writable folder")

"""The laws across keys: what no single key can tell is wrong.

`check` holds a composed configuration against all of them, reports every violation at once with
the nearest legal values, and resolves what was left open (`auto`, null).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

from nanoscale.config.compose import Composed
from nanoscale.config.provenance import COMMAND_LINE
from nanoscale.config.report import refuse
from nanoscale.config.schema import Config, Data, Model, Optimizer, Scheduler, Train
from nanoscale.errors import Violation

_NOT_OF = {"adamw": ("momentum",), "sgd": ("beta1", "beta2", "eps")}

BYTE_VOCAB = 257
"""256 bytes and the end of a document"""


@dataclass(frozen=True)
class Devices:
    """What this host has to train on."""

    kind: Literal["cpu", "cuda"]
    count: int
    """GPUs, or CPU cores where there is no GPU"""
    names: tuple[str, ...] = ()
    cores: int = 1
    """CPU cores that the ranks may use together"""


@dataclass
class _Case:
    """A request on trial."""

    composed: Composed
    devices: Devices
    violations: list[Violation] = field(default_factory=list)
    kinds: set[str] = field(default_factory=set)

    @property
    def config(self) -> Config:
        return self.composed.config

    def refuse(self, kind: str, key: str, message: str, *suggestions: str | None) -> None:
        """Record a violation of `key` as it was set."""
        section, _, name = key.rpartition(".")
        value = getattr(getattr(self.config, section), name)
        proposals = tuple(dict.fromkeys(text for text in suggestions if text))
        self.violations.append(Violation(key, value, self.composed.source(key), message, proposals))
        self.kinds.add(kind)


def check(composed: Composed, devices: Devices) -> Config:
    """Hold the configuration against every law and resolve what was left open.

    Returns:
        the configuration with integers for `parallel.dp`, `launcher.devices`, `launcher.threads`,
        `train.micro_batch`, `train.steps`, `model.kv_heads`, `model.head_dim`, and for
        `scheduler.decay_steps` where the schedule has a decay of its own; `launcher.device` is
        `cpu` or `cuda`; paths of data are absolute.

    Raises:
        UserError: with every violation; its kind is `layout`, `data` or `config`.
    """
    case = _Case(composed, devices)
    model = _model(case)
    layout = _layout(case)
    train = _length(case, _batch(case, layout.dp))
    scheduler = _scheduler(case, train)
    _precision(case)
    _optimizer(case)
    _logger(case)
    _training(case)
    data = _data(case)
    _saving(case)
    _run(case)
    if case.violations:
        refuse(case.violations, kind=case.kinds.pop() if len(case.kinds) == 1 else "config")
    config = composed.config
    return replace(
        config,
        run=replace(config.run, root=_expanded(config.run.root)),
        model=model,
        parallel=replace(config.parallel, dp=layout.dp),
        launcher=replace(
            config.launcher, device=layout.device, devices=layout.ranks, threads=layout.threads
        ),
        train=train,
        scheduler=scheduler,
        data=data,
    )


def _expanded(root: str) -> str:
    """With `~` as the shell would have it: a folder of that name is a trap."""
    try:
        return str(Path(root).expanduser()) if root.startswith("~") else root
    except RuntimeError:
        return root


# --- the model ------------------------------------------------------------------------------------


def _model(case: _Case) -> Model:
    model = case.config.model
    kv_heads = model.kv_heads or model.heads
    if model.heads % kv_heads:
        case.refuse(
            "config",
            "model.kv_heads",
            f"must divide model.heads={model.heads}",
            *(f"model.kv_heads={n}" for n in _near_divisors(model.heads, kv_heads)),
        )
    head_dim = model.head_dim or model.hidden // model.heads
    if model.head_dim is None and model.hidden % model.heads:
        case.refuse(
            "config",
            "model.heads",
            f"must divide model.hidden={model.hidden} unless model.head_dim is set",
            *(f"model.heads={n}" for n in _near_divisors(model.hidden, model.heads)),
        )
    elif model.position == "rope" and head_dim % 2:
        case.refuse(
            "config",
            "model.head_dim" if model.head_dim else "model.heads",
            f"makes heads {head_dim} wide, and rotary positions turn pairs: an even width is needed",
            f"model.head_dim={head_dim + 1}",
            f"model.head_dim={head_dim - 1}" if head_dim > 1 else None,
        )
    _positions(case, model)
    return replace(model, kv_heads=kv_heads, head_dim=max(1, head_dim))


def _positions(case: _Case, model: Model) -> None:
    length = case.config.train.seq_len
    if length > model.max_seq_len:
        case.refuse(
            "config",
            "train.seq_len",
            f"is longer than the model admits (model.max_seq_len={model.max_seq_len})",
            f"train.seq_len={model.max_seq_len}",
            f"model.max_seq_len={length}",
        )
    scaling = model.rope_scaling
    if scaling is None:
        return
    if model.position != "rope":
        case.refuse(
            "config",
            "model.position",
            "has no rotary frequencies for model.rope_scaling to stretch",
            "model.rope_scaling=null",
        )
    if scaling.high_freq_factor <= scaling.low_freq_factor:
        case.violations.append(
            Violation(
                key := "model.rope_scaling.high_freq_factor",
                scaling.high_freq_factor,
                case.composed.source(key),
                f"must be above low_freq_factor={scaling.low_freq_factor:g}",
                (f"{key}={scaling.low_freq_factor * 4:g}",),
            )
        )
        case.kinds.add("config")


# --- the layout -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Layout:
    device: Literal["cpu", "cuda"]
    dp: int
    ranks: int
    """ranks on the one host of this version, which is the world size"""
    threads: int


def _layout(case: _Case) -> _Layout:
    device = _device(case)
    limit = case.devices.count if device == "cuda" and case.devices.kind == "cuda" else None
    dp, ranks = _degrees(case, limit)
    _axes(case)
    _replicas(case, dp)
    asked = case.config.launcher.threads
    threads = max(1, case.devices.cores // ranks) if asked == "auto" else asked
    return _Layout(device, dp, ranks, threads)


def _device(case: _Case) -> Literal["cpu", "cuda"]:
    asked = case.config.launcher.device
    if asked == "auto":
        return case.devices.kind
    if asked == "cuda" and case.devices.kind != "cuda":
        case.refuse(
            "layout", "launcher.device", "is asked for, and no GPU is here", "launcher.device=cpu"
        )
    return asked


def _degrees(case: _Case, limit: int | None) -> tuple[int, int]:
    """The data-parallel degree and the ranks; `limit`: the GPUs there are, none on cpu."""
    layout, asked = case.config.parallel, case.config.launcher.devices
    if limit is not None and asked != "auto" and asked > limit:
        message = f"is more than the {_counted(limit, 'GPU')} of this host"
        fewer, cpu = f"launcher.devices={limit}", "launcher.device=cpu"
        case.refuse("layout", "launcher.devices", message, fewer, cpu)
    copy = layout.tp * layout.pp * layout.cp
    if layout.dp != "auto":
        _fixed_degrees(case, layout.dp, copy, limit)
        return layout.dp, layout.dp * copy
    there = asked if asked != "auto" else limit
    if there is None:
        return layout.dp_replicate, layout.dp_replicate * copy
    if there < copy or (asked != "auto" and there % copy):
        axis = max(("tp", "pp", "cp"), key=lambda name: getattr(layout, name))
        devices = "launcher.devices" if asked != "auto" else "the GPUs of this host"
        case.refuse(
            "layout",
            f"parallel.{axis}",
            f"makes tp·pp·cp = {copy} ranks for one copy of the model; {devices} = {there} is no "
            f"multiple of that",
            f"parallel.{axis}=1",
        )
    dp = max(1, there // copy)
    return dp, dp * copy


def _fixed_degrees(case: _Case, dp: int, copy: int, limit: int | None) -> None:
    layout, asked = case.config.parallel, case.config.launcher.devices
    world = dp * copy
    product = f"dp·tp·pp·cp = {dp}·{layout.tp}·{layout.pp}·{layout.cp} = {world} ranks"
    if asked != "auto" and asked != world:
        case.refuse(
            "layout",
            "parallel.dp",
            f"makes {product}, and launcher.devices={asked} ({case.composed.source('launcher.devices')})"
            " must be the same number",
            f"launcher.devices={world}",
            f"parallel.dp={asked // copy}" if asked % copy == 0 else None,
        )
    if asked == "auto" and limit is not None and world > limit:
        case.refuse(
            "layout",
            "parallel.dp",
            f"makes {product}, and this host has {_counted(limit, 'GPU')}",
            f"parallel.dp={limit // copy}" if limit >= copy else None,
            "launcher.device=cpu",
        )


def _axes(case: _Case) -> None:
    """What this version's backend cannot lay out."""
    layout = case.config.parallel
    beyond = [axis for axis in ("tp", "pp", "cp") if getattr(layout, axis) > 1]
    if not beyond:
        return
    plain = [f"parallel.{axis}=1" for axis in beyond]
    if case.config.launcher.devices == "auto" and case.devices.kind == "cpu":
        ranks = (layout.dp_replicate if layout.dp == "auto" else layout.dp) * math.prod(
            getattr(layout, axis) for axis in beyond
        )
        plain.append(f"parallel.dp={_near_divisors(case.config.train.global_batch, ranks)[0]}")
    elif layout.dp != "auto":
        plain.append("parallel.dp=auto")
    for axis in beyond:
        message = (
            "is a layout that the native backend of this version does not train: it trains "
            "data-parallel ones (dp, dp_replicate, every zero.stage)"
        )
        case.refuse("layout", f"parallel.{axis}", message, " ".join(plain))


def _replicas(case: _Case, dp: int) -> None:
    replicas = case.config.parallel.dp_replicate
    if dp % replicas:
        case.refuse(
            "layout",
            "parallel.dp_replicate",
            f"must divide parallel.dp, which is {dp}",
            *(f"parallel.dp_replicate={n}" for n in _near_divisors(dp, replicas)),
        )
    if replicas > 1 and case.config.zero.stage == 0:
        case.refuse(
            "layout",
            "parallel.dp_replicate",
            "makes copies of a sharded model, and zero.stage=0 shards nothing",
            "zero.stage=3",
            "parallel.dp_replicate=1",
        )


# --- the batch and the length ---------------------------------------------------------------------


def _batch(case: _Case, dp: int) -> Train:
    train = case.config.train
    batch, micro = train.global_batch, train.micro_batch
    each = dp if micro == "auto" else micro * dp
    if batch % each == 0:
        return replace(train, micro_batch=batch // dp if micro == "auto" else micro)
    law = f"dp = {dp}" if micro == "auto" else f"micro_batch·dp = {micro}·{dp} = {each}"
    smaller = [
        f"train.micro_batch={n}"
        for n in (_near_divisors(batch // dp, micro) if micro != "auto" and batch % dp == 0 else [])
    ]
    case.refuse(
        "layout",
        "train.global_batch",
        f"must be a multiple of {law}",
        *(f"train.global_batch={n}" for n in _near_multiples(each, batch)),
        *smaller[:1],
        f"parallel.dp={_near_divisors(batch, dp)[0]}" if batch % dp else None,
    )
    return replace(train, micro_batch=1)


def _length(case: _Case, train: Train) -> Train:
    """The steps, from the tokens where those are given instead."""
    per_step = train.global_batch * train.seq_len
    from_tokens = math.ceil(train.tokens / per_step) if train.tokens is not None else None
    if train.steps is None:
        if from_tokens is None:
            case.refuse(
                "config",
                "train.steps",
                "is not set, nor is train.tokens: one of them must say how long to train",
                "train.steps=100",
                "recipe=tiny" if case.composed.recipe is None else None,
            )
        return replace(train, steps=from_tokens or 1)
    if from_tokens is None or from_tokens == train.steps:
        return train
    by_hand = {
        key: case.composed.source(f"train.{key}") == COMMAND_LINE for key in ("steps", "tokens")
    }
    if by_hand["steps"] != by_hand["tokens"]:
        # The command line wins over the recipe, also where it says the same thing by another key.
        if by_hand["steps"]:
            return replace(train, tokens=None)
        return replace(train, steps=from_tokens)
    case.refuse(
        "config",
        "train.tokens",
        f"and train.steps={train.steps} both say how long to train, and this makes "
        f"{_counted(from_tokens, 'step')} of {per_step} tokens",
        "train.tokens=null",
        "train.steps=null",
    )
    return train


def _scheduler(case: _Case, train: Train) -> Scheduler:
    scheduler, steps = case.config.scheduler, train.steps or 1
    if scheduler.warmup_steps > steps:
        case.refuse(
            "config",
            "scheduler.warmup_steps",
            f"is more than the {_counted(steps, 'step')} of the training",
            f"scheduler.warmup_steps={steps // 10}",
        )
    if scheduler.name != "wsd":
        if scheduler.decay_steps is not None:
            case.refuse(
                "config",
                "scheduler.decay_steps",
                f"is a setting of wsd; {scheduler.name} has no decay of its own",
                "scheduler.decay_steps=null",
                "scheduler.name=wsd",
            )
        return scheduler
    if scheduler.decay_steps is None:
        left = max(0, steps - scheduler.warmup_steps)
        return replace(scheduler, decay_steps=min(left, max(1, steps // 10)))
    if scheduler.warmup_steps + scheduler.decay_steps > steps >= scheduler.warmup_steps:
        case.refuse(
            "config",
            "scheduler.decay_steps",
            f"and warmup_steps={scheduler.warmup_steps} are more than the "
            f"{_counted(steps, 'step')} of the training",
            f"scheduler.decay_steps={steps - scheduler.warmup_steps}",
        )
    return scheduler


# --- numbers --------------------------------------------------------------------------------------


def _precision(case: _Case) -> None:
    precision = case.config.precision
    if (precision.params == "fp64") != (precision.compute == "fp64"):
        narrow = "params" if precision.compute == "fp64" else "compute"
        wide = "compute" if narrow == "params" else "params"
        case.refuse(
            "config",
            "precision.compute",
            f"and precision.params={precision.params} do not go together: fp64 is for both",
            f"precision.{narrow}=fp64 precision.reduce=fp64",
            f"precision.{wide}=fp32 precision.reduce=fp32",
        )
    elif (precision.params == "fp64") != (precision.reduce == "fp64"):
        case.refuse(
            "config",
            "precision.reduce",
            f"would sum gradients of {precision.compute} in another width than the weights' "
            f"{precision.params}",
            f"precision.reduce={precision.params}",
        )
    elif precision.reduce == "bf16" and precision.compute != "bf16":
        case.refuse(
            "config",
            "precision.reduce",
            f"would round gradients that were computed in {precision.compute}",
            "precision.reduce=fp32",
        )
    elif precision.reduce == "bf16" and case.config.zero.stage == 0:
        case.refuse(
            "config",
            "precision.reduce",
            "needs sharded gradients: those of zero.stage=0 travel in the width of the weights",
            "precision.reduce=fp32",
            "zero.stage=2",
        )


def _optimizer(case: _Case) -> None:
    optimizer = case.config.optimizer
    for name in _NOT_OF[optimizer.name]:
        usual = getattr(Optimizer(), name)
        if getattr(optimizer, name) != usual:
            case.refuse(
                "config",
                f"optimizer.{name}",
                f"does not concern optimizer.name={optimizer.name} and would be ignored",
                f"optimizer.{name}={usual}",
            )


def _logger(case: _Case) -> None:
    if case.config.logger.tensorboard == "on" and find_spec("tensorboard") is None:
        case.refuse(
            "config",
            "logger.tensorboard",
            "needs TensorBoard, which is not installed: pip install 'nanoscale[tensorboard]'",
            "logger=none",
        )


def _training(case: _Case) -> None:
    for name in ("beta1", "beta2"):
        if getattr(case.config.optimizer, name) >= 1:
            message = "must be below 1: at 1 the moment never moves"
            case.refuse("config", f"optimizer.{name}", message, f"optimizer.{name}=0.95")
    train = case.config.train
    if train.eval_every and not case.config.data.valid_fraction:
        case.refuse(
            "config",
            "train.eval_every",
            "needs a validation split, and data.valid_fraction=0 leaves none",
            "data.valid_fraction=0.02",
            "train.eval_every=0",
        )
    if case.config.cluster.peak_tflops == 0:
        message = "must be above 0"
        case.refuse("config", "cluster.peak_tflops", message, "cluster.peak_tflops=null")


# --- files ----------------------------------------------------------------------------------------


def _data(case: _Case) -> Data:
    data = case.config.data
    if data.source == "megatron":
        _indexed(case, data)
    elif data.path is not None:
        message = "is read with data.source=megatron only"
        case.refuse("data", "data.path", message, "data=megatron", "data.path=null")
    _tokenizer(case, data)
    return replace(
        data,
        path=_absolute(data.path),
        tokenizer=data.tokenizer
        if data.tokenizer in ("byte", "bpe")
        else str(_absolute(data.tokenizer)),
        cache_dir=_absolute(data.cache_dir),
    )


def _indexed(case: _Case, data: Data) -> None:
    if data.path is None:
        message = "is needed by data.source=megatron: the files' common path, without .bin and .idx"
        case.refuse("data", "data.path", message, "data.path=/path/to/corpus")
        return
    missing = [end for end in (".bin", ".idx") if not Path(f"{data.path}{end}").is_file()]
    if missing:
        files = " and ".join(f"{data.path}{end}" for end in missing)
        stem = data.path.removesuffix(".bin").removesuffix(".idx")
        plain = stem != data.path and Path(f"{stem}.bin").is_file()
        message = f"has no {files}"
        case.refuse("data", "data.path", message, f"data.path={stem}" if plain else None)


def _tokenizer(case: _Case, data: Data) -> None:
    vocab = case.config.model.vocab
    if data.tokenizer == "byte":
        if vocab < BYTE_VOCAB:
            message = f"is less than the {BYTE_VOCAB} tokens of data.tokenizer=byte"
            case.refuse("config", "model.vocab", message, f"model.vocab={BYTE_VOCAB}")
    elif data.tokenizer == "bpe":
        if data.source == "megatron":
            message = "is trained on text, and data.source=megatron has tokens already"
            example = "data.tokenizer=/path/to/tokenizer.json"
            case.refuse("data", "data.tokenizer", message, example, "data.tokenizer=byte")
        if vocab < data.bpe_vocab:
            case.refuse(
                "config",
                "data.bpe_vocab",
                f"is more than the rows of the embedding (model.vocab={vocab})",
                f"data.bpe_vocab={vocab}" if vocab >= BYTE_VOCAB else None,
                f"model.vocab={data.bpe_vocab}",
                "data.tokenizer=byte",
            )
    elif not Path(data.tokenizer).is_file():
        message = "is neither byte nor bpe nor a file that exists"
        fits = data.source == "stdlib" and data.bpe_vocab <= vocab
        bpe = "data.tokenizer=bpe" if fits else None
        case.refuse("data", "data.tokenizer", message, "data.tokenizer=byte", bpe)


def _saving(case: _Case) -> None:
    saving = case.config.checkpoint
    if saving.keep_every is None or (saving.every and saving.keep_every % saving.every == 0):
        return
    if saving.every:
        message = f"must be a multiple of checkpoint.every={saving.every}: nothing else is saved"
        multiples = _near_multiples(saving.every, saving.keep_every)
        proposals = [f"checkpoint.keep_every={n}" for n in multiples]
    else:
        message = "needs checkpoint.every: without it only the last step is saved"
        proposals = [f"checkpoint.every={saving.keep_every}", "checkpoint.keep_every=null"]
    case.refuse("config", "checkpoint.keep_every", message, *proposals)


def _run(case: _Case) -> None:
    run = case.config.run
    name = run.name
    if name is not None and (legal := _legal_name(name)) != name:
        message = (
            "names a folder: at most 200 characters, no slash and no control character, "
            "no dot or dash in front"
        )
        case.refuse("run", "run.name", message, f"run.name={legal}" if legal else None)
    if not run.root:
        case.refuse("run", "run.root", "is empty", "run.root=runs")


def _legal_name(name: str) -> str:
    kept = "".join("-" if char in "/\\" or not char.isprintable() else char for char in name)
    return kept.lstrip(".-").strip()[:200]


# --- arithmetic -----------------------------------------------------------------------------------


def _near_divisors(number: int, value: int) -> list[int]:
    """The divisors of `number` around `value`: the largest not above it, the smallest not below."""
    divisors = list(_divisors(number))
    below = [n for n in divisors if n <= value]
    above = [n for n in divisors if n >= value]
    return list(dict.fromkeys([*below[-1:], *above[:1]]))


def _divisors(number: int) -> Iterator[int]:
    small = [n for n in range(1, math.isqrt(number) + 1) if number % n == 0]
    yield from small
    yield from (number // n for n in reversed(small) if n * n != number)


def _near_multiples(step: int, value: int) -> list[int]:
    below = value // step * step
    return [n for n in (below, below + step) if n > 0]


def _counted(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _absolute(path: str | None) -> Any:
    return str(Path(path).expanduser().absolute()) if path else path

"""Rules of the batch, of the training's length and schedule, and of a run: its folder, its loggers, its
checkpoints, its profile."""

import netrc
import os
import re
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from nanoscale.common.credentials import without_credentials
from nanoscale.common.object_storage import problem
from nanoscale.common.units import counted
from nanoscale.config.reference import declared
from nanoscale.config.rules.data import absolute
from nanoscale.config.rules.layout import sequence_step
from nanoscale.config.rules.pipeline import divides_batch, largest_micro_batch
from nanoscale.config.rules.resolution import Resolution
from nanoscale.config.rules.rule import (
    Rule,
    data_parallel,
    of_kind,
    only_with,
    other_than,
    refused,
    reset,
    several,
)
from nanoscale.config.schema import Config, PhaseSettings, Run, Scheduler, Train
from nanoscale.config.token_files import training_samples
from nanoscale.config.token_formats import FORMATS, is_parts
from nanoscale.config.training_phases import PIECEWISE, SCHEDULERS, phases_of, steps_for
from nanoscale.config.values.forms import RULE, legal_name, series_of
from nanoscale.config.violations import override, shown

# --- batch ----------------------------------------------------------------------------------------


def _undivided_batch(config: Config) -> str:
    dp, micro, rows = data_parallel(config), config.train.micro_batch, config.train.rows_of_sample
    least = f"dp = {dp}" if rows == 1 else f"{rows}·dp = {rows * dp}, whole pairs on each rank"
    step = least if micro == "auto" else f"micro_batch·dp = {micro}·{dp} = {micro * dp}"
    return f"must be a multiple of {step}"


def _divides_among_dp(config: Config) -> bool:
    return config.train.global_batch % (data_parallel(config) * config.train.rows_of_sample) == 0


_BATCH = ("train.global_batch", "parallel.dp", "train.objective")

RULES = (
    Rule("train.global_batch", _BATCH, _divides_among_dp, _undivided_batch,
        ("train.global_batch", "parallel.dp<")),
    Rule("train.global_batch", (*_BATCH, "train.micro_batch"),
        lambda config: not _divides_among_dp(config) or divides_batch(config), _undivided_batch,
        ("train.global_batch", "train.micro_batch<")),
    Rule("train.micro_batch", ("train.micro_batch", "train.objective"),
        lambda config: (
            config.train.micro_batch == "auto"
            or config.train.micro_batch % config.train.rows_of_sample == 0
        ),
        "must be even: train.objective={c.train.objective} takes pairs of sequences", ("train.micro_batch",)),
)  # fmt: skip


# --- length ---------------------------------------------------------------------------------------

_ALL_IN_FLIGHT = ("gpipe", "looped-bfs")
"""Schedules whose memory grows with the number of micro batches."""
_LEAST_STEPS = 10
"""The steps that a recipe's `train.epochs` should have on a small file."""
_LENGTHS = ("steps", "tokens", "epochs")
"""The keys that set the length of a training."""


def resolve_train(resolution: Resolution) -> Train:
    """Return the batch, and the steps, computed from the tokens or the epochs if these are given instead.

    The data is resolved before.
    """
    config, train = resolution.config, resolution.config.train
    if not _check_phases(resolution):
        train = replace(train, phases={})
    given = [key for key in _LENGTHS if resolution.composed.by_hand(f"train.{key}")]
    if given and "epochs" not in given:
        train = replace(train, epochs=None)  # also where the recipe's epochs would have no meaning
    elif _is_of_recipe(resolution, "train.global_batch"):
        train = _with_steps(config, train)
    micro = train.micro_batch
    if micro == "auto":
        samples = train.global_batch // data_parallel(config)
        micro = largest_micro_batch(config, samples) or train.rows_of_sample  # if none is legal
    train = replace(train, micro_batch=micro, eval_tasks_dir=absolute(train.eval_tasks_dir))
    lengths = _lengths(resolution, train)
    if not lengths:
        if train.epochs is None:  # otherwise its own error says enough
            message = "is not set, nor are train.tokens and train.epochs: set one of them"
            recipe = "recipe=tiny" if resolution.composed.recipe is None else None
            resolution.refuse("train.steps", message, "train.steps=100", recipe)
        return replace(train, steps=1)
    if len({*lengths.values()}) == 1:
        return replace(train, steps=next(iter(lengths.values())))
    by_hand = [key for key in given if key in lengths]
    if len(by_hand) == 1:
        # The command line wins over the recipe, also if it sets the same by another key.
        (key,) = by_hand
        others: dict[str, Any] = dict.fromkeys({"tokens", "epochs"} - {key})
        return replace(train, **others, steps=lengths[key])
    first, *_, last = by_hand or lengths
    message = (
        f"and train.{first}={shown(getattr(train, first))} are both set, and train.{last} means "
        f"{counted(lengths[last], 'step')} of {train.global_batch * train.seq_len} tokens"
    )
    resolution.refuse(f"train.{last}", message, f"train.{last}=null", f"train.{first}=null")
    return replace(train, steps=lengths[first])


def _is_of_recipe(resolution: Resolution, key: str) -> bool:
    """True if a packaged recipe set a key: neither the user nor the frozen configuration of a run."""
    return resolution.composed.asked_for(key) and not resolution.composed.by_user(key)


def _with_steps(config: Config, train: Train) -> Train:
    """Return the training with a recipe's batch, halved until the epochs have _LEAST_STEPS, if it can be."""
    samples = training_samples(config.data, train)
    is_tuned = config.model.init_from is not None and not train.phases
    if samples is None or not train.epochs or not is_tuned or config.parallel.pp > 1:
        return train
    rows, batch = train.epochs * samples * train.rows_of_sample, train.global_batch
    least = data_parallel(config) * train.rows_of_sample
    least *= 1 if train.micro_batch == "auto" else train.micro_batch
    while batch % (2 * least) == 0 and rows < _LEAST_STEPS * batch:
        batch //= 2
    return replace(train, global_batch=batch)


def _check_phases(resolution: Resolution) -> bool:
    """Refuse phases that cannot be trained; return False if their steps are not known."""
    train, before = resolution.config.train, len(resolution.violations)
    names, done = list(train.phases), 0
    for name, entry in train.phases.items():
        key = f"train.phases.{name}"
        _check_end(resolution, key, entry, done, is_last=name == names[-1])
        done = done if entry.until is None else entry.until
        _check_sizes(resolution, key, entry)
        _check_weights(resolution, f"{key}.weights", entry.weights)
        if (entry.lr is not None) != (resolution.config.scheduler.name == PIECEWISE):
            message = "and scheduler.name=piecewise belong together, in every phase"
            other = f"{key}.lr=1.0" if entry.lr is None else "scheduler.name=piecewise"
            resolution.refuse_value(f"{key}.lr", entry.lr, message, other)
    if not train.phases and resolution.config.scheduler.name == PIECEWISE:
        message = "takes its rates from train.phases, which has none"
        some = override("train.phases", {"all": {"lr": 1.0}})
        resolution.refuse("scheduler.name", message, some, "scheduler.name=cosine")
    if len(resolution.violations) > before:
        return False
    for phase in phases_of(train):
        if phase.last <= phase.first:  # a phase that ends with tokens may be longer than it seems
            key = f"train.phases.{phase.name}.until"
            message = f"is not after step {phase.first}, at which the phase before it ends"
            resolution.refuse_value(key, int(phase.last), message, f"{key}={phase.first + 100}")
            return False
    return True


def _check_end(
    resolution: Resolution, key: str, entry: PhaseSettings, done: int, *, is_last: bool
) -> None:
    ends = [name for name in ("until", "until_tokens") if getattr(entry, name) is not None]
    if len(ends) > 1:
        resolution.refuse_value(key, vars(entry), "has two ends", f"{key}.until_tokens=null")
    if entry.until is not None and entry.until <= done:
        message, better = f"must be an integer from {done + 1}", f"{key}.until={done + 100}"
        resolution.refuse_value(f"{key}.until", entry.until, message, better)
    if bool(ends) == is_last:
        message = "is the last phase, and lasts to the end" if is_last else "has no end"
        advice = [f"{key}.{name}=null" for name in ends] or [f"{key}.until={done + 100}"]
        resolution.refuse_value(key, vars(entry), message, " ".join(advice))


def _check_sizes(resolution: Resolution, key: str, entry: PhaseSettings) -> None:
    config = resolution.config
    train, backend = config.train, config.backend.name
    step = sequence_step(config)
    legal: dict[str, tuple[Callable[[int], bool], str, int]] = {
        "global_batch": (lambda size: size % train.global_batch == 0,
            f"a multiple of train.global_batch={train.global_batch}", train.global_batch),
        "seq_len": (lambda size: train.seq_len % size == 0 and size % step == 0,
            f"a multiple of {step} that divides train.seq_len={train.seq_len}", train.seq_len),
    }  # fmt: skip
    for name, (holds, rule, usual) in legal.items():
        size, advice = getattr(entry, name), f"{key}.{name}={usual}"
        if size in (None, usual):
            continue
        if size < 1 or not holds(size):
            message = f"must be {rule}"
        elif name == "seq_len" and train.has_whole_documents:
            message = f"cuts samples, and train.objective={train.objective} needs whole documents"
        elif backend == "deepspeed":
            advice = "backend=native"
            message = "changes within a run, which DeepSpeed's engine does not support"
        else:
            continue
        resolution.refuse_value(f"{key}.{name}", size, message, advice)
    layout, batch = config.parallel, entry.global_batch or train.global_batch
    if layout.pp > 1 and layout.schedule in _ALL_IN_FLIGHT and batch != train.global_batch:
        message = f"keeps more micro batches with parallel.schedule={layout.schedule}"
        resolution.refuse_value(f"{key}.global_batch", batch, message, "parallel.schedule=1f1b")


def _check_weights(resolution: Resolution, key: str, weights: dict[str, float] | None) -> None:
    sources = resolution.config.data.mixture
    if weights is None:
        return
    if not weights or not set(weights) <= set(sources) or min(weights.values()) < 0:
        names = ", ".join(sources) or "none, as data.mixture is empty"
        message = f"must be numbers by the names of the sources, which are {names}"
        resolution.refuse_value(key, weights, message, f"{key}=null")
    elif not any(weights.values()):
        resolution.refuse_value(key, weights, "leaves no source", f"{key}=null")


_STABLE = tuple(name for name, rule in SCHEDULERS.items() if rule.has_own_steps)


def _lengths(resolution: Resolution, train: Train) -> dict[str, int]:
    lengths = {}
    if train.steps is not None:
        lengths["steps"] = train.steps
    if train.tokens is not None:
        lengths["tokens"] = steps_for(train, train.tokens / train.seq_len)
    if train.epochs is not None and (samples := _epoch(resolution, train)) is not None:
        rows = train.epochs * samples * train.rows_of_sample
        lengths["epochs"] = max(1, steps_for(train, rows))
    return lengths


def _epoch(resolution: Resolution, train: Train) -> int | None:
    """Return the samples of an epoch; refuse `train.epochs` if they are not known."""
    data = resolution.config.data
    samples = training_samples(data, train)
    given = train.steps is not None or train.tokens is not None
    if samples is None and not any(it.key.startswith("data.") for it in resolution.violations):
        if data.mixture:
            why = "is not defined for several sources, each of which is seen by its own weight"
        elif data.path is not None and is_parts(data.path):
            why = "needs all samples, and these texts are prepared beside the training"
        elif data.source in FORMATS and not FORMATS[data.source].reads_eos:
            why = f"needs samples, and {data.path} has none of at most {train.seq_len} tokens"
        else:
            why = f"needs samples counted before the launch; data.source={data.source} counts them in it"
        instead = f"train.epochs=null{'' if given else ' train.steps=100'}"
        resolution.refuse("train.epochs", why, instead)
    return samples


# --- schedule, evaluations and checkpoints --------------------------------------------------------

_KEEP = "checkpoint.keep_every"


def _fits_decay(config: Config) -> bool:
    """True if the warm-up and the final decay fit the training, or if the warm-up alone does not."""
    scheduler, steps = config.scheduler, config.train.steps or 1
    warmup, decay = scheduler.warmup_steps, scheduler.decay_steps or 0
    decays_at_end = SCHEDULERS[scheduler.name].has_own_steps
    return not decays_at_end or warmup > steps or warmup + decay <= steps


def _needs_evaluations(key: str) -> Rule:
    needed = {"train.eval_every": 0, key: other_than(declared()[key].default)}
    message = "needs evaluations, and train.eval_every=0 has none"

    def evaluations(config: Config) -> list[str]:
        return [f"train.eval_every={min(100, config.train.steps or 100)}"]

    return refused(key, needed, message, evaluations, reset(key))


JOB = of_kind("config",
    refused("train.eval_every",
        {"train.eval_every": bool, "data.valid_fraction": 0, "data.valid_path": None, "data.mixture": {}},
        "needs a validation split, and data.valid_fraction=0 leaves none",
        "data.valid_fraction=0.02", "train.eval_every=0"),
    Rule("scheduler.warmup_steps", ("scheduler.warmup_steps", "train.steps"),
        lambda config: config.scheduler.warmup_steps <= (config.train.steps or 1),
        lambda config: (
            f"is more than the {counted(config.train.steps or 1, 'step')} of the training"
        ), lambda config: [f"scheduler.warmup_steps={(config.train.steps or 1) // 10}"]),
    refused("scheduler.decay_steps",
        {"scheduler.name": other_than(*_STABLE), "scheduler.decay_steps": other_than(None)},
        f"is a setting of {', '.join(_STABLE)}; {{c.scheduler.name}} has no decay of its own",
        "scheduler.decay_steps=null", *(f"scheduler.name={name}" for name in _STABLE)),
    Rule("scheduler.decay_steps",
        ("scheduler.name", "scheduler.decay_steps", "scheduler.warmup_steps", "train.steps"),
        _fits_decay,
        lambda config: (
            f"and warmup_steps={config.scheduler.warmup_steps} are more than the "
            f"{counted(config.train.steps or 1, 'step')} of the training"
        ), ("scheduler.decay_steps<",)),
)  # fmt: skip
SAVING = of_kind("config",
    refused("guard.every",
        {"guard.every": other_than(None, 0), "backend.name": "deepspeed", "zero.stage": 3},
        "compares nothing with DeepSpeed's zero.stage=3, which replicates no weights",
        "guard.every=null"),
    refused("train.statistics_every",
        {"train.statistics_every": other_than(0), "backend.name": "deepspeed"},
        "reads gradients before the update, which DeepSpeed keeps in buffers of its own",
        "train.statistics_every=0", "backend=native"),
    *(refused("optimizer.qk_clip", {"optimizer.qk_clip": other_than(None), key: value}, text,
        "optimizer.qk_clip=null")
        for key, value, text in (
            ("model.source", other_than("own"), "reads the attention of nanoscale's own transformer"),
            ("model.qk_norm", True, "scales weights whose results model.qk_norm normalizes again"),
            ("lora.rank", bool, "scales the weights of queries and keys, which are frozen with lora.rank"),
            ("parallel.cp", several, "needs whole sequences of keys on a rank, which parallel.cp divides"),
            ("backend.compile", "on", "watches attention, which backend.compile=on fuses"))),
    Rule("logger.mlflow_uri", ("logger.mlflow_uri",),
        lambda config: without_credentials(uri := config.logger.mlflow_uri or "") == uri,
        "holds a password, which everybody could read in the run: set MLFLOW_TRACKING_USERNAME and "
        "MLFLOW_TRACKING_PASSWORD instead",
        lambda config: [
            override("logger.mlflow_uri", without_credentials(config.logger.mlflow_uri or "").partition("?")[0])
        ]),
    Rule("checkpoint.upload", ("checkpoint.upload",),
        lambda config: problem(config.checkpoint.upload) is None,
        lambda config: str(problem(config.checkpoint.upload)), ("checkpoint.upload=null",)),
    _needs_evaluations("checkpoint.keep_best"),
    _needs_evaluations("train.eval_tasks"),
    refused("train.eval_tasks", {"train.eval_tasks": other_than([]), "data.source": ("random", "hooks")},
        "needs a tokenizer, and data.source={c.data.source} has none", "train.eval_tasks=[]"),
    refused("train.eval_tasks", {"train.eval_tasks": other_than([]), "train.objective": ("masked", "classify")},
        "predicts the next token, and train.objective={c.train.objective} does not", "train.eval_tasks=[]"),
    Rule("checkpoint.best_metric", ("checkpoint.best_metric", "train.eval_tasks", "train.objective"),
        lambda config: (
            config.checkpoint.best_metric in config.train.evaluated or bool(config.train.eval_tasks)
        ),
        "is not measured by evaluations of train.objective={c.train.objective} without train.eval_tasks",
        lambda config: [override("checkpoint.best_metric", name) for name in config.train.evaluated]),
    *(only_with(f"train.eval_tasks_{name}", {"train.eval_tasks": other_than([])}, "train.eval_tasks=[arc_easy]")
        for name in ("dir", "limit")),
    _needs_evaluations("train.stop_when.patience"),
    _needs_evaluations("train.stop_when.eval_loss"),
    refused(_KEEP, {_KEEP: other_than(None), "checkpoint.every": 0},
        "needs checkpoint.every: checkpoints by time or at the end have no fixed step",
        "checkpoint.every={c.checkpoint.keep_every}", f"{_KEEP}=null"),
    Rule(_KEEP, (_KEEP, "checkpoint.every"),
        lambda config: (
            not config.checkpoint.every
            or (config.checkpoint.keep_every or 0) % config.checkpoint.every == 0
        ),
        "must be a multiple of checkpoint.every={c.checkpoint.every}: only its multiples are saved",
        (_KEEP,)),
)  # fmt: skip


def resolve_warmup(resolution: Resolution) -> Scheduler:
    """Return the schedule with the steps of its warm-up; the steps of the training are resolved before."""
    scheduler, steps = resolution.config.scheduler, resolution.config.train.steps or 1
    key, steps_key, asked = "scheduler.warmup", "scheduler.warmup_steps", scheduler.warmup
    by_share, by_steps = map(resolution.composed.by_hand, (key, steps_key))
    if asked is not None and scheduler.warmup_steps and by_share == by_steps:
        message = f"and {steps_key}={scheduler.warmup_steps} both set the warm-up"
        resolution.refuse(key, message, f"{key}=null", f"{steps_key}=0")
    warmup, is_fitted = scheduler.warmup_steps, _is_of_recipe(resolution, steps_key)
    if asked is not None and not by_steps:
        warmup, is_fitted = round(asked * steps if asked < 1 else asked), True
    if warmup > steps and is_fitted:
        warmup = steps // 10  # a recipe's warm-up is for the recipe's length
    return replace(scheduler, warmup=None, warmup_steps=warmup)


def resolve_scheduler(config: Config) -> Scheduler:
    """Return the schedule of the learning rate; the steps are resolved before."""
    scheduler, steps = config.scheduler, config.train.steps or 1
    if not SCHEDULERS[scheduler.name].has_own_steps or scheduler.decay_steps is not None:
        return scheduler
    left = max(0, steps - scheduler.warmup_steps)
    return replace(scheduler, decay_steps=min(left, max(1, steps // 10)))


# --- the run and its loggers ----------------------------------------------------------------------

_LOGGERS = (
    ("tensorboard", ("on",), "logger=none"),
    ("mlflow", ("on",), "logger.mlflow=off"),
    ("wandb", ("online", "offline"), "logger.wandb=off"),
)
"""The key of `logger`, which is also the package, the values that need it, and advice."""


def check_loggers(resolution: Resolution) -> None:
    """Check that the programs that compute or receive metrics are installed, and that wandb can log in."""
    logger = resolution.config.logger
    if resolution.config.train.eval_tasks:
        resolution.require_for_ranks("train.eval_tasks", "lm_eval", "train.eval_tasks=[]")
    for package, values, instead in _LOGGERS:
        if getattr(logger, package) in values:
            resolution.require_for_ranks(f"logger.{package}", package, instead)
    if logger.wandb == "online" and resolution.same_python and not _wandb_key_exists():
        message = "needs an API key: type `wandb login`, or set WANDB_API_KEY"
        resolution.refuse("logger.wandb", message, "logger.wandb=offline", "logger.wandb=off")


def _wandb_key_exists() -> bool:
    """True if the environment or the user's netrc file has credentials for Weights & Biases."""
    if os.environ.get("WANDB_API_KEY") or os.environ.get("WANDB_IDENTITY_TOKEN_FILE"):
        return True
    server = urlsplit(os.environ.get("WANDB_BASE_URL") or "https://api.wandb.ai").hostname
    named = os.environ.get("NETRC")
    for path in [Path(named)] if named else [Path.home() / ".netrc", Path.home() / "_netrc"]:
        with suppress(OSError, netrc.NetrcParseError):
            if netrc.netrc(path).authenticators(str(server)):
                return True
    return False


def resolve_run(resolution: Resolution) -> Run:
    """Return the run with its folder."""
    run, name = resolution.config.run, resolution.config.run.name
    legal = legal_name(name or "")
    if name is not None and (legal != name or not name):
        instead = override("run.name", legal) if legal else None
        resolution.refuse("run.name", RULE, instead, kind="run")
    if not run.root:
        resolution.refuse("run.root", "is empty", "run.root=runs", kind="run")
    # `~` is expanded as the shell would: a folder of that name is a trap.
    root = str(Path(run.root).expanduser()) if run.root.startswith("~") else run.root
    return replace(run, root=root)


# --- profile --------------------------------------------------------------------------------------

_OFF = "profile.steps=null"


def check_profile(resolution: Resolution, ranks: int) -> None:
    """Check that the steps and ranks exist; the training's steps are resolved, `ranks` is the world size."""
    profile, train = resolution.config.profile, resolution.config.train
    if profile.steps is None:
        resolution.refuse_idle("profile.ranks", _OFF, _example(train))
        return
    try:
        series = series_of(profile.steps)
    except ValueError:
        # `10:12`, `10..12` or `12-10`: two numbers are the ends
        ends = sorted(int(number) for number in re.findall(r"\d+", str(profile.steps)))
        is_clear = len(ends) == 2 and ends[0] >= 1 and ends[1] <= (train.steps or 1)
        meant = f"profile.steps={ends[0]}-{ends[1]}" if is_clear else _example(train)
        message = "must be a step, a series of steps as in 10-12, or a list as in [10,20]"
        resolution.refuse("profile.steps", message, meant, _OFF)
        return
    last, steps = series[-1][1], train.steps or 1
    if last > steps:
        longer = f"train.steps={last}" if train.tokens is None else None
        message = f"is beyond the {counted(steps, 'step')} of the training"
        resolution.refuse("profile.steps", message, _example(train), longer)
    present = [rank for rank in profile.ranks if rank < ranks]
    if len(present) < len(profile.ranks) or not present:
        message = f"must be some of the {counted(ranks, 'rank')}, which are numbered from 0"
        resolution.refuse("profile.ranks", message, override("profile.ranks", present or [0]))


def _example(train: Train) -> str:
    """Return valid steps: after the warm-up, if the training is long enough."""
    steps = train.steps or 1
    return "profile.steps=10-12" if steps >= 12 else f"profile.steps={steps}"

"""Rules of the batch, of the training's length and of its schedule."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

from nanoscale.config.rules.layout import data_parallel
from nanoscale.config.rules.pipeline import divides_batch, largest_micro_batch, near_batches
from nanoscale.config.rules.resolution import Resolution, Rule, counted, near_divisors
from nanoscale.config.schema import Config, Scheduler, Train


def resolve_train(resolution: Resolution) -> Train:
    """Return the batch and the steps."""
    train = _length(resolution, _batch(resolution.config))
    data = resolution.config.data
    has_split = data.valid_path is not None or data.mixture
    if train.eval_every and not data.valid_fraction and not has_split:
        resolution.refuse(
            "config",
            "train.eval_every",
            "needs a validation split, and data.valid_fraction=0 leaves none",
            "data.valid_fraction=0.02",
            "train.eval_every=0",
        )
    return train


def _batch(config: Config) -> Train:
    """Return the micro batch as a number; 1 if no size is legal."""
    train, dp = config.train, data_parallel(config)
    micro: int | None
    if train.micro_batch != "auto":
        micro = train.micro_batch
    else:
        micro = largest_micro_batch(config, train.global_batch // dp)
    return replace(train, micro_batch=micro or 1)


def _undivided_batch(config: Config) -> str:
    dp, micro = data_parallel(config), config.train.micro_batch
    step = f"dp = {dp}" if micro == "auto" else f"micro_batch·dp = {micro}·{dp} = {micro * dp}"
    return f"must be a multiple of {step}"


def _near_global_batches(config: Config) -> Iterator[str]:
    batch, micro, dp = config.train.global_batch, config.train.micro_batch, data_parallel(config)
    step = dp if micro == "auto" else dp * micro
    yield from (f"train.global_batch={n}" for n in near_batches(config, step, dp))
    if micro != "auto" and batch % dp == 0:
        yield f"train.micro_batch={near_divisors(batch // dp, micro)[0]}"
    if batch % dp:
        yield f"parallel.dp={near_divisors(batch, dp)[0]}"


def _divides_among_dp(config: Config) -> bool:
    return config.train.global_batch % data_parallel(config) == 0


_BATCH = ("train.global_batch", "parallel.dp")

RULES = (
    Rule(
        "train.global_batch",
        _BATCH,
        _divides_among_dp,
        _undivided_batch,
        _near_global_batches,
    ),
    Rule(
        "train.global_batch",
        (*_BATCH, "train.micro_batch"),
        lambda config: not _divides_among_dp(config) or divides_batch(config),
        _undivided_batch,
        _near_global_batches,
    ),
)


def _length(resolution: Resolution, train: Train) -> Train:
    """Return the steps, computed from the tokens if those are given instead."""
    per_step = train.global_batch * train.seq_len
    from_tokens = math.ceil(train.tokens / per_step) if train.tokens is not None else None
    if train.steps is None:
        if from_tokens is None:
            resolution.refuse(
                "config",
                "train.steps",
                "is not set, nor is train.tokens: set one of them",
                "train.steps=100",
                "recipe=tiny" if resolution.composed.recipe is None else None,
            )
        return replace(train, steps=from_tokens or 1)
    if from_tokens is None or from_tokens == train.steps:
        return train
    by_hand = {key: resolution.composed.by_hand(f"train.{key}") for key in ("steps", "tokens")}
    if by_hand["steps"] != by_hand["tokens"]:
        # The command line wins over the recipe, also if it sets the same by another key.
        if by_hand["steps"]:
            return replace(train, tokens=None)
        return replace(train, steps=from_tokens)
    resolution.refuse(
        "config",
        "train.tokens",
        f"and train.steps={train.steps} are both set, and train.tokens means "
        f"{counted(from_tokens, 'step')} of {per_step} tokens",
        "train.tokens=null",
        "train.steps=null",
    )
    return train


def resolve_scheduler(resolution: Resolution, train: Train) -> Scheduler:
    """Return the schedule of the learning rate."""
    scheduler, steps = resolution.config.scheduler, train.steps or 1
    if scheduler.warmup_steps > steps:
        resolution.refuse(
            "config",
            "scheduler.warmup_steps",
            f"is more than the {counted(steps, 'step')} of the training",
            f"scheduler.warmup_steps={steps // 10}",
        )
    if scheduler.name != "wsd":
        if scheduler.decay_steps is not None:
            resolution.refuse(
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
        resolution.refuse(
            "config",
            "scheduler.decay_steps",
            f"and warmup_steps={scheduler.warmup_steps} are more than the "
            f"{counted(steps, 'step')} of the training",
            f"scheduler.decay_steps={steps - scheduler.warmup_steps}",
        )
    return scheduler

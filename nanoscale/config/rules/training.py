"""Rules of the batch, of the training's length and of its schedule."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from nanoscale.common.units import counted
from nanoscale.config.data.token_sources import training_samples
from nanoscale.config.rules.pipeline import divides_batch, largest_micro_batch, near_batches
from nanoscale.config.rules.resolution import Resolution, Rule, data_parallel, near_divisors
from nanoscale.config.schema import Config, Scheduler, Train
from nanoscale.config.violations import shown


def resolve_train(resolution: Resolution) -> Train:
    """Return the batch and the steps; the data is resolved before."""
    train, data = _length(resolution, _batch(resolution.config)), resolution.config.data
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


_LENGTHS = ("steps", "tokens", "epochs")
"""The keys that set the length of a training."""


def _length(resolution: Resolution, train: Train) -> Train:
    """Return the steps, computed from the tokens or the epochs if those are given instead."""
    given = [key for key in _LENGTHS if resolution.composed.by_hand(f"train.{key}")]
    if given and "epochs" not in given:
        train = replace(train, epochs=None)  # also where the recipe's epochs would have no meaning
    lengths = _lengths(resolution, train)
    if not lengths:
        if train.epochs is None:  # otherwise its own error says enough
            resolution.refuse(
                "config",
                "train.steps",
                "is not set, nor are train.tokens and train.epochs: set one of them",
                "train.steps=100",
                "recipe=tiny" if resolution.composed.recipe is None else None,
            )
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
    resolution.refuse(
        "config",
        f"train.{last}",
        f"and train.{first}={shown(getattr(train, first))} are both set, and train.{last} means "
        f"{counted(lengths[last], 'step')} of {train.global_batch * train.seq_len} tokens",
        f"train.{last}=null",
        f"train.{first}=null",
    )
    return replace(train, steps=lengths[first])


def _lengths(resolution: Resolution, train: Train) -> dict[str, int]:
    """Return the steps that each given key means: steps, tokens, epochs."""
    lengths = {}
    if train.steps is not None:
        lengths["steps"] = train.steps
    if train.tokens is not None:
        lengths["tokens"] = math.ceil(train.tokens / (train.global_batch * train.seq_len))
    if train.epochs is not None and (samples := _epoch(resolution, train)) is not None:
        lengths["epochs"] = max(1, math.ceil(train.epochs * samples / train.global_batch))
    return lengths


def _epoch(resolution: Resolution, train: Train) -> int | None:
    """Return the samples of an epoch; refuse `train.epochs` if they are not known."""
    data = resolution.config.data
    samples = training_samples(data, train.seq_len)
    given = train.steps is not None or train.tokens is not None
    if samples is None and not any(it.key.startswith("data.") for it in resolution.violations):
        if data.mixture:
            why = "is not defined for several sources, each of which is seen by its own weight"
        elif data.packing != "stream" and data.source != "stdlib":
            why = f"needs samples counted before the launch, and data.packing={data.packing} counts them in it"
        elif data.source == "stdlib":
            why = "needs token files, and data.source=stdlib makes its tokens in the launch"
        else:
            why = f"needs a training sample, and {data.path} is too small for one"
        instead = "train.epochs=null" + ("" if given else " train.steps=100")
        resolution.refuse("config", "train.epochs", why, instead)
    return samples


def resolve_scheduler(resolution: Resolution) -> Scheduler:
    """Return the schedule of the learning rate; the steps are resolved before."""
    scheduler, steps = resolution.config.scheduler, resolution.config.train.steps or 1
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

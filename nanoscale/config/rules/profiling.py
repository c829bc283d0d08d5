"""Rules of the profile of a training."""

from __future__ import annotations

import re

from nanoscale.config.profile_steps import series_of
from nanoscale.config.rules.resolution import Resolution, counted
from nanoscale.config.schema import Train
from nanoscale.config.violations import override

_OFF = "profile.steps=null"


def check_profile(resolution: Resolution, train: Train, ranks: int) -> None:
    """Check that the steps and ranks exist. `train` is resolved, `ranks` the world size."""
    profile = resolution.config.profile
    if profile.steps is None:
        resolution.refuse_idle("config", "profile.ranks", _OFF, _example(train))
        return
    try:
        series = series_of(profile.steps)
    except ValueError:
        meant = _meant(str(profile.steps), train)
        message = "must be a step, a series of steps as in 10-12, or a list as in [10,20]"
        resolution.refuse("config", "profile.steps", message, meant or _example(train), _OFF)
        return
    last, steps = series[-1][1], train.steps or 1
    if last > steps:
        longer = f"train.steps={last}" if train.tokens is None else None
        resolution.refuse(
            "config",
            "profile.steps",
            f"is beyond the {counted(steps, 'step')} of the training",
            _example(train),
            longer,
        )
    present = [rank for rank in profile.ranks if rank < ranks]
    if len(present) < len(profile.ranks) or not present:
        resolution.refuse(
            "config",
            "profile.ranks",
            f"must be some of the {counted(ranks, 'rank')}, which are numbered from 0",
            override("profile.ranks", present or [0]),
        )


def _example(train: Train) -> str:
    """Return valid steps: after the warm-up, if the training is long enough."""
    steps = train.steps or 1
    return "profile.steps=10-12" if steps >= 12 else f"profile.steps={steps}"


def _meant(text: str, train: Train) -> str | None:
    """Return the likely meaning of `10:12`, `10..12`, `12-10`: two numbers are the ends."""
    ends = sorted(int(number) for number in re.findall(r"\d+", text))
    if len(ends) != 2 or ends[0] < 1 or ends[1] > (train.steps or 1):
        return None
    return f"profile.steps={ends[0]}-{ends[1]}"

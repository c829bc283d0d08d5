"""The key that a mistyped one means."""

from __future__ import annotations

import pytest

from nanoscale.config.violations import nearest_key

KEYS = ("optimizer.lr", "scheduler.warmup_steps", "train.steps", "train.seed", "profile.steps")


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("steps", ("train.steps", "profile.steps")),
        ("train.stepz", ("train.steps",)),
        ("trian.steps", ("train.steps",)),
        ("profil.steps", ("profile.steps",)),
        ("train.lr", ("optimizer.lr",)),
        ("train.nothing", ()),
    ],
)
def test_the_section_counts_too(typed: str, meant: tuple[str, ...]) -> None:
    assert nearest_key(typed, KEYS) == meant

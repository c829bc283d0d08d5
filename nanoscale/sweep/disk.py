"""The disk space that the checkpoints of all trials of a sweep need."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import mean
from typing import NoReturn

from nanoscale.common.errors import UserError, Violation
from nanoscale.common.units import byte_size, counted
from nanoscale.config.resolved import ResolvedCheckpoint
from nanoscale.plan.saving import SavingPlan


def fits(savings: Sequence[SavingPlan], left: int, at_once: int | None) -> bool:
    """Return True if the disk has room for the checkpoints of the trials that have not ended, or is not known.

    Args:
        savings: the plans of all these trials, or of examples.
        left: the number of these trials.
        at_once: the trials that run at the same time; None: all of them.
    """
    free = savings[0].free if savings else None
    return free is None or _needed(savings, left, at_once) <= free


def refuse(
    savings: Sequence[SavingPlan],
    left: int,
    at_once: int | None,
    alternatives: Mapping[str, ResolvedCheckpoint] | None,
) -> NoReturn:
    """Refuse trials for which `fits`, with the same arguments, is False.

    Args:
        alternatives: the settings of checkpoints with each override that may be advised; None if the sweep
            exists already: then its overrides and folder cannot change.

    Raises:
        UserError: of kind `plan`.
    """
    root, free = savings[0].root, byte_size(savings[0].free or 0)
    needed = byte_size(_needed(savings, left, at_once))
    message = (
        f"the checkpoints of {counted(left, 'trial')} take {needed}, and {free} are free in {root}"
    )
    advice = tuple(
        override
        for override, checkpoint in (alternatives or {}).items()
        if fits([replace(one, config=checkpoint) for one in savings], left, at_once)
    )
    remedy = "free some space"
    if alternatives is not None:
        remedy += ", or start the sweep with --root FOLDER on another disk"
    violation = Violation("--root", root, "", message, advice, remedy)
    raise UserError("plan", f"{message}. Continue with --force", [violation])


def _needed(savings: Sequence[SavingPlan], left: int, at_once: int | None) -> int:
    """Return the bytes kept by all trials plus the bytes written at the same time, before deletion."""
    kept = mean(one.needed_after for one in savings)
    written = mean(one.needed_while_saving for one in savings)
    return int(left * kept + min(left, at_once or left) * written)

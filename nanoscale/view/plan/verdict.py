"""The decision about a launch: the job fits, or these changes make it fit."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Literal

from nanoscale.common.devices import Devices
from nanoscale.common.errors import UserError, Violation
from nanoscale.common.units import share
from nanoscale.config.values.provenance import Composed
from nanoscale.plan.predict import Prediction
from nanoscale.plan.search.search import search
from nanoscale.plan.search.search_space import search_space, to_type
from nanoscale.view.plan.prediction import verdict

PROPOSALS = 3


def require_fit(composed: Composed, plan: Prediction, devices: Devices) -> None:
    """Require that a job fits.

    Raises:
        UserError: it does not fit; of kind `plan`, with the nearest overrides that fit; the command exits with
            3.
    """
    if plan.fits:
        return
    rehearsed = plan.decisive
    margin = rehearsed.total / plan.worst.total if rehearsed is not None else 1.0
    found = proposals(composed, plan, devices, max(1.0, margin))
    remedy = "" if found else "; no layout of these devices fits, see nanoscale plan --search"
    raise UserError("plan", f"{verdict(plan)}{remedy}. Continue with --force", found)


def proposals(
    composed: Composed, plan: Prediction, devices: Devices, margin: float = 1.0
) -> list[Violation]:
    """Return what the nearest fitting layouts would take, with the overrides to type.

    Args:
        margin: fit also with so many times the planned memory.
    """
    return [
        Violation("", None, "plan", _gain(near), (" ".join(to_type(composed, near.config)),))
        for near in nearest(composed, plan, devices, margin)
    ]


def nearest(
    composed: Composed, plan: Prediction, devices: Devices, margin: float = 1.0
) -> list[Prediction]:
    """Return fitting layouts, those with the fewest changes first, then the fastest."""
    world = plan.config.world_size
    # All devices of all hosts, as one machine; SLURM's nodes may have others than this host.
    kind: Literal["cpu", "cuda"] = "cpu" if plan.config.launcher.device == "cpu" else "cuda"
    enough = replace(devices, kind=kind, count=max(devices.count, world))
    free = replace(search_space(composed, enough, plan.hardware, world), held=frozenset())
    ranked = search(free, plan.hardware).ranked
    by_changes = sorted(
        (near for near in ranked if near.worst.total * margin <= near.capacity),
        key=lambda near: (len(to_type(composed, near.config)), near.time.seconds),
    )
    return list(_different(composed, by_changes))[:PROPOSALS]


def _different(composed: Composed, ranked: list[Prediction]) -> Iterator[Prediction]:
    """Yield one layout for each set of changed keys: other values of the same keys are left out."""
    seen: set[frozenset[str]] = set()
    for plan in ranked:
        words = to_type(composed, plan.config)
        keys = frozenset(word.strip("'").partition("=")[0] for word in words)
        if words and not any(known <= keys for known in seen):
            seen.add(keys)
            yield plan


def _gain(plan: Prediction) -> str:
    sizes = share(plan.worst.total, plan.capacity)
    return f"would take {sizes} at {plan.time.tokens_per_s_per_gpu:,.0f} tokens/s per device"

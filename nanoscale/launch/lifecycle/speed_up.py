"""The result of a scaling test: the same job measured on several numbers of devices or hosts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

Document = dict[str, Any]
_KEPT = (
    "world_size",
    "global_batch",
    "step_time_s",
    "tokens_per_s",
    "tokens_per_s_per_device",
    "memory_gib",
    "mfu",
)


def scaling_document(
    axis: str, counts: Sequence[int], measured: Sequence[Document], *, weak: bool
) -> Document:
    """Return the measurements with their speed-up and efficiency, each measured and planned.

    The speed-up is the ratio of the tokens/s to those of the first count. The efficiency is the speed-up over
    the ratio of the numbers of ranks.

    Args:
        axis: `devices` or `hosts`.
        counts: the numbers of them, as far as they are measured.
        measured: the documents of `bench`, in the same order.
        weak: True if the global batch grows with the count.
    """
    first = measured[0]
    points = []
    for count, one in zip(counts, measured, strict=True):
        ranks = one["world_size"] / first["world_size"]
        point = {axis: count, **{name: one[name] for name in _KEPT}}
        point |= _gain(one["tokens_per_s"], first["tokens_per_s"], ranks)
        plan, plan_of_first = one["predicted"], first["predicted"]
        point["predicted"] = None
        if plan and plan_of_first:
            chosen = {name: plan[name] for name in ("step_time_s", "tokens_per_s")}
            gain = _gain(plan["tokens_per_s"], plan_of_first["tokens_per_s"], ranks)
            point["predicted"] = chosen | gain
        points.append(point)
    about = {name: first[name] for name in ("model", "precision", "backend", "device")}
    return {**about, "axis": axis, "weak": weak, "points": points, "benches": list(measured)}


def _gain(speed: float, first: float, ranks: float) -> Document:
    return {"speed_up": speed / first, "efficiency": speed / first / ranks}

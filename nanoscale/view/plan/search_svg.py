"""The result of a search as a scatter: memory to the right, speed upwards, the Pareto front joined."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from nanoscale.common.units import GIB, byte_size
from nanoscale.plan.predict import Prediction
from nanoscale.view.svg import dot, line, picture, text, ticks

MOST_POINTS = 2000
_LEFT, _RIGHT, _TOP, _BOTTOM = 70, 20, 20, 44


def search_svg(
    ranked: Sequence[Prediction], front: Sequence[Prediction], width: int = 960, height: int = 420
) -> str:
    """Return one `<svg>` element; hovering over a point shows its layout. At least one layout must fit."""
    some = ranked[:: max(1, len(ranked) // MOST_POINTS)]
    marks_x = ticks(0.0, max(_gib(plan) for plan in [*some, *front]))
    marks_y = ticks(0.0, max(_speed(plan) for plan in [*some, *front]))
    most_x, most_y = marks_x[-1], marks_y[-1]

    def place(plan: Prediction) -> tuple[float, float]:
        x = _LEFT + _gib(plan) / most_x * (width - _LEFT - _RIGHT)
        return x, height - _BOTTOM - _speed(plan) / most_y * (height - _TOP - _BOTTOM)

    points = " ".join("{:.1f},{:.1f}".format(*place(plan)) for plan in front)
    parts = [
        *_axes(width, height, marks_x, marks_y),
        f'<polyline points="{points}" class="front-line"/>',
        *(dot(*place(plan), 2.5, "dot", _hint(plan)) for plan in some),
        *(dot(*place(plan), 5, "front", _hint(plan)) for plan in front),
    ]
    return picture(width, height, "Layouts by memory and speed", parts)


def name_of(plan: Prediction) -> str:
    """Describe a layout briefly."""
    config = plan.config
    layout = config.parallel
    degrees = [f"{axis} {getattr(layout, axis)}" for axis in ("dp", "tp", "pp", "cp")]
    if config.model.experts:
        degrees.append(f"ep {layout.ep}")
    words = [*degrees, f"ZeRO {config.zero.stage}"]
    if layout.pp > 1:
        words.append(f"{layout.schedule} ×{layout.virtual_stages}")
    recomputed = layout.activation_checkpointing
    return ", ".join([*words, f"micro batch {config.train.micro_batch}", f"recompute {recomputed}"])


def _gib(plan: Prediction) -> float:
    return plan.worst.total / GIB


def _speed(plan: Prediction) -> float:
    return plan.time.tokens_per_s_per_gpu


def _hint(plan: Prediction) -> str:
    return f"{name_of(plan)}: {byte_size(plan.worst.total)}, {_speed(plan):,.0f} tokens/s a device"


def _axes(
    width: int, height: int, marks_x: Sequence[float], marks_y: Sequence[float]
) -> Iterator[str]:
    right, bottom = width - _RIGHT, height - _BOTTOM
    for mark in marks_x:
        x = _LEFT + mark / marks_x[-1] * (right - _LEFT)
        yield line(x, _TOP, x, bottom, "grid")
        yield text(x, bottom + 16, f"{mark:g}", "middle")
    for mark in marks_y:
        y = bottom - mark / marks_y[-1] * (bottom - _TOP)
        yield line(_LEFT, y, right, y, "grid")
        yield text(_LEFT - 6, y + 4, f"{mark:,.6g}", "end")
    yield text((_LEFT + right) / 2, height - 8, "GiB on the fullest device", "middle")
    yield text(_LEFT, 11, "tokens/s a device")

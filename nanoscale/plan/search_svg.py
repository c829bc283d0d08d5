"""What a search has found as a scatter: memory to the right, speed upwards, the Pareto front joined."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from nanoscale.plan.part import GIB
from nanoscale.plan.predict import Prediction

MOST_POINTS = 2000
_LEFT, _RIGHT, _TOP, _BOTTOM = 70, 20, 16, 44
_TICKS = 5


def search_svg(
    ranked: Sequence[Prediction], front: Sequence[Prediction], width: int = 960, height: int = 420
) -> str:
    """One `<svg>` element; a mouse over a point shows its layout. There must be a layout that fits."""
    step = max(1, len(ranked) // MOST_POINTS)
    points = [*ranked[::step], *front]
    most_x = max(plan.worst.total for plan in points) / GIB
    most_y = max(plan.time.tokens_per_s_per_gpu for plan in points)

    def place(plan: Prediction) -> tuple[float, float]:
        x = _LEFT + plan.worst.total / GIB / most_x * (width - _LEFT - _RIGHT)
        share = plan.time.tokens_per_s_per_gpu / most_y
        return x, height - _BOTTOM - share * (height - _TOP - _BOTTOM)

    dots = [_dot(plan, *place(plan), "dot") for plan in ranked[::step]]
    dots += [_dot(plan, *place(plan), "front") for plan in front]
    line = " ".join("{:.1f},{:.1f}".format(*place(plan)) for plan in front)
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" role="img" viewBox="0 0 {width} {height}" width="{width}" '
            f'height="{height}" class="picture"><title>Layouts by memory and speed</title>',
            _axes(width, height, most_x, most_y),
            f'<polyline points="{line}" class="front-line"/>',
            *dots,
            "</svg>",
        ]
    )


def name_of(plan: Prediction) -> str:
    """A layout in a few words."""
    config = plan.config
    layout = config.parallel
    words = [f"dp {layout.dp}", f"tp {layout.tp}", f"pp {layout.pp}", f"cp {layout.cp}", f"ZeRO {config.zero.stage}"]
    if layout.pp > 1:
        words.append(f"{layout.schedule} ×{layout.virtual_stages}")
    words += [f"micro batch {config.train.micro_batch}", f"recompute {layout.activation_checkpointing}"]
    return ", ".join(words)


def _dot(plan: Prediction, x: float, y: float, kind: str) -> str:
    hint = f"{name_of(plan)}: {plan.worst.total / GIB:.1f} GiB, {plan.time.tokens_per_s_per_gpu:,.0f} tokens/s a device"
    radius = 5 if kind == "front" else 2.5
    return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{radius}" class="{kind}"><title>{escape(hint)}</title></circle>'


def _axes(width: int, height: int, most_x: float, most_y: float) -> str:
    lines = []
    for tick in range(_TICKS + 1):
        x = _LEFT + tick / _TICKS * (width - _LEFT - _RIGHT)
        y = height - _BOTTOM - tick / _TICKS * (height - _TOP - _BOTTOM)
        lines += [
            f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{_TOP}" y2="{height - _BOTTOM}" class="grid"/>',
            f'<line x1="{_LEFT}" x2="{width - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}" class="grid"/>',
            f'<text x="{x:.1f}" y="{height - _BOTTOM + 16}" text-anchor="middle">{most_x * tick / _TICKS:.0f}</text>',
            f'<text x="{_LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{most_y * tick / _TICKS:,.0f}</text>',
        ]
    middle = (_LEFT + width - _RIGHT) / 2
    lines.append(f'<text x="{middle}" y="{height - 8}" text-anchor="middle">GiB on the fullest device</text>')
    lines.append(f'<text x="{_LEFT}" y="11">tokens/s a device</text>')
    return "\n".join(lines)

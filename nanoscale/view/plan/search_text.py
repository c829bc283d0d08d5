"""The result of a search, for people and as a document."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from nanoscale.common.units import byte_size, duration, share
from nanoscale.config.schema import Parallel
from nanoscale.config.values.provenance import Composed
from nanoscale.plan.predict import SURE, Prediction
from nanoscale.plan.search.candidates import SearchSpace
from nanoscale.plan.search.search import SearchResult
from nanoscale.plan.search.search_space import to_type
from nanoscale.plan.time.offload import offloaded
from nanoscale.view.plan.prediction_json import document
from nanoscale.view.plan.reasons import reasons

if TYPE_CHECKING:
    from rich.console import Console

SHOWN = 12
_OF_A_KIND = 2
WIDTH = 120
"""The width if the output is not a terminal."""
_LEAST_NEEDED = ("MFU", "fits", "ms", "schedule", "cost", "micro")
"""Columns that a narrow terminal omits, in this order."""


def search_document(composed: Composed, result: SearchResult) -> dict[str, Any]:
    """Return the document of `plan --search --json`."""
    return {
        "considered": result.considered,
        "fitting": len(result.ranked),
        "layouts": [_entry(composed, plan) for plan in _distinct(result.ranked)],
        "left_out": [_entry(composed, plan) for plan in result.left_out[:1]],
        "front": [_entry(composed, plan) for plan in result.front()],
        "nearest": _entry(composed, result.nearest)
        if result.nearest and not result.ranked
        else None,
        "why": reasons(result),
    }


def _entry(composed: Composed, plan: Prediction) -> dict[str, Any]:
    return {"overrides": to_type(composed, plan.config), **document(plan)}


def print_found(
    console: Console, composed: Composed, space: SearchSpace, result: SearchResult
) -> None:
    """Print the fastest layouts, with marks on the Pareto front, and the reasons for the first."""
    some = result.best or result.nearest
    on = f"{space.world} × {some.hardware.device}" if some else f"{space.world} devices"
    counts = f"{result.considered:,} layouts considered, {len(result.ranked):,} fit"
    console.print(f"{space.base.model.name} on {on}: {counts}\n", markup=False, soft_wrap=True)
    if result.best is None:
        _print_nearest(console, composed, result)
        return
    console.print(_fitting_table(console, _distinct(result.ranked), result.front()))
    console.print(
        "\n* no other layout is faster with as little memory\n", style="dim", markup=False
    )
    for line in [*reasons(result), *_left_out(composed, result)]:
        console.print(f"- {line}", markup=False)
    words = " ".join(to_type(composed, result.best.config)) or "nothing: it is the request"
    console.print(f"\ntype  {words}", markup=False, soft_wrap=True)


def _left_out(composed: Composed, result: SearchResult) -> list[str]:
    """Name the fastest layout that is not recommended, since it may not fit."""
    if not result.left_out:
        return []
    count, first = len(result.left_out), result.left_out[0]
    subject = "1 faster layout is" if count == 1 else f"{count:,} faster layouts are"
    return [
        f"{subject} listed after the others, because the probability of fitting is below {SURE:.0%}; "
        f"the fastest one reaches {first.time.tokens_per_s_per_gpu:,.0f} tokens/s per device and fits "
        f"with a probability of {first.fits_probability:.0%}: "
        f"{' '.join(to_type(composed, first.config))}"
    ]


def _distinct(ranked: Sequence[Prediction]) -> list[Prediction]:
    """Return the fastest layouts, and of those with the same degrees the first two that differ in speed or
    memory."""
    chosen: dict[tuple[object, ...], dict[tuple[str, str], Prediction]] = defaultdict(dict)
    for plan in ranked:
        layout = plan.config.parallel
        alike = chosen[layout.dp_replicate, layout.tp, layout.pp, layout.cp, layout.ep]
        if len(alike) < _OF_A_KIND:
            alike.setdefault((f"{plan.time.seconds:.3g}", f"{plan.worst.total:.3g}"), plan)
    found = (plan for alike in chosen.values() for plan in alike.values())
    place = {id(plan): number for number, plan in enumerate(ranked)}
    return sorted(found, key=lambda plan: place[id(plan)])[:SHOWN]


def _print_nearest(console: Console, composed: Composed, result: SearchResult) -> None:
    if result.nearest is None:
        console.print("no layout is legal with the fixed keys", style="bold red")
        return
    worst = result.nearest.worst
    console.print(
        f"no layout fits; the smallest needs {share(worst.total, result.nearest.capacity)}, with\n"
        f"  {' '.join(to_type(composed, result.nearest.config))}",
        markup=False,
        soft_wrap=True,
    )


def _fitting_table(
    console: Console, plans: Sequence[Prediction], front: Sequence[Prediction]
) -> Any:
    """Return the table with all columns for which there is space."""
    if not console.is_terminal:
        console.width = max(console.width, WIDTH)
    table = _table(plans, front)
    for name in _LEAST_NEEDED:
        if (
            console.measure(table, options=console.options.update(width=WIDTH)).minimum
            <= console.width
        ):
            break
        table.columns = [column for column in table.columns if column.header != name]
    return table


def _table(plans: Sequence[Prediction], front: Sequence[Prediction]) -> Any:
    from rich.table import Column, Table

    cost = ("cost",) if plans[0].training.cost is not None else ()
    names = (
        "",
        "dp",
        "tp",
        "pp",
        "cp",
        *(("ep",) if plans[0].config.model.experts else ()),
        "schedule",
        "ZeRO",
        "micro",
        "recompute",
        "memory",
        "fits",
        "step",
        "tokens/s",
        "MFU",
        *cost,
    )
    table = Table(*(Column(name, no_wrap=True) for name in names), box=None, pad_edge=False)
    for column in table.columns[1:]:
        if column.header not in ("schedule", "recompute"):
            column.justify = "right"
    for plan in plans:
        table.add_row(*_row(plan, plan in front))
    return table


_KEPT = {"attention": ", attn", "every-2nd-matmul": ", 2nd"}


def _recomputation(layout: Parallel) -> str:
    mode = layout.activation_checkpointing
    return mode + (_KEPT.get(layout.selective_keep, "") if mode == "selective" else "")


def _row(plan: Prediction, on_front: bool) -> list[str]:
    config, time = plan.config, plan.time
    layout, cost = config.parallel, plan.training.cost
    dp = str(layout.dp)
    if layout.dp_replicate > 1:
        dp = f"{layout.dp_replicate}×{layout.dp // layout.dp_replicate}"
    cp = str(layout.cp) if layout.cp == 1 else f"{layout.cp} {layout.cp_method}"
    virtual = f" ×{layout.virtual_stages}" if layout.virtual_stages != 1 else ""
    return [
        "*" if on_front else "",
        dp,
        str(layout.tp),
        str(layout.pp),
        cp,
        *([str(layout.ep)] if config.model.experts else []),
        f"{layout.schedule}{virtual}" if layout.pp > 1 else "",
        str(config.zero.stage) + (" host" if offloaded(config) != "none" else ""),
        str(config.train.micro_batch),
        _recomputation(layout),
        byte_size(plan.worst.total),
        f"{plan.fits_probability:.0%}",
        duration(time.seconds),
        f"{time.tokens_per_s_per_gpu:,.0f}",
        f"{time.mfu:.1%}",
        *([f"{cost:,.0f}"] if cost is not None else []),
    ]

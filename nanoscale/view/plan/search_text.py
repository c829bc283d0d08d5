"""The result of a search, for people and as a document, and why its fastest layout is the fastest."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from nanoscale.common.json_text import Json
from nanoscale.common.units import GIB, byte_size, duration, share
from nanoscale.config.model_math import parameters
from nanoscale.config.resolved import ResolvedParallel
from nanoscale.config.values.provenance import Composed
from nanoscale.plan.predict import SURE, Prediction
from nanoscale.plan.search.candidates import SearchSpace
from nanoscale.plan.search.choice import to_type
from nanoscale.plan.search.search import SearchResult
from nanoscale.plan.time.offload import offloaded
from nanoscale.view.blocks import Chart, Column, Lines, Report, Table, rich_table, table
from nanoscale.view.charts import Point, scatter
from nanoscale.view.job_text import expert_degree, layout_of, recomputation
from nanoscale.view.plan.prediction import MEANINGS, document, first_lines, plan_blocks

if TYPE_CHECKING:
    from rich.console import Console


SHOWN = 12
_OF_A_KIND = 2
WIDTH = 120
"""The width if the output is not a terminal."""
MOST_POINTS = 2000
"""The most layouts in the chart of a search."""


def search_document(composed: Composed, result: SearchResult, other: SearchResult | None) -> Json:
    """Return the document of `plan --search --json`; `other` is the result for the other backend."""
    nearest, best = result.nearest, other.best if other is not None else None
    return {
        "considered": result.considered,
        "fitting": len(result.ranked),
        "layouts": [_entry(composed, plan) for plan in _distinct(result.ranked)],
        "left_out": [_entry(composed, plan) for plan in result.left_out[:1]],
        "front": [_entry(composed, plan) for plan in result.front()],
        "nearest": _entry(composed, nearest) if nearest and not result.ranked else None,
        "other_backend": _entry(composed, best) if best else None,
        "why": reasons(result),
    }


def _entry(composed: Composed, plan: Prediction) -> Json:
    return {"overrides": to_type(composed, plan.config), **document(plan)}


def print_found(
    console: Console,
    composed: Composed,
    space: SearchSpace,
    result: SearchResult,
    other: SearchResult | None,
) -> None:
    """Print the fastest layouts, with marks on the Pareto front, and the reasons for the first."""
    some = result.best or result.nearest
    on = f"{space.world} × {some.hardware.device}" if some else f"{space.world} devices"
    title = f"{space.base.model.name} on {on}: {_counts(result)}\n"
    console.print(title, markup=False, soft_wrap=True)
    if result.best is None:
        if result.nearest is None:
            console.print("no layout is legal with the fixed keys", style="bold red")
        else:
            needed = share(result.nearest.worst.total, result.nearest.capacity)
            overrides = " ".join(to_type(composed, result.nearest.config))
            text = f"no layout fits; the smallest needs {needed}, with\n  {overrides}"
            console.print(text, markup=False, soft_wrap=True)
        if other is not None:
            console.print(_other_backend(composed, None, other), markup=False, soft_wrap=True)
        return
    if not console.is_terminal:
        console.width = max(console.width, WIDTH)
    layouts = _table(_distinct(result.ranked), result.front())
    console.print(rich_table(layouts, console.width))
    console.print(
        "\n* no other layout is faster with as little memory\n", style="dim", markup=False
    )
    compared = [_other_backend(composed, result.best, other)] if other is not None else []
    for line in [*reasons(result), *_left_out(composed, result), *compared]:
        console.print(f"- {line}", markup=False)
    words = " ".join(to_type(composed, result.best.config)) or "nothing: it is the request"
    console.print(f"\ntype  {words}", markup=False, soft_wrap=True)


def _counts(result: SearchResult) -> str:
    return f"{result.considered:,} layouts considered, {len(result.ranked):,} fit"


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


def _other_backend(composed: Composed, best: Prediction | None, other: SearchResult) -> str:
    """Compare the fastest layout with the other backend's."""
    found = other.best or other.nearest
    assert found is not None
    name, words = found.config.backend.name, " ".join(to_type(composed, found.config))
    if not other.ranked:
        return f"no layout fits with backend={name} either"
    speed = f"{found.time.tokens_per_s_per_gpu:,.0f} tokens/s per device"
    if best is not None:
        slower = found.time.seconds / best.time.seconds - 1
        speed += f", {abs(slower):.1%} {'slower' if slower >= 0 else 'faster'}"
    sizes = share(found.worst.total, found.capacity)
    return f"backend={name} reaches {speed}, in {sizes}: {words}"


def _distinct(ranked: Sequence[Prediction]) -> list[Prediction]:
    """Return the fastest layouts; among layouts with the same degrees, the first two that differ in speed or
    memory."""
    chosen: dict[tuple[object, ...], dict[tuple[str, str], Prediction]] = defaultdict(dict)
    for plan in ranked:
        layout = plan.config.parallel
        experts = layout.ep, layout.ep_over_tp
        alike = chosen[layout.dp_replicate, layout.tp, layout.pp, layout.cp, *experts]
        if len(alike) < _OF_A_KIND:
            alike.setdefault((f"{plan.time.seconds:.3g}", f"{plan.worst.total:.3g}"), plan)
    found = (plan for alike in chosen.values() for plan in alike.values())
    place = {id(plan): number for number, plan in enumerate(ranked)}
    return sorted(found, key=lambda plan: place[id(plan)])[:SHOWN]


def _table(plans: Sequence[Prediction], front: Sequence[Prediction], title: str = "") -> Table:
    left_out = {
        *(("ep",) if not plans[0].config.model.experts else ()),
        *(("cost",) if plans[0].training.cost is None else ()),
    }
    mark = Column("", lambda plan: "*" if plan in front else "")
    columns = [column for column in _COLUMNS if column.header not in left_out]
    return table([mark, *columns], plans, title)


_KEPT = {"core-attention": ", core", "attention": ", attn", "every-2nd-matmul": ", 2nd"}


def _recomputation(layout: ResolvedParallel) -> str:
    mode, every = layout.activation_checkpointing, layout.checkpoint_every
    kept = _KEPT.get(layout.selective_keep, "") if mode == "selective" else ""
    return f"{mode}{kept}{f' 1/{every}' if every > 1 else ''}"


def _dp(layout: ResolvedParallel) -> str:
    shards = layout.dp // layout.dp_replicate
    return f"{layout.dp_replicate}×{shards}" if layout.dp_replicate > 1 else str(layout.dp)


def _schedule(layout: ResolvedParallel) -> str:
    virtual = f" ×{layout.virtual_stages}" if layout.virtual_stages != 1 else ""
    return f"{layout.schedule}{virtual}" if layout.pp > 1 else ""


def _zero(plan: Prediction) -> str:
    return str(plan.config.zero.stage) + (" host" if offloaded(plan.config) != "none" else "")


def _cp(layout: ResolvedParallel) -> str:
    return str(layout.cp) if layout.cp == 1 else f"{layout.cp} {layout.cp_method}"


_COLUMNS = (
    Column("dp", lambda plan: _dp(plan.config.parallel)),
    Column("tp", lambda plan: str(plan.config.parallel.tp)),
    Column("pp", lambda plan: str(plan.config.parallel.pp)),
    Column("cp", lambda plan: _cp(plan.config.parallel)),
    Column("ep", lambda plan: expert_degree(plan.config.parallel)),
    Column("schedule", lambda plan: _schedule(plan.config.parallel), is_text=True, optional=3),
    Column("ZeRO", _zero),
    Column("micro", lambda plan: str(plan.config.train.micro_batch), optional=5),
    Column(
        "recompute", lambda plan: _recomputation(plan.config.parallel), is_text=True, optional=6
    ),
    Column("memory", lambda plan: byte_size(plan.worst.total)),
    Column("fits", lambda plan: f"{plan.fits_probability:.0%}", optional=2),
    Column("step", lambda plan: duration(plan.time.seconds)),
    Column("tokens/s", lambda plan: f"{plan.time.tokens_per_s_per_gpu:,.0f}"),
    Column("MFU", lambda plan: f"{plan.time.mfu:.1%}", optional=1),
    Column("cost", lambda plan: f"{plan.training.cost:,.0f}", optional=4),
)


# --- the page -------------------------------------------------------------------------------------


def search_report(result: SearchResult) -> Report:
    """Return what the page of a search shows: all fitting layouts, and the best in full. One must fit."""
    best, front = result.best, result.front()
    assert best is not None
    some = result.ranked[:: max(1, len(result.ranked) // MOST_POINTS)]
    picture = scatter(list(map(_point, some)), list(map(_point, front)))
    return Report(
        f"{best.config.model.name}: {_counts(result)}",
        [
            Chart(pictures=[picture]),
            _table(front[::-1], (), "the Pareto front"),
            Table(("why the fastest is the fastest",), [(why,) for why in reasons(result)]),
            Lines([layout_of(best.config)], "bold"),
            *first_lines(best),
            *plan_blocks(best, explain=False),
        ],
        f"Layouts of {best.config.model.name}: {_counts(result)}",
    )


def _point(plan: Prediction) -> Point:
    """Return a layout's memory and speed, with the layout as hover text."""
    speed, size = plan.time.tokens_per_s_per_gpu, plan.worst.total
    hint = f"{layout_of(plan.config)}: {byte_size(size)}, {speed:,.0f} tokens/s per device"
    return size / GIB, speed, hint


_AXES: dict[str, Callable[[Prediction], object]] = {
    "tp": lambda plan: plan.config.parallel.tp,
    "pp": lambda plan: plan.config.parallel.pp,
    "cp": lambda plan: plan.config.parallel.cp,
    "ep": lambda plan: expert_degree(plan.config.parallel),
    "ZeRO": lambda plan: plan.config.zero.stage,
    "offload": lambda plan: offloaded(plan.config),
    "replicas": lambda plan: plan.config.parallel.dp_replicate,
    "schedule": lambda plan: plan.config.parallel.schedule,
    "micro batch": lambda plan: plan.config.train.micro_batch,
    "recompute": lambda plan: recomputation(plan.config.parallel),
}
_LEAST_S = 0.002
"""Parts that change the step by less than this share are not mentioned."""
_LONG = 10_000
"""Tokens of a sequence above which cp is usual."""


def reasons(result: SearchResult) -> list[str]:
    """Return a sentence for each axis along which another layout comes close."""
    best = result.best
    if best is None:
        return []
    sentences = []
    for name, axis in _AXES.items():
        # dp follows from the other axes, and the schedule from pp.
        free = {name, "schedule"} if name == "pp" else {name}
        fixed = [other for key, other in _AXES.items() if key not in free]
        for plan in result.ranked:
            if axis(plan) != axis(best) and all(it(plan) == it(best) for it in fixed):
                sentences.append(_sentence(name, axis(plan), axis(best), plan, best))
                break
    return [*sentences, *advice(best)]


def _sentence(name: str, before: object, after: object, other: Prediction, best: Prediction) -> str:
    parts = {
        part: getattr(other.time.parts, part) - getattr(best.time.parts, part) for part in MEANINGS
    }
    large = [item for item in parts.items() if abs(item[1]) > _LEAST_S * best.time.seconds]
    large.sort(key=lambda item: -abs(item[1]))
    saves = [f"{duration(saved)} of {MEANINGS[part]}" for part, saved in large if saved > 0]
    costs = [f"{duration(-saved)} of {MEANINGS[part]}" for part, saved in large if saved < 0]
    memory = best.worst.total - other.worst.total
    if abs(memory) >= 0.1 * GIB:
        (costs if memory > 0 else saves).append(byte_size(abs(memory)))
    words = [
        f"{word} {', '.join(what[:3])}"
        for word, what in (("saves", saves), ("costs", costs))
        if what
    ]
    total = other.time.seconds / best.time.seconds - 1
    change = " and ".join(words) or "changes little"
    gain = f"{total:.1%} faster" if total >= 5e-4 else "as fast"
    return f"{name} {before} → {after} {change}; the step is {gain}"


def advice(best: Prediction) -> list[str]:
    """Compare the usual ladder of parallelisms, with its thresholds, with the result.

    From its lowest step: data parallelism; sharded; activations recomputed; replicas of sharded groups beyond
    some hundred devices; then context, pipeline and tensor parallelism. Source: PyTorch's guides to FSDP2 and
    torchtitan (Liang et al. 2024, arXiv:2410.06511).
    """
    config, size = best.config, parameters(best.config.model)
    layout, world = config.parallel, config.world_size
    long = config.train.seq_len > _LONG
    divided = layout.tp * layout.pp * (1 if long else layout.cp) > 1
    small = world <= 128 and size <= 1e9
    rungs = {
        "up to 128 devices and 1 B parameters, data parallelism alone is the usual choice": (
            small and divided
        ),
        "above 1 B parameters, states are usually sharded before anything else (zero.stage)": (
            size > 1e9 and world > 1 and config.zero.stage == 0
        ),
        "up to 256 devices, activations are usually recomputed before the model is divided": (
            world < 256 and not small and divided and layout.activation_checkpointing == "none"
        ),
        "from 256 devices on, replicas of a model sharded in each host (dp_replicate) spare the network": (
            256 <= world <= 512
            and layout.dp_replicate == 1
            and config.zero.stage == 3
            and layout.tp == 1
        ),
        "from 1,000 devices and 50 B parameters on, tp and pp are usual in addition to sharding": (
            world >= 1000 and size >= 50e9 and layout.tp == 1 and layout.pp == 1
        ),
        "sequences above 10,000 tokens are usually divided by cp": long and layout.cp == 1,
    }
    return [sentence for sentence, applies in rungs.items() if applies]

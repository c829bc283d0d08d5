"""The time of a rehearsed step as a document, and as a trace for Perfetto."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

from nanoscale.common.errors import UserError
from nanoscale.common.json_text import Json
from nanoscale.config.hardware.data_sheets import UnknownHardwareError
from nanoscale.config.layout import axis_of
from nanoscale.config.resolved import ResolvedConfig
from nanoscale.plan.hardware.hardware import described_hardware
from nanoscale.plan.rehearsed.costs import PlayedCosts
from nanoscale.plan.rehearsed.streams import RankTime, simulate

_MOST_OPERATIONS = 10


def times_of(config: ResolvedConfig, result: Json, *, traced: bool = False) -> list[RankTime]:
    """Return the times of the ranks of a rehearsal's document; none if the hardware's speeds are not known.

    `traced`: True to keep what each stream does.
    """
    try:
        costs = PlayedCosts(config, described_hardware(config))
    except (UserError, UnknownHardwareError):
        return []
    return simulate(result.get("streams", {}), costs, _axes(result), traced=traced)


def _axes(result: Json) -> dict[tuple[int, ...], str]:
    """Return the axis of each group of ranks that a played rank calls."""
    degrees = {axis: size for axis, size in result["degrees"].items() if axis != "ep"}
    streams = result.get("streams", {}).values()
    groups = {tuple(call["ranks"]) for rank in streams for call in rank["calls"]}
    return {group: axis_of(group, degrees) for group in groups}


def block_order(result: Json) -> dict[str, list[str]]:
    """Return what the first played rank runs and calls in one block: from its attention to the next one's."""
    axes, streams = _axes(result), result["streams"][str(result["ranks"][0]["rank"])]
    works: list[Sequence[Any]] = []
    for stream, what, of in streams["events"]:
        if what == "call":
            call = streams["calls"][of]
            works.append(("call", f"{call['kind'].strip('_')} {axes[tuple(call['ranks'])]}"))
        elif what == "work" and stream == 0:
            works += [streams["works"][it] for it in streams["segments"][of]]
    order = {}
    for name, backward in {"forward": False, "backward": True}.items():
        kernels = [at for at, it in enumerate(works) if (it[0], it[-1]) == ("attention", backward)]
        starts = [  # a ring's attention has a kernel for each hop, and no product in between
            at
            for before, at in pairwise([0, *kernels])
            if at == kernels[0] or any(it[0] == "product" for it in works[before:at])
        ]
        block = works[slice(*starts[:2])] if starts[1:] else []  # without bytes, which kernels have
        order[name] = [described((*it,)) if it[0] == "product" else it[1] for it in block]
    return order


def document(config: ResolvedConfig, times: list[RankTime]) -> Json | None:
    """Return the time of a step, by rank, and its most expensive operations; None if it is not known."""
    if not times:
        return None
    slowest = max(times, key=lambda rank: rank.seconds)
    tokens = config.tokens_per_step / config.world_size
    return {
        "seconds": slowest.seconds,
        "tokens_per_s_per_device": tokens / slowest.seconds if slowest.seconds else None,
        "slowest_rank": slowest.rank,
        "ranks": [_rank(rank) for rank in times],
        "operations": [
            {"what": described(work), "count": slowest.counts[work], "seconds": seconds}
            for work, seconds in _most(slowest.operations)
        ],
    }


def _most(seconds: Mapping[Any, float]) -> list[tuple[Any, float]]:
    """Return the entries with most seconds."""
    return sorted(seconds.items(), key=lambda entry: -entry[1])[:_MOST_OPERATIONS]


def _rank(rank: RankTime) -> Json:
    exposed: dict[str, float] = {}
    for (axis, _), seconds in rank.exposed.items():
        exposed[axis] = exposed.get(axis, 0.0) + seconds
    names = ("rank", "seconds", "computed", "slowed", "host_gaps")
    return {
        **{name: getattr(rank, name) for name in names},
        "exposed": exposed,
        "communicated": dict(rank.communicated),
        "waits": [
            {"axis": axis, "line": line, "seconds": seconds}
            for (axis, line), seconds in _most(rank.exposed)
        ],
    }


def described(work: tuple[Any, ...]) -> str:
    """Return an operation as a text, such as `mm bf16 8192 × 14336 × 4096`."""
    what, name, *numbers = work
    if what == "product":
        kind, *sizes, groups, _aligned = numbers
        grouped = f", {groups} groups" if groups > 1 else ""
        return f"{name} {kind} {' × '.join(map(str, sizes))}{grouped}"
    if what == "attention":
        kind, batch, queries, keys, heads, size, *_ = numbers
        return f"{name.strip('_')} {kind} {batch} × {heads} heads × {queries} × {keys} × {size}"
    return f"{name} of {numbers[0]:,} bytes"


def trace(times: list[RankTime], kernels: Sequence[Json]) -> Json:
    """Return the streams of all ranks, with the lines of compiled kernels, in the trace format of Chrome, which
    ui.perfetto.dev opens."""
    lines = {it["name"]: {"lines": it["lines"]} for it in kernels}
    return {"traceEvents": list(_trace_events(times, lines)), "displayTimeUnit": "ms"}


def _trace_events(times: list[RankTime], lines: Mapping[str, Json]) -> Iterator[Json]:
    for rank in times:
        about = {"name": f"rank {rank.rank}"}
        yield {"ph": "M", "name": "process_name", "pid": rank.rank, "args": about}
        names = sorted({each.stream for each in rank.slices})
        for number, name in enumerate(names):
            about = {"name": name}
            yield {"ph": "M", "name": "thread_name", "pid": rank.rank, "tid": number, "args": about}
        for each in rank.slices:
            detail = {"at": each.detail} | lines.get(each.name, {})
            yield {
                "ph": "X", "name": each.name, "pid": rank.rank, "tid": names.index(each.stream),
                "ts": 1e6 * each.begin, "dur": 1e6 * (each.end - each.begin), "args": detail,
            }  # fmt: skip

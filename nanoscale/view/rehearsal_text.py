"""The result of a rehearsal, on the terminal and as a page."""

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence

from nanoscale.common.json_text import Json
from nanoscale.common.units import GIB, byte_size, counted, duration, numbered, share
from nanoscale.view.blocks import Block, Chart, Column, Lines, Report, Table, table
from nanoscale.view.charts import Curve, curves

_ERROR_LINES = 40
_BAR = 30
"""Characters of the highest phase's bar."""
_RANKS = (
    Column("rank", "rank"),
    Column("for", lambda rank: f"{rank['stands_for']:,}", optional=1),
    Column("allocated", lambda rank: byte_size(rank["allocated"])),
    Column("reserved", lambda rank: byte_size(rank["reserved"])),
    Column("host", lambda rank: byte_size(rank["host"]), optional=1),
    Column("checkpoint", lambda rank: byte_size(rank["checkpoint"].get("bytes", 0)), optional=1),
    Column("highest in", "peak_phase", is_text=True),
)
_COLLECTIVES = (
    Column("collectives of a step", lambda row: f"{row['axis']}: {row['kind']}"),
    Column("ranks", lambda row: f"{row['ranks']:,}"),
    Column("calls", lambda row: f"{row['count']:,}"),
    Column("bytes", lambda row: byte_size(row["bytes"])),
)


_KERNELS = (
    Column("kernels that move most bytes", lambda row: row["name"].removeprefix("triton_")),
    Column("times", lambda row: f"{row['times']:,}"),
    Column("bytes of one", lambda row: byte_size(row["bytes"])),
    Column("registers", "registers"),
    Column("shared", lambda row: byte_size(row["shared"]), optional=1),
    Column("reads twice", lambda row: str(len(row["reads_again"]) or ""), optional=2),
    Column("at", lambda row: ", ".join(row["lines"][:2]), is_text=True, optional=1),
)
_SHOWN_KERNELS = 6


def rehearsal_report(result: Json, changes: Sequence[dict[str, str]]) -> Report:
    """Return memory by rank, by phase and in time, the verdict, collectives, waits and mistakes.

    Args:
        changes: overrides that would make the job fit.
    """
    played = len(result["ranks"])
    degrees = " · ".join(f"{axis} {n}" for axis, n in result["degrees"].items() if n > 1)
    ranks = f"{played} of {counted(result['world_size'], 'rank')} played"
    seconds = duration(sum(rank["seconds"] for rank in result["ranks"]))
    job = f"{result['model']}, {degrees or 'one process'}, on {result['device']}"
    title = f"{job}: {ranks} in {seconds} of processor time"
    return Report(title, list(_blocks(result, changes)), f"Rehearsal of {title}")


def _blocks(result: Json, changes: Sequence[dict[str, str]]) -> Iterator[Block]:
    worst = _worst(result)
    wrong = list(mistakes(result))
    good = result["fits"] is not False and not wrong
    yield Lines([verdict(result)], "green" if good else "bold red")
    yield Lines([f"  {line}" for line in advice(result, changes)])
    yield table(_RANKS, result["ranks"])
    yield _phases(worst)
    points: Curve = [(at, size / GIB) for at, size in enumerate(worst["timeline"])]
    title, axis = "GiB of tensors", "operation"
    yield Chart(
        pictures=[curves(title, [("", points)], from_zero=True, axis=axis, width=960, height=260)],
        title=f"memory of rank {worst['rank']} in the last step, operation by operation",
    )
    if result.get("time"):
        yield from _time(result["time"])
    if kernels := result["compiled"]["kernels"]:
        yield table(_KERNELS, kernels[:_SHOWN_KERNELS])
    if result["collectives"]:
        yield table(_COLLECTIVES, result["collectives"])
        if not result["mismatches"]:
            yield Lines([_agreement(result)])
    yield Lines(
        [
            *_waits(result),
            *result.get("compiler", []),
            *(
                f"{it['name']} spills {it['spilled']:,} bytes of each thread's registers to memory"
                for it in result["compiled"]["kernels"]
                if it["spilled"]
            ),
            *(f"note: {note}" for note in result["notes"]),
        ]
    )
    if result["not_played"]:
        yield Lines([f"not played: {'; '.join(result['not_played'])}"])
    if "against" in result:
        yield Lines(["changed:", *result["against"]] if result["against"] else ["nothing changed"])
    if wrong:
        yield Lines(wrong, "red")


_OPERATIONS = (
    Column("most expensive operations of a step", "what"),
    Column("times", lambda row: f"{row['count']:,}"),
    Column("together", lambda row: duration(row["seconds"])),
)


def _time(time: Json) -> Iterator[Block]:
    """Yield the time of the slowest rank's step: what it computes, and what it waits for."""
    if not time["seconds"]:  # no rank was played to the end of a step
        return
    rank = next(it for it in time["ranks"] if it["rank"] == time["slowest_rank"])
    speed = f"{time['tokens_per_s_per_device']:,.0f} tokens/s per device"
    lines = [
        f"step {duration(time['seconds'])}, {speed}, by the plan's efficiencies; rank {rank['rank']}:"
    ]
    parts = {
        "computes": rank["computed"],
        "is slowed by hidden collectives": rank["slowed"],
        "waits for the host": rank["host_gaps"],
    }
    parts |= {f"waits for {axis}": seconds for axis, seconds in rank["exposed"].items()}
    for name, seconds in parts.items():
        if seconds > 0.0005 * time["seconds"]:
            whole = rank["communicated"].get(name.removeprefix("waits for "))
            of = f" of {duration(whole)}" if whole else ""
            lines.append(f"  {name} {duration(seconds)}{of} ({seconds / time['seconds']:.1%})")
    for wait in rank["waits"][:3]:
        if wait["seconds"] > 0.005 * time["seconds"]:
            lines.append(f"  {duration(wait['seconds'])} of {wait['axis']} at {wait['line']}")
    yield Lines(lines)
    yield table(_OPERATIONS, time["operations"])


def _agreement(result: Json) -> str:
    """Return of how many groups members were compared."""
    compared, groups = result["compared_groups"], result["groups"]
    agree = "agree on kind, size, type and order"
    if len(result["ranks"]) == result["world_size"] and compared == groups:
        return f"all members of every group {agree}"
    if compared == 0:
        return "no two members of a group were played: their collectives were not compared"
    return f"in {compared:,} of {counted(groups, 'group')} two or more members were played, and they {agree}"


def verdict(result: Json) -> str:
    """Return whether the job fits."""
    worst = _worst(result)
    if result["capacity"] is None:
        return f"rank {worst['rank']} holds most: {byte_size(worst['allocated'])} in {worst['peak_phase']}"
    used = share(worst["total"], result["capacity"])
    if result["fits"] is None:
        most = f"at most {used} on rank {worst['rank']} (most in {worst['peak_phase']})"
        return f"{most}: compiled blocks need less, so nanoscale plan decides whether it fits"
    fits = "fits" if result["fits"] else "does not fit"
    return f"{fits}: {used} on rank {worst['rank']} (most in {worst['peak_phase']})"


def advice(result: Json, changes: Sequence[dict[str, str]]) -> Iterator[str]:
    """Yield the overrides that would fit by the plan, if the job does not fit."""
    if result["fits"] is False and not changes:
        yield "no layout of these devices fits, see nanoscale plan --search"
    for change in changes:
        yield f"{change['overrides']}  ({change['expected']}, as planned)"


def mistakes(result: Json) -> Iterator[str]:
    """Yield what is wrong: errors, differences between ranks, and mistakes of single ranks."""
    errors: dict[str, list[str]] = defaultdict(list)
    findings: dict[str, list[str]] = defaultdict(list)
    for rank in result["ranks"]:
        if rank["error"]:
            errors[rank["error"]].append(str(rank["rank"]))
        for finding in rank["findings"]:
            findings[finding].append(str(rank["rank"]))
    for error, ranks in errors.items():
        yield f"error: {numbered('rank', ranks)} failed:"
        yield from (f"  {line}" for line in error.rstrip().splitlines()[-_ERROR_LINES:])
    for finding, ranks in findings.items():
        yield f"error: {numbered('rank', ranks)}: {finding}"
    for mismatch in result["mismatches"]:
        yield f"error: {mismatch}"


def _worst(result: Json) -> Json:
    ranks: list[Json] = result["ranks"]
    return next(rank for rank in ranks if rank["rank"] == result["worst_rank"])


def _phases(rank: Json) -> Table:
    """Return the peak of each phase, also as a bar, and what held the memory."""
    most = max([1, *(phase["peak"] for phase in rank["phases"].values())])
    rows = []
    for name, phase in rank["phases"].items():
        kinds = sorted(phase["kinds"].items(), key=lambda item: -item[1])
        purposes = ", ".join(f"{kind} {byte_size(size)}" for kind, size in kinds if size)
        bar = "█" * round(_BAR * phase["peak"] / most)
        rows.append((name, byte_size(phase["peak"]), bar, purposes))
    title = f"memory of rank {rank['rank']} by phase and purpose"
    return Table(("phase", "peak", "", "purposes"), rows, title, ("",), {"": 1})


def _waits(result: Json) -> Iterator[str]:
    last = f"step {result['steps']}"
    found: Counter[tuple[str, str]] = Counter()
    for rank in result["ranks"]:
        waits = [wait for wait in rank["waits"] if wait["phase"] == last]
        found |= Counter({(wait["what"], wait["line"]): wait["times"] for wait in waits})
    if not found:
        yield "the host waits for the device nowhere in a step"
    for (what, line), count in found.items():
        yield f"the host waits for the device {counted(count, 'time')} a step: {what} at {line}"

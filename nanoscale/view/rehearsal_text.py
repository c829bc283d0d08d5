"""A rehearsal for the terminal."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

from nanoscale.common.units import byte_size, duration, share


def lines(result: dict[str, Any], changes: Sequence[dict[str, str]]) -> Iterator[str]:
    """Yield the lines of a rehearsal's result; `changes` would make it fit."""
    yield head(result)
    yield ""
    yield from _memory(result)
    yield ""
    yield verdict(result)
    yield from (f"  {line}" for line in advice(result, changes))
    yield from _communication(result)
    yield from _waits(result)
    for note in result["notes"]:
        yield f"note: {note}"
    yield from mistakes(result)


def head(result: dict[str, Any]) -> str:
    """Return what was rehearsed, in one line."""
    played = len(result["ranks"])
    degrees = " · ".join(f"{axis} {n}" for axis, n in result["degrees"].items() if n > 1)
    ranks = f"{played} of {result['world_size']:,} ranks played"
    seconds = duration(sum(rank["seconds"] for rank in result["ranks"]))
    layout = degrees or "one process"
    return f"{result['model']}, {layout}, on {result['device']}: {ranks} in {seconds} of processor time"


def verdict(result: dict[str, Any]) -> str:
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


def advice(result: dict[str, Any], changes: Sequence[dict[str, str]]) -> Iterator[str]:
    """Yield the overrides that would fit by the plan, if the job does not fit."""
    if result["fits"] is False and not changes:
        yield "no layout of these devices fits, see nanoscale plan --search"
    for change in changes:
        yield f"{change['overrides']}  ({change['expected']}, as planned)"


def mistakes(result: dict[str, Any]) -> Iterator[str]:
    """Yield what is wrong: errors, differences between ranks, and mistakes of single ranks."""
    errors: dict[str, list[str]] = defaultdict(list)
    findings: dict[str, list[str]] = defaultdict(list)
    for rank in result["ranks"]:
        if rank["error"]:
            errors[rank["error"]].append(str(rank["rank"]))
        for finding in rank["findings"]:
            findings[finding].append(str(rank["rank"]))
    for error, ranks in errors.items():
        yield f"error: {_ranks(ranks)} failed:"
        yield from (f"  {line}" for line in error.rstrip().splitlines()[-12:])
    for finding, ranks in findings.items():
        yield f"error: {_ranks(ranks)}: {finding}"
    for mismatch in result["mismatches"]:
        yield f"error: {mismatch}"


def _ranks(ranks: list[str]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(ranks)}"


def _worst(result: dict[str, Any]) -> dict[str, Any]:
    ranks: list[dict[str, Any]] = result["ranks"]
    return next(rank for rank in ranks if rank["rank"] == result["worst_rank"])


def _memory(result: dict[str, Any]) -> Iterator[str]:
    yield f"{'rank':>6} {'for':>6} {'allocated':>10} {'reserved':>10} {'host':>10}  highest in"
    for rank in result["ranks"]:
        sizes = " ".join(
            f"{byte_size(rank[name]):>10}" for name in ("allocated", "reserved", "host")
        )
        yield f"{rank['rank']:>6} {rank['stands_for']:>6,} {sizes}  {rank['peak_phase']}"
    yield ""
    worst = _worst(result)
    yield f"rank {worst['rank']} by phase and purpose"
    for name, phase in worst["phases"].items():
        kinds = sorted(phase["kinds"].items(), key=lambda item: -item[1])
        parts = ", ".join(f"{kind} {byte_size(size)}" for kind, size in kinds if size)
        yield f"  {name:<17} {byte_size(phase['peak']):>10}  {parts}"
    held = worst["checkpoint"]
    if held:
        yield f"  a checkpoint writes {byte_size(held['bytes'])} of this rank in {held['tensors']:,} tensors"


def _communication(result: dict[str, Any]) -> Iterator[str]:
    if not result["collectives"]:
        return
    yield ""
    yield f"{'collectives of a step':<34} {'ranks':>6} {'calls':>8} {'bytes':>10}"
    for row in result["collectives"]:
        name = f"{row['axis']}: {row['kind']}"
        yield f"{name:<34} {row['ranks']:>6,} {row['count']:>8,} {byte_size(row['bytes']):>10}"
    if not result["mismatches"]:
        yield "all members of every group agree on kind, size, type and order"


def _waits(result: dict[str, Any]) -> Iterator[str]:
    last = f"step {result['steps']}"
    found: Counter[tuple[str, str]] = Counter()
    for rank in result["ranks"]:
        for wait in rank["waits"]:
            if wait["phase"] == last:
                place = wait["what"], wait["line"]
                found[place] = max(found[place], wait["times"])
    yield ""
    if not found:
        yield "the host waits for the device nowhere in a step"
    for (what, line), count in found.items():
        yield f"the host waits for the device {count} times a step: {what} at {line}"

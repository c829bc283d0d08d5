"""The output of `nanoscale doctor`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from nanoscale.common import display
from nanoscale.common.json_text import Json
from nanoscale.common.units import byte_size, counted
from nanoscale.launch.lifecycle.examination import Measured
from nanoscale.launch.preflight.verdicts import EqualVerdicts, Verdict, grouped, join_names
from nanoscale.view.blocks import Column, rich_table, table

if TYPE_CHECKING:
    from rich.console import Console

_FEW_HOSTS = 4
"""Up to this many hosts, everything is shown."""
_FEW_FIGURES = 6
"""Up to this many hosts or pairs are shown with their bandwidth, or the slowest of more."""
_COLUMNS = {
    "operation": Column("collective", "operation", is_text=True),
    "host": Column("host", "host", is_text=True),
    "ends": Column("between", lambda row: " – ".join(row["ends"]), is_text=True),
    "bytes": Column("size", lambda row: byte_size(row["bytes"])),
    "latency_us": Column("latency µs", lambda row: f"{row['latency_us']:,.0f}"),
    "bus_gb_s": Column("bus bandwidth GB/s", lambda row: f"{row['bus_gb_s']:.3g}"),
    "gb_s": Column("bandwidth GB/s", lambda row: f"{row['gb_s']:.3g}"),
}
"""The column of each figure."""


def print_doctor(
    screen: Console,
    names: Sequence[str],
    verdicts: Sequence[Verdict],
    measured: Measured | None,
    *,
    verbose: bool,
) -> None:
    """Print what is wrong; of few hosts, or if `verbose`, everything."""
    both = [*verdicts, *(measured.verdicts if measured is not None else ())]
    screen.print(_summary(names, both), style="bold")
    everything = verbose or len(names) <= _FEW_HOSTS
    shown = [verdict for verdict in both if everything or not verdict.good]
    if shown:
        screen.print()
        _print_verdicts(screen, names, shown, verbose=verbose)
    if measured is not None and measured.figures is not None:
        _print_figures(screen, names, measured.figures, verbose=verbose)


def _summary(names: Sequence[str], verdicts: Sequence[Verdict]) -> str:
    ill = list(dict.fromkeys(verdict.host for verdict in verdicts if not verdict.good))
    if len(names) == 1:
        return f"{names[0]}: {'a problem was found' if ill else 'no problem found'}"
    if not ill:
        return f"{len(names)} hosts: no problem found"
    count = f"{len(ill)} of them: " if len(ill) > 1 else ""
    return f"{len(names)} hosts: problems on {count}{join_names(ill)}"


def _print_verdicts(
    screen: Console, names: Sequence[str], verdicts: Sequence[Verdict], *, verbose: bool
) -> None:
    """Print a line for each finding shared by some hosts, with the remedy below it."""
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0), pad_edge=False)
    order = list(dict.fromkeys(verdict.check for verdict in verdicts))
    for group in sorted(grouped(verdicts), key=lambda group: order.index(group.check)):
        text = Text(_without_label(group))
        who = "all" if len(group.hosts) == len(names) else join_names(group.hosts)
        if not group.good:
            text.append(f"\nremedy: {group.remedy}", style="dim")
        if verbose and " more" in who:
            text.append(f"\nhosts: {', '.join(group.hosts)}", style="dim")
        mark = Text("✓", style="green") if group.good else Text("✗", style="bold red")
        style = "" if group.good else "red"
        hosts = [who] if len(names) > 1 else []
        table.add_row(mark, Text(group.check, style=style), *hosts, text)
    display.print_table(screen, table)


def _without_label(group: EqualVerdicts) -> str:
    """Return the finding without its check's name, which is printed next to it."""
    label, finding = f"{group.check} ", group.finding
    return finding[len(label) :] if finding.lower().startswith(label) else finding


def _print_figures(screen: Console, names: Sequence[str], figures: Json, *, verbose: bool) -> None:
    without = [name for name in names if name not in figures["hosts"]]
    title = f"all-reduce of {counted(figures['ranks'], 'rank')} over {figures['backend']}"
    title += f" by {' and '.join(figures['transports'])}" if figures["transports"] else ""
    title += f", without {join_names(without)}" if without else ""
    _print_table(screen, title, figures["all_reduce"])
    _print_table(screen, "large collectives of all ranks", figures["collectives"])
    for key, title, noun in (
        ("within_hosts", "all-reduce within each host", "hosts"),
        ("point_to_point", "point to point", "pairs"),
    ):
        rows = figures[key]
        if len(rows) > _FEW_FIGURES and not verbose:
            title += f", the slowest {_FEW_FIGURES} of {len(rows)} {noun}"
            rows = rows[:_FEW_FIGURES]
        _print_table(screen, title, rows)


def _print_table(screen: Console, title: str, rows: Sequence[Json]) -> None:
    """Print figures, slow ones in red; nothing if there are none."""
    if not rows:
        return
    shown = rich_table(
        table([it for key, it in _COLUMNS.items() if key in rows[0]], rows), screen.width
    )
    shown.columns[0].justify = "left" if {"operation", "host", "ends"} & rows[0].keys() else "right"
    for line, row in zip(shown.rows, rows, strict=True):
        line.style = "red" if row.get("slow") else None
    screen.print(f"\n{title}", style="bold")
    display.print_table(screen, shown)


def document(names: Sequence[str], verdicts: Sequence[Verdict], measured: Measured | None) -> Json:
    """Return the document of `doctor --json`."""
    by_host: dict[str, list[Json]] = {name: [] for name in names}
    for verdict in verdicts:
        by_host[verdict.host].append(_plain(verdict))
    hosts = [{"host": name, "verdicts": found} for name, found in by_host.items()]
    return {"hosts": hosts, "bandwidth": _measured(names, measured)}


def _plain(verdict: Verdict) -> Json:
    return {
        "check": verdict.check,
        "good": verdict.good,
        "finding": verdict.finding,
        "remedy": "" if verdict.good else verdict.remedy,
    }


def _measured(names: Sequence[str], measured: Measured | None) -> Json | None:
    if measured is None:
        return None
    verdicts = [{"host": verdict.host, **_plain(verdict)} for verdict in measured.verdicts]
    figures = measured.figures or {"hosts": []}
    left_out = [name for name in names if name not in figures["hosts"]]
    return {**figures, "left_out": left_out, "verdicts": verdicts}

"""The output of `nanoscale doctor`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from nanoscale.common import display
from nanoscale.common.units import byte_size

if TYPE_CHECKING:
    from rich.console import Console

    from nanoscale.launch.lifecycle.examination import Measured
    from nanoscale.launch.preflight.verdicts import EqualVerdicts, Verdict

_FEW_HOSTS = 4
"""Up to this many hosts, everything is shown."""
_FEW_FIGURES = 6
"""Up to this many hosts or pairs are shown with their bandwidth, or the slowest of more."""
_COLUMNS: dict[str, tuple[str, Callable[[Any], str]]] = {
    "host": ("host", str),
    "ends": ("between", " – ".join),
    "bytes": ("size", byte_size),
    "latency_us": ("latency µs", "{:,.0f}".format),
    "bus_gb_s": ("bus bandwidth GB/s", "{:.3g}".format),
    "gb_s": ("bandwidth GB/s", "{:.3g}".format),
}
"""The header and the format of each figure."""
_NAMES = ("host", "ends")


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
    from nanoscale.launch.preflight.verdicts import join_names

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

    from nanoscale.launch.preflight.verdicts import grouped

    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0), pad_edge=False)
    order = list(dict.fromkeys(verdict.check for verdict in verdicts))
    for group in sorted(grouped(verdicts), key=lambda group: order.index(group.check)):
        text, who = Text(_without_label(group)), _who(group, names)
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


def _who(group: EqualVerdicts, names: Sequence[str]) -> str:
    from nanoscale.launch.preflight.verdicts import join_names

    return "all" if len(group.hosts) == len(names) else join_names(group.hosts)


def _print_figures(
    screen: Console, names: Sequence[str], figures: dict[str, Any], *, verbose: bool
) -> None:
    from nanoscale.common.units import counted
    from nanoscale.launch.preflight.verdicts import join_names

    without = [name for name in names if name not in figures["hosts"]]
    title = f"all-reduce of {counted(figures['ranks'], 'rank')} over {figures['backend']}"
    title += f", without {join_names(without)}" if without else ""
    _print_table(screen, title, figures["all_reduce"])
    for key, title, noun in (
        ("within_hosts", "all-reduce within each host", "hosts"),
        ("point_to_point", "point to point", "pairs"),
    ):
        rows = figures[key]
        if len(rows) > _FEW_FIGURES and not verbose:
            title += f", the slowest {_FEW_FIGURES} of {len(rows)} {noun}"
            rows = rows[:_FEW_FIGURES]
        _print_table(screen, title, rows)


def _print_table(screen: Console, title: str, rows: Sequence[dict[str, Any]]) -> None:
    """Print figures, slow ones in red; nothing if there are none."""
    from rich.table import Table

    if not rows:
        return
    keys = [key for key in _COLUMNS if key in rows[0]]
    table = Table(box=None, pad_edge=False)
    for key in keys:
        table.add_column(_COLUMNS[key][0], justify="left" if key in _NAMES else "right")
    for row in rows:
        texts = [_COLUMNS[key][1](row[key]) for key in keys]
        table.add_row(*texts, style="red" if row.get("slow") else None)
    screen.print(f"\n{title}", style="bold")
    display.print_table(screen, table)


def document(
    names: Sequence[str], verdicts: Sequence[Verdict], measured: Measured | None
) -> dict[str, Any]:
    """Return the document of `doctor --json`."""
    by_host: dict[str, list[dict[str, Any]]] = {name: [] for name in names}
    for verdict in verdicts:
        by_host[verdict.host].append(_plain(verdict))
    hosts = [{"host": name, "verdicts": found} for name, found in by_host.items()]
    return {"hosts": hosts, "bandwidth": _measured(names, measured)}


def _plain(verdict: Verdict) -> dict[str, Any]:
    return {
        "check": verdict.check,
        "good": verdict.good,
        "finding": verdict.finding,
        "remedy": "" if verdict.good else verdict.remedy,
    }


def _measured(names: Sequence[str], measured: Measured | None) -> dict[str, Any] | None:
    if measured is None:
        return None
    verdicts = [{"host": verdict.host, **_plain(verdict)} for verdict in measured.verdicts]
    figures = measured.figures or {"hosts": []}
    left_out = [name for name in names if name not in figures["hosts"]]
    return {**figures, "left_out": left_out, "verdicts": verdicts}

"""The output of `nanoscale doctor`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from nanoscale.common import display
from nanoscale.common.units import byte_size

if TYPE_CHECKING:
    from rich.console import Console

    from nanoscale.launch.lifecycle.bandwidth import Figures, Measured, Pair
    from nanoscale.launch.preflight.verdicts import EqualVerdicts, Verdict

_FEW_HOSTS = 4
"""Up to this many hosts, everything is shown."""
_FEW_PAIRS = 6
"""Up to this many pairs are shown, or the slowest of more."""


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
    screen: Console, names: Sequence[str], figures: Figures, *, verbose: bool
) -> None:
    from rich.table import Table

    from nanoscale.common.units import counted
    from nanoscale.launch.preflight.verdicts import join_names

    without = [name for name in names if name not in figures.hosts]
    title = f"\nall-reduce of {counted(figures.ranks, 'rank')} over {figures.backend}"
    title += f", without {join_names(without)}" if without else ""
    reduced = Table("size", "latency µs", "bus bandwidth GB/s", box=None, pad_edge=False)
    for column in reduced.columns:
        column.justify = "right"
    for one in figures.all_reduce:
        reduced.add_row(byte_size(one.bytes), f"{one.latency_us:,.0f}", _gb_s(one.bus_gb_s))
    screen.print(title, style="bold")
    display.print_table(screen, reduced)
    _print_pairs(screen, figures, verbose=verbose)


def _print_pairs(screen: Console, figures: Figures, *, verbose: bool) -> None:
    from rich.table import Table

    if not figures.pairs:
        return
    pairs = figures.pairs
    shown = pairs
    if len(pairs) > _FEW_PAIRS and not verbose:
        shown = tuple(sorted(pairs, key=lambda pair: pair.gb_s)[:_FEW_PAIRS])
    title = "\npoint to point"
    if len(shown) < len(pairs):
        title += f", the slowest {len(shown)} of {len(pairs)} pairs"
    if figures.left_out:
        title += f"; {figures.left_out} pairs were not measured for lack of time"
    table = Table("between", "latency µs", "bandwidth GB/s", box=None, pad_edge=False)
    for column in table.columns[1:]:
        column.justify = "right"
    for pair in shown:
        row = (" – ".join(pair.ends), f"{pair.latency_us:,.0f}", _gb_s(pair.gb_s))
        table.add_row(*row, style="red" if pair.slow else None)
    if len(shown) < len(pairs):
        table.add_row("median", *_medians(pairs), style="dim")
    screen.print(title, style="bold")
    display.print_table(screen, table)


def _medians(pairs: Sequence[Pair]) -> tuple[str, str]:
    from statistics import median

    latency = median(pair.latency_us for pair in pairs)
    return f"{latency:,.0f}", _gb_s(median(pair.gb_s for pair in pairs))


def _gb_s(value: float) -> str:
    return f"{value:.3g}"


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
    found = measured.figures
    verdicts = [{"host": verdict.host, **_plain(verdict)} for verdict in measured.verdicts]
    if found is None:
        return {"hosts": [], "left_out": list(names), "verdicts": verdicts}
    return {
        "backend": found.backend,
        "ranks": found.ranks,
        "hosts": list(found.hosts),
        "left_out": [name for name in names if name not in found.hosts],
        "all_reduce": [asdict(one) for one in found.all_reduce],
        "point_to_point": [asdict(pair) for pair in found.pairs],
        "pairs_left_out": found.left_out,
        "verdicts": verdicts,
    }

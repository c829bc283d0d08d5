"""The output of `nanoscale config` and `nanoscale recipes`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from nanoscale.common import display
from nanoscale.common.json_text import Json
from nanoscale.common.units import counted
from nanoscale.config.reference import declared, value_of
from nanoscale.config.training_phases import lr_factor, phase_at
from nanoscale.config.violations import shown
from nanoscale.view.blocks import Table, show_table
from nanoscale.view.charts import curve_line

if TYPE_CHECKING:
    from nanoscale.config.composing.library import Option
    from nanoscale.config.schema import Config
    from nanoscale.config.values.provenance import Composed


def explained(name: str, composed: Composed, here: Config | None) -> Json:
    """Return all that is known of a key; `here` is the configuration resolved for this machine."""
    key = declared()[name]
    *earlier, last = composed.history[name]
    value = value_of(composed.config, name)
    becomes = value if here is None else value_of(here, name)
    return {
        "key": name,
        "value": value,
        "becomes": becomes if becomes != value else None,
        "type": key.type,
        "unit": key.unit,
        "bounds": key.bounds,
        "meaning": key.meaning,
        "default": key.default,
        "set_by": last.source,
        "overrode": [{"value": each.value, "source": each.source} for each in reversed(earlier)],
    }


def print_explained(document: Json, *, first: bool) -> None:
    """Print a key: its meaning, its value, and what set it."""
    from rich.text import Text

    out = display.console()
    if not first:
        out.print()
    unit = f" {document['unit']}" if document["unit"] else ""
    out.print(Text.assemble((document["key"], "bold"), f" = {shown(document['value'])}{unit}"))
    bounds = f", {document['bounds']}" if document["bounds"] else ""
    rows = [
        ("meaning", document["meaning"]),
        *([("becomes", shown(document["becomes"]))] if document["becomes"] is not None else []),
        ("type", f"{document['type']}{bounds}"),
        ("set by", document["set_by"]),
        *(
            ("overrode", f"{shown(each['value'])}, {each['source']}")
            for each in document["overrode"]
        ),
    ]
    for label, text in rows:
        out.print(Text.assemble((f"  {label:<9}", "dim"), text))


def options_document(options: Mapping[str, Option]) -> list[Json]:
    """Return the options of a group for `--json`."""
    return [
        {"name": name, "about": option.about, "origin": option.origin}
        for name, option in options.items()
    ]


def option_rows(options: Mapping[str, Option], prefix: str = "") -> list[tuple[str, str]]:
    """Return the name and the meaning of each option, with its origin unless it is packaged."""
    rows = []
    for name, option in options.items():
        origin = "" if option.origin == "nanoscale" else f" ({option.origin})"
        rows.append((prefix + name, option.about + origin))
    return rows


def print_rows(rows: Sequence[tuple[str, str]]) -> None:
    """Print names and their meanings in two columns."""
    from rich.text import Text

    width = max((len(name) for name, _ in rows), default=0)
    for name, meaning in rows:
        display.console().print(Text.assemble((f"{name:<{width}}  ", "bold"), meaning))


def print_backends(rows: Sequence[tuple[str, str, str]], outside: Sequence[str]) -> None:
    """Print what each backend does with each key; the sections `outside` apply to both."""
    header = ("key", "native", "deepspeed")
    show_table(display.console(), Table(header, rows, texts=header))
    display.console().print(f"\nthe sections {', '.join(outside)} apply to both", style="dim")


_POINTS = 200
"""Steps that a chart of the schedule samples."""


def schedule_chart(config: Config, width: int = 60) -> str:
    """Return comments of YAML that draw a resolved job's learning rate, and what its phases change."""
    train, scheduler = config.train, config.scheduler
    last = train.steps or 1
    count = min(last, _POINTS)
    steps = [1 + place * (last - 1) // max(1, count - 1) for place in range(count)]
    curves: dict[str, Sequence[float | None]] = {
        "lr": [config.optimizer.lr * lr_factor(scheduler, step, train) for step in steps]
    }
    if train.phases:
        phases = [phase_at(train, step) for step in steps]
        curves["batch"] = [float(phase.global_batch) for phase in phases]
        curves["seq_len"] = [float(phase.seq_len) for phase in phases]
        for name in {name: None for phase in phases for name in phase.weights or {}}:
            curves[name] = [
                None if it.weights is None else it.weights.get(name, 0.0) / sum(it.weights.values())
                for it in phases  # without weights of its own, a phase has the data's
            ]
    lines = [
        curve_line(name, list(zip(steps, values, strict=True)), width)
        for name, values in curves.items()
    ]
    return "\n".join([f"# over {counted(last, 'step')}:", *(f"#   {line}" for line in lines), ""])

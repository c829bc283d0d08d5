"""The options for the hosts of a job: each is a key, set without Hydra's grammar."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from nanoscale.config.composing.compose import Setting

Hostfile = Annotated[
    str | None,
    typer.Option(
        "--hostfile",
        metavar="FILE",
        help="Run on these hosts, each line `HOST slots=N` (launcher.hostfile).",
        show_default=False,
    ),
]
Include = Annotated[
    str | None,
    typer.Option(
        "--include",
        metavar="HOSTS",
        help="Use these hosts or slots only, as in h1@h2:0,2 (launcher.include).",
        show_default=False,
    ),
]
Exclude = Annotated[
    str | None,
    typer.Option(
        "--exclude",
        metavar="HOSTS",
        help="Use all hosts and slots but these (launcher.exclude).",
        show_default=False,
    ),
]
NumNodes = Annotated[
    str | None,
    typer.Option(
        "--num-nodes",
        metavar="N",
        help="Use the first N hosts, or MIN:MAX for an elastic job (launcher.nodes).",
        show_default=False,
    ),
]
NumGpus = Annotated[
    int | None,
    typer.Option(
        "--num-gpus",
        metavar="N",
        help="Start N ranks on every host (launcher.devices).",
        show_default=False,
    ),
]
NoPreflight = Annotated[
    bool,
    typer.Option("--no-preflight", help="Do not look at the hosts first (launcher.preflight)."),
]


def as_settings(
    hostfile: str | None = None,
    include: str | None = None,
    exclude: str | None = None,
    num_nodes: str | None = None,
    num_gpus: int | None = None,
    no_preflight: bool = False,
) -> dict[str, Setting]:
    """Return the keys of the given options, in the form of `compose`'s `options`."""
    from nanoscale.config.composing.compose import Setting
    from nanoscale.config.values.provenance import COMMAND_LINE

    given: list[tuple[str, str, Any]] = [
        ("--hostfile", "launcher.hostfile", hostfile),
        ("--include", "launcher.include", include),
        ("--exclude", "launcher.exclude", exclude),
        ("--num-nodes", "launcher.nodes", _number(num_nodes)),
        ("--num-gpus", "launcher.devices", num_gpus),
        ("--no-preflight", "launcher.preflight", False if no_preflight else None),
    ]
    return {
        key: Setting(value, f"{COMMAND_LINE}: {option}")
        for option, key, value in given
        if value is not None
    }


def _number(text: str | None) -> int | str | None:
    """Convert a text as YAML would."""
    return int(text) if text and text.isascii() and text.isdecimal() and len(text) < 7 else text

"""The options and arguments that several commands share, each defined once."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from nanoscale.cli.common import completion

if TYPE_CHECKING:
    from nanoscale.config.composing.compose import Setting

# --- the configuration ----------------------------------------------------------------------------

Overrides = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="OVERRIDES",
        help="Set recipe=NAME, GROUP=OPTION, KEY=VALUE (Hydra)",
        show_default=False,
        autocompletion=completion.overrides,
    ),
]
ConfigDir = Annotated[
    Path | None,
    typer.Option(
        "--config-dir",
        metavar="DIR",
        help="Prefer this folder's groups and recipes to packaged ones",
        show_default=False,
    ),
]
ConfigFile = Annotated[
    Path | None,
    typer.Option(
        "--config",
        metavar="FILE",
        help="Start from this frozen config.yaml, not from a recipe",
        show_default=False,
    ),
]
Trust = Annotated[
    bool,
    typer.Option("--trust", help="Run code that another user's run folder names"),
]

# --- the launch -----------------------------------------------------------------------------------

Hostfile = Annotated[
    str | None,
    typer.Option(
        "--hostfile",
        metavar="FILE",
        help="Read the hosts, `HOST slots=N` a line (launcher.hostfile)",
        show_default=False,
    ),
]
Include = Annotated[
    str | None,
    typer.Option(
        "--include",
        metavar="HOSTS",
        help="Use only these hosts or slots, h1@h2:0,2 (launcher.include)",
        show_default=False,
    ),
]
Exclude = Annotated[
    str | None,
    typer.Option(
        "--exclude",
        metavar="HOSTS",
        help="Use all hosts and slots except these (launcher.exclude)",
        show_default=False,
    ),
]
NumNodes = Annotated[
    str | None,
    typer.Option(
        "--num-nodes",
        metavar="N",
        help="Use N hosts, elastically MIN:MAX (launcher.nodes)",
        show_default=False,
    ),
]
NumGpus = Annotated[
    int | None,
    typer.Option(
        "--num-gpus",
        metavar="N",
        help="Start N ranks on every host (launcher.devices)",
        show_default=False,
    ),
]
NoPreflight = Annotated[
    bool,
    typer.Option("--no-preflight", help="Skip the checks of the hosts (launcher.preflight)"),
]
Force = Annotated[
    bool, typer.Option("--force", help="Launch even if the plan says that it does not fit")
]
Rehearse = Annotated[
    bool, typer.Option("--rehearse", help="Rehearse the job first; launch only if it succeeds")
]
DryRun = Annotated[
    bool, typer.Option("--dry-run", help="Show what would happen; write and start nothing")
]

# --- what is read ---------------------------------------------------------------------------------

Run = Annotated[
    str,
    typer.Argument(help="Name the run in runs/, or its directory", autocompletion=completion.runs),
]
Runs = Annotated[
    list[str],
    typer.Argument(
        metavar="RUN…",
        help="Name the runs in runs/, or their directories",
        autocompletion=completion.runs,
    ),
]
Model = Annotated[
    str,
    typer.Argument(
        metavar="RUN|DIR",
        help="Name a run, its directory, or a Hugging Face folder",
        autocompletion=completion.runs,
    ),
]
Step = Annotated[
    int | None,
    typer.Option(help="Take the checkpoint of this step", show_default="the newest"),
]


class Dtype(StrEnum):
    """The dtypes of weights and computations."""

    fp32 = "fp32"
    bf16 = "bf16"
    fp16 = "fp16"
    fp64 = "fp64"


ComputeDtype = Annotated[
    Dtype | None,
    typer.Option(
        "--dtype", help="Compute in this dtype", show_default="bf16 on a GPU, otherwise fp32"
    ),
]
Device = Annotated[
    str | None,
    typer.Option(help="Use cpu, cuda or cuda:N", show_default="the first GPU, if there is one"),
]
Tokenizer = Annotated[
    str | None,
    typer.Option(
        "--tokenizer",
        metavar="byte|PATH|NAME",
        help="Replace the model's own tokenizer",
        show_default=False,
    ),
]

Yes = Annotated[bool, typer.Option("--yes", help="Skip the question, for scripts")]

# --- the output -----------------------------------------------------------------------------------

AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON document and nothing else")]
Html = Annotated[
    Path | None,
    typer.Option("--html", metavar="FILE", help="Write a page with charts", show_default=False),
]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace the named file if it exists")]


KEYS = {
    "--hostfile": "launcher.hostfile",
    "--include": "launcher.include",
    "--exclude": "launcher.exclude",
    "--num-nodes": "launcher.nodes",
    "--num-gpus": "launcher.devices",
    "--no-preflight": "launcher.preflight",
}
"""The keys that options of the launch set."""


def as_settings(
    hostfile: str | None = None,
    include: str | None = None,
    exclude: str | None = None,
    num_nodes: str | None = None,
    num_gpus: int | None = None,
    no_preflight: bool = False,
) -> dict[str, Setting]:
    """Return the keys that the options of the launch set, in the form of `compose`'s `options`."""
    from nanoscale.config.composing.compose import Setting
    from nanoscale.config.values.provenance import COMMAND_LINE

    preflight = False if no_preflight else None
    values: tuple[Any, ...] = (hostfile, include, exclude, _number(num_nodes), num_gpus, preflight)
    return {
        key: Setting(value, f"{COMMAND_LINE}: {option}")
        for (option, key), value in zip(KEYS.items(), values, strict=True)
        if value is not None
    }


def _number(text: str | None) -> int | str | None:
    """Convert a text as YAML would."""
    return int(text) if text and text.isascii() and text.isdecimal() and len(text) < 7 else text

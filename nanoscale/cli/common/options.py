"""The options and arguments that several commands share, each defined once."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from nanoscale.cli.common import completion
from nanoscale.common.errors import UserError

if TYPE_CHECKING:
    from nanoscale.config.composing.compose import Setting


def option(
    help: str, *names: str, default: Any = None, metavar: str | None = None,
    shown: str | None = None, min: float | None = None, max: float | None = None,
    group: str | None = None,
) -> Any:  # fmt: skip
    """Declare an option, as the default of a command's parameter or in an `Annotated` type.

    Args:
        names: needed by a flag, to which Typer would add a `--no-` form; without them the parameter's.
        default: `...` for none, as in an `Annotated` type.
        shown: what the help text shows as the default value, if it is not the value itself.
        min: the least number, which is accepted.
        max: the largest number, which is accepted.
        group: the heading in the help text; None: "Options".
    """
    show_default = True if shown is None else shown
    return typer.Option(
        default, *names, help=help, metavar=metavar, show_default=show_default, min=min, max=max,
        rich_help_panel=group,
    )  # fmt: skip


def argument(help: str, completes: Any = None, metavar: str | None = None) -> Any:
    """Declare an argument, in an `Annotated` type; `completes` lists what a shell may complete it to."""
    return typer.Argument(metavar=metavar, help=help, show_default=False, autocompletion=completes)


flag = partial(option, default=False)
"""The form of `option` for an option without a value, as the default of a parameter."""
of_prompts = partial(option, group="Prompts")
of_sampling = partial(option, group="Sampling")
of_tasks = partial(option, group="Tasks")
"""The forms of `option` under a heading of its own in the help text."""
_shared = partial(option, default=...)
"""The form of `option` for an option of several commands, in an `Annotated` type."""
_of_hosts = partial(_shared, group="Hosts")
_of_model = partial(_shared, group="Model")

# --- the configuration ----------------------------------------------------------------------------

Overrides = Annotated[
    list[str] | None,
    argument(
        "Set recipe=NAME, GROUP=OPTION, KEY=VALUE (Hydra)",
        completion.overrides,
        metavar="OVERRIDES",
    ),
]
ConfigDir = Annotated[
    Path | None, _shared("Prefer this folder's groups and recipes to packaged ones", metavar="DIR")
]
ConfigFile = Annotated[
    Path | None, _shared("Start from this frozen config.yaml, not from a recipe", metavar="FILE")
]
Trust = Annotated[bool, _shared("Run code that another user's run folder names", "--trust")]

# --- the launch -----------------------------------------------------------------------------------

Hostfile = Annotated[
    str | None,
    _of_hosts("Read the hosts, `HOST slots=N` a line (launcher.hostfile)", metavar="FILE"),
]
Include = Annotated[
    str | None,
    _of_hosts("Use only these hosts or slots, h1@h2:0,2 (launcher.include)", metavar="HOSTS"),
]
Exclude = Annotated[
    str | None,
    _of_hosts("Use all hosts and slots except these (launcher.exclude)", metavar="HOSTS"),
]
NumNodes = Annotated[
    str | None, _of_hosts("Use N hosts, elastically MIN:MAX (launcher.nodes)", metavar="N")
]
NumGpus = Annotated[
    int | None, _of_hosts("Start N ranks on every host (launcher.devices)", metavar="N")
]
NoPreflight = Annotated[
    bool, _of_hosts("Skip the checks of the hosts (launcher.preflight)", "--no-preflight")
]
Force = Annotated[bool, _shared("Launch even if the plan says that it does not fit", "--force")]
Rehearse = Annotated[
    bool, _shared("Rehearse the job first; launch only if it succeeds", "--rehearse")
]
Quiet = Annotated[bool, _shared("Show nothing of the training but its end", "--quiet", "-q")]
DryRun = Annotated[bool, _shared("Show what would happen; write and start nothing", "--dry-run")]

# --- what is read ---------------------------------------------------------------------------------

Run = Annotated[str, argument("Name the run in runs/, or its directory", completion.runs)]
Runs = Annotated[
    list[str],
    argument("Name the runs in runs/, or their directories", completion.runs, metavar="RUN…"),
]
Model = Annotated[
    str,
    argument(
        "Name a run, its directory, or a Hugging Face folder", completion.runs, metavar="RUN|DIR"
    ),
]
Step = Annotated[int | None, _of_model("Take the checkpoint of this step", shown="the newest")]


DtypeName = Literal["fp32", "bf16", "fp16", "fp64"]
ComputeDtype = Annotated[
    DtypeName | None, _of_model("Compute in this dtype", shown="bf16 on a GPU, otherwise fp32")
]
Device = Annotated[
    str | None,
    _of_model(
        "Use cpu, cuda or cuda:N; the blocks are divided over cuda:0,cuda:1",
        shown="the first GPU, if there is one",
    ),
]
Tokenizer = Annotated[
    str | None, _of_model("Replace the model's own tokenizer", metavar="byte|PATH|NAME")
]

Yes = Annotated[bool, _shared("Skip the question, for scripts", "--yes")]

# --- the output -----------------------------------------------------------------------------------

AsJson = Annotated[bool, _shared("Print one JSON document and nothing else", "--json")]
Html = Annotated[Path | None, _shared("Write a page with charts", metavar="FILE")]
Overwrite = Annotated[bool, _shared("Replace the named file if it exists", "--overwrite")]

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
    hostfile: str | None = None, include: str | None = None, exclude: str | None = None,
    num_nodes: str | None = None, num_gpus: int | None = None, no_preflight: bool = False,
) -> dict[str, Setting]:  # fmt: skip
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


# --- the modes of a command -----------------------------------------------------------------------


def refuse_unused(*modes: tuple[bool, str, Mapping[str, object]]) -> None:
    """Refuse options of a mode that the command does not run in.

    Args:
        modes: True if the options are unused, the sentence that follows an option, and option → its value.

    Raises:
        UserError: with the first of these options that is given.
    """
    for is_unused, sentence, options in modes:
        for name, value in options.items():
            if is_unused and _is_given(value):
                raise UserError("usage", f"{name} {sentence}")


def refuse_several(options: Mapping[str, object]) -> None:
    """Refuse two options that exclude each other.

    Raises:
        UserError: both are given.
    """
    if all(map(_is_given, options.values())):
        raise UserError("usage", f"{' and '.join(options)} are both given; remove one of them")


def require_at_least(least: int, options: Mapping[str, int | None]) -> None:
    """Require that the options that are given have at least this value.

    Raises:
        UserError: with the first smaller one.
    """
    for name, value in options.items():
        if value is not None and value < least:
            raise UserError("usage", f"{name} {value}: must be at least {least}")


def _is_given(value: object) -> bool:
    return value is not None and value is not False and value != []

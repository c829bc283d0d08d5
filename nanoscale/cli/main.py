"""`nanoscale`: one verb a module, of which only the one asked for is imported."""

from __future__ import annotations

import errno
import gc
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Annotated

import typer

from nanoscale import __version__, display
from nanoscale.cli.output import (
    DONE,
    FAILED,
    INTERRUPTED,
    WRONG_REQUEST,
    exit_code,
    show_error,
)
from nanoscale.errors import UserError, Violation

VERBS = (
    "train",
    "resume",
    "submit",
    "plan",
    "doctor",
    "data",
    "generate",
    "eval",
    "bench",
    "runs",
    "checkpoints",
    "config",
    "recipes",
)
"""module nanoscale.cli.<verb> holds a Typer `app` of sub-commands, or a function of that name"""


_CONFIGURED = ("train", "resume", "submit", "plan", "doctor", "eval", "bench", "config")
"""verbs that take overrides"""
_DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a command line and exit with its code."""
    display.prepare_streams()
    gc.set_threshold(100_000)  # what is imported and composed is no garbage: look for it rarely
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    code = run(arguments)
    gc.freeze()  # nor is it worth a search when the process ends
    sys.exit(code)


def run(arguments: list[str]) -> int:
    """Run a command line; its exit code."""
    arguments = arguments or ["--help"]
    as_json = "--json" in arguments
    try:
        result = build(arguments)(args=arguments, prog_name="nanoscale", standalone_mode=False)
        sys.stdout.flush()
    except UserError as error:
        show_error(error, as_json=as_json)
        return exit_code(error)
    except typer.TyperException as error:
        if error.format_message().startswith("Usage:"):
            # A group without a sub-command hands us its help text as the error.
            display.note(error.format_message())
            return WRONG_REQUEST
        show_error(_usage_error(error, arguments), as_json=as_json)
        return WRONG_REQUEST
    except (KeyboardInterrupt, typer.Abort):
        return INTERRUPTED
    except display.ReaderLeftError:
        # Who read our output has seen enough; what is left in the buffer goes nowhere.
        display.give_up(sys.stdout)
        return DONE
    except OSError as error:
        if error.errno not in _DISK_ERRORS:
            _show_fault()
        else:
            display.note(f"error: the disk does not take what is written: {error}")
        return FAILED
    except Exception:
        _show_fault()
        return FAILED
    return result if isinstance(result, int) else DONE


def build(arguments: Sequence[str]) -> typer.Typer:
    """The application, with the verb that the arguments ask for, or with all of them."""
    app = typer.Typer(
        add_completion=False, no_args_is_help=False, rich_markup_mode=None, callback=_options
    )
    asked = [verb for verb in arguments[:1] if verb in VERBS]
    for verb in asked or VERBS:
        module = import_module(f"nanoscale.cli.{verb}")
        if hasattr(module, "app"):
            app.add_typer(module.app, name=verb)
        else:
            app.command(verb)(getattr(module, verb))
    return app


def _show_version(wanted: bool) -> None:
    if wanted:
        display.show(f"nanoscale {__version__}")
        raise typer.Exit(DONE)


def _options(
    version: Annotated[
        bool,
        typer.Option("--version", help="Show the version.", callback=_show_version, is_eager=True),
    ] = False,
) -> None:
    """Train a large language model from one YAML recipe, on any number of devices."""


def _usage_error(error: typer.TyperException, arguments: Sequence[str]) -> UserError:
    """A mistake in options or commands, in the form of every other mistake."""
    message = error.format_message().rstrip(".")
    option = getattr(error, "option_name", None)
    if not isinstance(option, str):
        return UserError("usage", message)
    possible = sorted(getattr(error, "possibilities", None) or ())
    dashed = option.replace("_", "-")  # as in --num_nodes
    suggestions = (dashed,) if dashed in possible else ()
    suggestions = suggestions or tuple(_as_overrides(option, arguments) or possible)
    if not suggestions:
        return UserError("usage", message)
    violation = Violation(option, None, "command line", "is no option of this command", suggestions)
    return UserError("usage", f"{option}: {violation.message}", [violation])


def _as_overrides(option: str, arguments: Sequence[str]) -> list[str]:
    """`--steps 3` is how other programs spell what is `train.steps=3` here."""
    from nanoscale.config.reference import declared, sections
    from nanoscale.config.suggest import nearest_key

    position = next((i for i, word in enumerate(arguments) if word.startswith(option)), None)
    if position is None or arguments[0] not in _CONFIGURED:
        return []
    _, equals, value = arguments[position].partition("=")
    if not equals:
        following = arguments[position + 1 : position + 2]
        value = following[0] if following and not following[0].startswith("-") else "VALUE"
    name = option.lstrip("-").replace("-", "_")
    if name == "recipe" or name in sections():
        return [f"{name}={value}"]
    keys = nearest_key(name, declared())
    return [f"{key}={value}" for key in keys]


def _show_fault() -> None:
    """Something that no user can mend: the exception and where it was raised."""
    import traceback

    display.note(traceback.format_exc(limit=-6), end="")
    display.note("error: this is a fault in nanoscale; please report it with these lines")

"""The command `nanoscale`: only the file of the requested verb is imported."""

import errno
import gc
import os
import re
import shlex
import sys
from collections.abc import Sequence
from importlib import import_module
from types import ModuleType
from typing import Annotated, Any, cast

import typer
from typer.core import TyperCommand

from nanoscale import __version__
from nanoscale.cli.common import completion
from nanoscale.cli.common.examples import epilog
from nanoscale.cli.common.output import (
    DONE,
    FAILED,
    INTERRUPTED,
    WRONG_REQUEST,
    exit_code,
    show_error,
)
from nanoscale.common import display
from nanoscale.common.errors import UserError, Violation, reason
from nanoscale.config.composing.library import Library
from nanoscale.config.values.equivalents import equivalent
from nanoscale.config.violations import nearest, override

VERBS = {
    "train": "jobs.train",
    "resume": "jobs.resume",
    "submit": "jobs.submit",
    "replay": "jobs.replay",
    "sweep": "jobs.sweep",
    "plan": "inspect.plan",
    "rehearse": "inspect.rehearse",
    "conform": "measure.conform",
    "doctor": "measure.doctor",
    "data": "jobs.data",
    "generate": "jobs.generate",
    "eval": "measure.eval",
    "bench": "measure.bench",
    "runs": "inspect.runs",
    "top": "inspect.top",
    "checkpoints": "inspect.checkpoints",
    "config": "inspect.config",
    "recipes": "inspect.recipes",
    "help": "inspect.help",
}
"""The file of each verb, which holds a Typer `app` of sub-commands, or a function of that name."""

_CONFIGURED = VERBS.keys() - {"data", "generate", "runs", "top", "checkpoints", "recipes", "help"}
"""Verbs that take overrides."""
_DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a command line and exit with its code."""
    display.prepare_streams()
    gc.set_threshold(100_000)  # imported and composed objects are not garbage: search rarely
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    code = run(arguments)
    gc.freeze()  # no search for garbage when the process ends
    sys.exit(code)


def run(arguments: list[str]) -> int:
    """Run a command line; return its exit code."""
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
            # A group without a sub-command gives its help text as the error.
            display.note(error.format_message())
            return WRONG_REQUEST
        show_error(_usage_error(error, arguments), as_json=as_json)
        return WRONG_REQUEST
    except (KeyboardInterrupt, typer.Abort):
        return INTERRUPTED
    except display.ReaderLeftError:
        # Our output's reader has closed it; the rest of the buffer is dropped.
        display.give_up(sys.stdout)
        return DONE
    except OSError as error:
        if error.errno in _DISK_ERRORS:
            display.note(f"error: writing to the disk failed: {error}")
            return FAILED
        if error.filename is not None:  # an unsuitable file of the user's
            file = UserError("usage", f"{error.filename}: {reason(error)}")
            show_error(file, as_json=as_json)
            return WRONG_REQUEST
        _show_fault()
        return FAILED
    except Exception:
        _show_fault()
        return FAILED
    return result if isinstance(result, int) else DONE


class _Command(TyperCommand):
    """A command whose help text shows options by group."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        groups: dict[str, list[tuple[str, str]]] = {"Arguments": [], "Options": []}
        for one in self.get_params(ctx):
            is_argument = one.param_type_name == "argument"
            group = "Arguments" if is_argument else getattr(one, "rich_help_panel", None)
            if (record := one.get_help_record(ctx)) is not None:
                groups.setdefault(group or "Options", []).append(record)
        groups["Options"] = groups.pop("Options")  # last
        for name, records in groups.items():
            if records:
                with formatter.section(name):
                    formatter.write_dl(records)


def build(arguments: Sequence[str]) -> typer.Typer:
    """Return the application, with the requested verb, or with all of them."""
    if completion.VARIABLE in os.environ:
        # Values of a line that is being typed are not converted, so Typer's converter need not be loaded.
        sys.modules.setdefault("pydantic", cast(ModuleType, None))
        arguments = completion.previous_words()
    asked = [verb for verb in arguments[:1] if verb in VERBS]
    completes = not asked or completion.VARIABLE in os.environ
    app = typer.Typer(
        add_completion=completes,
        no_args_is_help=False,
        rich_markup_mode=None,
        callback=_options,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    for verb in asked or VERBS:
        module = import_module(f"nanoscale.cli.{VERBS[verb]}")
        if hasattr(module, "app"):
            for command in module.app.registered_commands:
                command.epilog, command.cls = epilog(f"{verb} {command.name}"), _Command
            app.add_typer(module.app, name=verb)
        else:
            app.command(verb, epilog=epilog(verb), cls=_Command)(getattr(module, verb))
    return app


def _show_version(wanted: bool) -> None:
    if wanted:
        display.show(f"nanoscale {__version__}")
        raise typer.Exit(DONE)


def _options(
    version: Annotated[
        bool,
        typer.Option("--version", help="Show the version", callback=_show_version, is_eager=True),
    ] = False,
) -> None:
    """Train a large language model from one YAML recipe, on any number of devices."""


_EXCESS = re.compile(r"Value error, |, unable to parse.*|\.?( \(Possible options: .*\))?$")
"""Parts of Typer's messages to leave out. Typer passes on pydantic's sentences."""
_UNKNOWN = "unknown option of this command"
_SAME_OPTION = {"-c": "--config", "--config-path": "--config-dir"}
"""Options of other programs, and the options here that take the same value."""
_NOT_A_CHOICE = re.compile(r"Invalid value for '(\S+)': '(.*?)' is not one of (.+)")


def _usage_error(error: typer.TyperException, arguments: Sequence[str]) -> UserError:
    """Return a mistake in options or commands, in the form of all other mistakes."""
    message = _EXCESS.sub("", error.format_message()).replace("Input should be", "must be")
    option, advice, wrong = getattr(error, "option_name", None), tuple[str, ...](), None
    context, what = getattr(error, "ctx", None), ""
    help_text = f"{context.command_path if context else 'nanoscale'} --help"
    if choice := _NOT_A_CHOICE.fullmatch(message):
        option, wrong, choices = choice[1], choice[2], re.findall(r"'([^']+)'", choice[3])
        what = f"is not one of {', '.join(choices)}"
        advice = tuple(f"{option} {it}" for it in nearest(wrong, choices) or choices)
    elif isinstance(option, str) and hasattr(error, "possibilities"):  # else it lacks its value
        names = _unknown_options(option, arguments, context)
        first, *_ = unknown = [_unknown_option(name, arguments, context) for name in names]
        if len(unknown) > 1:
            return UserError("usage", f"{len(unknown)} things are wrong", unknown)
        if first.suggestions or first.message != _UNKNOWN:
            return UserError("usage", f"{first.key}: {first.message}", unknown)
        what, advice = _UNKNOWN, (help_text,)
    if command := re.match(r"No such command '(.*?)'", message):
        option, what = command[1], "unknown command"
        advice = _commands_like(option, context)
    elif excess := re.match(r"Got unexpected extra \S+ \((.*)\)", message):
        option, what = excess[1], "unexpected argument of this command"
        advice = (f"--prompt {shlex.quote(option)}" if arguments[0] == "generate" else help_text,)
    if not advice:
        return UserError("usage", message)
    shown = f"{option} {wrong}" if choice else option
    violation = Violation(str(option), wrong, "command line", what, advice)
    return UserError("usage", f"{shown}: {what}", [violation])


_MOVED = {
    "version": ["nanoscale --version"],
    "init": ["nanoscale recipes ls", "nanoscale recipes copy tiny"],  # a verb until 2026-11-28
}


def _commands_like(word: str, context: Any) -> tuple[str, ...]:
    """Return commands that an unknown one may have meant; an override or the name of a recipe is trained."""
    path, names = context.command_path, list(context.command.commands)
    near = [f"{path} {name}" for name in nearest(word, names)]
    if path == "nanoscale":
        recipes = nearest(word, Library().options("recipe"), 1)
        near += [f"nanoscale train {override('recipe', name)}" for name in recipes]
        near = [f"nanoscale train {shlex.quote(word)}"] if "=" in word else near
        near = _MOVED.get(word, near)
    return tuple(near) or (f"{path} --help",)


def _unknown_options(
    first: str, arguments: Sequence[str], context: typer.Context | None
) -> list[str]:
    """Return the name of the first unknown option as it was typed, and the names of all further ones."""
    named = [word.partition("=")[0] for word in arguments if word.startswith("-")]
    first = next((name for name in named if name.startswith(first)), first)
    known = {"--help", "--"}.union(*(it.opts + it.secondary_opts for it in _parameters(context)))
    others = (name for name in named if name.startswith("--") and name not in known)
    return list(dict.fromkeys([first, *others]))


def _parameters(context: typer.Context | None) -> Sequence[Any]:
    return context.command.params if context is not None else ()


def _unknown_option(
    option: str, arguments: Sequence[str], context: typer.Context | None
) -> Violation:
    value, dashed = _value_of(option, arguments), option.replace("_", "-")  # as in --num_nodes
    if value is not None and dashed in ("--deepspeed", "--deepspeed-config"):
        advice = f"nanoscale config from {shlex.quote(value)}"
        what = f"{_UNKNOWN}; a recipe is made of DeepSpeed's JSON"
        return Violation(option, value, "command line", what, (advice,))
    first, _, rest = dashed.rpartition("-")
    known = [name for one in _parameters(context) for name in one.opts]
    near = [
        name  # of --num-gpus, the last word must be near, too
        for name in nearest(dashed, [*known, "--help"])
        if len(rest) < 4
        or not name.startswith(f"{first}-")
        or nearest(rest, [name.removeprefix(f"{first}-")])
    ]
    same = _SAME_OPTION.get(dashed, dashed)
    near = [same] if same in known else near
    options = [_with_value(name, value, context) for name in near]
    more, note = ((), "") if same in near else _as_overrides(option, value, arguments)
    what = _UNKNOWN + (f"; it {note}" if note else "")
    options = [] if note and more else options
    return Violation(option, None, "command line", what, (*options, *more))


def _value_of(option: str, arguments: Sequence[str]) -> str | None:
    """Return the value that follows an option, as in `--steps 3` and `--steps=3`; None for a flag."""
    position = next((i for i, word in enumerate(arguments) if word.startswith(option)), None)
    if position is None:
        return None
    _, equals, value = arguments[position].partition("=")
    if equals:
        return value
    following = arguments[position + 1 : position + 2]
    return following[0] if following and not re.match(r"-|[\w.]+=", following[0]) else None


def _with_value(option: str, value: str | None, context: typer.Context | None) -> str:
    """Return an option with the value of a mistyped one, if it takes one."""
    flags = {
        name for it in _parameters(context) if getattr(it, "is_flag", False) for name in it.opts
    }
    takes_none = option in {*flags, "-h", "--help"}
    return option if value is None or takes_none else f"{option} {shlex.quote(value)}"


def _as_overrides(
    option: str, value: str | None, arguments: Sequence[str]
) -> tuple[tuple[str, ...], str]:
    """Return the overrides for `--steps 3`, another program's form of a key, and the difference."""
    from nanoscale.config.composing.overrides import read_words, with_good_advice

    name = option.lstrip("-").replace("-", "_")
    meant = equivalent(name)
    if arguments[0] not in _CONFIGURED:
        about = (
            "" if meant is None or not meant.about else f"is a key of trainings: {meant.about[0]}"
        )
        return (), about or (meant.note if meant is not None else "")
    word, library = f"{name}={'true' if value is None else value}", Library()
    asked = read_words([word], library)
    if not asked.violations:
        return (word,), ""
    advice = with_good_advice(asked.violations[0], asked, library).suggestions
    return advice, meant.note if meant is not None else ""


def _show_fault() -> None:
    """Report an internal error: the exception and its origin."""
    import traceback

    display.note(traceback.format_exc(limit=-6), end="")
    display.note("error: internal error of nanoscale; please report it with these lines")

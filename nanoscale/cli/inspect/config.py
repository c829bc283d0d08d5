"""`nanoscale config`: what a job would be configured with, and where each value comes from."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from nanoscale.cli.common import completion
from nanoscale.cli.common import options as opt
from nanoscale.cli.common.output import answer, print_json, print_yaml, refuse_name
from nanoscale.cli.common.request import CommandLine, requesting
from nanoscale.common import display
from nanoscale.common.errors import UserError, Violation
from nanoscale.config.composing.library import Library
from nanoscale.config.reference import AUTO, declared, meaning, sections, with_values
from nanoscale.config.values.equivalents import equivalent
from nanoscale.config.violations import nearest, nearest_key, refuse
from nanoscale.view import config_text

if TYPE_CHECKING:
    from nanoscale.config.schema import Config
    from nanoscale.config.translation.conversion import Translation
    from nanoscale.config.values.provenance import Composed
    from nanoscale.launch.request import Request

_ForeignFile = Annotated[Path, opt.argument("Read this file")]
_OUT = opt.option("Write a recipe, which must not exist yet", metavar="RECIPE")
_DP = opt.option("Use this data-parallel degree", metavar="N", min=1)
app = typer.Typer(no_args_is_help=True, help="Show and explain the configuration.")


@app.command("show")
@requesting("config_dir", "config")
def show(
    line: CommandLine,
    deepspeed: bool = opt.flag("Show the JSON for DeepSpeed instead", "--deepspeed"),
    as_json: opt.AsJson = False,
) -> None:
    """Show the whole configuration as YAML."""
    from nanoscale.config.values.yaml_file import to_yaml

    composed = _composed(line)
    shown, resolved = _chosen(composed)
    values = _for_deepspeed(composed) if deepspeed else asdict(shown.config)
    chart = config_text.schedule_chart(resolved) if resolved is not None else ""
    answer(as_json or deepspeed, values, print_yaml, to_yaml(values) + chart)
    if deepspeed and composed.config.backend.extra:
        added = ", ".join(composed.config.backend.extra)
        display.note(f"backend.extra ({composed.source('backend.extra')}) sets {added}")


@app.command("explain")
@requesting("config_dir", "config")
def explain(
    key: Annotated[
        str, opt.argument("Name a key, or a section to explain all of its keys", completion.keys)
    ],
    line: CommandLine,
    as_json: opt.AsJson = False,
) -> None:
    """Explain a key: its meaning, its value, and what set it."""
    names = _named(key)
    shown, here = _chosen(_composed(line))
    found = [config_text.explained(name, shown, here) for name in names if name in shown.history]
    if as_json:
        print_json(found[0] if names == [key] else found)
        return
    for index, document in enumerate(found):
        config_text.print_explained(document, first=index == 0)


@app.command("from")
def from_file(
    file: _ForeignFile, out: Path | None = _OUT, dp: int | None = _DP, as_json: opt.AsJson = False
) -> None:
    """Make a recipe of another trainer's configuration, and show what became of each setting.

    Reads the files of axolotl, torchtitan, accelerate, LLaMA-Factory, Megatron, DeepSpeed and transformers, and
    shell scripts with their options. Nothing of a file is run.
    """
    from nanoscale.config.translation.from_file import convert_file, verdict

    kind, translation = convert_file(file, dp)
    translation.became.insert("(model)" in dict(translation.became), (str(file), kind.title))
    lines = verdict(translation, file, out)
    _show_translation(file, translation, out, lines, as_json=as_json)


@app.command("from-deepspeed")
def from_deepspeed(
    file: _ForeignFile, out: Path | None = _OUT, dp: int | None = _DP, as_json: opt.AsJson = False
) -> None:
    """Translate a DeepSpeed JSON into a recipe, and show what became of each setting."""
    from nanoscale.config.translation.from_file import translate
    from nanoscale.config.values.other_trainers import read_json

    _show_translation(file, translate(read_json(file), dp), out, as_json=as_json)


def _show_translation(
    file: Path,
    translation: Translation,
    out: Path | None,
    verdict: list[str] | None = None,
    *,
    as_json: bool,
) -> None:
    """Write or print the recipe, and show what became of each setting, and whether `train` accepts it."""
    from nanoscale.config.values.convert import convert
    from nanoscale.config.values.yaml_file import to_yaml

    _, violations = convert(translation.recipe, lambda _: str(file))
    if violations:
        refuse(violations)
    text = f"# {file.name}, translated for nanoscale.\n{to_yaml(translation.recipe)}"
    if out is not None:
        try:
            with out.open("x", encoding="utf-8") as recipe_file:
                recipe_file.write(text)
        except OSError as error:
            raise UserError("usage", f"--out {out}: {error.strerror}") from error
    if as_json:
        became = [{"setting": path, "became": text} for path, text in translation.became]
        said = {} if verdict is None else {"verdict": verdict}
        print_json({"values": translation.values, "became": became} | said)
        return
    if out is None:
        print_yaml(text)
    for path, what in translation.became:
        display.note(f"{path}  →  {what}")
    for line in verdict or ():
        display.note(line)


@app.command("backends")
def backends(as_json: opt.AsJson = False) -> None:
    """Show what each backend does with every key that concerns it."""
    from nanoscale.config.rules.backends import OUTSIDE, table

    rows = table()
    document = [{"key": key, "native": a, "deepspeed": b} for key, a, b in rows]
    answer(as_json, document, config_text.print_backends, rows, OUTSIDE)


@app.command("ls")
def list_groups(
    group: Annotated[
        str | None,
        opt.argument("Name a group; without it, all groups are listed", completion.groups),
    ] = None,
    config_dir: opt.ConfigDir = None,
    as_json: opt.AsJson = False,
) -> None:
    """List the groups, or one group's options and keys."""
    library = Library(config_dir)
    if group is None:
        groups = {
            name: {
                "meaning": "Complete jobs." if name == "recipe" else meaning(name),
                "options": list(library.options(name)),
            }
            for name in library.groups()
        }
        names = [(name, ", ".join(about["options"])) for name, about in groups.items()]
        answer(as_json, groups, config_text.print_rows, names)
        return
    tops = [section for section in sections() if section and "." not in section]
    known = list(dict.fromkeys([*library.groups(), *tops]))
    if group not in known:
        near = (f"nanoscale config ls {each}" for each in nearest(group, known))
        refuse_name(group, f"unknown group; the groups are {', '.join(library.groups())}", *near)
    options = library.options(group)
    keys = [key for name, key in declared().items() if name.startswith(f"{group}.")]
    fields = ("type", "unit", "meaning")
    rows = [{"key": key.name} | {name: getattr(key, name) for name in fields} for key in keys]
    document = {"options": config_text.options_document(options), "keys": rows}
    meanings = [
        *config_text.option_rows(options, f"{group}="),
        *((key.name, key.meaning) for key in keys),
    ]
    answer(as_json, document, config_text.print_rows, meanings)


def _for_deepspeed(composed: Composed) -> dict[str, Any]:
    """Return DeepSpeed's settings, with open keys resolved for this machine.

    Raises:
        UserError: the configuration breaks a rule, or is for another backend.
    """
    from nanoscale.config.deepspeed import deepspeed_settings
    from nanoscale.launch.request import check_request

    name = composed.config.backend.name
    if name != "deepspeed":
        source = composed.source("backend.name")
        message = "is not configured by DeepSpeed's JSON"
        refuse([Violation("backend.name", name, source, message, ("backend=deepspeed",))])
    return deepspeed_settings(check_request(composed).config)


def _named(name: str) -> list[str]:
    """Return the keys of a key or a section."""
    if name not in declared() and (name not in sections() or not name):
        top = [section for section in sections() if section and "." not in section]
        meant = equivalent(name)
        near = tuple(dict.fromkeys([*nearest(name, top), *nearest_key(name, declared())]))
        near = meant.about if meant is not None else near
        others = "" if near else f"; the sections are {', '.join(top)}"
        proposals = (f"nanoscale config explain {key}" for key in near)
        refuse_name(name, f"unknown key or section{others}", *proposals)
    return [key for key in declared() if key == name or key.startswith(f"{name}.")]


def _composed(line: CommandLine) -> Composed:
    """Return the configuration; as it is written, without tokens, if texts are not why the job cannot start."""
    from nanoscale.cli.common.text_preparation import EARLY

    try:
        return line.compose(_checked)
    except UserError as error:
        if not any(it.key.startswith(EARLY) for it in error.violations):
            raise
        written = line.compose_settings()
        display.note(f"data.path is shown as it is written, since the job cannot start: {error}")
        return written


def _checked(composed: Composed) -> Request:
    from nanoscale.launch.request import check_request
    from nanoscale.plan.hardware.planned_devices import planned_devices

    return check_request(composed, devices=planned_devices(composed))


def _chosen(composed: Composed) -> tuple[Composed, Config | None]:
    """Return the request with the layout that the plan chooses, and the configuration for the plan's devices.

    Keys that are not chosen are `auto`. There is no configuration if the request cannot run.
    """
    from nanoscale.plan.search.choice import SOURCE
    from nanoscale.view.plan.choice_text import choice_line

    here = None
    try:
        request = _checked(composed)
        composed, here = request.composed, request.config
        if request.choice is not None:
            display.note(f"layout chosen by the plan: {choice_line(request.choice)}")
    except UserError:
        pass
    left = (key for key in composed.left_to_plan if composed.source(key) != SOURCE)
    shown = with_values(composed.config, dict.fromkeys(left, AUTO))
    return replace(composed, config=shown), here

"""`nanoscale init`: a first recipe of one's own, and the commands to type next."""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from nanoscale.cli.common import options as opt
from nanoscale.cli.common.output import answer, free_file, refuse_option
from nanoscale.common import display
from nanoscale.common.errors import UserError
from nanoscale.config.composing.first_recipe import TASKS, FirstRecipe, Task, about

_STDLIB = "stdlib"
_LONGEST = 2048
_NAME = re.compile(r"\w[\w.-]*")


def init(
    folder: Annotated[
        Path, typer.Argument(metavar="DIR", help="Write the recipe to this folder")
    ] = Path(),
    task: Task | None = opt.option("Choose what to do", shown="pretrain"),
    model: str | None = opt.option(
        "Name a model of `config ls model`, or the folder of one to fine-tune",
        metavar="NAME|DIR",
        shown="tiny",
    ),
    data: str | None = opt.option(
        "Read texts, conversations or tokens here", metavar="PATH", shown="Python's source code"
    ),
    teacher: str | None = opt.option("Name the larger model of distill", metavar="NAME|DIR"),
    name: str | None = opt.option("Name the recipe", shown="the task"),
    as_json: opt.AsJson = False,
) -> None:
    """Write a first recipe, and show the commands to type next.

    On a terminal, the command asks for what the options leave open.
    """
    task = _asked_task() if task is None else task
    tunes = task != "pretrain"
    if model is None:
        model = _asked("model", None if tunes else "tiny", _pretrained if tunes else _own_shape)
    if data is None:
        data = _asked("data", None if tunes else _STDLIB, lambda it: _tokens_of(task, it))
    opt.refuse_unused((task != "distill", "is for --task distill", {"--teacher": teacher}))
    if task == "distill":
        teacher = _asked("teacher", None, _pretrained) if teacher is None else _pretrained(teacher)
    name = _asked("name", task) if name is None else name
    if not _NAME.fullmatch(name):
        message = "must begin with a letter or digit, and have only these, -, _ and ."
        refuse_option("--name", name, message)
    recipe = replace(_checked(task, model, data), teacher=teacher)
    target = folder / f"{name}.yaml"
    if target.exists():
        unused = f"--name {shlex.quote(free_file(target).stem)}"
        refuse_option("--name", name, f"{target} already exists", unused)
    commands = recipe.commands(target)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with target.open("x", encoding="utf-8") as stream:
            stream.write(recipe.text(target))
    except OSError as error:
        refuse_option("DIR", str(folder), f"{target} cannot be written: {error.strerror}")
    lines = "\n".join([str(target), *(f"  {line}" for line in commands)])
    answer(as_json, {"recipe": str(target), "commands": commands}, display.show, lines)


def _asked_task() -> Task:
    """Return the task that a person at a terminal chooses; elsewhere `pretrain`."""
    if not sys.stdin.isatty():
        return "pretrain"
    for task in TASKS:
        display.note(f"  {task:<9} {about(task)}")
    while (answer := _asked("task", "pretrain")) not in TASKS:
        display.note(f"type one of {', '.join(TASKS)}")
    return next(task for task in TASKS if task == answer)


def _asked(
    option: str, default: str | None, check: Callable[[str], object] = lambda _: None
) -> str:
    """Return the answer of a person at a terminal, who is asked until `check` refuses no more; elsewhere the
    default.

    Raises:
        UserError: there is no default, and nobody to ask.
    """
    while sys.stdin.isatty():
        answer = str(typer.prompt(option, default=default, err=True))
        try:
            check(answer)
        except UserError as error:
            display.note(error.message)
        else:
            return answer
    if default is None:
        refuse_option(f"--{option}", None, "is needed by this task", f"--{option} PATH")
    return default


def _checked(task: Task, model: str, data: str) -> FirstRecipe:
    found = _tokens_of(task, data)
    if task != "pretrain":
        return FirstRecipe(task, _pretrained(model), 0, 0, *found)
    shape = _own_shape(model)
    return FirstRecipe(task, model, shape["vocab"], min(_LONGEST, shape["max_seq_len"]), *found)


def _tokens_of(task: Task, data: str) -> tuple[Path | None, bool]:
    """Return the path of the data, and True if a training reads it as it is. Raises UserError if it does not
    exist."""
    from nanoscale.config.token_files import folder_of

    if task == "pretrain" and data == _STDLIB:
        return None, True
    path = Path(data).expanduser().absolute()
    prepared = folder_of(path) is not None or Path(f"{path}.idx").is_file()
    prepared |= task != "pretrain" and path.is_file()
    if not prepared and not path.exists():
        refuse_option("--data", data, "does not exist")
    return path, prepared


def _own_shape(model: str) -> dict[str, Any]:
    from nanoscale.config.composing.library import Library
    from nanoscale.config.reference import defaults, merged
    from nanoscale.config.schema import Model
    from nanoscale.config.values.yaml_file import read
    from nanoscale.config.violations import nearest

    known = {name: it for name, it in Library().options("model").items() if name != "hf"}
    if model not in known:
        near = tuple(f"--model {each}" for each in nearest(model, known))
        refuse_option("--model", model, "unknown model; there are " + ", ".join(known), *near)
    return merged(defaults(Model), read(known[model].path).content)


def _pretrained(model: str) -> str:
    """Return a model to fine-tune by its folder or its name at Hugging Face."""
    from nanoscale.config.hf.families import UnsupportedError
    from nanoscale.config.hf.hub import missing_path
    from nanoscale.config.hf.pretrained import absolute_name, is_folder
    from nanoscale.config.hf.shape import read_config

    if is_folder(model):
        try:
            read_config(Path(model).expanduser())
        except UnsupportedError as error:
            refuse_option("--model", model, str(error))
    elif (why := missing_path(model)) is not None:
        refuse_option("--model", model, why)
    return absolute_name(model)

"""`nanoscale recipes`: complete jobs, packaged and of the user."""

import shlex
import shutil
from contextlib import suppress
from pathlib import Path
from typing import Annotated

import typer

from nanoscale.cli.common import completion
from nanoscale.cli.common import options as opt
from nanoscale.cli.common.output import answer, print_yaml, refuse_name
from nanoscale.common import display
from nanoscale.config.composing.library import RECIPE, Library, Option
from nanoscale.config.violations import nearest, override
from nanoscale.view.config_text import option_rows, options_document, print_rows

app = typer.Typer(no_args_is_help=True, help="List, show and copy recipes.")

Name = Annotated[
    str, opt.argument("Name a recipe that `recipes ls` lists", completion.recipes, metavar="NAME")
]


@app.command("ls")
def list_recipes(config_dir: opt.ConfigDir = None, as_json: opt.AsJson = False) -> None:
    """List the recipes; one of yours hides a packaged one of the same name."""
    options = Library(config_dir).options(RECIPE)
    answer(as_json, options_document(options), print_rows, option_rows(options))


@app.command("show")
def show(name: Name, config_dir: opt.ConfigDir = None, as_json: opt.AsJson = False) -> None:
    """Print a recipe's file; `config show recipe=NAME` shows the whole configuration."""
    from nanoscale.config.values.yaml_file import read

    option = _find(name, config_dir)
    document = {"name": name, "path": str(option.path), "content": read(option.path).content}
    answer(as_json, document, print_yaml, option.path.read_text("utf-8"))


@app.command("copy")
def copy(
    name: Name,
    destination: Annotated[
        Path | None, opt.argument("Copy to this file or folder; the default is recipes/")
    ] = None,
    config_dir: opt.ConfigDir = None,
) -> None:
    """Copy a recipe, as the start of your own."""
    option = _find(name, config_dir)
    target = destination or Path("recipes")
    if target.suffix != ".yaml":
        target = target / f"{Path(name).name}.yaml"
    try:
        with suppress(FileExistsError):  # a file has its name, which opening the copy reports
            target.parent.mkdir(parents=True, exist_ok=True)
        with option.path.open("rb") as source, target.open("xb") as copied:
            shutil.copyfileobj(source, copied)
    except FileExistsError:
        _refuse_copy(target, "already exists and is not overwritten", name)
    except OSError as error:
        _refuse_copy(target, f"cannot be written: {error.strerror}", name)
    recipe = str(target) if target.is_absolute() else f"./{target}"
    display.show(f"{target}\n  nanoscale train {override('recipe', recipe)}")


def _find(name: str, config_dir: Path | None) -> Option:
    options = Library(config_dir).options(RECIPE)
    if name not in options:
        near = nearest(name, options)
        others = "" if near else f"; there are {', '.join(options)}"
        refuse_name(name, f"unknown recipe{others}", *near)
    return options[name]


def _refuse_copy(target: Path, message: str, name: str) -> None:
    copy = ["nanoscale", "recipes", "copy", name, f"recipes/my-{Path(name).name}.yaml"]
    refuse_name(str(target), message, shlex.join(copy))

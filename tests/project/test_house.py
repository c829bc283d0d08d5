"""The rooms of the code: imports go only to rooms further down, and no file or folder imports in a circle."""

import ast
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

from dev import size

ROOT = Path(__file__).parents[2]

# Each room imports only rooms after it; docs/architecture.md shows the same house.
ROOMS = (
    *("__main__", "cli", "view", "sweep", "launch", "plan"),
    *("agent", "worker", "rehearse", "measure", "train", "backends", "generate", "checkpoint"),
    *("parallel", "models", "data", "metrics"),
    *("runs", "config", "processes", "common"),
)


def name_of(file):
    return ".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def imported(file, modules):
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                yield inner if inner in modules else node.module
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


@pytest.fixture(scope="module")
def imports():
    files = {name_of(file): file for file in (ROOT / "nanoscale").rglob("*.py")}
    return {name: {*imported(file, files)} & {*files} - {name} for name, file in files.items()}


def folder_of(module):
    """Return the folder of a module's file, as a package name."""
    is_package = (ROOT / module.replace(".", "/")).is_dir()
    return module if is_package else module.rpartition(".")[0]


def test_no_file_imports_in_a_circle(imports):
    TopologicalSorter(imports).prepare()


def test_no_folder_imports_in_a_circle(imports):
    folders: dict[str, set[str]] = {}
    for name, targets in imports.items():
        here = folder_of(name)
        folders.setdefault(here, set()).update({*map(folder_of, targets)} - {here})
    del folders["nanoscale"]
    for targets in folders.values():
        targets.discard("nanoscale")
    TopologicalSorter(folders).prepare()


def test_arrows_point_downwards(imports):
    def room(module):
        return module.split(".")[1] if "." in module else None

    upwards = {
        (name, target)
        for name, targets in imports.items()
        for target in targets
        if room(name) and room(target) and room(name) != room(target)
        if ROOMS.index(room(target)) < ROOMS.index(room(name))
    }
    assert sorted(upwards) == []
    assert {room(name) for name in imports} - {None} == {*ROOMS}


LIMIT = size.Size(lines=78_000, tokens=528_000)
"""The most code of nanoscale/, as `make size` counts it. Growth is a decision: a commit that needs more raises
the limit and says why."""


def test_the_house_stays_within_its_limit():
    present = size.sizes(size.working_tree())["nanoscale"]
    assert present.lines <= LIMIT.lines, "`make size` shows where lines were added"
    assert present.tokens <= LIMIT.tokens, "`make size` shows where tokens were added"

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


def room_of(module):
    return module.split(".")[1] if "." in module else None


@pytest.fixture(scope="module")
def rooms(imports):
    """Return the other rooms that each room imports."""
    targets: dict[str, set[str]] = {room: set() for room in {*map(room_of, imports)} - {None}}
    for name in imports:
        if room_of(name):
            targets[room_of(name)].update({*map(room_of, imports[name])} - {None, room_of(name)})
    return targets


def test_arrows_point_downwards(imports, rooms):
    upwards = {
        (name, target)
        for name, targets in imports.items()
        for target in targets
        if room_of(name) and room_of(target) and room_of(name) != room_of(target)
        if ROOMS.index(room_of(target)) < ROOMS.index(room_of(name))
    }
    assert sorted(upwards) == []
    assert {*rooms} == {*ROOMS}


def test_no_more_than_thirteen_floors(rooms):
    """The longest chain of rooms, each of which imports the next. With `rehearse` below `plan` it had 16."""
    chains: dict[str, tuple[str, ...]] = {}
    for room in TopologicalSorter(rooms).static_order():
        chains[room] = (room, *max((chains[below] for below in rooms[room]), key=len, default=()))
    longest = max(chains.values(), key=len)
    assert len(longest) <= 13, " → ".join(longest)


LIMIT = size.Size(lines=78_300, tokens=544_400)
"""The most code of nanoscale/, as `make size` counts it. Growth is a decision: a commit that needs more raises
the limit and says why."""


def test_the_house_stays_within_its_limit():
    present = size.sizes(size.working_tree())["nanoscale"]
    assert present.lines <= LIMIT.lines, "`make size` shows where lines were added"
    assert present.tokens <= LIMIT.tokens, "`make size` shows where tokens were added"

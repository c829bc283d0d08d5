"""The rooms of the code: imports go only to rooms further down, and no file or folder imports in a circle."""

import ast
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

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


def test_no_room_is_too_large(imports):
    """A folder with more files than this needs rooms of its own."""
    sizes: dict[str, list[str]] = {}
    for name in imports:
        if name != folder_of(name):
            sizes.setdefault(folder_of(name), []).append(name)
    assert {folder for folder, files in sizes.items() if len(files) > 16} == set()


BUDGET = {
    "agent": 1179,
    "backends": 2916,
    "checkpoint": 3254,
    "cli": 5443,
    "common": 770,
    "config": 11269,
    "data": 5085,
    "generate": 1212,
    "launch": 6426,
    "measure": 603,
    "metrics": 1203,
    "models": 2275,
    "parallel": 2219,
    "plan": 7057,
    "processes": 1068,
    "rehearse": 3250,
    "runs": 2849,
    "sweep": 1035,
    "train": 2161,
    "view": 5032,
    "": 187,
}
"""The most lines of each folder ("" is the package itself); growth is a decision, and the goal is 51,000."""


def test_no_folder_outgrows_its_budget():
    lines: dict[str, int] = dict.fromkeys(BUDGET, 0)
    for file in (ROOT / "nanoscale").rglob("*.py"):
        inner = file.relative_to(ROOT / "nanoscale").parts
        lines[inner[0] if len(inner) > 1 else ""] += len(file.read_text("utf-8").splitlines())
    over = {name: count for name, count in lines.items() if count > BUDGET[name]}
    assert over == {}, "delete what is not needed, or decide that this folder may grow"

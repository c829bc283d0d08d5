"""The names of the code: one word means one thing in the whole project."""

import ast
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).parents[2] / "nanoscale"

SAME_THING = {
    "__init__",
    "__main__",
    "attempt",
    "bench",
    "collectives",
    "data",
    "devices",
    "layout",
    "main",
    "moe",
    "native",
    "pipeline",
    "request",
    "sweep",
    "trust",
}
"""Names of files in several rooms, each room's view of the same thing."""


def test_no_two_public_classes_share_a_name() -> None:
    files = defaultdict(list)
    for file in sorted(ROOT.rglob("*.py")):
        for node in ast.parse(file.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                files[node.name].append(str(file.relative_to(ROOT)))
    assert {name: paths for name, paths in files.items() if len(paths) > 1} == {}


def test_no_two_files_share_a_name_unless_they_are_about_the_same_thing() -> None:
    files = defaultdict(list)
    for file in sorted(ROOT.rglob("*.py")):
        files[file.stem].append(str(file.relative_to(ROOT)))
    shared = {name: paths for name, paths in files.items() if len(paths) > 1}
    assert {name: paths for name, paths in shared.items() if name not in SAME_THING} == {}
    assert set(shared) >= SAME_THING, "a name that no two files have any more"

"""Run directories of tests."""

from __future__ import annotations

from pathlib import Path

from nanoscale.runs.directory import RunDirectory


def create_run(root: Path, name: str) -> RunDirectory:
    """Create the folder of a new run, which holds nothing yet."""
    with RunDirectory.build(root, name):
        pass
    return RunDirectory(root.absolute() / name)

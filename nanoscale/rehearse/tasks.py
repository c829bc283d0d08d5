"""The task of the process that plays ranks, and its files. Torch-free."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

from nanoscale.runs.directory import read_json, write_json


@dataclass(frozen=True)
class Task:
    """The ranks to play, and the means."""

    ranks: list[int]
    steps: int
    gpu: dict[str, Any] | None
    """The fields of `rehearse.played.cuda.Gpu`; None for a job on CPUs."""
    processes: int
    """The most ranks that are played at once."""
    memory: int
    """The most bytes of memory that one of them may use."""
    snapshots: bool = False
    """True to write the history of each GPU's memory."""

    def write(self, folder: Path) -> None:
        write_json(folder / "task.json", asdict(self))

    @classmethod
    def read(cls, folder: Path) -> Self:
        return cls(**read_json(folder / "task.json"))


def record_file(folder: Path, rank: int) -> Path:
    """Return the file of a rank's record."""
    return folder / f"rank-{rank}.json"


def snapshot_file(folder: Path, rank: int) -> Path:
    """Return the file with the history of a rank's GPU, which pytorch.org/memory_viz shows."""
    return folder / f"rank-{rank}.pickle"

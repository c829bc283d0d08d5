"""The task of the process that plays ranks, and its files. Torch-free."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

from nanoscale.common.errors import Violation
from nanoscale.config.hardware.data_sheets import described
from nanoscale.config.resolved import ResolvedConfig
from nanoscale.runs.directory import read_json, write_json


def why_unplayable(config: ResolvedConfig) -> Violation | None:
    """Return why a job cannot be rehearsed; None if it can."""
    if config.model.source == "hf" and config.launcher.device != "cpu":
        return Violation("model", "hf", "", "transformers' models are not rehearsed on GPUs")
    if config.backend.name == "deepspeed":
        what = (
            "DeepSpeed's own extensions need the devices, so only the native backend is rehearsed"
        )
        return Violation("backend", "deepspeed", "", what, ("backend=native",))
    return None


def device_of(config: ResolvedConfig) -> tuple[dict[str, Any] | None, int]:
    """Return the description of the job's GPUs, and the bytes of each that are not PyTorch's; None for CPUs."""
    if config.launcher.device == "cpu":
        return None, 0
    cluster = described(config)
    assert cluster.memory_gib is not None and cluster.devices_per_host is not None
    name = cluster.recognised[0] if cluster.recognised else cluster.device
    gpu = {
        "name": f"NVIDIA {name}",
        "memory": int(cluster.memory_gib * 2**30),
        "devices": cluster.devices_per_host,
        "capability": divmod(round(10 * (cluster.compute_capability or 9.0)), 10),
    }
    return gpu, int((cluster.context_gib or 0.0) * 2**30)


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

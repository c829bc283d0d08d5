"""Where the metrics of a run go: metrics.jsonl always, TensorBoard if it is wanted."""

from __future__ import annotations

import importlib.util
import json
import math
import os
from pathlib import Path
from typing import Any, Protocol

from nanoscale.config.schema import Logger
from nanoscale.errors import UserError
from nanoscale.runs import fence
from nanoscale.runs.directory import RunDirectory, write_atomically
from nanoscale.versions import install_command

Record = dict[str, Any]


class Sink(Protocol):
    """Takes one record a logged step."""

    def write(self, record: Record) -> None:
        """Raise a FencedError where the run has gone on without this attempt."""

    def flush(self) -> None:
        """Return when everything written so far would survive a crash of the machine."""

    def close(self) -> None: ...


def open_sinks(run: RunDirectory, workspace: Path, logger: Logger, step: int) -> list[Sink]:
    """The sinks of a run that goes on after `step`; what they hold of later steps is dropped.

    Args:
        workspace: of the run's attempt.

    Raises:
        FencedError: the run has gone on without this attempt.
    """
    sinks: list[Sink] = [JsonLines(run, workspace, step)]
    if wants_tensorboard(logger):
        sinks.append(TensorBoard(run, step))
    return sinks


def wants_tensorboard(logger: Logger) -> bool:
    """Whether to write TensorBoard's files.

    Raises:
        UserError: they are asked for and TensorBoard is not installed.
    """
    installed = importlib.util.find_spec("tensorboard") is not None
    if logger.tensorboard == "on" and not installed:
        raise UserError(
            "config",
            f"logger.tensorboard=on needs TensorBoard: {install_command('tensorboard')}",
        )
    return logger.tensorboard == "on" or (logger.tensorboard == "auto" and installed)


class JsonLines:
    """metrics.jsonl: one object a logged step, no step twice, none of a future that was lost.

    Each attempt replaces the file of the one before, by a rename out of its workspace: that makes it safe from
    ranks that the run has gone on without, like a checkpoint.
    """

    def __init__(self, run: RunDirectory, workspace: Path, step: int) -> None:
        self._workspace = workspace
        if run.metrics.exists():
            kept = "".join(lines_up_to(run.metrics.read_text(), step))
            with fence.explained(workspace):
                write_atomically(run.metrics, kept, workspace)
        self._file = run.metrics.open("a")

    def write(self, record: Record) -> None:
        fence.require(self._workspace)
        finite = {name: value if is_finite(value) else None for name, value in record.items()}
        self._file.write(json.dumps(finite, allow_nan=False) + "\n")
        self._file.flush()

    def flush(self) -> None:
        os.fsync(self._file.fileno())

    def close(self) -> None:
        self.flush()
        self._file.close()


def is_finite(value: Any) -> bool:
    """False for the numbers that JSON has no word for."""
    return not isinstance(value, float) or math.isfinite(value)


def lines_up_to(text: str, step: int) -> list[str]:
    """The lines whose step is at most `step`, up to the first that a crash has torn."""
    kept = []
    for line in text.splitlines(keepends=True):
        try:
            known = json.loads(line)["step"]
        except (ValueError, KeyError, TypeError):
            break
        if line.endswith("\n") and known <= step:
            kept.append(line)
    return kept


class TensorBoard:
    """TensorBoard's event files in `tensorboard/`."""

    def __init__(self, run: RunDirectory, step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(run.path / "tensorboard"), purge_step=step + 1)

    def write(self, record: Record) -> None:
        for name, value in record.items():
            if name not in ("step", "time") and value is not None:
                self._writer.add_scalar(name, value, record["step"], walltime=record["time"])

    def flush(self) -> None:
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()

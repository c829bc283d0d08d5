"""Where the metrics of a run go: metrics.jsonl always, TensorBoard if it is wanted."""

from __future__ import annotations

import importlib.util
import itertools
import json
import math
import os
from pathlib import Path
from typing import Any, Protocol

from nanoscale.common.errors import UserError
from nanoscale.common.versions import install_command
from nanoscale.config.schema import Logger
from nanoscale.runs import events, fence
from nanoscale.runs.directory import RunDirectory, write_atomically

Record = dict[str, Any]
_NAMED = 5
"""damaged lines, at most, that a message names"""


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
        if run.metrics.exists() or step:
            self._keep(run, step)
        self._file = run.metrics.open("a", encoding="utf-8")

    def _keep(self, run: RunDirectory, step: int) -> None:
        """Keep the lines up to `step`; what is damaged stays beside them, and the run's events say so."""
        kept, damage = b"", ""
        try:
            text = run.metrics.read_bytes()
        except FileNotFoundError:
            damage = f"metrics.jsonl is missing: the figures of steps 1 to {step} are lost"
        except OSError as error:
            aside = _free(run.metrics)
            damage = f"metrics.jsonl cannot be read ({error.strerror}) and is now {aside.name}"
            fence.require(self._workspace)
            run.metrics.rename(aside)
        else:
            lines, damaged = lines_up_to(text, step)
            kept = b"".join(lines)
            if damaged:
                aside = _free(run.metrics)
                which = ", ".join(map(str, damaged[:_NAMED])) + (", …" if damaged[_NAMED:] else "")
                damage = (
                    f"metrics.jsonl is damaged in line {which}: the file is kept as {aside.name}"
                )
                aside.write_bytes(text)
        with fence.explained(self._workspace):
            write_atomically(run.metrics, kept, self._workspace)
        if damage:
            events.append(run, "metrics", f"{damage}; the training continues with step {step + 1}")

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


def lines_up_to(text: bytes, step: int) -> tuple[list[bytes], list[int]]:
    """Return the lines whose step is at most `step`, and the numbers of damaged lines, from 1.

    What follows the last end of a line is neither: a crash has torn it.
    """
    kept, damaged = [], []
    for number, line in enumerate(text.split(b"\n")[:-1], 1):
        try:
            if json.loads(line)["step"] <= step:
                kept.append(line + b"\n")
        except (ValueError, KeyError, TypeError):
            damaged.append(number)
    return kept, damaged


def _free(path: Path) -> Path:
    """A name beside `path` for what is damaged, as a damaged checkpoint has one."""
    names = itertools.chain(
        [f"damaged-{path.name}"], (f"damaged-{path.name}-{n}" for n in itertools.count(2))
    )
    return next(free for name in names if not (free := path.with_name(name)).exists())


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

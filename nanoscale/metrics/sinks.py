"""The outputs of a run's metrics: metrics.jsonl always, others if requested."""

import csv
import io
import json
import os
from math import isfinite
from pathlib import Path
from typing import Protocol

from nanoscale.common.errors import UserError
from nanoscale.common.json_text import parse
from nanoscale.common.versions import missing
from nanoscale.config.schema import Logger
from nanoscale.metrics.trackers import Record, Subject, open_trackers
from nanoscale.runs import events, fence
from nanoscale.runs.directory import RunDirectory, open_to_append, path_of_damaged, write_atomically

_LINES_NAMED = 5
"""The most damaged lines that a message names."""


class Sink(Protocol):
    """A receiver of one record per logged step."""

    def write(self, record: Record) -> None:
        """Write a record. Raises FencedError if the run has continued without this attempt."""

    def flush(self) -> None:
        """Return when everything written so far would survive a crash of the machine."""

    def close(self, outcome: str) -> None:
        """End the output; the training is "completed", "stopped" or "failed"."""


def open_sinks(subject: Subject, step: int) -> list[Sink]:
    """Open the sinks of a run that continues after `step`; records of later steps are dropped.

    Raises:
        FencedError: the run has continued without this attempt.
    """
    run, logger = subject.run, subject.config.logger
    sinks: list[Sink] = [JsonLines(run, subject.workspace, step)]
    if wants_tensorboard(logger):
        sinks.append(TensorBoard(run, step))
    if logger.csv:
        sinks.append(Csv(run, subject.workspace))
    return [*sinks, *open_trackers(subject, step)]


def wants_tensorboard(logger: Logger) -> bool:
    """True if TensorBoard's files are to be written.

    Raises:
        UserError: they are requested and TensorBoard is not installed.
    """
    what = missing("tensorboard")
    if logger.tensorboard == "on" and what:
        raise UserError("config", f"logger.tensorboard=on needs {what}")
    return logger.tensorboard == "on" or (logger.tensorboard == "auto" and not what)


class JsonLines:
    """The file metrics.jsonl: one object per logged step, no step twice, and no steps after the resumed
    checkpoint.

    Each attempt replaces the file of the previous one, by a rename out of its workspace. As with checkpoints,
    this keeps out ranks of an attempt that the run has continued without.
    """

    def __init__(self, run: RunDirectory, workspace: Path, step: int) -> None:
        self._workspace = workspace
        if run.metrics.exists() or step:
            self._keep_lines(run, step)
        self._file = open_to_append(run.metrics)

    def _keep_lines(self, run: RunDirectory, step: int) -> None:
        """Keep the lines up to `step`; damaged lines are moved to a file next to it and reported."""
        content, damage = b"", ""
        try:
            text = run.metrics.read_bytes()
        except FileNotFoundError:
            damage = f"metrics.jsonl is missing: the figures of steps 1 to {step} are lost"
        except OSError as error:
            damaged_file = path_of_damaged(run.metrics)
            why = error.strerror
            damage = f"metrics.jsonl cannot be read ({why}) and is now {damaged_file.name}"
            fence.require(self._workspace)
            run.metrics.rename(damaged_file)
        else:
            lines, damaged = lines_up_to(text, step)
            content = b"".join(lines)
            if damaged:
                damaged_file = path_of_damaged(run.metrics)
                more = ", …" if damaged[_LINES_NAMED:] else ""
                numbers = ", ".join(map(str, damaged[:_LINES_NAMED])) + more
                damage = (
                    f"metrics.jsonl is damaged in line {numbers}: "
                    f"the file is kept as {damaged_file.name}"
                )
                damaged_file.write_bytes(text)
        with fence.explained(self._workspace):
            write_atomically(run.metrics, content, self._workspace)
        if damage:
            events.append(run, "metrics", f"{damage}; the training continues with step {step + 1}")

    def write(self, record: Record) -> None:
        fence.require(self._workspace)
        self._file.write(f"{json.dumps(_finite(record), allow_nan=False)}\n")
        self._file.flush()

    def flush(self) -> None:
        os.fsync(self._file.fileno())

    def close(self, outcome: str) -> None:
        self.flush()
        self._file.close()


def _finite(record: Record) -> Record:
    """Return a record with null in the place of NaN and infinity, which JSON cannot represent."""
    bad = {it for it, value in record.items() if isinstance(value, float) and not isfinite(value)}
    return record | dict.fromkeys(bad)


def lines_up_to(text: bytes, step: int) -> tuple[list[bytes], list[int]]:
    """Return the lines whose step is at most `step`, and the numbers of damaged lines, from 1.

    Text after the last line end is neither: a crash has cut it off.
    """
    lines, damaged = [], []
    for number, line in enumerate(text.split(b"\n")[:-1], 1):
        try:
            if parse(line)["step"] <= step:
                lines.append(line + b"\n")
        except (ValueError, KeyError, TypeError):
            damaged.append(number)
    return lines, damaged


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

    def close(self, outcome: str) -> None:
        self._writer.close()


class Csv:
    """The file metrics.csv: the records of metrics.jsonl as a table, with a column for every figure."""

    def __init__(self, run: RunDirectory, workspace: Path) -> None:
        self._run, self._workspace = run, workspace
        self._columns: list[str] = []
        self._rewrite()

    def _rewrite(self) -> None:
        """Write the table again from metrics.jsonl, which has every record by now."""
        records = [parse(line) for line in self._run.metrics.read_bytes().splitlines()]
        self._columns = list(dict.fromkeys(name for record in records for name in record))
        text = io.StringIO()
        writer = csv.DictWriter(text, self._columns)
        writer.writeheader()
        writer.writerows(records)
        with fence.explained(self._workspace):
            write_atomically(self._run.metrics_csv, text.getvalue(), self._workspace)
        self._file = open_to_append(self._run.metrics_csv, newline="")
        self._writer = csv.DictWriter(self._file, self._columns)

    def write(self, record: Record) -> None:
        if not set(record) <= set(self._columns):
            self._file.close()
            self._rewrite()
            return
        self._writer.writerow(_finite(record))
        self._file.flush()

    def flush(self) -> None:
        os.fsync(self._file.fileno())

    def close(self, outcome: str) -> None:
        self._file.close()

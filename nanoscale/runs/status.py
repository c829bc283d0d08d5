"""The file status.json: the state of a run. Only its launcher writes it."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass, replace
from typing import Literal

from nanoscale.common.errors import UserError
from nanoscale.runs.directory import RunDirectory, write_json
from nanoscale.runs.documents import damaged, read_record

State = Literal["prepared", "starting", "running", "completed", "failed", "stopped", "preempted"]

ENDED: tuple[State, ...] = ("completed", "failed", "stopped", "preempted")


@dataclass(frozen=True)
class Status:
    """The state of a run; times are UNIX seconds, and null before they occur."""

    state: State
    attempt: int
    created: float
    started: float | None = None
    ended: float | None = None
    exit_code: int | None = None
    """The exit code of the attempt's launcher."""

    def starting(self, attempt: int) -> Status:
        """Return the status of a new attempt, from now."""
        return Status("starting", attempt, self.created, started=time.time())

    def running(self) -> Status:
        return replace(self, state="running")

    def ending(self, state: State, exit_code: int) -> Status:
        return replace(self, state=state, exit_code=exit_code, ended=time.time())


def prepared() -> Status:
    """Return the status of a run that was created now and never launched."""
    return Status("prepared", attempt=0, created=time.time())


def write(run: RunDirectory, status: Status) -> None:
    write_json(run.status, asdict(status))


def read(run: RunDirectory) -> Status:
    """Return the state of the run; `prepared` if it cannot be read, so that a launcher can continue."""
    try:
        return require(run)
    except UserError:
        return Status("prepared", attempt=0, created=0.0)


def require(run: RunDirectory) -> Status:
    """Return the state of the run, to show it.

    Raises:
        UserError: status.json is missing or damaged.
    """
    try:
        return read_record(Status, run.status)
    except FileNotFoundError:
        raise damaged(run.status, "is missing") from None

"""Minding the ranks of a host: passing a stop on, and ending all when one has failed."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from multiprocessing.process import BaseProcess
from typing import Protocol

from nanoscale.agent.host import Host
from nanoscale.runs import events
from nanoscale.runs.directory import RunDirectory
from nanoscale.runs.failure import RankFailure, is_consequence, read_rank_failure

_CAUSE_GRACE_S = 1.5
"""how long to wait for a better explanation while ranks only say that they lost another one"""
_PAUSE_S = 0.02
_REAP_S = 10.0


class StopRequest(Protocol):
    requested: bool


class Watch:
    """Looks at the ranks' processes, which are ordered by local rank."""

    def __init__(self, run: RunDirectory, host: Host, stop: StopRequest) -> None:
        self._run = run
        self._host = host
        self._stop = stop
        self._passed_on = False
        self.ended_by_stop = False
        self.failures: list[RankFailure] = []

    def look(self, processes: Sequence[BaseProcess]) -> bool:
        """Act on what is new; whether the ranks go on. If one does not, none is left."""
        if self._stop.requested and not self._passed_on:
            self._pass_on(processes)
        if all(process.exitcode is None for process in processes):
            return True
        if self.ended_by_stop:
            return False
        if self._stop.requested and any(p.exitcode == -signal.SIGTERM for p in processes):
            self.ended_by_stop = True  # it had no handler yet, so there was nothing to save
        else:
            self.failures = self._wait_for_cause(processes)
        _kill(processes)
        return False

    def _pass_on(self, processes: Sequence[BaseProcess]) -> None:
        self._passed_on = True
        if self._is_training():
            _send(processes, signal.SIGTERM)
        else:
            self.ended_by_stop = True
            _kill(processes)

    def _is_training(self) -> bool:
        history = events.read(self._run)
        started = max((i for i, e in enumerate(history) if e.get("kind") == "attempt"), default=0)
        return any(event.get("kind") == "running" for event in history[started:])

    def _wait_for_cause(self, processes: Sequence[BaseProcess]) -> list[RankFailure]:
        deadline = time.monotonic() + _CAUSE_GRACE_S
        while True:
            found = self._gather(processes)
            everybody = all(process.exitcode is not None for process in processes)
            if everybody or not all(map(is_consequence, found)) or time.monotonic() > deadline:
                return found
            time.sleep(_PAUSE_S)

    def _gather(self, processes: Sequence[BaseProcess]) -> list[RankFailure]:
        """What failed so far; a failure that was seen before keeps the time it was seen at."""
        known = {failure.rank: failure for failure in self.failures}
        for local_rank, (rank, process) in enumerate(zip(self._host.ranks, processes, strict=True)):
            path = self._run.rank_failure(self._host.attempt, self._host.name, rank)
            said = read_rank_failure(path)
            if said is not None:
                known[rank] = replace(said, exit_code=process.exitcode)
            elif process.exitcode is not None and rank not in known:
                known[rank] = RankFailure(
                    rank, local_rank, self._host.name, time.time(), exit_code=process.exitcode
                )
        self.failures = list(known.values())
        return self.failures


def _send(processes: Sequence[BaseProcess], number: signal.Signals) -> None:
    for process in processes:
        if process.exitcode is None and process.pid is not None:
            with suppress(ProcessLookupError):
                os.kill(process.pid, number)


def _kill(processes: Sequence[BaseProcess]) -> None:
    """End them; SIGKILL, since SIGTERM would be taken for a wish to stop in good order."""
    _send(processes, signal.SIGKILL)
    deadline = time.monotonic() + _REAP_S
    for process in processes:
        process.join(max(0.0, deadline - time.monotonic()))

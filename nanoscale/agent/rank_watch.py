"""The watch over the ranks of a host: it reports their states to the launcher and follows its orders."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from multiprocessing.process import BaseProcess

from nanoscale.agent.link import Link
from nanoscale.agent.logs import RankLogs
from nanoscale.agent.rank import RankFiles
from nanoscale.processes.proc import is_stopped
from nanoscale.runs.failure import RankFailure, read_rank_failure, stopped_rank
from nanoscale.runs.job_messages import Failing, HostRanks, message_of

_STACKS_S = 0.5
"""Seconds for the ranks to write their stacks."""
_REAP_S = 10.0
_FORWARD_S = 0.25
"""Seconds for the ranks' output, between two checks of their processes and of the launcher's orders."""


class Watch:
    """A watch over the ranks' processes, which are ordered by local rank."""

    def __init__(self, link: Link, host: HostRanks, logs: RankLogs, lost_after_s: float) -> None:
        self._link = link
        self._host = host
        self._logs = logs
        self._lost_after_s = lost_after_s
        self._stop_forwarded = False
        self._stopped_since: dict[int, float] = {}
        self.killed = False
        self.failures: dict[int, RankFailure] = {}

    def check(self, processes: Sequence[BaseProcess]) -> bool:
        """Report changes and follow orders; True once no rank is left.

        After a failure the launcher decides, for all hosts, when the other ranks are to end.
        """
        self._link.is_starting = False
        self._logs.forward(_FORWARD_S)
        if self._link.killed_attempt >= self._host.attempt:
            self._end(processes)
            return True
        if self._link.stopped_attempt >= self._host.attempt and not self._stop_forwarded:
            self._stop_forwarded = True
            send(processes, signal.SIGTERM)
        self._collect_failures(processes)
        outcomes = [_outcome(files) for files in self._logs.files.values()]
        exit_codes = [process.exitcode for process in processes]
        return not self.failures and None not in outcomes and set(exit_codes) == {0}

    def outcome(self) -> str:
        """Return `completed`, `stopped`, `failed` or `killed`."""
        if self.killed:
            return "killed"
        if self.failures:
            return "failed"
        outcomes = {_outcome(files) for files in self._logs.files.values()}
        return "stopped" if "stopped" in outcomes else "completed"

    def close(self) -> None:
        """Send the ranks' last output. An attempt that is to end does not wait for all of it."""
        while self._logs.forward(_FORWARD_S):
            if max(self._link.stopped_attempt, self._link.killed_attempt) >= self._host.attempt:
                self._logs.skip_to_end()

    def _end(self, processes: Sequence[BaseProcess]) -> None:
        self.killed = True
        if self._link.wants_stacks:
            send(processes, signal.SIGUSR2)
            _join(processes, _STACKS_S)
        self._collect_failures(processes)
        # Not SIGTERM, which would mean a regular stop.
        send(processes, signal.SIGKILL)
        _join(processes, _REAP_S)

    def _collect_failures(self, processes: Sequence[BaseProcess]) -> None:
        """Collect the failures so far; a known failure keeps its time."""
        known = dict(self.failures)
        for local_rank, (rank, process) in enumerate(zip(self._host.ranks, processes, strict=True)):
            files = self._logs.files[rank]
            exit_code = process.exitcode  # read first: the files are complete if there is one
            reported = read_rank_failure(files.failure)
            if reported is not None:
                self.failures[rank] = replace(reported, exit_code=exit_code)
            elif exit_code == 0 and _outcome(files) is not None:
                continue
            elif exit_code is not None and rank not in self.failures:
                self.failures[rank] = RankFailure(
                    "ended", rank, local_rank, self._host.name, time.time(), exit_code=exit_code
                )
            elif self._stays_stopped(rank, process):
                self.failures.setdefault(rank, stopped_rank(rank, local_rank, self._host.name))
        if self.failures != known:
            failing = Failing(self._host.attempt, tuple(self.failures.values()))
            self._link.send(**message_of(failing))

    def _stays_stopped(self, rank: int, process: BaseProcess) -> bool:
        if process.pid is None or not is_stopped(process.pid):
            self._stopped_since.pop(rank, None)
            return False
        since = self._stopped_since.setdefault(rank, time.monotonic())
        return time.monotonic() - since > self._lost_after_s


def _outcome(files: RankFiles) -> str | None:
    """Return the result of a rank's job; None if it did not return."""
    with suppress(FileNotFoundError):
        return files.outcome.read_text(encoding="utf-8")
    return None


def send(processes: Sequence[BaseProcess], number: signal.Signals) -> None:
    for process in processes:
        if process.exitcode is None and process.pid is not None:
            with suppress(ProcessLookupError):
                os.kill(process.pid, number)


def _join(processes: Sequence[BaseProcess], limit_s: float) -> None:
    deadline = time.monotonic() + limit_s
    for process in processes:
        process.join(max(0.0, deadline - time.monotonic()))

"""One attempt on this host: its ranks from their start until all have ended.

A watch reports their states to the launcher and follows its orders.
"""

from __future__ import annotations

import os
import signal
import time
import traceback
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from multiprocessing.process import BaseProcess
from pathlib import Path

from nanoscale.agent.link import Link
from nanoscale.agent.memory_keeper import MemoryKeeper
from nanoscale.agent.rank import (
    RankFiles,
    RankLogs,
    fork_server_ended,
    fork_server_failure,
    start_rank,
    start_store,
)
from nanoscale.processes.network import interface_towards, is_loopback
from nanoscale.processes.proc import available_gib, is_stopped, oom_kills
from nanoscale.runs import position
from nanoscale.runs.directory import RunDirectory, read_json, write_json
from nanoscale.runs.failure import (
    Evidence,
    RankFailure,
    ended_rank,
    read_rank_failure,
    stopped_rank,
)
from nanoscale.runs.job_messages import Answered, Ended, Failing, HostRanks, LaunchOrder, message_of
from nanoscale.runs.position import Position
from nanoscale.runs.rank_context import MOVE_SIGNAL
from nanoscale.worker import Job

_POLL_S = 0.05
_STACKS_S = 2.0
"""The longest time to wait for the stacks of the ranks."""
_EXIT_S = 1.0
"""The longest time to wait for the exit code of a rank that has reported its failure."""
_REAP_S = 10.0
_FORWARD_S = 0.25
"""Seconds for the ranks' output, between two checks of their processes and of the launcher's orders."""


def attempt(
    link: Link, order: LaunchOrder, job: Job | str, keeper: MemoryKeeper | None = None
) -> BaseProcess | None:
    """Run the ranks that the launcher orders, and report how they ended.

    Args:
        job: each rank's job, or its name in worker.JOBS.
        keeper: the keeper of checkpoints in memory, if the job has them.

    Returns:
        on the first host, the process of the store, which the ranks of other hosts may still need.
    """
    host = order.host
    run = RunDirectory(Path(order.run or link.scratch / f"run-{host.attempt}"))
    if order.run is None:  # a job without a run has a directory that only this host sees
        run.path.mkdir()
        run.config.write_text(order.config, "utf-8")
        write_json(run.task, order.task)
    killed_before = oom_kills()
    link.is_starting = True
    failures: list[RankFailure] = []
    positions: dict[int, Position] = {}
    store = None
    try:
        if link.killed_attempt >= host.attempt:
            outcome = "killed"
        else:
            if keeper is not None and order.memory is not None:
                keeper.begin(run, host, order.memory)
            if host.node_rank == 0:
                store = start_store(host)
            logs = RankLogs(link, host, run if order.writes_logs else None)
            watch = Watch(link, host, logs, order.lost_after_s)
            _run_ranks(host, watch, logs, run, job, order.meet_s)
            outcome = watch.outcome()
            failures += watch.failures.values()
            positions = watch.positions
    except Exception as error:
        traceback.print_exc()
        failure = RankFailure.of(error, host=host.name, kind="agent")
        failures.append(fork_server_failure(link.scratch, host.name) or failure)
        outcome = "failed"
    link.is_starting = False
    evidence = Evidence(oom_kills() - killed_before, available_gib())
    result = None
    with suppress(OSError, ValueError):  # the job left none
        result = read_json(run.result)
    ended = Ended(host.attempt, outcome, tuple(failures), evidence, result, positions)
    link.send(**message_of(ended))
    return store


def _run_ranks(
    host: HostRanks, watch: Watch, logs: RankLogs, run: RunDirectory, job: Job | str, meet_s: float
) -> None:
    """Start the ranks of this host, and watch them until all have ended."""
    interface = _interface(host.master_addr)
    processes: list[BaseProcess] = []
    try:
        for local_rank, files in enumerate(logs.files.values()):
            environment = _environment(host, local_rank) | interface
            environment["NANOSCALE_FAILURE_FILE"] = str(files.failure)
            processes.append(start_rank(environment, files, run.path, job, meet_s))
        while not watch.check(processes):
            time.sleep(_POLL_S)
        watch.close()
    finally:
        send(processes, signal.SIGKILL)


def _environment(host: HostRanks, local_rank: int) -> dict[str, str]:
    """Return the variables for torch.distributed and DeepSpeed, named as by torchrun, and for `worker`."""
    numbers = {
        "RANK": host.ranks[local_rank],
        "LOCAL_RANK": local_rank,
        "GROUP_RANK": host.node_rank,
        "WORLD_SIZE": host.world_size,
        "LOCAL_WORLD_SIZE": len(host.ranks),
        "GROUP_WORLD_SIZE": host.nodes,
        "MASTER_PORT": host.master_port,
        "NANOSCALE_ATTEMPT": host.attempt,
    }
    return {name: str(number) for name, number in numbers.items()} | {
        "MASTER_ADDR": host.master_addr,
        "NANOSCALE_HOST": host.name,
        "TORCHELASTIC_RUN_ID": f"attempt-{host.attempt}",
        "TORCHELASTIC_USE_AGENT_STORE": "True",  # otherwise rank 0 would serve one
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": os.environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1"),
    }


def _interface(master_addr: str) -> dict[str, str]:
    """Return the interface for gloo and NCCL, unless the user chose one."""
    interface = interface_towards(master_addr)
    if interface is None:
        return {}
    variables = {"GLOO_SOCKET_IFNAME": interface}  # works if the host's name does not resolve
    if is_loopback(master_addr):
        variables["NCCL_SOCKET_IFNAME"] = f"={interface}"  # by default NCCL avoids the loopback
    return {name: value for name, value in variables.items() if name not in os.environ}


class Watch:
    """A watch over the ranks' processes, which are ordered by local rank."""

    def __init__(self, link: Link, host: HostRanks, logs: RankLogs, lost_after_s: float) -> None:
        self._link = link
        self._host = host
        self._logs = logs
        self._lost_after_s = lost_after_s
        self._forwarded = set[signal.Signals]()
        self._questions = link.questions
        self._stopped_since: dict[int, float] = {}
        self.killed = False
        self.positions: dict[int, Position] = {}
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
        stops = (self._link.stopped_attempt, signal.SIGTERM)
        for attempt, number in (stops, (self._link.moved_attempt, MOVE_SIGNAL)):
            if attempt >= self._host.attempt and number not in self._forwarded:
                self._forwarded.add(number)
                send(processes, number)
        if self._link.questions > self._questions:
            self._questions = self._link.questions
            self._ask(processes)
            self._link.send(**message_of(Answered(self._host.attempt, self.positions)))
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
            self._ask(processes)
        deadline = time.monotonic() + _EXIT_S
        for rank, process in zip(self._host.ranks, processes, strict=True):
            failure = self.failures.get(rank)
            if failure is not None and failure.kind != "stopped":  # it reports before it exits
                process.join(max(0.0, deadline - time.monotonic()))
        self._collect_failures(processes)
        # Not SIGTERM, which would mean a regular stop.
        send(processes, signal.SIGKILL)
        deadline = time.monotonic() + _REAP_S
        for process in processes:
            process.join(max(0.0, deadline - time.monotonic()))

    def _ask(self, processes: Sequence[BaseProcess]) -> None:
        """Collect the positions of the ranks that still run."""
        self.positions = {}
        files = {rank: files.failure for rank, files in self._logs.files.items()}
        alive = {
            rank
            for rank, process in zip(self._host.ranks, processes, strict=True)
            if process.exitcode is None
        }
        for rank in alive:
            position.ask(files[rank])
        deadline = time.monotonic() + _STACKS_S
        while alive and time.monotonic() < deadline:
            time.sleep(_POLL_S)
            found = {rank: position.answered(files[rank]) for rank in alive}
            self.positions |= {rank: where for rank, where in found.items() if where is not None}
            alive -= self.positions.keys()

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
                about = rank, local_rank, self._host.name
                code = None if exit_code == 255 and fork_server_ended() else exit_code
                self.failures[rank] = ended_rank(*about, code, files.stderr)
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
        return files.outcome.read_text("utf-8")
    return None


def send(processes: Sequence[BaseProcess], number: signal.Signals) -> None:
    for process in processes:
        if process.exitcode is None and process.pid is not None:
            with suppress(ProcessLookupError):
                os.kill(process.pid, number)

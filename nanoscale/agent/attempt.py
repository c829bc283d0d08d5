"""One attempt on this host: its ranks from their start until all have ended."""

from __future__ import annotations

import os
import signal
import time
import traceback
from multiprocessing.process import BaseProcess
from pathlib import Path

from nanoscale.agent.link import Link
from nanoscale.agent.logs import RankLogs
from nanoscale.agent.network import interface_towards, is_loopback
from nanoscale.agent.rank import start_rank, start_store
from nanoscale.agent.rank_watch import Watch, send
from nanoscale.processes.proc import available_gib, oom_kills
from nanoscale.runs.directory import RunDirectory, read_json, write_json
from nanoscale.runs.failure import Evidence, RankFailure
from nanoscale.runs.job_messages import Ended, HostRanks, LaunchOrder, message_of
from nanoscale.worker import Job

_POLL_S = 0.05


def attempt(link: Link, order: LaunchOrder, job: Job | str) -> BaseProcess | None:
    """Run the ranks that the launcher orders, and report how they ended.

    Args:
        job: each rank's job, or its name in worker.JOBS.

    Returns:
        on the first host, the process of the store, which the ranks of other hosts may still need.
    """
    host, run = order.host, _run_directory(link, order)
    killed_before = oom_kills()
    link.is_starting = True
    failures: list[RankFailure] = []
    store = None
    try:
        if link.killed_attempt >= host.attempt:
            outcome = "killed"
        else:
            if host.node_rank == 0:
                store = start_store(host)
            logs = RankLogs(link, host, run if order.writes_logs else None)
            watch = Watch(link, host, logs, order.lost_after_s)
            _run_ranks(host, watch, logs, run, job, order.meet_s)
            outcome = watch.outcome()
            failures += watch.failures.values()
    except Exception as error:
        traceback.print_exc()
        failures.append(
            RankFailure.of(error, rank=None, local_rank=None, host=host.name, kind="agent")
        )
        outcome = "failed"
    link.is_starting = False
    evidence = Evidence(oom_kills() - killed_before, available_gib())
    ended = Ended(host.attempt, outcome, tuple(failures), evidence, _result(run))
    link.send(**message_of(ended))
    return store


def _run_directory(link: Link, order: LaunchOrder) -> RunDirectory:
    """Return the run's directory; a job without a run has one that only this host sees."""
    if order.run is not None:
        return RunDirectory(Path(order.run))
    run = RunDirectory(link.scratch / f"run-{order.host.attempt}")
    run.path.mkdir()
    run.config.write_text(order.config, encoding="utf-8")
    write_json(run.task, order.task)
    return run


def _result(run: RunDirectory) -> object:
    """Return the job's result for the launcher; None if it left none."""
    try:
        return read_json(run.result)
    except (OSError, ValueError):
        return None


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

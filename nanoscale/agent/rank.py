"""The copies of the fork server: a rank of this host, and the store at which the ranks of all hosts meet."""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
import traceback
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import get_context
from multiprocessing.process import BaseProcess
from pathlib import Path

from nanoscale import worker
from nanoscale.agent.network import is_loopback
from nanoscale.processes.lifeline import die_with
from nanoscale.runs.failure import RankFailure, write_rank_failure
from nanoscale.runs.job_messages import HostRanks
from nanoscale.runs.rank_context import STOP_SIGNALS
from nanoscale.worker import Job

_BACKLOG = 2048
"""Connections that wait for the store to accept them: all ranks connect at the same time."""
_forkserver = get_context("forkserver")


@dataclass(frozen=True)
class RankFiles:
    """The files that a rank writes for its agent."""

    stdout: Path
    stderr: Path
    failure: Path
    """The reason of its failure."""
    outcome: Path
    """A key of worker.EXIT_CODES, once its job has returned: a library can also exit with 0."""


def start_rank(
    environment: dict[str, str], files: RankFiles, run_dir: Path, job: Job | str, meet_s: float
) -> BaseProcess:
    """Start a rank of this host. Blocks until the fork server has loaded torch.

    Args:
        environment: the rank's identity and the address of the rendezvous, named as torchrun does.
        meet_s: how long the hosts wait for each other at first, seconds.
    """
    arguments = (os.getpid(), environment, files, run_dir, job, meet_s)
    process = _forkserver.Process(target=_run_rank, args=arguments)
    process.start()
    return process


def start_store(host: HostRanks) -> BaseProcess:
    """Start the store at which the ranks of all hosts meet, on the first host.

    Raises:
        OSError: another program listens on its port.
    """
    with _listener(host) as listener:
        arguments = (os.getpid(), listener, host.master_addr, host.master_port)
        process = _forkserver.Process(target=_serve_store, args=arguments)
        process.start()
        return process


def _listener(host: HostRanks) -> socket.socket:
    """Listen for the store, which would otherwise listen on all interfaces even in a job on one host."""
    if is_loopback(host.master_addr):
        return socket.create_server((host.master_addr, host.master_port), backlog=_BACKLOG)
    if socket.has_dualstack_ipv6():
        address, family = ("", host.master_port), socket.AF_INET6
        return socket.create_server(address, family=family, dualstack_ipv6=True, backlog=_BACKLOG)
    return socket.create_server(("", host.master_port), backlog=_BACKLOG)


def _serve_store(agent: int, listener: socket.socket, address: str, port: int) -> None:
    """Serve until the agent ends this process, or exits."""
    _ignore(*STOP_SIGNALS, signal.SIGHUP)
    _die_with_agent(agent)
    from torch.distributed import TCPStore

    store = TCPStore(
        address,
        port,
        is_master=True,
        wait_for_workers=False,
        master_listen_fd=listener.detach(),  # the store closes it
    )
    threading.Event().wait()
    del store


def _run_rank(
    agent: int,
    environment: dict[str, str],
    files: RankFiles,
    run_dir: Path,
    job: Job | str,
    meet_s: float,
) -> None:
    """Run the job as one rank, and record how it ended.

    After a failure the process exits at once: destroying the remaining objects could wait for lost peers.
    """
    _ignore(*STOP_SIGNALS)  # until the job listens
    _redirect(files)
    os.environ.update(environment)
    try:
        _die_with_agent(agent)
        if int(os.environ["GROUP_WORLD_SIZE"]) > 1:
            _meet(files, meet_s)
        files.outcome.write_text(worker.main(run_dir, job), encoding="utf-8")
    except BaseException as error:
        with suppress(OSError):  # a full disk cannot store a traceback
            traceback.print_exc()
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(worker.exit_code(error))


def _ignore(*numbers: signal.Signals) -> None:
    """Ignore signals that SLURM sends to all processes of a job."""
    for number in numbers:
        signal.signal(number, signal.SIG_IGN)


def _die_with_agent(agent: int) -> None:
    """Exit with the agent. If the fork server is lost, a rank is asked to stop: nobody would notice its end."""
    die_with(agent, group=agent)
    from torch.multiprocessing import _prctl_pr_set_pdeathsig  # type: ignore[attr-defined]

    _prctl_pr_set_pdeathsig(signal.SIGINT)


def _redirect(files: RankFiles) -> None:
    for number, path in ((1, files.stdout), (2, files.stderr)):
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
        os.dup2(file, number)
        os.close(file)


def _meet(files: RankFiles, limit_s: float) -> None:
    """Wait for the ranks of all hosts: some load torch minutes after the others."""
    from torch.distributed import TCPStore

    env = os.environ
    limit = timedelta(seconds=limit_s)
    try:
        store = TCPStore(env["MASTER_ADDR"], int(env["MASTER_PORT"]), timeout=limit)
        if env["LOCAL_RANK"] == "0":
            store.set(f"host/{env['GROUP_RANK']}", "")
        store.wait([f"host/{host}" for host in range(int(env["GROUP_WORLD_SIZE"]))], limit)
    except Exception as error:
        failure = RankFailure.of(
            error, rank=None, local_rank=None, host=worker.host_name(), kind="rendezvous"
        )
        write_rank_failure(files.failure, failure)
        raise

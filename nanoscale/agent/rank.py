"""The copies of the fork server: a rank of this host, and the store at which the ranks of all hosts meet.

The ranks of a local launch write their logs in the run's folder themselves, and the agent only reports that a
log has grown. On other hosts, files of the host hold the output that is not sent yet. So a rank never waits
for a slow launcher, and none of its output is kept in memory.
"""

import os
import signal
import socket
import sys
import threading
import time
import traceback
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from multiprocessing import forkserver, get_context
from multiprocessing.process import BaseProcess
from pathlib import Path

from nanoscale import worker
from nanoscale.agent.link import Link
from nanoscale.processes.lifeline import SCRATCH, die_with
from nanoscale.processes.messages import MOST_BYTES
from nanoscale.processes.network import is_loopback
from nanoscale.processes.proc import is_alive
from nanoscale.runs.directory import STREAMS, RunDirectory, Stream
from nanoscale.runs.failure import RankFailure, read_rank_failure, write_rank_failure
from nanoscale.runs.job_messages import HostRanks
from nanoscale.runs.rank_context import STOP_SIGNALS
from nanoscale.runs.tail import FileTail
from nanoscale.worker import Job

_BACKLOG = 2048
"""Connections that wait for the store to accept them: all ranks connect at the same time."""
_END_BYTES = 1 << 20
"""The last bytes of a stream, which are always sent."""
_FORK_SERVER_FAILURE = "fork-server.json"
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


def fork_server_ended() -> bool:
    """True if the fork server has ended before the agent: the exit code of each rank then reads 255."""
    return not is_alive(forkserver._forkserver._forkserver_pid)  # type: ignore[attr-defined]


def fork_server_failure(folder: Path, host: str) -> RankFailure | None:
    """Return the error of an import with which the last fork server ended; None if it had none."""
    failure = read_rank_failure(folder / _FORK_SERVER_FAILURE)
    return failure and replace(failure, host=host)


def record_fork_server_failure(error: BaseException | None) -> None:
    """Write this error for the agent, or remove the last one."""
    path = Path(os.environ[SCRATCH]) / _FORK_SERVER_FAILURE
    path.unlink(missing_ok=True)
    if error is not None:
        failure = RankFailure.of(error, host="", kind="agent")
        write_rank_failure(path, failure)


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
    for number in (*STOP_SIGNALS, signal.SIGHUP):  # SLURM sends them to all processes of a job
        signal.signal(number, signal.SIG_IGN)
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
    for stop in STOP_SIGNALS:  # until the job listens: SLURM sends them to all processes of a job
        signal.signal(stop, signal.SIG_IGN)
    for number, path in ((1, files.stdout), (2, files.stderr)):
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
        os.dup2(file, number)
        os.close(file)
    os.environ.update(environment)
    try:
        _die_with_agent(agent)
        if int(os.environ["GROUP_WORLD_SIZE"]) > 1:
            _meet(files, meet_s)
        files.outcome.write_text(worker.main(run_dir, job), "utf-8")
    except BaseException as error:
        with suppress(OSError):  # a full disk cannot store a traceback
            traceback.print_exc()
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(worker.exit_code(error))


def _die_with_agent(agent: int) -> None:
    """Exit with the agent. If the fork server is lost, a rank is asked to stop: nobody would notice its end."""
    die_with(agent, group=agent)
    from torch.multiprocessing import _prctl_pr_set_pdeathsig  # type: ignore[attr-defined]

    _prctl_pr_set_pdeathsig(signal.SIGINT)


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
        failure = RankFailure.of(error, host=worker.host_name(), kind="rendezvous")
        write_rank_failure(files.failure, failure)
        raise


class RankLogs:
    """A log file for each rank and stream.

    Args:
        run: the run whose logs the ranks write; None: they write into the agent's scratch folder, and their
            output is sent to the launcher.
    """

    def __init__(self, link: Link, host: HostRanks, run: RunDirectory | None) -> None:
        self._link = link
        scratch = RunDirectory(link.scratch)
        scratch.attempt_logs(host.attempt).mkdir(parents=True)
        self.files = {rank: _files(run or scratch, scratch, host, rank) for rank in host.ranks}
        self._send = self._send_output if run is None else self._send_growth
        self._tails = {
            (rank, stream): FileTail(path)
            for rank, files in self.files.items()
            for stream, path in zip(STREAMS, (files.stdout, files.stderr), strict=True)
        }

    def forward(self, limit_s: float) -> bool:
        """Send new output, for at most this long; True if there is more."""
        deadline = time.monotonic() + limit_s
        more = True
        while more and time.monotonic() < deadline:
            unfinished = [self._send(rank, stream) for rank, stream in self._tails]
            more = any(unfinished)
        return more

    def skip_to_end(self) -> None:
        """Skip all output but the end of each stream, with a line that says so."""
        for (rank, stream), tail in self._tails.items():
            if count := tail.skip(_END_BYTES):
                note = f"\n[nanoscale: {count:,} bytes are omitted here so that the job can end]\n"
                self._link.send("output", note.encode(), rank=rank, stream=stream)

    def _send_growth(self, rank: int, stream: Stream) -> bool:
        """Report that a log has grown; there is nothing more to send."""
        if self._tails[rank, stream].skip(0):
            self._link.send("output", rank=rank, stream=stream)
        return False

    def _send_output(self, rank: int, stream: Stream) -> bool:
        """Send the next bytes of a stream; True if there may be more."""
        data = self._tails[rank, stream].read(MOST_BYTES)
        if data:
            self._link.send("output", data, rank=rank, stream=stream)
        return len(data) == MOST_BYTES


def _files(logs: RunDirectory, scratch: RunDirectory, host: HostRanks, rank: int) -> RankFiles:
    stdout, stderr = (logs.log(host.attempt, host.name, rank, stream) for stream in STREAMS)
    failure = scratch.rank_failure(host.attempt, host.name, rank)
    return RankFiles(stdout, stderr, failure, failure.with_suffix(".outcome"))

"""The agent from its start to its end: the launcher's orders, one after the other.

torch is loaded once per host, in a fork server. Every rank is a copy of it, which costs milliseconds instead
of seconds. It stays for further attempts. The agent itself does not load torch.
"""

import multiprocessing
import os
import signal
from contextlib import suppress
from multiprocessing import forkserver
from pathlib import Path
from threading import Thread

from nanoscale.agent.attempt import attempt
from nanoscale.agent.facts import facts
from nanoscale.agent.link import Link
from nanoscale.agent.memory_keeper import MemoryKeeper, keeper_for
from nanoscale.agent.notice import watch
from nanoscale.agent.rank import record_fork_server_failure
from nanoscale.common.devices import cores
from nanoscale.common.versions import nanoscale_version
from nanoscale.processes import lifeline, scratch
from nanoscale.processes.messages import BANDWIDTH, MARK, Message
from nanoscale.processes.network import ReservedPort
from nanoscale.processes.proc import allow_open_files
from nanoscale.runs.job_messages import LaunchOrder
from nanoscale.worker import JOBS, Job

_PRELOADED = ["nanoscale.agent.fork_server", "nanoscale.agent.rank", "torch"]

_FOLDER_BYTES = 89
"""The path of a socket may have 107 bytes, and multiprocessing takes 18 of them."""

_REPORTED_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)
"""Signals to report to the launcher: SLURM signals a preemption to the tasks of a job, not to its launcher."""


def main(link: Link, job: Job | None = None) -> int:
    """Serve the launcher until it sends "quit".

    Args:
        job: each rank's job, a function that can be pickled; by default the one that the launcher orders.
    """
    try:
        _serve(link, job)
    finally:
        link.close()
    return 0


def _serve(link: Link, job: Job | None) -> None:
    if os.getpgid(0) != os.getpid():  # a process group that holds only the job can be ended as one
        os.setpgid(0, 0)
    allow_open_files()  # the ranks' store holds a connection to each of them
    for number in _REPORTED_SIGNALS:
        signal.signal(number, lambda number, _frame: link.send_later("signal", number=number))
    link.open()
    link.send("hello", nanoscale=nanoscale_version())
    port: ReservedPort | None = None
    store, watches = None, False
    keeper: MemoryKeeper | None = None
    while (order := link.orders.get())["kind"] != "quit":
        if order["kind"] == "prepare":
            if store is not None:
                store.kill()
                store.join()  # it no longer listens
            store = None
            if port is not None:
                port.close()
            port = None
            with suppress(OSError):  # another process uses it
                port = ReservedPort(order["master_port"] or 0)  # for the rendezvous, if it is here
            keeper = keeper_for(order, keeper)
            link.rescue = keeper.rescue if keeper else link.rescue
            _prepare(link, order, port, job or order["job"], keeper)
        elif order["kind"] == "launch":
            launch = LaunchOrder.read(order)
            if launch.notice and not watches:
                watches = True
                Thread(target=watch, args=(launch.notice, link.send_later), daemon=True).start()
            store = attempt(link, launch, job or launch.job, keeper)
    lifeline.clean_up(os.getpid())
    lifeline.end_group(os.getpid())  # the fork server, which may still be loading torch
    if keeper is not None and order["rescue"] is not None:
        keeper.lost_nodes = order["rescue"]
        keeper.rescue()
    link.send("bye")


def _prepare(
    link: Link,
    order: Message,
    port: ReservedPort | None,
    job: Job | str,
    keeper: MemoryKeeper | None = None,
) -> None:
    """Set the job's environment, start loading torch, and meanwhile report facts about this host."""
    os.environ.update(order["environment"])
    if order["slots"]:
        os.environ.update(cores_per_rank(cores(), order["slots"]) | order["environment"])
    link.lost_after_s = order["lost_after_s"]
    if order["will_launch"]:
        _start_fork_server(job, link.scratch)
    memory = keeper.facts() if keeper else None
    link.send("facts", **facts(order, port.number if port else None), memory=memory)


def cores_per_rank(cores: int, ranks: int) -> dict[str, str]:
    """Return the variables that limit each of a host's ranks to its share of the cores."""
    share = max(1, cores // ranks)
    return {
        "OMP_NUM_THREADS": str(share),
        # By default Inductor starts a process per core, at most 32, for every rank.
        "TORCHINDUCTOR_COMPILE_THREADS": str(min(32, share)),
    }


def _start_fork_server(job: Job | str, folder: Path) -> None:
    os.environ[lifeline.SCRATCH] = str(folder)
    record_fork_server_failure(None)
    preloaded = [*_PRELOADED, JOBS[job] if isinstance(job, str) else job.__module__]
    if job in JOBS and job != BANDWIDTH:
        # It is half of torch's import, and an optimizer or FSDP2 imports it in any case.
        preloaded.insert(-1, "torch._dynamo")
    _choose_folder_for_sockets(folder)
    multiprocessing.set_forkserver_preload(preloaded)
    enclosure = lifeline.create_cgroup(os.environ[MARK])
    if enclosure is not None:
        os.environ[lifeline.CGROUP] = str(enclosure)
    forkserver.ensure_running()
    if enclosure is not None:
        lifeline.join_cgroup(enclosure, forkserver._forkserver._forkserver_pid)  # type: ignore[attr-defined]


def _choose_folder_for_sockets(folder: Path) -> None:
    """Let multiprocessing use our folder, or one in /tmp if ours is too long for a socket's path.

    It has no folder of its own, which it would want to remove after ours. Its semaphores are named after ours.
    """
    configuration = multiprocessing.current_process()._config  # type: ignore[attr-defined]
    configuration["semprefix"] = f"/{folder.name}"  # by which `scratch.remove` finds them
    is_short = len(os.fsencode(folder)) <= _FOLDER_BYTES
    configuration["tempdir"] = str(folder if is_short else scratch.make("/tmp"))

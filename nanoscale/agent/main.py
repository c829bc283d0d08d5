"""From the start of the agent to its end: what the launcher orders, one thing after the other.

torch is loaded twice at the same time: here, for PyTorch's elastic agent, and in a fork server, of
which every rank is then a copy that costs milliseconds instead of seconds. Both stay for further attempts.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import tempfile
from multiprocessing import forkserver, util
from types import FrameType

from nanoscale.agent.attempt import attempt
from nanoscale.agent.facts import facts
from nanoscale.agent.link import Link
from nanoscale.channel import BANDWIDTH, TRAINING, Message
from nanoscale.devices import cores
from nanoscale.lifeline import end_group
from nanoscale.ports import ReservedPort
from nanoscale.versions import nanoscale_version
from nanoscale.worker import JOBS, Job

_PRELOADED = ["nanoscale.agent.deaf", "nanoscale.worker", "torch"]

_LONGEST_FOLDER = 75
"""in bytes: the path of a socket may have 107, of which multiprocessing takes 32"""

_PASSED_UP = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)


def main(link: Link, job: Job | None = None) -> int:
    """Serve the launcher until it says "quit".

    Args:
        job: what each rank does, a function that can be pickled; by default what the launcher orders.
    """
    _lead_a_group()
    _pass_signals_up(link)
    link.open()
    link.send("hello", nanoscale=nanoscale_version())
    port = None
    last: object = None
    while (order := link.next_order())["kind"] != "quit":
        if order["kind"] == "prepare":
            last = None
            gc.collect()  # so that the last attempt's store no longer listens
            port = _reserve(port, order["master_port"])
            _prepare(link, order, port, job or order["job"])
        elif order["kind"] == "launch":
            last = attempt(link, order, job or order.get("job", TRAINING))  # noqa: F841 - its store serves the other hosts' ranks
    end_group(os.getpid())  # the fork server, which may still be loading torch
    link.send("bye")
    link.close()
    return 0


def _reserve(held: ReservedPort | None, wanted: int | None) -> ReservedPort | None:
    """The port for the ranks to meet at, should this be the first host; None where it is taken."""
    if held is not None:
        held.close()
    try:
        return ReservedPort(wanted or 0)
    except OSError:
        return None


def _prepare(link: Link, order: Message, port: ReservedPort | None, job: Job | str) -> None:
    """Take the job's environment, begin to load torch, and meanwhile say what this host is like."""
    os.environ.update(order["environment"])
    if order["slots"] and "OMP_NUM_THREADS" not in order["environment"]:
        os.environ["OMP_NUM_THREADS"] = str(max(1, cores() // order["slots"]))
    link.expect_beats(order["silence_s"])
    if order["will_launch"]:
        _start_fork_server(job)
    link.send("facts", **facts(order, port.number if port else None))


def _lead_a_group() -> None:
    """So that the group holds nothing but the job, and can be ended as one."""
    if os.getpgid(0) != os.getpid():
        os.setpgid(0, 0)


def _pass_signals_up(link: Link) -> None:
    """SLURM tells the tasks of a job, not its launcher, that it is to be preempted."""

    def tell(number: int, _frame: FrameType | None) -> None:
        link.send_later("signal", number=number)

    for number in _PASSED_UP:
        signal.signal(number, tell)


def _start_fork_server(job: Job | str) -> None:
    os.environ["NANOSCALE_AGENT_PID"] = str(os.getpid())
    os.environ["TORCH_MP_PARALLEL_START"] = "1"
    preloaded = [*_PRELOADED, JOBS[job] if isinstance(job, str) else job.__module__]
    if job != BANDWIDTH:
        # It is half of torch's import, and building an optimizer or FSDP2 imports it in any case.
        preloaded.insert(-1, "torch._dynamo")
    _choose_folder_for_sockets()
    multiprocessing.set_forkserver_preload(preloaded)
    forkserver.ensure_running()


def _choose_folder_for_sockets() -> None:
    """multiprocessing's own, which is made once; in /tmp where TMPDIR is too long for a socket's path."""
    said = tempfile.gettempdir()
    if len(os.fsencode(said)) > _LONGEST_FOLDER:
        tempfile.tempdir = "/tmp"
    util.get_temp_dir()
    tempfile.tempdir = said

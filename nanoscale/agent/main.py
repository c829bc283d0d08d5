"""From the start of the agent to its exit code.

torch is loaded twice at the same time: here, for PyTorch's elastic agent, and in a fork server, of
which every rank is then a copy that costs milliseconds instead of seconds.
"""

from __future__ import annotations

import multiprocessing
import os
import shutil
import signal
import sys
import traceback
from multiprocessing import forkserver, util
from pathlib import Path
from types import FrameType

from nanoscale import worker
from nanoscale.agent.host import Host, available_gib, oom_kills
from nanoscale.agent.watch import Watch
from nanoscale.lifeline import die_with
from nanoscale.runs import failure
from nanoscale.runs.directory import RunDirectory
from nanoscale.runs.failure import Evidence, RankFailure
from nanoscale.worker import Job

# torch._dynamo is half of torch's import, and building an optimizer or DDP imports it in any case.
_PRELOADED = ["nanoscale.worker", "torch", "torch._dynamo"]

COMPLETED, FAILED, STOPPED = 0, 1, 75

_STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)


class Stop:
    """The request to stop: while there are no ranks it ends the agent, later it is passed on."""

    def __init__(self) -> None:
        self.requested = False
        self.has_ranks = False

    def listen(self) -> None:
        for number in _STOP_SIGNALS:
            signal.signal(number, self._handle)

    def _handle(self, _number: int, _frame: FrameType | None) -> None:
        self.requested = True
        if not self.has_ranks:
            shutil.rmtree(util.get_temp_dir(), ignore_errors=True)  # the fork server's socket
            os._exit(STOPPED)


def main(run_dir: Path | str, job: Job | None = None) -> int:
    """Run this host's ranks to their end; 0 completed, 75 stopped when asked to, 1 failed.

    Args:
        run_dir: the run directory, with launch.json and the frozen configuration.
        job: what each rank does, a function that can be pickled; by default the training job.
    """
    stop = Stop()
    stop.listen()
    _die_with_launcher()
    _start_fork_server(job)
    run = RunDirectory(Path(run_dir).absolute())
    host = Host.of(run)
    killed_before = oom_kills()
    watch = Watch(run, host, stop)
    try:
        code = _run_ranks(run, host, watch, stop, job)
    except Exception as error:
        traceback.print_exc()
        own = RankFailure.of(error, rank=None, local_rank=None, host=host.name)
        watch.failures.append(own)
        code = FAILED
    if code == FAILED:
        evidence = Evidence(oom_kills() - killed_before, available_gib())
        failure.write(run, failure.digest(run, host.attempt, watch.failures, evidence))
    return code


def be_rank(run_dir: Path, job: Job | None) -> str:
    """What a copy of the fork server does.

    After a failure the process ends at once: what is left to destroy could wait for lost peers.
    """
    try:
        return worker.main(run_dir, job)
    except BaseException as error:
        traceback.print_exc()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(worker.exit_code(error))


def _die_with_launcher() -> None:
    launcher = os.environ.get("NANOSCALE_LAUNCHER_PID")
    if launcher is not None:  # absent where somebody starts an agent by hand
        die_with(int(launcher), group=os.getpid())


def _start_fork_server(job: Job | None) -> None:
    os.environ["NANOSCALE_AGENT_PID"] = str(os.getpid())
    os.environ["TORCH_MP_PARALLEL_START"] = "1"
    training = "nanoscale.train.job" if job is None else job.__module__
    multiprocessing.set_forkserver_preload([*_PRELOADED, training])
    forkserver.ensure_running()


def _run_ranks(run: RunDirectory, host: Host, watch: Watch, stop: Stop, job: Job | None) -> int:
    from nanoscale.agent.elastic import elastic_agent

    agent = elastic_agent(run, host, be_rank, (run.path, job), watch.look)
    stop.has_ranks = True
    result = agent.run()
    if watch.ended_by_stop:
        return STOPPED
    if result.is_failed():
        return FAILED
    return STOPPED if "stopped" in result.return_values.values() else COMPLETED

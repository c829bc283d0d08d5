"""The first import of the ranks' fork server: its signals, its end, and no garbage collection while it loads.

SLURM sends TERM to every process of a step when a job is preempted. Without their fork server, ranks that save
and stop regularly would count as lost. The fork server exits by itself if the agent was killed. Then it cleans
up, as remaining ranks do: they may have been killed as well. If an import fails, the agent needs its files.

The fork server collects no garbage: that would take a fifth of the time in which torch is loaded. A rank does,
but never searches what was loaded before it started, and so never copies the pages of it.
"""

import atexit
import gc
import os
import signal
import sys
from contextlib import suppress
from types import TracebackType

from nanoscale.processes.lifeline import clean_up

_RANK_SIGNALS = (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)


def _clean_up(pid: int = os.getpid()) -> None:
    if os.getpid() == pid:  # ranks are copies of it
        clean_up(os.getpgid(0), lost=True)


def _fail(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Record the error of an import, which ends this process, for the agent."""
    atexit.unregister(_clean_up)
    sys.__excepthook__(kind, error, trace)
    with suppress(Exception):  # the import of this module may be what fails
        from nanoscale.agent.rank import record_fork_server_failure

        record_fork_server_failure(error)


def _prepare_rank() -> None:
    sys.excepthook = sys.__excepthook__
    gc.freeze()
    gc.enable()
    for number in _RANK_SIGNALS:
        signal.signal(number, signal.SIG_DFL)


gc.disable()
for number in _RANK_SIGNALS:
    signal.signal(number, signal.SIG_IGN)
os.register_at_fork(after_in_child=_prepare_rank)
atexit.register(_clean_up)
sys.excepthook = _fail

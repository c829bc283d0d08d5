"""The first import of the ranks' fork server, which must outlive signals for the ranks.

SLURM sends TERM to every process of a step when a job is preempted. Without their fork server, ranks that save
and stop regularly would count as lost. The fork server exits by itself only if the agent was killed. Then it
cleans up, as remaining ranks do: they may have been killed as well.
"""

import atexit
import os
import signal

from nanoscale.processes.lifeline import clear_up

_MEANT_FOR_RANKS = (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)


def _clear_up(pid: int = os.getpid()) -> None:
    if os.getpid() == pid:  # ranks are copies of it
        clear_up(os.getpgid(0), lost=True)


def _hear_again() -> None:
    for number in _MEANT_FOR_RANKS:
        signal.signal(number, signal.SIG_DFL)


for number in _MEANT_FOR_RANKS:
    signal.signal(number, signal.SIG_IGN)
os.register_at_fork(after_in_child=_hear_again)
atexit.register(_clear_up)

"""Loaded first by the fork server of the ranks: it must outlive signals that are meant for the ranks.

SLURM sends TERM to every process of a step when a job is preempted. Without their fork server, ranks that
save and stop in good order would count as lost. The fork server ends by itself only where the agent was killed.
Then it clears up, as ranks do that are left: they may have been killed as well.
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

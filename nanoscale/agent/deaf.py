"""Loaded first by the fork server of the ranks: it must outlive signals that are meant for the ranks.

SLURM sends TERM to every process of a step when a job is preempted. Without their fork server, ranks that
save and stop in good order would count as lost.
"""

import os
import signal

_MEANT_FOR_RANKS = (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)


def _hear_again() -> None:
    for number in _MEANT_FOR_RANKS:
        signal.signal(number, signal.SIG_DFL)


for number in _MEANT_FOR_RANKS:
    signal.signal(number, signal.SIG_IGN)
os.register_at_fork(after_in_child=_hear_again)

"""Measure the restart of a training of two nodes after the SIGKILL of a worker.

    python tests/cluster/restarts.py [TIMES]

The nodes are network namespaces of this machine with a real sshd each (tests/cluster/nodes.py), which takes
root. There is a checkpoint after every step. Measured is from the signal to the end of the first step after it.
"""

from __future__ import annotations

import os
import signal
import statistics
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.cluster.launches import LONG, TINY, Launch, back_after, hostfile, interrupt
from tests.cluster.nodes import Nodes

TIMES = 20


def measure(times: int = TIMES) -> list[float]:
    """Return the seconds of each restart, the two nodes' ranks struck in turn."""
    with tempfile.TemporaryDirectory() as name, Nodes(Path(name) / "nodes") as nodes:
        folder = Path(name)
        hosts = hostfile(folder, "n1 slots=1", "n2 slots=1")
        granted = f"launcher.max_restarts={times}"
        launch = Launch(nodes, folder, "train", *TINY, *LONG, "--hostfile", hosts, granted)
        launch.trains(3)
        found = []
        for number in range(times):
            (pid,) = launch.ranks(f"n{number % 2 + 1}")
            found.append(back_after(launch, lambda pid=pid: os.kill(pid, signal.SIGKILL)))
        interrupt(launch)
        launch.must_end(130)
        return found


def main() -> None:
    found = measure(int(sys.argv[1]) if sys.argv[1:] else TIMES)
    print("  ".join(f"{seconds:.2f} s" for seconds in found))
    print(
        f"{len(found)} restarts: median {statistics.median(found):.2f} s, longest {max(found):.2f} s"
    )


if __name__ == "__main__":
    main()

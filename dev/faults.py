"""Measure what becomes of a training in each kind of failure, and write docs/faults.md: `make faults`.

Runs tests/cluster/test_faults.py, which needs root, and tests/cluster/restarts.py. Nothing is written if a
test fails.
"""

from __future__ import annotations

import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil
import restarts

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "faults.md"
HEAD = """# What happens when something fails

Whatever fails, everything of the job has ended everywhere within about ten seconds, the command ends with an
exit code that says so, and the screen and `failure.json` name the first cause: the rank or the host, its
traceback where there is one, what it means and what to do. An agent on every host minds that host's ranks. It
tells the launcher at once when one of them raises, dies or stays stopped, and the launcher, which alone
decides, waits for a better explanation only while ranks say nothing but that they lost another one; then it
has all agents end their ranks. Launcher and agents hear each other every second. Who hears nothing for
`launcher.lost_after_s` (5 s) takes the other for lost: the launcher ends the job on the other hosts, an agent
ends its own ranks, so nothing lives on behind a network that is down. Where an agent was lost and its host
still answers, a second short command over the same way ends what the agent may have left there.

A process that a rank has started ends with the job even if it has left the rank's session or process group
(`setsid`, a daemon), as long as it still carries the job's mark, `NANOSCALE_JOB`, in its environment. Agents
end such processes when they end; ranks and their fork server do so when their agent was killed. A process that
has cleared its environment and left the session as well ends with the job only where the agent may make a
cgroup: on Linux 5.14 or later, with a cgroup (version 2) that is delegated to the user, as under
`systemd-run --user --scope -p Delegate=yes`. Processes of other users are never touched. If launcher, agent,
ranks and the fork server of a host are all killed at the same moment, nothing is left there that could end a
process in another session. Temporary files and semaphores of an agent that was killed are removed by its ranks,
or by the next agent on that host. `python dev/kills.py` kills a training at random instants and shows that
nothing of it is left, that no checkpoint is lost, and that the resumed run ends with the same weights.

After that the run goes on from its newest whole checkpoint: by `nanoscale resume RUN`, or by itself with
`launcher.max_restarts=N`.

Measured by `make faults` on {date}: two nodes with a rank each and a login node, all of them network
namespaces of one machine with {cores} cores and {memory:.0f} GiB, connected by a bridge, with a real sshd
each; a checkpoint after every step. *Ended* is from the failure, or where it was there before from the start
of the command, until the command has ended and nothing of the job runs anywhere. The fault is on the second
node, n2, unless it says otherwise.

| fault | ended | processes left | steps lost | exit code | what is shown |
|---|---|---|---|---|---|
"""
TAIL = """
With `launcher.max_restarts`, after the SIGKILL of a worker: back to training, with a step trained, within
10 s in {within} of {times} times; median {median:.1f} s, longest {longest:.1f} s.
"""


def rows() -> list[dict[str, Any]]:
    """What the tests measured."""
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder) / "rows.json"
        tests = [sys.executable, "-m", "pytest", "tests/cluster/test_faults.py", "-k", "not page"]
        environment = {**os.environ, "NANOSCALE_FAULT_ROWS": str(target)}
        subprocess.run(tests, check=True, cwd=ROOT, env=environment)
        return list(json.loads(target.read_text()))


def render(measured: list[dict[str, Any]], times: list[float]) -> str:
    """The page."""
    machine = {"cores": os.cpu_count(), "memory": psutil.virtual_memory().total / 2**30}
    head = HEAD.format(date=time.strftime("%Y-%m-%d"), **machine)
    tail = TAIL.format(
        within=sum(seconds <= 10 for seconds in times),
        times=len(times),
        median=statistics.median(times),
        longest=max(times),
    )
    return head + "".join(map(_line, measured)) + tail


def _line(row: dict[str, Any]) -> str:
    code, lost = row["code"], row["lost_steps"]
    cells = (
        row["fault"],
        f"{row['ended_s']:.1f} s",
        str(row["left"]),
        "–" if lost is None else str(lost),
        str(code) if code >= 0 else signal.Signals(-code).name,
        row["shown"].replace("|", "\\|"),
    )
    return f"| {' | '.join(cells)} |\n"


if __name__ == "__main__":
    PAGE.write_text(render(rows(), restarts.measure()))

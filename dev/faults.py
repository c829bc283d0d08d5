"""Measure what happens in each kind of failure, and write it into docs/faults.md: `make faults`.

Runs tests/cluster/test_faults.py and tests/cluster/restarts.py, which need root. Nothing is written if a test
fails. Only the part of the page between its two comments is replaced.
"""

from __future__ import annotations

import json
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "faults.md"
LIMIT_S = 10.0
"""The longest time from a failure to the end of everything, on an idle machine, that the page promises."""
BEGIN, END = "<!-- measured by make faults -->\n", "<!-- end of the measurements -->\n"
HEAD = """
Measured by `make faults` on {date}, with two nodes with one rank each and a login node. All of them are
network namespaces of one machine with {cores} cores and {memory:.0f} GiB, connected by a bridge, each with a
real sshd. There is a checkpoint after every step. *Ended* is the time from the failure until the command has
ended and nothing of the job runs anywhere; if the failure was there before, it is the time from the start of
the command. The fault is on the second node, n2, unless the row names another one.

| fault | ended | processes left | steps lost | exit code | what is shown |
|---|---|---|---|---|---|
"""
TAIL = """
With `launcher.max_restarts`, after the SIGKILL of a worker, the job trained the next step within 10 s in
{within} of {times} cases; the median is {median:.1f} s, the longest {longest:.1f} s.

"""


def rows() -> list[dict[str, Any]]:
    """Return the rows that the tests measured."""
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder) / "rows.json"
        tests = [sys.executable, "-m", "pytest", "tests/cluster/test_faults.py", "-k", "not page"]
        tests += ["-m", "cluster"]  # also tests that are left out elsewhere
        environment = {**os.environ, "NANOSCALE_FAULT_ROWS": str(target)}
        subprocess.run(tests, check=True, cwd=ROOT, env=environment)
        measured = list(json.loads(target.read_text()))
    if late := [row["fault"] for row in measured if row["ended_s"] > LIMIT_S]:
        sys.exit(f"took more than {LIMIT_S:g} s to end: {', '.join(late)}")
    return measured


def restart_times() -> list[float]:
    """Return the seconds of each measured restart."""
    command = [sys.executable, "tests/cluster/restarts.py"]
    done = subprocess.run(command, check=True, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    return [float(seconds) for seconds in re.findall(r"([\d.]+) s", done.stdout.splitlines()[0])]


def render(page: str, measured: list[dict[str, Any]], times: list[float]) -> str:
    """Return the page with other measurements."""
    before, rest = page.split(BEGIN)
    _, after = rest.split(END)
    machine = {"cores": os.cpu_count(), "memory": psutil.virtual_memory().total / 2**30}
    head = HEAD.format(date=time.strftime("%Y-%m-%d"), **machine)
    tail = TAIL.format(
        within=sum(seconds <= 10 for seconds in times),
        times=len(times),
        median=statistics.median(times),
        longest=max(times),
    )
    return before + BEGIN + head + "".join(map(_line, measured)) + tail + END + after


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
    PAGE.write_text(render(PAGE.read_text(), rows(), restart_times()))

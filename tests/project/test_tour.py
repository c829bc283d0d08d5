"""The lines of README that launch on one machine, typed as they are written, with real ranks on CPUs.

The stand-in for `recipe=tiny` is the model of `debug`, with 200 steps. Ctrl-C interrupts the run `first`
after a few of them, as README says to, and the next line resumes it.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.project.test_command_lines import ROOT, lines

TINY = "defaults:\n  - debug\n  - _self_\ntrain:\n  steps: 200\n  eval_every: 0\n"
LAUNCHES = re.compile(
    r"nanoscale (resume first|train recipe=(tiny|debug))\b(?!.*(parallel=4d|--hostfile))"
)
FIRST = re.compile(r"resume first|run\.name=first")
LIMIT_S = 120.0


@pytest.mark.exhaustive
def test_the_tour_of_the_readme_trains(tmp_path: Path) -> None:
    (tmp_path / "recipes").mkdir()
    (tmp_path / "recipes" / "tiny.yaml").write_text(TINY)
    tour = [line for line in dict.fromkeys(lines(ROOT / "README.md")) if LAUNCHES.match(line)]
    if find_spec("deepspeed") is None:
        tour = [line for line in tour if "deepspeed" not in line]
    assert tour[:4] == [
        "nanoscale train recipe=tiny run.name=first",
        "nanoscale resume first",
        "nanoscale resume first parallel.dp=2 parallel.tp=2 zero=stage3",
        "nanoscale resume first train.steps=2400",
    ]
    for line in tour:
        before = _trained(tmp_path)
        began = time.monotonic()
        code = _run(line, tmp_path)
        seen = f"{line}: {code} after {time.monotonic() - began:.1f} s, {_trained(tmp_path)} steps"
        if FIRST.search(line):
            assert code == 130 and _trained(tmp_path) >= before + 3, seen
        else:
            assert code == 0, seen


def _run(line: str, here: Path) -> int:
    """The exit code of a line; Ctrl-C stops the run `first` after three steps."""
    arguments = [sys.executable, "-m", "nanoscale", *shlex.split(line)[1:]]
    environment = {**os.environ, "DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": ""}
    before, until = _trained(here), time.monotonic() + LIMIT_S
    with (here / "output").open("ab") as output:
        process = subprocess.Popen(
            arguments, cwd=here, env=environment, stdout=output, stderr=output
        )
        try:
            while process.poll() is None:
                assert time.monotonic() < until, (line, (here / "output").read_text()[-2000:])
                if FIRST.search(line) and _trained(here) >= before + 3:
                    process.send_signal(signal.SIGINT)
                    return process.wait(LIMIT_S)
                time.sleep(0.05)
            return process.returncode
        finally:
            if process.poll() is None:
                process.terminate()
                process.wait(LIMIT_S)


def _trained(here: Path) -> int:
    """The last step that the run `first` has trained; 0 before any."""
    metrics = here / "runs" / "first" / "metrics.jsonl"
    if not metrics.is_file():
        return 0
    text = metrics.read_text().splitlines()
    return int(json.loads(text[-1])["step"]) if text else 0

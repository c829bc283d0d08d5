"""The lines of README and docs that launch on one machine, typed as they are written, with real ranks on CPUs.

The stand-in for `recipe=tiny` is the model of `debug`, with 200 steps. Ctrl-C interrupts the run `first`
after a few of them, as README says to, and the next line resumes it. The other lines of README and the lines of
docs train in the folder of stand-ins of test_command_lines.py, until they have trained three steps.
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

from tests.project.test_command_lines import PAGES, ROOT, here, lines, stand_ins, type_page

__all__ = ["here", "stand_ins"]

TINY = "defaults:\n  - debug\n  - _self_\ntrain:\n  steps: 200\n  eval_every: 0\n"
LAUNCHES = re.compile(
    r"nanoscale (resume first|train recipe=(tiny|debug))\b(?!.*(parallel=4d|--hostfile))"
)
FIRST = re.compile(r"resume first|run\.name=first")
LIMIT_S = 240.0


@pytest.mark.timeout(1800)  # each command has its own limit
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
    first = tmp_path / "runs" / "first"
    for line in tour:
        before = _trained(first)
        began = time.monotonic()
        code = _run(shlex.split(line)[1:], tmp_path, first if FIRST.search(line) else None)
        seen = f"{line}: {code} after {time.monotonic() - began:.1f} s, {_trained(first)} steps"
        if FIRST.search(line):
            assert code == 130 and _trained(first) >= before + 3, seen
        else:
            assert code == 0, seen


DRY = {
    "--hostfile": "needs hosts with sshd: tests/cluster/test_launch.py launches on some",
    "nanoscale submit": "needs SLURM: tests/cluster/test_submit.py submits to one",
    "parallel=4d": "needs 16 ranks: tests/train/test_equivalence.py trains the layout",
}
"""parts of lines that stop at --dry-run here, and why"""


TRAINS = re.compile(r"nanoscale (train|resume)\b")
LAUNCHING = [page for page in PAGES if any(map(TRAINS.match, lines(page)))]


@pytest.mark.timeout(1800)  # each command has its own limit
@pytest.mark.exhaustive
@pytest.mark.parametrize("page", LAUNCHING, ids=lambda page: page.name)
def test_the_other_lines_that_launch_train(
    page: Path, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs: list[Path] = []

    def launch(line: str, arguments: list[str]) -> bool:
        is_in_the_tour = page.name == "README.md" and LAUNCHES.match(line)
        if is_in_the_tour or not TRAINS.match(line) or any(part in line for part in DRY):
            return False
        if arguments[0] == "resume":  # the run of the line before
            words = ["resume", str(runs[-1]), *arguments[2:]]
        else:
            runs.append(here / "trained" / f"{page.stem}-{len(runs)}")
            words = [*arguments, "run.root=trained", f"run.name={runs[-1].name}"]
        before = _trained(runs[-1])
        code = _run(words, here, runs[-1])
        assert code in (0, 130) and _trained(runs[-1]) >= before + 3, (line, code, _output(here))
        return True

    type_page(page, here, monkeypatch, launch)


def _run(words: list[str], here: Path, stop: Path | None) -> int:
    """Run a command and return its exit code; Ctrl-C stops the run in the folder `stop` after three steps."""
    arguments = [sys.executable, "-m", "nanoscale", *words]
    environment = {**os.environ, "DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": ""}
    before, until = _trained(stop) if stop else 0, time.monotonic() + LIMIT_S
    with (here / "output").open("ab") as output:
        process = subprocess.Popen(
            arguments, cwd=here, env=environment, stdout=output, stderr=output
        )
        try:
            while process.poll() is None:
                assert time.monotonic() < until, (words, _output(here))
                if stop and _trained(stop) >= before + 3:
                    process.send_signal(signal.SIGINT)
                    return process.wait(LIMIT_S)
                time.sleep(0.05)
            return process.returncode
        finally:
            if process.poll() is None:
                process.terminate()
                process.wait(LIMIT_S)


def _output(here: Path) -> str:
    return (here / "output").read_text()[-2000:]


def _trained(run: Path) -> int:
    """Return the last step that a run has trained; 0 before any."""
    metrics = run / "metrics.jsonl"
    if not metrics.is_file():
        return 0
    text = metrics.read_text().splitlines()
    return int(json.loads(text[-1])["step"]) if text else 0

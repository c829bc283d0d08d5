"""Plant faults into the ranks of small trainings, and count how often the first cause is named right.

    python dev/first_causes.py [REPETITIONS] [PATTERN]

Without a pattern the table of docs/faults.md is written.

A row is right if failure.json names the rank that was struck, its diagnosis has the words that this fault of
this rank must give, the command ends at most 10 s after the limit of a collective, and no process of the
training is left.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import psutil

LIMIT_S = 6.0
"""launcher.collective_timeout_s of the trainings."""
ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "faults.md"
BEGIN, END = "<!-- measured by dev/first_causes.py -->\n", "<!-- end of the first causes -->\n"
HEAD = """
Measured on {date} on one machine with two cores, `launcher.collective_timeout_s={limit:g}`. *Right* counts the
repetitions in which the first cause was named, the command ended within 10 s after the limit, and no process
was left. Numbers of lines are left out.

| layout | fault | right | what failure.json says |
|---|---|---|---|
"""
LAYOUTS = {
    "dp 2": "parallel.dp=2",
    "dp 4": "parallel.dp=4",
    "tp 2 · dp 2": "parallel.tp=2 parallel.dp=2",
    "cp 2 · dp 2": "parallel.cp=2 parallel.dp=2",
    "tp 2 · pp 2": "parallel.tp=2 parallel.pp=2 parallel.dp=1 train.micro_batch=2",
    "pp 2 · dp 2": "parallel.pp=2 parallel.dp=2 train.micro_batch=2",
    "ep 2 · dp 4": "model.experts=4 parallel.ep=2 parallel.dp=4",
    "dp 4, ZeRO 3": "parallel.dp=4 zero=stage3",
}
WAITED, OTHERS = "rank {} did not arrive", "different collectives: rank {} at "


@dataclass(frozen=True)
class Fault:
    """A fault, and what the diagnosis of the rank `rank` must say."""

    layout: str
    planted: str
    rank: int
    says: str = WAITED

    @property
    def name(self) -> str:
        return f"{self.layout}: {self.planted}"


FAULTS = (
    Fault("dp 2", "hang forward 1 3", 1),
    Fault("dp 2", "spin forward 1 3", 1),
    Fault("dp 2", "hang data 1 3", 1),
    Fault("dp 2", "hang evaluation 1 4", 1),
    Fault("dp 2", "hang save 1 4", 1),
    Fault("dp 2", "hang disk 1 4", 1, ".distcp"),
    Fault("dp 2", "hang join 1 0", 1, "before it joined"),
    Fault("dp 2", "kill backward 1 3", 1, "SIGKILL"),
    Fault("dp 2", "skip collective 1 3", 1, OTHERS + "parallel/ddp.py"),
    Fault("dp 4", "hang backward 2 3", 2),
    Fault("dp 4", "spin data 3 3", 3),
    Fault("dp 4", "stop forward 1 3", 1, "was stopped"),
    Fault("dp 4", "kill forward 2 3", 2, "SIGKILL"),
    Fault("dp 4", "skip collective 2 3", 2, OTHERS + "parallel/ddp.py"),
    Fault("dp 4", "order collective 2 3", 2, OTHERS + "train/step_log.py"),
    Fault("dp 4", "shape collective 1 3", 1, OTHERS + "parallel/process_group.py"),
    Fault("dp 4, ZeRO 3", "hang forward 2 3", 2),
    Fault("dp 4, ZeRO 3", "spin backward 1 3", 1),
    Fault("tp 2 · dp 2", "hang forward 2 3", 2),
    Fault("tp 2 · dp 2", "spin backward 1 3", 1),
    Fault("tp 2 · dp 2", "kill forward 3 3", 3, "SIGKILL"),
    Fault("cp 2 · dp 2", "hang forward 1 3", 1),
    Fault("cp 2 · dp 2", "spin backward 2 3", 2),
    Fault("tp 2 · pp 2", "hang forward 3 3", 3),
    Fault("tp 2 · pp 2", "spin forward 2 3", 2),
    Fault("tp 2 · pp 2", "hang backward 1 3", 1),
    Fault("tp 2 · pp 2", "kill forward 3 3", 3, "SIGKILL"),
    Fault("tp 2 · pp 2", "raise forward 2 3", 2, "raised an exception"),
    Fault("pp 2 · dp 2", "hang backward 2 3", 2),
    Fault("pp 2 · dp 2", "hang data 0 3", 0),
    Fault("ep 2 · dp 4", "hang forward 1 3", 1),
    Fault("ep 2 · dp 4", "spin backward 3 3", 3),
)


def run(fault: Fault, folder: Path) -> tuple[bool, float, str]:
    """Train with the fault; return whether its cause was named, the seconds to the end, and its diagnosis."""
    words = [
        *(
            "recipe=debug",
            "train.steps=9",
            "train.log_every=1",
            "launcher.device=cpu",
            "launcher.threads=1",
        ),
        *("train.eval_every=4", "checkpoint.every=4", "run.name=r", "parallel.virtual_stages=1"),
        *(f"launcher.collective_timeout_s={LIMIT_S:g}", f"run.root={folder}"),
        *LAYOUTS[fault.layout].split(),
    ]
    paths = [str(ROOT / "dev" / "planted"), str(ROOT)]
    mark = folder.name
    environment = {
        **os.environ,
        "PLANTED_FAULT": fault.planted,
        "PYTHONPATH": ":".join(paths),
        "MARK": mark,
    }
    command = [sys.executable, "-m", "nanoscale", "train", *words]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    ended = time.time()
    logs = [log.read_text() for log in folder.glob("r/logs/attempt-1/**/*.err")]
    struck = re.search(r"PLANTED ([\d.]+)", "".join(logs))
    try:
        cause = json.loads((folder / "r" / "failure.json").read_text())
    except OSError:
        return False, 0.0, f"no failure: exit code {done.returncode}, {done.stderr[-300:]}"
    left = sum(_has_mark(process, mark) for process in psutil.process_iter())
    seconds = ended - float(struck[1]) if struck else 999.0
    said = f"rank {cause['rank']}: {cause['diagnosis']}"
    says = fault.says.format(fault.rank) in cause["diagnosis"]
    right = cause["rank"] == fault.rank and says and left == 0 and seconds < LIMIT_S + 10
    return right, seconds, said + (f"; {left} processes are left" if left else "")


def _has_mark(process: psutil.Process, mark: str) -> bool:
    try:
        return process.environ().get("MARK") == mark
    except psutil.Error:
        return False


def main(repetitions: int, pattern: str) -> int:
    """Run the faults whose names match; return how often a cause was not named right."""
    rows, wrong = [], 0
    for fault in FAULTS:
        if not re.search(pattern, fault.name):
            continue
        rights = []
        for _ in range(repetitions):
            with tempfile.TemporaryDirectory() as name:
                right, seconds, said = run(fault, Path(name))
            rights.append(right)
            print(
                f"{'right' if right else 'WRONG'}  {fault.name}: {said} [{seconds:.1f} s]",
                flush=True,
            )
        wrong += rights.count(False)
        said = re.sub(r"/\S*/(?=[\w.]+)", "…/", said).replace("|", "\\|")
        said = re.sub(r"(?<=\.py):\d+", "", said)
        rows.append(
            f"| {fault.layout} | {_in_words(fault)} | {sum(rights)} of {repetitions} | {said} |\n"
        )
    if not pattern:
        _write("".join([HEAD.format(date=time.strftime("%Y-%m-%d"), limit=LIMIT_S), *rows, "\n"]))
    return wrong


def _in_words(fault: Fault) -> str:
    kind, place, rank, step = fault.planted.split()
    return f"rank {rank}: {kind} in {place}" + (f", step {step}" if int(step) else "")


def _write(table: str) -> None:
    before, rest = PAGE.read_text().split(BEGIN)
    PAGE.write_text(before + BEGIN + table + END + rest.split(END)[1])


if __name__ == "__main__":
    sys.exit(main(int((sys.argv[1:] or ["1"])[0]), (sys.argv[2:] or [""])[0]) > 0)

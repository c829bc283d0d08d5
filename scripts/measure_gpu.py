"""Memory and speed of real training on one GPU against the plan: models, batches, sequences, modes, precisions.

Usage: measure_gpu.py [FOLDER] [MINUTES]

Trains every job of a grid for a few steps, each by `nanoscale train`, asks `nanoscale runs report` for the plan
beside what was measured, and prints a row for each and the mean and largest errors; the same as JSON into
FOLDER (.) as DATE-gpu.json. A job that does not fit by the plan, or ends otherwise, is told; none is begun
after MINUTES (8).
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import mean
from typing import Any

STEPS = 10
"""of which the first three warm up"""
COMMAND = [sys.executable, "-m", "nanoscale"]
WHAT = ("memory allocated", "step time")
SAME = (
    f"train.steps={STEPS}",
    "train.log_every=1",
    "scheduler.warmup_steps=1",
    "data=stdlib",
    "checkpoint.at_end=false",
    "train.sample_tokens=0",
)


def grid() -> Iterator[tuple[str, ...]]:
    """The widest variety first: time may not suffice for all."""
    for mode in ("none", "selective", "full"):
        for model, batch, seq in (("gpt2-medium", 8, 1024), ("llama-1b", 2, 4096)):
            yield job(model, batch, seq, mode, "bf16")
    for precision in ("fp32", "fp8"):
        yield job("llama-1b", 2, 2048, "none", precision)
    for batch, seq in ((1, 2048), (4, 2048), (8, 1024), (1, 8192), (4, 8192)):
        yield job("llama-1b", batch, seq, "none", "bf16")
    yield job("llama-3b", 1, 4096, "full", "bf16")
    yield job("llama-3b", 2, 4096, "selective", "bf16")
    yield job("gpt2-xl", 4, 1024, "none", "bf16")
    yield job("llama-8b", 1, 4096, "full", "bf16")


def job(model: str, batch: int, seq: int, mode: str, precision: str) -> tuple[str, ...]:
    return (
        f"recipe={model}",
        f"train.micro_batch={batch}",
        f"train.global_batch={2 * batch}",
        f"train.seq_len={seq}",
        f"parallel.activation_checkpointing={mode}",
        f"precision={precision}",
    )


def main() -> None:
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else ".")
    until = time.monotonic() + 60 * float(sys.argv[2] if len(sys.argv) > 2 else 8)
    rows = []
    with tempfile.TemporaryDirectory() as runs:
        for number, words in enumerate(grid()):
            if time.monotonic() > until:
                print("time is over; the rest of the grid was left out")
                break
            found = measure(Path(runs) / str(number), words)
            print(line(words, found), flush=True)
            if found is not None:
                rows.append({"words": words, **found})
    for what in WHAT:
        errors = [abs(row[what]["error"]) for row in rows if row[what]["error"] is not None]
        if errors:
            print(f"{what}: {len(errors)} jobs, mean {mean(errors):.1%}, largest {max(errors):.1%}")
    target = folder / f"{time.strftime('%Y-%m-%d')}-gpu.json"
    target.write_text(json.dumps(rows, indent=1) + "\n")
    print(f"written to {target}")


def measure(run: Path, words: tuple[str, ...]) -> dict[str, Any] | None:
    """The plan beside what was measured; None where the job did not come to its end."""
    place = (f"run.root={run.parent}", f"run.name={run.name}")
    if call("train", *words, *SAME, *place).returncode:
        return None
    report = json.loads(call("runs", "report", str(run), "--json").stdout)
    environment = json.loads((run / "environment.json").read_text())
    compared = {row["what"]: row for row in report["against_plan"]}
    return {**{what: compared[what] for what in WHAT}, "environment": environment}


def call(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*COMMAND, *words], capture_output=True, text=True)


def line(words: tuple[str, ...], found: dict[str, Any] | None) -> str:
    name = " ".join(word.partition("=")[2] for word in words)
    if found is None:
        return f"{name:44} did not train"
    return f"{name:44} " + "  ".join(_cells(found[what]) for what in WHAT)


def _cells(row: dict[str, Any]) -> str:
    figures = (row["predicted"], row["measured"])
    shown = [f"{'–' if one is None else format(one, '.3f'):>8}" for one in figures]
    return " ".join([*shown, f"{'' if row['error'] is None else format(row['error'], '+.1%'):>7}"])


if __name__ == "__main__":
    main()

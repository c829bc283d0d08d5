"""Compare the losses of two versions bit for bit: `python dev/same_losses.py OLD [NEW]`.

OLD and NEW are folders of checkouts or names of commits; without NEW it is this checkout. The recipe `debug`
trains 20 steps in fp32 on CPUs, in ten layouts, with the code of each version. Prints a line for each layout,
and exits with 1 if a loss or a gradient norm differs in any bit. A change that moves or renames code must exit
with 0. Takes about five minutes on two idle cores.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

SOURCE = Path(__file__).parents[1]
COMMON = (
    "recipe=debug",
    "precision=fp32",
    "checkpoint=none",
    "launcher.device=cpu",
    "launcher.threads=1",
    "train.steps=20",
    "train.log_every=1",
    "train.eval_every=0",
    "train.sample_tokens=0",
    "logger=none",
    "run.root=runs",
)
LAYOUTS = {
    "one process": "",
    "dp 2, ZeRO 1": "parallel.dp=2 zero=stage1",
    "dp 2, ZeRO 2": "parallel.dp=2 zero=stage2",
    "dp 4, ZeRO 3": "parallel.dp=4 zero=stage3",
    "tp 2": "parallel.tp=2",
    "dp 2 · tp 2, ZeRO 3": "parallel.dp=2 parallel.tp=2 zero=stage3",
    "pp 2, 1f1b": "parallel.pp=2",
    "pp 2, interleaved": "parallel.pp=2 parallel.schedule=interleaved-1f1b parallel.virtual_stages=2",
    "cp 2, ring": "parallel.cp=2 parallel.cp_method=ring",
    "cp 2, ulysses": "parallel.cp=2 parallel.cp_method=ulysses",
}

Curve = list[tuple[int, float, float]]


def check_out(version: str, folder: Path) -> Path:
    """Return the root of a version: the folder itself, or the files of the commit, written to `folder`."""
    if (Path(version) / "nanoscale").is_dir():
        return Path(version).resolve()
    archive = subprocess.run(
        ["git", "-C", str(SOURCE), "archive", version], check=True, capture_output=True
    )
    with tarfile.open(fileobj=io.BytesIO(archive.stdout)) as files:
        files.extractall(folder, filter="data")
    return folder


def train(version: Path, overrides: str, folder: Path) -> Curve:
    """Return step, loss and gradient norm of each step that a version trains.

    Raises:
        RuntimeError: the training failed; the message has its output.
    """
    folder.mkdir(parents=True)
    command = [
        sys.executable,
        "-m",
        "nanoscale",
        "train",
        *COMMON,
        "run.name=a",
        *overrides.split(),
    ]
    env = {**os.environ, "PYTHONPATH": str(version)}
    job = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, check=False)
    if job.returncode:
        raise RuntimeError(f"{version}, {overrides}:\n{job.stdout}{job.stderr}")
    lines = (folder / "runs/a/metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [(r["step"], r["loss"], r["grad_norm"]) for r in map(json.loads, lines)]


def difference(old: Curve, new: Curve) -> str | None:
    """Describe the first step at which two curves differ; None if they agree in every bit."""
    if len(old) != len(new):
        return f"{len(old)} and {len(new)} steps"
    for before, after in zip(old, new, strict=True):
        if before != after:
            return f"step {before[0]}: {before[1:]} and {after[1:]}"
    return None


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("old", metavar="OLD")
    parser.add_argument("new", metavar="NEW", nargs="?", default=str(SOURCE))
    arguments = parser.parse_args()
    different = 0
    with tempfile.TemporaryDirectory(prefix="same-losses-") as temporary:
        folder = Path(temporary)
        versions = [
            check_out(version, folder / name)
            for name, version in (("old", arguments.old), ("new", arguments.new))
        ]
        for number, (layout, overrides) in enumerate(LAYOUTS.items()):
            old, new = (
                train(version, overrides, folder / f"{number}-{which}")
                for which, version in enumerate(versions)
            )
            problem = difference(old, new)
            different += problem is not None
            print(f"{layout:24} {problem or f'{len(old)} steps are equal'}", flush=True)
    return 1 if different else 0


if __name__ == "__main__":
    sys.exit(main())

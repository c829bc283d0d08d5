"""A batch script of SLURM, run by a real bash with a stand-in for the launcher and for scontrol."""

from __future__ import annotations

import json
import os
import subprocess
import time
from pathlib import Path
from typing import Any

from nanoscale.config.schema import Cluster, Config, Launcher, Run, Slurm

LIMIT_S = 120
STAND_IN = Path(__file__).parent / "stand_in_launcher.py"
NASTY = 'it\'s "$(touch x)" `touch x`; touch x & %j # é'


def config(root: Path = Path("/runs"), python: str | None = None, **slurm: Any) -> Config:
    return Config(
        run=Run(name="run", root=str(root)),
        launcher=Launcher(name="slurm", device="cpu", devices=2, slurm=Slurm(**slurm)),
        cluster=Cluster(python=python),
    )


class Batch:
    """A batch script that runs."""

    def __init__(self, folder: Path, script: str, *words: str, **environment: str) -> None:
        self.folder = folder
        folder.mkdir(exist_ok=True)
        (folder / "bin").mkdir(exist_ok=True)
        scontrol = folder / "bin" / "scontrol"
        scontrol.write_text(
            f'#!/bin/bash\necho "$*" >>{folder}/scontrol\n'
            '[ "$1" = requeue ] || echo "   PreemptEligibleTime=now PreemptTime=${PREEMPTED:-None}"\n'
        )
        scontrol.chmod(0o755)
        (folder / "script").write_text(script)
        self.process = subprocess.Popen(
            ["bash", folder / "script", *words],
            cwd=folder,
            env={
                "PATH": f"{folder / 'bin'}:{os.environ['PATH']}",
                "STAND_IN_DIR": str(folder),
                "SLURM_JOB_ID": "12",
                **environment,
            },
        )

    def wait_called(self) -> dict[str, Any]:
        deadline = time.monotonic() + LIMIT_S
        while not (self.folder / "called").exists():
            assert time.monotonic() < deadline and self.process.poll() is None
            time.sleep(0.01)
        called: dict[str, Any] = json.loads((self.folder / "called").read_text())
        return called

    def end(self) -> int:
        return self.process.wait(LIMIT_S)

    @property
    def requeued(self) -> bool:
        asked = self.folder / "scontrol"
        return asked.exists() and "requeue 12" in asked.read_text().splitlines()

"""Law 2 through the front door: real signals to a real `nanoscale train`, then `nanoscale resume`
(with forked ranks, as the run that is never stopped)."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from nanoscale.cli.main import run as nanoscale
from nanoscale.runs import events
from nanoscale.runs.directory import RunDirectory
from tests.support.jobs import EXACT, Curve
from tests.support.rows import exhaustive

pytestmark = pytest.mark.usefixtures("forked_ranks")
STEPS = 80
WORDS = [
    "recipe=debug",
    "model.layers=2",
    f"train.steps={STEPS}",
    "parallel.dp=2",
    "zero=stage3",
    "launcher.threads=1",
    "checkpoint.every=10",
    "checkpoint.keep_last=null",
]
LIMIT_S = 120


def curve(run: Path) -> Curve:
    lines = (run / "metrics.jsonl").read_text().splitlines()
    return [{name: json.loads(line)[name] for name in EXACT} for line in lines]


def weights(run: Path) -> dict[str, bytes]:
    """Return the final checkpoint's tensors as bytes; the same layout writes the same tensors per rank."""
    import torch
    import torch.distributed.checkpoint as dcp

    path = run / "checkpoints" / f"step-{STEPS:08d}"
    about = json.loads((path / "manifest.json").read_text())["tensors"]
    state = {
        name: torch.empty(tensor["shape"], dtype=getattr(torch, tensor["dtype"]))
        for name, tensor in about.items()
    }
    dcp.load(state, checkpoint_id=path, no_dist=True)
    return {name: value.numpy().tobytes() for name, value in state.items()}


@pytest.fixture(scope="module")
def never_stopped(tmp_path_factory: pytest.TempPathFactory, forked_ranks: None) -> Path:
    root = tmp_path_factory.mktemp("whole")
    assert nanoscale(["train", *WORDS, f"run.root={root}", "run.name=run"]) == 0
    return root / "run"


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize(
    ("number", "code", "state"),
    [(signal.SIGKILL, -signal.SIGKILL, "running"), exhaustive(signal.SIGTERM, 75, "preempted")],
)
def test_stopped_and_resumed_bit_for_bit(
    tmp_path: Path, never_stopped: Path, number: signal.Signals, code: int, state: str
) -> None:
    run = tmp_path / "run"
    command = [sys.executable, "-m", "nanoscale", "train", *WORDS]
    with (tmp_path / "screen").open("wb") as screen:
        launcher = subprocess.Popen(
            [*command, f"run.root={tmp_path}", "run.name=run"],
            stdout=screen,
            stderr=screen,
            env=os.environ | {"PYTHONPATH": str(Path(__file__).parent.parent.parent)},
        )
        deadline = time.monotonic() + LIMIT_S
        while not (run / "metrics.jsonl").exists() or len(curve(run)) < 11:
            assert launcher.poll() is None and time.monotonic() < deadline
            time.sleep(0.005)
        launcher.send_signal(number)
        assert launcher.wait(LIMIT_S) == code
    assert json.loads((run / "status.json").read_text())["state"] == state
    assert 11 <= len(curve(run)) < STEPS
    assert nanoscale(["resume", str(run)]) == 0
    assert curve(run) == curve(never_stopped)
    assert weights(run) == weights(never_stopped)
    (resumed,) = [e for e in events.read(RunDirectory(run)) if e["kind"] == "resumed"]
    assert resumed["step"] >= 10

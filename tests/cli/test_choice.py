"""`parallel=auto` on real ranks: a chosen layout trains the same model, and other ranks get another layout."""

from __future__ import annotations

import re

import pytest

from nanoscale.cli.main import run as nanoscale
from nanoscale.runs.directory import RunDirectory, read_json
from tests.support.jobs import read_metrics

pytestmark = pytest.mark.usefixtures("forked_ranks")


def train(folder, ranks):
    words = [
        "recipe=debug",
        "parallel=auto",
        "precision=fp64",
        "train.steps=4",
        "train.log_every=1",
    ]
    # One sample a step cannot be divided by dp: tp, pp or cp must be chosen.
    words += ["train.global_batch=1", f"launcher.devices={ranks}", "launcher.threads=1"]
    assert nanoscale(["train", *words, f"run.root={folder}", f"run.name=on-{ranks}"]) == 0
    return RunDirectory(folder / f"on-{ranks}")


@pytest.mark.slow
def test_chosen_layouts_train_the_same_model_and_resume_on_other_ranks(tmp_path, capfd):
    runs = {ranks: train(tmp_path, ranks) for ranks in (1, 4)}
    losses = {ranks: [row["loss"] for row in read_metrics(run)] for ranks, run in runs.items()}
    plan = read_json(runs[4].plan)
    assert plan["layout"]["dp"] == 1
    assert "on 4 × cpu" in plan["choice"]
    assert losses[4] == pytest.approx(losses[1], rel=1e-9)
    capfd.readouterr()
    assert nanoscale(["resume", str(runs[4].path), "--num-gpus", "2", "train.steps=6"]) == 0
    output = "".join(capfd.readouterr())
    assert "launcher.devices: 4 → 2" in output
    assert re.search(r" dp 1 .*\(chosen by the plan\)\n", output)

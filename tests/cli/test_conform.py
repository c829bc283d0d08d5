"""`nanoscale conform` and `train --conform`, from the command line to their exit codes."""

import json

import pytest

from nanoscale.cli.main import run
from nanoscale.view.conformity_text import sentences

WRONG = """
from torch.nn import functional as F

def loss(logits, targets, config):
    return F.cross_entropy(logits, targets, reduction="none") / len(targets) * 64
"""
JOB = ("recipe=debug", "parallel.dp=2", "zero=stage3", "data=random", "launcher.device=cpu")


@pytest.mark.slow
def test_a_right_layout_is_equal(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert run(["conform", *JOB, "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["equal"] and 0 < result["largest"] < 1e-11
    assert result["layout"] == {"dp": 2}
    assert result["resumed"]["first_difference"] is None
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_a_job_whose_loss_is_wrong_is_not_launched(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "hooks.py").write_text(WRONG)
    words = ("hooks.path=hooks.py", "train.objective=hooks", "train.steps=2")
    assert run(["train", *JOB, *words, "--conform"]) == 1
    error = capsys.readouterr().err
    assert "dp 2, ZeRO 3: differs from one process. In step 1, the loss is 2 times" in error
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("factor", "meaning"),
    [
        (
            1 / 2,
            "A sum over 2 ranks is missing, or a division by 2 is done twice (the degree of dp)",
        ),
        (3.0, "A sum over 3 ranks is done twice, or a division by 3 is missing"),
        (0.7, "the gradient of embed.weight is 0.7 times as large as in one process"),
    ],
)
def test_a_factor_is_explained_also_if_it_is_no_degree(factor, meaning):
    first = {
        "step": 1,
        "what": "gradient",
        "parameter": "embed.weight",
        "relative": 1.0,
        "factor": factor,
    }
    result = {"first_difference": first, "resumed": None, "layout": {"dp": 2}, "zero_stage": 0}
    (sentence, _) = sentences(result | {"steps": 3, "left_out": []})
    assert meaning in sentence


def test_deepspeed_is_refused_with_the_backend_to_type(capsys):
    refused = ["conform", "recipe=debug", "backend=deepspeed"]
    assert run([*refused, "launcher.device=cpu", "--json"]) == 2
    (violation,) = json.loads(capsys.readouterr().out)["error"]["violations"]
    assert violation["suggestions"] == ["backend=native"]

"""`nanoscale conform` and `train --conform`, from the command line to their exit codes."""

import json

import pytest

from nanoscale.cli.main import run
from nanoscale.cli.measure import conform
from nanoscale.config.schema import Model
from nanoscale.config.translation.miniature import small_hf_model
from nanoscale.view.conformity_text import card_cells, sentences
from tests.support import hf_models

pytestmark = pytest.mark.usefixtures("forked_ranks")
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
    assert result["layout"] == {"dp": 3} and result["findings"] == []
    assert result["restored"]["first_difference"] is None
    assert result["resumed"]["first_difference"] is None
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_a_job_whose_loss_is_wrong_is_not_launched(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "hooks.py").write_text(WRONG)
    words = ("hooks.path=hooks.py", "train.objective=hooks", "train.steps=2")
    assert run(["train", *JOB, *words, "--conform"]) == 1
    error = capsys.readouterr().err
    assert "dp 3, ZeRO 3: differs from one process. In step 1, the loss is 3 times" in error
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("changes", "meaning"),
    [
        ({"factor": 1 / 2}, "A sum over 2 ranks is missing, or a division by 2 is done twice (the degree"),
        ({"factor": 3.0}, "A sum over 3 ranks is done twice, or a division by 3 is missing"),
        ({"factor": 1 / 4}, "A sum over 4 micro batches is missing, or a division by 4 is done twice (the"),
        ({"factor": 0.7}, "the gradient of embed.weight is 0.7 times as large as in one process"),
        ({"factor": 0.0}, "embed.weight is 0 in the layout, so no gradient reaches this parameter"),
        ({"factor": float("nan")}, "embed.weight is not a finite number in the layout"),
        ({"what": "loss"}, "look at the forward pass"),
        ({"what": "loss", "step": 2}, "look at the code between the steps, such as a callback"),
        ({"what": "metric", "parameter": "eval_loss"}, "the logged eval_loss differs by 1 of its size"),
    ],
)  # fmt: skip
def test_a_difference_is_explained_also_if_its_factor_is_no_degree(changes, meaning):
    first = {
        "step": 1,
        "begin": 1,
        "what": "gradient",
        "parameter": "embed.weight",
        "relative": 1.0,
    }
    first |= {"factor": None, **changes}
    result = {"first_difference": first, "layout": {"dp": 2}, "zero_stage": 0, "findings": ["more"]}
    result |= {"steps": 4, "saved_step": 2, "left_out": [], "restored": None, "resumed": None}
    result |= {"compiled": False, "micro_batches": 4}
    (sentence, finding, last) = sentences(result)
    assert meaning in sentence and finding == "dp 2, ZeRO 0: more" and "Not run: " in last


def test_deepspeed_is_refused_with_the_backend_to_type(capsys):
    refused = ["conform", "recipe=debug", "backend=deepspeed"]
    assert run([*refused, "launcher.device=cpu", "--json"]) == 2
    (violation,) = json.loads(capsys.readouterr().out)["error"]["violations"]
    assert violation["suggestions"] == ["backend=native"]


@pytest.mark.slow
def test_what_transformers_cannot_divide_is_refused_before_ranks_start(tmp_path, capsys):
    hf_models.save("gpt_oss", tmp_path)
    words = [f"model.name={tmp_path}", "model.init_from=null", "data=random", "train.steps=4"]
    words += ["train.seq_len=32", "train.sample_tokens=0", "launcher.devices=2", "parallel.tp=2"]
    assert run(["conform", "model=hf", "launcher.device=cpu", *words]) == 2
    assert "no plan that divides its layers" in capsys.readouterr().err


# --- the card of a model --------------------------------------------------------------------------

PLANTED = """
from torch.nn import functional as F

from nanoscale.parallel import tensor

tensor.partial_grad = tensor.replicated_grad

def loss(logits, targets, config):
    if config.parallel.cp_method == "ulysses":
        raise RuntimeError("planted in a row")
    return F.cross_entropy(logits, targets, reduction="none")
"""


@pytest.mark.slow
def test_a_card_has_a_number_or_a_sentence_for_each_layout(capsys):
    assert run(["conform", "--card", "qwen3", "--json"]) == 0
    card = json.loads(capsys.readouterr().out)
    assert card["equal"] and [*card["rows"]] == [*conform._ROWS, "resume elsewhere"]
    for row, cell in card["rows"].items():
        assert (cell["largest"] or 0) < 1e-5 and (cell["largest"] is None) == bool(
            cell["message"]
        ), row
    exact = {row: card["rows"][row] for row in ("documents", "tp", "pp", "cp, ring", "cp, ulysses")}
    assert all(cell["largest"] < 1e-12 for cell in exact.values())
    assert card["rows"]["ep"]["message"] == "the model has no experts"


@pytest.mark.slow
def test_a_card_finds_a_gradient_that_tp_does_not_sum_and_names_a_failed_row(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    rows = {row: conform._ROWS[row] for row in ("cp, ulysses", "tp", "cp, ring")}
    monkeypatch.setattr(conform, "_ROWS", rows)
    (tmp_path / "hooks.py").write_text(PLANTED)
    words = ("hooks.path=hooks.py", "train.objective=hooks")
    assert run(["conform", "--card", "qwen3", *words]) == 1
    _, failed, tp, ring, resume = capsys.readouterr().out.splitlines()
    assert "failed" in failed and "RuntimeError: planted in a row" in failed
    assert "differs" in tp and "q_norm.weight" in tp
    assert "e-1" in ring and "e-1" in resume


LOST = """
from torch.nn import functional as F

from nanoscale.checkpoint.hf.base_folder import Base
from nanoscale.models.mixers import recurrence

arrange, visibility = Base.arrange, recurrence._visibility

def arrange_trained(self, trained):
    entries, names = arrange(self, trained)
    return {name: it for name, it in entries.items() if name in names}, names

def visibility_of_all(documents, chunk):
    reads, *others = visibility(documents, chunk)
    return reads | True, *others

Base.arrange, recurrence._visibility = arrange_trained, visibility_of_all

def loss(logits, targets, config):
    return F.cross_entropy(logits, targets, reduction="none")
"""


@pytest.mark.slow
def test_a_card_finds_a_tensor_that_an_export_loses_and_a_state_that_no_document_ends(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    rows = {row: conform._ROWS[row] for row in ("documents", "export")}
    monkeypatch.setattr(conform, "_ROWS", rows)
    (tmp_path / "hooks.py").write_text(LOST)
    words = ("hooks.path=hooks.py", "train.objective=hooks")
    assert run(["conform", "--card", "nemotron_h", *words]) == 1
    _, documents, export, _ = capsys.readouterr().out.splitlines()
    assert "differs" in documents and "mtp.norm.weight is not the same" in export


@pytest.mark.parametrize(
    ("name", "message", "suggestions"),
    [
        ("qwen33", "is not a model_type of a causal language model", ["--card qwen3", "--card qwen3_5"]),
        ("{folder}", "config.json cannot be read", []),
        ("{folder}/gone", "is neither a folder nor a possible name of a model", []),
    ],
)  # fmt: skip
def test_a_card_of_no_model_is_refused(tmp_path, name, message, suggestions, capsys):
    assert run(["conform", "--card", name.format(folder=tmp_path), "--json"]) == 2
    (violation,) = json.loads(capsys.readouterr().out)["error"]["violations"]
    assert message in violation["message"]
    assert [it for it in violation["suggestions"] if it in suggestions] == suggestions


def test_a_card_says_what_was_not_tried_and_how_a_layout_differs():
    refused = {"tp": {"refused": "why"}}
    cells = card_cells(refused | {"pp": {"failed": "rank 0 failed\nRuntimeError: no"}})
    assert cells["tp"] == {"outcome": "refused", "largest": None, "message": "why"}
    assert cells["pp"]["message"] == "rank 0 failed: RuntimeError: no"
    assert cells["resume elsewhere"]["outcome"] == "unverified"
    resumed = {"equal": True, "largest": 1e-16, "resumed": {"largest": 2e-16}}
    assert card_cells({"tp": resumed})["resume elsewhere"]["largest"] == 2e-16
    lost = {**resumed, "resumed": {"largest": None}}
    assert card_cells({"tp": resumed, "pp": lost})["resume elsewhere"]["outcome"] == "differs"


def test_a_small_model_keeps_each_kind_of_layer():
    kinds = ["mamba", "mamba", "moe", "attention", "moe", "mamba"]
    document = {"layers_block_type": kinds, "hidden_size": 4096, "moe_layers": [0, 2, 5]}
    document |= {"per_layer": {"03": {"hidden_size": 512}, "4": "dropped"}, "vocab_size": 9}
    document |= {"eos_token_id": 99, "intermediate_size": [9999] * 6}
    small = small_hf_model(Model(source="hf", hf_config=document), stages=2)
    assert small.layers == 4 and small.hidden == 64
    expected = {"layers_block_type": ["mamba", "mamba", "moe", "attention"], "hidden_size": 64}
    expected |= {
        "moe_layers": [0, 2],
        "per_layer": {"3": {"hidden_size": 64}},
        "intermediate_size": [48] * 4,
        "vocab_size": 9,
        "eos_token_id": 63,
    }
    assert small.hf_config == expected

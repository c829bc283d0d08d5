"""Objectives of answers: the same losses as a plain loop in every layout, exact resumes, one reference."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from nanoscale.checkpoint.store import list_checkpoints
from nanoscale.common.errors import UserError
from nanoscale.config.resolved import ResolvedConfig
from nanoscale.config.rules.layout import row_step
from nanoscale.config.schema import (
    Backend,
    Checkpoint,
    Data,
    DataSource,
    Lora,
    Optimizer,
    PhaseSettings,
    Train,
)
from nanoscale.config.token_files import BAD, row_tokens
from nanoscale.data.dataset import open_data
from nanoscale.data.sampler import sample_indices
from nanoscale.models.initialization import initialize
from nanoscale.models.preferences import Objective
from nanoscale.models.transformer import Transformer
from nanoscale.runs.directory import RunDirectory
from nanoscale.train.job import make_engine
from nanoscale.view.job_text import settings
from tests.support import hf_models
from tests.support.jobs import (
    SAMPLES,
    SEQ_LEN,
    SHAPE,
    ZBV,
    Curve,
    StopBefore,
    assert_same_weights,
    make_config,
    make_run,
    read_metrics,
    resumed_at,
    saving_config,
    train,
)
from tests.support.rows import exhaustive
from tests.support.token_files import write_indexed

LENGTHS = [
    (9, 14),
    (17, 4),
    (12, 12),
    (7, 20),
    (5, 10),
    (16, 17),
    (11, 3),
    (8, 8),
    (13, 6),
    (10, 15),
]
"""Tokens of both documents of each pair; the fourth has one that is longer than a row."""
TRAINED = [number for number in range(len(LENGTHS)) if number != 3]
BETA = 0.5
HELD_OUT = 5
"""Samples of an evaluation. Their baseline in kto is above 0, and they do not fill the last batch."""
VALUES = ("loss", "grad_norm", "preferred", "margin", "eval_loss", "eval_preferred", "eval_margin")


def write_pairs(folder: Path, bad: int = 1) -> list[tuple[np.ndarray, np.ndarray]]:
    """Write a file of pairs with marks of answers, of rejected ones `bad`; return tokens and targets of each
    document."""
    dice = np.random.default_rng(7)
    lengths = [length for pair in LENGTHS for length in pair]
    documents = [dice.integers(0, SHAPE.vocab, length) for length in lengths]
    answers = [np.arange(length) >= min(2, length - 2) for length in lengths]
    for name in ("tokens", "held"):
        write_indexed(folder / name, documents)
        marks = [each * np.uint8((1, bad)[i % 2]) for i, each in enumerate(answers)]
        (folder / f"{name}.answers").write_bytes(np.concatenate(marks).tobytes())
    return [
        (document, np.where(marks, document, -100))
        for document, marks in zip(documents, answers, strict=True)
    ]


def with_objective(
    config: ResolvedConfig, folder: Path, objective: str, **more: Any
) -> ResolvedConfig:
    steps = {"steps": 5, "eval_every": 2, "eval_samples": HELD_OUT}
    changes = steps | {"objective": objective, "preference_beta": BETA, "micro_batch": 2} | more
    changes |= {"undesirable_weight": 0.7} if objective == "kto" else {}
    data = Data(
        "megatron",
        str(folder / "tokens"),
        str(folder / "held"),
        valid_fraction=0.0,
        loss_on="answers",
    )
    return replace(config, train=replace(config.train, **changes), data=data)


def plain_loop(
    documents: list[tuple[np.ndarray, np.ndarray]], objective: str, model: torch.nn.Module
) -> list[dict[str, float]]:
    """Train as the papers write it: each document alone, without padding."""

    def likelihood(document: int) -> tuple[torch.Tensor, int]:
        return of_tokens(*documents[document])

    def of_tokens(*arrays: np.ndarray) -> tuple[torch.Tensor, int]:
        tokens, targets = map(torch.tensor, arrays)
        logits = model(tokens[None, :-1])
        logits = getattr(logits, "logits", logits)[0]
        return -F.cross_entropy(logits, targets[1:], reduction="sum"), int((targets[1:] >= 0).sum())

    def unmatched(document: int) -> torch.Tensor:
        """The question with the answer of the document before it, cut to a row."""
        other, length = single[single.index(document) - 1], SEQ_LEN + 1
        first, start = (int((documents[it][1] >= 0).argmax()) for it in (document, other))
        tokens = np.append(documents[document][0][:first], documents[other][0][start:])[:length]
        targets = np.where(np.arange(len(tokens)) < first, -100, tokens)
        return of_tokens(tokens, targets)[0]

    def rated(numbers: Any) -> tuple[torch.Tensor, dict[str, float]]:
        with torch.no_grad():
            baseline = sum(unmatched(it) - others[it] for it in numbers) / len(numbers)
        signs = [1 - 2 * (it % 2) for it in numbers]
        margins = torch.stack([
            BETA * sign * (likelihood(it)[0] - reference[it] - max(0, baseline))
            for it, sign in zip(numbers, signs, strict=True)
        ])  # fmt: skip
        weights = torch.tensor([1.0 if sign > 0 else 0.7 for sign in signs])
        figures = {
            "preferred": float((margins > 0).double().mean()),
            "margin": margins.mean().item(),
        }
        return (weights * (1 - torch.sigmoid(margins))).mean(), figures

    def losses(pairs: Any) -> tuple[torch.Tensor, dict[str, float]]:
        if objective == "kto":
            return rated(pairs)
        losses, margins = [], []
        for pair in pairs:
            (chosen, n), (rejected, m) = (likelihood(2 * pair + side) for side in (0, 1))
            if objective == "dpo":
                ratio = (chosen - reference[2 * pair]) - (rejected - reference[2 * pair + 1])
                margins.append(BETA * ratio)
                losses.append(-torch.log(torch.sigmoid(BETA * ratio)))
            else:
                p, q = (chosen / n).exp(), (rejected / m).exp()
                margins.append(torch.log(p / (1 - p)) - torch.log(q / (1 - q)))
                losses.append(-chosen / n - BETA * torch.log(torch.sigmoid(margins[-1])))
        preferred = sum(float(margin > 0) for margin in margins) / len(margins)
        margin = sum(margin.item() for margin in margins) / len(margins)
        return torch.stack(losses).mean(), {"preferred": preferred, "margin": margin}

    with torch.no_grad():
        reference = [likelihood(number)[0] for number in range(len(documents))]
        single = [it for it, (tokens, _) in enumerate(documents) if len(tokens) <= SEQ_LEN + 1]
        others = {number: unmatched(number) for number in single}
    trained = single if objective == "kto" else TRAINED
    groups = [
        {"params": [p for p in model.parameters() if p.ndim > 1]},
        {"params": [p for p in model.parameters() if p.ndim == 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.95), weight_decay=0.1)
    curve, samples_a_step = [], SAMPLES // (1 if objective == "kto" else 2)
    for step in range(5):
        places = np.arange(step * samples_a_step, (step + 1) * samples_a_step)
        numbers = [trained[i] for i in sample_indices(3, places, len(trained))]
        loss, figures = losses(numbers)
        optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5).item()
        for group in optimizer.param_groups:
            group["lr"] = RATES[step]
        optimizer.step()
        record = {"loss": loss.item(), "grad_norm": norm, **figures}
        if step % 2:
            with torch.no_grad():
                held, figures = losses(trained[:HELD_OUT])
            record |= {"eval_loss": held.item()}
            record |= {f"eval_{name}": value for name, value in figures.items()}
        curve.append(record)
    return curve


RATES = [1e-2 * factor for factor in (1 / 3, 2 / 3, 1, 0.55, 0.1)]


def assert_equal(found: Curve, expected: list[dict[str, float]], tolerance: float = 1e-9) -> None:
    assert len(found) == len(expected)
    for record, numbers in zip(found, expected, strict=True):
        own = {name: record[name] for name in VALUES if name in record}
        assert own == pytest.approx(numbers, rel=tolerance, abs=tolerance), record["step"]


def our_model() -> Transformer:
    model = Transformer(SHAPE).double()
    initialize(model, SHAPE, seed=3)
    return model


LAYOUTS: list[tuple[dict[str, Any], int]] = [
    ({"pp": 2, "tp": 2}, 0),
    ({"cp": 2, "dp": 2, "cut": True}, 1),
]
# `cut`: rows have much padding, which is cut off before the model.


@pytest.mark.slow
@pytest.mark.parametrize(
    ("objective", "degrees", "stage"),
    [("dpo", *layout) for layout in LAYOUTS]
    + [
        ("orpo", {"tp": 2, "cut": True}, 0),
        ("kto", {"pp": 2, "tp": 2}, 0),
        ("kto", {"cp": 2, "dp": 2}, 1),
    ]
    + [exhaustive(name, ZBV, 1) for name in ("dpo", "kto")]
    + [exhaustive("kto", {"cp": 2, "cp_method": "ulysses", "tp": 2}, 3)],
    ids=str,
)
def test_every_layout_equals_a_plain_loop(
    tmp_path: Path, objective: str, degrees: dict[str, Any], stage: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    documents = write_pairs(tmp_path, BAD if objective == "kto" else 1)
    is_cut, degrees = "cut" in degrees, {it: degrees[it] for it in degrees if it != "cut"}
    config = make_config(
        tmp_path, dp=degrees.get("dp", 1), stage=stage, parallel=degrees, micro_batch=2
    )
    config = with_objective(config, tmp_path, objective)
    assert row_step(config) == (None if config.parallel.pp > 1 else 64)
    if is_cut:  # no document is longer than a row
        monkeypatch.setitem(globals(), "TRAINED", [*range(len(LENGTHS))])
        shape, long = replace(config.model, max_seq_len=128), replace(config.train, seq_len=128)
        config = replace(config, model=shape, train=long)
    run = make_run(config)
    train(run, config)
    expected = plain_loop(documents, objective, our_model())
    assert pytest.approx([record["lr"] for record in read_metrics(run)]) == RATES
    assert_equal(read_metrics(run), expected)


def test_the_highest_margin_is_kept(tmp_path: Path) -> None:
    write_pairs(tmp_path)
    best = Checkpoint(keep_best=1, best_metric="eval_margin")
    config = with_objective(make_config(tmp_path, checkpoint=best), tmp_path, "dpo")
    run = make_run(config)
    train(run, config)
    margins = {it["eval_margin"]: it["step"] for it in read_metrics(run) if "eval_margin" in it}
    (kept,) = (step for _, step in list_checkpoints(run.checkpoints)[-1].manifest["best"])
    assert len(margins) > 1 and kept == margins[max(margins)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("objective", "dp", "degrees", "stage"),
    [
        ("dpo", 1, {"pp": 2}, 1),
        exhaustive("dpo", 2, {}, 3),
        exhaustive("kto", 1, {"pp": 2}, 1),
        ("kto", 2, {}, 3),
    ],
)
def test_deepspeed_equals_a_plain_loop(
    tmp_path: Path, objective: str, dp: int, degrees: dict[str, Any], stage: int
) -> None:
    documents = write_pairs(tmp_path, BAD if objective == "kto" else 1)
    config = make_config(
        tmp_path,
        dp=dp,
        stage=stage,
        parallel=degrees,
        precision="fp32",
        backend=Backend("deepspeed"),
    )
    config = with_objective(config, tmp_path, objective)
    run = make_run(config)
    train(run, config)
    assert_equal(read_metrics(run), plain_loop(documents, objective, our_model()), 1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("objective", ["dpo", exhaustive("orpo"), exhaustive("kto")])
def test_any_model_of_transformers_equals_a_plain_loop(tmp_path: Path, objective: str) -> None:
    from transformers import AutoModelForCausalLM

    documents = write_pairs(tmp_path, BAD if objective == "kto" else 1)
    hf_models.save("gpt_neox", tmp_path / "hf")
    config = make_config(tmp_path, dp=2, stage=3, model=hf_models.shape_of(tmp_path / "hf"))
    config = with_objective(config, tmp_path, objective)
    run = make_run(config)
    train(run, config)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype=torch.float64).eval()
    assert_equal(read_metrics(run), plain_loop(documents, objective, model))


@pytest.mark.slow
def test_adapters_learn_the_same_in_every_layout(tmp_path: Path) -> None:
    write_pairs(tmp_path)
    runs = []
    for name, degrees in (("one", {}), ("two", {"tp": 2})):
        lora = Lora(rank=4, targets=["wq", "down"])
        config = make_config(tmp_path, parallel=degrees, lora=lora)
        config = with_objective(config, tmp_path, "dpo", micro_batch=4)
        runs.append(make_run(config, name))
        train(runs[-1], config)
    one, two = map(read_metrics, runs)
    assert_equal(one, [{name: it[name] for name in VALUES if name in it} for it in two])
    assert one[0]["loss"] == pytest.approx(np.log(2)), "the adapters begin with the base model"


@pytest.mark.slow
def test_a_resume_reads_the_first_reference(tmp_path: Path) -> None:
    write_pairs(tmp_path)
    config = with_objective(saving_config(tmp_path, dp=2, stage=3), tmp_path, "dpo")
    whole = make_run(config, "whole")
    train(whole, config)
    run = make_run(config)
    train(run, config, StopBefore(3))
    elsewhere = saving_config(tmp_path, parallel={"pp": 2, "tp": 2})
    other = RunDirectory(shutil.copytree(run.path, tmp_path / "other", symlinks=True))
    lost = RunDirectory(shutil.copytree(run.path, tmp_path / "lost", symlinks=True))
    train(run, config)
    assert resumed_at(run) == [3]
    pick = [{name: it[name] for name in VALUES if name in it} for it in read_metrics(whole)]
    assert [{name: it[name] for name in VALUES if name in it} for it in read_metrics(run)] == pick
    assert_same_weights(run, whole)
    train(other, with_objective(elsewhere, tmp_path, "dpo"))
    assert_equal(read_metrics(other), pick)
    np.savez(lost.references, likelihoods=np.zeros((18, 2)), data=np.array("other"))
    with pytest.raises(RuntimeError, match="is of other data"):
        train(lost, config)
    lost.references.write_bytes(b"damaged")
    with pytest.raises(RuntimeError, match="cannot be read"):
        train(lost, config)
    lost.references.unlink()
    with pytest.raises(RuntimeError, match="references.npz is missing"):
        train(lost, config)


def test_samples_are_pairs_that_fit(tmp_path: Path) -> None:
    documents = write_pairs(tmp_path)
    config = with_objective(make_config(tmp_path), tmp_path, "dpo")
    data = open_data(config.data, config.train, SHAPE.vocab)
    assert "1 pair left out" in data.description
    training, held = data.answers()
    assert len(training) == len(held) == len(TRAINED)
    training.references = np.arange(2.0 * len(TRAINED)).reshape(-1, 2)
    batch = training.batch([2, 3])
    assert batch.references is not None
    assert batch.references.tolist() == [[4, 1], [5, -1], [6, 1], [7, -1]] and batch.counted(2) == 2
    for row, document in enumerate([4, 5, 8, 9]):
        tokens, targets = documents[document]
        count = len(tokens) - 1
        assert batch.inputs[row, :count].tolist() == tokens[:-1].tolist()
        assert batch.targets[row].tolist() == targets[1:].tolist() + [-100] * (SEQ_LEN - count)
    with pytest.raises(UserError, match="no pair with answers in at most 3 tokens"):
        open_data(config.data, replace(config.train, seq_len=2), SHAPE.vocab)
    write_indexed(tmp_path / "tokens", [tokens for tokens, _ in documents[:5]])
    marks = tmp_path / "tokens.answers"
    marks.write_bytes(marks.read_bytes()[: sum(len(tokens) for tokens, _ in documents[:5])])
    with pytest.raises(UserError, match="5 documents, which are not pairs"):
        open_data(config.data, config.train, SHAPE.vocab)


def test_an_unmatched_answer_is_of_another_question(tmp_path: Path) -> None:
    """Answers to one question follow each other, also from the end of the file to its start."""
    write_pairs(tmp_path, BAD)
    questions = [1, 1, 2, 2, 1]
    documents = [np.array([question, 10 + i, 20 + i]) for i, question in enumerate(questions)]
    write_indexed(tmp_path / "tokens", documents)
    marks = [np.array([0, mark, mark], np.uint8) for mark in (1, BAD, 1, 1, BAD)]
    (tmp_path / "tokens.answers").write_bytes(np.concatenate(marks).tobytes())
    config = with_objective(make_config(tmp_path), tmp_path, "kto")
    training, _ = open_data(config.data, config.train, SHAPE.vocab).answers()
    batch = training.batch([*range(5)])
    assert batch.references is not None and batch.references[:, 1].tolist() == [1, -1, 1, 1, -1]
    assert batch.unmatched is not None and batch.unmatched.inputs[:, 0].tolist() == questions
    assert batch.unmatched.targets[:, :2].tolist() == [[10 + i, 20 + i] for i in (3, 3, 1, 1, 3)]


def test_certain_answers_have_finite_odds() -> None:
    objective = Objective(Train(objective="orpo", preference_beta=0.5))
    losses = torch.tensor([0.0, 3.0, 2.0, 0.0])
    value, weights = objective.value_and_weights(losses, torch.zeros(4, 3), torch.zeros(4, 2))
    assert value.isfinite() and weights.isfinite().all()
    assert objective.read()[1] == 1, "the first pair alone is preferred"


def test_odds_are_means_over_a_divided_sequence() -> None:
    train, losses = Train(objective="orpo"), torch.tensor([1.0, 3.0, 2.0, 1.5])
    whole, half = Objective(train), Objective(train)
    half.sum_over_sequence = lambda local: 2 * local
    expected = whole.value_and_weights(2 * losses, torch.zeros(4, 6), torch.zeros(4, 2))
    found = half.value_and_weights(losses, torch.zeros(4, 3), torch.zeros(4, 2))
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


def test_a_mixture_of_pairs_keeps_each_pair_together(tmp_path: Path) -> None:
    write_pairs(tmp_path)
    config = with_objective(make_config(tmp_path), tmp_path, "dpo", eval_every=0)
    names = {
        "a": DataSource(str(tmp_path / "tokens"), 2.0),
        "b": DataSource(str(tmp_path / "held"), 1.0),
    }
    data = replace(config.data, path=None, valid_path=None, mixture=names)
    opened = open_data(data, config.train, SHAPE.vocab)
    for number, pairs in enumerate(opened.answers()):
        rows = np.arange(2.0 * len(pairs)).reshape(-1, 2)
        pairs.references = rows + 100 * number
    taken = []
    for rank in (0, 1):
        for batch in opened.train.micro_batches(16, 8, rank, 2, 2):
            assert batch.references is not None
            chosen, rejected = batch.references[:, 0].tolist()
            assert rejected == chosen + 1
            taken.append(chosen)
    phases = {
        "a": PhaseSettings(until=2, weights={"a": 1.0}),
        "b": PhaseSettings(weights={"b": 1.0}),
    }
    changing = open_data(data, replace(config.train, phases=phases), SHAPE.vocab)
    for number, pairs in enumerate(changing.answers()):
        pairs.references = np.full((len(pairs), 2), number)
    for step, source in enumerate((0, 0, 1, 1)):
        (batch,) = changing.train.micro_batches(8 * step, 8, 0, 1, 8)
        assert batch.references is not None and set(batch.references[:, 0]) == {source}
    whole = next(iter(opened.train.micro_batches(16, 8, 0, 1, 8)))
    assert whole.references is not None
    assert whole.references[::2, 0].tolist() == taken


@pytest.mark.parametrize(
    ("changes", "length"),
    [({}, 64), ({"optimizer": Optimizer(qk_clip=100.0)}, 128), ({"precision": "fp32"}, 64)],
    ids=str,
)
def test_the_model_gets_no_padding_beyond_the_longest_row(
    tmp_path: Path, changes: dict[str, Any], length: int
) -> None:
    """Speeds count the tokens of documents alone, and the dry run says how much is padding."""
    write_pairs(tmp_path)
    config = with_objective(make_config(tmp_path, micro_batch=2, **changes), tmp_path, "dpo")
    shape, long = replace(config.model, max_seq_len=128), replace(config.train, seq_len=128)
    config = replace(config, model=shape, train=long)
    engine = make_engine(config, torch.device("cpu"))
    data = open_data(config.data, config.train, SHAPE.vocab)
    (batch, *_) = data.train.micro_batches(0, SAMPLES, 0, 1, 2)
    inputs, targets, _, references = engine._local_batch(batch)
    assert inputs.shape == targets.shape == (2, length) and references is not None
    assert int((targets != -100).sum()) == int((batch.targets != -100).sum())
    lengths = [length - 1 for pair in LENGTHS for length in pair]
    assert row_tokens(config) == pytest.approx(sum(lengths) / len(lengths))
    share = 100 * (1 - sum(lengths) / len(lengths) / 128)
    assert f"{share:.0f}% of rows of 128 tokens" in settings(config)["padding"]

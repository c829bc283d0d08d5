"""Texts with labels (`train.objective=classify`): the losses of transformers' classifier, in every layout."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from nanoscale.checkpoint.hf.export import export
from nanoscale.checkpoint.hf.load_any_model import judge
from nanoscale.checkpoint.store import find_checkpoint
from nanoscale.common.errors import UserError
from nanoscale.config.hf import any_model
from nanoscale.config.hf.shape import as_classifier
from nanoscale.config.resolved import ResolvedConfig
from nanoscale.config.schema import Backend, Checkpoint, Data, Model
from nanoscale.data.batch import IGNORED
from nanoscale.data.dataset import open_data
from nanoscale.models.hf_model import RandomWeights
from tests.support.hf_models import COMMON
from tests.support.jobs import (
    SEQ_LEN,
    make_config,
    make_run,
    read_metrics,
    train,
    trained_and_resumed,
)
from tests.support.rows import exhaustive
from tests.support.token_files import write_indexed

LABELS, END = 5, 3
LENGTHS = (4, 9, 16, 17, 30, 2, 12, 7, 1, 16, 11, 5)
DEEPSPEED = {"backend": Backend("deepspeed"), "precision": "fp32"}
SETTINGS: dict[str, dict[str, Any]] = {
    "bert": COMMON,
    "llama": {**COMMON, "pad_token_id": None, "eos_token_id": 63},
}


def write_texts(folder: Path, *, ends: int | None = END) -> list[tuple[list[int], int]]:
    """Write texts with labels, all with the same last token unless `ends` is None; return them."""
    dice = np.random.default_rng(7)
    texts = [
        ([*dice.integers(4, 60, length).tolist(), *([] if ends is None else [ends])], label)
        for length, label in zip(
            LENGTHS, dice.integers(0, LABELS, len(LENGTHS)).tolist(), strict=True
        )
    ]
    write_indexed(folder / "tokens", [[*text, label] for text, label in texts])
    marks = b"".join(bytes(len(text)) + b"\1" for text, _ in texts)
    (folder / "tokens.answers").write_bytes(marks)
    return texts


def saved(family: str, folder: Path, kind: str = "SequenceClassification") -> Any:
    """Save a model of random weights; return it."""
    import transformers

    torch.manual_seed(0)
    settings: dict[str, Any] = {**SETTINGS[family], "num_labels": LABELS}
    config = transformers.CONFIG_MAPPING[family](**settings)
    name = f"AutoModelFor{kind}" if kind else "AutoModel"
    model = getattr(transformers, name).from_config(config)
    model.save_pretrained(folder)
    return model


def shape_of(folder: Path) -> Model:
    """Return the shape that the launcher makes of a folder."""
    document = as_classifier(json.loads((folder / "config.json").read_text()), LABELS)
    where = {"name": str(folder), "init_from": str(folder), "hf_config": document}
    return Model(source="hf", **where, **any_model.sizes(document))


def job(folder: Path, model: Model, **layout: Any) -> ResolvedConfig:
    config = make_config(folder, model=model, **layout)
    where = {"source": "megatron", "path": str(folder / "tokens"), "valid_fraction": 0.0}
    objective = {"objective": "classify", "labels": LABELS}
    return replace(
        config, data=Data(**where, loss_on="answers"), train=replace(config.train, **objective)
    )


def plain_figures(
    config: ResolvedConfig, texts: list[tuple[list[int], int]]
) -> list[tuple[float, float]]:
    """Train transformers' model in a plain loop on texts that are cut as by its tokenizers; losses and
    accuracies."""
    from transformers import AutoModelForSequenceClassification

    padding = config.model.hf_config["pad_token_id"]
    model = AutoModelForSequenceClassification.from_pretrained(
        config.model.name, dtype=torch.float64, pad_token_id=padding
    ).eval()
    loader = open_data(config.data, config.train, config.model.vocab).train
    matrices = [p for p in model.parameters() if p.ndim > 1]
    vectors = [p for p in model.parameters() if p.ndim == 1]
    groups = [{"params": matrices}, {"params": vectors, "weight_decay": 0.0}]
    update = torch.optim.AdamW(groups, lr=1e-2, betas=(0.9, 0.95), weight_decay=0.1)
    figures, size = [], config.train.global_batch
    for step in range(config.train.steps):
        tokens = torch.full((size, SEQ_LEN), padding)
        mask, labels = torch.zeros_like(tokens), torch.zeros(size, dtype=torch.int64)
        numbers = loader.order(np.arange(step * size, (step + 1) * size))  # type: ignore[union-attr]
        for row, number in enumerate(numbers):
            text, labels[row] = texts[number]
            text = text if len(text) <= SEQ_LEN else [*text[: SEQ_LEN - 1], text[-1]]
            tokens[row, : len(text)], mask[row, : len(text)] = torch.tensor(text), 1
        update.zero_grad()
        found = model(input_ids=tokens, attention_mask=mask, labels=labels)
        found.loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        falling = 0.1 + 0.9 * (1 + np.cos(np.pi * (step - 2) / (config.train.steps - 3))) / 2
        for group in update.param_groups:
            group["lr"] = 1e-2 * ((step + 1) / 3 if step < 2 else falling)
        update.step()
        right = (found.logits.argmax(-1) == labels).double().mean().item()
        figures.append((found.loss.item(), right))
    return figures


LAYOUTS: list[Any] = [
    ("bert", {"dp": 2, "stage": 1}),
    ("llama", {"micro_batch": 1, "parallel": {"tp": 2, "sequence_parallel": False}}),
    exhaustive("bert", {"dp": 2, "stage": 2, **DEEPSPEED}),
]


@pytest.mark.slow
@pytest.mark.parametrize(("family", "layout"), LAYOUTS, ids=str)
def test_every_layout_trains_what_transformers_trains(
    tmp_path: Path, family: str, layout: dict[str, Any]
) -> None:
    texts = write_texts(tmp_path)
    saved(family, tmp_path / "model")
    config = job(tmp_path, shape_of(tmp_path / "model"), **layout)
    run = make_run(config)
    train(run, config)
    losses, accuracies = zip(*plain_figures(config, texts), strict=True)
    tolerance = 1e-3 if "backend" in layout else 1e-9
    assert [it["loss"] for it in read_metrics(run)] == pytest.approx(losses, rel=tolerance)
    assert [it["accuracy"] for it in read_metrics(run)] == pytest.approx(accuracies)


@pytest.mark.slow
@pytest.mark.parametrize("family", [exhaustive("bert"), "llama"])
def test_a_resume_is_exact_and_an_export_predicts(tmp_path: Path, family: str) -> None:
    write_texts(tmp_path)
    saved(family, tmp_path / "model")
    shape = shape_of(tmp_path / "model")
    config = replace(job(tmp_path, shape), checkpoint=Checkpoint(every=3))
    whole = trained_and_resumed(config, 3)

    from transformers import AutoModelForSequenceClassification

    stored = find_checkpoint(whole.checkpoints, None)
    export(stored, config, tmp_path / "out", "fp64", 1 << 30, lambda *_: None)
    first, last = (
        AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float64).eval()
        for folder in (tmp_path / "model", tmp_path / "out")
    )
    padding = shape.hf_config["pad_token_id"]
    assert (last.num_labels, last.config.pad_token_id) == (LABELS, padding)
    data = open_data(config.data, config.train, config.model.vocab)
    batch, _ = next(data.train.valid_batches(8, 0, 1, 8))  # type: ignore[union-attr]
    has_label = batch.targets != IGNORED
    mask = np.flip(np.cumsum(np.flip(has_label, 1), 1), 1)
    tokens = np.where(mask == 1, batch.inputs, padding)
    words = {"input_ids": torch.from_numpy(tokens), "attention_mask": torch.from_numpy(mask.copy())}
    labels = torch.from_numpy(batch.targets[has_label])
    first.config.pad_token_id = padding
    before, after = (model(**words, labels=labels).loss.item() for model in (first, last))
    assert after < before - 0.1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "kind"),
    [("bert", "MaskedLM"), exhaustive("bert", ""), exhaustive("llama", "CausalLM"), ("llama", "")],
)
def test_only_a_head_may_be_missing(tmp_path: Path, family: str, kind: str) -> None:
    """Weights of the head are as in a model that begins with random weights; all others are the folder's."""
    write_texts(tmp_path)
    saved(family, tmp_path / "model", kind)
    shape = shape_of(tmp_path / "model")
    question: dict[str, Any] = {
        "model": shape.__dict__,
        "folder": str(tmp_path / "model"),
        "tp": 1,
        "attention": "",
        "pp": 1,
        "ep": 1,
    }
    assert judge(question)["problem"] is None
    config = replace(job(tmp_path, shape, dp=2, stage=3), checkpoint=Checkpoint(every=1))
    config = replace(config, optimizer=replace(config.optimizer, lr=1e-300))
    run = make_run(config)
    train(run, config)

    from safetensors.torch import load_file

    stored = find_checkpoint(run.checkpoints, None)
    export(stored, config, tmp_path / "out", "fp64", 1 << 30, lambda *_: None)
    begun, ended = (load_file(tmp_path / it / "model.safetensors") for it in ("model", "out"))
    drawn, heads = RandomWeights(shape, config.train.seed, torch.device("cpu")), []
    for name, value in ended.items():
        kept = begun.get(name, begun.get(name.split(".", 1)[1]))
        if kept is None:
            heads.append(name)
            kept = drawn(name, value.shape)
        assert torch.equal(value.float(), kept.float()), name
    assert heads and all(
        "pooler" in name or "classifier" in name or "score" in name for name in heads
    )

    document = {**shape.hf_config, "num_hidden_layers": 3}
    wrong = judge({**question, "model": {**question["model"], "hf_config": document}})
    assert "2." in wrong["problem"] and "is missing" in wrong["problem"]
    document = {**shape.hf_config, "num_hidden_layers": 1}
    wrong = judge({**question, "model": {**question["model"], "hf_config": document}})
    assert "is not one of its parameters" in wrong["problem"]


def test_a_decoder_without_padding_is_refused(tmp_path: Path) -> None:
    saved("llama", tmp_path / "model")
    shape = shape_of(tmp_path / "model")
    assert shape.hf_config["pad_token_id"] == 63
    document = {**shape.hf_config, "pad_token_id": None}
    answer = judge(
        {
            "model": {**shape.__dict__, "hf_config": document},
            "folder": None,
            "tp": 1,
            "attention": "",
            "pp": 1,
            "ep": 1,
        }
    )
    assert "model.hf_config.pad_token_id=0" in answer["problem"]


@pytest.mark.parametrize("ends", [END, None])
def test_a_row_is_a_text_and_its_label(tmp_path: Path, ends: int | None) -> None:
    texts = write_texts(tmp_path, ends=ends)
    saved("bert", tmp_path / "model")
    config = job(tmp_path, shape_of(tmp_path / "model"))
    data = open_data(config.data, config.train, 64)
    batch = data.train.batch(range(len(texts)))  # type: ignore[union-attr]
    for row, (text, label) in enumerate(texts):
        kept = text if len(text) <= SEQ_LEN else [*text[: SEQ_LEN - 1], ends or text[SEQ_LEN - 1]]
        assert batch.inputs[row, : len(kept)].tolist() == kept
        targets = batch.targets[row].tolist()
        assert targets == [IGNORED] * (len(kept) - 1) + [label] + [IGNORED] * (SEQ_LEN - len(kept))
    assert batch.counted() == len(texts)
    cut = sum(len(text) > SEQ_LEN for text, _ in texts)
    assert f"{cut} texts cut" in data.description
    with pytest.raises(UserError, match="holds label 4"):
        open_data(config.data, replace(config.train, labels=4), 64)


def test_random_tokens_have_random_labels(tmp_path: Path) -> None:
    saved("bert", tmp_path / "model")
    config = job(tmp_path, shape_of(tmp_path / "model"))
    data = open_data(Data(source="random"), config.train, 64)
    batch = data.train.batch(range(200))  # type: ignore[union-attr]
    assert (batch.targets[:, :-1] == IGNORED).all()
    assert set(batch.targets[:, -1].tolist()) == set(range(LABELS))

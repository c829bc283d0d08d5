"""Epochs: the samples that the launcher counts are the worker's, and their steps."""

from __future__ import annotations

import json
import shlex
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from nanoscale.cli.main import run as nanoscale
from nanoscale.common.errors import UserError
from nanoscale.config import token_files
from nanoscale.config.composing.compose import compose
from nanoscale.config.resolved import ResolvedConfig
from nanoscale.config.rules import Devices, check
from nanoscale.config.schema import Data, Train
from nanoscale.config.token_files import times_seen, training_samples
from nanoscale.config.values.provenance import Setting
from nanoscale.data import samples
from nanoscale.data.dataset import open_data
from nanoscale.view.job_text import data_warning
from tests.support.token_files import write_indexed

LENGTHS = (700, 90, 40, 300, 1, 12, 500, 200, 33, 64)
CPU = Devices("cpu", 1)


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_indexed("corpus", [[7] * length for length in LENGTHS])


def checked(*words: str) -> ResolvedConfig:
    lines = ("recipe=debug", "data=megatron", "data.path=corpus", *words)
    return check(compose(lines), CPU)


@pytest.mark.parametrize("fraction", [0, 0.01, 0.02, 0.1, 0.2, 0.3, 0.5, 0.9])
@pytest.mark.parametrize("seq_len", [8, 64])
def test_the_count_is_that_of_the_loader(fraction, seq_len):
    config = checked(f"data.valid_fraction={fraction}", f"train.seq_len={seq_len}", "train.steps=3")
    opened = open_data(config.data, config.train, config.model.vocab)
    assert training_samples(config.data, config.train) == len(opened.train)


@pytest.mark.parametrize("fraction", [0, 0.05, 0.3])
def test_the_count_is_that_of_the_loader_of_datatrove(fraction):
    np.full(sum(LENGTHS), 7, "<u2").tofile("corpus.ds")
    np.cumsum(LENGTHS).astype("<u8").tofile("corpus.ds.index")
    words = ("data=datatrove", "data.path=corpus.ds", f"data.valid_fraction={fraction}")
    config = checked(*words, "train.seq_len=8")
    opened = open_data(config.data, config.train, config.model.vocab)
    assert training_samples(config.data, config.train) == len(opened.train)


@pytest.mark.parametrize("fraction", [0, 0.1, 0.5])
@pytest.mark.parametrize("seq_len", [8, 64, 320])
@pytest.mark.parametrize("packed_together", [3, 1 << 20])
def test_whole_documents_are_counted_as_they_are_packed(
    fraction, seq_len, packed_together, monkeypatch
):
    """Whatever the window, in which the last document may be cut."""
    for module in (token_files, samples):
        monkeypatch.setattr(module, "PACKED_TOGETHER", packed_together)
    token_files._count.cache_clear()
    dice = np.random.default_rng(3)
    write_indexed("corpus", [[7] * n for n in (*LENGTHS, *dice.integers(1, 90, 400).tolist())])
    words = (f"data.valid_fraction={fraction}", f"train.seq_len={seq_len}", "data.packing=whole")
    config = checked(*words, "train.steps=3", "model.max_seq_len=4k")
    opened = open_data(config.data, config.train, config.model.vocab)
    assert training_samples(config.data, config.train) == len(opened.train)


@pytest.mark.parametrize("fraction", [0, 0.3])
def test_pairs_and_labels_are_counted_as_they_are_loaded(fraction, tmp_path):
    """Some are too long, and some have no answer."""
    dice = np.random.default_rng(5)
    lengths = dice.integers(1, 40, 60).tolist()
    write_indexed("corpus", [[1] * n for n in lengths])
    marks = [bytes(n) if n % 7 == 0 else bytes(n - 1) + bytes([1 + n % 2]) for n in lengths]
    Path("corpus.answers").write_bytes(b"".join(marks))
    given = {"source": "megatron", "path": str(tmp_path / "corpus"), "valid_fraction": fraction}
    for objective, loss_on in (
        ("dpo", "answers"),
        ("orpo", "all"),
        ("kto", "answers"),
        ("classify", "answers"),
    ):
        data = Data(**given, loss_on=loss_on)  # type: ignore[arg-type]
        labels = 2 if objective == "classify" else None
        train = Train(objective=objective, seq_len=32, labels=labels)  # type: ignore[arg-type]
        assert training_samples(data, train) == len(open_data(data, train, 64).train)


def test_epochs_of_pairs_count_two_rows_each(tmp_path):
    write_indexed("corpus", [[1] * 9] * 20)
    data = Data(source="megatron", path=str(tmp_path / "corpus"), valid_fraction=0, loss_on="all")
    config = checked("train.objective=orpo", "data.valid_fraction=0", "train.steps=null",
                     "train.epochs=2", "data.loss_on=all")  # fmt: skip
    assert training_samples(data, config.train) == 10
    assert config.train.steps == 5 and times_seen(config) == 2


def test_epochs_are_whole_steps():
    # 1940 tokens: 30 samples of 64 tokens, 8 a step
    words = ("data.valid_fraction=0", "train.steps=null")
    for epochs, steps in ((1, 4), (0.5, 2), (2, 8), (2.2, 9)):
        config = checked(*words, f"train.epochs={epochs}")
        assert config.train.steps == steps
        assert times_seen(config) == steps * 8 / 30
    assert times_seen(checked("data.valid_fraction=0", "train.steps=15")) == 4


def test_the_command_line_wins_over_the_recipe():
    Path("mine.yaml").write_text(
        "defaults:\n  - debug\n  - _self_\ntrain: {steps: null, epochs: 2}\n"
    )
    words = ("recipe=./mine.yaml", "data.valid_fraction=0")
    assert checked(*words).train.steps == 8
    by_steps = checked(*words, "train.steps=3").train
    assert (by_steps.steps, by_steps.epochs) == (3, None)
    by_epochs = checked(*words, "train.epochs=1").train
    assert (by_epochs.steps, by_epochs.epochs) == (4, 1.0)
    # a recipe's epochs have no meaning for other data
    assert checked(*words, "data=stdlib", "data.path=null", "train.steps=3").train.epochs is None


@pytest.mark.parametrize(
    "words",
    [
        ["data=stdlib", "data.path=null"],
        ["data.path=null", "data.mixture={a: {path: corpus}, b: {path: corpus}}"],
        ["data=npy", "data.path=raw.npy", "data.eos=7", "data.packing=whole"],
        ["train.seq_len=1940", "model.max_seq_len=4k", "data.valid_fraction=0"],
        ["train.steps=3"],
        ["train.tokens=1M"],
    ],
)
def test_what_is_refused_and_its_advice(words, capsys):
    (np.arange(4000) % 300).astype("<u2").tofile("raw.npy")
    corpus = [] if "data=npy" in words else ["data=megatron", "data.path=corpus"]
    words = ["recipe=debug", *corpus, "train.steps=null", *words]
    with pytest.raises(UserError) as caught:
        check(compose([*words, "train.epochs=2"]), CPU)
    (violation,) = caught.value.violations
    assert violation.key == ("data.path" if "train.seq_len=1940" in words else "train.epochs")
    for advice in violation.suggestions:
        check(compose([*words, "train.epochs=2", *shlex.split(advice)]), CPU)


def test_the_dry_run_says_how_often_the_data_is_seen(capsys):
    words = ["train", "recipe=debug", "data=megatron", "data.path=corpus", "data.valid_fraction=0"]
    assert nanoscale([*words, "train.steps=6", "--dry-run"]) == 0
    assert "1.6 epochs" in capsys.readouterr().out
    assert nanoscale([*words, "train.steps=6", "--dry-run", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["epochs"] == 1.6
    assert not Path("runs").exists()


def test_a_long_training_on_the_embedded_corpus_is_warned_of(capsys):
    steps = {"train.steps=20": False, "train.steps=100M": True}
    for word, is_long in steps.items():
        words = ["train", "recipe=debug", word, "--dry-run"]
        assert nanoscale(words) == 0
        assert ("would see about 5,17" in capsys.readouterr().out) == is_long
        assert nanoscale([*words, "--json"]) == 0
        assert (json.loads(capsys.readouterr().out)["epochs"] > 1000) == is_long


def test_a_recipes_batch_is_halved_for_a_small_file_but_not_that_of_a_run():
    write_indexed("corpus", [[7] * 20] * 60)
    words = ("data.valid_fraction=0", "data.packing=whole", "train.seq_len=19", "train.epochs=1")
    config = compose(
        ["recipe=debug", "data=megatron", "data.path=corpus", "train.steps=null", *words]
    )
    tuned = replace(config.config, model=replace(config.config.model, init_from="model"))
    tuned_train = check(replace(config, config=tuned), CPU).train
    assert (tuned_train.global_batch, tuned_train.steps) == (4, 15)
    recipe, _, _ = config.source("train.global_batch").rpartition(":")
    history = config.history | {"train.global_batch": [Setting(8, "mine.yaml:3")]}
    own = replace(config, config=tuned, history=history)
    assert check(own, CPU).train.global_batch == 8  # only packaged recipes are shortened
    of_run = replace(config, config=tuned, unasked=config.unasked | {recipe})
    frozen_train = check(of_run, CPU).train
    assert (frozen_train.global_batch, frozen_train.steps) == (8, 8)


def test_many_epochs_of_fine_tuning_are_warned_of():
    config = checked("data.valid_fraction=0", "train.steps=150")
    assert data_warning(config) == []
    tuned = replace(config, model=replace(config.model, init_from="model"))
    (line,) = data_warning(tuned)
    assert line.startswith("warning: 40 epochs are many")
    assert data_warning(replace(tuned, train=replace(config.train, steps=37))) == []


def test_sizes_that_are_not_known():
    assert training_samples(Data(source="stdlib"), Train()) is None
    assert training_samples(Data(source="megatron", path="missing"), Train()) is None

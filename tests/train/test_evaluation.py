"""The command `nanoscale eval`: the run's own last validation loss, in its layout and in others, without
changes."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from nanoscale.checkpoint.hf.export import export
from nanoscale.checkpoint.store import StoredCheckpoint
from nanoscale.cli.main import run as nanoscale
from nanoscale.common.errors import UserError
from nanoscale.config.composing import frozen
from nanoscale.config.resolved import ResolvedConfig
from nanoscale.config.rules import Devices, check
from nanoscale.config.schema import Backend, Checkpoint, Data, DataSource, Optimizer, Parallel
from nanoscale.data.dataset import open_data
from nanoscale.runs.directory import RunDirectory, read_json, write_json
from nanoscale.runs.rank_context import RankContext, StopFlag
from nanoscale.train import evaluation
from nanoscale.view.measured_text import evaluation_document
from tests.support.jobs import (
    PRECISIONS,
    SEQ_LEN,
    SHAPE,
    curve,
    make_config,
    make_run,
    packed_data,
    read_metrics,
    tensors_of,
    train,
    write_tokens,
)
from tests.support.ranks import run_ranks
from tests.support.recipes import changed
from tests.support.rows import exhaustive
from tests.support.token_files import write_indexed

SAMPLES = 5
MOE = replace(SHAPE, experts=4, experts_per_token=2, balance="bias", balance_rate=0.05)


def evaluate(folder: Path, config: ResolvedConfig, task: dict[str, Any]) -> dict[str, Any]:
    """Return the job's result in the layout of a configuration, without a launcher."""
    aside = RunDirectory(folder / f"aside-{len(list(folder.iterdir()))}")
    aside.path.mkdir()
    aside.config.write_text(frozen.dump(config))
    write_json(aside.task, task)
    done = run_ranks(_evaluate_rank, config.world_size, aside.path)
    assert set(done) == {"completed"}
    (found,) = read_json(aside.result)["parts"]
    return dict(found)


def _evaluate_rank(rank: int, path: Path) -> str:
    run = RunDirectory(path)
    world_size = int(os.environ["WORLD_SIZE"])
    config = frozen.load(run.config)
    return evaluation.run(
        RankContext(run, config, rank, rank, world_size, "localhost", 1, StopFlag())
    )


def snapshot(run: RunDirectory) -> dict[str, tuple[int, int]]:
    files = (path for path in run.path.rglob("*") if path.is_file())
    return {str(path): (path.stat().st_mtime_ns, path.stat().st_size) for path in files}


@pytest.mark.slow
@pytest.mark.parametrize("model", ["dense", "experts"])
def test_the_loss_is_the_runs_own(model: str, tmp_path: Path) -> None:
    write_tokens(tmp_path, samples=40)
    layout = {"tp": 2} if model == "dense" else {}
    config = make_config(
        tmp_path,
        model=SHAPE if model == "dense" else MOE,
        parallel=layout,
        checkpoint=Checkpoint(at_end=True),
        data=Data(source="megatron", path=str(tmp_path / "tokens"), valid_fraction=0.25),
    )
    config = replace(
        config, train=replace(config.train, steps=4, eval_every=4, eval_samples=SAMPLES)
    )
    run = make_run(config)
    train(run, config)
    own = read_metrics(run)[-1]["eval_loss"]
    task = {"checkpoint": str(run.checkpoint(4)), "step": 4, "samples": SAMPLES}
    before = snapshot(run)
    found = evaluate(tmp_path, config, task)
    assert found["loss_sum"] / found["tokens"] == own and found["tokens"] == SAMPLES * 16
    two = Parallel(dp=2, virtual_stages=1)
    others: list[tuple[float, dict[str, Any]]] = [(1e-9, {"parallel": two})]
    if model == "dense":
        deepspeed = {"backend": Backend(name="deepspeed"), "precision": PRECISIONS["fp32"]}
        others.append((1e-5, {"parallel": two, **deepspeed}))
        others.append((1e-9, {"parallel": replace(two, dp=1, pp=2)}))
    for bound, changes in others:
        again = evaluate(tmp_path, replace(config, **changes), task)
        assert again["loss_sum"] == pytest.approx(found["loss_sum"], rel=bound)
    if model == "experts":
        # The bias decides which experts are taken: without it the loss is another.
        no_bias = replace(config, model=replace(MOE, balance="none"))
        assert evaluate(tmp_path, no_bias, task)["loss_sum"] != found["loss_sum"]
    assert snapshot(run) == before


@pytest.mark.slow
@pytest.mark.parametrize(
    ("precision", "layout", "stage"),
    [("fp64", {"dp": 2}, 3), ("bf16", {}, 0), exhaustive("fp64", {"tp": 2, "pp": 2}, 1)],
)
def test_the_average_of_the_weights_is_evaluated_and_exported(
    precision: str, layout: dict[str, int], stage: int, tmp_path: Path
) -> None:
    write_tokens(tmp_path, samples=40)
    config = make_config(
        tmp_path,
        dp=layout.get("dp", 1),
        stage=stage,
        precision=precision,
        parallel=layout,
        optimizer=Optimizer(lr=1e-2, ema_decay=0.7),
        checkpoint=Checkpoint(every=1, keep_last=None),
        data=Data(source="megatron", path=str(tmp_path / "tokens"), valid_fraction=0.25),
    )
    changed = replace(config.train, steps=4, eval_every=4, eval_samples=SAMPLES)
    config = replace(config, train=changed)
    run = make_run(config)
    train(run, config)
    states = [tensors_of(StoredCheckpoint(run.checkpoint(step), step)) for step in range(1, 5)]
    own = read_metrics(run)[-1]["eval_loss"]
    stored = StoredCheckpoint(run.checkpoint(4), 4)
    export(stored, config, tmp_path / "out", "fp64", 10**9, lambda *_: None)
    exported = load_file(next((tmp_path / "out").glob("*.safetensors")))
    names = {
        "embed.weight": "model.embed_tokens.weight",
        "layers.1.mlp.up.weight": "model.layers.1.mlp.up_proj.weight",
    }
    for name, theirs in names.items():
        average = states[0][f"model.{name}"].double()
        for state in states[1:]:
            average = 0.7 * average + 0.3 * state[f"model.{name}"].double()
        bound = 1e-12 if precision == "fp64" else 1e-6
        torch.testing.assert_close(exported[theirs], average, rtol=bound, atol=bound)
        assert not torch.allclose(average, states[-1][f"model.{name}"].double(), rtol=1e-4)
    task = {"checkpoint": str(stored.path), "step": 4, "samples": SAMPLES}
    found = evaluate(tmp_path, config, task)
    assert found["loss_sum"] / found["tokens"] == pytest.approx(own, rel=1e-12)
    # Without the average the loss is another, and the training's own does not notice the evaluation.
    plain = replace(config, optimizer=Optimizer(lr=1e-2), run=replace(config.run, name="plain"))
    other = make_run(plain, "plain")
    train(other, plain)
    assert curve(other) == curve(run)
    assert read_metrics(other)[-1]["eval_loss"] != pytest.approx(own, rel=1e-3)


def test_bytes_of_the_text_that_is_predicted(tmp_path: Path) -> None:
    """Tokens that end documents do not count."""
    from nanoscale.data.loader import Loader
    from nanoscale.data.samples import Split
    from nanoscale.data.tokens.files import open_tokens
    from nanoscale.data.tokens.tokenizer import ByteTokenizer

    texts = ["naïve 🙂 text", "and more", "日本語", "x" * 40]
    write_indexed(tmp_path / "tokens", ByteTokenizer().encode_documents(texts))
    tokens = open_tokens("megatron", tmp_path / "tokens")
    loader = Loader.from_file(tokens, Split(0, len(tokens.tokens)), 16, 0, 257)
    ids = [token for text in texts for token in (*text.encode(), 256)]
    for samples in (2, len(loader)):
        predicted = ids[1 : 1 + 16 * samples]
        if samples == len(loader):
            expected = sum(token != 256 for token in predicted)
            assert evaluation.count_bytes(loader, samples, ByteTokenizer()) == expected


@pytest.mark.slow
def test_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Through the launcher: a run's last checkpoint, and an export of it."""
    monkeypatch.chdir(tmp_path)
    words = [
        "recipe=debug",
        "train.seq_len=32",
        "launcher.threads=1",
        "parallel.dp=1",
        "train.micro_batch=8",
    ]
    more = ["train.steps=2", "train.eval_every=2", "train.sample_tokens=0", "train.global_batch=8"]
    assert nanoscale(["train", *words, *more, "run.name=one", "precision=fp64"]) == 0
    run = RunDirectory(tmp_path / "runs" / "one")
    before = snapshot(run)
    capsys.readouterr()
    assert nanoscale(["eval", "one", "--samples", "64", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["loss"] == read_metrics(run)[-1]["eval_loss"]
    assert found["perplexity"] == pytest.approx(np.exp(found["loss"]))
    assert found["tokens"] == 64 * 32 and found["step"] == 2 and found["world_size"] == 1
    per_byte = found["loss"] / np.log(2) * found["tokens"] / found["bytes"]
    assert found["bits_per_byte"] == pytest.approx(per_byte)
    assert snapshot(run) == before and [it.name for it in run.path.parent.iterdir()] == ["one"]
    for wrong, said in (
        (["eval", "two"], "no run 'two'"),
        (["eval", "one", "--step", "9"], "no checkpoint of step 9"),
        (["eval", "one", "data.valid_fraction=0"], "needs a validation split"),
        (["eval", "one", "--samples", "0"], "at least 1"),
        (["eval", "one", "--limit", "3"], "for --tasks only"),
        (["eval", "one", "parallel.tp=3"], "tp"),
    ):
        assert nanoscale(wrong) == 2, wrong
        assert said in capsys.readouterr().err
    assert nanoscale(["checkpoints", "export", "one", "--format", "hf", "--out", "hf"]) == 0
    capsys.readouterr()
    assert nanoscale(["eval", "hf", *words, "precision=fp64", "--samples", "64", "--json"]) == 0
    again = json.loads(capsys.readouterr().out)
    assert again["loss"] == pytest.approx(found["loss"], rel=1e-9) and again["step"] is None


@pytest.mark.parametrize(
    "data",
    [
        {"valid_fraction": 0.0},
        {"valid_fraction": 1e-9},
        {"valid_fraction": 0.0, "valid_path": "short"},
        {"valid_fraction": 0.0, "path": None, "mixture": {"a": DataSource("tokens", 1.0)}},
    ],
    ids=str,
)
def test_what_is_advised_where_nothing_is_held_out_holds_something_out(
    data: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write_tokens(tmp_path, samples=40)
    write_indexed(tmp_path / "short", [range(9)])
    config = make_config(tmp_path, data=Data(**{"source": "megatron", "path": "tokens"} | data))
    config = replace(config, train=replace(config.train, eval_every=0))
    with pytest.raises(UserError, match="no samples are held out") as caught:
        evaluation.open_validation(config)
    (wrong,) = caught.value.violations
    assert wrong.suggestions
    for advice in wrong.suggestions:
        section, _, setting = advice.partition(".")
        name, _, value = setting.partition("=")
        changed = replace(getattr(config, section), **{name: json.loads(value)})
        assert evaluation.open_validation(replace(config, **{section: changed})).valid


def test_an_evaluation_without_a_counted_token_is_refused(tmp_path: Path) -> None:
    """A loss of 0.0 would end the training by `stop_when` and be the best checkpoint."""
    documents = [range(SEQ_LEN + 1)] * 8
    for name, first in (("tokens", 0), ("valid", 5)):
        write_indexed(tmp_path / name, documents)
        marks = [number >= first for number in range(8) for _ in documents[0]]
        (tmp_path / f"{name}.answers").write_bytes(bytes(marks))
    data = replace(packed_data(tmp_path), valid_path=str(tmp_path / "valid"))
    config = make_config(tmp_path, data=data)
    config = replace(config, train=replace(config.train, steps=1, eval_every=1, eval_samples=3))
    message = "no token of the first 3 validation samples has a loss"
    with pytest.raises(RuntimeError, match=message):
        train(make_run(config), config)
    opened = open_data(config.data, config.train, SHAPE.vocab)
    with pytest.raises(UserError, match=message) as caught:
        opened.require_counted(3, "train.eval_samples=")
    (violation,) = caught.value.violations
    assert violation.suggestions == ("train.eval_samples=6", "data.loss_on=all")
    enough = replace(config, train=replace(config.train, eval_samples=6))
    everything = replace(config, data=replace(data, loss_on="all"))
    for number, accepted in enumerate((enough, everything)):
        run = make_run(accepted, f"accepted-{number}")
        train(run, accepted)
        (record,) = read_metrics(run)
        assert record["eval_loss"] > 1
    task = {"checkpoint": None, "step": None, "samples": 5}
    with pytest.raises(RuntimeError, match="no token of the first 5"):
        evaluate(tmp_path, config, task)
    assert evaluate(tmp_path, config, task | {"samples": None})["tokens"] == 3 * SEQ_LEN


def test_labels_have_no_perplexity() -> None:
    config = check(changed(), Devices("cpu", 1))
    part = {"name": "", "share": 1.0, "loss_sum": 5.0, "tokens": 10, "samples": 10, "seconds": 1.0}
    figures = {"parts": [{**part, "bytes": 99, "accuracy": 0.5}], "data": ""}
    task = {"checkpoint": None, "step": None}
    documents = []
    for objective in ("classify", "next-token"):
        train = replace(config.train, objective=objective)  # type: ignore[arg-type]
        documents.append(evaluation_document(replace(config, train=train), task, figures))
    labels, texts = documents
    assert labels["perplexity"] is labels["bits_per_byte"] is None and labels["loss"] == 0.5
    assert texts["perplexity"] == pytest.approx(np.exp(0.5)) and texts["bits_per_byte"] > 0

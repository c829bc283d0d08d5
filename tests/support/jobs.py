"""Small training runs for tests, without the launcher: a run directory, a frozen configuration, real ranks."""

from __future__ import annotations

import json
import os
import shutil
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp

from nanoscale.checkpoint import sharded
from nanoscale.checkpoint.store import StoredCheckpoint, list_checkpoints
from nanoscale.config.composing import frozen
from nanoscale.config.resolved import ResolvedConfig
from nanoscale.config.schema import (
    Checkpoint,
    Data,
    Launcher,
    Model,
    Optimizer,
    Parallel,
    Precision,
    Run,
    Scheduler,
    Train,
    Zero,
)
from nanoscale.models.hf_model import PREFIX, named_tensors
from nanoscale.models.initialization import initialize
from nanoscale.models.transformer import Transformer
from nanoscale.runs import events, fence
from nanoscale.runs.directory import RunDirectory
from nanoscale.runs.rank_context import RankContext, StopFlag
from nanoscale.train import job
from tests.support.ranks import run_ranks
from tests.support.recipes import complete
from tests.support.runs import create_run
from tests.support.token_files import write_indexed

SEQ_LEN = 16
SAMPLES = 8
STEPS = 4
"""A warm-up of three steps and the last step: a wrong computation shows within three steps."""
LONG_STEPS = 20
"""The steps of law 1, in a row for each way of dividing a model."""
SAVED_STEPS = 9
SHAPE = Model(
    layers=2,
    hidden=32,
    heads=8,
    kv_heads=4,
    head_dim=4,
    ffn=48,
    vocab=64,
    max_seq_len=32,
    init_std=0.2,
)
"""The time of a row grows with its blocks, and two of them meet everything that a rank does with a block."""
ZBV = {"pp": 2, "schedule": "zbv", "virtual_stages": 2, "layers_per_stage": [0, 1, 1, 0]}
"""A V of four stages; both stages of the second rank have a block."""
BYTES = replace(SHAPE, layers=4, vocab=257, max_seq_len=48)
PRECISIONS = {
    "fp64": Precision("fp64", "fp64", "fp64"),
    "fp32": Precision("fp32", "fp32", "fp32"),
    "bf16": Precision("fp32", "bf16", "fp32"),
    "bf16-pure": Precision("bf16", "bf16", "fp32"),
    "fp16": Precision("fp32", "fp16", "fp32", loss_scale=1024.0, loss_scale_window=6),
}


def write_tokens(folder: Path, samples: int = SAMPLES) -> np.ndarray:
    """Write a token file with room for `samples` samples; return the tokens."""
    tokens = np.random.default_rng(7).integers(0, SHAPE.vocab, samples * SEQ_LEN + 1)
    write_indexed(folder / "tokens", [tokens])
    return tokens


DOCUMENTS = (17, 11, 7, 10, 6, 13, 4, 24, 9, 9, 5, 1, 12)
"""Tokens of the documents of `write_documents`, which fill SAMPLES sequences, some of them not to the end."""


def write_documents(folder: Path) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Write a token file of several documents; return the tokens and the marks of answers, by document."""
    dice = np.random.default_rng(7)
    documents = [dice.integers(0, SHAPE.vocab, length) for length in DOCUMENTS]
    answers = [dice.random(length) < 0.6 for length in DOCUMENTS]
    write_indexed(folder / "tokens", documents)
    (folder / "tokens.answers").write_bytes(np.concatenate(answers).astype(np.uint8).tobytes())
    return documents, answers


def packed_data(folder: Path) -> Data:
    """Return data for training on the answers of these documents, with attention within each."""
    where = {"source": "megatron", "path": str(folder / "tokens"), "valid_fraction": 0.0}
    return Data(**where, packing="whole", document_mask=True, loss_on="answers")


def make_config(
    folder: Path, *, dp: int = 1, stage: int = 0, steps: int = STEPS, **changes: Any
) -> ResolvedConfig:
    """Return a resolved configuration: some steps of 8 samples, with accumulation and active clipping.

    `parallel`: keys of that section beside dp and dp_replicate; other sections are given whole.
    """
    micro_batch = changes.pop("micro_batch", 1 if dp == 4 else 2)
    base = complete(
        run=Run(name="run", root=str(folder)),
        model=changes.pop("model", SHAPE),
        parallel=Parallel(
            **{"dp": dp, "virtual_stages": 1, "dp_replicate": changes.pop("dp_replicate", 1)}
            | changes.pop("parallel", {})
        ),
        precision=PRECISIONS[changes.pop("precision", "fp64")],
        zero=Zero(stage=stage),  # type: ignore[arg-type]
        optimizer=changes.pop("optimizer", Optimizer(lr=1e-2, clip_norm=0.5)),
        scheduler=Scheduler(name="cosine", warmup_steps=3, decay_steps=2),
        data=Data(source="megatron", path=str(folder / "tokens"), valid_fraction=0.0),
        checkpoint=changes.pop("checkpoint", Checkpoint(at_end=False)),
        launcher=Launcher(device="cpu", devices=dp, threads=1),
        train=Train(
            steps=steps, global_batch=SAMPLES, micro_batch=micro_batch, seq_len=SEQ_LEN, seed=3
        ),
    )
    return replace(base, **changes)


def make_run(config: ResolvedConfig, name: str = "run") -> RunDirectory:
    run = create_run(Path(config.run.root), name)
    run.config.write_text(frozen.dump(config))
    return run


def run_of_bytes(
    folder: Path,
    shape: Model = BYTES,
    name: str = "run",
    foreign: torch.nn.Module | None = None,
    **balance: Any,
) -> RunDirectory:
    """Create a run of bytes with a checkpoint of random weights and of an unused optimizer's state.

    `foreign` is a model of transformers whose weights it has.
    """
    data = Data(source="stdlib", cache_dir=str(folder))
    train = Train(steps=1, seq_len=32)
    of_run = Run(name=name, root=str(folder))
    precision = PRECISIONS["fp32"]
    run = make_run(
        complete(run=of_run, model=shape, data=data, train=train, precision=precision), name
    )
    if foreign is None:
        model = Transformer(shape)
        initialize(model, replace(shape, init_std=0.3), seed=4)
        named = model.named_parameters(prefix="model")
    else:
        named = ((f"model.{PREFIX}{name}", value) for name, value in named_tensors(foreign))
    fence.begin(run, 1)
    state = {name: value.detach() for name, value in named} | balance
    state |= {"optimizer.norm.weight.exp_avg": torch.ones(shape.hidden)}
    about = {"consumed_samples": 0, "tokens": 0, "world_size": 1, "time": 1.0}
    sharded.save(run.workspace(1), state, {"step": 7, **about})
    return run


def train(run: RunDirectory, config: ResolvedConfig, stop: StopFlag | None = None) -> list[str]:
    """Train the run in its layout; what each rank returned. A changed configuration replaces the frozen one."""
    run.config.write_text(frozen.dump(config))
    return run_ranks(train_rank, config.world_size, run.path, stop or StopFlag())


def train_rank(rank: int, path: Path, stop: StopFlag) -> str:
    run = RunDirectory(path)
    config = frozen.load(run.config)
    world_size = int(os.environ["WORLD_SIZE"])
    return job.run(RankContext(run, config, rank, rank, world_size, "localhost", 0, stop))


def read_metrics(run: RunDirectory) -> list[dict[str, Any]]:
    return [json.loads(line) for line in run.metrics.read_text().splitlines()]


EXACT = ("step", "loss", "grad_norm", "lr", "tokens")
Curve = list[dict[str, Any]]


def curve(run: RunDirectory) -> Curve:
    return [{name: record[name] for name in EXACT} for record in read_metrics(run)]


def final_weights(run: RunDirectory) -> dict[str, torch.Tensor]:
    checkpoint = list_checkpoints(run.checkpoints)[-1]
    assert checkpoint.step == frozen.load(run.config).train.steps
    return tensors_of(checkpoint)


def tensors_of(checkpoint: StoredCheckpoint) -> dict[str, torch.Tensor]:
    """Return every tensor of a checkpoint, whole, read by torch alone."""
    state = {
        name: torch.empty(about["shape"], dtype=getattr(torch, about["dtype"]))
        for name, about in checkpoint.manifest["tensors"].items()
    }
    dcp.load(state, checkpoint_id=checkpoint.path, no_dist=True)
    return state


def resumed_at(run: RunDirectory) -> list[int]:
    return [event["step"] for event in events.read(run) if event["kind"] == "resumed"]


_uninterrupted: dict[str, Path] = {}
"""The runs of this process that were never stopped, by their frozen configuration without folders."""


def never_stopped(folder: Path, config: ResolvedConfig) -> RunDirectory:
    """Return a run of the configuration that trained to its end at once; each is trained once a process.

    Runs of the same configuration must read the same tokens.
    """
    same = frozen.dump(
        replace(config, run=replace(config.run, root=""), data=replace(config.data, path=None))
    )
    if same not in _uninterrupted:
        config = replace(config, run=replace(config.run, root=str(folder / "whole")))
        run = make_run(config)
        train(run, config)
        assert len(curve(run)) == config.train.steps
        _uninterrupted[same] = run.path
    return RunDirectory(_uninterrupted[same])


def assert_same_weights(left: RunDirectory, right: RunDirectory) -> None:
    ours, theirs = final_weights(left), final_weights(right)
    assert ours.keys() == theirs.keys()
    moments = (".exp_avg", ".exp_avg_sq", ".momentum_buffer")
    assert any(name.endswith(moments) for name in ours)
    for name, value in ours.items():
        assert torch.equal(value, theirs[name]), name


def assert_same_training(left: RunDirectory, right: RunDirectory) -> None:
    """Assert equality as near as other layouts come to each other: sums are added up in another order."""
    for ours, theirs in zip(curve(left), curve(right), strict=True):
        assert ours == pytest.approx(theirs, rel=1e-9)
    mine, others = final_weights(left), final_weights(right)
    assert mine.keys() == others.keys()
    for name, value in mine.items():
        torch.testing.assert_close(value, others[name], rtol=1e-7, atol=1e-12)


def saving_config(folder: Path, **changes: Any) -> ResolvedConfig:
    """Return a configuration of SAVED_STEPS that saves a checkpoint every third step and keeps them all."""
    checkpoint = Checkpoint(every=3, keep_last=None)
    config = make_config(folder, checkpoint=changes.pop("checkpoint", checkpoint), **changes)
    return replace(config, train=replace(config.train, steps=SAVED_STEPS))


class StopBefore(StopFlag):
    """Raises itself at the question before a given step; a rank asks once before every step."""

    def __init__(self, step: int, first: int = 1) -> None:
        self.questions = 0
        self.last = step - first

    @property
    def requested(self) -> bool:  # type: ignore[override]
        self.questions += 1
        return self.questions > self.last


class KillBefore(StopBefore):
    """Kills its rank, as the kernel would, at the question before a given step."""

    @property
    def requested(self) -> bool:  # type: ignore[override]
        if StopBefore.requested.fget(self):  # type: ignore[attr-defined]
            os.kill(os.getpid(), signal.SIGKILL)
        return False


def trained_and_resumed(config: ResolvedConfig, step: int) -> RunDirectory:
    """Train a run, and another from its checkpoint of a step, whose losses must be equal; return the first."""
    whole, part = make_run(config, "whole"), make_run(config, "part")
    train(whole, config)
    shutil.copytree(whole.checkpoint(step), part.checkpoint(step))
    train(part, config)
    assert resumed_at(part) == [step]
    losses = [[record["loss"] for record in read_metrics(run)] for run in (whole, part)]
    assert losses[0][step:] == losses[1][-len(losses[0][step:]) :]
    return whole

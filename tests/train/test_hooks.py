"""Own code in the place of nanoscale's: equal to a plain loop in every layout, resumed, exported, refused."""

from __future__ import annotations

import hashlib
import runpy
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.nn import functional as F

from nanoscale.checkpoint.hf.export import export
from nanoscale.checkpoint.store import find_checkpoint
from nanoscale.common.errors import UserError
from nanoscale.config.resolved import ResolvedConfig
from nanoscale.config.schema import Backend, Checkpoint, Data, Hooks, Model, Optimizer
from nanoscale.config.values.hooks import file_name
from nanoscale.data.sampler import sample_indices
from nanoscale.models import head
from nanoscale.runs.directory import RunDirectory
from tests.support.jobs import (
    SAMPLES,
    SHAPE,
    STEPS,
    ZBV,
    StopBefore,
    curve,
    final_weights,
    make_config,
    make_run,
    read_metrics,
    resumed_at,
    saving_config,
    train,
    write_tokens,
)
from tests.support.reference import assert_equal_curves, plain_loop
from tests.support.rows import exhaustive

LOSS = """
from torch.nn import functional as F

def loss(logits, targets, config):
    smoothing = config.hooks.settings["smoothing"]
    return F.cross_entropy(logits, targets, reduction="none", label_smoothing=smoothing)
"""
ALL = """
import torch
from torch import nn
from torch.nn import functional as F

class Layer(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm, self.mix = nn.LayerNorm(width), nn.Linear(width, width)

    def forward(self, x):
        places = torch.arange(1, x.shape[1] + 1, dtype=x.dtype)
        return x + F.gelu(self.mix(self.norm(x.cumsum(1) / places[:, None])))

class Tiny(nn.Module):
    def __init__(self, vocab, width):
        super().__init__()
        self.embed = nn.Embedding(vocab, width)
        self.layers = nn.ModuleList(Layer(width) for _ in range(2))
        self.register_buffer("scale", torch.tensor(0.5))
        self.head = nn.Linear(width, vocab, bias=False)

    def forward(self, tokens):
        x = self.embed(tokens) * self.scale
        for layer in self.layers:
            x = layer(x)
        return self.head(x)

def model(config):
    return Tiny(config.model.vocab, config.model.hidden)

def optimizer(groups, config):
    assert all("norm" not in name for name in groups[0]["names"])
    return torch.optim.Adagrad(groups, lr=config.optimizer.lr)

def data(config, split):
    if split == "valid":
        return None
    dice = torch.Generator().manual_seed(5)
    rows = torch.randint(config.model.vocab, (30, config.train.seq_len + 1), generator=dice)
    targets = rows[:, 1:].where(torch.rand(30, config.train.seq_len, generator=dice) < 0.7, -100)
    return list(zip(rows[:, :-1], targets, strict=True))

def on_step_end(moment):
    (moment.run / f"step.{moment.rank}").write_text(f"{moment.step} {moment.metrics['loss']}")

def on_checkpoint(moment):
    assert moment.checkpoint.is_dir()
    (moment.run / f"saved.{moment.rank}").write_text(moment.checkpoint.name)
"""
OWN = Model("hooks", "own", 2, SHAPE.hidden, vocab=SHAPE.vocab)


def with_hooks(config: ResolvedConfig, text: str, **settings: Any) -> ResolvedConfig:
    """Return the configuration with a file of hooks, and what it chooses by the names in the file."""
    sha256 = hashlib.sha256(text.encode()).hexdigest()
    file = Path(config.run.root) / file_name(sha256)
    file.write_text(text)
    own: dict[str, Any] = {"hooks": Hooks(str(file), sha256, settings)}
    if "def model" in text:
        own["model"] = OWN
    if "def loss" in text:
        own["train"] = replace(config.train, objective="hooks")
    if "def optimizer" in text:
        own["optimizer"] = Optimizer("hooks", lr=1e-2, clip_norm=0.5)
    if "def data" in text:
        own["data"] = Data("hooks", path=None, valid_fraction=0.0)
    return replace(config, **own)


LAYOUTS: list[Any] = [
    {},
    {"dp": 2, "stage": 3},
    {"parallel": {"pp": 2, "tp": 2}},
    {"parallel": {"cp": 2, "dp": 2}, "dp": 2, "stage": 2},
    exhaustive({"parallel": ZBV}),
    {"dp": 2, "stage": 3, "precision": "fp32", "backend": Backend("deepspeed")},
]


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_an_own_loss_in_every_layout(tmp_path: Path, layout: dict[str, Any]) -> None:
    write_tokens(tmp_path)
    config = with_hooks(make_config(tmp_path, **layout), LOSS, smoothing=0.2)
    run = make_run(config)
    train(run, config)
    found = [(it["loss"], it["grad_norm"], it["lr"], it["tokens"]) for it in curve(run)]
    kind = config.precision.params
    assert_equal_curves(found, plain_loop(kind, label_smoothing=0.2), kind)


def test_chunks_have_the_loss_and_the_gradients_of_the_whole(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def losses(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(logits, targets, reduction="none").square()

    dice = torch.Generator().manual_seed(1)
    hidden, weight = (torch.randn(size, generator=dice).double() for size in ((3, 7, 4), (11, 4)))
    targets = torch.randint(11, (3, 7), generator=dice)
    targets[1, 2:5] = -100
    results = []
    for at_once in (2**28, 33):
        monkeypatch.setattr(head, "LOGITS_AT_ONCE", at_once)
        own = head.Head(4, 11, bias=False, dtype=torch.float64)
        own.token_losses = losses
        own.weight.data.copy_(weight)
        inputs = hidden.clone().requires_grad_()
        loss = own(inputs, targets)
        loss.backward()
        results.append((loss.detach(), inputs.grad, own.weight.grad))
    torch.testing.assert_close(results[0], results[1])
    expected = losses((hidden @ weight.T).flatten(0, 1), targets.flatten()).sum()
    torch.testing.assert_close(results[0][0], expected)


def plain_own_loop(config: ResolvedConfig, steps: int = STEPS) -> list[tuple[float, float]]:
    """Train the file's model by its own parts, and return losses and norms."""
    names = runpy.run_path(str(config.hooks.path))
    torch.manual_seed(config.train.seed)
    model = names["model"](config).double()
    groups: list[dict[str, Any]] = [
        {"params": [p for p in model.parameters() if p.ndim > 1], "weight_decay": 0.1},
        {"params": [p for p in model.parameters() if p.ndim < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.Adagrad(groups)
    samples, found = names["data"](config, "train"), []
    for step in range(steps):
        places = torch.arange(step * SAMPLES, (step + 1) * SAMPLES).numpy()
        rows = [samples[i] for i in sample_indices(config.train.seed, places, len(samples))]
        inputs, targets = (torch.stack([row[part] for row in rows]) for part in (0, 1))
        loss = F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
        optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        for group in optimizer.param_groups:
            group["lr"] = LR[step]
        optimizer.step()
        found.append((loss.item(), norm.item()))
    return found


LR: list[float] = []


@pytest.mark.slow
@pytest.mark.parametrize(
    "layout",
    [
        {},
        {"dp": 2, "stage": 0},
        {"dp": 2, "stage": 3, "parallel": {"activation_checkpointing": "full"}},
        exhaustive({"dp": 4, "stage": 2, "dp_replicate": 2}),
    ],
    ids=str,
)
def test_an_own_model_optimizer_and_data(tmp_path: Path, layout: dict[str, Any]) -> None:
    config = make_config(tmp_path, checkpoint=Checkpoint(at_end=True), **layout)
    config = with_hooks(config, ALL)
    run = make_run(config)
    train(run, config)
    LR[:] = [record["lr"] for record in read_metrics(run)]
    expected = plain_own_loop(config)
    found = [(record["loss"], record["grad_norm"]) for record in read_metrics(run)]
    for mine, others in zip(found, expected, strict=True):
        assert mine == pytest.approx(others, rel=1e-9)
    for rank in range(config.world_size):
        assert (run.path / f"step.{rank}").read_text() == f"{STEPS} {found[-1][0]}"
        assert (run.path / f"saved.{rank}").read_text() == f"step-{STEPS:08d}"


@pytest.mark.slow
def test_own_parts_resume_bit_for_bit_and_elsewhere_and_are_exported(tmp_path: Path) -> None:
    config = with_hooks(saving_config(tmp_path, dp=2, stage=3), ALL)
    whole = make_run(config, "whole")
    train(whole, config)
    run = make_run(config)
    train(run, config, StopBefore(5))
    other = RunDirectory(shutil.copytree(run.path, tmp_path / "other", symlinks=True))
    train(run, config)
    assert resumed_at(run) == [5] and curve(run) == curve(whole)
    states = final_weights(run)
    assert states["optimizer.hf.head.weight.sum"].shape == states["model.hf.head.weight"].shape
    for name, value in final_weights(whole).items():
        assert torch.equal(value, states[name]), name
    train(other, with_hooks(saving_config(tmp_path), ALL))
    for ours, theirs in zip(curve(other), curve(whole), strict=True):
        assert ours == pytest.approx(theirs, rel=1e-9)
    shutil.copy(str(config.hooks.path), run.path)
    stored = find_checkpoint(run.checkpoints, None)
    export(stored, config, tmp_path / "out", "fp64", 10**9, lambda *_: None)
    model = runpy.run_path(str(tmp_path / "out" / "hooks.py"))["model"](config).double()
    loaded = load_file(tmp_path / "out" / "model.safetensors")
    assert model.load_state_dict(loaded, strict=False).missing_keys == ["scale"]
    for name, value in loaded.items():
        assert torch.equal(value, states[f"model.hf.{name}"])
    (run.path / file_name(str(config.hooks.sha256))).write_text("changed = True\n")
    with pytest.raises(UserError, match="has changed since the launch"):
        export(stored, config, tmp_path / "again", "fp64", 10**9, lambda *_: None)
    assert not (tmp_path / "again").exists()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            ALL.replace("return self.head(x)", "return self.head(x)[:, :-1]"),
            r"returned \[2, 15, \d+\] for tokens \[2, 16\], and not logits \[2, 16, \d+\]",
        ),
        (ALL.replace("return Tiny(", "return (3, "), "returned tuple, and not a module"),
        (
            ALL.replace("rows[:, :-1]", "rows[:, :-2]"),
            r"sample \d+ of data\(\) in hooks.path has \[\d+\] inputs",
        ),
        (
            ALL.replace("randint(config.model.vocab,", "randint(1000, 2000,"),
            "not below model.vocab=",
        ),
        (ALL.replace('split == "valid"', "True"), "returned no sample"),
        (LOSS.replace('"none"', '"sum"'), r"loss\(\) of hooks.path returned \[\]"),
        (
            """
import torch

class Counting(torch.optim.SGD):
    def step(self, closure=None):
        for p in self.param_groups[0]["params"]:
            self.state[p]["count"] = 3

def optimizer(groups, config):
    return Counting(groups)
""",
            "keeps count of .* as int",
        ),
    ],
    ids=["logits", "module", "length", "vocabulary", "empty", "loss", "state"],
)
def test_what_own_code_returns_is_checked(tmp_path: Path, text: str, message: str) -> None:
    write_tokens(tmp_path)
    config = with_hooks(make_config(tmp_path), text, smoothing=0.1)
    with pytest.raises((UserError, RuntimeError), match=message):
        train(make_run(config), config)


def test_a_rank_runs_only_the_file_of_the_launch(tmp_path: Path) -> None:
    write_tokens(tmp_path)
    config = with_hooks(make_config(tmp_path), LOSS, smoothing=0.1)
    marker = tmp_path / "was-run"
    with Path(str(config.hooks.path)).open("a") as file:
        file.write(f"open({str(marker)!r}, 'w')\n")
    with pytest.raises((UserError, RuntimeError), match="has changed since the launch"):
        train(make_run(config), config)
    assert not marker.exists()

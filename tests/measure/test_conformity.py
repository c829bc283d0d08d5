"""`nanoscale conform`: a wrong reduction of one's own code is found and named, and right layouts are equal."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from nanoscale.config.hf.safetensors_headers import read_folder
from nanoscale.config.resolved import ResolvedConfig
from nanoscale.config.schema import Data, Hooks, Optimizer
from nanoscale.config.translation.miniature import in_fp32, in_one_process, miniature
from nanoscale.measure import conformity, small_model
from nanoscale.parallel import process_group
from nanoscale.runs.directory import RunDirectory
from tests.support import hf_models
from tests.support.jobs import make_config
from tests.support.layouts import AUX, ROWS, row_config
from tests.support.ranks import run_ranks
from tests.support.rows import exhaustive, usual_rows


def train_layout(rank: int, config: ResolvedConfig, folder: Path) -> dict[str, Any]:
    process_group.join(config.world_size, torch.device("cpu"), 120.0, even_alone=True)
    return conformity.record_layout(config, RunDirectory(folder), rank)


def train_alone(rank: int, config: ResolvedConfig, folder: Path) -> dict[str, Any]:
    process_group.join(1, torch.device("cpu"), 120.0, even_alone=True)
    return conformity.compare_with_layout(config, RunDirectory(folder))


def train_in_fp32(rank: int, config: ResolvedConfig, folder: Path) -> dict[str, Any]:
    process_group.join(config.world_size, torch.device("cpu"), 120.0, even_alone=True)
    return conformity.record_in_fp32(config, RunDirectory(folder), rank)


def compared(config: ResolvedConfig, folder: Path) -> dict[str, Any]:
    small, _ = miniature(config, folder)
    layout, *_ = run_ranks(train_layout, small.world_size, small, folder)
    (result,) = run_ranks(train_alone, 1, in_one_process(small), folder)
    return layout | result


# --- wrong code -----------------------------------------------------------------------------------

LOSS = """
from torch.nn import functional as F

def loss(logits, targets, config):
    return F.cross_entropy(logits, targets, reduction="none")
"""
STEP = """
import os
import torch
from transformers import AutoModelForCausalLM

def on_step_end(moment):
    weights = moment.modules[0].layers["0"].mlp.down.weight
"""
OPTIMIZER = """
import torch
from transformers import AutoModelForCausalLM

class Own(torch.optim.SGD):
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                {change}
        super().step()

def optimizer(groups, config):
    return Own(groups, lr=config.optimizer.lr)
"""
UNEVEN = Data("random", loss_on="answers")


@dataclass(frozen=True)
class Bug:
    """A mistake of a user's file, or one that the file makes in nanoscale."""

    text: str
    what: str
    """The first difference."""
    parameter: str | None = None
    factor: float | None = None
    """The ratio to one process, if it is a number that says something."""
    layout: dict[str, Any] = field(default_factory=lambda: {"dp": 2})
    stage: int = 0
    changes: dict[str, Any] = field(default_factory=dict)


BUGS = {
    "a mean of means over ranks": Bug(
        LOSS.replace('"none")', '"none") * 64 / (targets != -100).sum()'),
        "loss",
        changes={"data": UNEVEN},
    ),
    "a gradient divided twice": Bug(
        LOSS + """
from nanoscale.backends.native import NativeEngine
NativeEngine._scale = property(lambda self: 1.0)
""",
        "gradient", "embed.weight", 1 / 3, stage=3,
    ),
    "a gradient divided twice by the optimizer": Bug(
        OPTIMIZER.format(change="p.grad.div_(config.parallel.dp)").replace(
            "class", "from nanoscale.parallel import process_group\n\nclass"
        ).replace("config.parallel.dp)", "process_group.world_size())"),
        "update", "embed.weight", 1 / 3,
    ),
    "a forgotten sum over tp": Bug(
        LOSS + """
from nanoscale.parallel import tensor
tensor.partial_grad = tensor.replicated_grad
""",
        "gradient", "layers.0.attention_norm.weight", layout={"tp": 2},
    ),
    "tp and pp confused": Bug(
        LOSS + """
from nanoscale.backends.native import NativeEngine
real = NativeEngine._scale.fget
def scale(self):
    return real(self) * self.config.parallel.tp / self.config.parallel.pp
NativeEngine._scale = property(scale)
""",
        "gradient", "embed.weight", 2 / 3, layout={"tp": 2, "pp": 2},
    ),
    "a second bucket of gradients that nobody sums": Bug(
        LOSS + """
from nanoscale.parallel.ddp import GradientReducer
def init(self, *given, real=GradientReducer.__init__):
    real(self, *given)
    self._buckets = self._buckets[:1]
GradientReducer.__init__ = init
""",
        "gradient",
    ),
    "a ring that is wrong beyond its neighbor": Bug(
        LOSS + """
import torch.distributed as dist
from nanoscale.parallel import ring
def slices(rank, owner, seq, real=ring._attending_slices):
    ranks = dist.get_world_size()
    return real(rank, 0 if (rank - owner) % ranks == 2 else owner, seq)
ring._attending_slices = slices
""",
        "loss", layout={"cp": 4},
    ),
    "the third micro batch": Bug(
        LOSS + """
from nanoscale.backends.native import NativeEngine
def accumulate(self, batches, real=NativeEngine._accumulate):
    real(self, batches[:2] + [batches[0] for _ in batches[2:]])
NativeEngine._accumulate = accumulate
""",
        "loss", changes={"micro_batch": 1},
    ),
    "rows of an evaluation that only fill a batch": Bug(
        LOSS + """
from nanoscale.train import evaluations
def validate(engine, batches, real=evaluations.validate):
    return real(engine, [(batch, len(batch)) for batch, _ in batches])
evaluations.validate = validate
""",
        "metric", "eval_loss",
    ),
    "a callback that reads metrics": Bug(
        STEP + '    if moment.metrics and os.environ["RANK"] == "1":\n        weights.data.mul_(1.5)\n',
        "loss",
    ),
    "a router that sees half of a sequence": Bug(
        LOSS + """
from nanoscale.models.moe import Router
Router.sum_over_sequence = property(lambda self: lambda x: x, lambda self, value: None)
""",
        "gradient", layout={"cp": 2}, changes={"model": replace(AUX, balance_rate=1.0)},
    ),
    "a norm of this rank's shards": Bug(
        LOSS + """
from nanoscale.backends import gradients
gradients.global_norm = gradients.local_norm
""",
        "grad_norm", stage=3,
    ),
    "samples that depend on the rank": Bug(
        """
import os
import numpy as np

class Samples:
    def __len__(self):
        return 1000

    def __getitem__(self, number):
        seed = [number, int(os.environ["RANK"])]
        return np.random.default_rng(seed).integers(0, 64, 17)

def data(config, split):
    return Samples() if split == "train" else None
""",
        "loss",
    ),
}  # fmt: skip


ONE_OF_A_KIND = (
    "a gradient divided twice",
    "a gradient divided twice by the optimizer",
    "rows of an evaluation that only fill a batch",
    "a ring that is wrong beyond its neighbor",
    "a norm of this rank's shards",
)
"""A bug for each kind of first difference: gradient, update, metric, loss, norm."""


def with_bug(folder: Path, bug: Bug) -> ResolvedConfig:
    file = folder / "hooks.py"
    file.write_text(bug.text)
    sha256 = hashlib.sha256(file.read_bytes()).hexdigest()
    changes: dict[str, Any] = {"data": Data("random"), "hooks": Hooks(str(file), sha256)}
    if "def optimizer" in bug.text:
        changes["optimizer"] = Optimizer("hooks", lr=1e-2, weight_decay=0.0, clip_norm=None)
    if "def data" in bug.text:
        changes["data"] = Data("hooks", valid_fraction=0.0)
    layout = {key: value for key, value in bug.layout.items() if key != "dp"}
    config = make_config(
        folder, dp=bug.layout.get("dp", 1), stage=bug.stage, parallel=layout,
        **changes | bug.changes,
    )  # fmt: skip
    objective = "hooks" if "def loss" in bug.text else "next-token"
    return replace(config, train=replace(config.train, objective=objective))


@pytest.mark.slow
@pytest.mark.parametrize("bug", usual_rows(BUGS, ONE_OF_A_KIND))
def test_wrong_code_is_found_and_named(tmp_path: Path, bug: Bug) -> None:
    result = compared(with_bug(tmp_path, bug), tmp_path)
    first = result["first_difference"]
    assert first is not None
    assert first["what"] == bug.what
    if bug.parameter is not None:
        assert first["parameter"] == bug.parameter
    if bug.factor is not None:
        assert first["factor"] == pytest.approx(bug.factor, rel=1e-9)


FINDINGS = (
    STEP
    + """
import torch.distributed as dist
from nanoscale.backends.native import NativeEngine
from nanoscale.data import loader
from nanoscale.train import evaluations

def on_evaluation(moment):
    dist.all_reduce(torch.ones(1))

def validate(engine, batches, real=evaluations.validate):
    engine.parameters()[0][1].data.mul_(1 + 1e-9)
    return real(engine, batches)
evaluations.validate = validate

def sample_indices(*args, real=loader.sample_indices):
    numbers = real(*args)
    numbers[numbers == 3] = 4
    return numbers
loader.sample_indices = sample_indices

def load_state(self, state, real=NativeEngine.load_state):
    real(self, state)
    self.optimizer.param_groups[0]["eps"] *= 1.1
    self.optimizer.state[self.parameters()[0][1]]["exp_avg"].zero_()
NativeEngine.load_state = load_state
"""
)


@pytest.mark.slow
def test_state_and_samples_are_findings_and_a_callback_may_communicate(tmp_path: Path) -> None:
    result = compared(with_bug(tmp_path, Bug(FINDINGS, "")), tmp_path)
    changes, samples, lost = result["findings"]
    assert changes == "the evaluation changes embed.weight"
    assert "epoch 1 of the samples leaves out 1 of 23 samples, such as number 3" in samples
    assert "begins the next step with another exp_avg of embed.weight" in lost


AVERAGES = (
    LOSS
    + """
from nanoscale.backends.native import NativeEngine
def load_state(self, state, real=NativeEngine.load_state):
    real(self, state)
    for moments in self.optimizer.state.values():
        moments["average"].zero_() if "average" in moments else None
NativeEngine.load_state = load_state
"""
)
LACKING = (
    LOSS
    + """
from nanoscale.backends.native import NativeEngine
def state(self, real=NativeEngine.state, **options):
    tensors = real(self, **options)
    if options:  # to load
        return tensors
    return {name: tensor for name, tensor in tensors.items() if "exp_avg_sq" not in name}
NativeEngine.state = state
"""
)


@pytest.mark.slow
def test_an_average_that_a_resume_in_one_process_loses_is_seen(tmp_path: Path) -> None:
    averaged = Optimizer(lr=1e-2, ema_decay=0.5)
    result = compared(
        with_bug(tmp_path, Bug(AVERAGES, "", changes={"optimizer": averaged})), tmp_path
    )
    first = result["resumed"]["first_difference"]
    assert (first["what"], first["parameter"], first["step"]) == ("metric", "eval_loss", 3)


@pytest.mark.slow
def test_a_checkpoint_that_lacks_a_tensor_is_a_finding(tmp_path: Path) -> None:
    result = compared(with_bug(tmp_path, Bug(LACKING, "")), tmp_path)
    assert result["first_difference"] is None and "resumed" not in result
    (finding,) = result["findings"]
    assert "one process cannot resume from the checkpoint of this layout: " in finding


COMPILED = (
    LOSS
    + """
import torch
from transformers import AutoModelForCausalLM
from nanoscale.models import transformer
def forward(self, hidden, *rest, real=transformer.Block.forward):
    result = real(self, hidden, *rest)
    return result * 1.1 if torch.compiler.is_compiling() else result
transformer.Block.forward = forward
"""
)


@pytest.mark.slow
@pytest.mark.parametrize("text", [LOSS, COMPILED], ids=["right", "wrong"])
def test_compiled_blocks_compute_what_others_do(tmp_path: Path, text: str) -> None:
    small, _ = miniature(with_bug(tmp_path, Bug(text, "", layout={"tp": 2})), tmp_path)
    for compiled in (False, True):
        config = in_fp32(small, compiled=compiled)
        result, _ = run_ranks(train_in_fp32, small.world_size, config, tmp_path)
    first = result["first_difference"]
    assert (first and (first["what"], first["step"])) == (("loss", 1) if text == COMPILED else None)
    assert result["largest"] is None or 0 < result["largest"] < 1e-5


# --- right layouts --------------------------------------------------------------------------------

USUAL = (
    "packed documents, dp 2 · pp 2, stage 1, full",
    "MoE bias, dp 2, cp 2, ep 4, stage 2",
    "LoRA, dp 2, tp 2, activation_checkpointing full, stage 3",
)


@pytest.mark.slow
@pytest.mark.parametrize("row", usual_rows({row.name: row for row in ROWS}, USUAL))
def test_a_right_layout_is_equal(tmp_path: Path, row: Any) -> None:
    result = compared(row_config(tmp_path, row, "fp64"), tmp_path)
    assert result["first_difference"] is None, result
    for how in ("restored", "resumed"):
        assert result[how]["first_difference"] is None, result
    assert result["findings"] == []
    assert result["largest"] < 1e-11


@pytest.mark.slow
def test_a_job_of_one_rank_resumes_from_its_checkpoint(tmp_path: Path) -> None:
    result = compared(make_config(tmp_path, dp=1, data=Data("random")), tmp_path)
    assert result["findings"] == []
    assert result["restored"]["first_difference"] is None
    assert result["resumed"]["first_difference"] is None


@pytest.mark.slow
@pytest.mark.parametrize(
    "objective", [exhaustive(name) for name in ("dpo", "orpo", "kto", "distill")]
)
def test_an_objective_is_equal_in_a_layout(tmp_path: Path, objective: Any) -> None:
    config = make_config(tmp_path, dp=2, parallel={"tp": 2}, stage=3, data=Data("random"))
    config = replace(config, train=replace(config.train, objective=objective))
    assert compared(config, tmp_path)["first_difference"] is None


@pytest.mark.slow
@pytest.mark.parametrize("family", [exhaustive("gpt_neox"), exhaustive("gemma2")])
def test_a_model_of_transformers_is_made_small_and_equal(tmp_path: Path, family: str) -> None:
    hf_models.save(family, tmp_path / "model", num_hidden_layers=4)
    shape = hf_models.shape_of(tmp_path / "model", loaded=False)
    config = make_config(tmp_path, dp=2, stage=3, model=shape, data=Data("random"))
    assert miniature(config, tmp_path)[0].model.hf_config["num_hidden_layers"] == 2
    assert compared(config, tmp_path)["first_difference"] is None


@pytest.mark.parametrize(
    "family",
    [
        "axk2",
        "cohere_compass_text",
        "deepseek_v2",
        "deepseek_v32",
        "dots1",
        "dots3_note_text",
        "falcon_h1",
        "gemma3n_text",
        "glm_moe_dsa",
        "hunyuan_v1_dense",
        "hunyuan_v1_moe",
        "lfm2_moe",
        "longcat_flash",
        "ministral",
        "nemotron",
        "qwen4_exp_text",
    ],
)
def test_a_small_model_of_a_type_has_sizes_that_fit(family: str, tmp_path: Path) -> None:
    request = {"type": family, "document": None, "folder": str(tmp_path)}
    found = small_model.answer(request)
    assert found["problem"] is None and found["parameters"] < 300_000
    # What transformers ignores of a published folder, such as layers that predict further tokens.
    keeps = {"deepseek_v32": {"model.layers.61.norm.weight"}}.get(family, set())
    assert keeps <= read_folder(tmp_path).keys()
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    model.set_experts_implementation("eager")
    assert model(input_ids=torch.arange(16)[None], use_cache=False).logits.isfinite().all()

"""Tensors that the layout keeps equal on several ranks are compared bit by bit before they are saved."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from nanoscale.backends.base import StepResult
from nanoscale.backends.gradients import local_tensor
from nanoscale.backends.optimizer import plain_tensors
from nanoscale.checkpoint.store import list_checkpoints
from nanoscale.config.hf.shape import read_shape
from nanoscale.config.resolved import ResolvedConfig
from nanoscale.config.schema import Checkpoint, Guard, Lora, Optimizer
from nanoscale.runs.directory import RunDirectory
from nanoscale.runs.rank_context import StopFlag
from nanoscale.train.checkpointing import _CHUNK, _SETS, _differing, _sums
from nanoscale.train.loop import Training
from tests.support.hf_families import save
from tests.support.jobs import make_config, make_run, train_rank, write_tokens
from tests.support.layouts import MOE
from tests.support.ranks import run_ranks

MATRIX = "layers.0.attention.wq.weight"
NORM = "layers.1.mlp_norm.weight"
BIAS = "balance.bias.layers.1"
FLIPPED_AT = 3
ADAFACTOR = Optimizer("adafactor", lr=1e-2)


@torch.no_grad()
def flip(training: Training, name: str, moment: str = "") -> None:
    """Flip a bit of one element of a rank's shard; rounding could undo a flip of the lowest one."""
    engine: Any = training.engine
    biases = (
        {f"balance.{key}": it for key, it in engine.balance.state().items()}
        if engine.balance
        else {}
    )
    parameter = (dict(engine.named) | biases)[name]
    tensor = engine.optimizer.state[parameter][moment] if moment else parameter
    plain_tensors(local_tensor(tensor))[0].view(-1).view(torch.uint8)[:1].bitwise_xor_(16)


def train_flipped(rank: int, path: Path, wrong: int, name: str, moment: str) -> str:
    """Train as the job does; after step 3 one rank has one flipped bit. Return the error, or the outcome."""
    advance = Training.advance

    def advance_and_flip(training: Training) -> StepResult:
        result = advance(training)
        if rank == wrong and training.progress.step == FLIPPED_AT:
            flip(training, name, moment)
        return result

    Training.advance = advance_and_flip  # type: ignore[method-assign]
    try:
        return train_rank(rank, path, StopFlag())
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def outcomes(config: ResolvedConfig, wrong: int, name: str, moment: str = "") -> list[str]:
    run = make_run(config)
    return run_ranks(train_flipped, config.world_size, run.path, wrong, name, moment)


def steps_of(config: ResolvedConfig) -> list[int]:
    run = RunDirectory(Path(config.run.root) / "run")
    return [checkpoint.step for checkpoint in list_checkpoints(run.checkpoints)]


def saving(folder: Path, guard: int | None = None, **layout: Any) -> ResolvedConfig:
    write_tokens(folder)
    checkpoint = Checkpoint(every=2, keep_last=None, at_end=False)
    config = make_config(folder, checkpoint=checkpoint, **layout)
    return replace(config, guard=Guard(guard), train=replace(config.train, steps=5))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "wrong", "name", "moment", "expected"),
    [
        ({"dp": 2}, 1, MATRIX, "", "ranks 0 and 1 differ in tensors that must be equal"),
        ({"dp": 2}, 0, MATRIX, "exp_avg_sq", "ranks 0 and 1 differ in tensors"),
        ({"dp": 2, "stage": 3, "optimizer": ADAFACTOR}, 0, MATRIX, "exp_avg_sq_row", "ranks 0 and 1 differ"),
        ({"dp": 4}, 2, NORM, "", "rank 2 differs from the 3 other replicas"),
        # Ranks 1 and 3 hold the same columns, and all four the norms.
        ({"dp": 2, "parallel": {"tp": 2}}, 3, MATRIX, "", "ranks 1 and 3 differ"),
        ({"dp": 2, "parallel": {"tp": 2}}, 3, NORM, "", "rank 3 differs from the 3 other replicas"),
        ({"dp": 2, "stage": 3, "model": MOE}, 1, BIAS, "", "ranks 0 and 1 differ"),
        ({"dp": 4, "dp_replicate": 2, "stage": 3}, 2, MATRIX, "", "ranks 0 and 2 differ"),
    ],
)  # fmt: skip
def test_a_flipped_bit_is_found_before_the_checkpoint(
    tmp_path: Path, layout: dict[str, Any], wrong: int, name: str, moment: str, expected: str
) -> None:
    config = saving(tmp_path, **layout)
    texts = outcomes(config, wrong, name, moment)
    place = f"at step 4; the first parameter that differs is {name}"
    assert all(expected in text and place in text for text in texts), texts
    guilty = [rank for rank, text in enumerate(texts) if text.startswith("ReplicaError")]
    assert wrong in guilty
    assert all(f" {rank}" in expected for rank in guilty)
    assert steps_of(config) == [2]


def test_a_base_in_4_bits_is_compared(tmp_path: Path) -> None:
    pytest.importorskip("torchao")
    save("llama", tmp_path / "base")
    model = replace(read_shape(tmp_path / "base"), init_from=str(tmp_path / "base"))
    config = saving(tmp_path, dp=2, stage=3, model=model, lora=Lora(rank=3, base="nf4"))
    texts = outcomes(config, 1, MATRIX)
    place = f"must be equal at step 4; the first parameter that differs is {MATRIX}"
    assert all("ranks 0 and 1 differ" in text and place in text for text in texts), texts


def test_every_step_or_never(tmp_path: Path) -> None:
    always, never = tmp_path / "always", tmp_path / "never"
    for folder in (always, never):
        folder.mkdir()
    texts = outcomes(saving(always, guard=1, dp=2), 1, MATRIX)
    assert all(f"at step {FLIPPED_AT};" in text for text in texts)
    config = saving(never, guard=0, dp=2)
    assert outcomes(config, 1, MATRIX) == ["completed", "completed"]
    assert steps_of(config) == [2, 4]


def test_the_rank_without_a_majority_is_named() -> None:
    others = [-1, 0] * (_SETS - 1)
    rows = [[first, digest, *others] for first, digest in ((0, 7), (0, 7), (0, 8), (3, 9))]
    assert _differing(rows) == (0, [2], [0, 1, 2])
    assert _differing([rows[0], rows[2]]) == (0, [0, 1], [0, 1])
    assert _differing([rows[0], rows[1], rows[3]]) is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.uint8])
@pytest.mark.parametrize("count", [1, 3, 9, _CHUNK["cpu"] + 5])
def test_every_bit_and_the_order_count(dtype: torch.dtype, count: int) -> None:
    def digest(tensor: torch.Tensor) -> list[int]:
        return [part.item() for part in _sums(tensor)]

    values = torch.arange(count).to(dtype)
    before = digest(values)
    assert before == digest(values.clone())
    bits = values.view(torch.uint8)
    for byte in {0, bits.numel() // 2, bits.numel() - 1}:
        for bit in range(8):
            bits[byte] ^= 1 << bit
            assert digest(values) != before
            bits[byte] ^= 1 << bit
    assert count == 1 or digest(values.flip(0)) != before

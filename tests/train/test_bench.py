"""The results of the ranks of `nanoscale bench`; tests/cli/test_bench.py has the command."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from nanoscale.config.composing import frozen
from nanoscale.config.schema import Backend, Checkpoint, Precision
from nanoscale.measure import steps
from nanoscale.runs.directory import RunDirectory, read_json, write_json
from nanoscale.runs.rank_context import RankContext, StopFlag
from tests.support.jobs import PRECISIONS, make_config, write_tokens
from tests.support.ranks import run_ranks

CPU = torch.device("cpu")


def _bench_rank(rank: int, path: Path) -> str:
    run = RunDirectory(path)
    world_size = int(os.environ["WORLD_SIZE"])
    config = frozen.load(run.config)
    return steps.run(RankContext(run, config, rank, rank, world_size, "localhost", 1, StopFlag()))


@pytest.mark.slow
def test_deepspeed_and_a_checkpoint_that_cannot_be_written(tmp_path: Path) -> None:
    """Its steps are broken down like ours, by the same events; a failing disk does not lose the figures."""
    write_tokens(tmp_path)
    config = make_config(
        tmp_path, dp=2, stage=1, precision="fp32", backend=Backend(name="deepspeed")
    )
    config = replace(config, checkpoint=Checkpoint(every=1))
    aside = RunDirectory(tmp_path / "aside")
    aside.path.mkdir()
    aside.config.write_text(frozen.dump(config))
    write_json(aside.task, {"warmup": 1, "steps": 3, "folder": str(tmp_path / "nowhere")})
    assert run_ranks(_bench_rank, 2, aside.path) == ["completed", "completed"]
    found: dict[str, Any] = read_json(aside.result)
    assert len(found["times_s"]) == 3 and min(found["times_s"]) > 0
    for name in ("data", "forward", "backward", "optimizer", "communication"):
        assert found["parts"][f"{name}_s"] > 0, name
    assert set(found["checkpoint"]) == {"problem"}
    # of the last timed step, with the schedule of 20: as the training itself has it
    assert found["loss"] == pytest.approx(_plain_loss(tmp_path, 4), rel=1e-5)


def _plain_loss(folder: Path, step: int) -> float:
    from tests.support.jobs import make_run, read_metrics, train

    config = make_config(folder, precision="fp32")
    run = make_run(config)
    train(run, config)
    return float(read_metrics(run)[step - 1]["loss"])


def test_the_rate_of_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """1 ms for one of the smaller side, 10 ms for one of the larger, and others in the way at first."""
    slow = iter([5.0, 4.0, 3.0, 2.0])

    def seconds(multiply: Any, count: int, _device: object) -> float:
        alone = 0.001 if len(multiply()) == 16 else 0.01
        return count * alone * (1.0 if count == 1 else next(slow, 1.0))

    monkeypatch.setattr(steps, "_SIDES", {"cpu": (16, 32)})
    monkeypatch.setattr(steps, "_seconds", seconds)
    assert steps.matmul_rate(Precision(compute="fp32"), CPU) == pytest.approx(2 * 16**3 / 0.001)


@pytest.mark.parametrize("name", ["fp64", "fp32", "bf16"])
def test_products_are_of_the_type_of_the_blocks(name: str) -> None:
    found = steps._product(PRECISIONS[name], 8, CPU)()
    types = {"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16}
    assert found.shape == (8, 8) and found.dtype == types[name] and found.any()

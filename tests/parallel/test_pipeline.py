"""The pipeline's requirements of PyTorch, and the tensors between stages that it holds."""

from __future__ import annotations

import gc
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import _Action, _add_unshard_reshard
from torch.torch_version import TorchVersion

from nanoscale.common.errors import UserError
from nanoscale.config import layout
from nanoscale.parallel.pipeline import (
    MULTI,
    SINGLE,
    Pipeline,
    _require_torch,
    _Stage,
    gathered_once,
)
from tests.support.ranks import run_ranks

BOUNDARY = (1, 3, 7)


@pytest.mark.parametrize("schedule", sorted({*SINGLE, *MULTI}))
@pytest.mark.parametrize(("version", "splits"), [("2.12.1+cu130", False), ("2.13.0", True)])
def test_backward_passes_are_split_where_torch_can(
    monkeypatch: pytest.MonkeyPatch, schedule: str, version: str, splits: bool
) -> None:
    monkeypatch.setattr(torch, "__version__", TorchVersion(version))
    if splits or schedule not in ("zero-bubble", "zbv", "dualpipev"):
        _require_torch(schedule)
        return
    with pytest.raises(UserError, match=f"schedule={schedule} needs torch 2.13 or newer"):
        _require_torch(schedule)


@pytest.mark.parametrize("group", [(), ("downstream",)], ids=["torch 2.13", "torch 2.14"])
def test_a_stage_receives_in_the_group_that_torch_names(
    monkeypatch: pytest.MonkeyPatch, group: tuple[str, ...]
) -> None:
    monkeypatch.setattr(PipelineStage, "_get_recv_ops", lambda _, infos, *group: (infos, group))
    received: Any = object.__new__(_Stage)._get_recv_ops([], *group)
    assert received == ([], group)


def test_a_stage_is_gathered_before_its_first_use_and_freed_after_its_last() -> None:
    passes = [f"{stage}F{batch}" for batch in range(2) for stage in range(5)]
    passes += [f"{stage}B{batch}" for batch in range(2) for stage in reversed(range(5))]
    gathering = _add_unshard_reshard([_Action.from_str(it) for it in passes])
    texts = [str(it) for it in gathered_once(gathering)]
    assert len(texts) < len(gathering)
    assert [it for it in texts if not it.endswith("SHARD")] == passes
    for stage in range(5):
        uses = [at for at, it in enumerate(texts) if it[:2] in (f"{stage}F", f"{stage}B")]
        gathers, frees = (
            [at for at, it in enumerate(texts) if it == f"{stage}{kind}"]
            for kind in ("UNSHARD", "RESHARD")
        )
        assert len(gathers) == len(frees) == 1
        assert gathers[0] < uses[0] <= uses[-1] < frees[0]


class _Linear(nn.Module):
    """A stage that looks at the tensors between stages that exist in its passes."""

    sequence_shards = 1

    def __init__(self, number: int, stages: int) -> None:
        super().__init__()
        self.first, self.last = number == 0, number == stages - 1
        self.matrix = nn.Linear(7, 7)
        self.most = 0

    def forward(self, hidden: Tensor, targets: Tensor) -> Tensor:
        self.most = max(self.most, len(_between_stages()))
        hidden = self.matrix(hidden[..., None].float().expand(BOUNDARY) if self.first else hidden)
        return hidden.square().mean() if self.last else hidden * 1.0


def _between_stages() -> set[int]:
    """Return the memory of all tensors of the boundary's shape."""
    tensors = [it for it in gc.get_objects() if isinstance(it, Tensor) and it.shape == BOUNDARY]
    return {it.untyped_storage().data_ptr() for it in tensors if it.untyped_storage().nbytes() > 4}


def most_between_stages(rank: int, schedule: str, micro_batches: tuple[int, ...]) -> list[Any]:
    """Return the most tensors between stages at a time for each number of micro batches, and those left."""
    dist.init_process_group("gloo")
    virtual = layout.usual_virtual_stages(schedule)
    parallel: Any = SimpleNamespace(schedule=schedule, pp=2, virtual_stages=virtual)
    stream = torch.empty(0, BOUNDARY[2])
    numbers = layout.stages_of(schedule, 2, virtual, rank)
    result = []
    for count in micro_batches:
        stages: Any = {number: _Linear(number, 2 * virtual) for number in numbers}
        pipeline = Pipeline(stages, parallel, dist.group.WORLD, stream, lambda loss: loss / 3)
        tokens = torch.zeros(count, BOUNDARY[1], dtype=torch.long)
        for _ in range(2):
            pipeline.step(tokens, tokens, None, None, count)
        result.append((max(stage.most for stage in stages.values()), len(_between_stages())))
    return result


@pytest.mark.parametrize(
    "schedule", ["1f1b", "interleaved-1f1b", "zero-bubble", "zbv", "dualpipev"]
)
def test_the_tensors_between_stages_do_not_grow_with_the_micro_batches(schedule: str) -> None:
    for (few, _), (many, left) in run_ranks(most_between_stages, 2, schedule, (8, 40)):
        assert many <= few and left == 0

"""In no step does the host ask for a number that is computed: on a GPU it would wait there for the device."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from nanoscale.backends.native import NativeEngine
from nanoscale.config.schema import Data
from nanoscale.data.batch import Batch
from nanoscale.parallel import process_group
from tests.support.jobs import SEQ_LEN, SHAPE, make_config
from tests.support.ranks import run_ranks

ASKS = {
    "aten::_local_scalar_dense",
    "aten::_unique2",
    "aten::bincount",
    "aten::equal",
    "aten::is_nonzero",
    "aten::masked_select",
    "aten::nonzero",
    "aten::repeat_interleave",
}
"""Operations whose result, or whose result's size, the host has to know."""
Job = dict[str, Any]


def ask(rank: int, world_size: int, jobs: list[Job]) -> list[Counter[str]]:
    """Count a step's host synchronizations of each job, by operation."""
    device = torch.device("cpu")
    process_group.join(world_size, device, 120.0)
    found = []
    for job in jobs:
        config = make_config(Path(), **{"micro_batch": 2} | job)
        engine = NativeEngine(config, device)
        batch = Batch.of_rows(np.random.default_rng(rank).integers(0, 64, (2, SEQ_LEN + 1)))
        if config.data.document_mask:
            documents = np.repeat([[0] * 7 + [1] * (SEQ_LEN - 7)], 2, axis=0)
            batch = replace(batch, documents=documents)
        batches = [batch] * engine.config.accumulation
        engine.train_step(batches, 1e-3)  # the first step of all sets things up
        with Questions() as questions:
            engine.train_step(batches, 1e-3)
        found.append(questions.found)
    process_group.leave()
    return found


class Questions(TorchDispatchMode):
    """A counter of this rank's host synchronizations while it is entered."""

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[str] = Counter()

    def __torch_dispatch__(
        self, operation: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if any(issubclass(one, DTensor) for one in types):
            return NotImplemented  # it comes again with what DTensor makes of it
        if operation.name().partition(".")[0] in ASKS:
            self.found[operation.name()] += 1
        return operation(*args, **kwargs or {})


MASKED = Data("megatron", "tokens", valid_fraction=0.0, packing="whole", document_mask=True)
MIXTURE = replace(SHAPE, experts=4, experts_per_token=2)
ALONE: list[Job] = [
    {"precision": "bf16"},
    {"precision": "fp32"},
    {"parallel": {"activation_checkpointing": "full"}},
    {"parallel": {"activation_checkpointing": "selective"}},
    {"data": MASKED},
    {"precision": "bf16", "model": MIXTURE},
]
TOGETHER: list[Job] = [
    *({"dp": 2, "stage": stage, "precision": "bf16"} for stage in (0, 1, 2, 3)),
    {"dp": 2, "precision": "fp32"},
    {"parallel": {"tp": 2}},
    {"parallel": {"cp": 2, "cp_method": "ring"}},
    {"parallel": {"cp": 2, "cp_method": "ulysses"}},
    {"parallel": {"pp": 2, "schedule": "1f1b"}},
    {"parallel": {"pp": 2, "schedule": "zero-bubble"}},
]


@pytest.mark.slow
@pytest.mark.parametrize(("world_size", "jobs"), [(1, ALONE), (2, TOGETHER)])
def test_no_step_waits(world_size: int, jobs: list[Job]) -> None:
    for found in run_ranks(ask, world_size, world_size, jobs):
        assert dict(zip(map(str, jobs), found, strict=True)) == {str(job): {} for job in jobs}


def test_a_loss_scale_asks_whether_gradients_are_finite() -> None:
    """The update depends on it. So this also shows that a step's synchronizations are counted."""
    ((found,),) = run_ranks(ask, 1, 1, [{"precision": "fp16"}])
    assert found["aten::_local_scalar_dense"] > 0

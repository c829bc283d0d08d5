"""The communication of each ZeRO stage in one optimizer step of several micro batches, by torch's profiler."""

from __future__ import annotations

import math
from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed.tensor import DTensor
from torch.profiler import ProfilerActivity, profile

from nanoscale.backends.native import NativeEngine
from nanoscale.data.batch import Batch
from nanoscale.models.transformer import Transformer
from nanoscale.parallel import process_group
from tests.support.jobs import SEQ_LEN, SHAPE, make_config
from tests.support.ranks import run_ranks

pytestmark = pytest.mark.slow
MICRO_BATCHES = 4
NORM = 1  # the gradient norm of shards is one all-reduce a step
Traffic = dict[str, Any]


def count_rank(rank: int, dp: int, dp_replicate: int, stages: tuple[int, ...]) -> list[Traffic]:
    device = torch.device("cpu")
    process_group.join(dp, device, 120.0)
    found = []
    for stage in stages:
        layout = {"dp": dp, "stage": stage, "dp_replicate": dp_replicate}
        engine = NativeEngine(make_config(Path(), micro_batch=1, **layout), device)
        micro_batches = [Batch.of_rows(np.zeros((1, SEQ_LEN + 1), dtype=np.int64))] * MICRO_BATCHES
        engine.train_step(micro_batches, 1e-3)  # the first step of all sets things up
        with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as profiler:
            engine.train_step(micro_batches, 1e-3)
        assert profiler.profiler is not None
        raw = (
            profiler.profiler.kineto_results.events()
        )  # `profiler.events()` makes a tree of them: seconds
        events = [(e.name(), e.shapes()) for e in raw if e.name().startswith(("c10d::", "gloo:"))]
        found.append(
            {
                # by the size of the gathered or scattered tensors
                "gathers": Counter(s[0][0] for n, s in events if n == "c10d::_allgather_base_"),
                "scatters": Counter(
                    s[1][0] for n, s in events if n == "c10d::_reduce_scatter_base_"
                ),
                "all_reduces": sum(n == "c10d::allreduce_" for n, _ in events),
                "all_reduced": [s[0] for n, s in events if n == "gloo:all_reduce"],
                "local": sum(local_numbers(p) for _, p in engine.parameters()),
            }
        )
    process_group.leave()
    return found


def local_numbers(parameter: torch.Tensor) -> int:
    return (parameter.to_local() if isinstance(parameter, DTensor) else parameter).numel()


@cache
def traffic(dp: int, dp_replicate: int) -> dict[int, Traffic]:
    """Return the traffic of one rank in a step, by stage."""
    stages = (0, 1, 2, 3) if dp_replicate == 1 else (1, 2, 3)
    everyone = run_ranks(count_rank, dp, dp, dp_replicate, stages)
    assert all(found == everyone[0] for found in everyone)
    return dict(zip(stages, everyone[0], strict=True))


def times(blocks: int, embedding: int, head: int) -> Counter[int]:
    """So many times each block, the embedding, and the last norm with the head, by their sizes."""
    with torch.device("meta"):
        model = Transformer(SHAPE)
    size = {name: sum(p.numel() for p in m.parameters()) for name, m in model.named_modules()}
    ends = {size["embed"]: embedding, size["norm"] + size["head"]: head}
    return Counter({size["layers.0"]: blocks * SHAPE.layers} | ends)


def assert_gathers(found: Counter[int], expected: Counter[int]) -> None:
    # torch may gather the head once more: the last backward prefetches the last unit of the previous micro
    # batch.
    assert found in (expected, expected + times(0, 0, 1))


def test_stage_0_reduces_once_a_step() -> None:
    """And its norm not at all: every rank has the whole gradient."""
    found = traffic(2, 1)[0]
    whole = sum(p.numel() for p in Transformer(SHAPE).parameters())
    assert [math.prod(shape) for shape in found["all_reduced"]] == [whole]
    assert not found["gathers"] and not found["scatters"]
    assert found["local"] == whole


LAYOUTS = pytest.mark.parametrize(("dp", "dp_replicate"), [(2, 1), (4, 2)])


@LAYOUTS
def test_stage_1_gathers_and_scatters_once_a_step(dp: int, dp_replicate: int) -> None:
    found = traffic(dp, dp_replicate)[1]
    assert_gathers(found["gathers"], times(1, 1, 1))
    assert found["scatters"] == times(1, 1, 1)


@LAYOUTS
def test_stage_2_scatters_every_micro_batch(dp: int, dp_replicate: int) -> None:
    found = traffic(dp, dp_replicate)[2]
    assert_gathers(found["gathers"], times(1, 1, 1))
    assert found["scatters"] == times(MICRO_BATCHES, MICRO_BATCHES, MICRO_BATCHES)


@LAYOUTS
def test_stage_3_gathers_for_every_forward_and_backward(dp: int, dp_replicate: int) -> None:
    """The head is gathered once for both, since the backward begins where the forward ends."""
    found, twice = traffic(dp, dp_replicate)[3], 2 * MICRO_BATCHES
    assert_gathers(found["gathers"], times(twice, twice, MICRO_BATCHES))
    assert found["scatters"] == times(MICRO_BATCHES, MICRO_BATCHES, MICRO_BATCHES)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_replicas_reduce_each_group_once_a_step(stage: int) -> None:
    groups = SHAPE.layers + 2
    assert traffic(4, 2)[stage]["all_reduces"] == groups + NORM
    assert traffic(2, 1)[stage]["all_reduces"] == NORM


@LAYOUTS
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_parameters_are_in_shards_between_steps(dp: int, dp_replicate: int, stage: int) -> None:
    whole = sum(p.numel() for p in Transformer(SHAPE).parameters())
    assert traffic(dp, dp_replicate)[stage]["local"] == whole * dp_replicate // dp

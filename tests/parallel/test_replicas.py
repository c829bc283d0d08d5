"""Gradients of replicas are the sum over ranks, whatever parameters a rank uses, in any order."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from nanoscale.parallel import ddp, process_group
from tests.support.ranks import run_ranks

SHAPES = [(7, 3), (300,), (5,), (2, 2, 2), (64, 8), (1,)]
MICRO_BATCHES = 3


def loss(parameters: list[nn.Parameter], rank: int, micro_batch: int) -> Tensor:
    """Use the parameters in opposite orders on the two ranks; rank 1 does not use one of them at all."""
    used = [p for i, p in enumerate(parameters) if (rank, i) != (1, 2)]
    order = used if rank == 0 else used[::-1]
    return torch.stack([(p * (rank + 2 * micro_batch + 1)).sin().sum() for p in order]).sum()


def train_rank(rank: int, bucket: int) -> tuple[int, list[np.ndarray]]:
    """Return the number of reductions in the second step, and its gradients."""
    process_group.join(2, torch.device("cpu"), 120.0)
    ddp.FIRST_BUCKET = bucket
    ddp.GRADIENT_BUCKET = bucket  # type: ignore[attr-defined]
    parameters = make_parameters()
    group = dist.group.WORLD
    assert group is not None
    found = ddp.GradientReducer(parameters, group)
    reduced = 0
    send = dist.all_reduce

    def counting(*args: object, **kwargs: object) -> object:
        nonlocal reduced
        reduced += 1
        return send(*args, **kwargs)  # type: ignore[arg-type]

    for step in range(2):
        dist.all_reduce = counting if step else send
        for micro_batch in range(MICRO_BATCHES):
            found.begin_micro_batch(micro_batch == MICRO_BATCHES - 1)
            loss(parameters, rank, micro_batch).backward()
        found.finish()
        grads = [p.grad.numpy() for p in parameters if p.grad is not None]
        for p in parameters:
            p.grad = None
    dist.all_reduce = send
    process_group.leave()
    return reduced, grads


def make_parameters() -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(1)
    return [nn.Parameter(torch.randn(s, generator=generator, dtype=torch.float64)) for s in SHAPES]


@pytest.mark.parametrize(("bucket", "buckets"), [(1, 6), (1000, 3), (1 << 20, 1)])
def test_gradients_are_summed_in_buckets(bucket: int, buckets: int) -> None:
    parameters = make_parameters()
    for rank in range(2):
        for micro_batch in range(MICRO_BATCHES):
            loss(parameters, rank, micro_batch).backward()
    for reduced, grads in run_ranks(train_rank, 2, bucket):
        assert reduced == buckets
        for grad, parameter in zip(grads, parameters, strict=True):
            np.testing.assert_allclose(grad, parameter.grad, rtol=1e-12, atol=1e-12)

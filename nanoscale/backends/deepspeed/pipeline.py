"""Pipelines by DeepSpeed's PipelineModule, in which one layer is a whole stage of ours."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from nanoscale.config.resolved import ResolvedParallel
from nanoscale.models.transformer import Transformer
from nanoscale.parallel.pipeline import Loss

StageInputs = tuple[Tensor | None, Tensor, Tensor | None]
"""A micro batch's documents, or None, its targets, and the references of pairs, or None."""


class FromQueue(nn.Module):
    """A stage that reads its further inputs from a queue: the pipeline passes it only the previous stage's
    output.

    Every rank has the batches, and forward passes run in their order.
    """

    def __init__(self, stage: Transformer, queue: deque[StageInputs]) -> None:
        super().__init__()
        self.stage, self.queue = stage, queue

    def forward(self, hidden: Tensor) -> Tensor:
        output: Tensor = self.stage(hidden, *self.queue.popleft())
        return output


def make_module(
    stage: Transformer,
    number: int,
    parallel: ResolvedParallel,
    loss: Loss,
    queue: deque[StageInputs],
) -> Any:
    """Create the pipeline; this rank has the stage `number`. Ranks are arranged as everywhere here.

    Fill `queue` before each step with the further inputs of its micro batches.
    """
    from deepspeed.pipe import PipelineModule
    from deepspeed.runtime.pipe.topology import PipeModelDataParallelTopology

    layers: list[nn.Module] = [nn.Identity() for _ in range(parallel.pp)]
    layers[number] = FromQueue(stage, queue)
    return PipelineModule(
        layers,
        topology=PipeModelDataParallelTopology(
            num_pp=parallel.pp, num_mp=parallel.tp, num_dp=parallel.dp * parallel.cp
        ),
        loss_fn=lambda loss_sum, _targets: loss(loss_sum),
        partition_method="uniform",
    )


def forward(
    stage: Transformer, tokens: Tensor, others: Sequence[Tensor | None], group: ProcessGroup
) -> Tensor | None:
    """Run a forward pass of `[batch, seq]`; the last stage's rank gets its output, the others None.

    Tensors are sent explicitly, since DeepSpeed's evaluation caches the shape of a batch.
    """
    rank = group.rank()
    hidden = tokens
    if not stage.first:
        dtype = next(stage.parameters()).dtype
        shape = (*tokens.shape, stage.shape.hidden)
        hidden = torch.empty(shape, dtype=dtype, device=tokens.device)
        dist.recv(hidden, group=group, group_src=rank - 1)
    hidden = stage(hidden, *others)
    if stage.last:
        return hidden
    dist.send(hidden.contiguous(), group=group, group_dst=rank + 1)
    return None


def no_timers() -> Any:
    """Return timers that keep nothing. The timers of DeepSpeed's pipeline record every step forever."""
    from deepspeed.utils.timer import NoopTimer

    return NoopTimer()

"""Pipelines by DeepSpeed's PipelineModule, one of its layers a whole stage of ours."""

from __future__ import annotations

from collections import deque
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from nanoscale.config.schema import Parallel
from nanoscale.models.transformer import Transformer
from nanoscale.parallel.pipeline import Loss, without_logits


class WithDocuments(nn.Module):
    """A stage that takes its documents from a queue: its pipeline gives it nothing but the stage before.

    Every rank has the batches, and forward passes follow each other in their order.
    """

    def __init__(self, stage: Transformer, documents: deque[Tensor | None]) -> None:
        super().__init__()
        self.stage, self.documents = stage, documents

    def forward(self, hidden: Tensor) -> Tensor:
        found: Tensor = self.stage(hidden, self.documents.popleft())
        return found


def make_module(
    stage: Transformer,
    number: int,
    parallel: Parallel,
    loss: Loss,
    documents: deque[Tensor | None],
) -> Any:
    """The pipeline of which this rank has the stage `number`; ranks are arranged as everywhere here.

    `documents`: to be filled before each step with those of its micro batches.
    """
    from deepspeed.pipe import PipelineModule
    from deepspeed.runtime.pipe.topology import PipeModelDataParallelTopology

    assert isinstance(parallel.dp, int)
    layers: list[nn.Module] = [nn.Identity() for _ in range(parallel.pp)]
    layers[number] = WithDocuments(stage, documents)
    return PipelineModule(
        layers,
        topology=PipeModelDataParallelTopology(
            num_pp=parallel.pp, num_mp=parallel.tp, num_dp=parallel.dp * parallel.cp
        ),
        loss_fn=without_logits(loss),
        partition_method="uniform",
    )


def forward(
    stage: Transformer, tokens: Tensor, documents: Tensor | None, group: ProcessGroup
) -> Tensor | None:
    """Forward alone, of `[batch, seq]`: the logits on the rank of the last stage, None on others.

    Sent by hand, since DeepSpeed's evaluation remembers the shape of a batch.
    """
    here = group.rank()
    hidden = tokens
    if not stage.first:
        dtype = next(stage.parameters()).dtype
        shape = (*tokens.shape, stage.shape.hidden)
        hidden = torch.empty(shape, dtype=dtype, device=tokens.device)
        dist.recv(hidden, group=group, group_src=here - 1)
    hidden = stage(hidden, documents)
    if stage.last:
        return hidden
    dist.send(hidden.contiguous(), group=group, group_dst=here + 1)
    return None


def no_timers() -> Any:
    """Timers that keep nothing: those of its pipeline keep a record of every step for ever."""
    from deepspeed.utils.timer import NoopTimer

    return NoopTimer()

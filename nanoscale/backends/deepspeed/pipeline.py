"""Pipelines by DeepSpeed's PipelineModule, one of its layers a whole stage of ours."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from nanoscale.config.schema import Parallel
from nanoscale.models.transformer import Transformer
from nanoscale.parallel.pipeline import Loss, without_logits


def make_module(stage: Transformer, number: int, parallel: Parallel, loss: Loss) -> Any:
    """The pipeline of which this rank has the stage `number`; ranks are arranged as everywhere here."""
    from deepspeed.pipe import PipelineModule
    from deepspeed.runtime.pipe.topology import PipeModelDataParallelTopology

    assert isinstance(parallel.dp, int)
    others = [nn.Identity() for _ in range(parallel.pp)]
    return PipelineModule(
        [stage if k == number else others[k] for k in range(parallel.pp)],
        topology=PipeModelDataParallelTopology(
            num_pp=parallel.pp, num_mp=parallel.tp, num_dp=parallel.dp * parallel.cp
        ),
        loss_fn=without_logits(loss),
        partition_method="uniform",
    )


def forward(stage: Transformer, tokens: Tensor, group: ProcessGroup) -> Tensor | None:
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
    hidden = stage(hidden)
    if stage.last:
        return hidden
    dist.send(hidden.contiguous(), group=group, group_dst=here + 1)
    return None


def no_timers() -> Any:
    """Timers that keep nothing: those of its pipeline keep a record of every step for ever."""
    from deepspeed.utils.timer import NoopTimer

    return NoopTimer()

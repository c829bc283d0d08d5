"""Tensor parallelism: matrices split by column then by row, the vocabulary and the sequence divided.

Source: Shoeybi et al. 2019 (Megatron-LM, arXiv:1909.08053), section 3; the division of the sequence between the
blocks is Korthikanti et al. 2022, arXiv:2205.05198, section 4.2.2.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import (
    DTensor,
    Partial,
    Replicate,
    Shard,
    distribute_module,
    distribute_tensor,
)
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn import functional as F

from nanoscale.models.head import Head, TiedHead, logits_or_loss
from nanoscale.models.transformer import Transformer


def apply(model: Transformer, mesh: DeviceMesh, sequence_parallel: bool) -> None:
    """Split one stage of a model over the ranks of `mesh`, in place, on any device.

    Between the blocks the residual stream is `[batch, seq / tp, hidden]` with sequence parallelism, else
    whole. Every rank has the logits of its part of the vocabulary.
    """
    stream = Shard(1) if sequence_parallel else Replicate()
    norm = SequenceParallel() if sequence_parallel else _Replicated()
    gather = PrepareModuleInput(
        input_layouts=(stream, None, None), desired_input_layouts=(Replicate(), None, None)
    )
    gather_one = PrepareModuleInput(input_layouts=(stream,), desired_input_layouts=(Replicate(),))
    block: dict[str, ParallelStyle] = {
        "attention_norm": norm,
        "attention": gather,
        "mlp_norm": norm,
        "attention.wo": RowwiseParallel(output_layouts=stream),
    }
    block |= {f"attention.{name}": ColwiseParallel() for name in ("wq", "wk", "wv")}
    if model.shape.qk_norm:
        # A rank has some of the heads and all of the weights that they share, whose gradients add up.
        heads = SequenceParallel(sequence_dim=2, use_local_output=True)
        block |= {"attention.q_norm": heads, "attention.k_norm": heads}
    if not model.shape.experts:  # those are `expert`'s
        block["mlp"] = gather_one
        block["mlp.up"] = ColwiseParallel()
        block["mlp.down"] = RowwiseParallel(output_layouts=stream)
        if model.shape.mlp == "swiglu":
            block["mlp.gate"] = ColwiseParallel()
    for layer in model.layers.values():
        parallelize_module(layer, mesh, block)
    parallelize_module(model, mesh, _ends(model, stream, norm))
    model.sequence_shards = mesh.size() if sequence_parallel else 1


def _ends(
    model: Transformer, stream: Shard | Replicate, norm: ParallelStyle
) -> dict[str, ParallelStyle]:
    plan: dict[str, ParallelStyle] = {}
    if model.first:
        plan["embed"] = _DividedRows(stream)
    if model.first and model.shape.position == "learned":
        plan["positions"] = _DividedRows(stream)
    if model.last:
        plan["norm"] = norm
        plan["head"] = _DividedHead(stream)
    return plan


class _DividedRows(ParallelStyle):
    """An embedding whose rows are divided; every rank looks up the tokens `[…, seq]` whose rows it has.

    DTensor's own division computes the gradient of all rows on every rank before it adds them up: for a
    vocabulary that is the largest tensor of all.
    """

    def __init__(self, output: Shard | Replicate) -> None:
        self.divides_sequence = output != Replicate()

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        assert isinstance(module, nn.Embedding)
        rows = distribute_tensor(module.weight, device_mesh, [Shard(0)])
        module.register_parameter("weight", nn.Parameter(rows))
        module.forward = partial(self._look_up, module, device_mesh)  # type: ignore[method-assign]
        return module

    def _look_up(self, module: nn.Embedding, mesh: DeviceMesh, tokens: Tensor) -> Tensor:
        rows = _local_rows(module.weight)
        local = tokens - mesh.get_local_rank() * rows.shape[0]
        mine = (local >= 0) & (local < rows.shape[0])
        found = F.embedding(local.where(mine, 0), rows) * mine.unsqueeze(-1)
        parts = DTensor.from_local(found, mesh, [Partial()], run_check=False)
        output = Shard(tokens.ndim - 1) if self.divides_sequence else Replicate()
        return parts.redistribute(placements=[output]).to_local()


class _DividedHead(ParallelStyle):
    """Every rank computes the logits of its rows of the vocabulary, from the hidden states of all tokens."""

    def __init__(self, stream: Shard | Replicate) -> None:
        self.stream = stream

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        assert isinstance(module, Head | TiedHead)
        if isinstance(module, Head):
            rows = distribute_tensor(module.weight, device_mesh, [Shard(0)])
            module.register_parameter("weight", nn.Parameter(rows))
            module.forward = partial(self._own, module, device_mesh)  # type: ignore[method-assign]
        else:
            module.forward = partial(self._apply_rows, module, device_mesh)  # type: ignore[method-assign]
        return module

    def _own(
        self, module: Head, mesh: DeviceMesh, hidden: Tensor, targets: Tensor | None = None
    ) -> Tensor:
        return self._apply_rows(module, mesh, hidden, module.weight, targets)

    def _apply_rows(
        self,
        module: Head | TiedHead,
        mesh: DeviceMesh,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor | None = None,
    ) -> Tensor:
        rows = _local_rows(weight)
        if not isinstance(hidden, DTensor):
            hidden = DTensor.from_local(hidden, mesh, [self.stream], run_check=False)
        whole = hidden.redistribute(placements=[Replicate()]).to_local(grad_placements=[Partial()])
        vocabulary = DividedVocabulary(mesh.get_local_rank() * len(rows), mesh.get_group())
        return logits_or_loss(whole, rows, targets, vocabulary, fused=module.fused)


@dataclass(frozen=True)
class DividedVocabulary:
    """This rank's rows of the head among those of the ranks of `group`: a `Vocabulary`."""

    first: int
    group: ProcessGroup

    def log_sum(self, mine: Tensor) -> Tensor:
        everyone = mine.new_empty(self.group.size(), len(mine))
        dist.all_gather(list(everyone), mine, group=self.group)
        return everyone.logsumexp(dim=0)

    def total(self, mine: Tensor) -> Tensor:
        dist.all_reduce(mine, group=self.group)
        return mine


def _local_rows(weight: Tensor) -> Tensor:
    assert isinstance(weight, DTensor)
    return weight.to_local()


class _Replicated(ParallelStyle):
    """Every rank computes the whole module on the same input; what comes out is a DTensor that says so."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        return distribute_module(module, device_mesh, None, _replicate_input)  # type: ignore[arg-type]


def _replicate_input(_module: nn.Module, inputs: tuple[Tensor], mesh: DeviceMesh) -> DTensor:
    (hidden,) = inputs
    if isinstance(hidden, DTensor):
        return hidden
    return DTensor.from_local(hidden, mesh, (Replicate(),), run_check=False)

"""The residual stream over the ranks of tp: collectives on plain tensors, each the gradient of another.

| the stream | into attention or feed-forward | out of it |
|---|---|---|
| divided along the sequence | gathered | partial sums reduced and scattered |
| whole on every rank | unchanged | partial sums reduced |

The gradient of each of the two directions is the other one.

Sources: the second row is the f and g of Shoeybi et al. 2019, arXiv:1909.08053, section 3; the first the g and
ḡ of Korthikanti et al. 2022, arXiv:2205.05198, section 4.2.2.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any

import torch
import torch._inductor.config
from torch import Tensor, nn
from torch.distributed import _functional_collectives as functional
from torch.distributed._symmetric_memory import (
    enable_symm_mem_for_group,
    is_symm_mem_enabled_for_group,
)
from torch.distributed.device_mesh import DeviceMesh

# As operations that return a new tensor: activation checkpointing can keep their results, and torch.compile
# traces them.
collective = torch.ops._c10d_functional


@dataclass(frozen=True)
class ResidualStream:
    """The residual stream `[…, seq, hidden]` between the blocks, on the ranks of one group."""

    group: str
    ranks: int
    divided: bool
    """True if each rank has `[…, seq / ranks, hidden]`."""

    @staticmethod
    def on_mesh(mesh: DeviceMesh, divided: bool) -> ResidualStream:
        return ResidualStream(mesh.get_group().group_name, mesh.size(), divided)

    def gather(self, hidden: Tensor) -> Tensor:
        """Gather the stream to `[…, seq, hidden]`, from which every rank computes another part of the next
        result."""
        stream = self.group, self.ranks, self.divided
        return _Collective.apply(hidden, _GATHERS, _REDUCES, *stream)

    def reduce(self, partial_sum: Tensor) -> Tensor:
        """Reduce every rank's partial sum `[…, seq, hidden]` to the stream."""
        stream = self.group, self.ranks, self.divided
        return _Collective.apply(partial_sum, _REDUCES, _GATHERS, *stream)

    def wrap(self, module: nn.Module) -> None:
        """Wrap a module that computes a rank's partial sum so that it takes and returns the stream, in
        place."""
        run = module.forward

        def forward(hidden: Tensor, *others: Any) -> Tensor:
            return self.reduce(run(self.gather(hidden), *others))

        module.forward = forward


def fuse_with_products(mesh: DeviceMesh) -> None:
    """Let compiled blocks on GPUs run a gather or a scatter during the product that reads or computes it.

    Inductor finds them in its graph and calls `torch.ops.symm_mem`. The ranks of `mesh` must have NVLink.
    """
    if mesh.device_type == "cuda":
        # Its import takes 0.8 s.
        from nanoscale.parallel.joined_products import JoinProducts

        torch._inductor.config._micro_pipeline_tp = True
        torch._inductor.config.post_grad_custom_pre_pass = JoinProducts()
        with warnings.catch_warnings(action="ignore", category=FutureWarning):
            enable_symm_mem_for_group(mesh.get_group().group_name)


def mean_over_ranks(stream: ResidualStream, local: Tensor) -> Tensor:
    """Return the mean of every rank's tensor, which each rank uses in another part of the result."""
    total = _Collective.apply(local, _REDUCES, _REDUCES, stream.group, stream.ranks, False)
    return total / stream.ranks


_GATHERS, _REDUCES = True, False


class _Collective(torch.autograd.Function):
    """A collective whose gradient is a collective: each gathers or reduces."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, gathers: bool, gathers_back: bool, *stream: Any) -> Tensor:
        ctx.gathers_back, ctx.stream = gathers_back, stream
        return _gather(x, *stream) if gathers else _reduce(x, *stream)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        run = _gather if ctx.gathers_back else _reduce
        return run(grad, *ctx.stream), None, None, None, None, None


def _gather(x: Tensor, group: str, ranks: int, divided: bool) -> Tensor:
    if not divided:
        return x
    gathered = collective.all_gather_into_tensor(x.contiguous(), ranks, group)
    gathered = functional.wait_tensor(gathered)
    if _is_fused(group):
        return torch.cat(gathered.chunk(ranks), x.ndim - 2)
    # Rank by rank, [ranks · …, seq / ranks, hidden]: nothing is copied if there is one sample.
    return gathered.unflatten(0, (ranks, -1)).movedim(0, -3).flatten(-3, -2)


def _reduce(x: Tensor, group: str, ranks: int, divided: bool) -> Tensor:
    if not divided:
        return functional.wait_tensor(collective.all_reduce(x.contiguous(), "sum", group))
    if _is_fused(group):
        x = torch.cat(x.chunk(ranks, x.ndim - 2))
    else:
        x = x.unflatten(-2, (ranks, -1)).movedim(-3, 0).flatten(0, 1).contiguous()
    return functional.wait_tensor(collective.reduce_scatter_tensor(x, "sum", ranks, group))


def _is_fused(group: str) -> bool:
    """True if Inductor fuses collectives with products. It requires chunks along dimension 0, concatenated."""
    return torch.compiler.is_compiling() and is_symm_mem_enabled_for_group(group)  # type: ignore[arg-type]

"""The gradients of one step as a whole: their norm over all ranks, and clipping."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor


def fill(parameters: Sequence[Tensor]) -> list[Tensor]:
    """Return the gradients of parameters; one that no loss uses gets a gradient of zeros, in place.

    The optimizer decays it then. ZeRO's flat buffers and sums over replicas do the same: they have a number for
    every parameter.
    """
    for parameter in parameters:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
    return [p.grad for p in parameters if p.grad is not None]


def global_norm(gradients: list[Tensor]) -> Tensor:
    """Return the 2-norm, a scalar, of the whole model's gradient: all shards, stages and divided matrices
    count once.

    Every rank calls it with its own gradients. Replicated gradients are divided by the number of copies, so
    one sum over all ranks is right in every layout.
    """
    square = square_norm(gradients)
    if dist.is_initialized():
        dist.all_reduce(square)
    return square.sqrt()


def local_norm(gradients: list[Tensor]) -> Tensor:
    """Return the 2-norm of this rank's gradients, a scalar, without communication."""
    return square_norm(gradients).sqrt()


def square_norm(gradients: list[Tensor]) -> Tensor:
    """Return this rank's part of the square of the norm, a scalar, without communication."""
    local = [local_tensor(gradient) for gradient in gradients]
    # A norm in bf16 would have two or three digits.
    dtype = torch.promote_types(local[0].dtype, torch.float32)
    norms = torch.stack(torch._foreach_norm(local, 2, dtype))
    squares, replica_counts = norms.square(), [_replica_count(gradient) for gradient in gradients]
    if max(replica_counts) > 1:
        # Pinned memory avoids a wait of the host for the device.
        divisors = torch.tensor(replica_counts, dtype=norms.dtype, pin_memory=norms.is_cuda)
        squares /= divisors.to(norms.device, non_blocking=True)
    return squares.sum()


def scale(gradients: list[Tensor], factor: Tensor | float) -> None:
    """Multiply all gradients by a factor, in place."""
    torch._foreach_mul_([local_tensor(gradient) for gradient in gradients], factor)


def clip(gradients: list[Tensor], norm: Tensor, limit: float) -> None:
    """Scale the gradient to the norm `limit` if it is longer (Pascanu et al. 2013, arXiv:1211.5063)."""
    scale(gradients, (limit / (norm + 1e-6)).clamp(max=1.0))


@dataclass(frozen=True)
class TiedGradient:
    """The gradient of a tied embedding in a pipeline: its ends hold one copy of the weights each, and make the
    same updates of both."""

    parameter: Tensor
    group: dist.ProcessGroup
    """The ranks that hold the same shard in the first stage and in the last."""

    def add_up(self, gradients: list[Tensor]) -> list[Tensor]:
        """Sum both copies' gradients, in place; return the gradients of this rank that count in the norm."""
        gradient = self.parameter.grad
        assert gradient is not None, "it is filled"
        dist.all_reduce(local_tensor(gradient), group=self.group)
        return gradients if self.group.rank() == 0 else [g for g in gradients if g is not gradient]


def _replica_count(gradient: Tensor) -> int:
    if not isinstance(gradient, DTensor):
        return 1
    sizes = zip(gradient.placements, gradient.device_mesh.shape, strict=True)
    return math.prod(size for placement, size in sizes if placement.is_replicate())


def local_tensor(tensor: Tensor) -> Tensor:
    """Return this rank's shard of a tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor

"""fp32 master weights in addition to the compute copy of the weights, in a single process.

With several processes FSDP2 does the same, so the arithmetic is equal: weights are cast once a step, not at
every product, the residual stream is in the compute dtype, and the gradients of micro batches accumulate in
fp32. Frozen weights have no master and never exist in fp32.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial

import torch
from torch import Tensor, nn


class MasterWeights:
    """fp32 master weights of a model that computes in bf16 or fp16."""

    def __init__(
        self, named_parameters: Iterable[tuple[str, nn.Parameter]], compute_dtype: torch.dtype
    ) -> None:
        """Cast trained parameters to `compute_dtype`, and keep their values as master weights."""
        self.parameters: list[tuple[str, nn.Parameter]] = []
        """The master weights by the names of their parameters, and frozen parameters themselves."""
        self._masters: list[Tensor] = []
        self._compute_copy: list[Tensor] = []
        for name, parameter in named_parameters:
            master = parameter
            if parameter.requires_grad:
                master = nn.Parameter(parameter.data)
                parameter.register_post_accumulate_grad_hook(partial(_move_gradient, master))
                self._masters.append(master)
                self._compute_copy.append(parameter)
                parameter.data = parameter.data.to(compute_dtype)
            self.parameters.append((name, master))

    @torch.no_grad()
    def update_compute_copy(self) -> None:
        """Copy the master weights to the compute copy."""
        torch._foreach_copy_(self._compute_copy, self._masters)


@torch.no_grad()
def _move_gradient(master: nn.Parameter, parameter: Tensor) -> None:
    gradient, parameter.grad = parameter.grad, None
    assert gradient is not None
    if master.grad is None:
        master.grad = gradient.to(master.dtype)
    else:
        master.grad += gradient

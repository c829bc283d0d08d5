"""fp32 master weights beside the compute copy of the weights, in a single process.

With several processes FSDP2 does the same, so the arithmetic is equal: weights are cast once a step, not at
every product, the residual stream is in the compute dtype, and the gradients of micro batches accumulate in
fp32.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial

import torch
from torch import Tensor, nn


class MasterWeights:
    """fp32 master weights of a model that computes in bf16 or fp16."""

    def __init__(self, named: Iterable[tuple[str, nn.Parameter]], narrow: torch.dtype) -> None:
        """Cast the named parameters, trained or frozen, to `narrow`, and keep their values as master
        weights."""
        self.parameters: list[tuple[str, nn.Parameter]] = []
        """The master weights, by the names of their parameters."""
        self._narrow: list[Tensor] = []
        for name, parameter in named:
            master = nn.Parameter(parameter.data, requires_grad=parameter.requires_grad)
            parameter.data = parameter.data.to(narrow)
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(partial(_hand_over, master))
            self.parameters.append((name, master))
            self._narrow.append(parameter)

    @torch.no_grad()
    def narrow(self) -> None:
        """Copy the master weights to the compute copy."""
        torch._foreach_copy_(self._narrow, [master for _, master in self.parameters])


@torch.no_grad()
def _hand_over(master: nn.Parameter, parameter: Tensor) -> None:
    gradient, parameter.grad = parameter.grad, None
    assert gradient is not None
    if master.grad is None:
        master.grad = gradient.to(master.dtype)
    else:
        master.grad += gradient

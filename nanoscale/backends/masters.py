"""Wide weights that are trained, and narrow ones that are computed with, in a single process.

Over several FSDP2 does the same, and so the arithmetic is one: weights are narrowed once a step, not at every
product, the residual stream is narrow, and the gradients of micro batches add up in the width of the masters.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial

import torch
from torch import Tensor, nn


class Masters:
    """Of all parameters of a model, which is narrow from now on, and whose gradients go to their masters."""

    def __init__(self, named: Iterable[tuple[str, nn.Parameter]], narrow: torch.dtype) -> None:
        """`named`: the parameters with their values; those that are trained, and others."""
        self.parameters: list[tuple[str, nn.Parameter]] = []
        """the masters, by the names of what they are masters of"""
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
        """Compute with the masters as they are now."""
        torch._foreach_copy_(self._narrow, [master for _, master in self.parameters])


@torch.no_grad()
def _hand_over(master: nn.Parameter, parameter: Tensor) -> None:
    gradient, parameter.grad = parameter.grad, None
    assert gradient is not None
    if master.grad is None:
        master.grad = gradient.to(master.dtype)
    else:
        master.grad += gradient

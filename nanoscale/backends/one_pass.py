"""Element-wise updates of optimizers in one pass over memory, without effect in a step that is skipped.

On GPUs torch.compile makes one kernel of an update, for parameters of all sizes. On CPUs it runs operation by
operation. A step is skipped on the device: the host does not know it, and does not wait. `found_inf` is the
name of the flag in PyTorch's fused optimizers: 1.0 if the step's gradients are not finite, otherwise 0.0.
"""

from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from types import FunctionType
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from nanoscale.backends.gradients import local_tensor
from nanoscale.config.optimizers import ROUNDED_AT_ONCE

Update = Callable[..., Sequence[Tensor]]
"""A function from tensors `[elements]`, and then numbers, to new values of the first tensors."""


_scalar = partial(torch.tensor, dtype=torch.float64)


def flag(optimizer: Optimizer) -> Tensor | None:
    """Return the flag of the present step; None if no step is skipped on the device."""
    return getattr(optimizer, "found_inf", None)


def run(
    update: Update,
    optimizer: Optimizer,
    targets: Sequence[Tensor],
    inputs: Sequence[Tensor],
    *numbers: float,
    seed: Callable[[int], int] | None = None,
) -> None:
    """Write what an update returns to its targets; a scalar target is of one element.

    Args:
        seed: returns a last number for each chunk, by the chunk's number.
    """
    # As constants of the compiled code, numbers would cause a compilation in each step, and as one tensor two
    # equal numbers would cause one once they differ.
    known = vars(optimizer).setdefault("scalars", defaultdict(lambda: lru_cache(1)(_scalar)))
    # PyTorch would compile a view again for each shape of its base; `data` has none.
    local = [local_tensor(target).view(-1).data for target in targets]
    others = [local_tensor(tensor).reshape(-1).data for tensor in inputs]
    write = _compiled(update, optimizer) if _is_compiled(local[0]) else _write
    # Chunks stay in the cache of a CPU.
    size = ROUNDED_AT_ONCE if write is _write else len(local[0])
    for chunk, start in enumerate(range(0, len(local[0]), max(1, size))):
        numbered: list[tuple[Any, float]] = [*enumerate(numbers)]
        if seed is not None:
            numbered.append(((targets[0], chunk), seed(chunk)))
        cut = slice(start, start + size)
        values, read = (
            [tensor if len(tensor) == 1 else tensor[cut].data for tensor in tensors]
            for tensors in (local, others)
        )
        scalars = [known[key](number) for key, number in numbered]
        write(update, values, read, scalars, flag(optimizer))


def _is_compiled(tensor: Tensor) -> bool:
    return tensor.is_cuda


def _compiled(update: Update, optimizer: Optimizer) -> Callable[..., None]:
    compiled: dict[Update, Callable[..., None]] = vars(optimizer).setdefault("compiled", {})
    if update not in compiled:
        # A copy of the code for each update, since PyTorch counts compilations by code and stops at 8.
        code = _write.__code__.replace(co_name=f"write{update.__name__}")
        compiled[update] = torch.compile(FunctionType(code, globals()), dynamic=True)
    return compiled[update]


def _write(
    update: Update,
    targets: list[Tensor],
    inputs: list[Tensor],
    numbers: list[Tensor],
    found_inf: Tensor | None,
) -> None:
    values = update(*targets, *inputs, *numbers)
    for target, value in zip(targets, values, strict=True):
        _set(target, value, found_inf)


def _set(target: Tensor, value: Tensor, found_inf: Tensor | None) -> None:
    target.copy_(value if found_inf is None else torch.where(found_inf > 0, target, value))


def keep(optimizer: Optimizer, target: Tensor, value: Tensor) -> None:
    """Write a value to its target, unless the step is skipped."""
    _set(target, value, flag(optimizer))

"""Messages in transit: what a rank sends or receives stays in memory until it has waited."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d

from nanoscale.rehearse.played.patches import Patches


class _InTransit:
    """The work of a message, which holds its tensor as NCCL's and gloo's do."""

    def __init__(self, work: Any, tensors: list[Tensor], *, until_wait: bool) -> None:
        self._work, self._tensors, self._until_wait = work, tensors, until_wait

    def wait(self, *timeout: Any) -> bool:
        """Wait; NCCL's work then releases its tensors, and gloo's when it ends itself."""
        if self._until_wait:
            self._tensors = []
        self._work.wait(*timeout)
        return True

    def is_completed(self) -> bool:
        return True


def hold_tensors(patches: Patches, *, on_gpu: bool) -> None:
    """Let the works of messages hold their tensors."""

    def single(plain: Callable[..., Any]) -> Callable[..., Any]:
        def message(tensor: Tensor, *args: Any, **options: Any) -> Any:
            work = plain(tensor, *args, **options)
            return work and _InTransit(work, [tensor], until_wait=on_gpu)

        return message

    def several(plain: Callable[..., Any]) -> Callable[..., Any]:
        def batch_isend_irecv(operations: list[Any]) -> list[Any]:
            works = plain(operations)
            if all(isinstance(work, _InTransit) for work in works):
                return works
            tensors = [operation.tensor for operation in operations]
            return [_InTransit(work, tensors, until_wait=on_gpu) for work in works]

        return batch_isend_irecv

    for name, make in (("isend", single), ("irecv", single), ("batch_isend_irecv", several)):
        replacement = make(getattr(distributed_c10d, name))
        for module in (dist, distributed_c10d):  # which compare the functions by identity
            patches.replace(module, name, replacement)

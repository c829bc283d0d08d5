"""Data parallelism without sharding: every rank has the whole model, and gradients are summed.

Gradients are sent as in DistributedDataParallel: in buckets, during the backward pass. That class wraps the
model's forward, and copies gradients into its buckets and out again; here the received sum is the gradient.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn

from nanoscale.config.layout import GRADIENT_BUCKET

FIRST_BUCKET = 1 << 20
"""Bytes of the first bucket, which is small so that it is sent early."""


@dataclass
class _Bucket:
    parameters: list[nn.Parameter]
    missing: int = 0
    """Gradients that the backward pass has not reached yet."""
    unused: list[nn.Parameter] = field(default_factory=list)
    flat: Tensor | None = None
    work: dist.Work | None = None

    def send(self, group: dist.ProcessGroup) -> None:
        self.unused = [p for p in self.parameters if p.grad is None]
        grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in self.parameters]
        self.flat = torch.cat([grad.flatten() for grad in grads])
        for parameter in self.parameters:
            parameter.grad = None
        self.work = dist.all_reduce(self.flat, group=group, async_op=True)

    def receive(self) -> None:
        assert self.flat is not None and self.work is not None
        self.work.wait()
        sums = self.flat.split([p.numel() for p in self.parameters])
        for parameter, total in zip(self.parameters, sums, strict=True):
            parameter.grad = total.view_as(parameter)
        self.flat = self.work = None


class GradientReducer:
    """The sum over ranks of each parameter's gradient, once a step."""

    def __init__(self, parameters: list[nn.Parameter], group: dist.ProcessGroup) -> None:
        """Order `parameters`, which are the same on every rank, as the forward pass reaches them."""
        self._group = group
        # The backward pass reaches the last ones first.
        self._buckets = list(_make_buckets(list(reversed(parameters))))
        self._sent = len(self._buckets)
        for bucket in self._buckets:
            for parameter in bucket.parameters:
                parameter.register_post_accumulate_grad_hook(partial(self._on_gradient, bucket))

    def begin_micro_batch(self, last: bool) -> None:
        """Set before a forward whether its backward ends the step."""
        if last:
            self._sent = 0
            for bucket in self._buckets:
                bucket.missing = len(bucket.parameters)

    def finish(self) -> list[nn.Parameter]:
        """Wait until every parameter has the sum over ranks as its gradient; return the local unused ones."""
        for bucket in self._buckets[self._sent :]:  # unused parameters have no gradient
            bucket.send(self._group)
        self._sent = len(self._buckets)
        for bucket in self._buckets:
            bucket.receive()
        return [parameter for bucket in self._buckets for parameter in bucket.unused]

    def _on_gradient(self, bucket: _Bucket, _: Tensor) -> None:
        bucket.missing -= 1
        # All ranks send in the same order, whatever the order in which gradients come.
        while self._sent < len(self._buckets) and self._buckets[self._sent].missing == 0:
            self._buckets[self._sent].send(self._group)
            self._sent += 1


def _make_buckets(parameters: list[nn.Parameter]) -> Iterator[_Bucket]:
    bucket, size, limit = _Bucket([]), 0, FIRST_BUCKET
    for parameter in parameters:
        bucket.parameters.append(parameter)
        size += parameter.nbytes
        if size >= limit:
            yield bucket
            bucket, size, limit = _Bucket([]), 0, GRADIENT_BUCKET
    if bucket.parameters:
        yield bucket

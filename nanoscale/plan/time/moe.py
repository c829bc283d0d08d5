"""The time of routing and exchanging tokens in an MoE block, in addition to the experts' matrix products.

The operations are from `models.moe` and `parallel.expert`. All experts are assumed to be chosen equally
often.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from nanoscale.plan.hardware.hardware import Hardware
from nanoscale.plan.time import collectives, operations

if TYPE_CHECKING:
    from nanoscale.plan.time.micro_batch_shape import MicroBatchShape

_ROUTED = {False: (7, 14), True: (11, 22)}
"""True with ep → numbers read and written for each element of the routed rows, forward and backward.

A row is one token for one of its experts. Forward: the permutation and its inverse (2 each), the product with
the router's weights (2), the sum over experts (1). Backward: the gradients of the router's weights (4), the two
permutations (4 and 3), the sum of the gradients of gate and up (3). With ep, each rank also permutes the rows
that it receives."""
_FUSED = {False: (4, 6), True: (6, 10)}
"""The same numbers with one kernel for each permutation, which also weights and sums the rows (Megatron-Core's
moe_permute_fusion)."""
_SCORES = (14, 8)
"""fp32 numbers read and written for each of the router's scores: softmax, bias and top-k; and their
gradient."""
KERNELS = {False: (27, 17), True: (41, 29)}
"""True with ep → kernels of a forward and of a backward pass in addition to a dense block's kernels."""
_HOST = 20e-6
"""Seconds, assumed: the host reads the number of received tokens and starts the next kernels while the device
waits."""


def traffic(shape: MicroBatchShape) -> tuple[float, float]:
    """Return the bytes of the element-wise operations, forward and backward."""
    model, wide = shape.model, operations.WIDTH[shape.dtype]
    rows = shape.tokens * model.experts_per_token * model.hidden * wide
    router = shape.tokens * model.hidden * (wide + 4.0)
    scores = 4.0 * shape.tokens * model.experts
    forward, backward = (_FUSED if shape.software.fused else _ROUTED)[shape.ep > 1]
    return (
        forward * rows + router + _SCORES[0] * scores,
        backward * rows + router + _SCORES[1] * scores,
    )


def exchange(hardware: Hardware, shape: MicroBatchShape) -> tuple[float, float]:
    """Return the seconds of the all-to-alls that send tokens to their experts and back, forward and backward.

    In the forward pass, ranks first exchange the numbers of tokens, and the host waits for these numbers.
    """
    if shape.ep == 1:
        return 0.0, 0.0
    model = shape.model
    rows = shape.tokens * model.experts_per_token * model.hidden * operations.WIDTH[shape.dtype]
    ranks = collectives.group(hardware, shape.ep, shape.tp)
    one_way = collectives.all_to_all(hardware, ranks, rows)
    if shape.software.one_copy:
        experts, islands = model.experts_per_token, max(1.0, ranks.islands)
        token = rows / experts
        near = token * _destinations(ranks.size, experts) * (ranks.inside - 1) / ranks.size
        across = token * _destinations(islands, experts) * (islands - 1) / islands
        one_way = collectives.exchange(hardware, ranks, near, across)
    counts = collectives.all_to_all(hardware, ranks, 8.0 * model.experts) + _HOST
    return 2 * one_way + counts, 2 * one_way


def _destinations(count: float, experts: int) -> float:
    """Return the expected number of ranks or islands, out of `count`, that have one of a token's experts."""
    return count * (1 - (1 - 1 / count) ** experts)

"""The time of routing and exchanging tokens in an MoE block, in addition to the experts' own products.

The operations are those of `models.moe` and `parallel.expert`. As for memory, all experts are assumed to be
chosen equally often.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from nanoscale.plan.hardware.hardware import Hardware
from nanoscale.plan.time import collectives, operations

if TYPE_CHECKING:
    from nanoscale.plan.time.micro_batch_shape import MicroBatchShape

# Passes over memory, in numbers read and written, forward and backward:
_CHOICES = {False: (7, 14), True: (11, 22)}
"""Passes over the rows of all choices, by whether ep is used: they are put in order and back (2 each), weighed
(2), added up (1); backward the gradients of weights make a product of all (4), each order has a copy and a sum
(4 and 3), and those of gate and up are added (3); with ep each rank orders what arrives too."""
_FUSED = {False: (4, 6), True: (6, 10)}
"""The same with one kernel for each permutation, which also weighs and adds up (Megatron-Core's
moe_permute_fusion): read and written once in each order, forward and backward."""
_SCORES = (14, 8)
"""fp32 numbers of the scores: softmax, bias, choice; and its gradient."""
KERNELS = {False: (27, 17), True: (41, 29)}
"""Kernels of a forward and of a backward pass in addition to those of a dense block, by whether ep is used."""
_HOST = 20e-6
"""Seconds, assumed: the host learns how many tokens arrive, and the device waits until the next kernels are
started."""


def traffic(part: MicroBatchShape) -> tuple[float, float]:
    """Return the bytes of the element-wise operations, forward and backward."""
    model, wide = part.model, operations.WIDTH[part.wide]
    rows = part.tokens * model.experts_per_token * model.hidden * wide
    router = part.tokens * model.hidden * (wide + 4.0)
    scores = 4.0 * part.tokens * model.experts
    forward, backward = (_FUSED if part.software.fused else _CHOICES)[part.ep > 1]
    return (
        forward * rows + router + _SCORES[0] * scores,
        backward * rows + router + _SCORES[1] * scores,
    )


def exchange(hardware: Hardware, part: MicroBatchShape) -> tuple[float, float]:
    """Return the seconds of the all-to-alls, forward and backward: tokens to their experts, and back.

    Forward, the numbers of tokens are exchanged first, and the host waits for them.
    """
    if part.ep == 1:
        return 0.0, 0.0
    model = part.model
    rows = part.tokens * model.experts_per_token * model.hidden * operations.WIDTH[part.wide]
    ranks = collectives.group(hardware, part.ep, part.tp)
    once = collectives.all_to_all(hardware, ranks, rows)
    if part.software.one_copy:
        token = rows / model.experts_per_token
        near = (
            token * _reached(ranks.size, model.experts_per_token) * (ranks.inside - 1) / ranks.size
        )
        islands = max(1.0, ranks.islands)
        across = token * _reached(islands, model.experts_per_token) * (islands - 1) / islands
        once = collectives.exchange(hardware, ranks, near, across)
    numbers = collectives.all_to_all(hardware, ranks, 8.0 * model.experts) + _HOST
    return 2 * once + numbers, 2 * once


def _reached(places: float, taken: int) -> float:
    """Return the expected number of equal places that a token reaches with so many choices."""
    return places * (1 - (1 - 1 / places) ** taken)

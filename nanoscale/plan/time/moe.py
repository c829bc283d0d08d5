"""The time of routing and exchanging tokens in an MoE block, in addition to the experts' matrix products.

The operations are from `models.moe` and `parallel.expert`. All experts are assumed to be chosen equally
often.
"""

from nanoscale.config.model_math import routed_share
from nanoscale.plan.hardware.hardware import Hardware
from nanoscale.plan.time import collectives, operations
from nanoscale.plan.time.micro_batch_shape import MicroBatchShape

_SCORES = (14, 8)
"""fp32 numbers read and written for each of the router's scores: softmax, bias and top-k; and their
gradient."""
_WEIGHTED = {False: (3, 6), True: (0, 0)}
"""Compiled → for each element of the hidden layer of the experts: the product with the router's weight. A
compiler fuses it with the activation."""
KERNELS = {False: (36, 20), True: (68, 34)}
"""True with ep → kernels of a forward and of a backward pass in addition to a dense block's kernels."""
_HOST = 20e-6
"""Seconds, assumed: the host reads the number of received tokens and starts kernels while the device waits."""


def traffic(shape: MicroBatchShape) -> tuple[float, float]:
    """Return the bytes of the element-wise operations, forward and backward."""
    model, wide = shape.model, operations.WIDTH[shape.dtype]
    rows = shape.routed * model.experts_per_token * model.hidden * wide
    scores = 4.0 * shape.routed * model.experts
    forward, backward = _permutations(shape)
    weighted = _WEIGHTED[shape.compiled or shape.software.fused]
    inner = shape.tokens * model.experts_per_token * model.ffn / shape.tp * wide
    return (
        forward * rows + weighted[0] * inner + _SCORES[0] * scores,
        backward * rows + weighted[1] * inner + _SCORES[1] * scores,
    )


def _permutations(shape: MicroBatchShape) -> tuple[float, float]:
    """Return the numbers read and written for each element of the routed rows, forward and backward.

    Forward, `models.moe`: rows are gathered (2), and the experts' results read and summed (1 and a row of each
    token). With ep, the same happens between tokens and their copies for each rank. The backward pass has the
    same operations; the rows of gate and of up are summed by themselves (1).
    """
    experts = shape.model.experts_per_token
    if shape.ep == 1:
        forward = 3 + 1 / experts
    else:
        copies = shape.ep * routed_share(shape.model.experts, experts, shape.ep) / experts
        forward = 3 + 4 * copies + 1 / experts
    return forward, forward + 1


def not_recomputed(hardware: Hardware, shape: MicroBatchShape) -> float:
    """Return the seconds of the forward pass's sums over experts, whose results no backward pass needs.

    In parts, `full` repeats them, and compiled `selective` repeats nothing but the gathers of rows.
    """
    model = shape.model
    if not model.experts or (shape.in_parts and shape.recompute == "full"):
        return 0.0
    rows = shape.routed * model.experts_per_token * model.hidden * operations.WIDTH[shape.dtype]
    share = 1 if shape.in_parts and shape.compiled else 0.5
    return operations.elementwise(hardware, share * (_permutations(shape)[0] - 2) * rows)


def one_way(hardware: Hardware, shape: MicroBatchShape) -> float:
    """Return the seconds of an all-to-all that sends tokens to their experts, or back."""
    if shape.ep == 1:
        return 0.0
    model, copies = shape.model, shape.software.copies
    token = shape.routed * model.hidden * operations.WIDTH[shape.dtype]
    ranks = collectives.group(hardware, shape.ep, shape.expert_tp)

    def share(destinations: float) -> float:
        return routed_share(model.experts, model.experts_per_token, destinations)

    near = across = 1.0 * model.experts_per_token / ranks.size
    if copies != "expert":
        near = across = share(ranks.size)
    if copies == "host":
        across = share(max(1.0, ranks.islands)) / max(1.0, ranks.inside)
    within, beyond = ranks.inside - 1, ranks.size - ranks.inside
    return collectives.exchange(hardware, ranks, token * near * within, token * across * beyond)


def counts(hardware: Hardware, shape: MicroBatchShape) -> float:
    """Return the seconds in which ranks exchange the numbers of tokens, for which the host waits."""
    if shape.ep == 1:
        return 0.0
    ranks = collectives.group(hardware, shape.ep, shape.expert_tp)
    return collectives.all_to_all(hardware, ranks, 16.0 * ranks.size) + _HOST

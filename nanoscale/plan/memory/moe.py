"""Memory of an MoE block (`models.moe`, `parallel.expert`): saved tensors and working memory of the backward
pass.

All experts are assumed to be chosen equally often: as many choices arrive at a rank as leave it. If a rank's
experts are chosen more often, its tensors of that width grow by the same share.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from nanoscale.plan.memory.block_shape import Execution, Shape, Sizes

INDEX = 8
"""Bytes of the number of a row or of an expert."""


def saved_by_mixture(shape: Shape, run: Execution) -> Sizes:
    """Return the bytes of every tensor that autograd saves in the feed-forward block."""
    choices, e = shape.tokens * shape.experts_per_token, run.compute
    wide = max(4, e)
    inner = choices * shape.ffn * e
    return {
        "normed middle": shape.tokens * shape.hidden * wide,  # the router's input
        "scores of experts": shape.tokens * shape.experts * wide,
        "weights of choices": choices * (wide + e) + shape.tokens * wide,
        "order of choices": INDEX * choices * (5 if shape.local_experts < shape.experts else 3),
        "dispatched": choices * shape.hidden * e,
        "up": inner,
        "gate": inner,
        "product": inner,
        "activated": inner,
        "found": choices * shape.hidden * e,
    }


def working_of_mixture(shape: Shape, run: Execution) -> int:
    """Return `activations.working_memory` of an MoE block.

    First come the gradients of the experts' outputs, in addition to a product of the same size, or their
    reordered copy. Then, with one kernel for all experts, the order is that of a dense block; with separate
    experts, all gradients of weights are computed before the first matrix of them is assembled, and by then the
    experts' saved tensors are freed.
    """
    choices, e = shape.tokens * shape.experts_per_token, run.compute
    found, inner = choices * shape.hidden * e, choices * shape.ffn * e
    matrix = shape.local_experts * shape.hidden * shape.ffn * e
    stream = shape.tokens // shape.shares * shape.hidden * run.stream
    gathered = shape.tokens * shape.hidden * e if shape.shares > 1 else 0
    if run.grouped:  # the gradient of one matrix is counted elsewhere
        return stream + max(
            gathered + 2 * found - matrix, inner, 2 * inner - found, found - 2 * inner
        )
    together = 3 * matrix - 4 * inner + max(0, matrix - found)
    return stream + max(gathered + 2 * found, together)

"""What a mixture of experts (`models.moe`, `parallel.expert`) keeps for its backward pass, and what that needs.

Every expert is taken to be chosen as often as every other: so many choices arrive at a rank as leave it. A rank
whose experts are chosen more often by a share has the tensors of their width larger by it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from nanoscale.plan.memory.shape import Execution, Shape, Sizes

INDEX = 8
"""bytes of a number of a row or of an expert"""


def saved_by_mixture(shape: Shape, run: Execution) -> Sizes:
    """Bytes of every tensor that autograd saves in the feed-forward block."""
    choices, e = shape.tokens * shape.taken, run.compute
    wide = max(4, e)
    inner = choices * shape.ffn * e
    return {
        "normed middle": shape.tokens * shape.hidden * wide,  # the router's input
        "scores of experts": shape.tokens * shape.experts * wide,
        "weights of choices": choices * (wide + e) + shape.tokens * wide,
        "order of choices": INDEX * choices * (5 if shape.own < shape.experts else 3),
        "dispatched": choices * shape.hidden * e,
        "up": inner,
        "gate": inner,
        "product": inner,
        "activated": inner,
        "found": choices * shape.hidden * e,
    }


def working_of_mixture(shape: Shape, run: Execution) -> int:
    """As `activations.working_memory`, of a block of experts.

    First gradients of what the experts have found, beside a product of the same size, or of their other order.
    Then, in one kernel for all experts, as in a dense block; one after another, all gradients of weights come
    before the first matrix of them is put together, and by then what the experts have saved has gone.
    """
    choices, e = shape.tokens * shape.taken, run.compute
    found, inner = choices * shape.hidden * e, choices * shape.ffn * e
    matrix = shape.own * shape.hidden * shape.ffn * e
    stream = shape.tokens // shape.shares * shape.hidden * run.stream
    gathered = shape.tokens * shape.hidden * e if shape.shares > 1 else 0
    if run.grouped:  # the gradient of one matrix is counted elsewhere
        return stream + max(
            gathered + 2 * found - matrix, inner, 2 * inner - found, found - 2 * inner
        )
    together = 3 * matrix - 4 * inner + max(0, matrix - found)
    return stream + max(gathered + 2 * found, together)

"""Memory of an MoE block (`models.moe`, `parallel.expert`): saved tensors, and the backward pass's working
memory.

All experts are assumed to be chosen equally often, so that a rank receives as many rows as it sends. A row is
one token for one of its experts. If a rank's experts are chosen more often, its tensors of rows grow in
proportion.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from nanoscale.plan.memory.block_shape import Execution, Shape, Sizes

INDEX = 8
"""Bytes of the number of a row or of an expert."""


def saved_by_moe(shape: Shape, run: Execution) -> Sizes:
    """Return the bytes of every tensor that autograd saves in the feed-forward of an MoE block."""
    rows, number = shape.tokens * shape.experts_per_token, run.compute
    router = max(4, number)
    inner = rows * shape.ffn * number
    return {
        "normed middle": shape.tokens * shape.hidden * router,
        "router scores": shape.tokens * shape.experts * router,
        "router weights": rows * (router + number) + shape.tokens * router,
        "order of rows": INDEX * rows * (5 if shape.local_experts < shape.experts else 3),
        "dispatched": rows * shape.hidden * number,
        "up": inner,
        "gate": inner,
        "product": inner,
        "activated": inner,
        "expert outputs": rows * shape.hidden * number,
    }


def moe_working_memory(shape: Shape, run: Execution) -> int:
    """Return `activations.working_memory` of an MoE block.

    The backward pass first computes the gradients of the experts' outputs, which exist twice: with a product of
    the same size, or with a permuted copy. With one kernel for all experts, the rest is computed in the order
    of a dense block. With separate experts, the weight gradients of all experts are computed and the experts'
    saved tensors are freed before the gradients of each matrix are concatenated.
    """
    rows, number = shape.tokens * shape.experts_per_token, run.compute
    outputs, inner = rows * shape.hidden * number, rows * shape.ffn * number
    matrix = shape.local_experts * shape.hidden * shape.ffn * number
    stream = shape.tokens // shape.shares * shape.hidden * run.stream
    gathered = shape.tokens * shape.hidden * number if shape.shares > 1 else 0
    first = gathered + 2 * outputs
    if run.grouped:  # native.py counts the gradient of one matrix
        return stream + max(first - matrix, inner, 2 * inner - outputs, outputs - 2 * inner)
    return stream + max(first, 3 * matrix - 4 * inner + max(0, matrix - outputs))

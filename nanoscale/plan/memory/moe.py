"""Memory of an MoE block (`models.moe`, `parallel.expert`): saved tensors, and the backward pass's working
memory.

All experts are assumed to be chosen equally often, so that a rank receives as many rows as it sends. A row is
one token for one of its experts. If a rank's experts are chosen more often, its tensors of rows grow in
proportion.
"""

from nanoscale.config.model_math import routed_share
from nanoscale.plan.memory.block_shape import Execution, Shape, Sizes

INDEX = 8
"""Bytes of the number of a row or of an expert."""


def saved_by_moe(shape: Shape, run: Execution) -> Sizes:
    """Return the bytes of every tensor that autograd saves in the feed-forward of an MoE block."""
    pairs, number = shape.routed * shape.experts_per_token, run.compute
    router, model = max(4, number), shape.model
    rows = _rows(shape, run)
    inner = rows * shape.ffn * number
    sizes = {
        "normed middle": shape.routed * shape.hidden * number,
        "router scores": shape.routed * shape.model.experts * router,
        "router weights": pairs * (router + number) + shape.routed * router,
        "chosen": INDEX * pairs,
        "order of rows": INDEX * (2 * rows + pairs + shape.routed),
        "dispatched": rows * shape.hidden * number,
        "up": inner,
        "gate": inner,
        "rows of biases": rows * shape.local_experts * number if model.bias and run.grouped else 0,
        **_saved_by_shared(shape, run),
    }
    if shape.local_experts < shape.model.experts:
        sizes["order of copies"] = INDEX * (4 * copies(shape) + shape.routed)
    sizes["product"] = inner
    if not run.fused:
        sizes["unweighted"] = inner
        sizes["activated"] = inner * (4 if shape.model.mlp == "swiglu-clamped" else 1)
    return sizes


def _rows(shape: Shape, run: Execution) -> int:
    """Return the rows of all experts with the zeros that fill tiles of 8-bit products."""
    return shape.routed * shape.experts_per_token + (run.tile - 1) * shape.local_experts


def routing(sizes: Sizes) -> Sizes:
    """Return the tensors that every mode of recomputation keeps: the router's products and the choices."""
    return {"router": sizes["router scores"], "chosen": sizes["chosen"]}


def copies(shape: Shape) -> int:
    """Return the number of copies of a micro batch's tokens that a rank of ep sends, and receives."""
    ranks = shape.model.experts // shape.local_experts
    share = routed_share(shape.model.experts, shape.experts_per_token, ranks)
    return round(shape.routed * share) * ranks


def _saved_by_shared(shape: Shape, run: Execution) -> Sizes:
    """Return the bytes that the block of all tokens saves. In fp32 its input is the router's, unless it gathers
    the sequence by itself."""
    if not shape.model.shared_ffn:
        return {}
    hidden = shape.tokens * shape.hidden * run.compute
    inner = shape.tokens * shape.shared * run.compute
    gate = shape.model.shared_gate
    casts = (2 + gate) if run.autocast else 1
    names = ("gate", "up", "activated", "product")
    return {
        **{f"shared {name}": inner for name in names},
        "shared inputs": casts * hidden if run.compute < 4 or shape.ep_over_tp else 0,
        "shared gating": gate * shape.routed * run.compute,
        "shared down": gate * shape.routed * shape.hidden * run.compute,
    }


def moe_working_memory(shape: Shape, run: Execution) -> int:
    """Return `activations.working_memory` of an MoE block.

    The backward pass first computes the gradients of the experts' outputs, which exist twice: with a product of
    the same size, or with a permuted copy. With one kernel for all experts, the rest is computed in the order
    of a dense block. With separate experts, the weight gradients of all experts are computed and the experts'
    saved tensors are freed before the gradients of each matrix are concatenated.
    """
    rows, number = _rows(shape, run) // (1 + shape.in_halves), run.compute
    outputs, inner = rows * shape.hidden * number, rows * shape.ffn * number
    matrix = shape.local_experts * shape.hidden * shape.ffn * number
    stream = shape.tokens // shape.shares * shape.hidden * run.stream
    is_gathered = shape.shares > 1 and not (shape.ep_over_tp and not shape.model.shared_ffn)
    gathered = shape.tokens * shape.hidden * number if is_gathered else 0
    first = gathered + 2 * outputs
    if run.grouped:  # native.py counts the gradient of one matrix
        saved = saved_by_moe(shape, run)
        freed = sum(saved.get(it, 0) for it in ("up", "gate", "product", "unweighted", "activated"))
        # At last there are the gradients of all matrices, and of the rows of gate and up.
        last = 2 * (matrix + outputs) + inner - freed
        if (
            shape.in_halves
        ):  # and those of the first half, of which one becomes a sum in a new tensor
            freed += 2 * outputs
            last = 6 * matrix - freed if run.fused else 4 * matrix + outputs + inner - freed // 2
        routed = max(first - matrix, inner, 2 * inner - outputs, outputs - 2 * inner, last)
    else:
        routed = max(first, 3 * matrix - 4 * inner + max(0, matrix - outputs))
    if run.fp8:  # copies in 8 bits of results' gradients, twice, of inputs and of a matrix: of down, or of gate
        gate = 2 * (matrix + outputs - inner) + rows * (2 * shape.ffn + shape.hidden)
        routed = max(routed + rows * (2 * shape.hidden + shape.ffn), gate) + matrix // number
    if not shape.model.shared_ffn:
        return stream + routed
    # The backward pass of the shared block comes first, and its gradient of the input stays.
    hidden, shared = shape.tokens * shape.hidden * number, shape.tokens * shape.shared * number
    freed = sum(_saved_by_shared(shape, run).values())
    return stream + max(gathered + hidden + shared, gathered + 2 * shared, hidden - freed + routed)

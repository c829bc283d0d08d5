"""A pass over Inductor's graphs: gradients of one input, summed over several layers, become one product.

The gradient of the input of q, k and v is Σ dYᵢ Wᵢ = [dY₁ dY₂ dY₃] [W₁; W₂; W₃]. Inductor runs a scatter during
the product that computes its input, and not during a sum of products.
"""

from typing import Any

import torch
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files
from torch._inductor.fx_passes.micro_pipeline_tp import find_reduce_scatter_patterns
from torch.fx import Graph, Node
from torch.fx.node import map_arg

aten = torch.ops.aten


class JoinProducts(CustomGraphPass):
    """The pass. Inductor's cache of compiled graphs depends on the source of this file."""

    def __call__(self, graph: Graph) -> None:
        for scatter in find_reduce_scatter_patterns(graph):
            products = _summands(scatter.input_node)
            if products is not None and len(products) > 1:
                _join(graph, scatter.input_node, scatter.scatter_dim, products)
        graph.eliminate_dead_code()

    def uuid(self) -> Any:
        return get_hash_for_files((__file__,))


def _summands(node: Node, is_total: bool = True) -> list[Node] | None:
    """Return the products `[rows, hidden]` whose sum a node is; None if a summand is something else, or is
    needed by itself."""
    if is_total or len(node.users) == 1:
        match node.target, node.args:
            case aten.add.Tensor, (Node() as first, Node() as second) if not node.kwargs:
                left, right = _summands(first, False), _summands(second, False)
                return None if left is None or right is None else left + right
            case aten.reshape.default, (Node(target=aten.mm.default) as product, _):
                return [product]
    return None


def _join(graph: Graph, total: Node, scatter_dim: int, products: list[Node]) -> None:
    """Replace a sum `[…, hidden]` by one product, in the form that Inductor fuses with a scatter."""

    def call(target: Any, *args: Any) -> Node:
        node = graph.call_function(target, args)
        node.meta["val"] = target(*map_arg(args, lambda it: it.meta["val"]))
        return node

    shape = list(total.meta["val"].shape)
    order = list(range(len(shape)))
    order[0], order[scatter_dim] = scatter_dim, 0
    with graph.inserting_before(total):
        # The chunks of the sequence are written one after another, as the fused operation reads them.
        rows = [call(aten.reshape.default, it.args[0], [*shape[:-1], -1]) for it in products]
        gradients = [call(aten.permute.default, it, order) for it in rows]
        joined = call(aten.permute.default, call(aten.cat.default, gradients, -1), order)
        weights = call(aten.cat.default, [product.args[1] for product in products], 0)
        flat = call(aten.reshape.default, joined, [-1, joined.meta["val"].shape[-1]])
        result = call(aten.reshape.default, call(aten.mm.default, flat, weights), shape)
    total.replace_all_uses_with(result)

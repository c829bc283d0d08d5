"""A mixture of experts (MoE): a feed-forward block in which each token uses a few experts. Code for one
device, like `transformer`.

Routing follows Mixtral (Jiang et al. 2024, arXiv:2401.04088, section 2.1) and Qwen3: the softmax over all
experts; the largest weights are kept and normalized to a sum of 1, so they are the softmax over the kept
experts. No token is dropped: an expert accepts every token that chooses it.

A shared block, with the same weights for every token, may be added (Dai et al. 2024, arXiv:2401.06066,
section 3.2).

Shapes: tokens `[tokens, hidden]`; a choice is a token with one of its experts, and there are tokens ·
experts_per_token of them. load `[experts]` counts the choices of each expert.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.library import custom_op
from torch.nn import functional as F

from nanoscale.config.dtypes import fp8_tile
from nanoscale.config.schema import Model
from nanoscale.models.narrow_experts import cast_matrices, multiply_narrow

Activations = tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]
"""Functions of the results of gate and of up, whose product is the input of down."""
BIAS_UNIT = 2.0**-40
"""A router's bias is an integer of these units: no cast of the model to another dtype changes it."""


class MixtureOfExperts(nn.Module):
    """An MoE block, `[batch, seq, hidden]`: the outputs of a token's experts, weighted by its router."""

    def __init__(self, shape: Model, shared: nn.Module | None = None) -> None:
        super().__init__()
        self.router = Router(shape)
        self.experts = Experts(shape)
        self.shared = shared
        self.shared_gate = nn.Linear(shape.hidden, 1, bias=False) if shape.shared_gate else None

    def forward(self, hidden: Tensor) -> Tensor:
        weights, chosen = self.router(hidden)
        combined = self.experts(hidden.flatten(0, 1), weights, chosen).view(hidden.shape)
        return self.add_shared(hidden, combined)

    def add_shared(self, hidden: Tensor, combined: Tensor) -> Tensor:
        """Add the outputs of the shared block, `[batch, seq, hidden]`, if there is one."""
        if self.shared is None:
            return combined
        # Last, so that its backward pass is over before the larger one of the experts begins.
        if self.shared_gate is None:
            return combined + self.shared(hidden)
        return combined + self.shared_gate(hidden).sigmoid() * self.shared(hidden)


class Router(nn.Module):
    """A router: the experts of each token, and their weights."""

    load: Tensor
    """`[experts]`: choices in training's forward passes since the last reset to 0."""
    choice_bias: Tensor
    """`[experts]`: the bias of the choice, in units of `BIAS_UNIT`."""

    def __init__(self, shape: Model) -> None:
        super().__init__()
        self.experts, self.top_k = shape.experts, shape.experts_per_token
        self.normalizes = shape.normalize_experts
        self.scale, self.uses_sigmoid = shape.expert_scale, shape.router == "sigmoid"
        self.groups, self.top_groups = shape.expert_groups, shape.expert_groups_per_token
        self.penalty = 0.0
        """The weight of a sequence's balancing loss in the loss of the backward pass."""
        self.sum_over_sequence: Callable[[Tensor], Tensor] = _same
        """A function from the counts of this rank's part of each sequence to the whole sequence's counts."""
        self.weight = nn.Parameter(torch.empty(shape.experts, shape.hidden))
        self.bias = nn.Parameter(torch.empty(shape.experts)) if shape.bias else None
        for name in ("load", "choice_bias"):
            zero = torch.zeros(shape.experts, dtype=torch.int64)
            self.register_buffer(name, zero, persistent=False)

    def forward(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Route `[batch, seq, hidden]`: the weights and the numbers of the experts, `[tokens, top_k]` both."""
        return Router.choose(self, hidden, self.weight, self.bias)

    def choose(self, hidden: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
        """Choose by scores in fp32 or better, whatever the compute dtype (Fedus et al. 2021, arXiv:2101.03961,
        section 2.4).

        `choice_bias` affects the choice of experts and not their weights, so it has no gradient (Wang et al.
        2024, arXiv:2408.15664, eq. 3).
        """
        tokens = hidden.flatten(0, 1)
        with torch.autocast(hidden.device.type, enabled=False):
            products: Tensor = _RouterProduct.apply(tokens, weight.to(hidden.dtype))
        products = products if bias is None else products + bias.to(products.dtype)
        scores = products.sigmoid() if self.uses_sigmoid else products.softmax(-1)
        # Counted in training alone. The compiler takes no None in place of a tensor that is written.
        load = self.load if torch.is_grad_enabled() else torch.empty_like(self.load)
        biases = (BIAS_UNIT * self.choice_bias.double()).to(scores.dtype)
        biased_scores = scores.detach() + biases
        if self.groups > 1:
            biased_scores = Router._in_best_groups(self, biased_scores)
        chosen = choose_experts(biased_scores, self.top_k, load)
        if self.penalty and torch.is_grad_enabled():
            scores = _AddLoss.apply(
                scores, self.penalty * Router.imbalance(self, scores, chosen, len(hidden))
            )
        weights = scores.gather(1, chosen)
        weights = weights / weights.sum(-1, keepdim=True) if self.normalizes else weights
        return weights * self.scale if self.scale != 1 else weights, chosen

    def _in_best_groups(self, scores: Tensor) -> Tensor:
        """Return the scores, -∞ outside of a token's groups (DeepSeek-AI 2024, arXiv:2412.19437, section
        2.1.2)."""
        grouped = scores.unflatten(-1, (self.groups, -1))
        best = grouped.topk(2).values.sum(-1).topk(self.top_groups).indices
        others = torch.ones(grouped.shape[:-1], dtype=torch.bool, device=scores.device)
        others.scatter_(-1, best, False)
        return grouped.masked_fill(others.unsqueeze(-1), -torch.inf).flatten(-2)

    def imbalance(self, scores: Tensor, chosen: Tensor, batch: int) -> Tensor:
        """Return the imbalance of experts, summed over sequences: Σ f·P over experts, which is 1 in perfect
        balance.

        P is the mean of an expert's scores and f its share of the choices, times the number of experts.
        Source: Fedus et al. 2021, arXiv:2101.03961, eq. 4; by sequence as in DeepSeek-V3, arXiv:2412.19437,
        eq. 17 to 20. If a sequence is divided over ranks, each rank returns the term of its own scores.
        """
        local_counts = torch.stack(
            [
                count(choices_of_sequence, self.experts)
                for choices_of_sequence in chosen.chunk(batch)
            ]
        )
        counts = self.sum_over_sequence(local_counts).to(scores.dtype)
        choices = counts.sum(-1, keepdim=True)
        if self.uses_sigmoid:
            scores = scores / scores.sum(-1, keepdim=True)
        share = counts / choices * self.experts
        mean = scores.view(batch, -1, self.experts).sum(1) * self.top_k / choices
        return (share * mean).sum()


class _AddLoss(torch.autograd.Function):
    """The identity of `x`; its backward pass adds `loss` to the loss."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, loss: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        return grad, grad.new_ones(())


def is_recomputed() -> bool:
    """True in a forward pass that the backward pass repeats."""
    return torch._C._current_graph_task_id() != -1


@custom_op("nanoscale::multiply_router", mutates_args=())
def multiply_router(tokens: Tensor, weight: Tensor) -> Tensor:
    """Return the products in fp32 or better; its operands stay as they are, which GPUs multiply faster."""
    if tokens.device.type == "cuda" and tokens.dtype.itemsize == 2:
        return torch.mm(tokens, weight.T, out_dtype=torch.float32)
    dtype = torch.promote_types(tokens.dtype, torch.float32)
    return tokens.to(dtype) @ weight.to(dtype).T


multiply_router.register_fake(
    lambda tokens, weight: tokens.new_empty(
        len(tokens), len(weight), dtype=torch.promote_types(tokens.dtype, torch.float32)
    )
)


class _RouterProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tokens: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(tokens, weight)
        return multiply_router(tokens, weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        tokens, weight = ctx.saved_tensors
        grad = grad.to(tokens.dtype)
        return grad @ weight, grad.T @ tokens


@custom_op("nanoscale::choose_experts", mutates_args={"load"})
def choose_experts(scores: Tensor, top_k: int, load: Tensor) -> Tensor:
    """Return the experts with the largest scores, int64 `[tokens, top_k]`, and add their counts to `load`.

    One operation, whose result every mode of recomputation keeps: with scores that differ in their last bits, a
    second choice could be another one, and choices would be counted twice.
    """
    chosen = scores.topk(top_k).indices
    load += count(chosen, len(load))
    return chosen


choose_experts.register_fake(
    lambda scores, top_k, _: scores.new_empty(len(scores), top_k, dtype=torch.int64)
)


class Experts(nn.Module):
    """The gated feed-forward blocks of all experts, as one matrix of each kind `[experts, out, in]`, and biases
    `[experts, out]`."""

    def __init__(self, shape: Model) -> None:
        super().__init__()
        experts, hidden, ffn = shape.experts, shape.hidden, shape.ffn
        self.gate = nn.Parameter(torch.empty(experts, ffn, hidden))
        self.up = nn.Parameter(torch.empty(experts, ffn, hidden))
        self.down = nn.Parameter(torch.empty(experts, hidden, ffn))
        self.activations, self.has_biases = activations(shape), shape.bias
        self.recipe = ""
        """The recipe of products in 8 bits; empty: in the compute dtype."""
        self.kept: list[Tensor] = []
        """The matrices in 8 bits, while the micro batches of a step share them."""
        if shape.bias:
            self.gate_bias = nn.Parameter(torch.empty(experts, ffn))
            self.up_bias = nn.Parameter(torch.empty(experts, ffn))
            self.down_bias = nn.Parameter(torch.empty(experts, hidden))

    def cast_once(self, *_: object) -> None:
        """Cast the matrices to 8 bits for the micro batches of a step."""
        if self.recipe and torch.is_grad_enabled() and not self.kept:
            self.kept = cast_matrices(self.recipe, self.gate, self.up, self.down)

    def forward(
        self, tokens: Tensor, weights: Tensor, chosen: Tensor, length: Tensor | None = None
    ) -> Tensor:
        """Return the weighted sums of the outputs of each token's experts, `[tokens, hidden]`.

        A weight scales the input of down in place of its result, which the backward pass then does not need.

        Args:
            weights: `[tokens, slots]`, as `chosen`.
            length: a tensor whose length is the `number` of `ExpertPairs.of_choices`.
        """
        number = chosen.numel() if length is None else len(length)
        biases = (self.gate_bias, self.up_bias, self.down_bias) if self.has_biases else ()
        pairs = ExpertPairs.of_choices(chosen, len(self.gate), number, fp8_tile(self.recipe))
        if self.recipe:  # rows without a pair are zeros of one further token
            tokens, weights = (F.pad(it, (0, 0, 0, 1)) for it in (tokens, weights))
        scales = weights.flatten().gather(0, pairs.slots)
        outputs = run_experts(
            self.activations,
            spread_to(2, tokens, pairs),
            scales,
            pairs.load,
            *(self.gate, self.up, self.down, *biases),
            recipe=self.recipe,
            kept=self.kept,
        )
        sums = sum_rows(outputs, pairs)
        return sums[:-1] if self.recipe else sums


def activations(shape: Model) -> Activations:
    """Return the functions of a gated feed-forward block."""
    kinds: dict[str, Activations] = {
        "swiglu": (F.silu, _same),
        "geglu": (partial(F.gelu, approximate="tanh"), _same),
        "swiglu-clamped": (_bounded_gate, _bounded_up),
    }
    return kinds[shape.mlp]


def _same(x: Tensor) -> Tensor:
    return x


# The block of gpt-oss (OpenAI 2025, arXiv:2508.10925, section 2.2, with the numbers of their code).


def _bounded_gate(gate: Tensor) -> Tensor:
    gate = gate.clamp(max=7.0)
    return gate * torch.sigmoid(1.702 * gate)


def _bounded_up(up: Tensor) -> Tensor:
    return up.clamp(-7.0, 7.0) + 1


def run_experts(
    activations: Activations,
    rows: tuple[Tensor, ...],
    scales: Tensor,
    load: Tensor,
    *weights: Tensor,
    recipe: str = "",
    kept: Sequence[Tensor] = (),
) -> Tensor:
    """Apply the experts to rows sorted by expert, `[rows, hidden]` once for gate and once for up, and multiply
    the results with `[rows]`.

    The weights are gate, up and down, and possibly their biases. Experts without rows take part, so that every
    rank has all gradients.
    """
    device_type = rows[0].device.type
    if torch.is_autocast_enabled(device_type):
        compute_dtype = torch.get_autocast_dtype(device_type)
        rows, weights = (tuple(x.to(compute_dtype) for x in it) for it in (rows, weights))
    scales = scales.to(rows[0].dtype).unsqueeze(-1)
    gate, up, down, *biases = weights
    matmul: Any = partial(_MatmulByExpert.apply, load)
    if recipe or _supports_grouped_mm(rows[0], gate):
        ends = load.cumsum(0, dtype=torch.int32)
        matmul = partial(_grouped_matmul, ends)
        if _leaves_unused_unwritten(load.device):
            gate, up, down = (_ZeroUnused.apply(matrix, load) for matrix in (gate, up, down))
    multiply: Any = partial(multiply_narrow, recipe, ends) if recipe else partial(map, matmul)
    activate, lift = activations
    products = iter(multiply(rows, (gate, up, *kept[:8])))
    if biases:
        experts = torch.arange(len(load), device=load.device)
        expert_of_row = experts.repeat_interleave(load, output_size=len(rows[0]))
        *inner_biases, down_bias = (_BiasOfRows.apply(bias, expert_of_row) for bias in biases)
        products = map(torch.add, products, inner_biases)
    inner = activate(next(products)) * lift(next(products)) * scales
    (result,) = multiply((inner,), (down, *kept[8:]))
    return result + down_bias * scales if biases else result


def _supports_grouped_mm(tokens: Tensor, gate: Tensor) -> bool:
    """True if a GPU's kernel supports the inputs: bf16 and rows of whole 16 bytes."""
    aligned = tokens.shape[1] % 8 == gate.shape[1] % 8 == 0
    return tokens.device.type == "cuda" and tokens.dtype == torch.bfloat16 and aligned


def _leaves_unused_unwritten(device: torch.device) -> bool:
    """True if the kernel's backward pass does not write the gradient of an expert without tokens.

    Source: issue 172439 of PyTorch for Blackwell, and its pull request 174314 for AMD.
    """
    if device.type != "cuda":
        return False
    return torch.version.hip is not None or torch.cuda.get_device_capability() >= (10, 0)


class _ZeroUnused(torch.autograd.Function):
    """The weights `[experts, out, in]` themselves; the gradient of an expert without tokens becomes 0."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, load: Tensor) -> Tensor:
        ctx.save_for_backward(load)
        return weight.view_as(weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (load,) = ctx.saved_tensors
        return grad.masked_fill_((load == 0).view(-1, 1, 1), 0), None  # nobody else has it


class _BiasOfRows(torch.autograd.Function):
    """The biases `[experts, width]` of each row's expert, `[rows, width]`.

    The gradient of an index is not a sum in a fixed order on a GPU, so a product computes it.
    """

    @staticmethod
    def forward(ctx: Any, bias: Tensor, expert_of_row: Tensor) -> Tensor:
        ctx.save_for_backward(expert_of_row)
        ctx.experts = len(bias)
        return bias[expert_of_row]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (expert_of_row,) = ctx.saved_tensors
        experts = torch.arange(ctx.experts, device=grad.device)
        return (experts.unsqueeze(1) == expert_of_row).to(grad.dtype) @ grad, None


def _grouped_matmul(ends: Tensor, tokens: Tensor, weight: Tensor) -> Tensor:
    return F.grouped_mm(tokens, weight.mT, offs=ends)


@custom_op("nanoscale::multiply_by_expert", mutates_args=())
def multiply_by_expert(load: Tensor, rows: Tensor, weight: Tensor) -> Tensor:
    """Return the products of each expert's rows with its matrix, `[experts, out, in]`, one by one."""
    per_expert = zip(rows.split(load.tolist()), weight, strict=True)
    return torch.cat([F.linear(own, matrix) for own, matrix in per_expert])


multiply_by_expert.register_fake(
    lambda _, rows, weight: rows.new_empty(rows.shape[0], weight.shape[1])
)


@custom_op("nanoscale::gradient_by_expert", mutates_args=())
def gradient_by_expert(load: Tensor, rows: Tensor, grad: Tensor) -> Tensor:
    loads = load.tolist()
    per_expert = zip(grad.split(loads), rows.split(loads), strict=True)
    return torch.stack([of_expert.mT @ own for of_expert, own in per_expert])


gradient_by_expert.register_fake(
    lambda load, rows, grad: rows.new_empty(load.shape[0], grad.shape[1], rows.shape[1])
)


class _MatmulByExpert(torch.autograd.Function):
    """The products in dtypes and on devices without a kernel for all experts."""

    @staticmethod
    def forward(ctx: Any, load: Tensor, rows: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(load, rows, weight)
        return multiply_by_expert(load, rows, weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor, Tensor | None]:
        load, rows, weight = ctx.saved_tensors
        of_weight = gradient_by_expert(load, rows, grad) if ctx.needs_input_grad[2] else None
        return None, multiply_by_expert(load, grad, weight.mT), of_weight


def count(chosen: Tensor, experts: int) -> Tensor:
    """Count how often each expert was chosen, int64 `[experts]`, without a host synchronization."""
    chosen = chosen.flatten()
    return chosen.new_zeros(experts).scatter_add_(0, chosen, torch.ones_like(chosen))


class ExpertPairs(NamedTuple):
    """Pairs of a token and one of its experts, sorted by expert, and then by token.

    With a tile, rows without a pair follow the pairs of an expert up to a multiple of it, and the last expert
    has all further rows: their number does not depend on the choices. They belong to one further token, which
    has no pairs.
    """

    load: Tensor
    """`[experts]`: the number of rows of each expert."""
    slots: Tensor
    """`[rows]`: the position of each row's pair in the flat choices `[tokens · slots]`."""
    tokens: Tensor
    """`[rows]`: the token of each row."""
    by_token: Tensor
    """`[pairs]`: the rows of the first token's pairs, then of the second's, and so on."""
    starts: Tensor
    """`[tokens + 1]`: where each token begins in `by_token`."""

    @staticmethod
    def of_choices(chosen: Tensor, experts: int, number: int, tile: int = 1) -> ExpertPairs:
        """Sort the choices `[tokens, slots]` of experts.

        Args:
            number: of choices below `experts`, which are the pairs.
        """
        return ExpertPairs(*sort_choices(chosen, experts, number, tile))


# One operation: the compiler need not know of the number that a slice has.
@custom_op("nanoscale::sort_choices", mutates_args=())
def sort_choices(
    chosen: Tensor, experts: int, number: int, tile: int
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    flat = chosen.flatten()
    pairs = slots = flat.argsort(stable=True)[:number].clone()
    is_pair = flat < experts
    before = is_pair.cumsum(0) - 1
    rows = torch.arange(number, device=chosen.device)
    load = count(flat, experts + 1)[:experts].clone()
    if tile > 1:
        size, added = _filled(number, experts, tile), -load % tile
        added[-1] += size - number - added.sum()
        rows += (added.cumsum(0) - added).repeat_interleave(load, output_size=number)
        slots = flat.new_full((size,), len(flat)).scatter_(0, rows, pairs)
        load += added
    return (
        load,
        slots,
        slots // chosen.shape[1],
        torch.empty_like(pairs).scatter_(0, before[pairs], rows),
        F.pad(is_pair.view(chosen.shape).sum(1), (1, tile > 1)).cumsum(0),
    )


@sort_choices.register_fake
def _(chosen: Tensor, experts: int, number: int, tile: int) -> tuple[Tensor, ...]:
    rows = _filled(number, experts, tile)
    sizes = experts, rows, rows, number, chosen.shape[0] + 1 + (tile > 1)
    return tuple(map(chosen.new_empty, sizes))


def _filled(number: int, experts: int, tile: int) -> int:
    """Return the rows of a number of pairs, which the most uneven choices need."""
    return (number + experts * (tile - 1)) // tile * tile


def spread(x: Tensor, pairs: ExpertPairs) -> Tensor:
    """Return the rows of the pairs' tokens, `[tokens, width]` to `[pairs, width]`."""
    return spread_to(1, x, pairs)[0]


def spread_to(readers: int, x: Tensor, pairs: ExpertPairs) -> tuple[Tensor, ...]:
    """Return the rows for several readers, whose gradients are not added row by row, but for each token."""
    _, _, *order = pairs
    return _Spread.apply(x, readers, *order)


def sum_rows(rows: Tensor, pairs: ExpertPairs) -> Tensor:
    """Return the sums over each token's pairs, `[rows, width]` to `[tokens, width]`."""
    _, _, *order = pairs
    return _SumRows.apply(rows, *order)


# Each is the gradient of the other, and a single operation. The sums have a fixed order, which PyTorch's own
# gradient of an index does not guarantee on a GPU.


class _Spread(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, readers: int, *pairs: Tensor) -> tuple[Tensor, ...]:
        ctx.save_for_backward(*pairs)
        rows = x[pairs[0]]
        return rows, *(rows.view_as(rows) for _ in range(readers - 1))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        _, *order = ctx.saved_tensors
        total, *others = (_sum(grad, *order) for grad in grads)
        for other in others:
            total = total + other
        return total, None, None, None, None


class _SumRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, *pairs: Tensor) -> Tensor:
        ctx.save_for_backward(pairs[0])
        return _sum(rows, *pairs[1:])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (tokens,) = ctx.saved_tensors
        return grad[tokens], None, None, None


def _sum(rows: Tensor, by_token: Tensor, starts: Tensor) -> Tensor:
    sums, *_ = torch.embedding_bag(rows, by_token, starts, mode=0, include_last_offset=True)
    return sums

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

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from nanoscale.config.schema import Model

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
        tokens = hidden.flatten(0, 1)
        weights, chosen = self.router(hidden)
        order, inverse = sort(chosen.flatten())
        load = count(chosen, self.router.experts)
        outputs = self.experts(gather_rows(tokens, order // chosen.shape[1], inverse), load)
        outputs = gather_rows(outputs, inverse, order).view(*chosen.shape, -1)
        combined = (outputs * weights.to(outputs.dtype).unsqueeze(-1)).sum(1).view(hidden.shape)
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
        return self.choose(hidden, self.weight, self.bias)

    def choose(self, hidden: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
        """Choose in fp32 or better, whatever the compute dtype (Fedus et al. 2021, arXiv:2101.03961, section
        2.4).

        `choice_bias` affects the choice of experts and not their weights, so it has no gradient (Wang et al.
        2024, arXiv:2408.15664, eq. 3).
        """
        score_dtype = torch.promote_types(hidden.dtype, torch.float32)
        with torch.autocast(hidden.device.type, enabled=False):
            bias = None if bias is None else bias.to(score_dtype)
            products = F.linear(hidden.flatten(0, 1).to(score_dtype), weight.to(score_dtype), bias)
        scores = products.sigmoid() if self.uses_sigmoid else products.softmax(-1)
        chosen = _choose(partial(self._best, scores.detach()))
        if self.penalty and torch.is_grad_enabled():
            scores = _add_loss(scores, self.penalty * self.imbalance(scores, chosen, len(hidden)))
        weights = scores.gather(1, chosen)
        if torch.is_grad_enabled() and not is_recomputed():
            self.load += count(chosen, self.experts)
        weights = weights / weights.sum(-1, keepdim=True) if self.normalizes else weights
        return weights * self.scale if self.scale != 1 else weights, chosen

    def _best(self, scores: Tensor) -> Tensor:
        """Return the numbers of the experts of each token."""
        biased_scores = scores + (BIAS_UNIT * self.choice_bias.double()).to(scores.dtype)
        if self.groups > 1:
            biased_scores = self._in_best_groups(biased_scores)
        return biased_scores.topk(self.top_k).indices

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


def _add_loss(x: Tensor, loss: Tensor) -> Tensor:
    """Return `x`; its backward pass adds `loss` to the loss."""
    result: Tensor = _AddLoss.apply(x, loss)
    return result


class _AddLoss(torch.autograd.Function):
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


_kept: list[Tensor] | Iterator[Tensor] | None = None
"""The choices of routers that are kept, or repeated; None: neither."""


def _choose(choice: Callable[[], Tensor]) -> Tensor:
    if isinstance(_kept, list):
        _kept.append(choice())
        return _kept[-1]
    return choice() if _kept is None else next(_kept)


@contextmanager
def routing_kept(kept: list[Tensor]) -> Iterator[None]:
    """Keep the choices of routers in a forward pass, and repeat them in its recomputation, whose scores may
    differ in their last bits."""
    global _kept
    before, _kept = _kept, iter(kept) if is_recomputed() else kept
    try:
        yield
    finally:
        _kept = before


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
        if shape.bias:
            self.gate_bias = nn.Parameter(torch.empty(experts, ffn))
            self.up_bias = nn.Parameter(torch.empty(experts, ffn))
            self.down_bias = nn.Parameter(torch.empty(experts, hidden))

    def forward(self, tokens: Tensor, load: Tensor) -> Tensor:
        """Apply the experts to tokens sorted by expert, `[choices, hidden]` to `[choices, hidden]`."""
        biases = (self.gate_bias, self.up_bias, self.down_bias) if self.has_biases else ()
        return run_experts(self.activations, tokens, load, self.gate, self.up, self.down, *biases)


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


def run_experts(activations: Activations, tokens: Tensor, load: Tensor, *weights: Tensor) -> Tensor:
    """Apply the experts, whose weights are gate, up and down, and possibly their biases.

    Experts without tokens take part, so that every rank has all gradients.
    """
    device_type = tokens.device.type
    if torch.is_autocast_enabled(device_type):
        compute_dtype = torch.get_autocast_dtype(device_type)
        tokens, *weights = (x.to(compute_dtype) for x in (tokens, *weights))  # type: ignore[assignment]
    if device_type == "cuda" and _supports_grouped_mm(tokens, weights[0]):
        return _run_grouped(activations, tokens, load, *weights)
    per_expert = zip(tokens.split(load.tolist()), *weights, strict=True)
    return torch.cat([_feed_forward(activations, F.linear, *expert) for expert in per_expert])


def _supports_grouped_mm(tokens: Tensor, gate: Tensor) -> bool:
    """True if the kernel supports the inputs: bf16, rows of whole 16 bytes, and at least one row."""
    aligned = tokens.shape[1] % 8 == gate.shape[1] % 8 == 0
    return tokens.dtype == torch.bfloat16 and aligned and len(tokens) > 0


def _run_grouped(
    activations: Activations, tokens: Tensor, load: Tensor, *weights: Tensor
) -> Tensor:
    """Run all experts in one kernel, which reads the number of tokens of each expert on the device."""
    matrices, biases = weights[:3], weights[3:]
    if _leaves_unused_unwritten(tokens.device):
        matrices = tuple(_ZeroUnused.apply(matrix, load) for matrix in matrices)
    if biases:
        experts = torch.arange(len(load), device=load.device)
        expert_of_row = experts.repeat_interleave(load, output_size=len(tokens))
        biases = tuple(_BiasOfRows.apply(bias, expert_of_row) for bias in biases)
    matmul = partial(_grouped_matmul, load.cumsum(0, dtype=torch.int32))
    return _feed_forward(activations, matmul, tokens, *matrices, *biases)


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


def _feed_forward(
    activations: Activations,
    matmul: Any,
    tokens: Tensor,
    gate: Tensor,
    up: Tensor,
    down: Tensor,
    *biases: Tensor,
) -> Tensor:
    activate, lift = activations
    if not biases:
        return matmul(activate(matmul(tokens, gate)) * lift(matmul(tokens, up)), down)
    of_gate, of_up, of_down = biases
    inner = activate(matmul(tokens, gate) + of_gate) * lift(matmul(tokens, up) + of_up)
    return matmul(inner, down) + of_down


def count(chosen: Tensor, experts: int) -> Tensor:
    """Count how often each expert was chosen, int64 `[experts]`, without a host synchronization."""
    chosen = chosen.flatten()
    return chosen.new_zeros(experts).scatter_add_(0, chosen, torch.ones_like(chosen))


def sort(keys: Tensor) -> tuple[Tensor, Tensor]:
    """Return the stable order that sorts `[rows]` keys, and the order that undoes it."""
    order = keys.argsort(stable=True)
    rows = torch.arange(len(keys), device=keys.device)
    return order, torch.empty_like(order).scatter_(0, order, rows)


def gather_rows(x: Tensor, rows: Tensor, inverse: Tensor) -> Tensor:
    """Return `x[rows]`, in which every row of `x` occurs equally often.

    `inverse` holds the positions of the first row of x in the result, then of the second row, and so on. With
    it the gradient is a sum in a fixed order, which PyTorch's own indexing does not guarantee on a GPU.
    """
    gathered: Tensor = _GatherRows.apply(x, rows, inverse)
    return gathered


class _GatherRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, rows: Tensor, inverse: Tensor) -> Tensor:
        ctx.save_for_backward(inverse)
        ctx.shape = x.shape
        return x[rows]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (inverse,) = ctx.saved_tensors
        rows, width = ctx.shape
        if rows == 0:
            return grad.new_zeros(ctx.shape), None, None
        return grad[inverse].view(rows, -1, width).sum(1), None, None

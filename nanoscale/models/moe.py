"""A feed-forward block of many experts, of which each token takes a few. Code for one device, as `transformer`.

Routing is that of Mixtral (Jiang et al. 2024, arXiv:2401.04088, section 2.1) and Qwen3: the softmax over all
experts, of which the largest are kept and made to add up to 1; that is the softmax over the kept ones alone. No
token is dropped: an expert takes as many as come.

Shapes: tokens `[tokens, hidden]`; a choice is a token with one of its experts, and there are tokens ·
experts_per_token of them. load `[experts]` counts the choices of each expert.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from nanoscale.config.schema import Model


class MixtureOfExperts(nn.Module):
    """`[batch, seq, hidden]`, where a token's experts are mixed by the weights that its router gives them."""

    def __init__(self, shape: Model) -> None:
        super().__init__()
        self.router = Router(shape)
        self.experts = Experts(shape)

    def forward(self, hidden: Tensor) -> Tensor:
        tokens = hidden.flatten(0, 1)
        weights, chosen = self.router(hidden)
        order, back = sort(chosen.flatten())
        load = count(chosen, self.router.experts)
        found = self.experts(take(tokens, order // chosen.shape[1], back), load)
        found = take(found, back, order).view(*chosen.shape, -1)
        mixed = (found * weights.to(found.dtype).unsqueeze(-1)).sum(1)
        return mixed.view(hidden.shape)


class Router(nn.Module):
    """Which experts a token takes, and with what weights."""

    load: Tensor
    """`[experts]`: choices in forward passes of the training since it was last set to 0"""
    lean: Tensor
    """`[experts]`: what the choice is biased by, in units of `balance_rate`"""

    def __init__(self, shape: Model) -> None:
        super().__init__()
        self.experts, self.taken = shape.experts, shape.experts_per_token
        self.rate = shape.balance_rate if shape.balance == "bias" else 0.0
        self.penalty = 0.0
        """what the balancing loss of a sequence counts in the loss that goes backward"""
        self.whole: Callable[[Tensor], Tensor] = _as_it_is
        """counts of this rank's part of each sequence, to those of all of it"""
        self.weight = nn.Parameter(torch.empty(shape.experts, shape.hidden))
        # Whole numbers: no cast of the model to a narrow type touches them, and they add up in any order.
        for name in ("load", "lean"):
            zero = torch.zeros(shape.experts, dtype=torch.int64)
            self.register_buffer(name, zero, persistent=False)

    def forward(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """From `[batch, seq, hidden]` the weights and the numbers of the experts, `[tokens, taken]` both."""
        return self.choose(hidden, self.weight)

    def choose(self, hidden: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        """In fp32 or better, whatever the model computes in (Fedus et al. 2021, arXiv:2101.03961, section 2.4).

        The bias decides which experts are taken and not with what weight, so that it has no gradient
        (Wang et al. 2024, arXiv:2408.15664, eq. 3).
        """
        wide = torch.promote_types(hidden.dtype, torch.float32)
        with torch.autocast(hidden.device.type, enabled=False):
            scores = F.linear(hidden.flatten(0, 1).to(wide), weight.to(wide)).softmax(-1)
        preferred = scores.detach() + self.rate * self.lean.to(wide)
        chosen = preferred.topk(self.taken).indices
        if self.penalty and torch.is_grad_enabled():
            scores = _add_loss(scores, self.penalty * self.uneven(scores, chosen, len(hidden)))
        weights = scores.gather(1, chosen)
        if torch.is_grad_enabled() and not _recomputing():
            self.load += count(chosen, self.experts)
        return weights / weights.sum(-1, keepdim=True), chosen

    def uneven(self, scores: Tensor, chosen: Tensor, batch: int) -> Tensor:
        """How unevenly sequences use the experts, their sum: Σ f·P over experts, and 1 where all is even.

        P is the mean of an expert's scores and f its share of the choices, times the number of experts. Source:
        Fedus et al. 2021, arXiv:2101.03961, eq. 4; by sequence as in DeepSeek-V3, arXiv:2412.19437, eq. 17 to
        20. Of a sequence that is divided, each rank gives the part that its own scores have in it.
        """
        rows = torch.stack([count(part, self.experts) for part in chosen.chunk(batch)])
        counts = self.whole(rows).to(scores.dtype)
        choices = counts.sum(-1, keepdim=True)
        share = counts / choices * self.experts
        mean = scores.view(batch, -1, self.experts).sum(1) * self.taken / choices
        return (share * mean).sum()


def _as_it_is(counts: Tensor) -> Tensor:
    return counts


def _add_loss(x: Tensor, loss: Tensor) -> Tensor:
    """`x`, and `loss` is added to whatever its backward pass begins with."""
    same: Tensor = _AddLoss.apply(x, loss)
    return same


class _AddLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, loss: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        return grad, grad.new_ones(())


def _recomputing() -> bool:
    """Whether this forward pass is activation checkpointing's, within a backward pass."""
    return torch._C._current_graph_task_id() != -1


class Experts(nn.Module):
    """The gated feed-forward blocks of all experts, as one matrix of each kind `[experts, out, in]`."""

    def __init__(self, shape: Model) -> None:
        super().__init__()
        experts, hidden, ffn = shape.experts, shape.hidden, shape.ffn
        self.gate = nn.Parameter(torch.empty(experts, ffn, hidden))
        self.up = nn.Parameter(torch.empty(experts, ffn, hidden))
        self.down = nn.Parameter(torch.empty(experts, hidden, ffn))

    def forward(self, tokens: Tensor, load: Tensor) -> Tensor:
        """Tokens `[choices, hidden]` in the order of their experts, to `[choices, hidden]`."""
        return run_experts(tokens, load, self.gate, self.up, self.down)


def run_experts(tokens: Tensor, load: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    """As `Experts`. Also an expert without a token takes part, so that every rank has a gradient of all."""
    kind = tokens.device.type
    if torch.is_autocast_enabled(kind):
        narrow = torch.get_autocast_dtype(kind)
        tokens, gate, up, down = (x.to(narrow) for x in (tokens, gate, up, down))
    if kind == "cuda" and _suits_the_kernel(tokens, gate):
        return _run_grouped(tokens, load, gate, up, down)
    parts = zip(tokens.split(load.tolist()), gate, up, down, strict=True)
    return torch.cat([_swiglu(F.linear, *part) for part in parts])


def _suits_the_kernel(tokens: Tensor, gate: Tensor) -> bool:
    """It takes bf16 in rows of whole 16 bytes, and at least one of them."""
    aligned = tokens.shape[1] % 8 == gate.shape[1] % 8 == 0
    return tokens.dtype == torch.bfloat16 and aligned and len(tokens) > 0


def _run_grouped(tokens: Tensor, load: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    """All experts in one kernel, which learns on the device how many tokens each of them has."""
    product = partial(_grouped, load.cumsum(0, dtype=torch.int32))
    return _swiglu(product, tokens, gate, up, down)


def _grouped(ends: Tensor, tokens: Tensor, weight: Tensor) -> Tensor:
    return F.grouped_mm(tokens, weight.mT, offs=ends)


def _swiglu(product: Any, tokens: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    return product(F.silu(product(tokens, gate)) * product(tokens, up), down)


def count(chosen: Tensor, experts: int) -> Tensor:
    """How often each expert was chosen, int64 `[experts]`; the host is not waited for."""
    chosen = chosen.flatten()
    return chosen.new_zeros(experts).scatter_add_(0, chosen, torch.ones_like(chosen))


def sort(keys: Tensor) -> tuple[Tensor, Tensor]:
    """The order in which `[rows]` keys rise, equal ones as they stand, and the order that undoes it."""
    order = keys.argsort(stable=True)
    rows = torch.arange(len(keys), device=keys.device)
    return order, torch.empty_like(order).scatter_(0, order, rows)


def take(x: Tensor, rows: Tensor, back: Tensor) -> Tensor:
    """`x[rows]`, where every row of `x` is taken equally often.

    `back`: where in the result the takings of the first row of x stand, then those of the second, and so on.
    With it the gradient is a sum in a fixed order, which PyTorch's own indexing does not promise on a GPU.
    """
    taken: Tensor = _Take.apply(x, rows, back)
    return taken


class _Take(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, rows: Tensor, back: Tensor) -> Tensor:
        ctx.save_for_backward(back)
        ctx.shape = x.shape
        return x[rows]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (back,) = ctx.saved_tensors
        rows, width = ctx.shape
        if rows == 0:
            return grad.new_zeros(ctx.shape), None, None
        return grad[back].view(rows, -1, width).sum(1), None, None

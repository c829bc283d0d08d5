"""The head: from the last hidden states to logits, or to the loss without ever holding the logits of all
tokens.

Sources: the chunks and the gradients computed during the forward pass follow Hsu et al. 2024 (Liger Kernel,
arXiv:2410.10989, section 3.2); the vocabulary shards follow Shoeybi et al. 2019 (Megatron-LM,
arXiv:1909.08053, section 3).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F

IGNORED = -100
"""A target without a loss, as in a `Batch`; PyTorch's own default for `ignore_index`."""
LOGITS_AT_ONCE = 2**28
"""The logits of a chunk: 1 GiB in fp32. More would not make the products faster; less would accumulate the
gradient of the weights more often, each time reading and writing all of it."""
_HEADROOM = 1 / 16
"""A factor that keeps a gradient summed over tokens within fp16's range; exact in all other types."""


class Vocabulary(Protocol):
    """A rank's shard of the head's rows, and the reductions over the other ranks."""

    @property
    def first(self) -> int:
        """The token of this rank's first row."""

    def log_sum(self, mine: Tensor) -> Tensor:
        """Return the logarithm `[tokens, 1]` of the sum of all exponentials, from this rank's."""

    def total(self, mine: Tensor) -> Tensor:
        """Return the sum of a scalar over ranks."""


class Head(nn.Linear):
    """A head from `[batch, seq, hidden]` to logits, or with targets `[batch, seq]` to the sum of their losses,
    a scalar."""

    fused = False
    """True if the operations between the products are compiled."""

    def forward(self, hidden: Tensor, targets: Tensor | None = None) -> Tensor:
        return logits_or_loss(hidden, self.weight, targets, fused=self.fused)


class TiedHead(nn.Module):
    """A head with the embedding's weights `[vocab, hidden]`."""

    fused = False

    def forward(self, hidden: Tensor, weight: Tensor, targets: Tensor | None = None) -> Tensor:
        return logits_or_loss(hidden, weight, targets, fused=self.fused)


def logits_or_loss(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor | None,
    vocabulary: Vocabulary | None = None,
    *,
    fused: bool = False,
) -> Tensor:
    """Return this rank's logits `[batch, seq, vocab]`, or the whole loss of `targets`, a scalar."""
    if targets is None:
        return F.linear(hidden, weight)
    return linear_cross_entropy(hidden, weight, targets, vocabulary, fused=fused)


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    vocabulary: Vocabulary | None = None,
    *,
    fused: bool = False,
) -> Tensor:
    """Return the sum, in fp32 or better, of -log softmax(hidden · weightᵀ) at the targets that are not
    IGNORED.

    Args:
        hidden: `[..., hidden]`.
        weight: `[vocab, hidden]`, or with a `vocabulary` this rank's rows of it; then the gradient of `hidden`
            is this rank's partial sum.
        targets: `[...]`.
        fused: compile the operations between the products, which then read and write logits a third as often.
    """
    if torch.is_autocast_enabled(hidden.device.type):
        narrow = torch.get_autocast_dtype(hidden.device.type)
        hidden, weight = hidden.to(narrow), weight.to(narrow)
    piece = _fused_piece if fused else _piece
    loss: Tensor = _LinearCrossEntropy.apply(
        hidden.flatten(0, -2),
        weight,
        targets.flatten(),
        vocabulary,
        piece,
        torch.is_grad_enabled(),
    )
    return loss


Piece = Callable[[Tensor, "_Wanted", Tensor], Tensor]
"""A function that adds the losses of some tokens to a sum, and turns their logits into their gradient, times
_HEADROOM."""


class _LinearCrossEntropy(torch.autograd.Function):
    """A linear layer with cross-entropy that keeps the gradients of its inputs, which are not larger than
    these, and no logits."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        vocabulary: Vocabulary | None,
        piece: Piece,
        backward_follows: bool,
    ) -> Tensor:
        wide = torch.promote_types(hidden.dtype, torch.float32)
        pieces = -(-len(targets) * len(weight) // LOGITS_AT_ONCE)
        learns, trains = (backward_follows and asked for asked in ctx.needs_input_grad[:2])
        loss = torch.zeros((), dtype=wide, device=hidden.device)
        of_hidden, of_weight = torch.empty_like(hidden) if learns else None, None
        rows = max(1, -(-len(targets) // max(1, pieces)))
        for at in range(0, len(targets), rows):
            some = hidden[at : at + rows]
            wanted = _Wanted(targets[at : at + rows], vocabulary, len(weight))
            gradient = piece(some @ weight.t(), wanted, loss)
            if of_hidden is not None:
                torch.mm(gradient, weight, out=of_hidden[at : at + rows])
            if trains:
                of_weight = _add(of_weight, gradient.t() @ some, wide if pieces > 1 else None)
            del gradient
        ctx.save_for_backward(of_hidden, of_weight)
        ctx.dtypes = hidden.dtype, weight.dtype
        return loss if vocabulary is None else vocabulary.total(loss)

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        factor = upstream / _HEADROOM
        found = [
            None if kept is None else torch.mul(kept, factor, out=kept.new_empty(0, dtype=dtype))
            for kept, dtype in zip(ctx.saved_tensors, ctx.dtypes, strict=True)
        ]
        return *found, None, None, None, None


def _add(total: Tensor | None, product: Tensor, dtype: torch.dtype | None) -> Tensor:
    """Return the sum so far; a first product becomes it, in `dtype` if one is given.

    No caller keeps a name for the product: as large as the weights, it would stay allocated during the next
    chunk.
    """
    if total is not None:
        return total.add_(product)
    return product if dtype is None else product.to(dtype)


class _Wanted:
    """The targets `[tokens]` of a chunk, as this rank's rows of the vocabulary."""

    def __init__(self, targets: Tensor, vocabulary: Vocabulary | None, size: int) -> None:
        self.vocabulary = vocabulary
        counts = mine = targets != IGNORED
        row = targets
        if vocabulary is not None:
            row = targets - vocabulary.first
            mine = counts & (row >= 0) & (row < size)
        self.mine = mine.unsqueeze(1)
        self.row = row.unsqueeze(1).where(self.mine, 0)
        """Arbitrary where `mine` is False."""
        self.weight = (counts * _HEADROOM).unsqueeze(1)
        """The weight of a token's gradient; all three are `[tokens, 1]`."""


def _piece(logits: Tensor, wanted: _Wanted, loss: Tensor) -> Tensor:
    softmax = F.softmax(logits, dim=-1, dtype=loss.dtype)
    # No logarithm of a possible 0: the largest of n probabilities is at least 1/n.
    log_sum = logits.amax(-1, keepdim=True).to(loss.dtype) - softmax.amax(-1, keepdim=True).log()
    scale = weight = wanted.weight.to(loss.dtype)
    if wanted.vocabulary is not None:
        mine, log_sum = log_sum, wanted.vocabulary.log_sum(log_sum)
        scale = weight * (mine - log_sum).exp()
    log_probability = logits.gather(1, wanted.row).to(loss.dtype) - log_sum
    loss -= (log_probability * wanted.mine).sum()
    gradient = torch.mul(softmax, scale, out=logits)
    at_target = (log_probability.exp() - wanted.mine.to(loss.dtype)) * weight
    return gradient.scatter_(1, wanted.row, at_target.to(logits.dtype))


def _fused_piece(logits: Tensor, wanted: _Wanted, loss: Tensor) -> Tensor:
    log_sum = _compiled(_log_sum)(logits, loss.dtype)
    if wanted.vocabulary is not None:
        log_sum = wanted.vocabulary.log_sum(log_sum)
    log_probability = logits.gather(1, wanted.row).to(loss.dtype) - log_sum
    loss -= (log_probability * wanted.mine).sum()
    gradient: Tensor = _compiled(_gradient)(logits, log_sum, wanted.row, wanted.mine, wanted.weight)
    return gradient


@cache
def _compiled(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return torch.compile(function)


def _log_sum(logits: Tensor, dtype: torch.dtype) -> Tensor:
    return logits.to(dtype).logsumexp(dim=-1, keepdim=True)


def _gradient(logits: Tensor, log_sum: Tensor, row: Tensor, mine: Tensor, weight: Tensor) -> Tensor:
    """Compute the gradient of `_piece` in one pass, without writing in place."""
    softmax = (logits.to(log_sum.dtype) - log_sum).exp()
    hit = (torch.arange(logits.shape[1], device=logits.device) == row) & mine
    return ((softmax - hit.to(softmax.dtype)) * weight.to(softmax.dtype)).to(logits.dtype)

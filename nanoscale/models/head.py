"""The head: from the last hidden states to logits, or to the loss without ever holding the logits of all
tokens.

Sources: the chunks and the gradients computed during the forward pass follow Hsu et al. 2024 (Liger Kernel,
arXiv:2410.10989, section 3.2); the vocabulary shards follow Shoeybi et al. 2019 (Megatron-LM,
arXiv:1909.08053, section 3).
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from nanoscale.common.errors import UserError
from nanoscale.data.batch import IGNORED
from nanoscale.models.distillation import Distillation
from nanoscale.models.preferences import Objective

LOGITS_AT_ONCE = 2**28
"""The logits of a chunk: 1 GiB in fp32. More would not make the products faster; less would accumulate the
gradient of the weights more often, each time reading and writing all of it."""
_HEADROOM = 1 / 16
"""A factor that keeps a gradient summed over tokens within fp16's range; exact in all other types."""


TokenLosses = Callable[[Tensor, Tensor], Tensor]
"""A function from logits `[tokens, vocab]`, in fp32 or better, and targets `[tokens]` to the losses `[tokens]`;
losses of targets that are IGNORED do not count."""


@dataclass(frozen=True)
class VocabularyShard:
    """This rank's rows of the head, which the ranks of `group` share, and reductions over them."""

    first: int
    """The token of this rank's first row."""
    group: ProcessGroup

    def log_sum(self, local: Tensor) -> Tensor:
        """Return the logarithm `[tokens, 1]` of the sum of all exponentials, from this rank's."""
        all_log_sums = local.new_empty(self.group.size(), *local.shape)
        dist.all_gather(list(all_log_sums), local, group=self.group)
        return all_log_sums.logsumexp(dim=0)

    def gather(self, logits: Tensor) -> Tensor:
        """Return the logits of all rows, with the gradient of this rank's rows."""
        return _Gathered.apply(logits, self)


class _Gathered(torch.autograd.Function):
    """The logits of all ranks, which all compute the same losses of them."""

    @staticmethod
    def forward(ctx: Any, local: Tensor, shard: VocabularyShard) -> Tensor:
        ctx.first, ctx.rows = shard.first, local.shape[-1]
        parts = [torch.empty_like(local) for _ in range(shard.group.size())]
        dist.all_gather(parts, local.contiguous(), group=shard.group)
        return torch.cat(parts, dim=-1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad.narrow(-1, ctx.first, ctx.rows), None


class LossSettings:
    """The loss that a head computes."""

    fused = False
    """True if the operations between the products are compiled."""
    z_loss = 0.0
    """The weight of the z-loss, as in `train.z_loss`."""
    softcap: float | None = None
    """The bound of the logits, as in `model.logit_softcap`."""
    objective: Objective | None = None
    """The loss of pairs; None: each token has a loss of its own."""
    token_losses: TokenLosses | None = None
    """The user's own loss; None: cross-entropy."""
    distillation: Distillation | None = None
    """The loss of tokens with `references`; None: there are none."""


class Head(LossSettings, nn.Linear):
    """A head from `[batch, seq, hidden]` to logits, or with targets `[batch, seq]` to the sum of their losses,
    a scalar."""

    def forward(
        self, hidden: Tensor, targets: Tensor | None = None, references: Tensor | None = None
    ) -> Tensor:
        return logits_or_loss(hidden, self.weight, targets, self, references=references)


class TiedHead(LossSettings, nn.Module):
    """A head with the embedding's weights `[vocab, hidden]`."""

    def forward(
        self,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor | None = None,
        references: Tensor | None = None,
    ) -> Tensor:
        return logits_or_loss(hidden, weight, targets, self, references=references)


def logits_or_loss(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor | None,
    head: LossSettings,
    vocabulary: VocabularyShard | None = None,
    references: Tensor | None = None,
) -> Tensor:
    """Return this rank's logits `[batch, seq, vocab]`, or the whole loss of `targets`, a scalar.

    `references` are from a `Batch`, bit for bit as int64: FSDP2 would round floats to the compute dtype.
    """
    references = None if references is None else references.view(torch.float64)
    if targets is None:
        return _logits(hidden, weight, head.softcap)
    if head.token_losses is not None:
        return _own_loss(head.token_losses, hidden, weight, targets, vocabulary, head.softcap)
    compute = partial(
        linear_cross_entropy,
        weight=weight,
        vocabulary=vocabulary,
        fused=head.fused,
        z_loss=head.z_loss,
        softcap=head.softcap,
    )
    if head.distillation is not None and references is not None:
        return head.distillation.loss(compute, hidden, targets, references)
    if head.objective is None:
        return compute(hidden, targets=targets)
    assert references is not None, "pairs have them"
    with torch.no_grad():
        rows = zip(hidden, targets, strict=True)
        losses = torch.stack([compute(row, targets=row_targets) for row, row_targets in rows])
    value, weights = head.objective.value_and_weights(losses, targets, references)
    if not torch.is_grad_enabled():
        return value
    # The logits once more: a token's gradient needs the loss of its whole pair.
    weighted = compute(
        hidden, targets=targets, token_weights=weights.unsqueeze(1).expand_as(targets)
    )
    return value + (weighted - weighted.detach())


def _logits(hidden: Tensor, weight: Tensor, softcap: float | None) -> Tensor:
    logits = F.linear(hidden, weight)
    return logits if softcap is None else softcap * (logits / softcap).tanh()


def sum_of_losses(token_losses: TokenLosses, logits: Tensor, targets: Tensor) -> Tensor:
    """Return the sum of the losses of the targets `[tokens]` that count."""
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    losses = token_losses(logits, targets)
    if losses.shape != targets.shape:
        what = f"{list(losses.shape)}, and each of {len(targets)} tokens has one loss"
        raise UserError("hooks", f"loss() of hooks.path returned {what}")
    return losses.where(targets != IGNORED, 0).sum()


def _own_loss(
    token_losses: TokenLosses,
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    vocabulary: VocabularyShard | None,
    softcap: float | None,
) -> Tensor:
    """Return the sum of the user's losses; of several chunks, the logits of one are in memory at a time."""

    def loss(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        logits = _logits(hidden, weight, softcap)
        whole = logits if vocabulary is None else vocabulary.gather(logits)
        return sum_of_losses(token_losses, whole, targets)

    hidden, targets = hidden.flatten(0, -2), targets.flatten()
    rows = len(weight) * (1 if vocabulary is None else vocabulary.group.size())  # all are gathered
    chunks = max(1, -(-len(targets) * rows // LOGITS_AT_ONCE))
    if chunks == 1:
        return loss(hidden, weight, targets)
    parts = zip(hidden.chunk(chunks), targets.chunk(chunks), strict=True)
    losses = [checkpoint(loss, part, weight, its, use_reentrant=False) for part, its in parts]
    return torch.stack(losses).sum()


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    vocabulary: VocabularyShard | None = None,
    *,
    fused: bool = False,
    z_loss: float = 0.0,
    softcap: float | None = None,
    token_weights: Tensor | None = None,
    temperature: float = 1.0,
) -> Tensor:
    """Return the sum, in fp32 or better, of -log softmax(hidden · weightᵀ) at the targets that are not
    IGNORED.

    Args:
        hidden: `[..., hidden]`.
        weight: `[vocab, hidden]`, or with a `vocabulary` this rank's rows of it; then the gradient of `hidden`
            is this rank's partial sum.
        targets: `[...]`, or `[..., n]` with a weight for each.
        fused: compile the operations between the products, which then read and write logits a third as often.
        z_loss: the weight of the square of the logarithm of the sum of exponentials (Chowdhery et al. 2022,
            PaLM, section 5), which only the gradients have.
        softcap: the bound of the logits; None: none.
        token_weights: `[...]`, the weights of the tokens' losses, which only the gradients have; None: 1. Of
            targets `[..., n]` the weights of all, which the loss has too.
        temperature: the divisor of the bounded logits.
    """
    if temperature != 1:  # c · tanh(z / c) / T = c / T · tanh((z / T) / (c / T))
        hidden = hidden / temperature
        softcap = None if softcap is None else softcap / temperature
    if torch.is_autocast_enabled(hidden.device.type):
        compute_dtype = torch.get_autocast_dtype(hidden.device.type)
        hidden, weight = hidden.to(compute_dtype), weight.to(compute_dtype)
    chunk_loss = _fused_chunk_loss if fused and targets.ndim < hidden.ndim else _chunk_loss
    return _LinearCrossEntropy.apply(
        hidden.flatten(0, -2),
        weight,
        targets.flatten(0, hidden.ndim - 2),
        vocabulary,
        chunk_loss,
        z_loss,
        softcap,
        None if token_weights is None else token_weights.flatten(0, hidden.ndim - 2),
        torch.is_grad_enabled(),
    )


ChunkLoss = Callable[[Tensor, "_ChunkTargets", Tensor, bool], Tensor | None]
"""A function that adds the losses of some tokens to a sum. If a backward pass follows, it turns their logits
into their gradient, times _HEADROOM; otherwise it returns None."""


class _LinearCrossEntropy(torch.autograd.Function):
    """A linear layer with cross-entropy that keeps the gradients of its inputs, which are not larger than
    these, and no logits."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        vocabulary: VocabularyShard | None,
        chunk_loss: ChunkLoss,
        z_loss: float,
        softcap: float | None,
        token_weights: Tensor | None,
        backward_follows: bool,
    ) -> Tensor:
        sum_dtype = torch.promote_types(hidden.dtype, torch.float32)
        chunks = -(-len(targets) * len(weight) // LOGITS_AT_ONCE)
        hidden_needs_grad, weight_needs_grad = (
            backward_follows and needed for needed in ctx.needs_input_grad[:2]
        )
        loss = torch.zeros((), dtype=sum_dtype, device=hidden.device)
        grad_hidden, grad_weight = torch.empty_like(hidden) if hidden_needs_grad else None, None
        rows = max(1, -(-len(targets) // max(1, chunks)))
        for start in range(0, len(targets), rows):
            chunk = hidden[start : start + rows]
            part = targets[start : start + rows]
            weights = None if token_weights is None else token_weights[start : start + rows]
            chunk_targets = _ChunkTargets(part, vocabulary, len(weight), z_loss, weights)
            needs_grad = hidden_needs_grad or weight_needs_grad
            logits, slope = chunk @ weight.t(), None
            if softcap is not None:
                logits.div_(softcap).tanh_().mul_(
                    softcap
                )  # Gemma Team 2024, arXiv:2408.00118, section 2
                slope = 1 - (logits / softcap).square_() if needs_grad else None
            grad_logits = chunk_loss(logits, chunk_targets, loss, needs_grad)
            del logits
            if grad_logits is None:
                continue
            if slope is not None:
                grad_logits.mul_(slope)
            del slope
            if grad_hidden is not None:
                torch.mm(grad_logits, weight, out=grad_hidden[start : start + rows])
            if weight_needs_grad:
                grad_weight = _add(
                    grad_weight, grad_logits.t() @ chunk, sum_dtype if chunks > 1 else None
                )
            del grad_logits
        ctx.save_for_backward(grad_hidden, grad_weight)
        ctx.dtypes = hidden.dtype, weight.dtype
        if vocabulary is not None:
            dist.all_reduce(loss, group=vocabulary.group)
        return loss

    @staticmethod
    def backward(ctx: Any, grad_loss: Tensor) -> tuple[Tensor | None, ...]:
        factor = grad_loss / _HEADROOM
        grads = [
            None if grad is None else torch.mul(grad, factor, out=grad.new_empty(0, dtype=dtype))
            for grad, dtype in zip(ctx.saved_tensors, ctx.dtypes, strict=True)
        ]
        return *grads, None, None, None, None, None, None, None


def _add(total: Tensor | None, product: Tensor, dtype: torch.dtype | None) -> Tensor:
    """Return the sum so far; a first product becomes it, in `dtype` if one is given.

    No caller keeps a name for the product: as large as the weights, it would stay allocated during the next
    chunk.
    """
    if total is not None:
        return total.add_(product)
    return product if dtype is None else product.to(dtype)


class _ChunkTargets:
    """The targets `[tokens]`, or `[tokens, n]`, of a chunk, as this rank's rows of the vocabulary."""

    def __init__(
        self,
        targets: Tensor,
        vocabulary: VocabularyShard | None,
        size: int,
        z_loss: float,
        token_weights: Tensor | None,
    ) -> None:
        self.vocabulary, self.z_loss = vocabulary, z_loss
        self.several = targets.ndim > 1
        has_loss = is_local = targets != IGNORED
        row = targets
        if vocabulary is not None:
            row = targets - vocabulary.first
            is_local = has_loss & (row >= 0) & (row < size)
        self.is_local = is_local.view(len(targets), -1)
        self.row = row.view(len(targets), -1).where(self.is_local, 0)
        """Arbitrary where `is_local` is False."""
        weight = has_loss * (1.0 if token_weights is None else token_weights)
        weight = weight.view(len(targets), -1)
        self.share = weight * self.is_local if self.several else self.is_local
        self.weight = weight.sum(1, keepdim=True) * _HEADROOM
        """The weight of a token's gradient, `[tokens, 1]`."""


def _chunk_loss(
    logits: Tensor, targets: _ChunkTargets, loss: Tensor, backward_follows: bool
) -> Tensor | None:
    softmax = F.softmax(logits, dim=-1, dtype=loss.dtype)
    # No logarithm of a possible 0: the largest of n probabilities is at least 1/n.
    log_sum = logits.amax(-1, keepdim=True).to(loss.dtype) - softmax.amax(-1, keepdim=True).log()
    weight, local_log_sum = targets.weight.to(loss.dtype), log_sum
    if targets.vocabulary is not None:
        log_sum = targets.vocabulary.log_sum(log_sum)
    penalized = _penalized(log_sum, targets.z_loss)
    scale = weight * penalized
    if targets.vocabulary is not None:
        scale = scale * (local_log_sum - log_sum).exp()
    log_probability = logits.gather(1, targets.row).to(loss.dtype) - log_sum
    loss -= (log_probability * targets.share).sum()
    if not backward_follows:
        return None
    if targets.several:
        softmax.mul_(scale).scatter_add_(
            1, targets.row, (-_HEADROOM * targets.share).to(softmax.dtype)
        )
        return logits.copy_(softmax)
    grad_logits = torch.mul(softmax, scale, out=logits)
    at_target = (log_probability.exp() * penalized - targets.is_local.to(loss.dtype)) * weight
    return grad_logits.scatter_(1, targets.row, at_target.to(logits.dtype))


def _fused_chunk_loss(
    logits: Tensor, targets: _ChunkTargets, loss: Tensor, backward_follows: bool
) -> Tensor | None:
    log_sum = _compiled(_log_sum)(logits, loss.dtype)
    if targets.vocabulary is not None:
        log_sum = targets.vocabulary.log_sum(log_sum)
    log_probability = logits.gather(1, targets.row).to(loss.dtype) - log_sum
    loss -= (log_probability * targets.is_local).sum()
    if not backward_follows:
        return None
    return _compiled(_logits_gradient)(
        logits, log_sum, targets.row, targets.is_local, targets.weight, targets.z_loss
    )


def _penalized(log_sum: Tensor, z_loss: float) -> Tensor | float:
    """Return the factor of the probabilities in the gradient: the z-loss adds 2 · z · log_sum times them."""
    return 1 + 2 * z_loss * log_sum if z_loss else 1.0


@cache
def _compiled(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return torch.compile(function)


def _log_sum(logits: Tensor, dtype: torch.dtype) -> Tensor:
    return logits.to(dtype).logsumexp(dim=-1, keepdim=True)


def _logits_gradient(
    logits: Tensor, log_sum: Tensor, row: Tensor, is_local: Tensor, weight: Tensor, z_loss: float
) -> Tensor:
    """Compute the gradient of `_chunk_loss` in one pass, without writing in place."""
    softmax = (logits.to(log_sum.dtype) - log_sum).exp() * _penalized(log_sum, z_loss)
    is_target = (torch.arange(logits.shape[1], device=logits.device) == row) & is_local
    return ((softmax - is_target.to(softmax.dtype)) * weight.to(softmax.dtype)).to(logits.dtype)

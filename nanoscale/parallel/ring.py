"""Causal attention over a sequence that is divided over a ring of ranks, which pass keys and values on.

Source: Liu et al. 2023 (Ring Attention, arXiv:2310.01889). A causal mask would leave the first ranks idle, so
the sequence is cut into 2 · degree chunks and rank r holds chunks r and 2 · degree − 1 − r, in that order (the
"zig-zag"; Llama Team 2024, arXiv:2407.21783, section 3.3.2, divides so; Brandon et al. 2023, arXiv:2311.09431,
stripe single tokens for the same reason). Every rank then computes one causal block and, at each of the degree
− 1 hops, half of a whole block.

In layers with a window, one all-to-all sends each rank the tokens that its windows reach. The rank then
computes one causal block for each of its chunks. Backward, a second all-to-all returns the gradients.

Shapes: this rank's q, out `[batch, heads, seq, head_dim]`; k, v `[batch, kv_heads, seq, head_dim]`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import _resolve_process_group
from torch.nn import functional as F

from nanoscale.config.model_math import window_reach
from nanoscale.models.attention import AttentionFunction, register
from nanoscale.models.attention_kernels import KERNELS, Attended, Kernel, Limits, Pairs, accumulator


def ring_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    ends: Tensor | None,
    sinks: Tensor | None,
    group: dist.ProcessGroup,
    *settings: Any,
) -> Tensor:
    """Return causal attention within documents, which end at `ends` of the whole sequence, int32 `[batch,
    documents]`.

    Args:
        settings: kernel, scale, softcap, window and longest, as `Blocks` has them. A window needs `ends`.
    """
    # Operations refer to a group by its name.
    return AttentionFunction.apply(
        "ring_attention", q, k, v, sinks, ends, group.group_name, *settings
    )


@dataclass(frozen=True)
class Blocks:
    """Queries and keys that meet in a hop."""

    group: dist.ProcessGroup
    kernel: Kernel
    scale: float
    softcap: float | None = None
    window: int | None = None
    ends: Tensor | None = None
    """The ends of documents in the whole sequence, int32 `[batch, documents]`; None: one document."""
    longest: int = 0
    """The most tokens of one of these documents, or more."""

    @property
    def rank(self) -> int:
        return dist.get_rank(self.group)

    @property
    def degree(self) -> int:
        return dist.get_world_size(self.group)

    @classmethod
    def of(cls, ends: Tensor | None, group: Any, kernel: str, *settings: Any) -> Blocks:
        """Return the blocks of an operation's arguments."""
        scale, softcap, window, longest = settings
        blocks = _resolve_process_group(group), KERNELS[kernel], scale, softcap, window
        return cls(*blocks, ends, longest)

    def pairs(self, seq: int, owner: int, queries: slice, keys: slice) -> Pairs:
        """Return the pairs of slices of this rank's queries and of another's keys."""
        causal = owner == self.rank
        if self.ends is None and self.softcap is None:
            return Pairs(causal, self.scale)
        both = (
            chunks[:1] if part.stop else chunks[1:] if part.start else chunks
            for chunks, part in ((self.chunks(self.rank), queries), (self.chunks(owner), keys))
        )
        return Pairs(causal, self.scale, self.limits(seq // 2, *both))

    def chunks(self, rank: int) -> tuple[int, int]:
        """Return the numbers of the chunks that a rank holds."""
        return rank, 2 * self.degree - 1 - rank

    def limits(self, half: int, queries: Sequence[int], keys: Sequence[int]) -> Limits:
        """Return the limits of these chunks of `half` tokens."""
        before = self._before(half, queries), self._before(half, keys)
        return Limits(*before, self.longest, self.window, self.softcap)

    def _before(self, half: int, chunks: Sequence[int]) -> Tensor:
        """Return the tokens of chunks before each document: int32 `[batch · documents + 1]`."""
        ends = self.ends
        assert ends is not None
        parts = [(ends - chunk * half).clamp(0, half) for chunk in chunks]
        counts = torch.stack(parts).sum(0, dtype=torch.int32)
        rows = torch.arange(len(ends), dtype=torch.int32, device=ends.device) * (half * len(chunks))
        return F.pad((counts + rows.unsqueeze(1)).flatten(), (1, 0))


_ALL = slice(None)


def pass_keys(q: Tensor, k: Tensor, v: Tensor, blocks: Blocks) -> tuple[Tensor, Tensor]:
    """Return this rank's out, and the log-sum-exp `[batch, heads, seq]` of all keys that its queries attend
    to."""
    group, rank, degree, kernel = blocks.group, blocks.rank, blocks.degree, blocks.kernel
    seq, wide = q.shape[2], accumulator(q.dtype)
    incoming = Transfer((k, v), group)
    local = blocks.pairs(seq, rank, _ALL, _ALL)
    out, lse = (x.to(wide) for x in kernel.forward(q, k, v, local))
    for hop in range(1, degree):
        k, v = incoming.wait()
        if hop + 1 < degree:
            incoming = Transfer((k, v), group)
        owner = (rank - hop) % degree
        queries, keys = _attending_slices(rank, owner, seq)
        pairs = blocks.pairs(seq, owner, queries, keys)
        block_out, block_lse = kernel.forward(q[:, :, queries], k[:, :, keys], v[:, :, keys], pairs)
        _merge(out[:, :, queries], lse[:, :, queries], block_out, block_lse)
    return out.to(q.dtype), lse


def pass_gradients(grad_out: Tensor, whole: Attended, blocks: Blocks) -> tuple[Tensor, ...]:
    """Return the gradients of this rank's q, k and v."""
    group, rank, degree, kernel = blocks.group, blocks.rank, blocks.degree, blocks.kernel
    seq, dtype = whole.q.shape[2], whole.q.dtype
    incoming = Transfer((whole.k, whole.v), group)
    grads = kernel.backward(grad_out, whole, blocks.pairs(seq, rank, _ALL, _ALL))
    grad_q, grad_k, grad_v = (grad.to(accumulator(dtype)) for grad in grads)
    for hop in range(1, degree):
        # Gradients are sent one hop behind their keys, while the next keys' gradients are computed.
        outgoing = Transfer((grad_k, grad_v), group)
        k, v = incoming.wait()
        if hop + 1 < degree:
            incoming = Transfer((k, v), group)
        owner = (rank - hop) % degree
        queries, keys = _attending_slices(rank, owner, seq)
        # The block has no name, which would keep its keys and values while the next ones arrive.
        block_grad_q, block_grad_k, block_grad_v = kernel.backward(
            grad_out[:, :, queries],
            whole._replace(k=k, v=v).block(queries, keys),
            blocks.pairs(seq, owner, queries, keys),
        )
        grad_q[:, :, queries] += block_grad_q
        grad_k, grad_v = outgoing.wait()
        grad_k[:, :, keys] += block_grad_k
        grad_v[:, :, keys] += block_grad_v
    grad_k, grad_v = Transfer((grad_k, grad_v), group).wait()
    return tuple(grad.to(dtype) for grad in (grad_q, grad_k, grad_v))


def _attending_slices(rank: int, owner: int, seq: int) -> tuple[slice, slice]:
    """Return the slices of a rank's queries and of another rank's keys that attend to each other."""
    half = seq // 2
    if owner < rank:
        return slice(None), slice(half)
    return slice(half, None), slice(None)


def _merge(out: Tensor, lse: Tensor, block_out: Tensor, block_lse: Tensor) -> None:
    """Merge another block's average and log-sum-exp into `out` and `lse`, in place."""
    total = torch.logaddexp(lse, block_lse)
    out.mul_((lse - total).exp_().unsqueeze(-1))
    out.addcmul_(block_out.to(out.dtype), (block_lse - total).exp_().unsqueeze(-1))
    lse.copy_(total)


def attend_in_window(q: Tensor, k: Tensor, v: Tensor, blocks: Blocks) -> tuple[Tensor, Tensor]:
    """Return this rank's out and log-sum-exp, as `pass_keys` does, in a layer with a window."""
    results = [
        blocks.kernel.forward(q[:, :, part], keys, values, pairs)
        for part, _, (keys, values), pairs in _window_blocks(torch.stack((k, v)), blocks)
    ]
    out, lse = (torch.cat(x, dim=2) for x in zip(*results, strict=True))
    return out.to(q.dtype), lse.to(accumulator(q.dtype))


def window_gradients(grad_out: Tensor, whole: Attended, blocks: Blocks) -> tuple[Tensor, ...]:
    """Return the gradients of this rank's q, k and v in a layer with a window."""
    q, k, v, *_ = whole
    wide, of_queries, of_chunks = accumulator(q.dtype), [], dict[int, Tensor]()
    for part, chunks, (keys, values), pairs in _window_blocks(torch.stack((k, v)), blocks):
        block = whole._replace(k=keys, v=values).block(part, _ALL)
        grad_q, *grads = blocks.kernel.backward(grad_out[:, :, part], block, pairs)
        of_queries.append(grad_q)
        grad = torch.stack([x.to(wide) for x in grads])
        for chunk, of_chunk in zip(chunks, grad.chunk(len(chunks), dim=3), strict=True):
            of_chunks[chunk] = of_chunks[chunk] + of_chunk if chunk in of_chunks else of_chunk
    for chunk, of_chunk in _exchange(of_chunks, q.shape[2], blocks, back=True):
        of_chunks[chunk] = of_chunks[chunk] + of_chunk
    grad_k, grad_v = torch.cat([of_chunks[chunk] for chunk in blocks.chunks(blocks.rank)], dim=3)
    return tuple(x.to(q.dtype) for x in (torch.cat(of_queries, dim=2), grad_k, grad_v))


def _window_blocks(pair: Tensor, blocks: Blocks) -> Iterator[tuple[slice, range, Tensor, Pairs]]:
    """Yield for each chunk of this rank its slice, the numbers of the chunks that its queries reach, their keys
    and values, and the kernel's pairs."""
    assert blocks.window is not None
    seq, local = pair.shape[3], blocks.chunks(blocks.rank)
    half, reach = seq // 2, window_reach(blocks.window, seq)
    chunks = dict(zip(local, pair.chunk(2, dim=3), strict=True))
    chunks |= _exchange(chunks, seq, blocks)
    for at, last in enumerate(local):
        keys = range(max(0, last - reach), last + 1)
        limits = blocks.limits(half, [last], keys)
        reached = torch.cat([chunks[chunk] for chunk in keys], dim=3)
        yield slice(at * half, (at + 1) * half), keys, reached, Pairs(True, blocks.scale, limits)


def _exchange(
    chunks: dict[int, Tensor], seq: int, blocks: Blocks, *, back: bool = False
) -> Iterator[tuple[int, Tensor]]:
    """Send each rank the last tokens of chunks that its windows reach, or send these back to their owners.
    Return the received chunks with their numbers. Other tokens are 0."""
    assert blocks.window is not None
    half, ranks, far = seq // 2, range(blocks.degree), max(2, blocks.window) - 1 + seq // 2

    def reached(rank: int, owner: int) -> list[tuple[int, int]]:
        distances = {c: [last - c for last in blocks.chunks(rank)] for c in blocks.chunks(owner)}
        near = {c: min(d for d in (*each, seq * far) if d > 0) for c, each in distances.items()}
        tails = [(chunk, min(half, far - distance * half)) for chunk, distance in near.items()]
        return [each for each in tails if each[1] > 0 and rank != owner]

    sent = [reached(rank, blocks.rank) for rank in ranks]
    received = [reached(blocks.rank, owner) for owner in ranks]
    if back:
        sent, received = received, sent
    given = torch.cat([chunks[at][..., -tail:, :].movedim(3, 0) for at, tail in chain(*sent)])
    numbers, tails = zip(*chain(*received), strict=True)
    result = given.new_empty((sum(tails), *given.shape[1:]))
    sizes = [[sum(tail for _, tail in each) for each in way] for way in (received, sent)]
    dist.all_to_all_single(result, given, sizes[0], sizes[1], blocks.group)
    last = result.movedim(0, 3).split(tails, dim=3)
    return zip(numbers, (F.pad(x, (0, 0, half - x.shape[3], 0)) for x in last), strict=True)


class Transfer:
    """Tensors in transit to the next rank of the ring, and tensors of the same shapes from the previous one.

    All ranks start and await their transfers in the same order. Sent tensors are held until they have left.
    """

    def __init__(self, tensors: Sequence[Tensor], group: dist.ProcessGroup) -> None:
        rank, degree = dist.get_rank(group), dist.get_world_size(group)
        self._sent = [tensor.contiguous() for tensor in tensors]
        self._received, self._works = self._sent, []
        if degree > 1:
            self._received = [torch.empty_like(tensor) for tensor in self._sent]
            self._works = dist.batch_isend_irecv(
                [_operation(dist.isend, t, rank + 1, group) for t in self._sent]
                + [_operation(dist.irecv, t, rank - 1, group) for t in self._received]
            )

    def wait(self) -> list[Tensor]:
        for work in self._works:
            work.wait()
        received, self._sent, self._received = self._received, [], []
        return received


def _operation(
    kind: Callable[..., Any], tensor: Tensor, peer: int, group: dist.ProcessGroup
) -> dist.P2POp:
    return dist.P2POp(kind, tensor, group=group, group_peer=peer % dist.get_world_size(group))


def _attend(q: Tensor, k: Tensor, v: Tensor, *arguments: Any) -> tuple[Tensor, Tensor]:
    blocks = Blocks.of(*arguments)
    return (pass_keys if blocks.window is None else attend_in_window)(q, k, v, blocks)


def _differentiate(grad_out: Tensor, whole: Attended, *arguments: Any) -> tuple[Tensor, ...]:
    blocks = Blocks.of(*arguments)
    return (pass_gradients if blocks.window is None else window_gradients)(grad_out, whole, blocks)


RING = register(
    "ring_attention",
    "Tensor? ends, str group, str kernel, float scale, float? softcap, int? window, SymInt longest",
    _attend,
    _differentiate,
)

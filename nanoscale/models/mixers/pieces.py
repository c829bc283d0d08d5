"""Recurrences and short convolutions over rows in pieces, of which each rank holds some.

The state after a piece is affine in the state S before it: A S + B. Every rank computes its pieces as if S were
0, gathers A and B of all pieces, and adds to its outputs what its tokens read of S. So traffic does not grow
with the sequence. The delta rule computes A as further columns of the state. A convolution gathers the last
inputs of all pieces. A document that begins in a piece has nothing from before.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from nanoscale.models.mixers.recurrence import recur
from nanoscale.models.mixers.short_convolution import convolve


@dataclass(frozen=True)
class Division:
    """Whole rows in pieces of equal length."""

    local: Sequence[int]
    """The numbers of this rank's pieces among all, rising."""
    gather: Callable[[Tensor], Sequence[Tensor]]
    """A function from a tensor of this rank's pieces `[local pieces, …]` to each piece's, in the order of all.
    Its backward sums the gradients of all ranks."""


@dataclass(frozen=True)
class Rows:
    """The documents of this rank's tokens `[rows, seq]`."""

    documents: Tensor
    """The position of the first token of each token's document, in the whole row."""
    positions: Tensor
    """The position of each token in the whole row, `[seq]`."""
    division: Division | None = None

    def by_piece(self, x: Tensor) -> Tensor:
        """Return `[pieces · rows, seq / pieces, …]` of `[rows, seq, …]`."""
        assert self.division is not None
        return x.unflatten(1, (len(self.division.local), -1)).transpose(0, 1).flatten(0, 1)

    def starts(self) -> Tensor:
        """Return the position of the first token of each piece, `[pieces · rows, 1]`."""
        return self.by_piece(self.positions.expand_as(self.documents))[:, :1]

    def by_row(self, x: Tensor) -> Tensor:
        """Return `[rows, seq, …]` of `[pieces · rows, seq / pieces, …]`."""
        return x.unflatten(0, (-1, len(self.documents))).transpose(0, 1).flatten(1, 2)


def recur_rows(
    q: Tensor, k: Tensor, v: Tensor, decay: Tensor, rows: Rows, rate: Tensor | None = None
) -> Tensor:
    """Return the outputs of `recur` for this rank's tokens of whole rows."""
    division, width, state = rows.division, v.shape[-1], None
    if division is None:
        return _recomputed(q, k, v, decay, rows.documents, None, rate)[0]
    q, k, v, decay, documents = map(rows.by_piece, (q, k, v, decay, rows.documents))
    continues = (documents < rows.starts())[..., None, None]
    if rate is not None:
        rate = rows.by_piece(rate)
        unit = torch.eye(k.shape[-1], dtype=v.dtype, device=v.device) * continues[:, :1]
        state = F.pad(unit.expand(-1, v.shape[2], -1, -1), (width, 0))
    out, end = _recomputed(q, k, v, decay, documents, state, rate)
    if rate is not None:
        out, reads = out.tensor_split([width], -1)
    else:  # A is diagonal
        since_start = decay.cumsum(1).exp() * continues
        reads = q.repeat_interleave(v.shape[2] // q.shape[2], 2) * since_start
        kept = since_start[:, -1].expand(-1, -1, k.shape[-1])
        end = torch.cat((end, kept.unsqueeze(-1)), -1)
    ends = division.gather(end.unflatten(0, (len(division.local), -1)))
    states = [torch.zeros_like(ends[0][..., :width])]
    for each in ends:
        written, keeps = each.tensor_split([width], -1)
        kept = keeps * states[-1] if rate is None else keeps @ states[-1]
        states.append(kept + written)
    # Every rank computes with all states, so that the backward of `gather` runs on every rank.
    by_number = torch.stack(states).unbind()
    before = torch.cat([by_number[number] for number in division.local])
    return rows.by_row(out + torch.einsum("bthk,bhkv->bthv", reads, before))


def _recomputed(*args: Any) -> tuple[Tensor, Tensor]:
    """Run `recur`, and again in the backward pass: what it computes is some 30 times as large as its inputs."""
    again = partial(checkpoint, recur, use_reentrant=False, preserve_rng_state=False)
    return cast("tuple[Tensor, Tensor]", again(*args[:-1], rate=args[-1]))


def convolve_rows(x: Tensor, weight: Tensor, bias: Tensor | None, rows: Rows) -> Tensor:
    """Return the outputs of `convolve` for this rank's tokens of whole rows, `[rows, channels, seq]`."""
    division, reach = rows.division, weight.shape[1] - 1
    if division is None:
        return convolve(x, weight, bias, rows.documents)[0]
    x, documents = rows.by_piece(x.mT).mT, rows.by_piece(rows.documents)
    last = x[..., -max(1, min(reach, x.shape[-1])) :]
    tails = division.gather(last.unflatten(0, (len(division.local), -1)))
    before = F.pad(torch.cat(list(tails), -1), (reach, 0)).unfold(-1, reach, last.shape[-1])
    halo = torch.cat([before[..., number, :] for number in division.local])
    positions = rows.starts() + torch.arange(-reach, 0, device=x.device)
    halo = halo.masked_fill((positions < documents[:, :1]).unsqueeze(1), 0)
    return rows.by_row(convolve(x, weight, bias, documents, halo)[0].mT).mT

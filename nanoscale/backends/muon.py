"""Muon: the orthogonalized momentum of each matrix of a block is its update; AdamW updates the rest.

Sources: Jordan et al. 2024 (kellerjordan.github.io/posts/muon) for the momentum and the iteration; Liu et al.
2025 (arXiv:2502.16982, section 2.2) for the scale, with which AdamW's learning rate and decay can be used.

An update needs whole matrices. The ranks that share them divide them among each other: every matrix is gathered
once, by the rank that orthogonalizes it, which then sends each rank its shard of the update. An exchange
has some matrices, and the next one is on its way while they are orthogonalized.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from inspect import unwrap
from operator import itemgetter
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor

from nanoscale.backends import one_pass
from nanoscale.backends.adamw import LocalAdamW
from nanoscale.backends.gradients import local_tensor
from nanoscale.config.optimizers import MUON_AT_ONCE, MUON_ITERATIONS
from nanoscale.models.initialization import local_region

_COEFFICIENTS = 3.4445, -4.7750, 2.0315
_SCALE = 0.2
"""The root mean square of an update of AdamW, by Liu et al."""


class Muon(LocalAdamW):
    """AdamW whose groups with `is_muon` are matrices that Muon updates."""

    def __init__(self, groups: list[dict[str, Any]], *, momentum: float, **arguments: Any) -> None:
        super().__init__(groups, **arguments, fused=True)
        self._momentum = momentum
        self._exchanges: list[_Exchange] | None = None

    def matrices(self) -> list[Tensor]:
        """List the parameters that Muon updates."""
        return [p for group in self.param_groups if group["is_muon"] for p in group["params"]]

    def _init_group(self, group: dict[str, Any], *tensor_lists: list[Tensor]) -> bool:
        return False if group["is_muon"] else super()._init_group(group, *tensor_lists)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        # PyTorch wraps the `step` of every class that had an object: the wrapped one runs all hooks again.
        unwrap(LocalAdamW.step)(self)
        if self._exchanges is None:
            self._exchanges = [*_exchanges(self.matrices())]
        groups = {p: group for group in self.param_groups for p in group["params"]}
        before: Iterator[None] = iter(())
        for exchange in self._exchanges:
            updating = self._update(exchange, groups)
            next(updating)
            next(before, None)
            before = updating
        next(before, None)

    def _update(
        self, exchange: "_Exchange", groups: dict[Tensor, dict[str, Any]]
    ) -> Iterator[None]:
        """Update the parameters of an exchange; pause while their directions are on their way."""
        updates = [self._direction(parameter) for parameter in exchange.parameters]
        yield from exchange.orthogonalize(updates)
        for parameter, update in zip(exchange.parameters, updates, strict=True):
            group = groups[parameter]
            scale = _SCALE * math.sqrt(max(parameter.shape[-2:]))
            weights = local_tensor(parameter)
            value = weights * (1 - group["lr"] * group["weight_decay"])
            value.add_(update, alpha=-group["lr"] * scale)
            one_pass.keep(self, weights, value)

    def _direction(self, parameter: Tensor) -> Tensor:
        """Update the momentum of a parameter; return this rank's shard of Nesterov's direction."""
        state = self.state[parameter]
        if not state:
            state["momentum_buffer"] = torch.zeros_like(parameter)
        assert parameter.grad is not None
        gradient, momentum = local_tensor(parameter.grad), local_tensor(state["momentum_buffer"])
        moved = momentum.lerp(gradient, 1 - self._momentum)
        one_pass.keep(self, momentum, moved)
        # Products are exact enough in bf16, by Jordan et al.
        dtype = torch.float64 if gradient.dtype == torch.float64 else torch.bfloat16
        return gradient.lerp(moved, self._momentum).to(dtype)


Size = tuple[int, int, int]
"""Experts, rows and columns; a matrix is one expert."""


@dataclass(frozen=True)
class _Part:
    """The part of a piece that a member of the group has."""

    local: tuple[slice, ...]
    """Its place in the member's shard of the parameter."""
    within: tuple[slice, ...]
    """Its place in the piece."""
    size: Size
    gives: bool
    """True for the first of the members that have the same."""


@dataclass(frozen=True)
class _Piece:
    """Matrices of one parameter that one rank orthogonalizes: all, or the matrices of some experts."""

    parameter: Tensor
    size: Size
    owner: int
    """The number in the group of the rank that orthogonalizes them."""
    parts: dict[int, _Part]
    """The parts, by the numbers of the members that have one."""


@dataclass(frozen=True)
class _Exchange:
    """Some parameters that the same ranks share, and which rank orthogonalizes which of their matrices."""

    pieces: list[_Piece]
    me: int
    """The number of this rank in the group."""
    group: ProcessGroup | None
    """None for one rank."""

    @property
    def parameters(self) -> list[Tensor]:
        return [*dict.fromkeys(piece.parameter for piece in self.pieces)]

    def orthogonalize(self, directions: Sequence[Tensor]) -> Iterator[None]:
        """Write this rank's shards of the updates over its shards of the directions; pause while those are on
        their way."""
        local = [x.view(_size(x.shape)) for x in directions]
        shards = dict(zip(self.parameters, local, strict=True))
        me, empty = self.me, local[0].new_empty(0)
        own = [piece for piece in self.pieces if piece.owner == me]
        held = [(piece, piece.parts[me]) for piece in self.pieces if me in piece.parts]
        out = [(it.owner, shards[it.parameter][part.local]) for it, part in held if part.gives]
        given = [(m, part) for piece in own for m, part in piece.parts.items() if part.gives]
        arriving, wait = self._send(out, given, empty)
        yield
        wait()
        back: list[tuple[int, Tensor]] = []
        for piece in own:
            whole = empty.new_empty(piece.size)
            for part in piece.parts.values():
                if part.gives:
                    whole[part.within] = next(arriving)
            update = orthogonalize(whole)
            back += [(member, update[part.within]) for member, part in piece.parts.items()]
        del arriving  # frees the matrices that were received, which are copied
        arriving, wait = self._send(back, [(piece.owner, part) for piece, part in held], empty)
        wait()
        for piece, part in held:
            shards[piece.parameter][part.local] = next(arriving)

    def _send(
        self, out: list[tuple[int, Tensor]], expected: list[tuple[int, _Part]], empty: Tensor
    ) -> tuple[Iterator[Tensor], Callable[[], Any]]:
        """Begin to send members their tensors; return the tensors that members send, in the order of the
        expected ones, and the function that waits for them."""
        if self.group is None:
            return iter([tensor for _, tensor in out]), bool
        sent, counts = Counter[int](), Counter[int]()
        for member, tensor in out:
            sent[member] += tensor.numel()
        for member, part in expected:
            counts[member] += math.prod(part.size)
        received, members = empty.new_empty(counts.total()), range(self.group.size())
        work = dist.all_to_all_single(
            received,
            torch.cat([empty, *(x.reshape(-1) for _, x in sorted(out, key=itemgetter(0)))]),
            [counts[member] for member in members],
            [sent[member] for member in members],
            group=self.group,
            async_op=True,
        )
        order = sorted(range(len(expected)), key=lambda at: expected[at][0])
        parts = received.split([math.prod(expected[at][1].size) for at in order])
        by_number = dict(zip(order, parts, strict=True))
        return (by_number[at].view(part.size) for at, (_, part) in enumerate(expected)), work.wait


def orthogonalize(matrices: Tensor) -> Tensor:
    """Return matrices `[experts, rows, columns]` with singular values near 1, by Newton and Schulz's iteration.

    Five iterations of Jordan et al.'s polynomial bring singular values between about 0.7 and 1.2.
    """
    a, b, c = _COEFFICIENTS
    x = matrices.mT if matrices.shape[-2] > matrices.shape[-1] else matrices
    x = x / x.norm(dim=(-2, -1), keepdim=True).clamp(min=1e-7)
    for _ in range(MUON_ITERATIONS):
        square = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(square, square, square, beta=b, alpha=c), x, beta=a)
    return x.mT if matrices.shape[-2] > matrices.shape[-1] else x


def _exchanges(parameters: list[Tensor]) -> Iterator[_Exchange]:
    by_ranks: dict[tuple[int, ...], list[Tensor]] = {}
    for parameter in parameters:
        by_ranks.setdefault(ranks_of(parameter), []).append(parameter)
    for ranks, several in by_ranks.items():
        group = group_of(ranks)
        me = ranks.index(dist.get_rank()) if group is not None else 0
        for pieces in _at_once(_divided(several, ranks)):
            yield _Exchange(pieces, me, group)


def _divided(parameters: list[Tensor], members: Sequence[int]) -> Iterator[list[_Piece]]:
    """Yield the pieces of each parameter; the largest go first, each piece to the rank with the least work."""
    work = [0.0] * len(members)
    for parameter in sorted(parameters, key=lambda it: -it.numel()):
        shards = [_shard(parameter, rank) for rank in members]
        experts, rows, columns = _size(parameter.shape)
        count, pieces = min(experts, len(work)), []
        for number in range(count):
            first, end = number * experts // count, (number + 1) * experts // count
            owner = work.index(min(work))
            work[owner] += (end - first) * float(rows * columns) * min(rows, columns)
            both = enumerate(_part(shard, first, end) for shard in shards)
            parts = {member: part for member, part in both if part is not None}
            pieces.append(_Piece(parameter, (end - first, rows, columns), owner, parts))
        yield pieces


def _at_once(divided: Iterable[list[_Piece]]) -> Iterator[list[_Piece]]:
    """Yield the pieces of some parameters, so that no rank gets more than MUON_AT_ONCE elements of several."""
    several, held = list[_Piece](), Counter[int]()
    for pieces in divided:
        sizes = Counter[int]()
        for piece in pieces:
            sizes[piece.owner] += math.prod(piece.size)
        if several and max((held + sizes).values()) > MUON_AT_ONCE:
            yield several
            several, held = [], Counter()
        several, held = several + pieces, held + sizes
    if several:
        yield several


def ranks_of(parameter: Tensor) -> tuple[int, ...]:
    """Return the ranks that share a parameter, in order; a plain one is on all ranks."""
    if isinstance(parameter, DTensor):
        return tuple(sorted(parameter.device_mesh.mesh.flatten().tolist()))
    return tuple(range(dist.get_world_size() if dist.is_initialized() else 1))


def group_of(members: Sequence[int]) -> ProcessGroup | None:
    """Return the group of ranks that share parameters; None for one rank. All of its members call this."""
    if len(members) == 1:
        return None
    if len(members) == dist.get_world_size():
        return dist.group.WORLD
    return dist.new_group(list(members), use_local_synchronization=True)


def _size(shape: Sequence[int]) -> Size:
    experts, rows, columns = (1, *shape)[-3:]
    return experts, rows, columns


def _shard(parameter: Tensor, rank: int) -> tuple[Size, Size, bool]:
    """Return offsets and sizes of a rank's shard, and whether the rank is the first one that has it."""
    if not isinstance(parameter, DTensor):
        return (0, 0, 0), _size(parameter.shape), rank == 0
    mesh = parameter.device_mesh
    coordinate = (mesh.mesh == rank).nonzero()[0].tolist()
    offsets, sizes = local_region(parameter, coordinate)
    axes = zip(coordinate, parameter.placements, strict=True)
    is_first = not any(at for at, placement in axes if placement.is_replicate())
    experts, row, column = (0, *offsets)[-3:]
    return (experts, row, column), _size(sizes), is_first


def _part(shard: tuple[Size, Size, bool], first: int, end: int) -> _Part | None:
    """Return what a shard has of the experts from `first` on; None if it has nothing."""
    (at, row, column), (experts, rows, columns), gives = shard
    low, high = max(first, at), min(end, at + experts)
    if high <= low or not rows or not columns:
        return None
    return _Part(
        (slice(low - at, high - at),),
        (slice(low - first, high - first), slice(row, row + rows), slice(column, column + columns)),
        (high - low, rows, columns),
        gives,
    )

"""Muon: the orthogonalized momentum of each matrix of a block is its update; AdamW updates the rest.

Sources: Jordan et al. 2024 (kellerjordan.github.io/posts/muon) for the momentum and the iteration; Liu et al.
2025 (arXiv:2502.16982, section 2.2) for the scale, with which AdamW's learning rate and decay can be used.

An update needs whole matrices. The ranks that share them divide them among each other: every matrix is gathered
once, by the rank that orthogonalizes it, which then sends each rank its shard of the update.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from inspect import unwrap
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor

from nanoscale.backends import one_pass
from nanoscale.backends.adamw import LocalAdamW
from nanoscale.backends.gradients import local_tensor
from nanoscale.config.optimizers import MUON_ITERATIONS
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
            self._exchanges = _exchanges(self.matrices())
        groups = {id(p): group for group in self.param_groups for p in group["params"]}
        for exchange in self._exchanges:
            directions = [self._direction(parameter) for parameter in exchange.parameters]
            updates = exchange.orthogonalized(directions)
            for parameter, update in zip(exchange.parameters, updates, strict=True):
                group = groups[id(parameter)]
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

    parameter: int
    """The parameter's number in the exchange."""
    size: Size
    owner: int
    """The number in the group of the rank that orthogonalizes them."""
    parts: dict[int, _Part]
    """The parts, by the numbers of the members that have one."""


class _Exchange:
    """The parameters that the same ranks share, and which rank orthogonalizes which of their matrices."""

    def __init__(self, parameters: list[Tensor], members: Sequence[int]) -> None:
        self.parameters = parameters
        self._group = group_of(members)
        self._me = members.index(dist.get_rank()) if self._group is not None else 0
        self._members = range(len(members))
        self._shards = [[_shard(p, rank) for rank in members] for p in parameters]
        self._pieces = list(self._divided())

    def _divided(self) -> Iterator[_Piece]:
        """Yield the pieces; the largest go first, each to the rank with the least work."""
        work = [0.0] * len(self._members)
        for at in sorted(range(len(self.parameters)), key=lambda at: -self.parameters[at].numel()):
            experts, rows, columns = _size(self.parameters[at].shape)
            count = min(experts, len(work))
            for number in range(count):
                first, end = number * experts // count, (number + 1) * experts // count
                owner = work.index(min(work))
                work[owner] += (end - first) * float(rows * columns) * min(rows, columns)
                both = enumerate(_part(shard, first, end) for shard in self._shards[at])
                parts = {member: part for member, part in both if part is not None}
                yield _Piece(at, (end - first, rows, columns), owner, parts)

    def orthogonalized(self, directions: Sequence[Tensor]) -> list[Tensor]:
        """Return this rank's shard of each parameter's update, in place of its shard of the direction."""
        shards = [x.view(_size(x.shape)) for x in directions]
        me, own = self._me, [piece for piece in self._pieces if piece.owner == self._me]
        out: list[list[Tensor]] = [[] for _ in self._members]
        for piece in self._pieces:
            if me in piece.parts and piece.parts[me].gives:
                out[piece.owner].append(shards[piece.parameter][piece.parts[me].local])
        expected = [
            [piece.parts[m].size for piece in own if m in piece.parts and piece.parts[m].gives]
            for m in self._members
        ]
        arrived = self._send(out, expected, shards[0])
        back: list[list[Tensor]] = [[] for _ in self._members]
        for piece in own:
            whole = shards[0].new_empty(piece.size)
            for member, part in piece.parts.items():
                if part.gives:
                    whole[part.within] = next(arrived[member])
            update = orthogonalize(whole)
            for member, part in piece.parts.items():
                back[member].append(update[part.within])
        with_part = [piece for piece in self._pieces if me in piece.parts]
        expected = [
            [piece.parts[me].size for piece in with_part if piece.owner == m] for m in self._members
        ]
        arrived = self._send(back, expected, shards[0])
        for piece in with_part:
            shards[piece.parameter][piece.parts[me].local] = next(arrived[piece.owner])
        return list(directions)

    def _send(
        self, out: list[list[Tensor]], expected: list[list[Size]], like: Tensor
    ) -> list[Iterator[Tensor]]:
        """Send each member its tensors; return each member's tensors for this rank, with the expected sizes."""
        if self._group is None:
            return [iter(out[0])]
        flat = [tensor.reshape(-1) for tensors in out for tensor in tensors]
        sent = torch.cat(flat) if flat else like.new_empty(0)
        counts = [sum(map(math.prod, sizes)) for sizes in expected]
        received = like.new_empty(sum(counts))
        splits = [sum(tensor.numel() for tensor in tensors) for tensors in out]
        dist.all_to_all_single(received, sent, counts, splits, group=self._group)
        return [
            (
                part.view(size)
                for part, size in zip(each.split([*map(math.prod, sizes)]), sizes, strict=True)
            )
            for each, sizes in zip(received.split(counts), expected, strict=True)
        ]


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


def _exchanges(parameters: list[Tensor]) -> list[_Exchange]:
    by_ranks: dict[tuple[int, ...], list[Tensor]] = {}
    for parameter in parameters:
        by_ranks.setdefault(ranks_of(parameter), []).append(parameter)
    return [_Exchange(several, ranks) for ranks, several in by_ranks.items()]


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

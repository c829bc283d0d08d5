"""The mesh for people and for launch.json: every rank's coordinates."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field
from itertools import groupby

from nanoscale.config.layout import coordinates
from nanoscale.config.resolved import ResolvedParallel

AXES = ("pp", "dp", "cp", "tp")
"""The axes, the slowest first."""

_MOST_LINES = 16
"""The most lines; more would push the rest off the screen."""


@dataclass(frozen=True)
class RankPlacement:
    """A rank's host and coordinates."""

    rank: int
    host: str
    local_rank: int
    pp: int
    dp: int
    cp: int
    tp: int


@dataclass(frozen=True)
class Mesh:
    """The coordinates of all ranks."""

    axes: dict[str, int] = field(default_factory=dict)
    """The degree of every axis, the slowest first."""
    ranks: tuple[RankPlacement, ...] = ()

    @property
    def used(self) -> list[str]:
        """The axes of more than one rank."""
        return [axis for axis, degree in self.axes.items() if degree > 1]

    def __str__(self) -> str:
        return " × ".join(f"{axis} {self.axes[axis]}" for axis in self.used) or "one rank"


def arrange(hosts: Iterable[tuple[str, tuple[int, ...]]], parallel: ResolvedParallel) -> Mesh:
    """Return the mesh of a resolved layout; `hosts` lists each with its ranks."""
    ranks_of_mesh = [
        RankPlacement(rank, host, local_rank, **asdict(coordinates(rank, parallel)))
        for host, ranks in hosts
        for local_rank, rank in enumerate(ranks)
    ]
    return Mesh({axis: getattr(parallel, axis) for axis in AXES}, tuple(ranks_of_mesh))


def lines(mesh: Mesh) -> Iterator[str]:
    """Yield the mesh in few lines: one for each row of ranks along the fastest axis."""
    if not mesh.used:
        return
    yield f"mesh {mesh}"
    rows = list(_rows(mesh))
    if len(rows) <= _MOST_LINES:
        yield from rows
    else:
        yield f"  {mesh.used[-1]} varies fastest; launch.json says where every rank is"


def _rows(mesh: Mesh) -> Iterator[str]:
    *outer, fastest = mesh.used
    for (host, *outer_coordinates), row in groupby(
        mesh.ranks,
        lambda placement: (placement.host, *(getattr(placement, axis) for axis in outer)),
    ):
        placements = list(row)
        parts = [f"ranks {_span(placements, 'rank')}"]
        parts += [f"{axis} {number}" for axis, number in zip(outer, outer_coordinates, strict=True)]
        yield "  ".join(["", host, *parts, f"{fastest} {_span(placements, fastest)}"])


def _span(placements: list[RankPlacement], name: str) -> str:
    first, last = getattr(placements[0], name), getattr(placements[-1], name)
    return f"{first}" if first == last else f"{first}–{last}"

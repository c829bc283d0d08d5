"""The kinds of ranks of a layout: ranks of one kind do the same, so one of them is played. Torch-free."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterator

from nanoscale.config import parameters
from nanoscale.config.layout import coordinates
from nanoscale.config.resolved import ResolvedConfig


def distinct_ranks(config: ResolvedConfig) -> dict[int, int]:
    """Return the first rank of each kind, in order, and the number of ranks for which it stands."""
    return dict(Counter(first_of_kind(config)))


def first_of_kind(config: ResolvedConfig) -> list[int]:
    """Return for each rank the first one of its kind."""
    kind = _kinds(config)
    first: dict[Hashable, int] = {}
    return [first.setdefault(kind(rank), rank) for rank in range(config.world_size)]


def _kinds(config: ResolvedConfig) -> Callable[[int], Hashable]:
    """Return a function from a rank to its kind.

    Every pipeline rank is a kind. In a ring the last rank of cp computes other halves of the scores; those in
    the middle compute some halves in another order, which changes peaks by less than 0.1 %. The first
    rank of tp has the bias of matrices that are split by row, and the last one may have fewer rows. Ranks
    that shard parameters differ in the rows that they have.
    """
    parallel = config.parallel
    shards = parallel.dp // parallel.dp_replicate
    rows = _rows_of_ranks(config, shards * parallel.cp)
    ring = parallel.cp if parallel.cp_method == "ring" else 0
    uneven_tp = any(size % parallel.tp for size in (config.model.vocab, config.model.ffn))

    def kind(rank: int) -> Hashable:
        at = coordinates(rank, parallel)
        held = rows[at.dp % shards * parallel.cp + at.cp]
        has_bias = config.model.bias and at.tp == 0
        return at.pp, held, at.cp == ring - 1, has_bias, uneven_tp and at.tp == parallel.tp - 1

    return kind


def _rows_of_ranks(config: ResolvedConfig, ranks: int) -> list[Hashable]:
    """Return the rows that each of the ranks that shard parameters has of every matrix."""
    if not config.zero.stage:
        return [None] * ranks
    if config.model.source == "hf":  # nothing is known of its matrices
        return [rank == ranks - 1 for rank in range(ranks)]
    divided = sorted({*_divided_rows(config, ranks)})
    return [
        tuple(_rows(rank // neighbors, total, ranks // neighbors) for total, neighbors in divided)
        for rank in range(ranks)
    ]


def _divided_rows(config: ResolvedConfig, ranks: int) -> Iterator[tuple[int, int]]:
    """Yield the rows of each matrix on a rank of tp and ep, and the neighbors that have other matrices."""
    parallel, model = config.parallel, config.model
    table = parameters.ends(model) | parameters.block(model)
    for each in table.values():
        if not each.is_expert:
            yield -(-each.shape[0] // (parallel.tp if each.split == 0 else 1)), 1
        elif model.hidden % (ranks // parallel.ep):  # else they can be sharded evenly
            yield each.shape[0] // parallel.ep, parallel.ep
    if config.lora.rank:
        yield config.lora.rank, 1


def _rows(rank: int, total: int, ranks: int) -> int:
    """Return the rows of a rank's shard, as `torch.chunk` divides them."""
    most = -(-total // ranks)
    return max(0, min(most, total - rank * most))

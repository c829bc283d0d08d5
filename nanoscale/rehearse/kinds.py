"""The kinds of ranks of a layout, and the ranks that are played by default. Torch-free.

Ranks of one kind do the same, so one of each kind is played. Whether they do is seen from a second member of
each axis' group, on one stage of the pipeline, and from the rank in which these axes' groups meet again.
"""

from collections import Counter
from collections.abc import Callable, Hashable, Iterator

from nanoscale.config import parameters
from nanoscale.config.layout import coordinates
from nanoscale.config.model_math import window_reach
from nanoscale.config.resolved import ResolvedConfig
from nanoscale.rehearse.played.record import PLAYED_BATCHES, PLAYED_IN_PIPELINES


def played_ranks(config: ResolvedConfig) -> dict[int, int]:
    """Return the ranks to play, in order, and the number of ranks for which each stands."""
    firsts = first_of_kind(config)
    stands_for = Counter(firsts)
    for rank in _lasts(config):
        if rank not in stands_for:
            stands_for[firsts[rank]] -= 1
            stands_for[rank] = 1
    return dict(sorted(stands_for.items()))


def repeated_batches(config: ResolvedConfig) -> int:
    """Return the number of micro batches of a step for which the record of another one counts.

    In a pipeline, none is repeated if the backward pass is split, if the last micro batch goes back first, with
    offloading, or in compiled blocks with experts, whose memory is freed in an order that differs between
    micro batches.
    """
    if config.parallel.pp == 1:
        return max(0, config.accumulation - PLAYED_BATCHES)
    parallel, schedules = config.parallel, ("gpipe", "1f1b", "interleaved-1f1b")
    reorders = config.model.experts and config.backend.compile == "on"
    if reorders or parallel.schedule not in schedules or parallel.offload_activations:
        return 0
    return max(0, config.accumulation - PLAYED_IN_PIPELINES)


def _lasts(config: ResolvedConfig) -> Iterator[int]:
    """Yield the ranks that are the last along one of dp, cp, tp and ep and the first along the others, and the
    rank that is the last along all."""
    parallel = config.parallel
    data, cp, tp = (parallel.dp - 1) * parallel.cp, parallel.cp - 1, parallel.tp - 1
    yield from (data * parallel.tp, cp * parallel.tp, tp, (parallel.data_ep - 1) * parallel.tp)
    yield (data + cp) * parallel.tp + tp


def first_of_kind(config: ResolvedConfig) -> list[int]:
    """Return for each rank the first one of its kind."""
    kind = _kinds(config)
    first: dict[Hashable, int] = {}
    return [first.setdefault(kind(rank), rank) for rank in range(config.world_size)]


def _kinds(config: ResolvedConfig) -> Callable[[int], Hashable]:
    """Return a function from a rank to its kind.

    Ranks of different pipeline stages are of different kinds. In ring attention the last rank of cp computes
    other halves of the scores. The order of the halves differs on the ranks in the middle, which changes peaks
    by less than 0.1 %. With a window, ranks near the first or the last of cp exchange and compute less. The
    first rank of tp has the bias of matrices that are split by row. The last rank of tp may have fewer rows.
    Ranks that shard parameters may have different numbers of rows.
    """
    parallel = config.parallel
    shards = parallel.dp // parallel.dp_replicate
    rows = _rows_of_ranks(config, shards * parallel.cp)
    ring = parallel.cp if parallel.cp_method == "ring" else 0
    reach, seq = 0, config.train.seq_len
    if ring > 1 and config.model.is_windowed(seq):
        reach = window_reach(config.model.sliding_window or 0, seq // ring)
    uneven_tp = any(size % parallel.tp for size in (config.model.vocab, config.model.ffn))

    def kind(rank: int) -> Hashable:
        own = coordinates(rank, parallel)
        own_rows = rows[own.dp % shards * parallel.cp + own.cp]
        has_bias = config.model.bias and own.tp == 0
        has_last_rows = uneven_tp and own.tp == parallel.tp - 1
        ends = own.cp == ring - 1, min(own.cp, reach), min(parallel.cp - 1 - own.cp, reach)
        return own.pp, own_rows, *ends, has_bias, has_last_rows

    return kind


def _rows_of_ranks(config: ResolvedConfig, ranks: int) -> list[Hashable]:
    """Return the numbers of rows of every matrix, for each rank that shards parameters."""
    if not config.zero.stage:
        return [None] * ranks
    if config.model.source != "own":  # the shapes of its matrices are unknown
        return [rank == ranks - 1 for rank in range(ranks)]
    divided = sorted({*_divided_rows(config, ranks)})
    return [
        tuple(_rows(rank // neighbors, total, ranks // neighbors) for total, neighbors in divided)
        for rank in range(ranks)
    ]


def _divided_rows(config: ResolvedConfig, ranks: int) -> Iterator[tuple[int, int]]:
    """Yield the rows of each matrix on a rank of tp and ep, and the number of ranks with other experts."""
    parallel, model = config.parallel, config.model
    uneven = model.hidden % (
        ranks // parallel.data_ep
    )  # else matrices of experts are sharded evenly
    tables = [parameters.block(shape) for _, shape in parameters.kinds_of_blocks(model)]
    for each in (each for table in (parameters.ends(model), *tables) for each in table.values()):
        if not each.is_expert:
            yield -(-each.shape[0] // (parallel.tp if each.split == 0 else 1)), 1
        elif each.is_vector or uneven:
            yield each.shape[0] // parallel.ep, parallel.data_ep
    if config.lora.rank:
        yield config.lora.rank, 1


def _rows(rank: int, total: int, ranks: int) -> int:
    """Return the rows of a rank's shard, as `torch.chunk` divides them."""
    most = -(-total // ranks)
    return max(0, min(most, total - rank * most))

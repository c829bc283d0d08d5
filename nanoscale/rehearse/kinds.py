"""The kinds of ranks of a layout: ranks of one kind do the same, so one of them is played. Torch-free."""

from __future__ import annotations

from itertools import product

from nanoscale.config.layout import coordinates
from nanoscale.config.resolved import ResolvedConfig
from nanoscale.config.schema import Model


def distinct_ranks(config: ResolvedConfig) -> dict[int, int]:
    """Return one rank of each kind, in order, and the number of ranks for which it stands.

    Every pipeline rank is a kind. In a ring the first and the last rank of cp compute other halves of the
    scores. The first rank of tp has the bias of matrices that are split by row. Ranks that come last have
    smaller shards where a number of rows is not divisible.
    """
    parallel = config.parallel
    uneven = _has_uneven_shards(config)
    ring = parallel.cp_method == "ring"
    axes = [
        dict.fromkeys(range(parallel.pp), 1),
        _ends(parallel.dp, uneven),
        _ends(parallel.cp, ring or uneven),
        _ends(parallel.tp, _differs_in_tp(config.model, parallel.tp)),
    ]
    kinds: dict[int, int] = {}
    for (pp, a), (dp, b), (cp, c), (tp, d) in product(*(axis.items() for axis in axes)):
        rank = ((pp * parallel.dp + dp) * parallel.cp + cp) * parallel.tp + tp
        kinds[rank] = a * b * c * d
    return dict(sorted(kinds.items()))


def kind_of(rank: int, config: ResolvedConfig) -> int:
    """Return the played rank that stands for a rank."""
    parallel, at = config.parallel, coordinates(rank, config.parallel)
    played = {coordinates(one, parallel): one for one in distinct_ranks(config)}

    def end(place: int, degree: int, axis: str) -> int:
        has_last = any(getattr(it, axis) == degree - 1 for it in played)
        return place if has_last and place == degree - 1 else 0

    nearest = type(at)(
        at.pp,
        end(at.dp, parallel.dp, "dp"),
        end(at.cp, parallel.cp, "cp"),
        end(at.tp, parallel.tp, "tp"),
    )
    return played[nearest]


def _ends(degree: int, differ: bool) -> dict[int, int]:
    """Return the first coordinate of an axis, and the last if it differs, each with the ranks it stands for."""
    if differ and degree > 1:
        return {0: degree - 1, degree - 1: 1}
    return {0: degree}


def _differs_in_tp(model: Model, tp: int) -> bool:
    return model.bias or any(size % tp for size in (model.vocab, model.ffn))


def _has_uneven_shards(config: ResolvedConfig) -> bool:
    """True if ZeRO divides a matrix's rows over ranks of which some get fewer."""
    parallel, model = config.parallel, config.model
    if not config.zero.stage:
        return False
    ranks = parallel.dp // parallel.dp_replicate * parallel.cp
    if model.source == "hf":
        return True  # nothing is known of its matrices
    divided = (model.q_width, model.kv_width, model.ffn, model.vocab)
    rows = [model.hidden, model.head_width, *(size // parallel.tp for size in divided)]
    rows += [model.experts] if model.experts else []
    rows += [config.lora.rank] if config.lora.rank else []
    return any(size % ranks for size in rows)

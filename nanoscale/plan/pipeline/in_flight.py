"""The number of in-flight micro batches of a rank at its peak: `residents` in closed form."""

from __future__ import annotations

from functools import lru_cache

from nanoscale.config.layout import takes
from nanoscale.plan.pipeline.orders import order, round_length, warmup
from nanoscale.plan.pipeline.residents import residents


@lru_cache(maxsize=4096)
def in_flight(
    schedule: str, pp: int, virtual_stages: int, micro_batches: int
) -> tuple[tuple[int, ...], ...]:
    """Return the numbers at a rank's peak, by rank and by its stages from the model's first to its last.

    GPipe (Huang et al. 2019, 2.3) and looped BFS hold all micro batches, 1F1B pp - rank (Narayanan et al. 2021,
    2.2.1), interleaved 1F1B warm-up + 1, ZB-H1 pp (Qi et al. 2023, table 1), ZB-V 2·pp half stages (section 6),
    DualPipe 2·pp + 1 (DeepSeek-V3, table 2). With split backward passes, a micro batch is held until its
    gradients of weights are computed (`residents`).
    """
    assert takes(schedule, pp, micro_batches), "config.rules refuses it"
    if pp == 1:
        return ((1,),)
    if schedule in ("gpipe", "looped-bfs"):
        return ((micro_batches,) * virtual_stages,) * pp
    if schedule == "dualpipev":
        return tuple((2 * pp - rank, rank + 1) for rank in range(pp))
    if schedule != "zbv":
        return tuple(
            _first_of_rounds(schedule, pp, virtual_stages, micro_batches, rank)
            for rank in range(pp)
        )
    if micro_batches >= 2 * pp - 1:
        return tuple((2 * pp - 1 - rank, rank + 1) for rank in range(pp))
    # With fewer micro batches there is no simple formula, but few actions to count.
    ranks = order(schedule, pp, virtual_stages, micro_batches)
    return tuple(tuple(residents(actions).held) for actions in ranks)


def _first_of_rounds(
    schedule: str, pp: int, virtual_stages: int, micro_batches: int, rank: int
) -> tuple[int, ...]:
    """Return the micro batches in each stage of a rank before the first full backward pass has ended."""
    passes = warmup(schedule, pp, virtual_stages, micro_batches, rank) + 1
    if schedule == "zero-bubble":
        passes += rank
    passes = min(passes, virtual_stages * micro_batches)
    length = round_length(pp, micro_batches)
    full, rest = divmod(passes, virtual_stages * length)
    return tuple(
        full * length + min(max(0, rest - turn * length), length) for turn in range(virtual_stages)
    )

"""The kinds of ranks of a layout."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from nanoscale.config.resolved import ResolvedConfig
from nanoscale.rehearse.kinds import distinct_ranks, kind_of
from tests.support.measured_memory import SHAPE, Row, config_of


def layout(stage: int = 0, shape: Any = SHAPE, **degrees: Any) -> ResolvedConfig:
    return config_of(Row("", degrees, stage, 1, shape=shape))


@pytest.mark.parametrize(
    ("config", "ranks"),
    [
        (layout(), [0]),
        (layout(dp=4), [0]),
        (layout(3, dp=4), [0]),
        (layout(3, dp=3), [0, 2]),
        (layout(tp=4), [0]),
        (layout(tp=4, shape=replace(SHAPE, bias=True)), [0, 3]),
        (layout(tp=4, shape=replace(SHAPE, vocab=510)), [0, 3]),
        (layout(cp=4), [0, 3]),
        (layout(cp=4, cp_method="ulysses"), [0]),
        (layout(pp=4), [0, 1, 2, 3]),
        (layout(pp=2, cp=2, tp=2), [0, 2, 4, 6]),
    ],
)
def test_ranks_that_are_played(config: ResolvedConfig, ranks: list[int]) -> None:
    assert list(distinct_ranks(config)) == ranks
    assert sum(distinct_ranks(config).values()) == config.world_size


def test_every_rank_has_a_kind() -> None:
    config = layout(pp=2, cp=4, dp=2, tp=2, shape=replace(SHAPE, bias=True))
    kinds = [kind_of(rank, config) for rank in range(config.world_size)]
    counted = {kind: kinds.count(kind) for kind in sorted({*kinds})}
    assert counted == distinct_ranks(config)

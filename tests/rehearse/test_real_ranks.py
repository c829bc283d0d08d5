"""Rehearsed ranks compared with real ones over gloo: memory, and collectives one by one."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace

import pytest

from nanoscale.rehearse.kinds import distinct_ranks, kind_of
from tests.rehearse.real_ranks import measured, rehearsed, sequence_of
from tests.support.measured_memory import (
    MIXTURE,
    ROWS,
    SHAPE,
    Row,
    config_of,
    recomputed,
    scheduled,
)
from tests.support.ranks import run_ranks

BOUND = 0.01
"""The largest relative error of a peak."""
LARGE_VOCABULARY = 16_384
SMALL, SMALL_MIXTURE = replace(SHAPE, layers=2), replace(MIXTURE, layers=2)
QUICK = [
    Row("one process, bf16", precision="bf16", shape=SMALL),
    Row("dp 2, stage 0", {"dp": 2}, shape=SMALL),
    Row("dp 2, stage 2, bf16", {"dp": 2}, 2, precision="bf16", shape=SMALL),
    Row("dp 2, stage 3, full", {"dp": 2} | recomputed("full"), 3, 2, shape=SMALL),
    Row("HSDP 2 × 2, stage 3", {"dp": 4, "dp_replicate": 2}, 3, 2, shape=SMALL),
    Row("tp 2", {"tp": 2}, shape=SMALL),
    Row("cp 2", {"cp": 2}, 3, shape=SMALL),
    Row("ulysses cp 2", {"cp": 2, "cp_method": "ulysses"}, shape=SMALL),
    Row("pp 2", {"pp": 2}, micro_batch=2, shape=SMALL),
    Row("pp 2, zbv", scheduled("zbv"), micro_batch=2, shape=SHAPE),
    Row("experts, ep 2", {"dp": 2, "ep": 2}, 3, shape=SMALL_MIXTURE),
    Row("dp 2 · tp 2 · pp 2", {"dp": 2, "tp": 2, "pp": 2}, 1, 2, shape=SMALL),
]
"""A dozen rows that cover every axis."""


def check(rows: list[Row]) -> None:
    """Compare every real rank with the rehearsed rank that stands for it."""
    by_world = defaultdict(list)
    for row in rows:
        config = config_of(row)
        by_world[config.world_size].append(config)
    for world_size, configs in by_world.items():
        ranks = run_ranks(measured, world_size, configs)
        for number, config in enumerate(configs):
            records = rehearsed(config, list(distinct_ranks(config)))
            by_rank = {record.rank: record for record in records}
            for rank, several in enumerate(ranks):
                real, record = several[number], by_rank[kind_of(rank, config)]
                assert record.error == ""
                assert record.peak == pytest.approx(real.peak, rel=BOUND)
                if record.rank == rank:
                    assert sequence_of(record) == real.sequence
                else:  # other groups, and the same in each
                    assert [it for _, it in sequence_of(record)] == [it for _, it in real.sequence]


@pytest.mark.slow
@pytest.mark.parametrize("row", QUICK, ids=lambda row: row.name)
def test_a_rehearsed_rank_does_what_a_real_one_does(row: Row) -> None:
    check([row])


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.parametrize("vocabulary", [512, LARGE_VOCABULARY])
@pytest.mark.parametrize(
    "row", [row for row in ROWS if row.backend == "native"], ids=lambda row: row.name
)
def test_every_row(row: Row, vocabulary: int) -> None:
    check([replace(row, shape=replace(row.shape, vocab=vocabulary))])

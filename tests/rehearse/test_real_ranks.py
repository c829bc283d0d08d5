"""Rehearsed ranks compared with real ones over gloo: memory, and collectives one by one."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace

import pytest

from nanoscale.config.resolved import ResolvedConfig
from nanoscale.config.schema import Checkpoint
from nanoscale.rehearse.compare import deadlock
from nanoscale.rehearse.kinds import first_of_kind
from nanoscale.rehearse.played.record import RankRecord
from tests.rehearse.real_ranks import (
    Measured,
    Program,
    Signature,
    before_saving,
    measured,
    rehearsed,
    sequence_of,
)
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
from tests.support.rows import usual_rows

BOUND = 0.01
"""The largest relative error of a peak."""
LIVES = 4
"""The most lives of real ranks whose lowest peak counts: gloo's threads may hold a tensor a little too long."""
LARGE_VOCABULARY = 16_384
SMALL, SMALL_MIXTURE = replace(SHAPE, layers=2), replace(MIXTURE, layers=2)
OFFLOADED = recomputed("selective", offload_activations=True)
QUICK = [
    Row("one process, bf16", precision="bf16", shape=SMALL),
    Row("one process, selective, offloaded", OFFLOADED, shape=SMALL),
    Row(
        "one process, adamw8bit, update highest",
        optimizer="adamw8bit",
        micro_batch=1,
        global_batch=2,
        shape=replace(SMALL, vocab=LARGE_VOCABULARY, hidden=32, head_dim=4, ffn=64),
        seq=32,
    ),
    Row("dp 2, stage 0", {"dp": 2}, shape=SMALL),
    Row("dp 2, stage 2, bf16", {"dp": 2}, 2, precision="bf16", shape=SMALL),
    Row("dp 2, stage 3, full", {"dp": 2} | recomputed("full"), 3, 2, shape=SMALL),
    Row("HSDP 2 × 2, stage 3", {"dp": 4, "dp_replicate": 2}, 3, 2, shape=SMALL),
    Row(
        "tp 2 · pp 2, large vocabulary",
        {"tp": 2, "pp": 2},
        micro_batch=2,
        shape=replace(SMALL, vocab=LARGE_VOCABULARY),
    ),
    Row("cp 2, selective", {"cp": 2} | recomputed("selective"), 3, shape=SMALL),
    Row("ulysses cp 2", {"cp": 2, "cp_method": "ulysses"}, shape=SMALL),
    Row("pp 2", {"pp": 2}, micro_batch=2, shape=SMALL),
    Row("pp 2, zbv", scheduled("zbv"), micro_batch=2, shape=SHAPE),
    Row("experts, ep 2", {"dp": 2, "ep": 2}, 3, shape=SMALL_MIXTURE),
    Row("dp 2 · tp 2 · pp 2", {"dp": 2, "tp": 2, "pp": 2}, 1, 2, shape=SMALL),
]
"""Rows that cover every axis."""
USUAL = ("dp 2, stage 3, full", "tp 2 · pp 2, large vocabulary", "experts, ep 2")


def with_whole_life(config: ResolvedConfig) -> ResolvedConfig:
    """Return the configuration with evaluations and checkpoints."""
    train = replace(config.train, eval_every=1)
    return replace(config, train=train, checkpoint=Checkpoint(every=1, asynchronous=True))


def check(rows: list[Row]) -> None:
    """Compare every real rank with the rehearsed rank that stands for it."""
    by_world = defaultdict(list)
    for row in rows:
        config = with_whole_life(config_of(row))
        by_world[config.world_size].append(config)
    for world_size, configs in by_world.items():
        ranks = run_ranks(measured, world_size, configs)
        for number, config in enumerate(configs):
            # The made-up loads of experts differ between ranks.
            others = range(world_size) if config.parallel.ep > 1 else ()
            records = rehearsed(config, sorted({*first_of_kind(config), *others}))
            compare([several[number] for several in ranks], records, config)


def compare(ranks: list[Measured], records: list[RankRecord], config: ResolvedConfig) -> None:
    assert [record.error for record in records] == [""] * len(records)
    assert deadlock(records) == []
    by_rank = {record.rank: record for record in records}
    firsts = first_of_kind(config)
    played = [by_rank.get(rank, by_rank[first]) for rank, first in enumerate(firsts)]
    expected = [(before_saving(record), record.peak) for record in played]
    peaks = [(real.before_saving, real.peak) for real in ranks]
    for _ in range(LIVES - 1):
        if all(map(agree, peaks, expected)):
            break
        more = [
            (real.before_saving, real.peak) for (real,) in run_ranks(measured, len(ranks), [config])
        ]
        peaks = [(min(a[0], b[0]), min(a[1], b[1])) for a, b in zip(peaks, more, strict=True)]
    for one, other in zip(peaks, expected, strict=True):
        assert one == pytest.approx(other, rel=BOUND)
    for rank, (real, record) in enumerate(zip(ranks, played, strict=True)):
        if record.rank == rank:
            assert sequence_of(record) == real.sequence
        else:  # other groups, and the same in each
            assert within_groups(sequence_of(record), record.rank) == within_groups(
                real.sequence, rank
            )


def within_groups(program: Program, rank: int) -> list[Signature]:
    """Return what the members of a group have in common; a peer is counted from `rank` in its group."""
    found = []
    for members, (kind, size, dtype, peer, reduction, *_) in program:
        if peer is not None and kind != "broadcast_":
            peer = (peer - members.index(rank)) % len(members)
        found.append((kind, size, dtype, peer, reduction))
    return found


def agree(real: tuple[int, int], expected: tuple[int, int]) -> bool:
    return real == pytest.approx(expected, rel=BOUND)


@pytest.mark.slow
@pytest.mark.parametrize("row", usual_rows({row.name: row for row in QUICK}, USUAL))
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

"""The kinds of ranks of a layout."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Any

import pytest

from nanoscale.config.resolved import ResolvedConfig
from nanoscale.rehearse.compare import mismatches
from nanoscale.rehearse.kinds import first_of_kind, played_ranks
from nanoscale.rehearse.life import play
from nanoscale.rehearse.played.cuda import Gpu
from nanoscale.rehearse.played.record import MESSAGES, RankRecord
from tests.support.measured_memory import MIXTURE, SHAPE, Row, config_of
from tests.support.ranks import run_ranks
from tests.support.rows import exhaustive


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
        (layout(tp=4, shape=replace(SHAPE, bias=True)), [0, 1]),
        (layout(tp=4, shape=replace(SHAPE, vocab=510)), [0, 3]),
        (layout(3, dp=4, shape=replace(SHAPE, qk_norm=True, head_dim=5)), [0, 2, 3]),
        (layout(3, dp=4, dp_replicate=2), [0]),
        (layout(3, dp=6, dp_replicate=2), [0, 2]),
        (layout(3, dp=8, shape=MIXTURE), [0, 4]),
        (layout(cp=4), [0, 3]),
        (layout(cp=4, cp_method="ulysses"), [0]),
        (layout(pp=4), [0, 1, 2, 3]),
        (layout(pp=2, cp=2, tp=2), [0, 2, 4, 6]),
    ],
)
def test_the_first_ranks_of_kinds(config: ResolvedConfig, ranks: list[int]) -> None:
    assert sorted(set(first_of_kind(config))) == ranks
    assert set(ranks) <= set(played_ranks(config))
    assert sum(played_ranks(config).values()) == config.world_size


@pytest.mark.parametrize(
    ("config", "ranks"),
    [
        (layout(), {0: 1}),
        (layout(dp=4), {0: 3, 3: 1}),
        (layout(dp=2, tp=2), {0: 1, 1: 1, 2: 1, 3: 1}),
        (layout(pp=2, dp=2, tp=2), {0: 1, 1: 1, 2: 1, 3: 1, 4: 4}),
        (layout(dp=4, cp=2, cp_method="ulysses"), {0: 5, 1: 1, 6: 1, 7: 1}),
        (layout(dp=8, ep=4, shape=MIXTURE), {0: 6, 3: 1, 7: 1}),
    ],
)
def test_a_second_member_of_each_axis_is_played_on_one_stage(
    config: ResolvedConfig, ranks: dict[int, int]
) -> None:
    assert played_ranks(config) == ranks


ALIKE: dict[str, Row] = {
    "uneven": Row("", {"dp": 3}, 3, 1, global_batch=3),
    "ring": Row("", {"cp": 4}, 3, 1, global_batch=1),
    "window": Row("", {"cp": 4}, 3, 1, shape=replace(SHAPE, sliding_window=4), global_batch=1),
    "bias": Row("", {"tp": 4}, 0, 1, shape=replace(SHAPE, bias=True), global_batch=1),
    "experts": Row("", {"dp": 4, "ep": 2}, 3, 1, shape=MIXTURE, global_batch=4),
}
USUAL = ("uneven", "ring", "bias")


@pytest.mark.slow
@pytest.mark.parametrize("name", [it if it in USUAL else exhaustive(it) for it in ALIKE])
def test_ranks_of_a_kind_do_the_same(name: str) -> None:
    row = ALIKE[name]
    config = config_of(replace(row, precision="bf16", shape=replace(row.shape, layers=2)))
    records = run_ranks(played, config.world_size, config)
    assert mismatches(records) == []
    first = first_of_kind(config)
    assert len({*first}) < config.world_size
    for rank, record in enumerate(records):
        one, other = essence(record), essence(records[first[rank]])
        assert record.error == ""
        if name in ("ring", "window"):  # halves of the scores in another order
            peaks = [
                {phase: memory["peak"] for phase, memory in it.pop("phases").items()}
                for it in (one, other)
            ]
            assert peaks[0] == pytest.approx(peaks[1], rel=1e-3)
            for it in (one, other):
                del it["timeline"], it["segments"]
                del it["works"]
                it["events"] = [event for event in it["events"] if event[1] != "work"]
        assert one == other


def played(rank: int, config: ResolvedConfig) -> RankRecord:
    return play(config, rank, 2, Gpu("NVIDIA H200", 140 << 30, 8))


SPLITS = ("sent", "received")


def essence(record: RankRecord) -> dict[str, Any]:
    """Return what a record has in common with records of the same kind: all but the numbers of ranks."""
    calls = []
    for call in record.calls:
        group = record.groups[call.group]
        peer, at = call.peer, group.index(record.rank)
        if (
            peer is not None and call.kind in MESSAGES
        ):  # the root of a broadcast is the same for all
            peer = (peer - at) % len(group)
        parts = {name: (*getattr(call, name)[at:], *getattr(call, name)[:at]) for name in SPLITS}
        calls.append((len(group), call._replace(group=0, peer=peer, **parts)))
    own = {"rank": 0, "groups": [], "seconds": 0.0}
    return asdict(replace(record, **own, calls=[])) | {"calls": calls}

"""The waits of the host for the device in a step: none, but for the loss scale and for the rows of experts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from nanoscale.config.resolved import ResolvedConfig
from nanoscale.config.schema import RopeScaling
from nanoscale.rehearse.life import play, world_of
from nanoscale.rehearse.played.cuda import Gpu
from nanoscale.rehearse.played.record import HOST, RankRecord, StreamEvent
from tests.support.measured_memory import MIXTURE, SHAPE, Row, config_of, recomputed
from tests.support.ranks import run_ranks
from tests.support.rows import exhaustive

LAYERS, MICRO_BATCHES = 2, 4
DENSE, EXPERTS = replace(SHAPE, layers=LAYERS), replace(MIXTURE, layers=LAYERS)
PAIRS = DENSE.rotated_width // 2
LONG = RopeScaling(
    kind="longrope", original_seq_len=32, short_factor=[1.0] * PAIRS, long_factor=[2.0] * PAIRS
)
LONGROPE = replace(DENSE, rope_scaling=LONG)
DEGREES: dict[str, Any] = {"dp": 2}
ROWS = {
    "fp8, qk_clip and longrope": (Row("", DEGREES, 3, precision="bf16", shape=LONGROPE), {}),
    "Muon": (Row("", {"dp": 2, "tp": 2}, 3, shape=DENSE, optimizer="muon"), {}),
    "bf16 without masters": (Row("", DEGREES, 3, precision="bf16-pure", shape=DENSE), {}),
    "schedule-free": (Row("", DEGREES, 3, shape=DENSE, optimizer="schedule-free"), {}),
    "fp16": (Row("", DEGREES, 2, precision="fp16", shape=DENSE), {"item": 1}),
    "statistics": (Row("", DEGREES, 2, shape=DENSE), {"item": 1, "tolist": 1}),
    "experts": (Row("", DEGREES, 2, precision="bf16", shape=EXPERTS), {}),
    "experts in fp8": (Row("", DEGREES, 3, precision="bf16", shape=EXPERTS), {}),
    "experts, ep 2, recomputed": (
        Row("", DEGREES | {"ep": 2} | recomputed("full"), 2, precision="bf16", shape=EXPERTS),
        {"copy to the host": LAYERS * MICRO_BATCHES},
    ),
    "experts, fp32": (Row("", DEGREES, 2, shape=EXPERTS), {"tolist": LAYERS * MICRO_BATCHES}),
}
USUAL = (
    "fp8, qk_clip and longrope",
    "Muon",
    "fp16",
    "statistics",
    "experts in fp8",
    "experts, ep 2, recomputed",
)


def waits(_: int, config: ResolvedConfig) -> tuple[str, dict[str, int]]:
    record = play(config, 0, 2, Gpu("NVIDIA H200", 140 << 30, 8))
    return record.error, {it.what: it.times for it in record.waits if it.phase == "step 2"}


@pytest.mark.slow
@pytest.mark.parametrize("name", [it if it in USUAL else exhaustive(it) for it in ROWS])
def test_waits_of_a_step(name: str) -> None:
    row, expected = ROWS[name]
    config = config_of(replace(row, micro_batch=1, global_batch=2 * MICRO_BATCHES))
    config = replace(
        config,
        precision=replace(config.precision, fp8="fp8" in name),
        optimizer=replace(config.optimizer, qk_clip=100.0 if "qk_clip" in name else None),
        train=replace(config.train, statistics_every=2 if name == "statistics" else 0),
    )
    assert run_ranks(waits, 1, config) == [("", expected)]


def events_after_an_operation(_: int) -> list[StreamEvent]:
    record = RankRecord(0)
    gpu = Gpu("NVIDIA H200", 140 << 30, 8)
    with world_of(config_of(ROWS["schedule-free"][0]), record, gpu) as world, world.timed():
        x = torch.zeros(4, device=world.device)
        torch.cuda.Stream().wait_stream(torch.cuda.current_stream())
        x.mul_(2)
        torch.cuda.synchronize()
    return record.events


def test_streams_and_the_host_wait_for_the_last_operation() -> None:
    (events,) = run_ranks(events_after_an_operation, 1)
    assert [tuple(event[:2]) for event in events] == [
        (0, "work"),
        (1, "after"),
        (0, "work"),
        (HOST, "after"),
    ]
    assert (events[1].of, events[3].of) == (0, 2)

"""The time of recorded events, computed by hand, and the costs of recorded work and collectives."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest

from nanoscale.config.schema import Launcher, Precision
from nanoscale.plan.hardware.hardware import NANOSCALE, Efficiency
from nanoscale.plan.rehearsed.costs import PlayedCosts
from nanoscale.plan.rehearsed.step_time import trace
from nanoscale.plan.rehearsed.streams import HOST, RankTime, simulate
from nanoscale.plan.time import collectives, operations
from tests.plan.machines import job, machine

PAIR = (0, 1)


@dataclass(frozen=True)
class Given(PlayedCosts):
    """PlayedCosts that stand in the events: a work is its seconds, and a collective takes its bytes."""

    start: float = 0.0
    call_start: float = 0.0
    slowed: float = 0.0

    @property
    def host_start(self) -> float:
        return self.start

    def seconds(self, work: Sequence[Any]) -> float:
        return float(work[2])

    def call(self, call: Any) -> float:
        return float(call["bytes"])

    def slowdown(self, call: Any) -> float:
        return self.slowed


def rank(*steps: tuple[Any, ...]) -> dict[str, Any]:
    """Return a rank's streams. A step is `stream, "work", seconds…`, `stream, "call", seconds, kind, peer`, or
    an event as it is recorded."""
    works: list[Any] = []
    segments: list[list[int]] = []
    calls: list[dict[str, Any]] = []
    events = []
    for stream, what, *numbers in steps:
        if what == "work":
            segments.append([*range(len(works), len(works) + len(numbers))])
            works += [("bytes", "add", seconds) for seconds in numbers]
            events.append((stream, what, len(segments) - 1))
        elif what == "call":
            seconds, kind, peer = (
                (*numbers, "allreduce_", None)[:3] if len(numbers) < 3 else numbers
            )
            calls.append({
                "ranks": list(PAIR), "kind": kind, "bytes": seconds, "peer": peer, "line": "a.py:1",
                "sent": (), "received": (), "block": "",
            })  # fmt: skip
            events.append((stream, what, len(calls) - 1))
        else:
            events.append((stream, what, *numbers))
    return {"works": works, "segments": segments, "calls": calls, "events": events}


def played(*ranks: dict[str, Any], traced: bool = False, **costs: float) -> list[RankTime]:
    given = Given(job(), machine(), **costs)
    streams = {str(number): each for number, each in enumerate(ranks)}
    return simulate(streams, given, {PAIR: "dp"}, traced=traced)


def hiding(computation: float, communication: float) -> dict[str, Any]:
    return rank((0, "call", communication), (0, "work", computation), (0, "wait", 0))


def test_a_collective_behind_longer_work_costs_what_it_slows_down():
    time, _ = played(hiding(5, 3), hiding(5, 3), slowed=0.5)
    assert time.seconds == 5 + 0.5 * 3
    assert time.communicated == {"dp": 3} and not time.exposed
    assert time.slowed == 1.5


def test_a_longer_collective_is_exposed_after_the_work():
    time, _ = played(hiding(5, 8), hiding(5, 8), slowed=0.5)
    assert time.exposed == {("dp", "a.py:1"): 3}
    assert time.seconds == 8 + 0.5 * 5  # it slows down the five seconds of work


def test_the_others_wait_for_a_late_rank():
    early, late = played(
        rank((0, "work", 2), (0, "call", 1), (0, "wait", 0)),
        rank((0, "work", 6), (0, "call", 1), (0, "wait", 0)),
    )
    assert (early.seconds, late.seconds) == (7, 7)
    assert early.exposed["dp", "a.py:1"] == 5 and late.exposed["dp", "a.py:1"] == 1
    assert early.communicated == late.communicated == {"dp": 1}


def test_collectives_of_one_group_follow_each_other():
    steps = (0, "call", 4), (0, "call", 3), (0, "wait", 1)
    assert played(rank(*steps), rank(*steps))[0].seconds == 7


def test_small_operations_wait_for_the_host():
    (time,) = played(rank((0, "work", 0.25, 0.25, 0.25, 0.25)), start=1.0)
    assert (time.seconds, time.computed, time.host_gaps) == (4.25, 1.0, 3.25)


def test_large_operations_wait_for_the_host_once():
    (time,) = played(rank((0, "work", 3, 3, 3)), start=1.0)
    assert (time.seconds, time.host_gaps) == (10, 1)


def test_a_host_that_waits_for_the_device_issues_later():
    """The first operation ends at 4; the host waits for it, and starts the second one until 5."""
    (time,) = played(rank((0, "work", 3), (HOST, "after", 0), (0, "work", 3)), start=1.0)
    assert (time.seconds, time.host_gaps) == (8, 2)


def test_the_host_is_waited_for_once_before_a_wait_for_a_late_rank():
    steps = (0, "call", 1), (1, "work", 0, 0, 0), (0, "wait", 0)
    early, late = played(rank(*steps), rank((0, "work", 9), *steps), start=1.0)
    assert early.seconds == late.seconds == 11
    assert early.host_gaps == 3


def test_the_host_needs_time_for_a_collective():
    steps = (0, "call", 1), (0, "wait", 0), (0, "work", 2)
    assert played(rank(*steps), rank(*steps), call_start=5.0)[0].seconds == 7


def test_streams_compute_at_the_same_time_until_one_waits():
    (time,) = played(rank((1, "work", 4), (0, "work", 1), (0, "after", 0), (0, "work", 2)))
    assert (time.seconds, time.computed) == (6, 3)


def test_a_stream_that_waits_for_a_collective_is_exposed_to_those_that_wait_for_it():
    steps = (1, "call", 4), (1, "wait", 0), (0, "work", 1), (0, "after", 1), (0, "work", 2)
    time, _ = played(rank(*steps), rank(*steps), slowed=0.5)
    assert time.exposed == {("dp", "a.py:1"): 3}
    assert time.seconds == 4 + 2 + 0.5 * 1


def test_a_micro_batch_stands_for_several():
    batches = (0, "batch", 1), (0, "work", 1), (0, "batch", 3), (0, "work", 2), (0, "batch", 1)
    (time,) = played(rank(*batches, (0, "work", 1)))
    assert (time.seconds, time.computed) == (1 + 3 * 2 + 1, 8)


def test_a_stage_begins_when_its_message_is_there():
    first, second = played(
        rank((0, "work", 2), (0, "call", 1, "send", 1), (0, "work", 3)),
        rank((0, "call", 1, "recv_", 0), (0, "wait", 0), (0, "work", 3)),
    )
    assert (first.seconds, second.seconds) == (5, 6)
    assert second.exposed["dp", "a.py:1"] == 3


def test_a_trace_has_every_operation_and_collective_at_its_time():
    times = played(hiding(5, 8), hiding(5, 8), traced=True)
    kernels = [{"name": "add", "lines": ["models/transformer.py:1"]}]
    events = trace(times, kernels)["traceEvents"]
    slices = [each for each in events if each["ph"] == "X" and each["pid"] == 0]
    assert [each["args"]["lines"] for each in slices if each["name"] == "add"] == [
        kernels[0]["lines"]
    ]
    assert all("lines" not in each["args"] for each in slices if each["name"] != "add")
    assert {(each["name"], each["ts"] / 1e6, each["dur"] / 1e6) for each in slices} == {
        ("add", 0, 5), ("allreduce dp", 0, 8), ("waits for dp", 5, 3),
    }  # fmt: skip


@pytest.mark.parametrize(
    ("work", "seconds"),
    [
        (("product", "mm", "bf16", 8192, 4096, 512, 1, True),
         lambda on: operations.product(on, "bf16", 8192, 4096, 512)),
        (("product", "_grouped_mm", "bf16", 99, 64, 32, 8, True),
         lambda on: operations.product(on, "bf16", 99, 64, 32, 8, grouped=NANOSCALE.grouped)),
        (("product", "mm", "fp32", 512, 512, 512, 1, True),
         lambda on: operations.product(on, "tf32", 512, 512, 512)),
        (("product", "mm", "bf16", 4096, 4096, 1366, 1, True),  # 1366 rows, each of them aligned
         lambda on: operations.product(on, "bf16", 4096, 4096, 1366, 1, True)),
        (("attention", "flash", "bf16", 2, 4096, 4096, 32, 128, True, False),
         lambda on: operations.attention(on, "bf16", 2, 4096, 4096, 32, 128, True, "cudnn")),
        (("attention", "flash", "bf16", 2, 4096, 1024, 32, 128, False, True),
         lambda on: operations.BACKWARD_ATTENTION
         * operations.attention(on, "bf16", 2, 4096, 1024, 32, 128, False, "cudnn")),
        (("bytes", "add", 10**9), lambda on: operations.elementwise(on, 10**9) + operations.FILL),
        (("copy", "copy_", 10**9), lambda on: 10**9 / on.host_bandwidth + operations.FILL),
    ],
)  # fmt: skip
def test_work_costs_what_the_plan_says(work, seconds):
    hardware = machine("h100-sxm")
    config = job(precision=Precision(compute="bf16", tf32=True))
    assert PlayedCosts(config, hardware).seconds(work) == pytest.approx(seconds(hardware))


@pytest.mark.parametrize(
    ("kind", "ranks", "expected"),
    [
        ("allreduce_", range(8), lambda on, group: collectives.all_reduce(on, group, 2**30)),
        ("_allgather_base_", range(8), lambda on, group: collectives.all_gather(on, group, 2**30)),
        ("_reduce_scatter_base_", range(0, 32, 8), lambda on, group: collectives.all_gather(on, group, 2**30)),
        ("alltoall_base_", range(4), lambda on, group: collectives.all_to_all(on, group, 2**30)),
        ("send", (0, 8), lambda on, group: collectives.send(on, group, 2**30)),
    ],
)  # fmt: skip
def test_collectives_cost_what_the_plan_says(kind, ranks, expected):
    hardware, ranks = machine("h100-sxm"), list(ranks)
    sent = [2**30 // len(ranks)] * len(ranks) if "alltoall" in kind else []
    call = {"kind": kind, "ranks": ranks, "bytes": 2**30, "sent": sent, "received": sent}
    group = collectives.group(hardware, len(ranks), ranks[1])
    assert PlayedCosts(job(), hardware).call(call) == pytest.approx(expected(hardware, group))


def test_the_host_starts_nothing_on_a_cpu():
    cpu = job(device="cpu", launcher=Launcher(device="cpu"), precision=Precision(compute="fp32"))
    assert PlayedCosts(cpu, machine("h100-sxm")).host_start == 0.0
    assert PlayedCosts(job(), machine("h100-sxm")).host_start == Efficiency().eager_s

"""The decisions of the bandwidth test, and sensible times of real ranks."""

from __future__ import annotations

import os
import time
from collections import Counter

import pytest
import torch
import torch.distributed as dist

from nanoscale.measure import bandwidth
from nanoscale.measure.bandwidth import (
    bus_gb_s,
    closed_ways,
    mark_slow,
    measure_pairs,
    measure_within,
    needs_pairs,
    ring_rounds,
    time_collective,
    time_large,
    transports,
)
from nanoscale.parallel import process_group
from tests.support.ranks import run_ranks

CPU = torch.device("cpu")


@pytest.mark.parametrize(("ranks", "factor"), [(2, 1.0), (4, 1.5), (8, 1.75), (1024, 2046 / 1024)])
def test_bus_bandwidth_counts_what_each_rank_must_send(ranks, factor):
    assert bus_gb_s(3_000_000_000, 1.5, ranks) == pytest.approx(2.0 * factor)


@pytest.mark.parametrize(("count", "rounds"), [(1, 0), (2, 1), (3, 3), (10, 2), (31, 3), (128, 2)])
def test_hosts_meet_their_neighbors_in_a_ring_and_nobody_twice_in_a_round(count, rounds):
    played = ring_rounds(range(count))
    assert len(played) == rounds
    for pairs in played:
        assert max(Counter(rank for pair in pairs for rank in pair).values()) == 1
    met = [frozenset(pair) for pairs in played for pair in pairs]
    assert set(met) == {frozenset((n, (n + 1) % count)) for n in range(count) if count > 1}
    assert len(met) == len(set(met))


@pytest.mark.parametrize(
    ("within", "needed"), [([400.0, 390.0, 20.0], True), ([300.0, 290.0], False), ([], True)]
)
def test_pairs_are_measured_if_all_ranks_are_slow_compared_with_hosts(within, needed):
    reduced = [{"bus_gb_s": 0.01}, {"bus_gb_s": 180.0}]  # the largest size counts
    assert needs_pairs(reduced, [{"bus_gb_s": speed} for speed in within]) is needed


def test_the_transports_of_nccl_are_read_from_its_log():
    log = """n1:10:11 [0] NCCL INFO NET/IB : Using [0]mlx5_0:1/IB [RO]; OOB eth0:10.0.0.1<0>
n1:10:11 [0] NCCL INFO Channel 00/0 : 1[1] -> 3[1] [receive] via NET/IB/2/GDRDMA
n1:10:11 [0] NCCL INFO Channel 01/0 : 1[1] -> 3[1] [send] via NET/IB/3/GDRDMA
n1:10:11 [0] NCCL INFO Channel 00/0 : 3[1] -> 2[0] via P2P/CUMEM
n1:10:11 [0] NCCL INFO Connected all rings
"""
    assert transports(log) == ["NET/IB/GDRDMA", "P2P/CUMEM"]
    assert transports("") == []


def test_less_than_half_of_the_median_is_slow():
    def slow(*speeds):
        marked = mark_slow([{"gb_s": speed} for speed in speeds], "gb_s")
        return [row["gb_s"] for row in marked if row["slow"]]

    assert slow() == slow(1.0, 0.1) == slow(1.0, 1.0, 0.51) == []
    assert slow(1.0, 0.4, 1.0, 1.0, 0.1) == [0.1, 0.4]


def _measure(rank):
    process_group.join(4, CPU, 120)
    hosts = ["a", "a", "b", "c"]
    # Time enough on a busy machine: the repetitions have a limit of their own.
    reduced = time_collective("all-reduce", CPU, (1 << 10, 1 << 16, 1 << 20), 10)
    bandwidth.SIZES, bandwidth._LARGE["cpu"] = (1 << 20,), (1 << 20, 1 << 22)
    bandwidth._LARGE_S = 10.0
    large = time_large(CPU, reduced)
    bandwidth.SIZES = (1 << 22,)
    assert time_large(CPU, reduced) == []  # the all-reduce had no time for so much
    return reduced, large, measure_within(hosts, CPU), measure_pairs(hosts, CPU, 1 << 20)


@pytest.mark.slow
def test_all_ranks_come_to_the_same_times():
    first, *others = run_ranks(_measure, 4)
    assert all(one == first for one in others)
    reduced, large, within, pairs = first
    assert [one["bytes"] for one in reduced] == [1 << 10, 1 << 16, 1 << 20]
    for one in reduced:
        bus = bus_gb_s(one["bytes"], one["latency_us"] / 1e6, 4)
        assert one["latency_us"] > 1 and one["bus_gb_s"] == pytest.approx(bus)
    assert [(one["operation"], one["bytes"]) for one in large] == [
        (name, size)
        for name in ("all-reduce", "all-gather", "reduce-scatter", "all-to-all")
        for size in (1 << 20, 1 << 22)
    ]
    for one in large:
        sent = one["bytes"] * (1.5 if one["operation"] == "all-reduce" else 0.75)
        assert one["bus_gb_s"] == pytest.approx(sent / one["latency_us"] / 1e3)
    ((host, speed),) = [(one["host"], one["bus_gb_s"]) for one in within]
    assert host == "a" and speed > 0.001
    assert {tuple(sorted(pair["ends"])) for pair in pairs} == {("a", "b"), ("a", "c"), ("b", "c")}
    assert all(pair["latency_us"] > 1 and pair["gb_s"] > 0.001 for pair in pairs)


def _run_out_of_time(rank):
    process_group.join(2, CPU, 120)
    slowed = dist.all_reduce

    def all_reduce(data):
        if rank == 1:
            time.sleep(0.2)
        slowed(data)

    dist.all_reduce = all_reduce
    try:
        return [one["bytes"] for one in time_collective("all-reduce", CPU, bandwidth.SIZES, 0.2)]
    finally:
        dist.all_reduce = slowed


@pytest.mark.slow
def test_sizes_that_would_take_too_long_are_left_out_by_all_ranks():
    first, second = run_ranks(_run_out_of_time, 2)
    assert first == second and len(first) < len(bandwidth.SIZES)


THINKS_S = 3.0
"""Much longer than a busy machine lets a rank wait for its turn."""


def _exchange_with_a_sluggard(rank):
    """Rank 1 thinks for a while before each long answer."""
    process_group.join(2, CPU, 120)
    real = dist.send

    def send(data, peer):
        if rank == 1 and data.numel() > 8:
            time.sleep(THINKS_S)
        real(data, peer)

    dist.send = send
    try:
        return measure_pairs(["a", "b"], CPU, 1 << 20)
    finally:
        dist.send = real


@pytest.mark.slow
def test_a_message_takes_half_of_there_and_back():
    (pair,), _ = run_ranks(_exchange_with_a_sluggard, 2)
    seconds = (1 << 20) / pair["gb_s"] / 1e9
    assert THINKS_S / 2 <= seconds < THINKS_S and pair["latency_us"] / 1e6 < seconds


def _find_closed(rank, blocked):
    os.environ |= {"GROUP_RANK": str(rank), "GROUP_WORLD_SIZE": "3", "LOCAL_RANK": "0"}
    if blocked:
        import socket

        real = socket.create_connection

        def create_connection(address, **options):
            if rank == 1 and address[1] != int(os.environ["MASTER_PORT"]):
                raise TimeoutError("timed out")
            return real(address, **options)

        socket.create_connection = create_connection
    return closed_ways(f"n{rank}")


def test_open_ways_are_found_open():
    assert run_ranks(_find_closed, 3, False) == [[], [], []]


def test_all_ranks_learn_which_ways_are_closed():
    first, *others = run_ranks(_find_closed, 3, True)
    assert others == [first, first]
    assert {(way["host"], way["to"], way["why"]) for way in first} == {
        ("n1", to, "timed out") for to in ("n0", "n1", "n2")
    }

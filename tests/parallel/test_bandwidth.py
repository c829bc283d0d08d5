"""The pairs of the bandwidth test, and sensible times of real ranks."""

from __future__ import annotations

import os
import time
from collections import Counter

import pytest
import torch
import torch.distributed as dist

from nanoscale.measure import bandwidth
from nanoscale.measure.bandwidth import PairTime, all_reduces, ends, measure_pairs, rounds, slow
from nanoscale.measure.host_connections import closed_ways
from nanoscale.parallel import process_group
from tests.support.ranks import run_ranks

CPU = torch.device("cpu")


@pytest.mark.parametrize("count", [2, 3, 7, 8])
def test_few_meet_all_others_one_pair_at_a_time(count):
    players = [10 * n for n in range(count)]
    played = rounds(players)
    assert all(len(pairs) == 1 for pairs in played)
    met = {frozenset(pair) for (pair,) in played}
    assert len(met) == len(played) == count * (count - 1) // 2


@pytest.mark.parametrize("count", [9, 10, 31, 128])
def test_many_meet_their_neighbors_in_a_ring_and_nobody_twice_in_a_round(count):
    played = rounds(range(count))
    assert len(played) == 2 + count % 2
    for pairs in played:
        assert max(Counter(rank for pair in pairs for rank in pair).values()) == 1
    met = {frozenset(pair) for pairs in played for pair in pairs}
    assert met == {frozenset((n, (n + 1) % count)) for n in range(count)}


def test_ends_are_the_first_ranks_of_hosts_or_all_of_one():
    assert ends(["a", "a", "b", "c", "c"]) == [0, 2, 3]
    assert ends(["a", "a", "a"]) == [0, 1, 2]


def test_a_pair_is_slow_with_less_than_half_of_the_median():
    def pairs(*speeds):
        return [PairTime((0, n), 1e-5, 1 / speed) for n, speed in enumerate(speeds, 1)]

    assert slow([]) == [] and slow(pairs(1.0, 1.0, 0.51)) == []
    assert [pair.ranks[1] for pair in slow(pairs(1.0, 0.4, 1.0, 1.0, 0.1))] == [5, 2]


def _measure(rank):
    process_group.join(3, CPU, 120)
    # Time enough on a busy machine: the repetitions have a limit of their own.
    reduced = all_reduces(CPU, (1 << 10, 1 << 16, 1 << 20), 10)
    pairs = measure_pairs(rounds([0, 1, 2]), CPU, 10)
    return reduced, pairs


@pytest.mark.slow
def test_all_ranks_come_to_the_same_times():
    first, *others = run_ranks(_measure, 3)
    reduced, pairs = first
    assert all(one == first for one in others)
    assert [one.bytes for one in reduced] == [1 << 10, 1 << 16, 1 << 20]
    assert {pair.ranks for pair in pairs} == {(0, 1), (0, 2), (1, 2)}
    assert all(one.seconds > 1e-6 for one in reduced)
    assert all(pair.latency_s > 1e-6 and pair.seconds > 1e-5 for pair in pairs)


def _run_out_of_time(rank):
    process_group.join(2, CPU, 120)
    slowed = dist.all_reduce

    def all_reduce(data):
        if rank == 1:
            time.sleep(0.2)
        slowed(data)

    dist.all_reduce = all_reduce
    try:
        return [one.bytes for one in all_reduces(CPU, bandwidth.SIZES, 0.2)]
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
        return measure_pairs([[(0, 1)]], CPU, 0.2)
    finally:
        dist.send = real


@pytest.mark.slow
def test_a_message_takes_half_of_there_and_back():
    (pair,), _ = run_ranks(_exchange_with_a_sluggard, 2)
    assert THINKS_S / 2 <= pair.seconds < THINKS_S and pair.latency_s < pair.seconds


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
    assert {(way.host, way.to, way.why) for way in first} == {
        ("n1", to, "timed out") for to in ("n0", "n1", "n2")
    }

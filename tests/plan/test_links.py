"""Collectives against rings walked step by step, and against published bus bandwidths."""

from __future__ import annotations

import pytest

from nanoscale.plan.time import collectives
from nanoscale.plan.time.collectives import AxisRanks, group
from tests.plan.machines import changed, machine

IDEAL = {"intra_host": 1.0, "inter_host": 1.0}


def walked(ranks: int, size: float, bandwidth: float, latency: float) -> float:
    """Simulate a ring all-gather: each rank passes on its last chunk, until every rank has all chunks."""
    have = [{rank} for rank in range(ranks)]
    seconds = 0.0
    while any(len(parts) < ranks for parts in have):
        step = len(have[0]) - 1
        have = [parts | {(rank - 1 - step) % ranks} for rank, parts in enumerate(have)]
        seconds += latency + size / ranks / bandwidth
    return seconds


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_a_ring_inside_a_host(ranks):
    hardware = changed(machine(), **IDEAL)
    hop = hardware.intra_latency + collectives.SLICE
    expected = walked(ranks, 1e8, hardware.intra_bandwidth, hop)
    found = collectives.all_gather(hardware, group(hardware, ranks, 1), 1e8)
    assert found - collectives.START == pytest.approx(expected)


def test_a_ring_of_one_rank_a_host_goes_over_the_network():
    hardware = changed(machine(), **IDEAL)
    expected = walked(4, 1e8, hardware.inter_bandwidth, hardware.inter_latency)
    found = collectives.all_gather(hardware, group(hardware, 4, 8), 1e8)
    assert found - collectives.START == pytest.approx(expected)


def test_ranks_of_a_host_share_its_adapters():
    """Every host takes in the other hosts' parts, once, through all adapters of its ranks."""
    hardware = changed(machine(), **IDEAL, inter_latency=0.0, intra_latency=0.0)
    one, eight = group(hardware, 4, 8), group(hardware, 32, 1)
    size = 1e14  # beside which the hops' slices are nothing
    enters = size * 3 / 4
    alone = collectives.all_gather(hardware, one, size) - collectives.START
    together = collectives.all_gather(hardware, eight, size) - collectives.START
    assert alone == pytest.approx(enters / hardware.inter_bandwidth)
    inside = size * 31 / 32 / hardware.intra_bandwidth
    assert together == pytest.approx(max(enters / (8 * hardware.inter_bandwidth), inside))


@pytest.mark.parametrize(
    ("size", "stride", "inside"),
    [(8, 1, 8), (4, 1, 4), (16, 1, 8), (4, 2, 4), (8, 2, 4), (16, 4, 2), (2, 8, 1), (128, 8, 1)],
)
def test_where_the_ranks_of_an_axis_stand(size, stride, inside):
    assert group(machine(), size, stride) == AxisRanks(size, inside)


def test_72_devices_of_an_nvl72_are_an_island_though_hosts_have_4():
    assert group(machine("gb200"), 16, 4) == AxisRanks(16, 16)
    assert group(machine("h200"), 16, 4) == AxisRanks(16, 2)


def test_pods_share_the_links_between_them():
    """Every pod takes in the other pods' parts, once, through all adapters of its ranks."""
    ideal = changed(machine(), **IDEAL, inter_latency=0.0, intra_latency=0.0)
    pods = changed(ideal, pod=64, pod_bandwidth=ideal.inter_bandwidth / 7)
    one, eight = group(pods, 32, 8), group(pods, 256, 1)
    assert (one, eight) == (AxisRanks(32, 1, 8), AxisRanks(256, 8, 64))
    assert group(pods, 8, 8) == group(ideal, 8, 8)  # a pod of its own
    size, lane = 1e14, ideal.inter_bandwidth / 7
    alone = collectives.all_gather(pods, one, size) - collectives.START
    assert alone == pytest.approx(max(size * 24 / 32 / (8 * lane), size * 31 / 32 / (7 * lane)))
    together = collectives.all_gather(pods, eight, size) - collectives.START
    assert together == pytest.approx(collectives.all_gather(ideal, group(ideal, 256, 1), size))
    starved = changed(pods, pod_bandwidth=lane / 10)
    slow = collectives.all_gather(starved, eight, size) - collectives.START
    assert slow == pytest.approx(size * 3 / 4 / (64 * lane / 10))
    copied = [collectives.with_copying(it, eight, size)[1] for it in (starved, pods)]
    assert copied[0] == copied[1]
    assert collectives.send(pods, one, size) == pytest.approx(size / lane, rel=1e-3)
    assert collectives.all_to_all(pods, one, size) == pytest.approx(size * 3 / 4 / lane, rel=1e-3)


@pytest.mark.parametrize(
    ("device", "size", "published"),
    [("a100-80", 2**24, 109.2), ("a100-80", 2**25, 132.8), ("a100-80", 2**26, 166.6), ("a100-80", 2**28, 213.9),
     ("a100-80", 2**30, 228.1), ("mi300x", 2**30, 313.9)],
)  # fmt: skip
def test_bus_bandwidth_of_an_all_reduce(device, size, published):
    """GB/s as NCCL's tests count it, 2(n - 1)/n · S / t, on 8 devices (Azure's AI benchmarking guide)."""
    hardware = machine(device)
    seconds = collectives.all_reduce(hardware, group(hardware, 8, 1), size)
    assert 2 * 7 / 8 * size / seconds / 1e9 == pytest.approx(published, rel=0.10)


@pytest.mark.parametrize(
    ("collective", "hop", "once", "share"),
    [
        (collectives.all_gather, 9.1828, 23.1049, 0.6735),
        (collectives.all_gather, 8.0325, 25.5604, 0.6731),
        (collectives.all_to_all, 7.3039, 0.0, 0.5968),
    ],
)
@pytest.mark.parametrize("size", [2**26, 2**27, 2**28])
def test_collectives_on_8_b200(collective, hop, once, share, size):
    """SimuMax's fit to what it measured, b200_bf16_ceperm.json: µs a hop and once, and a share of 900 GB/s."""
    hardware = machine("b200")
    measured = (7 * hop + once) * 1e-6 + size * 7 / 8 / (share * 900e9)
    seconds = collective(hardware, group(hardware, 8, 1), size)
    assert seconds == pytest.approx(measured, rel=0.10)


def test_all_to_all_sends_each_part_once():
    hardware = changed(machine(), **IDEAL, intra_latency=0.0)
    seconds = collectives.all_to_all(hardware, group(hardware, 8, 1), 8e9) - collectives.START
    assert seconds == pytest.approx(7e9 / (0.87 * hardware.intra_bandwidth))


@pytest.mark.parametrize(
    "collective", [collectives.all_gather, collectives.all_reduce, collectives.all_to_all]
)
def test_a_group_of_one_sends_nothing(collective):
    assert collective(machine(), group(machine(), 1, 1), 1e9) == 0.0


@pytest.mark.parametrize(
    "collective",
    [collectives.all_gather, collectives.all_reduce, collectives.all_to_all, collectives.send],
)
@pytest.mark.parametrize("ranks", [(8, 1), (64, 1), (16, 8), (32, 2)])
@pytest.mark.parametrize(
    "better", ["intra_bandwidth", "inter_bandwidth", "intra_host", "inter_host"]
)
def test_more_bandwidth_is_never_slower(collective, ranks, better):
    slow = machine()
    was = getattr(slow if hasattr(slow, better) else slow.efficiency, better)
    fast = changed(slow, **{better: was * 1.2})
    assert collective(fast, group(fast, *ranks), 1e8) <= collective(slow, group(slow, *ranks), 1e8)

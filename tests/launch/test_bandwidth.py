"""Figures from the seconds of the bandwidth test."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess

import pytest

from nanoscale.config.schema import Config
from nanoscale.launch.lifecycle.bandwidth import (
    _NETWORK_CHECKS,
    _ranks_config,
    bus_gb_s,
    judge_connections,
    judge_pairs,
    read_figures,
    time_limit_s,
)

MIB = 1 << 20


def result(hosts, speeds, slow=()):
    """Return the job's result: for each pair of ranks its GB/s."""
    return {
        "backend": "gloo",
        "hosts": hosts,
        "all_reduce": [{"bytes": 1 << 30, "seconds": 0.5}],
        "message_bytes": 4 * MIB,
        "pairs": [
            {"ranks": list(ranks), "latency_s": 2e-5, "seconds": 4 * MIB / (speed * 1e9)}
            for ranks, speed in speeds.items()
        ],
        "slow": [list(ranks) for ranks in slow],
        "left_out": 0,
        "closed": [],
    }


def test_the_time_that_the_test_may_take_grows_with_the_ranks():
    assert [time_limit_s(ranks) for ranks in (2, 1000)] == pytest.approx([120.4, 320.0])
    config = _ranks_config(Config(), 1000)
    assert config.launcher.collective_timeout_s == pytest.approx(160.0)


@pytest.mark.parametrize(("ranks", "factor"), [(2, 1.0), (4, 1.5), (8, 1.75), (1024, 2046 / 1024)])
def test_bus_bandwidth_counts_what_each_rank_must_send(ranks, factor):
    assert bus_gb_s(3_000_000_000, 1.5, ranks) == pytest.approx(2.0 * factor)


def test_a_ring_of_perfect_links_has_the_bandwidth_of_a_link():
    # n - 1 steps to reduce and n - 1 to gather, each of a piece of size / n, over links of 5 GB/s.
    for ranks in (2, 3, 7):
        size = 10_000_000
        seconds = 2 * (ranks - 1) * (size / ranks) / 5e9
        assert bus_gb_s(size, seconds, ranks) == pytest.approx(5.0)


def test_figures_are_of_hosts_where_there_are_several():
    seen = read_figures(result(["a", "a", "b", "b"], {(0, 2): 1.25}))
    assert (seen.ranks, seen.hosts) == (4, ("a", "b"))
    (pair,) = seen.pairs
    assert pair.ends == ("a", "b")
    assert pair.gb_s == pytest.approx(1.25) and pair.latency_us == pytest.approx(20)
    (reduced,) = seen.all_reduce
    assert reduced.latency_us == pytest.approx(500_000)
    assert reduced.bus_gb_s == pytest.approx(2 * 2**30 / 1e9 * 1.5)


def test_and_of_ranks_where_there_is_one():
    seen = read_figures(result(["a", "a"], {(0, 1): 1.0}))
    assert seen.pairs[0].ends == ("rank 0", "rank 1")
    assert list(judge_pairs(seen)) == []  # nothing to compare it with


def test_a_slow_pair_names_its_two_hosts():
    hosts = ["a", "b", "c", "d"]
    pairs = [(0, 1), (0, 2), (0, 3), (1, 2), (1, 3), (2, 3)]
    speeds = dict.fromkeys(pairs, 2.0) | {(1, 2): 0.5}
    verdicts = list(judge_pairs(read_figures(result(hosts, speeds, slow=[(1, 2)]))))
    (bad,) = [verdict for verdict in verdicts if not verdict.good]
    assert bad.finding == "b – c 0.5 GB/s, less than half of the usual 2"
    assert "network of b and c" in bad.remedy
    assert {verdict.host for verdict in verdicts if verdict.good} == {"a", "d"}


def test_the_command_that_shows_a_links_errors_is_one_of_ip():
    ethtool, ip = re.findall("`([^`]+)`", _NETWORK_CHECKS)
    assert ethtool == "ethtool"
    if shutil.which("ip") is None:
        pytest.skip("ip is not installed: apt-get install iproute2")
    subprocess.run(shlex.split(ip), check=True, capture_output=True, timeout=60)


def test_the_host_of_all_slow_pairs_is_to_blame():
    hosts = ["a", "b", "c", "d", "e"]
    speeds = {(i, j): 0.1 if 2 in (i, j) else 3.0 for i in range(5) for j in range(i + 1, 5)}
    slow = [pair for pair, speed in speeds.items() if speed < 1]
    bad = [v for v in judge_pairs(read_figures(result(hosts, speeds, slow))) if not v.good]
    assert {verdict.host for verdict in bad} == {"c"} and len(bad) == 4
    assert all("network of c:" in verdict.remedy for verdict in bad)


def test_ways_that_are_closed_are_told_by_host():
    closed = [
        {"host": "b", "to": to, "address": f"10.0.0.{n}", "why": "timed out"}
        for n, to in enumerate(("c", "d", "e", "f"))
    ]
    closed.append({"host": "c", "to": "b", "address": "10.0.0.9", "why": "No route to host"})
    b, c = judge_connections(closed)
    assert (b.host, b.finding) == (
        "b",
        "does not reach c (10.0.0.0), d (10.0.0.1) and 2 more: timed out",
    )
    assert (c.host, c.good) == ("c", False) and "No route to host" in c.finding

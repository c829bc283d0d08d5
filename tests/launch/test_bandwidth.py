"""Figures from the seconds of the bandwidth test."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
from itertools import combinations

import pytest

from nanoscale.config.schema import Config
from nanoscale.launch.lifecycle.examination import (
    _NETWORK_CHECKS,
    job_config,
    judge_connections,
    judge_pairs,
    judge_within,
    time_limit_s,
)


def pairs(speeds, slow=()):
    """Return the figures of hosts whose pairs have these GB/s."""
    rows = [
        {"ends": list(ends), "latency_us": 20.0, "gb_s": speed, "slow": ends in slow}
        for ends, speed in speeds.items()
    ]
    return {"hosts": sorted({host for ends in speeds for host in ends}), "point_to_point": rows}


def test_the_time_that_the_test_may_take_grows_with_the_ranks():
    assert [time_limit_s(ranks) for ranks in (2, 1000)] == pytest.approx([120.4, 320.0])
    config = job_config(Config(), 1000)
    assert config.launcher.collective_timeout_s == pytest.approx(160.0)


def test_a_slow_pair_names_its_two_hosts():
    speeds = dict.fromkeys(["ab", "ac", "ad", "bc", "bd", "cd"], 2.0) | {"bc": 0.5}
    verdicts = list(
        judge_pairs(pairs({tuple(ends): gb_s for ends, gb_s in speeds.items()}, [("b", "c")]))
    )
    (bad,) = [verdict for verdict in verdicts if not verdict.good]
    assert bad.finding == "b – c 0.5 GB/s, less than half of the usual 2"
    assert "network of b and c" in bad.remedy
    good = {verdict.host: verdict.finding for verdict in verdicts if verdict.good}
    assert good == dict.fromkeys("ad", "is in no pair with less than half of the usual 2 GB/s")


def test_one_pair_has_nothing_to_be_compared_with():
    assert list(judge_pairs(pairs({("a", "b"): 1.0}))) == []


def test_a_host_whose_own_ranks_are_slow_is_told():
    rows = [{"host": host, "bus_gb_s": 400.0, "slow": False} for host in "abc"]
    rows.append({"host": "d", "bus_gb_s": 20.0, "slow": True})
    (bad,) = judge_within({"within_hosts": rows})
    assert (bad.host, bad.good) == ("d", False)
    assert bad.finding == "all-reduce within the host 20 GB/s, less than half of the usual 400"


def test_the_command_that_shows_a_links_errors_is_one_of_ip():
    ethtool, ip = re.findall("`([^`]+)`", _NETWORK_CHECKS)
    assert ethtool == "ethtool"
    if shutil.which("ip") is None:
        pytest.skip("ip is not installed: apt-get install iproute2")
    subprocess.run(shlex.split(ip), check=True, capture_output=True, timeout=60)


def test_the_host_of_all_slow_pairs_is_to_blame():
    speeds = {ends: 0.1 if "c" in ends else 3.0 for ends in combinations("abcde", 2)}
    slow = [ends for ends, speed in speeds.items() if speed < 1]
    bad = [verdict for verdict in judge_pairs(pairs(speeds, slow)) if not verdict.good]
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

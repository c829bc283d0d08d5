"""The bandwidth test of `doctor`: the agents run a measuring job, without a run or a run directory."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

from nanoscale.config.machines import Host
from nanoscale.config.resolved import ResolvedConfig, resolved
from nanoscale.config.schema import Config, Parallel
from nanoscale.launch.fleet.connections import Member
from nanoscale.launch.fleet.fleet import Fleet
from nanoscale.launch.lifecycle.command import LaunchPlan, agent_environment, plan_launch
from nanoscale.launch.lifecycle.job_execution import JobExecution
from nanoscale.launch.lifecycle.one_shot_job import NO_RUN, execute
from nanoscale.launch.preflight.verdicts import Verdict, join_names
from nanoscale.processes.messages import BANDWIDTH
from nanoscale.runs.failure import Evidence, diagnose, first_cause

CHECK = "bandwidth"
_SINGLE_HOST_RANKS = 2
"""Ranks of a single host without GPUs."""
_FEWEST_PAIRS = 3
"""The fewest pairs among which one can stand out."""
_FIREWALL_REMEDY = (
    "look for a firewall or a missing route: between the hosts, all ports must be open"
)
_NETWORK_CHECKS = "cables, link speed (`ethtool`), errors (`ip -s link`), other jobs"


@dataclass(frozen=True)
class AllReduce:
    """The median time and bandwidth of all-reduces of one size."""

    bytes: int
    latency_us: float
    bus_gb_s: float
    """The bandwidth of each link, GB/s: `bus_gb_s`."""


@dataclass(frozen=True)
class Pair:
    """The median time and bandwidth of messages between two hosts, or two ranks of one host, one way."""

    ends: tuple[str, str]
    latency_us: float
    """The latency of the shortest message."""
    gb_s: float
    """The bandwidth of a long message."""
    slow: bool = False
    """True if that is less than half of the median of all pairs."""


@dataclass(frozen=True)
class Figures:
    """All measurements."""

    backend: str
    ranks: int
    hosts: tuple[str, ...]
    all_reduce: tuple[AllReduce, ...] = ()
    pairs: tuple[Pair, ...] = ()
    left_out: int = 0
    """Pairs for which time did not suffice."""


@dataclass(frozen=True)
class Measured:
    """The result of the test: figures, unless it failed."""

    figures: Figures | None
    verdicts: tuple[Verdict, ...] = ()


def bus_gb_s(size: int, seconds: float, ranks: int) -> float:
    """Return the bandwidth that each rank's link must have carried for an all-reduce, GB/s.

    That is size / time · 2(n - 1) / n: with any algorithm, n ranks send and receive at least 2(n - 1) / n
    times the data. It can be compared with the hardware's own figure, for any number of ranks. The definition
    is that of NVIDIA's nccl-tests (doc/PERFORMANCE.md, "busbw").
    """
    return size / seconds * 2 * (ranks - 1) / ranks / 1e9


def prepare(fleet: Fleet, config: Config, *, will_measure: bool) -> None:
    """Request the hosts' facts and prepare them for the test; returns when all have answered, or are lost."""
    world_size = sum(host.slots for host in _hosts(fleet.members, config))
    environment = agent_environment(config, world_size, os.environ)
    fleet.prepare(environment, will_launch=will_measure, job=BANDWIDTH)
    fleet.gather()


def measure(fleet: Fleet, members: Sequence[Member], config: Config) -> Measured:
    """Run the test on these hosts."""
    plan = _plan(members, config)
    if plan.world_size < 2:
        text = "a single rank has no peer to communicate with"
        return Measured(None, (Verdict(members[0].name, CHECK, True, text),))
    ranks_config = _ranks_config(config, plan.world_size)
    limit_s = time_limit_s(plan.world_size)
    return judge(execute(fleet, members, plan, ranks_config, BANDWIDTH, limit_s=limit_s))


def _hosts(members: Sequence[Member], config: Config) -> list[Host]:
    """Return the hosts with a slot per device; without GPUs one per host, or two if there is one host."""
    hosts = [member.host for member in members]
    if config.launcher.device == "cpu":
        ranks = 1 if len(hosts) > 1 else _SINGLE_HOST_RANKS
        hosts = [replace(host, slots=ranks) for host in hosts]
    return hosts


def _plan(members: Sequence[Member], config: Config) -> LaunchPlan:
    hosts = _hosts(members, config)
    world_size = sum(host.slots for host in hosts)
    facts = members[0].facts
    port = facts["port"] if facts is not None else None
    return plan_launch(_data_parallel_config(config, world_size), NO_RUN, 1, hosts, port)


def _data_parallel_config(config: Config, world_size: int) -> ResolvedConfig:
    """Return a configuration of replicas, which trains nothing."""
    layout = Parallel(dp=world_size, virtual_stages=1)
    train = replace(config.train, micro_batch=1, steps=1)
    return resolved(replace(config, parallel=layout, train=train))


def _ranks_config(config: Config, world_size: int) -> ResolvedConfig:
    launcher = replace(config.launcher, collective_timeout_s=time_limit_s(world_size) / 2)
    return _data_parallel_config(replace(config, launcher=launcher), world_size)


def time_limit_s(ranks: int) -> float:
    """Return the time limit of the whole test; loading torch and connecting all ranks take longest.

    A collective may take half of it and the rendezvous of the agents a quarter, so that failures report
    themselves.
    """
    return 120.0 + 0.2 * ranks


def judge(test: JobExecution) -> Measured:
    """Return the result of the test."""
    if test.failures:
        return Measured(None, (_failed(test),))
    if test.late or test.result is None:
        text = f"the test did not end within {test.limit_s:g} s; {join_names(test.late)} had not finished"
        return Measured(
            None, (Verdict(test.members[0].name, CHECK, False, text, _FIREWALL_REMEDY),)
        )
    if test.result["closed"]:
        return Measured(None, tuple(judge_connections(test.result["closed"])))
    figures = read_figures(test.result)
    return Measured(figures, tuple(judge_pairs(figures)))


def _failed(test: JobExecution) -> Verdict:
    cause = first_cause(list(test.failures.values()))
    first_line = cause.message.strip().partition("\n")[0]
    if cause.rank is None and cause.type:  # of the agent: it did not find the others
        text = f"does not reach {test.plan.master_addr}:{test.plan.master_port} ({first_line})"
        return Verdict(cause.host, CHECK, False, text, _FIREWALL_REMEDY)
    diagnosis, remedy = diagnose(cause, test.evidence.get(cause.host, Evidence()))
    source = "the agent" if cause.rank is None else f"rank {cause.rank}"
    text = f"the test failed: {source}: {diagnosis}" + (f" ({first_line})" if first_line else "")
    return Verdict(cause.host, CHECK, False, text, remedy)


def read_figures(result: dict[str, Any]) -> Figures:
    """Convert the job's seconds to latencies and bandwidths."""
    ranks, size = len(result["hosts"]), result["message_bytes"]
    hosts = tuple(dict.fromkeys(result["hosts"]))
    names = result["hosts"] if len(hosts) > 1 else [f"rank {rank}" for rank in range(ranks)]
    all_reduces = [(entry["bytes"], entry["seconds"]) for entry in result["all_reduce"]]
    slow = [tuple(pair) for pair in result["slow"]]
    return Figures(
        backend=result["backend"],
        ranks=ranks,
        hosts=hosts,
        all_reduce=tuple(
            AllReduce(size_bytes, seconds * 1e6, bus_gb_s(size_bytes, seconds, ranks))
            for size_bytes, seconds in all_reduces
        ),
        pairs=tuple(
            Pair(
                ends=(names[pair["ranks"][0]], names[pair["ranks"][1]]),
                latency_us=pair["latency_s"] * 1e6,
                gb_s=size / pair["seconds"] / 1e9,
                slow=tuple(pair["ranks"]) in slow,
            )
            for pair in result["pairs"]
        ),
        left_out=result["left_out"],
    )


def judge_connections(closed: Sequence[dict[str, str]]) -> Iterator[Verdict]:
    """Yield each host with those that it does not reach, for the same reason."""
    reasons: dict[tuple[str, str], list[str]] = {}
    for connection in closed:
        reasons.setdefault((connection["host"], connection["why"]), []).append(
            f"{connection['to']} ({connection['address']})"
        )
    for (host, reason), others in reasons.items():
        text = f"does not reach {join_names(others)}: {reason}"
        yield Verdict(host, "network", False, text, _FIREWALL_REMEDY)


def judge_pairs(figures: Figures) -> Iterator[Verdict]:
    """Yield a verdict on slow pairs; if one host is in all of them, it is to blame."""
    if len(figures.pairs) < _FEWEST_PAIRS:
        return
    median_gb_s = median(pair.gb_s for pair in figures.pairs)
    slow = [pair for pair in figures.pairs if pair.slow]
    common_hosts = set.intersection(*(set(pair.ends) for pair in slow)) if len(slow) > 1 else set()
    for pair in slow:
        suspects = sorted(common_hosts) or pair.ends
        text = f"{' – '.join(pair.ends)} {pair.gb_s:.3g} GB/s, less than half of the usual {median_gb_s:.3g}"
        remedy = f"look at the network of {' and '.join(suspects)}: {_NETWORK_CHECKS}"
        yield Verdict(_host(figures, suspects[0]), CHECK, False, text, remedy)
    slow_hosts = {_host(figures, end) for pair in slow for end in pair.ends}
    for host in figures.hosts:
        if host not in slow_hosts:
            text = f"is in no pair with less than half of the usual {median_gb_s:.3g} GB/s"
            yield Verdict(host, CHECK, True, text)


def _host(figures: Figures, end: str) -> str:
    return end if len(figures.hosts) > 1 else figures.hosts[0]

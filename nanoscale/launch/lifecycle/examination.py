"""The examination of `nanoscale doctor`: the hosts' verdicts, their network, and the speed of this CPU.

The agents measure the bandwidth in a job without a run or a run directory.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

from nanoscale.common.devices import cores, detect
from nanoscale.common.json_text import Json
from nanoscale.common.units import counted
from nanoscale.config.composing.compose import compose
from nanoscale.config.composing.frozen import dump
from nanoscale.config.composing.library import packaged
from nanoscale.config.hardware.data_sheets import keep_speed, known_speed
from nanoscale.config.machines import Host
from nanoscale.config.resolved import ResolvedConfig, resolved
from nanoscale.config.rules import check, check_machines
from nanoscale.config.schema import Config, Parallel
from nanoscale.config.values.provenance import Composed
from nanoscale.config.violations import quoted
from nanoscale.launch.fleet.connections import Member
from nanoscale.launch.fleet.fleet import Fleet
from nanoscale.launch.lifecycle.command import agent_environment, local_host, plan_launch
from nanoscale.launch.lifecycle.job_execution import NO_RUN, JobExecution, execute
from nanoscale.launch.preflight.preflight import can_compute, judge
from nanoscale.launch.preflight.verdicts import Verdict, join_names
from nanoscale.launch.transport.transport import read_hosts
from nanoscale.plan.predict import predict
from nanoscale.processes.messages import BANDWIDTH


def machines(composed: Composed) -> tuple[Config, Sequence[Host]]:
    """Return the configuration, without a job, and the hosts."""
    hosts = read_hosts(composed)
    config = check_machines(composed, detect(), hosts)
    return config, hosts or (local_host(int(config.launcher.devices)),)


def examine(
    config: Config, hosts: Sequence[Host], say: Callable[[str], None], *, quick: bool
) -> tuple[list[Verdict], Measured | None]:
    """Examine all hosts, and measure between hosts that can compute."""
    measured = None
    root = Path(config.run.root).absolute()
    with Fleet(config, hosts, root) as fleet:
        say(f"looking at {counted(len(hosts), 'host')} …")
        prepare(fleet, config, will_measure=not quick)
        verdicts = judge(fleet.members, config)
        ill = {verdict.host for verdict in verdicts if not can_compute(verdict)}
        able = [member for member in fleet.members if member.name not in ill]
        if not quick:
            say(f"measuring the bandwidth of {counted(len(able), 'host')} …")
            measured = measure(fleet, able, config) if able else Measured(None)
    return verdicts, measured


def measure_cpu(say: Callable[[str], None]) -> None:
    """Measure a step of the packaged recipe `tiny` here, and keep the speed.

    Does nothing while as many processes as there are cores wait for the CPU.
    """
    if os.getloadavg()[0] >= cores():
        return
    recipe = quoted(str(packaged()[1] / "tiny.yaml"))  # the user may have another one of this name
    config = check(compose([f"recipe={recipe}", "launcher.device=cpu"]), detect())
    say("measuring this CPU …")
    with TemporaryDirectory() as folder:
        file = Path(folder) / "config.yaml"
        file.write_text(dump(config), "utf-8")
        command = [sys.executable, "-m", "nanoscale.measure.this_cpu", str(file)]
        done = subprocess.run(command, capture_output=True, encoding="utf-8")
    if done.returncode == 0:
        planned, measured = predict(config).time.seconds, float(done.stdout.split()[-1])
        with suppress(OSError, RuntimeError):  # without a cache, plans stay rough
            keep_speed((known_speed() or 1.0) * planned / measured)


CHECK = "bandwidth"
_SINGLE_HOST_RANKS = 2
"""Ranks of a single host without GPUs."""
_FIREWALL_REMEDY = (
    "look for a firewall or a missing route: between the hosts, all ports must be open"
)
_HOST_REMEDY = "look at `nvidia-smi topo -m` there, and at other jobs"
_NETWORK_CHECKS = "cables, link speed (`ethtool`), errors (`ip -s link`), other jobs"


@dataclass(frozen=True)
class Measured:
    """The result of the test."""

    figures: Json | None
    """The figures as in `doctor --json`; None if the test failed."""
    verdicts: tuple[Verdict, ...] = ()


def prepare(fleet: Fleet, config: Config, *, will_measure: bool) -> None:
    """Request the hosts' facts and prepare them for the test; returns when all have answered, or are lost."""
    world_size = sum(host.slots for host in _hosts(fleet.members, config))
    environment = agent_environment(config, world_size, os.environ)
    fleet.prepare(environment, will_launch=will_measure, job=BANDWIDTH)
    fleet.gather()


def measure(fleet: Fleet, members: Sequence[Member], config: Config) -> Measured:
    """Run the test on these hosts."""
    hosts = _hosts(members, config)
    world_size = sum(host.slots for host in hosts)
    if world_size < 2:
        text = "a single rank has no peer to communicate with"
        return Measured(None, (Verdict(members[0].name, CHECK, True, text),))
    job = job_config(config, world_size)
    plan = plan_launch(job, NO_RUN, 1, hosts, members[0].port)
    limit_s = time_limit_s(world_size)
    return judge_test(execute(fleet, members, plan, job, BANDWIDTH, limit_s=limit_s))


def _hosts(members: Sequence[Member], config: Config) -> list[Host]:
    """Return the hosts with a slot per device; without GPUs one per host, or two if there is one host."""
    hosts = [member.host for member in members]
    if config.launcher.device == "cpu":
        ranks = 1 if len(hosts) > 1 else _SINGLE_HOST_RANKS
        hosts = [replace(host, slots=ranks) for host in hosts]
    return hosts


def job_config(config: Config, world_size: int) -> ResolvedConfig:
    """Return a configuration of replicas, which trains nothing."""
    layout = Parallel(dp=world_size, virtual_stages=1)
    train = replace(config.train, micro_batch=1, steps=1)
    launcher = replace(config.launcher, collective_timeout_s=time_limit_s(world_size) / 2)
    return resolved(replace(config, parallel=layout, train=train, launcher=launcher))


def time_limit_s(ranks: int) -> float:
    """Return the time limit of the whole test; loading torch and connecting all ranks take longest.

    A collective may take half of it and the rendezvous of the agents a quarter, so that failures report
    themselves.
    """
    return 120.0 + 0.2 * ranks


def judge_test(test: JobExecution) -> Measured:
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
    figures = {key: value for key, value in test.result.items() if key != "closed"}
    return Measured(figures, (*judge_within(figures), *judge_pairs(figures), *_context(figures)))


def _failed(test: JobExecution) -> Verdict:
    cause, diagnosis, remedy = test.first_cause()
    first_line = cause.message.strip().partition("\n")[0]
    if cause.rank is None and cause.type:  # of the agent: it did not find the others
        text = f"does not reach {test.plan.master_addr}:{test.plan.master_port} ({first_line})"
        return Verdict(cause.host, CHECK, False, text, _FIREWALL_REMEDY)
    text = f"the test failed: {cause.source}: {diagnosis}"
    text += f" ({first_line})" if first_line else ""
    return Verdict(cause.host, CHECK, False, text, remedy)


def judge_connections(closed: Sequence[dict[str, str]]) -> Iterator[Verdict]:
    """Yield each host with the hosts that it does not reach, for the same reason."""
    reasons: dict[tuple[str, str], list[str]] = {}
    for connection in closed:
        reasons.setdefault((connection["host"], connection["why"]), []).append(
            f"{connection['to']} ({connection['address']})"
        )
    for (host, reason), others in reasons.items():
        text = f"does not reach {join_names(others)}: {reason}"
        yield Verdict(host, "network", False, text, _FIREWALL_REMEDY)


def _context(figures: Json) -> Iterator[Verdict]:
    """Yield the most memory that a device lacks beside torch's allocator, for the plan; none on CPUs."""
    if gib := figures.get("context_gib"):
        text = f"CUDA, NCCL and other processes use {gib:.2f} GiB of a device: cluster.context_gib={gib:.2f}"
        yield Verdict(figures["hosts"][0], "context", True, text)


def judge_within(figures: Json) -> Iterator[Verdict]:
    """Yield a verdict on each host whose own ranks exchange data slowly."""
    rows = figures["within_hosts"]
    for one in rows:
        if one["slow"]:
            speed = f"{one['bus_gb_s']:.3g} GB/s, {_usual(rows, 'bus_gb_s')}"
            text = f"all-reduce within the host {speed}"
            yield Verdict(one["host"], CHECK, False, text, _HOST_REMEDY)


def judge_pairs(figures: Json) -> Iterator[Verdict]:
    """Yield a verdict on slow pairs; if one host is in all of them, it is to blame."""
    pairs = figures["point_to_point"]
    if len(pairs) < 3:  # too few for one to stand out
        return
    usual = _usual(pairs, "gb_s")
    slow = [pair for pair in pairs if pair["slow"]]
    common = set.intersection(*(set(pair["ends"]) for pair in slow)) if len(slow) > 1 else set()
    for pair in slow:
        suspects = sorted(common) or pair["ends"]
        text = f"{' – '.join(pair['ends'])} {pair['gb_s']:.3g} GB/s, {usual}"
        remedy = f"look at the network of {' and '.join(suspects)}: {_NETWORK_CHECKS}"
        yield Verdict(suspects[0], CHECK, False, text, remedy)
    slow_hosts = {host for pair in slow for host in pair["ends"]}
    for host in figures["hosts"]:
        if host not in slow_hosts:
            yield Verdict(host, CHECK, True, f"is in no pair with {usual} GB/s")


def _usual(rows: Sequence[Json], key: str) -> str:
    return f"less than half of the usual {median(row[key] for row in rows):.3g}"

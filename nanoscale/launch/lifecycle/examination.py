"""The examination of `nanoscale doctor`: the hosts' verdicts, their network, and the speed of this CPU."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory

from nanoscale.common.devices import cores, detect
from nanoscale.common.units import counted
from nanoscale.config.composing.compose import compose
from nanoscale.config.composing.frozen import dump
from nanoscale.config.composing.library import packaged
from nanoscale.config.hardware.cpu_speed import keep_speed, known_speed
from nanoscale.config.machines import Host
from nanoscale.config.rules import check, check_machines
from nanoscale.config.schema import Config
from nanoscale.config.values.provenance import Composed
from nanoscale.config.violations import quoted
from nanoscale.launch.fleet.fleet import Fleet
from nanoscale.launch.lifecycle.bandwidth import Measured, measure, prepare
from nanoscale.launch.lifecycle.command import local_host
from nanoscale.launch.preflight.preflight import can_compute, judge
from nanoscale.launch.preflight.verdicts import Verdict
from nanoscale.launch.transport.transport import read_hosts
from nanoscale.plan.predict import predict


def machines(composed: Composed) -> tuple[Config, Sequence[Host]]:
    """Return the configuration, without a job, and the hosts."""
    hosts = read_hosts(composed)
    config = check_machines(composed, detect(), hosts)
    return config, hosts or (local_host(int(config.launcher.devices)),)


def examine(
    config: Config, hosts: Sequence[Host], say: Callable[[str], None], *, quick: bool
) -> tuple[list[Verdict], Measured | None]:
    """Examine all hosts, and measure between those that can compute."""
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
        file.write_text(dump(config), encoding="utf-8")
        command = [sys.executable, "-m", "nanoscale.measure.this_cpu", str(file)]
        done = subprocess.run(command, capture_output=True, encoding="utf-8")
    if done.returncode == 0:
        planned, measured = predict(config).time.seconds, float(done.stdout.split()[-1])
        with suppress(OSError, RuntimeError):  # without a cache, plans stay rough
            keep_speed((known_speed() or 1.0) * planned / measured)

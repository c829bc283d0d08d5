"""`nanoscale doctor`: judge the machines before a job has to."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from nanoscale.cli.common import options as opt
from nanoscale.cli.common.options import as_settings
from nanoscale.cli.common.output import DONE, FAILED, console, print_json, saying
from nanoscale.cli.common.request import CommandLine

if TYPE_CHECKING:
    from nanoscale.config.rules import Host
    from nanoscale.config.schema import Config
    from nanoscale.launch.lifecycle.bandwidth import Measured
    from nanoscale.launch.preflight.verdicts import Verdict


def doctor(
    overrides: opt.Overrides = None,
    config_dir: opt.ConfigDir = None,
    hostfile: opt.Hostfile = None,
    include: opt.Include = None,
    exclude: opt.Exclude = None,
    num_nodes: opt.NumNodes = None,
    num_gpus: opt.NumGpus = None,
    quick: Annotated[
        bool,
        typer.Option(
            "--quick", "--no-bandwidth", help="Skip the measurement of bandwidths between the hosts"
        ),
    ] = False,
    verbose: Annotated[
        bool, typer.Option("--verbose", "-v", help="Show passed checks too, also of many hosts")
    ] = False,
    as_json: opt.AsJson = False,
) -> int:
    """Check this machine or all hosts, and their network."""
    from nanoscale.view import doctor_text

    options = as_settings(hostfile, include, exclude, num_nodes, num_gpus)
    config, hosts = _machines(CommandLine(overrides, config_dir=config_dir, options=options))
    verdicts, measured = _examine(config, hosts, quick=quick)
    if not quick and config.launcher.device == "cpu":
        _measure_cpu()
    names = list(dict.fromkeys(verdict.host for verdict in verdicts))
    if as_json:
        print_json(doctor_text.document(names, verdicts, measured))
    else:
        doctor_text.print_doctor(console(), names, verdicts, measured, verbose=verbose)
    all_of_them = [*verdicts, *(measured.verdicts if measured is not None else ())]
    return DONE if all(verdict.good for verdict in all_of_them) else FAILED


def _machines(line: CommandLine) -> tuple[Config, Sequence[Host]]:
    """Return the configuration, without a job, and the hosts."""
    from nanoscale.common.devices import detect
    from nanoscale.config.rules import check_machines
    from nanoscale.launch.lifecycle.command import here
    from nanoscale.launch.transport.transport import read_hosts, transport_of
    from nanoscale.runs.directory import check_root

    composed = line.compose()
    hosts = read_hosts(composed)
    config = check_machines(composed, detect(), hosts)
    if not transport_of(config).is_local:
        check_root(Path(config.run.root))  # the hosts look for a file there
    return config, hosts or (here(config),)


def _examine(
    config: Config, hosts: Sequence[Host], *, quick: bool
) -> tuple[list[Verdict], Measured | None]:
    """Examine all hosts, and measure between those that can compute."""
    from nanoscale.config.rules.resolution import counted
    from nanoscale.launch.fleet.fleet import Fleet
    from nanoscale.launch.lifecycle.bandwidth import Measured, measure, prepare
    from nanoscale.launch.preflight.preflight import can_compute, judge

    measured = None
    root = Path(config.run.root).absolute()
    with saying() as say, Fleet(config, hosts, root) as fleet:
        say(f"looking at {counted(len(hosts), 'host')} …")
        prepare(fleet, config, will_measure=not quick)
        verdicts = judge(fleet.members, config)
        ill = {verdict.host for verdict in verdicts if not can_compute(verdict)}
        able = [member for member in fleet.members if member.name not in ill]
        if not quick:
            say(f"measuring the bandwidth of {counted(len(able), 'host')} …")
            measured = measure(fleet, able, config) if able else Measured(None)
    return verdicts, measured


def _measure_cpu() -> None:
    """Measure a step of `recipe=tiny` here, unless other processes use the CPU, and keep the speed."""
    import os
    import subprocess
    import sys
    from contextlib import suppress
    from tempfile import TemporaryDirectory

    from nanoscale.common.devices import cores, detect
    from nanoscale.config.composing.frozen import dump
    from nanoscale.config.hardware.cpu_speed import keep_speed, known_speed
    from nanoscale.config.rules import check
    from nanoscale.plan.predict import predict

    if os.getloadavg()[0] >= cores():
        return
    composed = CommandLine(["recipe=tiny", "launcher.device=cpu"]).compose()
    config = check(composed, detect())
    with saying() as say, TemporaryDirectory() as folder:
        say("measuring this CPU …")
        file = Path(folder) / "config.yaml"
        file.write_text(dump(config), encoding="utf-8")
        command = [sys.executable, "-m", "nanoscale.measure.this_cpu", str(file)]
        done = subprocess.run(command, capture_output=True, encoding="utf-8")
    if done.returncode == 0:
        planned, measured = predict(config).time.seconds, float(done.stdout)
        with suppress(OSError, RuntimeError):  # without a cache, plans stay rough
            keep_speed((known_speed() or 1.0) * planned / measured)

"""`nanoscale doctor`: judge the machines before a job has to."""

from __future__ import annotations

from typing import Annotated

import typer

from nanoscale.cli.common import options as opt
from nanoscale.cli.common.options import as_settings
from nanoscale.cli.common.output import DONE, FAILED, console, print_json, saying
from nanoscale.cli.common.request import CommandLine


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
    from nanoscale.launch.lifecycle.examination import examine, machines, measure_cpu
    from nanoscale.view import doctor_text

    options = as_settings(hostfile, include, exclude, num_nodes, num_gpus)
    line = CommandLine(overrides, config_dir=config_dir, options=options)
    config, hosts = machines(line.compose())
    with saying() as say:
        verdicts, measured = examine(config, hosts, say, quick=quick)
        if not quick and config.launcher.device == "cpu":
            measure_cpu(say)
    names = list(dict.fromkeys(verdict.host for verdict in verdicts))
    if as_json:
        print_json(doctor_text.document(names, verdicts, measured))
    else:
        doctor_text.print_doctor(console(), names, verdicts, measured, verbose=verbose)
    all_of_them = [*verdicts, *(measured.verdicts if measured is not None else ())]
    return DONE if all(verdict.good for verdict in all_of_them) else FAILED

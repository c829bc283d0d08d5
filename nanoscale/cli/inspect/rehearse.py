"""`nanoscale rehearse`: the real code of every kind of rank, on devices that are not there."""

from __future__ import annotations

from typing import Annotated

import typer

from nanoscale.cli.common import options as opt
from nanoscale.cli.common.files import require_writable, write_file
from nanoscale.cli.common.options import as_settings
from nanoscale.cli.common.output import DOES_NOT_FIT, DONE, FAILED, print_json
from nanoscale.cli.common.rehearsal import rehearsed
from nanoscale.cli.common.request import CommandLine, request_job
from nanoscale.common import display
from nanoscale.common.errors import UserError


def rehearse(
    overrides: opt.Overrides = None,
    ranks: Annotated[
        str,
        typer.Option(
            "--ranks",
            metavar="distinct|all|0,8",
            help="Play one rank of each kind, all ranks, or these",
        ),
    ] = "distinct",
    steps: Annotated[int, typer.Option("--steps", help="Play this many steps")] = 2,
    config: opt.ConfigFile = None,
    config_dir: opt.ConfigDir = None,
    hostfile: opt.Hostfile = None,
    include: opt.Include = None,
    exclude: opt.Exclude = None,
    num_nodes: opt.NumNodes = None,
    num_gpus: opt.NumGpus = None,
    html: opt.Html = None,
    overwrite: opt.Overwrite = False,
    as_json: opt.AsJson = False,
) -> int:
    """Run every kind of rank's real code without devices.

    The hardware is what `cluster` describes, or this machine.
    """
    from nanoscale.plan.hardware.machines import planned_devices
    from nanoscale.rehearse.document import failed

    if steps < 1:
        raise UserError("usage", f"--steps {steps}: must be at least 1")
    if html is not None:
        require_writable("--html", html, overwrite=overwrite)
    options = as_settings(hostfile, include, exclude, num_nodes, num_gpus)
    line = CommandLine(overrides, config, config_dir, options)
    request = request_job(line, starts=False, devices=planned_devices)
    result = rehearsed(request.config, ranks, steps)
    if html is not None:
        from nanoscale.view.rehearsal.page import rehearsal_page

        write_file("--html", html, rehearsal_page(result), overwrite=overwrite)
    if as_json:
        print_json({name: value for name, value in result.items() if name != "program"})
    else:
        from nanoscale.view.rehearsal.text import lines

        for text in lines(result):
            display.show(text)
    if failed(result):
        return FAILED
    return DOES_NOT_FIT if result["fits"] is False else DONE

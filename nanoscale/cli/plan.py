"""`nanoscale plan`: whether a layout fits and how fast it is, before anything is launched."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from nanoscale.cli.config import ConfigDir, ConfigFile, Overrides
from nanoscale.cli.hosts import Exclude, Hostfile, Include, NumGpus, NumNodes, as_settings
from nanoscale.cli.output import DONE, AsJson, console, print_json

if TYPE_CHECKING:
    from nanoscale.config.compose import Composed
    from nanoscale.config.schema import Config


def plan(
    overrides: Overrides = None,
    config: ConfigFile = None,
    config_dir: ConfigDir = None,
    hostfile: Hostfile = None,
    include: Include = None,
    exclude: Exclude = None,
    num_nodes: NumNodes = None,
    num_gpus: NumGpus = None,
    explain: Annotated[
        bool, typer.Option("--explain", help="Show the arithmetic behind every number.")
    ] = False,
    search: Annotated[
        bool,
        typer.Option(
            "--search", help="Look through all legal layouts; keys set here keep their values."
        ),
    ] = False,
    write: Annotated[
        Path | None,
        typer.Option(
            "--write",
            metavar="FILE",
            help="With --search: write the best as a recipe.",
            show_default=False,
        ),
    ] = None,
    as_json: AsJson = False,
) -> int:
    """Predict memory, speed and cost of a job on the hardware that `cluster` describes, or on this machine's."""
    from nanoscale.config.compose import compose
    from nanoscale.plan.predict import predict

    options = as_settings(hostfile, include, exclude, num_nodes, num_gpus)
    composed = compose(overrides or [], config_dir=config_dir, config_file=config, options=options)
    if search:
        return _search(composed, write, as_json)
    prediction = predict(resolved(composed))
    if as_json:
        from nanoscale.plan.document import document

        print_json(document(prediction))
    else:
        from nanoscale.plan.show import print_prediction

        print_prediction(console(), prediction, explain=explain)
    return DONE


def resolved(composed: Composed) -> Config:
    """The configuration on the devices that it is planned for.

    Raises:
        UserError: it breaks a law, or its devices are unknown.
    """
    from nanoscale.config.rules import check
    from nanoscale.launch.foreign import check_extra
    from nanoscale.launch.hosts import read_hosts
    from nanoscale.plan.machines import planned_devices

    config = check(composed, planned_devices(composed), read_hosts(composed))
    check_extra(composed, config)
    return config


def _search(composed: Composed, write: Path | None, as_json: bool) -> int:
    from nanoscale.plan.hardware import hardware_of
    from nanoscale.plan.machines import planned_devices
    from nanoscale.plan.request import room
    from nanoscale.plan.search import search
    from nanoscale.plan.search_text import print_found, search_document

    devices = planned_devices(composed)
    looked_in = room(composed, devices, hardware_of(composed.config))
    found = search(looked_in, hardware_of(looked_in.base))
    if as_json:
        print_json(search_document(composed, found))
    else:
        print_found(console(), composed, looked_in, found)
    return DONE

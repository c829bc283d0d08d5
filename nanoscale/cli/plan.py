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
    as_json: AsJson = False,
) -> int:
    """Predict memory, speed and cost of a job on the hardware that `cluster` describes, or on this machine's."""
    from nanoscale.config.compose import compose
    from nanoscale.plan.predict import predict

    options = as_settings(hostfile, include, exclude, num_nodes, num_gpus)
    composed = compose(overrides or [], config_dir=config_dir, config_file=config, options=options)
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

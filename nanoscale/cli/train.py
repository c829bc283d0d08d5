"""`nanoscale train`: from a recipe to a trained model."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from nanoscale.cli.config import ConfigDir, Overrides
from nanoscale.cli.output import DONE, AsJson

if TYPE_CHECKING:
    from nanoscale.launch.prepare import Request

DryRun = Annotated[
    bool, typer.Option("--dry-run", help="Show all that would happen; write and start nothing.")
]


def train(
    overrides: Overrides = None,
    config: Annotated[
        Path | None,
        typer.Option(
            "--config",
            metavar="FILE",
            help="Repeat the run of this frozen config.yaml, under a new name.",
            show_default=False,
        ),
    ] = None,
    config_dir: ConfigDir = None,
    dry_run: DryRun = False,
    as_json: AsJson = False,
) -> int:
    """Compose, check, prepare, launch and follow a job until its end."""
    from nanoscale.cli.attempt import attempt, ready_fleet, show_plan
    from nanoscale.launch.prepare import new_run
    from nanoscale.launch.signals import Signals

    request = compose_request(overrides or [], config, config_dir)
    if dry_run:
        show_plan(request.run, request, 1, as_json)
        return DONE
    with Signals() as signals, ready_fleet(request) as fleet, new_run(request) as run:
        return attempt(run, request, 1, fleet, signals, as_json)


def compose_request(words: list[str], config: Path | None, config_dir: Path | None) -> Request:
    """What the words ask for, checked against this machine, with the run's name."""
    from nanoscale.config.compose import compose
    from nanoscale.config.rules import check
    from nanoscale.devices import detect
    from nanoscale.launch.foreign import check_extra
    from nanoscale.launch.prepare import Request, name_run

    composed = compose(words, config_dir=config_dir, config_file=config)
    devices = detect()
    checked = check(composed, devices)
    check_extra(composed, checked)
    named = name_run(composed, checked, repeats=config is not None)
    return Request(composed, named, devices, repeats=config)

"""The evaluation of a checkpoint on the hosts of a configuration, in its layout."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from nanoscale.channel import EVALUATION
from nanoscale.config.derive import derive
from nanoscale.config.frozen import dump
from nanoscale.config.rules import Host
from nanoscale.config.schema import Config
from nanoscale.launch.command import here, passed_on, plan_launch
from nanoscale.launch.errand import Errand
from nanoscale.launch.fleet import Fleet
from nanoscale.launch.preflight import require_ready
from nanoscale.runs.directory import RunDirectory
from nanoscale.runs.failure import Evidence, diagnose, first_cause, user_error

_MEET_S = 600.0


class EvaluationError(Exception):
    """It failed, and not by what was asked for; the text says where, why and what to do."""


def evaluate(
    config: Config, hosts: tuple[Host, ...], task: dict[str, Any], heed: Callable[[str], None]
) -> dict[str, Any]:
    """Run the job `train.evaluation` and give its figures.

    Args:
        config: resolved.
        hosts: those of the hostfile or of SLURM; none: this machine alone.
        task: what the job is told.
        heed: is told what the first rank prints.

    Raises:
        UserError: the hosts are not ready, or a rank found that the request is wrong.
        EvaluationError: it failed otherwise.
    """
    hosts = hosts or (here(config),)
    world = derive(config).world_size
    nowhere = RunDirectory(Path("/"))
    plan = plan_launch(config, nowhere, 1, world, hosts)
    with Fleet(config, hosts, Path(config.run.root).absolute()) as fleet:
        fleet.prepare(passed_on(config, plan, os.environ), will_launch=True, job=EVALUATION)
        fleet.gather()
        if config.launcher.preflight:
            require_ready(fleet, config)
        facts = fleet.members[0].facts
        port = facts["port"] if facts is not None else None
        plan = plan_launch(config, nowhere, 1, world, hosts, port)
        errand = Errand(
            fleet, fleet.members, plan, dump(config), EVALUATION, _MEET_S, task=task, heed=heed
        )
        errand.run()
    return _result(errand)


def _result(errand: Errand) -> dict[str, Any]:
    if errand.result is not None and not errand.failures:
        return errand.result
    if not errand.failures:
        raise EvaluationError("the ranks ended, and none said why")
    failures = list(errand.failures.values())
    error = next((found for one in failures if (found := user_error(one))), None)
    if error is not None:
        raise error
    cause = first_cause(failures)
    diagnosis, remedy = diagnose(cause, errand.evidence.get(cause.host, Evidence()))
    who = "the agent" if cause.rank is None else f"rank {cause.rank}"
    lines = [f"{who} on {cause.host} failed: {diagnosis}"]
    lines += [f"  remedy: {remedy}"] if remedy else []
    raise EvaluationError("\n".join([*lines, cause.traceback.rstrip()]).rstrip())

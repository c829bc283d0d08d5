"""A one-shot job without a run: the agents use folders of their own, and return the first rank's result."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from nanoscale.config.composing.frozen import dump
from nanoscale.config.resolved import ResolvedConfig
from nanoscale.config.rules import Host
from nanoscale.launch.fleet.connections import Member
from nanoscale.launch.fleet.fleet import Fleet
from nanoscale.launch.lifecycle.command import (
    LaunchPlan,
    agent_environment,
    local_host,
    plan_launch,
)
from nanoscale.launch.lifecycle.job_execution import JobExecution
from nanoscale.launch.preflight.preflight import require_ready
from nanoscale.processes.messages import Message
from nanoscale.runs.directory import RunDirectory
from nanoscale.runs.failure import user_error
from nanoscale.runs.job_messages import RENDEZVOUS_S, LaunchOrder
from nanoscale.runs.tail import LineSplitter

NO_RUN = RunDirectory(Path("/"))
"""A run directory in the place of a run's, which is neither read nor written."""


class OneShotJobError(Exception):
    """An internal failure of the job; the text says where, why and what to do."""


def run_one_shot_job(
    job: str,
    config: ResolvedConfig,
    hosts: tuple[Host, ...],
    task: dict[str, Any],
    on_line: Callable[[str], None],
) -> dict[str, Any]:
    """Run a job in the layout of a configuration, and return the first rank's result.

    Args:
        job: its name in worker.JOBS.
        config: resolved.
        hosts: the hosts of the hostfile or of SLURM; none: this machine alone.
        task: the job's task.
        on_line: called with each line that the first rank prints.

    Raises:
        UserError: the hosts are not ready, or a rank found an error in the request.
        OneShotJobError: it failed otherwise.
    """
    hosts = hosts or (local_host(config.world_size),)
    with Fleet(config, hosts, Path(config.run.root).absolute()) as fleet:
        fleet.prepare(
            agent_environment(config, config.world_size, os.environ), will_launch=True, job=job
        )
        fleet.gather()
        if config.launcher.preflight:
            require_ready(fleet, config)
        plan = plan_launch(config, NO_RUN, 1, hosts, fleet.members[0].port)
        return _result(execute(fleet, fleet.members, plan, config, job, task, on_line))


def execute(
    fleet: Fleet,
    members: Sequence[Member],
    plan: LaunchPlan,
    config: ResolvedConfig,
    job: str,
    task: dict[str, Any] | None = None,
    on_line: Callable[[str], None] = lambda _: None,
    limit_s: float | None = None,
) -> JobExecution:
    """Run a job on these hosts, whose agents have prepared it. If this raises, all of its processes have ended.

    Args:
        config: the configuration of the ranks.
        limit_s: seconds for the whole job, and for the rendezvous a quarter of it; None: any time.
    """
    lines = LineSplitter()

    def on_message(_: Member, message: Message) -> None:
        if message["kind"] == "output" and (message["rank"], message["stream"]) == (0, "out"):
            for line in lines.feed(message["carried"]):
                on_line(line.decode(errors="replace"))

    meet_s = RENDEZVOUS_S if limit_s is None else limit_s / 4
    order_for = partial(
        LaunchOrder,
        run=None,
        lost_after_s=limit_s or meet_s,
        meet_s=meet_s,
        job=job,
        config=dump(config),
        task=task,
    )
    execution = JobExecution(
        fleet, plan, members, order_for, on_message=on_message, limit_s=limit_s
    )
    try:
        execution.run()
    except BaseException:
        execution.abandon()
        raise
    return execution


def _result(execution: JobExecution) -> dict[str, Any]:
    failures = list(execution.failures.values())
    if execution.result is not None and not failures:
        return execution.result
    if not failures:
        raise OneShotJobError("the ranks ended without a result and without a reason")
    error = next((error for failure in failures if (error := user_error(failure))), None)
    if error is not None:
        raise error
    cause, diagnosis, remedy = execution.first_cause()
    lines = [f"{cause.source} on {cause.host} failed: {diagnosis}"]
    lines += [f"  remedy: {remedy}"] if remedy else []
    raise OneShotJobError("\n".join([*lines, cause.traceback.rstrip()]).rstrip())

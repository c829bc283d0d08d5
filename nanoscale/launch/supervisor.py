"""One attempt of a run, from its start until nothing of it is left."""

from __future__ import annotations

import signal
import time
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Protocol

from nanoscale.launch.command import LaunchPlan
from nanoscale.launch.processes import Job
from nanoscale.launch.signals import Signals
from nanoscale.runs import events, failure, status
from nanoscale.runs.directory import RunDirectory, write_json
from nanoscale.runs.failure import Failure
from nanoscale.runs.status import State

DONE, FAILED, WRONG, PREEMPTED, INTERRUPTED = 0, 1, 2, 75, 130

_LOOK_S = 0.1


class View(Protocol):
    """Shows a run while it goes on."""

    running: bool
    """whether the ranks have begun to train"""

    def poll(self) -> None:
        """Show what is new."""


@dataclass(frozen=True)
class Outcome:
    """How an attempt ended."""

    state: State
    exit_code: int
    failure: Failure | None = None


def supervise(
    run: RunDirectory, plan: LaunchPlan, grace_s: float, signals: Signals, view: View
) -> Outcome:
    """Start the agent, follow the run, pass on what the user wants, and clear everything away.

    Args:
        grace_s: seconds from the first signal to the end by force.
    """
    _begin(run, plan)
    try:
        outcome = _attempt(run, plan, grace_s, signals, view)
    except BaseException:
        _conclude(run, Outcome("failed", FAILED))
        raise
    return _conclude(run, outcome)


def _attempt(
    run: RunDirectory, plan: LaunchPlan, grace_s: float, signals: Signals, view: View
) -> Outcome:
    if signals.first is not None:
        return _asked(signals.first)
    host = plan.hosts[0]
    job = Job(host.command, plan.environment, run.agent_log(plan.attempt, host.host))
    try:
        forced = _follow(run, job, grace_s, signals, view)
    finally:
        left = job.end()
    view.poll()
    if left:
        events.append(run, "note", f"processes that cannot be ended: {left}", pids=left)
    return judge(run, plan, job.exit_code(), signals.first, forced)


def judge(
    run: RunDirectory,
    plan: LaunchPlan,
    code: int | None,
    asked: signal.Signals | None,
    forced: str | None,
) -> Outcome:
    """What the agent's exit code means, with what was asked of it.

    Args:
        forced: why the job was ended by force; None where it was not.
    """
    if code == 0:
        return Outcome("completed", DONE)
    if code == 75:
        return _asked(asked or signal.SIGTERM)
    if code == -signal.SIGTERM and asked is not None:
        return _asked(asked)  # the agent was so young that it had no handler yet
    if forced is not None and asked is signal.SIGINT:
        return Outcome("stopped", INTERRUPTED)
    cause = failure.read(run)
    if cause is None:
        host = plan.hosts[0].host
        cause = failure.agent_lost(
            run, plan.attempt, host, -signal.SIGKILL if code is None else code
        )
        if forced is not None:
            cause = replace(cause, diagnosis=forced, remedy="a larger launcher.stop_grace_s")
        with suppress(OSError):
            failure.write(run, cause)
    return Outcome("failed", WRONG if cause.user_error else FAILED, cause)


def _asked(number: signal.Signals) -> Outcome:
    if number is signal.SIGINT:
        return Outcome("stopped", INTERRUPTED)
    return Outcome("preempted", PREEMPTED)


def _begin(run: RunDirectory, plan: LaunchPlan) -> None:
    status.write(run, status.read(run).starting(plan.attempt))
    write_json(run.launch, plan.document())
    logs = run.attempt_logs(plan.attempt)
    logs.mkdir(parents=True, exist_ok=True)
    if run.failure.exists():
        run.failure.rename(run.attempt_logs(max(1, plan.attempt - 1)) / run.failure.name)
    events.append(
        run,
        "attempt",
        f"attempt {plan.attempt}: {plan.world_size} ranks on {', '.join(h.host for h in plan.hosts)}",
        attempt=plan.attempt,
        world_size=plan.world_size,
    )


def _follow(
    run: RunDirectory, job: Job, grace_s: float, signals: Signals, view: View
) -> str | None:
    """Look at the job until it ends; the reason where it had to be ended by force."""
    deadline = float("inf")
    was_running = False
    while job.exit_code() is None:
        view.poll()
        if view.running and not was_running:
            was_running = True
            status.write(run, status.read(run).running())
        if signals.first is not None and deadline == float("inf"):
            deadline = time.monotonic() + grace_s
            _pass_on(run, job, signals.first)
        if signals.insists:
            return "it was ended by force, as asked"
        if time.monotonic() > deadline:
            return f"it did not stop within {grace_s:g} s (launcher.stop_grace_s)"
        job.wait(_LOOK_S)
    return None


def _pass_on(run: RunDirectory, job: Job, number: signal.Signals) -> None:
    job.stop()
    events.append(
        run,
        "signal",
        f"{number.name}: stopping after the current step; Ctrl-C again to kill",
        signal=number.name,
    )


def _conclude(run: RunDirectory, outcome: Outcome) -> Outcome:
    cause = outcome.failure
    with suppress(OSError):  # a full disk is no reason to keep the outcome from the user
        if cause is not None:
            who = cause.host if cause.rank is None else f"{cause.host}:{cause.rank}"
            events.append(run, "failure", f"{who}: {cause.diagnosis}", rank=cause.rank)
        status.write(run, status.read(run).ending(outcome.state, outcome.exit_code))
    return outcome

"""The launch of an attempt, as the user sees it: `train`, `resume` and launcher=env end here."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import TextIO

from nanoscale.checkpoint.configuration import newest, record_origin
from nanoscale.cli.common.output import answer, exit_code_of_signal, print_json, show_report
from nanoscale.cli.common.request import Refusals
from nanoscale.common import display
from nanoscale.common.errors import UserError
from nanoscale.config.resolved import ResolvedConfig, differences
from nanoscale.config.violations import shown
from nanoscale.launch.fleet.fleet import Fleet
from nanoscale.launch.fleet.signals import Signals
from nanoscale.launch.lifecycle.attempt import Outcome
from nanoscale.launch.lifecycle.command import local_host, plan_launch
from nanoscale.launch.lifecycle.continuation import fetch_missing, starting_point
from nanoscale.launch.lifecycle.host_choice import HostChoice
from nanoscale.launch.lifecycle.prepare import new_run, replace_configuration
from nanoscale.launch.lifecycle.supervisor import Supervisor, prepare
from nanoscale.launch.preflight.preflight import mixed_versions, require_ready
from nanoscale.launch.request import Request
from nanoscale.runs import submission
from nanoscale.runs.directory import RunDirectory
from nanoscale.runs.lock import RunLock
from nanoscale.view.run import launch_text
from nanoscale.view.run.launch_text import request_lines
from nanoscale.view.run.live import LiveView
from nanoscale.view.run.outcome_text import document, print_outcome
from nanoscale.view.run.run_report import write_report


@contextmanager
def ready_fleet(request: Request, signals: Signals) -> Iterator[Fleet]:
    """Start the agents of all hosts, ready for the job; nothing of the run is written yet.

    Raises:
        UserError: the hosts that answered do not support the request.
        typer.Exit: a signal came meanwhile.
    """
    import typer

    config = request.config
    hosts = request.hosts or (local_host(config.world_size),)
    with Fleet(config, hosts, request.run.path.parent) as fleet:
        prepare(fleet, request, signals)
        if signals.first is not None:
            display.note("stopped before the launch")
            raise typer.Exit(exit_code_of_signal(signals.first))
        if config.launcher.preflight:
            require_ready(fleet, config)
        elif mixed := mixed_versions(fleet.members, config):
            display.note(mixed)
        yield fleet


def launch(
    run: RunDirectory,
    request: Request,
    last: int,
    lock: RunLock | None,
    refusals: Refusals,
    as_json: bool,
    signals: Signals | None = None,
    *,
    quiet: bool = False,
) -> int:
    """Launch the next attempt of a run; a dry run shows it. Return the exit code of the command.

    Args:
        last: the number of the attempt before; 0: there is none.
        lock: the lock of a run that exists, which gets the request's configuration; None: the run is created.
        quiet: True to show the outcome alone.
    """
    if refusals.postponed:
        return show_plan(run, request, last + 1, refusals, as_json)
    with ExitStack() as held:
        # From here on, a signal stops the agents as well.
        signals = signals or held.enter_context(Signals())
        # The hosts are checked before anything is written: a launch that they refuse leaves no trace.
        fleet = held.enter_context(ready_fleet(request, signals))
        if lock is None:
            lock = held.enter_context(new_run(request))
        else:
            lock.require()
            replace_configuration(run, request, last)
        return attempt(lock, request, last + 1, fleet, signals, as_json, quiet=quiet)


def show_changes(previous: ResolvedConfig, config: ResolvedConfig) -> bool:
    """Show what differs from a run's previous configuration; True if anything does."""
    changes = differences(previous, config)
    for key, (was, now) in changes.items():
        display.note(f"{key}: {shown(was)} → {shown(now)}")
    return bool(changes)


def show_start(run: RunDirectory) -> None:
    """Show from which checkpoint a run continues. Errors as of `starting_point`."""
    for sentence in starting_point(run):
        display.note(sentence)


def attempt(
    lock: RunLock,
    request: Request,
    number: int,
    fleet: Fleet,
    signals: Signals,
    as_json: bool,
    *,
    quiet: bool = False,
) -> int:
    """Launch, follow and report attempt `number` and its restarts; return the exit code of the command.

    Raises:
        UserError: a rank found an error in the request.
        TakenOverError: another launcher holds the run now.
    """
    if fetch_missing(lock.run, request.config.checkpoint.upload) and (stored := newest(lock.run)):
        record_origin(lock.run, stored)
    stream = sys.stderr if as_json else sys.stdout
    outcome = follow(lock, request, number, fleet, signals, stream, quiet=quiet)
    if as_json:
        with display.survive_lost_stream(sys.stdout):
            print_json(document(lock.run, outcome))
            sys.stdout.flush()
    return outcome.exit_code


def follow(
    lock: RunLock,
    request: Request,
    number: int,
    fleet: Fleet,
    signals: Signals,
    stream: TextIO,
    *,
    quiet: bool = False,
) -> Outcome:
    """Launch, follow and report an attempt and its restarts to people. Errors as of `attempt`."""
    run = lock.run
    submission.note(run)
    with ExitStack() as held:
        shown = (
            held.enter_context(Path(os.devnull).open("w", encoding="utf-8")) if quiet else stream
        )
        view = held.enter_context(LiveView(run, shown))
        for line in request_lines(request):
            view.line(line)
        supervisor = Supervisor(lock, HostChoice(lock.run, fleet, request), signals, view)
        outcome = supervisor.supervise(number)
    with suppress(OSError, UserError):  # a full disk or a damaged file must not hide the outcome
        write_report(run)
    print_outcome(run, outcome, stream)
    return outcome


def show_plan(
    run: RunDirectory, request: Request, number: int, refusals: Refusals, as_json: bool
) -> int:
    """Show the result of a dry run of `train` or `resume`; return the exit code of the command."""
    plan = plan_launch(request.config, run, number, request.hosts)
    document = {**launch_text.document(request, plan, run), **refusals.document()}
    answer(as_json, document, show_report, launch_text.launch_report(request, plan, run))
    return refusals.show()

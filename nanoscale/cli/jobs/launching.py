"""The launch of an attempt, as the user sees it: `train`, `resume` and launcher=env end here."""

import os
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, TextIO

from nanoscale.checkpoint.configuration import newest, record_origin
from nanoscale.cli.common import output
from nanoscale.cli.common.request import CommandLine, Refusals, request_new_run
from nanoscale.common import display
from nanoscale.common.errors import UserError
from nanoscale.config.composing.frozen import load
from nanoscale.config.resolved import ResolvedConfig, differences
from nanoscale.config.violations import shown
from nanoscale.launch.fleet.fleet import Fleet
from nanoscale.launch.fleet.signals import Signals
from nanoscale.launch.hosts import outer_processes as outer
from nanoscale.launch.lifecycle import continuation
from nanoscale.launch.lifecycle.attempt import Outcome
from nanoscale.launch.lifecycle.command import local_host, plan_launch
from nanoscale.launch.lifecycle.host_choice import HostChoice
from nanoscale.launch.lifecycle.prepare import new_run, replace_configuration
from nanoscale.launch.lifecycle.supervisor import Supervisor, prepare
from nanoscale.launch.preflight.preflight import mixed_versions, require_ready
from nanoscale.launch.request import Request
from nanoscale.processes.session import Keeper
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
            raise typer.Exit(output.exit_code_of_signal(signals.first))
        if config.launcher.preflight:
            require_ready(fleet, config)
        elif mixed := mixed_versions(fleet.members, config):
            display.note(mixed)
        yield fleet


def launch(
    run: RunDirectory,
    request: Request,
    lock: RunLock | None,
    refusals: Refusals,
    as_json: bool,
    signals: Signals | None = None,
    *,
    quiet: bool = False,
) -> int:
    """Launch the next attempt of a run; a dry run shows it. Return the exit code of the command.

    Args:
        lock: the lock of a run that exists, which gets the request's configuration; None: the run is created.
        quiet: True to show the outcome alone.

    Raises:
        UserError: the hosts do not support the request, or a rank found an error in it.
        TakenOverError: another launcher holds the run now.
    """
    last = run.last_attempt()
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
        upload = request.config.checkpoint.upload
        if continuation.fetch_missing(lock.run, upload) and (stored := newest(lock.run)):
            record_origin(lock.run, stored)
        stream = sys.stderr if as_json else sys.stdout
        outcome = follow(lock, request, last + 1, fleet, signals, stream, quiet=quiet)
        if as_json:
            with display.survive_lost_stream(sys.stdout):
                output.print_json(document(lock.run, outcome))
                sys.stdout.flush()
        return outcome.exit_code


def show_changes(previous: ResolvedConfig, config: ResolvedConfig) -> bool:
    """Show what differs from a run's previous configuration; True if anything does."""
    changes = differences(previous, config)
    for key, (was, now) in changes.items():
        display.note(f"{key}: {shown(was)} → {shown(now)}")
    return bool(changes)


def show_start(run: RunDirectory) -> None:
    """Show from which checkpoint a run continues. Errors as of `starting_point`."""
    for sentence in continuation.starting_point(run):
        display.note(sentence)


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
    """Launch, follow and report an attempt and its restarts to people. Errors as of `launch`."""
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
    output.answer(
        as_json, document, output.show_report, launch_text.launch_report(request, plan, run)
    )
    return refusals.show()


def train_as_one_of_many(line: CommandLine, dry_run: bool, as_json: bool, **how: Any) -> int:
    """Launch the job in the first process, and serve it or wait in the others; return its exit code.

    `how` has the other options of `request_new_run`.
    The same command, started again, continues the run of this name.
    """
    process, line = outer.this_process(), replace(line, one_of_many=True)
    os.environ[outer.AGENT_NAME] = outer.names(process)[process.host]
    config = line.compose_settings().config
    session = outer.session_file(config)
    if not process.launches:
        command = outer.join_command(process, config)
        os.execv(command[0], command)
    session.parent.mkdir(parents=True, exist_ok=True)
    with Keeper(session, process.hosts * process.slots > 1) as keeper:
        try:
            keeper.exit_code = _launch(line, dry_run, as_json, **how)
        except UserError as error:
            output.show_error(error, as_json=as_json)  # before the other processes know
            keeper.exit_code = output.exit_code(error)
    return keeper.exit_code


def _launch(line: CommandLine, dry_run: bool, as_json: bool, **how: Any) -> int:
    refusals = Refusals(postponed=dry_run)
    request = request_new_run(line, refusals, fetch=not dry_run, continues=True, **how)
    run = request.run
    if not run.config.is_file():
        return launch(run, request, None, refusals, as_json)
    with nullcontext() if dry_run else RunLock(run) as lock:
        previous = load(run.config)
        request = replace(request, config=replace(request.config, run=previous.run))
        continuation.require_same_run(run, request, line.overrides or ())
        show_changes(previous, request.config)
        complete = continuation.is_complete(run, previous, request.config)
        if complete and not dry_run:
            (display.note if as_json else display.show)(continuation.completion(run))
            return output.DONE
        if not complete:
            continuation.fetch_missing(run, request.config.checkpoint.upload)
            show_start(run)
        return launch(run, request, lock, refusals, as_json)

"""`nanoscale train launcher=env`: one of several processes that another program has started."""

from __future__ import annotations

import os
import time
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

from nanoscale.cli.common.output import DONE, exit_code, show_error
from nanoscale.cli.common.request import CommandLine, Refusals, request_new_run
from nanoscale.cli.jobs.launching import attempt, ready_fleet, show_plan
from nanoscale.common import display
from nanoscale.common.errors import UserError
from nanoscale.config.composing.frozen import load
from nanoscale.config.resolved import differences
from nanoscale.config.violations import shown
from nanoscale.launch.fleet.signals import Signals
from nanoscale.launch.hosts.outer_processes import (
    AGENT_NAME,
    join_command,
    names,
    session_file,
    this_process,
)
from nanoscale.launch.lifecycle.continuation import (
    completion,
    fetch_missing,
    is_complete,
    require_same_run,
    starting_point,
)
from nanoscale.launch.lifecycle.prepare import new_run, replace_configuration
from nanoscale.launch.request import Request
from nanoscale.processes.session import LONGER_S, Keeper
from nanoscale.runs.directory import RunDirectory
from nanoscale.runs.lock import RunLock


def train_as_one_of_many(line: CommandLine, dry_run: bool, as_json: bool, **how: Any) -> int:
    """Launch the job in the first process, and serve it or wait in the others; return its exit code.

    `how` has the other options of `request_new_run`.
    The same command, started again, continues the run of this name.
    """
    process, line = this_process(), replace(line, one_of_many=True)
    os.environ[AGENT_NAME] = names(process)[process.host]
    try:
        config = line.compose().config
        session = session_file(config)
    except UserError:
        if process.launches:
            raise
        time.sleep(LONGER_S)  # the first process says what is wrong
        return 2
    if not process.launches:
        command = join_command(process, config)
        os.execv(command[0], command)
    session.parent.mkdir(parents=True, exist_ok=True)
    with Keeper(session, process.hosts * process.slots > 1) as keeper:
        try:
            keeper.exit_code = _launch(line, dry_run, as_json, **how)
        except UserError as error:
            show_error(error, as_json=as_json)  # before the other processes know
            keeper.exit_code = exit_code(error)
    return keeper.exit_code


def _launch(line: CommandLine, dry_run: bool, as_json: bool, **how: Any) -> int:
    refusals = Refusals(postponed=dry_run)
    request = request_new_run(line, refusals, fetch=not dry_run, continues=True, **how)
    run = request.run
    with ExitStack() as held:
        if run.config.is_file():
            lock = None if dry_run else held.enter_context(RunLock(run))
            request, complete = _continued(run, request, line)
            if complete and lock is not None:
                (display.note if as_json else display.show)(completion(run, request.config))
                return DONE
            number = run.last_attempt() + 1
        else:
            lock, number = None, 1
        if dry_run:
            return show_plan(run, request, number, refusals, as_json)
        signals = held.enter_context(Signals())
        fleet = held.enter_context(ready_fleet(request, signals))
        if lock is None:
            lock = held.enter_context(new_run(request))
        else:
            lock.require()
            replace_configuration(run, request, number - 1)
        return attempt(lock, request, number, fleet, signals, as_json)


def _continued(run: RunDirectory, request: Request, line: CommandLine) -> tuple[Request, bool]:
    """Return the request of a run that exists, and True if nothing is left to train; say what differs.

    Raises:
        UserError: the command describes another run.
    """
    previous = load(run.config)
    request = replace(request, config=replace(request.config, run=previous.run))
    require_same_run(run, request, line.overrides or ())
    for key, (was, now) in differences(previous, request.config).items():
        display.note(f"{key}: {shown(was)} → {shown(now)}")
    complete = is_complete(run, previous, request.config)
    if not complete:
        fetch_missing(run, request.config.checkpoint.upload)
        for sentence in starting_point(run):
            display.note(sentence)
    return request, complete

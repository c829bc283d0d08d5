"""`nanoscale train launcher=env`: one of several processes that another program has started."""

from __future__ import annotations

import os
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

from nanoscale.cli.common.output import DONE, exit_code, show_error
from nanoscale.cli.common.request import CommandLine, Refusals, request_new_run
from nanoscale.cli.jobs.launching import launch, show_changes, show_start
from nanoscale.common import display
from nanoscale.common.errors import UserError
from nanoscale.config.composing.frozen import load
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
)
from nanoscale.processes.session import Keeper
from nanoscale.runs.lock import RunLock


def train_as_one_of_many(line: CommandLine, dry_run: bool, as_json: bool, **how: Any) -> int:
    """Launch the job in the first process, and serve it or wait in the others; return its exit code.

    `how` has the other options of `request_new_run`.
    The same command, started again, continues the run of this name.
    """
    process, line = this_process(), replace(line, one_of_many=True)
    os.environ[AGENT_NAME] = names(process)[process.host]
    config = line.compose_settings().config
    session = session_file(config)
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
    if not run.config.is_file():
        return launch(run, request, 0, None, refusals, as_json)
    with nullcontext() if dry_run else RunLock(run) as lock:
        previous = load(run.config)
        request = replace(request, config=replace(request.config, run=previous.run))
        require_same_run(run, request, line.overrides or ())
        show_changes(previous, request.config)
        complete = is_complete(run, previous, request.config)
        if complete and not dry_run:
            (display.note if as_json else display.show)(completion(run))
            return DONE
        if not complete:
            fetch_missing(run, request.config.checkpoint.upload)
            show_start(run)
        return launch(run, request, run.last_attempt(), lock, refusals, as_json)

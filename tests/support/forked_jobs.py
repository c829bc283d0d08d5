"""Jobs of commands without agents: their ranks are forked from the tests' fork server, which has torch loaded.

A launch costs 3.4 s, most of it for importing torch; ranks from here cost 0.04 s and their steps. They are
for tests of what commands train, print and write; `launch` and `cluster` test the launcher's processes.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import runpy
import sys
import traceback
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from nanoscale import worker
from nanoscale.cli.jobs import launching
from nanoscale.launch.fleet.fleet import Fleet
from nanoscale.launch.lifecycle import job_execution
from nanoscale.launch.lifecycle.job_execution import JobExecution
from nanoscale.launch.preflight import by_library
from nanoscale.runs.directory import STREAMS, RunDirectory, read_json, write_json
from nanoscale.runs.failure import read_rank_failure
from nanoscale.runs.job_messages import HostRanks
from tests.support.ranks import run_ranks


@contextlib.contextmanager
def forked_jobs() -> Iterator[None]:
    """Start the jobs of commands in this process so, until the end of the block."""
    with pytest.MonkeyPatch.context() as patch:
        for module in (launching, job_execution):
            patch.setattr(module, "Fleet", _NoFleet)
            patch.setattr(module, "require_ready", lambda *_: None)
        patch.setattr(JobExecution, "run", _run)
        patch.setattr(by_library, "_ask", _ask)
        yield


class _NoFleet(Fleet):
    """A fleet whose agents are never started, and keep nothing in memory."""

    def __enter__(self) -> Fleet:
        self.memory_key = None
        for member in self.members:
            member.facts = {"port": 1, **dict.fromkeys(("time", "asked_at", "heard_at"), 0.0)}
        return self

    def __exit__(self, *_: object) -> None: ...

    def prepare(self, *_: Any, **__: Any) -> None: ...

    def gather(self, *_: Any) -> None: ...

    def send(self, *_: Any, **__: Any) -> None: ...


def _run(execution: JobExecution) -> None:
    """Run the ranks of the one host of a job, and note how they have ended."""
    plan, (host,) = execution.plan, execution.plan.hosts
    about = HostRanks(
        host.host,
        0,
        1,
        host.ranks,
        plan.world_size,
        plan.master_addr,
        plan.master_port,
        plan.attempt,
    )
    order = execution.order_for(about)
    with TemporaryDirectory() as folder:
        run = RunDirectory(Path(order.run or folder))
        if order.run is None:
            run.config.write_text(order.config)
            write_json(run.task, order.task)
        places = (run.path, Path(folder), Path.cwd())
        outcomes = run_ranks(_rank, plan.world_size, order.job, about, places, dict(os.environ))
        execution.outcomes[host.host] = max(outcomes)
        for rank in host.ranks:
            failure = read_rank_failure(Path(folder) / f"failure-{rank}")
            if failure is not None:
                ended = replace(failure, exit_code=2 if failure.user_error else 1)
                execution._add(execution.members[0], [ended])
        execution.result = read_json(run.result) if run.result.exists() else None
    execution.on_poll()


def _ask(module: str, question: object, _library: str) -> Any:
    """Return the answer of a module that checks a request with a library, as `by_library` asks for it."""
    return run_ranks(_answer, 1, module, json.dumps(question))[0]


def _answer(_rank: int, module: str, question: str) -> Any:
    sys.stdin, printed = io.StringIO(question), io.StringIO()
    try:
        with contextlib.redirect_stdout(printed):
            runpy.run_module(module, run_name="__main__")
    except Exception as error:
        return f"cannot be checked: {traceback.format_exception_only(error)[-1].strip()}"
    return json.loads(printed.getvalue().splitlines()[-1])


def _rank(
    rank: int, job: str, host: HostRanks, places: tuple[Path, Path, Path], inherited: dict[str, str]
) -> str:
    run, folder, cwd = places
    os.chdir(cwd)
    os.environ.update({name: value for name, value in inherited.items() if name not in os.environ})
    os.environ["NANOSCALE_ATTEMPT"] = str(host.attempt)
    os.environ["NANOSCALE_HOST"] = host.name
    os.environ["NANOSCALE_FAILURE_FILE"] = str(folder / f"failure-{rank}")
    for number, stream in enumerate(STREAMS, 1):
        log = RunDirectory(run).log(host.attempt, host.name, rank, stream)
        path = log if log.parent.is_dir() else folder / log.name
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)
    sys.stdout, sys.stderr = (os.fdopen(number, "w", closefd=False) for number in (1, 2))
    try:
        return worker.main(run, job)
    except BaseException:
        return "failed"

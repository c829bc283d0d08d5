"""One attempt of a run as the user sees it; `train` and `resume` end here."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from signal import SIGINT
from typing import Any, TextIO

from nanoscale.cli.common.output import console, print_json
from nanoscale.cli.common.rehearsal import rehearsal_lines
from nanoscale.cli.common.request import Refusals, saving_lines, saving_of
from nanoscale.common import display
from nanoscale.common.errors import UserError
from nanoscale.common.units import GIB, byte_size, duration
from nanoscale.config.data.sample_count import times_seen
from nanoscale.launch.fleet.fleet import Fleet
from nanoscale.launch.fleet.signals import Signals
from nanoscale.launch.lifecycle.attempt import INTERRUPTED, PREEMPTED, Outcome
from nanoscale.launch.lifecycle.command import here, plan_launch
from nanoscale.launch.lifecycle.supervisor import Supervisor, prepare
from nanoscale.launch.preflight.preflight import mixed_versions, require_ready
from nanoscale.launch.request import Request
from nanoscale.launch.slurm.jobs import ways_on
from nanoscale.runs import events, failure, metrics, status, submission
from nanoscale.runs.directory import RunDirectory
from nanoscale.runs.failure import Failure
from nanoscale.runs.lock import RunLock
from nanoscale.runs.tail import read_end
from nanoscale.view.run.launch_text import describe_precision, forecast, seen_text
from nanoscale.view.run.live import LiveView, number
from nanoscale.view.run.run_page import write_report
from nanoscale.view.run.run_report import prediction

_LOG_LINES, _LOG_BYTES = 12, 1 << 14
_NOISE = ("The hostname of the client socket cannot be retrieved",)
"""Messages of torch on any network that does not resolve addresses to names."""


@contextmanager
def ready_fleet(request: Request, signals: Signals) -> Iterator[Fleet]:
    """Start the agents of all hosts, ready for the job; nothing of the run is written yet.

    Raises:
        UserError: the hosts that answered do not support the request.
        typer.Exit: a signal came meanwhile.
    """
    import typer

    config = request.config
    hosts = request.hosts or (here(config),)
    with Fleet(config, hosts, request.run.path.parent) as fleet:
        prepare(fleet, request, signals)
        if signals.first is not None:
            display.note("stopped before the launch")
            raise typer.Exit(INTERRUPTED if signals.first is SIGINT else PREEMPTED)
        if config.launcher.preflight:
            require_ready(fleet, config)
        elif mixed := mixed_versions(fleet.members, config):
            display.note(mixed)
        yield fleet


def attempt(
    lock: RunLock,
    request: Request,
    number: int,
    fleet: Fleet,
    signals: Signals,
    as_json: bool,
) -> int:
    """Launch, follow and report attempt `number` and its restarts; return the exit code of the command.

    Raises:
        UserError: a rank found an error in the request.
        TakenOverError: another launcher holds the run now.
    """
    run = lock.run
    stream = sys.stderr if as_json else sys.stdout
    submission.note(run)
    with LiveView(run, stream) as view:
        for line in (
            *precision_lines(request),
            *data_lines(request),
            *rehearsal_lines(request),
            *saving_lines(request),
        ):
            view.line(line)
        supervisor = Supervisor(lock, request, fleet, signals, view)
        outcome = supervisor.supervise(number)
    with suppress(
        OSError, UserError
    ):  # a full disk or a damaged file must not hide the outcome from the user
        write_report(run)
    report(run, outcome, stream)
    if as_json:
        with display.surviving(sys.stdout):
            print_json(document(run, outcome))
            sys.stdout.flush()
    return outcome.exit_code


def data_lines(request: Request) -> list[str]:
    """Describe how often the data is seen; nothing if its size is not known before the launch."""
    times = times_seen(request.config)
    return [] if times is None else [f"data: {seen_text(times)}"]


def precision_lines(request: Request) -> list[str]:
    """Describe the dtypes, and the speed in bf16 if fp32 was chosen on GPUs."""
    chosen = " (precision.compute=auto)" if request.asked.precision.compute == "auto" else ""
    lines = [f"precision: {describe_precision(request.config.precision)}{chosen}"]
    advice = forecast(request.plan).get("in bf16") if request.plan else None
    return [*lines, advice] if advice else lines


def report(run: RunDirectory, outcome: Outcome, stream: TextIO) -> None:
    """Report how a run ended, and its failure.

    Raises:
        UserError: a rank found an error in the request.
    """
    if outcome.failure is not None:
        _raise_users_error(outcome.failure)
        _print_failure(run, outcome.failure)
    _print_summary(run, outcome, stream)


def show_plan(
    run: RunDirectory, request: Request, number: int, refusals: Refusals, as_json: bool
) -> int:
    """Show the result of a dry run of `train` or `resume`; return the exit code of the command."""
    from nanoscale.config.model_math import parameters
    from nanoscale.view.run.launch_text import document, print_plan

    config = request.config
    plan = plan_launch(config, run, number, config.world_size, request.hosts)
    size = parameters(config.model)
    saving = saving_of(request)
    if as_json:
        shown = document(plan, config, size, run, request.plan, saving)
        print_json({**shown, "rehearsed": request.program is not None, **refusals.document()})
    else:
        print_plan(console(), plan, config, size, run, request.plan, saving)
        for line in rehearsal_lines(request):
            display.show(line)
    return refusals.show()


def document(run: RunDirectory, outcome: Outcome) -> dict[str, Any]:
    """Return the final document of `train --json` and `resume --json`."""
    last = metrics.last(run)
    return {
        "run_dir": str(run.path),
        "status": outcome.state,
        "attempt": status.read(run).attempt,
        "steps": reached(run, last),
        "metrics": last,
        "failure": failure.document(outcome.failure) if outcome.failure else None,
        "exit_code": outcome.exit_code,
    }


def reached(run: RunDirectory, last: dict[str, Any] | None) -> int:
    """Return the last known trained step: not every step is logged."""
    end = events.last(run, "end")
    return max(last["step"] if last else 0, end["step"] if end else 0)


def against_plan(run: RunDirectory, last: dict[str, Any] | None) -> str | None:
    """Compare the prediction with the last logged step; None if one of them is missing."""
    if last is None:
        return None
    try:
        plan = prediction(run)
        return None if plan is None else _beside(plan, last)
    except (UserError, KeyError, TypeError):  # `runs report` names the damaged file
        return None


def _beside(plan: dict[str, Any], last: dict[str, Any]) -> str:
    speed = (
        f"{number(last['tokens_per_s'], ',.0f')} tokens/s, predicted {plan['tokens_per_s']:,.0f}"
    )
    if plan["hardware"]["device"] == "cpu":
        return speed  # the measurement covers a process with its libraries
    memory = plan["memory"]["allocated_gib"]
    return f"{speed}; {byte_size(GIB * last['memory_gib'])}, predicted {byte_size(GIB * memory)}"


def _raise_users_error(cause: Failure) -> None:
    error = failure.user_error(cause)
    if error is not None:
        raise error


def _print_failure(run: RunDirectory, cause: Failure) -> None:
    """Print the panel of a failure: the rank, the cause, the remedy and the log."""
    from rich.panel import Panel
    from rich.text import Text

    title = f"{cause.who} failed"
    text = cause.traceback.rstrip() or _end_of_log(run, cause)
    lines = [text, ""] if text else []
    lines.append(f"diagnosis  {cause.diagnosis}")
    if cause.remedy:
        lines.append(f"remedy     {cause.remedy}")
    if cause.also_failed:
        lines.append(f"ended too  ranks {', '.join(map(str, cause.also_failed))}")
    lines.append(f"log        {run.path / cause.log}")
    screen = console(error=True)
    if not screen.is_terminal:
        display.note("\n".join([f"{title}:", *lines]))
        return
    with display.surviving(sys.stderr):
        screen.print(Panel(Text("\n".join(lines)), title=Text(title), border_style="red"))


def _end_of_log(run: RunDirectory, cause: Failure) -> str:
    try:
        end = read_end(run.path / cause.log, _LOG_BYTES)
    except OSError:
        return ""
    lines = end.decode(errors="replace").splitlines()
    telling = [line for line in lines if not any(noise in line for noise in _NOISE)]
    return "\n".join(telling[-_LOG_LINES:])


def _print_summary(run: RunDirectory, outcome: Outcome, stream: TextIO) -> None:
    now = status.read(run)
    last = metrics.last(run)
    words: list[str] = [outcome.state]
    step = reached(run, last)
    if step:
        words.append(f"after {step} steps")
    if now.started is not None and now.ended is not None:
        words.append(f"in {duration(now.ended - now.started)}")
    if last is not None:
        words.append(f"with loss {number(last['loss'], '.4f')}")
    checkpoints = run.checkpoint_steps()
    compared = against_plan(run, last)
    lines = [" ".join(words), f"  run         {run.path}"]
    if checkpoints:
        lines.append(f"  checkpoint  {run.checkpoint(checkpoints[-1])}")
    lines.append(f"  logs        {run.attempt_logs(now.attempt)}")
    if run.profile.exists():
        lines.append(f"  profile     {run.profile}")
    if run.report.exists():
        lines.append(f"  report      {run.report}")
    if compared:
        lines.append(f"  plan        {compared}")
    if outcome.state != "completed":
        lines += ways_on(run)
    with display.surviving(stream):
        display.show("\n".join(lines), stream=stream)

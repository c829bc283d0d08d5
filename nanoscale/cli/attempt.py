"""One attempt of a run as the user sees it; `train` and `resume` end here."""

from __future__ import annotations

import sys
from typing import Any, TextIO

from nanoscale.cli.output import console, print_json
from nanoscale.config.derive import derive
from nanoscale.config.schema import Config
from nanoscale.launch.command import LaunchPlan, plan_local
from nanoscale.launch.console import LiveView, duration, if_still_there, number
from nanoscale.launch.ports import ReservedPort
from nanoscale.launch.signals import Signals
from nanoscale.launch.supervisor import Outcome, supervise
from nanoscale.runs import events, failure, metrics, status
from nanoscale.runs.directory import RunDirectory
from nanoscale.runs.failure import Failure

_LOG_LINES = 12


def attempt(
    run: RunDirectory,
    config: Config,
    number: int,
    port: ReservedPort,
    signals: Signals,
    as_json: bool,
) -> int:
    """Launch, follow and report an attempt; the exit code of the command.

    Raises:
        UserError: a rank found that the request is wrong.
    """
    derived = derive(config)
    plan = plan_local(config, run, number, derived.world_size, port.number)
    stream = sys.stderr if as_json else sys.stdout
    with LiveView(run, plan, derived.steps, stream) as view:
        outcome = supervise(run, plan, config.launcher.stop_grace_s, signals, view)
    if outcome.failure is not None:
        _raise_users_error(outcome.failure)
        _print_failure(run, outcome.failure)
    _print_summary(run, plan, outcome, stream)
    if as_json:
        with if_still_there(sys.stdout):
            print_json(document(run, outcome))
            sys.stdout.flush()
    return outcome.exit_code


def show_plan(
    run: RunDirectory, config: Config, number: int, master_port: int, as_json: bool
) -> None:
    """`--dry-run`."""
    from nanoscale.launch.show import document, print_plan
    from nanoscale.plan.model_math import parameters

    derived = derive(config)
    plan = plan_local(config, run, number, derived.world_size, master_port)
    size = parameters(config.model)
    if as_json:
        print_json(document(plan, config, derived, size, run))
    else:
        print_plan(console(), plan, config, derived, size, run)


def document(run: RunDirectory, outcome: Outcome) -> dict[str, Any]:
    """What `train --json` and `resume --json` say at the end."""
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
    """The last step that was trained, as far as is known: not every step is logged."""
    end = events.last(run, "end")
    return max(last["step"] if last else 0, end["step"] if end else 0)


def _raise_users_error(cause: Failure) -> None:
    error = failure.user_error(cause)
    if error is not None:
        raise error


def _print_failure(run: RunDirectory, cause: Failure) -> None:
    """The one panel: who, why, what to do, where to read on."""
    from rich.panel import Panel
    from rich.text import Text

    who = f"agent of {cause.host}" if cause.rank is None else f"rank {cause.rank} on {cause.host}"
    title = f"{who} failed"
    text = cause.traceback.rstrip() or _end_of_log(run, cause)
    lines = [text, ""] if text else []
    lines.append(f"diagnosis  {cause.diagnosis}")
    if cause.remedy:
        lines.append(f"remedy     {cause.remedy}")
    if cause.also_failed:
        lines.append(f"ended too  ranks {', '.join(map(str, cause.also_failed))}")
    lines.append(f"log        {run.path / cause.log}")
    screen = console(error=True)
    with if_still_there(sys.stderr):
        if screen.is_terminal:
            screen.print(Panel(Text("\n".join(lines)), title=title, border_style="red"))
        else:
            print("\n".join([f"{title}:", *lines]), file=sys.stderr, flush=True)


def _end_of_log(run: RunDirectory, cause: Failure) -> str:
    try:
        lines = (run.path / cause.log).read_text(errors="replace").splitlines()
    except OSError:
        return ""
    return "\n".join(lines[-_LOG_LINES:])


def _print_summary(run: RunDirectory, plan: LaunchPlan, outcome: Outcome, stream: TextIO) -> None:
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
    lines = [" ".join(words), f"  run         {run.path}"]
    if checkpoints:
        lines.append(f"  checkpoint  {run.checkpoint(checkpoints[-1])}")
    lines.append(f"  logs        {run.attempt_logs(plan.attempt)}")
    if outcome.state != "completed":
        lines.append(f"  go on       nanoscale resume {run.reference}")
    with if_still_there(stream):
        print("\n".join(lines), file=stream, flush=True)

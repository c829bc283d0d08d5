"""The end of a run as `train`, `resume` and `runs watch` show it."""

import shlex
import sys
from dataclasses import asdict
from typing import TextIO

from nanoscale.common import display
from nanoscale.common.errors import UserError
from nanoscale.common.json_text import Json
from nanoscale.common.units import GIB, byte_size, counted, duration, number, numbered
from nanoscale.config.composing.frozen import read_values
from nanoscale.config.objectives import ANSWERS
from nanoscale.launch.batch.jobs import Job, in_words, output_of, way_on
from nanoscale.launch.lifecycle.attempt import Outcome
from nanoscale.runs import failure, metrics, status
from nanoscale.runs.directory import RunDirectory
from nanoscale.runs.failure import Failure
from nanoscale.runs.metrics import steady
from nanoscale.runs.tail import read_end
from nanoscale.view.run.run_report import prediction

_LOG_LINES, _LOG_BYTES = 12, 1 << 14
_NOISE = ("The hostname of the client socket cannot be retrieved", "Extension modules: ")
"""Torch's messages on a network that does not resolve addresses to names, and Python's list after a crash."""


def document(run: RunDirectory, outcome: Outcome) -> Json:
    """Return the final document of `train --json` and `resume --json`."""
    last = metrics.last(run)
    return {
        "run_dir": str(run.path),
        "status": outcome.state,
        "attempt": status.read(run).attempt,
        "steps": metrics.reached(run, last),
        "metrics": last,
        "failure": asdict(outcome.failure) if outcome.failure else None,
        "exit_code": outcome.exit_code,
    }


def print_outcome(run: RunDirectory, outcome: Outcome, stream: TextIO) -> None:
    """Print how a run ended, and its failure.

    Raises:
        UserError: a rank found an error in the request.
    """
    if outcome.failure is not None:
        error = failure.user_error(outcome.failure)
        if error is not None:
            raise error
        _print_failure(run, outcome.failure)
    _print_summary(run, outcome, stream)


def print_lost(run: RunDirectory, job: Job | None, stream: TextIO) -> None:
    """Print that nobody recorded how the run ended, or that it never began."""
    lines = [in_words(status.read(run).state, False, job), f"  run         {run.path}"]
    if job is not None:
        lines.append(f"  job         {job.sentence()}")
        output = output_of(run, job.submission)
        lines += [] if output is None else [f"  its output  {output}"]
    display.show("\n".join([*lines, *_ways_on(run)]), stream=stream)


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
        lines.append(f"ended too  {numbered('rank', cause.also_failed)}")
    lines.append(f"log        {run.path / cause.log}")
    screen = display.console(sys.stderr)
    if not screen.is_terminal:
        display.note("\n".join([f"{title}:", *lines]))
        return
    with display.survive_lost_stream(sys.stderr):
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
    step = metrics.reached(run, last)
    if step:
        words.append(f"after {counted(step, 'step')}")
    if now.started is not None and now.ended is not None:
        took = duration(now.ended - now.started)
        words.append(f"in {took}" if now.attempt < 2 else f"(attempt {now.attempt}: {took})")
    if last is not None:
        words.append(f"with loss {number(last['loss'], '.4f')}")
        words += [f"at step {last['step']}"] if last["step"] != step else []
    checkpoints = run.checkpoint_steps()
    figures = {} if last is None else _figures(run, last)
    lines = [" ".join(words), f"  run         {run.path}"]
    kept: object = run.checkpoint(checkpoints[-1]) if checkpoints else None
    if kept is None and outcome.state == "completed":
        kept = "none was saved: the trained weights are lost"
    known = {
        "checkpoint": kept,
        "logs": run.attempt_logs(now.attempt),
        "profile": run.profile.exists() and run.profile,
        "report": run.report.exists() and run.report,
        **figures,
    }
    lines += [f"  {label:<11} {what}" for label, what in known.items() if what]
    lines += _ways_on(run) if outcome.state != "completed" else _next(run, step)
    with display.survive_lost_stream(stream):
        display.print_lines(display.console(stream), "\n".join(lines))


def _ways_on(run: RunDirectory) -> list[str]:
    """Return the last lines about a run that ended early: the command, and whether that starts from step 1."""
    saved = (*run.checkpoint_steps(), *run.checkpoints.glob("damaged-*"), *run.memory.glob("*"))
    if saved:
        return [f"  continue    {way_on(run)}"]
    return [
        "  checkpoint  none was saved: the training would start again from step 1",
        f"  start over  {way_on(run)}",
    ]


def _next(run: RunDirectory, steps: int) -> list[str]:
    """Return commands for a trained model, as they can be typed."""
    if not run.checkpoint_steps():
        return []
    keys = "train.objective", "data.loss_on", "model.source"
    objective, loss_on, source = read_values(run.config, keys).values()
    writes = objective not in ("classify", "masked") and source != "hooks"
    answers = loss_on == "answers" or objective in ANSWERS
    prompt = "'What can you do?'" if answers else "'Once'"
    asks = f"  nanoscale generate {shlex.quote(run.reference)} --prompt {prompt}"
    return [
        "next:",
        *([asks] if writes else []),
        f"  nanoscale eval {shlex.quote(run.reference)}",
        f"  nanoscale checkpoints export {shlex.quote(run.reference)} --format hf",
        f"  {way_on(run)} train.steps={2 * steps}",
    ]


def _figures(run: RunDirectory, last: Json) -> dict[str, str]:
    """Return speed, time of a step and memory of the steady steps, or of the last one, and the plan's."""
    try:
        seen, plan = steady(run), prediction(run)
        measured = seen.tokens_per_s or last["tokens_per_s"]
        of = "median" if seen.tokens_per_s else "last"
        samples = measured * last.get("samples_per_s", 0.0) / last["tokens_per_s"]
        per_sample = f", {samples:,.4g} samples/s" if samples else ""
        figures = {
            "speed": f"{number(measured, ',.0f')} tokens/s{per_sample} ({of})",
            "step": duration(seconds := seen.seconds or last["step_time_s"]),
            "memory": f"{byte_size(GIB * (seen.memory_gib or last['memory_gib']))} at the peak",
        }
        if last.get("mfu"):
            least_s = seconds * last["mfu"]
            figures["step"] += f"; at the peak of the devices it would take {duration(least_s)}"
        if plan is not None:
            figures["speed"] += f", planned {plan['tokens_per_s']:,.0f}"
            if plan["hardware"]["device"] != "cpu":  # there it covers a process with its libraries
                figures["memory"] += f", planned {byte_size(GIB * plan['memory']['allocated_gib'])}"
        return figures
    except (UserError, KeyError, TypeError, ZeroDivisionError):
        return {}  # `runs report` names the damaged file

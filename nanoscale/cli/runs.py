"""`nanoscale runs`: look at runs and stop them, from their directories alone."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from nanoscale.cli.output import DONE, FAILED, AsJson, console, print_json

if TYPE_CHECKING:
    from nanoscale.runs.directory import RunDirectory

app = typer.Typer(no_args_is_help=True, help="Look at runs, and stop them.")

Run = Annotated[str, typer.Argument(help="The run directory, or the run's name in runs/.")]

_STOP_MARGIN_S = 30.0
_LOOK_S = 0.1


@app.command("ls")
def list_runs(
    root: Annotated[Path, typer.Option(help="The folder of runs.")] = Path("runs"),
    as_json: AsJson = False,
) -> None:
    """List the runs, the oldest first."""
    from nanoscale.runs.directory import RunDirectory

    summaries = [summary(run) for run in RunDirectory.all(root)]
    if as_json:
        print_json(summaries)
        return
    if not summaries:
        typer.echo(f"no runs in {root.absolute()}")
        return
    _print_table(summaries)


@app.command("show")
def show_run(run: Run, as_json: AsJson = False) -> None:
    """Show where a run stands, what it is, and what happened to it."""
    from nanoscale.runs import events, failure, metrics
    from nanoscale.runs.directory import RunDirectory

    directory = RunDirectory.open(run)
    cause = failure.read(directory)
    document = {
        **summary(directory),
        "checkpoints": directory.checkpoint_steps(),
        "metrics": metrics.last(directory),
        "failure": failure.document(cause) if cause else None,
        "events": events.read(directory),
    }
    if as_json:
        print_json(document)
    else:
        _print_run(directory, document)


@app.command("logs")
def show_logs(
    run: Run,
    rank: Annotated[int | None, typer.Option(help="Only this rank.", show_default=False)] = None,
    attempt: Annotated[
        int | None, typer.Option(help="This attempt.", show_default="the last")
    ] = None,
    stream: Annotated[
        Literal["out", "err"] | None, typer.Option(help="Only this stream.", show_default="both")
    ] = None,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Go on until the run ends.")
    ] = False,
) -> None:
    """Print what the ranks printed, each line with its host and rank."""
    from nanoscale.runs import lock
    from nanoscale.runs.directory import RunDirectory
    from nanoscale.runs.tail import LineTail

    directory = RunDirectory.open(run)
    number = attempt if attempt is not None else directory.last_attempt()
    tails: dict[Path, LineTail] = {}
    while True:
        going_on = follow and lock.owner(directory) is not None
        for path in _log_files(directory, number, rank, stream):
            _print_lines(path, tails.setdefault(path, LineTail(path)), last=not going_on)
        if not going_on:
            break
        time.sleep(_LOOK_S)
    if not tails:
        _refuse_logs(directory, number, rank)


@app.command("stop")
def stop_run(
    run: Run,
    timeout: Annotated[
        float | None,
        typer.Option(
            help="Seconds to wait for its end.", show_default="launcher.stop_grace_s and a little"
        ),
    ] = None,
) -> int:
    """Ask a run to save and stop, and wait until it has ended."""
    import os
    import signal

    from nanoscale.config.frozen import load
    from nanoscale.runs import lock, status
    from nanoscale.runs.directory import RunDirectory

    directory = RunDirectory.open(run)
    owner = lock.owner(directory)
    if owner is None:
        typer.echo(f"{directory.name} is not going on")
        return DONE
    lock.require_here(directory, owner)
    os.kill(owner.pid, signal.SIGTERM)
    typer.echo(f"asked {owner} to stop", err=True)
    if timeout is None:
        timeout = load(directory.config).launcher.stop_grace_s + _STOP_MARGIN_S
    deadline = time.monotonic() + timeout
    while lock.owner(directory) == owner:
        if time.monotonic() > deadline:
            typer.echo(f"{directory.name} is still going on after {timeout:g} s", err=True)
            return FAILED
        time.sleep(_LOOK_S)
    typer.echo(f"{directory.name} is {status.read(directory).state}")
    return DONE


def summary(run: RunDirectory) -> dict[str, Any]:
    """One run in a few values."""
    from nanoscale.config.frozen import load
    from nanoscale.errors import UserError
    from nanoscale.runs import lock, metrics, status

    now = status.read(run)
    last = metrics.last(run)
    try:
        config = load(run.config)
    except UserError:
        config = None
    return {
        "name": run.name,
        "path": str(run.path),
        "state": now.state,
        "going_on": lock.owner(run) is not None,
        "attempt": now.attempt,
        "exit_code": now.exit_code,
        "step": last["step"] if last else 0,
        "steps": config.train.steps if config else None,
        "model": config.model.name if config else None,
        "loss": last["loss"] if last else None,
        "created": now.created,
        "started": now.started,
        "ended": now.ended,
    }


def _state(entry: dict[str, Any]) -> str:
    """The state in words: a launcher that was killed could not write how it ended."""
    if entry["state"] in ("starting", "running") and not entry["going_on"]:
        return f"{entry['state']}, then lost"
    return str(entry["state"])


def _print_table(summaries: list[dict[str, Any]]) -> None:
    from rich.table import Table

    table = Table("run", "state", "step", "loss", "model", "attempt", "created", box=None)
    for entry in summaries:
        loss = "" if entry["loss"] is None else f"{entry['loss']:.4f}"
        steps = "?" if entry["steps"] is None else entry["steps"]
        table.add_row(
            entry["name"],
            _state(entry),
            f"{entry['step']}/{steps}",
            loss,
            entry["model"] or "?",
            str(entry["attempt"]),
            _when(entry["created"]),
        )
    screen = console()
    if not screen.is_terminal:
        screen.width = 1000  # a file has no edge to wrap at
    screen.print(table)


def _print_run(run: RunDirectory, document: dict[str, Any]) -> None:
    from nanoscale.launch.console import figures

    steps = "?" if document["steps"] is None else document["steps"]
    rows = {
        "run": str(run.path),
        "state": f"{_state(document)} (attempt {document['attempt']})",
        "model": document["model"] or "?",
        "created": _when(document["created"]),
        "step": f"{document['step']}/{steps}",
        "checkpoints": ", ".join(map(str, document["checkpoints"])) or "none",
    }
    if document["metrics"]:
        rows |= figures(document["metrics"])
    if document["failure"]:
        cause = document["failure"]
        rows["failure"] = f"{cause['diagnosis']} (rank {cause['rank']} on {cause['host']})"
        rows["log"] = str(run.path / cause["log"])
    for label, value in rows.items():
        typer.echo(f"{label:<12} {value}")
    for event in document["events"]:
        typer.echo(f"{_when(event['time'])}  {event['kind']:<10} {event['message']}")


def _log_files(
    run: RunDirectory, attempt: int, rank: int | None, stream: Literal["out", "err"] | None
) -> list[Path]:
    """The attempt's log files, by rank, then host, then stream."""
    files = []
    for path in run.attempt_logs(attempt).glob("*.rank-*"):
        who, _, kind = path.name.rpartition(".")
        host, _, number = who.rpartition(".rank-")
        wanted = kind in ("out", "err") and (stream is None or kind == stream)
        if wanted and number.isdecimal() and rank in (None, int(number)):
            files.append((int(number), host, kind != "out", path))
    return [path for *_, path in sorted(files)]


def _print_lines(path: Path, tail: Any, last: bool) -> None:
    host, _, rank = path.stem.rpartition(".rank-")
    lines = tail.poll()
    if last and (rest := tail.rest()):
        lines.append(rest)
    for line in lines:
        typer.echo(f"{host}:{rank} │ {line.decode(errors='replace').rstrip()}")


def _refuse_logs(run: RunDirectory, attempt: int, rank: int | None) -> None:
    from nanoscale.errors import UserError, Violation

    have = [path.name.removeprefix("attempt-") for path in sorted(run.logs.glob("attempt-*"))]
    message = f"{run.name} has no such log; its attempts: {', '.join(have) or 'none'}"
    wanted = f"attempt {attempt}" + ("" if rank is None else f", rank {rank}")
    violation = Violation("logs", wanted, "command line", "does not exist")
    raise UserError("run", message, [violation])


def _when(seconds: float | None) -> str:
    if not seconds:
        return "?"
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))

"""The state of runs: the rows of `runs ls`, and `runs show`."""

from __future__ import annotations

from typing import Any

from nanoscale.common import display
from nanoscale.common.errors import UserError
from nanoscale.common.units import clock
from nanoscale.config.composing.frozen import read_values
from nanoscale.launch.slurm.jobs import Job, in_words, output_of
from nanoscale.runs import events, failure, lock, metrics, status, tags
from nanoscale.runs.directory import RunDirectory
from nanoscale.view.run.columns import SUMMARY, Column, values


def row(run: RunDirectory, job: Job | None, columns: list[Column]) -> dict[str, Any]:
    """Return a run's values, or the problem of a damaged file: the other runs are listed anyway."""
    try:
        return values(run, columns) | summary(run, job)
    except UserError as error:
        unknown = dict.fromkeys((*(it.name for it in columns), *SUMMARY))
        return unknown | {"name": run.name, "path": str(run.path), "message": f"damaged: {error}"}


def summary(run: RunDirectory, job: Job | None = None) -> dict[str, Any]:
    """Summarize one run in a few values."""
    now, last = status.require(run), metrics.last(run)
    keys = read_values(run.config, ("train.steps", "model.name"))
    in_progress = lock.owner(run) is not None
    return {
        "name": run.name,
        "path": str(run.path),
        "state": now.state,
        "in_progress": in_progress,
        "message": in_words(now.state, in_progress, job),
        "job": job.document() if job else None,
        "attempt": now.attempt,
        "exit_code": now.exit_code,
        "step": last["step"] if last else 0,
        "steps": keys["train.steps"],
        "model": keys["model.name"],
        "loss": last.get("loss") if last else None,
        "created": now.created,
        "started": now.started,
        "ended": now.ended,
    }


def document(run: RunDirectory, job: Job | None) -> dict[str, Any]:
    """Return the document of `runs show --json`."""
    cause = failure.read(run)
    return {
        **summary(run, job),
        "tags": tags.read(run),
        "checkpoints": run.checkpoint_steps(),
        "metrics": metrics.last(run),
        "failure": failure.document(cause) if cause else None,
        "events": events.read(run),
    }


def print_runs(rows: list[dict[str, Any]], columns: list[Column]) -> None:
    """Print the runs with some columns, or the usual ones."""
    from rich.table import Table

    usual = ("step", "loss", "model", "attempt", "created")
    names = [column.name for column in columns] or usual
    table = Table("run", "state", *names, box=None)
    for row in rows:
        loss = "" if row["loss"] is None else f"{row['loss']:.4f}"
        count = "?" if row["step"] is None else row["step"]
        steps = "?" if row["steps"] is None else row["steps"]
        attempt = "?" if row["attempt"] is None else str(row["attempt"])
        cells = (f"{count}/{steps}", loss, row["model"] or "?", attempt, clock(row["created"]))
        chosen = [column.text(row) for column in columns] or cells
        table.add_row(row["name"], row["message"], *chosen)
    display.print_table(display.console(), table)


def print_run(run: RunDirectory, document: dict[str, Any], job: Job | None) -> None:
    """Print `runs show`."""
    from nanoscale.view.run.live import figures

    steps = "?" if document["steps"] is None else document["steps"]
    rows = {
        "run": str(run.path),
        "state": f"{document['message']} (attempt {document['attempt']})",
        "model": document["model"] or "?",
        "created": clock(document["created"]),
        "step": f"{document['step']}/{steps}",
        "checkpoints": ", ".join(map(str, document["checkpoints"])) or "none",
    }
    if document["tags"]:
        rows["tags"] = ", ".join(document["tags"])
    if job is not None:
        rows["slurm"] = job.sentence()
        output = output_of(run, job.submission)
        if output is not None:
            rows["its output"] = str(output)
    if run.profile.exists():
        rows["profile"] = str(run.profile)
    if document["metrics"]:
        rows |= figures(document["metrics"])
    if document["failure"]:
        cause = document["failure"]
        rows["failure"] = f"{cause['diagnosis']} (rank {cause['rank']} on {cause['host']})"
        rows["log"] = str(run.path / cause["log"])
    for label, value in rows.items():
        display.show(f"{label:<12} {value}")
    for event in document["events"]:
        display.show(f"{clock(event['time'])}  {event['kind']:<10} {event['message']}")

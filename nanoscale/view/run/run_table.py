"""The runs of `runs ls` and `runs show`: their values, columns by name, and conditions on them."""

import re
import shlex
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from operator import eq, ge, gt, le, lt, ne
from typing import Any, NoReturn

from nanoscale.common import display
from nanoscale.common.errors import UserError, refuse_option
from nanoscale.common.json_text import Json
from nanoscale.common.units import clock
from nanoscale.config import reference
from nanoscale.config.composing.frozen import read_values
from nanoscale.config.violations import nearest_key, shown
from nanoscale.launch.batch.jobs import Job, in_words, output_of, way_on
from nanoscale.runs import events, failure, lock, metrics, status
from nanoscale.runs.changes import TAGS_KEY, current_tags, read_tags
from nanoscale.runs.directory import RunDirectory
from nanoscale.runs.goodput import goodput
from nanoscale.view.blocks import Column, show_table, table

Row = dict[str, Any]
STATES = (
    "name", "state", "step", "steps", "loss", "model", "attempt", "exit_code", "created", "started", "ended",
)  # fmt: skip
"""The names of a row that are neither metrics nor keys; they come first."""
SUMMARY = (*STATES, "path", "in_progress", "message", "job")
"""The names of a run's summary."""
_LONGEST = 40
"""The most characters of a damaged run's problem in a list."""
_TIMES = ("created", "started", "ended", "time")
_COMPARE = {"=": eq, "!=": ne, "<": lt, "<=": le, ">": gt, ">=": ge}
_CONDITION = re.compile(r"([\w./-]+?)\s*(!=|<=|>=|=|<|>)\s*(.*)", re.S)


@dataclass(frozen=True)
class RunColumn:
    """A value of every run: a column of `runs ls`, or a part of a condition."""

    name: str
    """The name as it was typed."""
    key: str
    """The full name of a configuration key; otherwise the same."""

    @property
    def is_key(self) -> bool:
        return "." in self.key and self.key in reference.declared()

    def text(self, row: Row) -> str:
        """Return the value of a run as text; a time in the form that a condition compares."""
        value = row[self.name]
        if self.key in _TIMES:
            return clock(value)
        if value is None:
            return "null" if self.is_key else ""
        return f"{value:.5g}" if isinstance(value, float) else shown(value)

    def order(self, row: Row) -> tuple[int, Any]:
        """Return a key to sort known values by: numbers first, then texts."""
        value = row[self.name]
        return (0, value) if isinstance(value, (int, float)) else (1, self.text(row))


@dataclass(frozen=True)
class Condition:
    """A comparison of a column with a text or a number."""

    column: RunColumn
    operator: str
    operand: str

    def holds(self, row: Row) -> bool:
        value, number = row[self.column.name], _number(self.operand)
        if isinstance(value, list):
            return (self.operand in map(shown, value)) == (self.operator == "=")
        if number is not None and isinstance(value, (int, float)) and not isinstance(value, bool):
            return bool(_COMPARE[self.operator](value, number))
        if value is None and self.operator not in ("=", "!="):
            return False
        text = "null" if value is None else self.column.text(row)
        return bool(_COMPARE[self.operator](text, self.operand))


def column(name: str, runs: Sequence[RunDirectory], option: str, typed: str) -> RunColumn:
    """Return the column of a name: a state, a metric, or a configuration key by its full name or last word.

    Args:
        runs: their metrics are known, too.
        option, typed: the option that names the column, and its value, for the error.

    Raises:
        UserError: nothing has this name, or several keys have it.
    """
    keys = reference.declared()
    if name in (*STATES, *metrics.known_metrics()) or name in keys:
        return RunColumn(name, name)
    full = [key for key in keys if key.rpartition(".")[2] == name]
    if len(full) == 1:
        return RunColumn(name, full[0])
    if full:
        _refuse_name(name, f"is the last word of {len(full)} keys", full, option, typed)
    logged = {key for run in runs for key in _last(run)}
    if name not in logged:
        words = {key.rpartition(".")[2] for key in keys}
        known = dict.fromkeys([*STATES, *metrics.known_metrics(), *sorted(logged), *keys])
        near = nearest_key(name, list(dict.fromkeys([*known, *sorted(words)])))
        clear = [it for it in near if it in known]
        what = "is not a metric, a key or a state of runs"
        _refuse_name(name, what, clear or near, option, typed)
    return RunColumn(name, name)


def condition(text: str, runs: Sequence[RunDirectory]) -> Condition:
    """Return a condition as in `state=failed` or `eval_loss<3`.

    Raises:
        UserError: it has another form, or its column is unknown.
    """
    match = _CONDITION.fullmatch(text)
    if match is None:
        message = "must be a column, one of = != < > <= >= and a value"
        refuse_option("--where", text, message, "--where state=failed")
    name, operator, operand = match.groups()
    return Condition(column(name, runs, "--where", text), operator, operand)


def values(run: RunDirectory, columns: Iterable[RunColumn]) -> Row:
    """Return the values of a run that its summary does not have. Raises UserError if a file is damaged."""
    wanted = [it for it in columns if it.key not in STATES]
    keys = read_values(run.config, {it.key for it in wanted if it.is_key})
    if TAGS_KEY in keys:
        keys[TAGS_KEY] = current_tags(run, keys[TAGS_KEY])
    logged = {it.key: metrics.last(run, it.key) or {} for it in wanted if not it.is_key}
    return {it.name: keys[it.key] if it.is_key else logged[it.key].get(it.key) for it in wanted}


def _last(run: RunDirectory) -> Row:
    try:
        return metrics.last(run) or {}
    except UserError:
        return {}


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def _refuse_name(name: str, what: str, near: Iterable[str], option: str, typed: str) -> NoReturn:
    """Refuse a name within the value of an option."""
    word = re.compile(rf"(?<![\w./]){re.escape(name)}(?![\w./])")
    instead = (f"{option} {shlex.quote(word.sub(it, typed))}" for it in near)
    refuse_option(option, typed, f"`{name}` {what}", *instead)


# --- rows -----------------------------------------------------------------------------------------


def row(run: RunDirectory, job: Job | None, columns: list[RunColumn]) -> Json:
    """Return a run's values, or the problem of a damaged file: the other runs are listed anyway."""
    try:
        return values(run, columns) | summary(run, job)
    except UserError as error:
        unknown = dict.fromkeys((*(it.name for it in columns), *SUMMARY))
        return unknown | {"name": run.name, "path": str(run.path), "message": f"damaged: {error}"}


def summary(run: RunDirectory, job: Job | None = None) -> Json:
    """Summarize one run in a few values."""
    now, last = status.require(run), metrics.last(run)
    keys = read_values(run.config, ("train.steps", "model.name"))
    in_progress = lock.owner(run) is not None
    return {
        "name": run.name,
        "path": str(run.path),
        **vars(now),
        "in_progress": in_progress,
        "message": in_words(now.state, in_progress, job),
        "job": job.document() if job else None,
        "step": metrics.reached(run, last),
        "steps": keys["train.steps"],
        "model": keys["model.name"],
        "loss": last.get("loss") if last else None,
    }


def document(run: RunDirectory, job: Job | None) -> Json:
    """Return the document of `runs show --json`."""
    cause = failure.read(run)
    return {
        **summary(run, job),
        "tags": read_tags(run),
        "checkpoints": run.checkpoint_steps(),
        "metrics": metrics.last(run),
        "failure": asdict(cause) if cause else None,
        "goodput": known.document() if (known := goodput(run)) else None,
        "events": events.read(run),
    }


_FIRST = (
    Column("run", "name"),
    Column("state", lambda row: row["message"] if row["state"] else _short(row), is_text=True),
)
_USUAL = (
    Column("step", lambda row: f"{_known(row['step'])}/{_known(row['steps'])}", is_text=True),
    Column("loss", lambda row: "" if row["loss"] is None else f"{row['loss']:.4f}"),
    Column("model", lambda row: row["model"] or "?", is_text=True, optional=1),
    Column("attempt", lambda row: _known(row["attempt"]), optional=1),
    Column("created", lambda row: clock(row["created"]), is_text=True, optional=1),
)


def print_runs(rows: list[Json], columns: list[RunColumn]) -> None:
    """Print the runs with some columns, or the usual ones."""
    chosen = [Column(column.name, column.text, is_text=True) for column in columns] or _USUAL
    show_table(display.console(), table([*_FIRST, *chosen], rows))


def _short(row: Row) -> str:
    """Return the problem of a damaged run in few words; `runs show` has the whole."""
    text = row["message"].replace(f"{row['path']}/", "")
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 1]}…"


def _known(value: int | None) -> str:
    return "?" if value is None else str(value)


def print_run(run: RunDirectory, document: Json, job: Job | None) -> None:
    """Print `runs show`."""
    from nanoscale.view.run.live import figures

    rows = {
        "run": str(run.path),
        "state": f"{document['message']} (attempt {document['attempt']})",
        "model": document["model"] or "?",
        "created": clock(document["created"]),
        "step": f"{document['step']}/{_known(document['steps'])}",
        "checkpoints": ", ".join(map(str, document["checkpoints"])) or "none",
        "logs": str(run.attempt_logs(document["attempt"])),
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
    if document["goodput"]:
        rows["goodput"] = document["goodput"]["sentence"]
    if document["failure"]:
        cause = document["failure"]
        rows["failure"] = f"{cause['diagnosis']} (rank {cause['rank']} on {cause['host']})"
        rows["log"] = str(run.path / cause["log"])
    if document["state"] != "completed" and not (document["in_progress"] or (job and job.is_there)):
        rows["continue"] = way_on(run)
    for label, value in rows.items():
        display.show(f"{label:<12} {value}")
    for event in document["events"]:
        display.show(f"{clock(event['time'])}  {event['kind']:<10} {event['message']}")

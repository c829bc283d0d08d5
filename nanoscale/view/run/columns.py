"""The columns of `nanoscale runs ls`: metrics, keys and states by name, and conditions on them."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from nanoscale.common.errors import UserError, Violation
from nanoscale.common.units import clock
from nanoscale.config import reference
from nanoscale.config.composing.frozen import read_values
from nanoscale.config.violations import nearest_key, shown
from nanoscale.runs import metrics, tags
from nanoscale.runs.directory import RunDirectory

Row = dict[str, Any]
STATES = (
    "name", "state", "step", "steps", "loss", "model", "attempt", "exit_code", "created", "started", "ended",
)  # fmt: skip
"""The names of a row that are neither metrics nor keys; they come first."""
SUMMARY = (*STATES, "path", "in_progress", "message", "job")
"""The names of a run's summary."""
_TIMES = ("created", "started", "ended", "time")
_CONDITION = re.compile(r"([\w./-]+?)\s*(!=|<=|>=|=|<|>)\s*(.*)", re.S)


@dataclass(frozen=True)
class Column:
    """A value of every run."""

    name: str
    """The name as it was typed, or the full name of a key whose last word is a name of the summary."""
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

    column: Column
    operator: str
    operand: str

    def holds(self, row: Row) -> bool:
        value, number = row[self.column.name], _number(self.operand)
        if isinstance(value, list):
            return (self.operand in map(shown, value)) == (self.operator == "=")
        if number is not None and isinstance(value, (int, float)) and not isinstance(value, bool):
            return _compare(value, self.operator, number)
        if value is None and self.operator not in ("=", "!="):
            return False
        text = "null" if value is None else self.column.text(row)
        return _compare(text, self.operator, self.operand)


def column(name: str, runs: Sequence[RunDirectory], option: str, typed: str) -> Column:
    """Return the column of a name: a state, a metric, or a configuration key by its full name or last word.

    Args:
        runs: their metrics are known, too.
        option, typed: the option that names the column, and its value, for the error.

    Raises:
        UserError: nothing has this name, or several keys have it.
    """
    keys = reference.declared()
    if name in (*STATES, *metrics.NAMES) or name in keys:
        return Column(name, name)
    full = [key for key in keys if key.rpartition(".")[2] == name]
    if len(full) == 1:
        return Column(full[0] if name in SUMMARY else name, full[0])
    if full:
        raise _ill_named(name, f"is the last word of {len(full)} keys", full, option, typed)
    logged = {key for run in runs for key in _last(run)}
    if name in logged:
        return Column(name, name)
    words = {key.rpartition(".")[2] for key in keys}
    known = [*STATES, *metrics.NAMES, *sorted(logged), *keys, *sorted(words)]
    near = nearest_key(name, list(dict.fromkeys(known)))
    unambiguous = [it for it in near if it in (*STATES, *logged, *metrics.NAMES) or it in keys]
    raise _ill_named(
        name, "is not a metric, a key or a state of runs", unambiguous or near, option, typed
    )


def condition(text: str, runs: Sequence[RunDirectory]) -> Condition:
    """Return a condition as in `state=failed` or `eval_loss<3`.

    Raises:
        UserError: it has another form, or its column is unknown.
    """
    match = _CONDITION.fullmatch(text)
    if match is None:
        message = "must be a column, one of = != < > <= >= and a value"
        found = Violation("--where", text, "command line", message, ("--where state=failed",))
        raise UserError("usage", f"--where {text}: {message}", [found])
    name, operator, operand = match.groups()
    return Condition(column(name, runs, "--where", text), operator, operand)


def values(run: RunDirectory, columns: Iterable[Column]) -> Row:
    """Return the values of a run that its summary does not have. Raises UserError if a file is damaged."""
    wanted = [it for it in columns if it.key not in STATES]
    keys = read_values(run.config, {it.key for it in wanted if it.is_key})
    if tags.KEY in keys:
        keys[tags.KEY] = tags.changed(run, keys[tags.KEY])
    return {it.name: keys[it.key] if it.is_key else _metric(run, it.key) for it in wanted}


def _metric(run: RunDirectory, name: str) -> float | None:
    record = metrics.last(run, name)
    return record[name] if record else None


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


def _compare(value: Any, operator: str, operand: Any) -> bool:
    if operator in ("=", "!="):
        return bool(value == operand) == (operator == "=")
    below = value < operand or (operator == "<=" and value == operand)
    return (
        below if operator in ("<", "<=") else not below and (value != operand or operator == ">=")
    )


def _ill_named(name: str, what: str, near: Iterable[str], option: str, typed: str) -> UserError:
    """Return the error for a name within the value of an option."""
    word = re.compile(rf"(?<![\w./]){re.escape(name)}(?![\w./])")
    instead = tuple(f"{option} {shlex.quote(word.sub(it, typed))}" for it in near)
    message = f"`{name}` {what}"
    found = Violation(option, typed, "command line", message, instead)
    return UserError("usage", f"{option} {typed}: {message}", [found])

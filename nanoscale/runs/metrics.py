"""The file metrics.jsonl: one object per logged step. Rank 0 writes it, everybody may read it.

Predictions are compared with the steady steps, after the warm-up.
"""

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from statistics import median

from nanoscale.config.values import yaml_file
from nanoscale.runs import events, jsonlines, status
from nanoscale.runs.directory import RunDirectory
from nanoscale.runs.documents import damaged, fits_type
from nanoscale.runs.jsonlines import Object


@dataclass(frozen=True)
class Metric:
    """A metric that any run may have."""

    meaning: str
    """Its meaning, for the documentation."""
    label: str = ""
    """Its name on the screen; metrics of one label are shown together. Empty: it is not shown."""
    form: str = ""
    """The format of its value, or a unit that the view formats: s, GiB or steps."""
    null: str = "not finite"
    """The text of the value null."""
    rises: bool = False
    """True if it is better if higher."""
    chart: str = ""
    """The title of its chart in a report; metrics of one title share it. Empty: it has none."""
    scale: str = ""
    """The vertical axis of its chart: logarithmic, from zero, or by the values."""


WARM_UP = 3
"""Steps after each start that do not count: memory is allocated, code compiled, files are read first."""


@cache
def known_metrics() -> dict[str, Metric]:
    """Return the metrics by name: the rows of `metrics.yaml`."""
    rows = yaml_file.read(Path(__file__).with_suffix(".yaml")).content
    return {name: Metric(**row) for name, row in rows.items()}


def rises(name: str) -> bool:
    """True if a metric is better if higher."""
    return name in known_metrics() and known_metrics()[name].rises


def read(run: RunDirectory) -> list[Object]:
    """Return every complete line so far, without a torn last line.

    Raises:
        UserError: the file is damaged.
    """
    return [_checked(run, record) for record in jsonlines.read(run.metrics)]


def last(run: RunDirectory, name: str | None = None) -> Object | None:
    """Return the newest logged step, or the newest that has a metric."""
    record = jsonlines.last(run.metrics, name)
    return None if record is None else _checked(run, record)


def reached(run: RunDirectory, record: Object | None) -> int:
    """Return the last known trained step, given the newest record: an attempt that fails may have trained
    further."""
    now, end = status.read(run), events.last(run, "end")
    is_newest = end is not None and end["time"] >= (now.started or 0.0)
    return max(record["step"] if record else 0, end.get("step", 0) if end and is_newest else 0)


@dataclass(frozen=True)
class Steady:
    """The steady steps of a run's present configuration."""

    steps: int
    """The number of steps; a logged record may be the mean of several."""
    seconds: float | None
    """Seconds of a step, the median of the records; None if there are none."""
    tokens_per_s: float | None
    """The median of the same records."""
    memory_gib: float | None
    """The largest logged value, over all steps."""
    after: int
    """The step after which the present configuration was trained."""


def steady(run: RunDirectory) -> Steady:
    """Summarize metrics.jsonl for steps of the run's present configuration."""
    first_step, starts = _configuration_start(run)
    steps, times, speeds, memory = 0, [], [], []
    previous = 0
    for record in read(run):
        step, seconds = record["step"], record.get("step_time_s")
        first, previous = previous + 1, step
        if step <= first_step:
            continue
        if (memory_used := record.get("memory_gib")) is not None:
            memory.append(memory_used)
        # A record holds the mean since the previous one, or since a start between them.
        is_warming_up = any(start < step and first <= start + WARM_UP for start in starts)
        if seconds is not None and seconds > 0 and not is_warming_up:
            steps += step - first + 1
            times.append(seconds)
            speeds += [speed] if (speed := record.get("tokens_per_s")) else []
    seconds, speed = (median(values) if values else None for values in (times, speeds))
    return Steady(steps, seconds, speed, max(memory, default=None), first_step)


def _configuration_start(run: RunDirectory) -> tuple[int, list[int]]:
    """Return the last step before the present configuration was trained, and the last step before each
    attempt."""
    resumed = events.starts(run)
    changed = [number for number in resumed if run.attempt_config(number).exists()]
    present = [step for number, step in resumed.items() if number > max(changed, default=-1)]
    return min(present, default=0), sorted({0, *resumed.values()})


def _checked(run: RunDirectory, record: Object) -> Object:
    """Return a record of numbers; null stands for a number that is not finite."""
    if type(record.get("step")) is not int:
        raise damaged(run.metrics, "has a record without a `step`")
    return {name: value if fits_type(float, value) else None for name, value in record.items()}

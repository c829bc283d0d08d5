"""The file metrics.jsonl: one object per logged step. Rank 0 writes it, everybody may read it.

Predictions are compared with the steady steps, those after the warm-up.
"""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median

from nanoscale.runs import events, jsonlines, status
from nanoscale.runs.directory import RunDirectory
from nanoscale.runs.documents import damaged, fits_type
from nanoscale.runs.jsonlines import Object, Tail

NAMES = (
    "step", "time", "loss", "grad_norm", "lr", "tokens", "step_time_s", "tokens_per_s", "samples_per_s", "mfu",
    "hfu", "memory_gib", "gpu_utilization", "gpu_power_w", "gpu_temperature_c", "gpu_clock_mhz",
    "gpu_memory_gib", "gpus_slowed", "eval_loss", "loss_scale", "skipped_steps", "moe_imbalance",
    "attention_score", "preferred", "margin", "eval_preferred", "eval_margin", "accuracy", "eval_accuracy",
)  # fmt: skip
"""The metrics that any run may have; evaluations of several data sets add `eval_loss/NAME`, and those of
tasks `eval_tasks/TASK/METRIC`."""
RISING = frozenset({
    "tokens_per_s", "samples_per_s", "mfu", "hfu", "preferred", "margin", "eval_preferred", "eval_margin",
    "accuracy", "eval_accuracy",
})  # fmt: skip
"""The names of metrics that are better if higher."""
WARM_UP = 3
"""Steps after each start that do not count: memory is allocated, code compiled, files are read first."""


def read(run: RunDirectory) -> list[Object]:
    """Return every complete line so far, without a torn last line.

    Raises:
        UserError: the file is damaged.
    """
    return [_checked(run, record) for record in jsonlines.read(run.metrics)]


def follow(run: RunDirectory) -> Tail:
    """Return a reader whose `poll()` returns the objects added since the previous call."""
    return Tail(run.metrics)


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
    memory_gib: float | None
    """The largest logged value, over all steps."""
    after: int
    """The step after which the present configuration was trained."""


def steady(run: RunDirectory) -> Steady:
    """Summarize metrics.jsonl for steps of the run's present configuration."""
    first_step, starts = _configuration_start(run)
    steps, times, memory = 0, [], []
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
    return Steady(steps, median(times) if times else None, max(memory, default=None), first_step)


def _configuration_start(run: RunDirectory) -> tuple[int, list[int]]:
    """Return the step after which the present configuration was trained, and those after which an attempt
    began."""
    resumed = events.starts(run)
    changed = [number for number in resumed if run.attempt_config(number).exists()]
    present = [step for number, step in resumed.items() if number > max(changed, default=-1)]
    return min(present, default=0), sorted({0, *resumed.values()})


def _checked(run: RunDirectory, record: Object) -> Object:
    """Return a record of numbers; null stands for a number that is not finite."""
    if type(record.get("step")) is not int:
        raise damaged(run.metrics, "has a record without a `step`")
    return {name: value if fits_type(float, value) else None for name, value in record.items()}

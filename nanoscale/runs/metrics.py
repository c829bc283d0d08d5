"""The file metrics.jsonl: one object per logged step. Rank 0 writes it, everybody may read it.

Predictions are compared with the steady steps, after the warm-up.
"""

from dataclasses import dataclass
from statistics import median

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


_CLASSES = "with `train.objective=classify`: see [methods.md](methods.md#classification)"
_ANSWERS = "with an objective of answers: see [methods.md](methods.md#preferences)"
METRICS = {
    "step": Metric("optimizer step"),
    "time": Metric("UNIX time in seconds"),
    "loss": Metric("mean over the predicted tokens of the global batch", "loss", "{:.4f}", chart="loss"),
    "lr": Metric("learning rate", "lr", "{:.2e}", chart="learning rate", scale="from zero"),
    "grad_norm": Metric("norm of the gradients before clipping", "grad norm", "{:.3f}",
        chart="gradient norm", scale="logarithmic"),
    "tokens": Metric("tokens consumed so far"),
    "tokens_per_s": Metric("tokens per second, all ranks together", "tokens/s", "{:,.0f}", rises=True,
        chart="tokens/s", scale="from zero"),
    "samples_per_s": Metric("samples per second, all ranks together", "samples/s", "{:,.4g}", rises=True),
    "mfu": Metric("model FLOPs utilization; null if the device's peak is unknown. Set `cluster.peak_tflops`, "
        "or describe the device, as in `cluster=h100-sxm`", "MFU", "{:.1%}", null="", rises=True),
    "hfu": Metric("the same with the recomputed operations of activation checkpointing, by the plan; null if "
        "`mfu` or the plan is unknown", "HFU", "{:.1%}", null="", rises=True),
    "memory_gib": Metric("peak allocated memory on a GPU, peak resident memory on a CPU; the largest over the "
        "ranks", "memory", "GiB"),
    "step_time_s": Metric("time of a step", "step time", "s"),
    "data_wait": Metric("share of the time in which the training waited for texts that are prepared beside it",
        "waits for data", "{:.0%}"),
    "eval_time_s": Metric("on steps with an evaluation: seconds that it took"),
    "goodput": Metric("share of the run's time, from its first attempt's beginning, in which steps of its "
        "history were trained: see [run-directory.md](run-directory.md#goodput)", rises=True),
    "gpu_utilization": Metric("where NVML answers: percent of time, the mean over the ranks' GPUs", "GPU",
        "{:.0f}%"),
    "gpu_power_w": Metric("the mean power of the ranks' GPUs", "GPU", "{:,.0f} W"),
    "gpu_temperature_c": Metric("the temperature of the hottest GPU", "GPU", "{:.0f} °C"),
    "gpu_clock_mhz": Metric("the slowest SM clock", "GPU", "{:,.0f} MHz"),
    "gpu_memory_gib": Metric("the most memory in use on a GPU, by any process"),
    "gpus_slowed": Metric("GPUs whose clock is lowered by heat, the hardware or the power supply", "GPU",
        "{:.0f} slowed down"),
    "loss_scale": Metric("factor of the loss, with fp16", "loss scale", "{:g}"),
    "skipped_steps": Metric("skipped steps so far: their gradients were not finite", "skipped", "steps"),
    "moe_imbalance": Metric("with experts: the largest load of an expert over the mean load, in the layer "
        "where this is largest", "expert imbalance", "{:.2f}"),
    "attention_score": Metric("with `optimizer.qk_clip`: the largest score of attention in the last step"),
    "preferred": Metric(_ANSWERS, "preferred", "{:.1%}", rises=True),
    "margin": Metric(_ANSWERS, rises=True),
    "accuracy": Metric(_CLASSES, "accuracy", "{:.1%}", rises=True),
    "eval_loss": Metric("on steps with an evaluation", "eval loss", "{:.4f}", chart="loss"),
    "eval_preferred": Metric(_ANSWERS, "eval preferred", "{:.1%}", rises=True),
    "eval_margin": Metric(_ANSWERS, rises=True),
    "eval_accuracy": Metric(_CLASSES, "eval accuracy", "{:.1%}", rises=True),
}  # fmt: skip
"""The metrics by name; evaluations of several data sets add `eval_loss/NAME`, and evaluations of tasks
`eval_tasks/TASK/METRIC`."""
RISING = frozenset(name for name, metric in METRICS.items() if metric.rises)
WARM_UP = 3
"""Steps after each start that do not count: memory is allocated, code compiled, files are read first."""


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

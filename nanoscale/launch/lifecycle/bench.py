"""The measurements of `nanoscale bench` as one document.

They are compared with another run or an earlier bench, or with the same job on other numbers of devices or
hosts.
"""

import shutil
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import fmean, median, pstdev

from nanoscale.common.errors import UserError
from nanoscale.common.json_text import Json, parse
from nanoscale.config.composing.frozen import load
from nanoscale.config.hardware.data_sheets import kind, peak_of, usual_mfu
from nanoscale.config.model_math import (
    experts,
    parameters,
    recomputed_factor,
    trained_flops_per_token,
)
from nanoscale.config.resolved import ResolvedConfig
from nanoscale.launch.fleet.signals import unwinding
from nanoscale.runs import fence, metrics
from nanoscale.runs.directory import RunDirectory
from nanoscale.runs.documents import fits_type
from nanoscale.runs.metrics import WARM_UP, steady

COMPARED = (
    "step_time_s", "tokens_per_s", "tokens_per_s_per_device", "mfu", "hfu", "mfu_of_measured",
    "memory_gib", "matmul_tflops",
)  # fmt: skip
"""Figures that are compared with another's."""
_KEPT = (
    "world_size", "global_batch", "step_time_s", "tokens_per_s", "tokens_per_s_per_device", "memory_gib",
    "mfu",
)  # fmt: skip
"""Figures of each point of a scaling test."""
_MEASURE = "nanoscale bench"


@contextmanager
def checkpoint_folder(config: ResolvedConfig) -> Iterator[Path | None]:
    """Provide a folder next to the runs for the checkpoint to measure; None if none is requested.

    The folder of runs is where checkpoints are written, and all hosts share it.
    """
    if not config.checkpoint.every:
        yield None
        return
    root = Path(config.run.root).absolute()
    created = [path for path in (root, *root.parents) if not path.exists()]
    root.mkdir(parents=True, exist_ok=True)
    # Named before it is made: a signal between the two would leave a folder that nobody knows.
    scratch = RunDirectory(root / f".bench-{uuid.uuid4().hex[:8]}")
    try:
        with unwinding():
            scratch.checkpoints.mkdir(parents=True)
            fence.begin(scratch, 1)
            yield scratch.path
    finally:
        shutil.rmtree(scratch.path, ignore_errors=True)
        for path in created:
            if not any(path.iterdir()):
                path.rmdir()


def document(config: ResolvedConfig, measured: Json, plan: Json | None) -> Json:
    """Return the document of `bench --json`, from the ranks' measurements.

    Args:
        plan: the prediction; None if there is none.
    """
    layout, times = config.parallel, measured["times_s"]
    seconds = median(times)
    speed = config.tokens_per_step / fmean(times)
    speed_per_device = speed / config.world_size
    checkpoint = measured["checkpoint"]
    if checkpoint and "stall_s" in checkpoint:
        interval_s = config.checkpoint.every * seconds
        if config.checkpoint.every_minutes:
            interval_s = min(interval_s, 60 * config.checkpoint.every_minutes)
        stall_share = checkpoint["stall_s"] / interval_s
        checkpoint = {**checkpoint, "every": config.checkpoint.every, "share": stall_share}
    return {
        "model": config.model.name,
        "parameters": parameters(config.model),
        "backend": config.backend.name,
        "precision": kind(config.precision),
        "zero_stage": config.zero.stage,
        "layout": {
            name: getattr(layout, name) for name in ("dp", "dp_replicate", "tp", "pp", "cp", "ep")
        },
        "compile": config.backend.compile,
        "activation_checkpointing": layout.activation_checkpointing,
        "world_size": config.world_size,
        "device": measured["device"],
        "global_batch": config.train.global_batch,
        "micro_batch": config.train.micro_batch,
        "accumulation": config.accumulation,
        "seq_len": config.train.seq_len,
        "tokens_per_step": config.tokens_per_step,
        "steps": len(times),
        "step_time_s": seconds,
        "step_time_mean_s": fmean(times),
        "step_time_least_s": min(times),
        "step_time_most_s": max(times),
        "step_time_deviation_s": pstdev(times),
        "first_step_s": measured["first_step_s"],
        "tokens_per_s": speed,
        "tokens_per_s_per_device": speed_per_device,
        "loss": measured["loss"],
        "memory_gib": measured["memory_gib"],
        **_utilization(config, measured, speed_per_device, plan),
        "usual_mfu": usual_mfu(config),
        "parts": measured["parts"],
        "checkpoint": checkpoint,
        "predicted": _predicted(plan),
        "time": time.time(),
    }


def _utilization(
    config: ResolvedConfig, measured: Json, speed_per_device: float, plan: Json | None
) -> Json:
    """Return the utilization of the device: of its peak, and of its measured rate of large products."""
    name = None if measured["device"] == "cpu" else measured["device"]
    peak, rate = peak_of(config, name), measured["matmul_flops"]
    is_known = not experts(config.model)
    flops = speed_per_device * trained_flops_per_token(config) if is_known else None
    recomputed = recomputed_factor(config, plan)

    def share(reference: float | None, factor: float | None = 1.0) -> float | None:
        return flops * factor / reference if flops and reference and factor else None

    return {
        "model_tflops": flops / 1e12 if flops else None,
        "peak_tflops": peak / 1e12 if peak else None,
        "matmul_tflops": rate / 1e12,
        "mfu": share(peak),
        "hfu": share(peak, recomputed),
        "mfu_of_measured": share(rate),
        "hfu_of_measured": share(rate, recomputed),
    }


def _predicted(plan: Json | None) -> Json | None:
    if plan is None:
        return None
    memory = plan["memory"]["allocated_gib"] if plan["hardware"]["device"] != "cpu" else None
    names = ("step_time_s", "tokens_per_s", "mfu", "hfu")
    return {**{name: plan[name] for name in names}, "memory_gib": memory}


# --- comparison -----------------------------------------------------------------------------------


def read_other(name: str) -> Json:
    """Read the figures of a run, or of a bench that was stored with --json.

    Raises:
        UserError: it is neither.
    """
    file = Path(name).expanduser()
    if file.is_file():
        try:
            document = parse(file.read_text("utf-8"))
            figures = {key: document.get(key) for key in COMPARED}
            kinds = dict.fromkeys(COMPARED, float | None) | {"step_time_s": float}
            if wrong := [key for key, kind in kinds.items() if not fits_type(kind, figures[key])]:
                raise TypeError(f"{wrong[0]} is not a number")
        except (OSError, ValueError, AttributeError, TypeError) as error:
            text = f"--compare {name} is not the JSON of a bench ({type(error).__name__}: {error})"
            raise UserError("usage", f"{text}: {_MEASURE} … --json > FILE makes one") from None
        return {"name": name, **figures}
    return _run_figures(RunDirectory.open(name))


def _run_figures(run: RunDirectory) -> Json:
    """Return a run's figures, as far as metrics.jsonl has them: the median of the steps after the first
    ones."""
    steady_steps, config = steady(run), load(run.config)
    if steady_steps.seconds is None:
        message = f"it has logged no steps after the first {WARM_UP}"
        raise UserError("run", f"--compare {run.reference}: {message}")
    speed = config.tokens_per_step / steady_steps.seconds
    last = metrics.last(run) or {}
    mfu, speed_then = last.get("mfu"), last.get("tokens_per_s")
    return {
        "name": run.reference,
        **dict.fromkeys(COMPARED),
        "step_time_s": steady_steps.seconds,
        "tokens_per_s": speed,
        "tokens_per_s_per_device": speed / config.world_size,
        "mfu": mfu / speed_then * speed if mfu and speed_then else None,
        "memory_gib": steady_steps.memory_gib,
    }


def compare_figures(document: Json, other: Json) -> Json:
    """Return the other's figures, and the ratio of this one's to them, by name."""
    known = [name for name in COMPARED if document[name] and other[name]]
    ratios = {name: document[name] / other[name] for name in known}
    return {**other, "ratios": ratios}


# --- scaling --------------------------------------------------------------------------------------


def scaling_document(
    axis: str, counts: Sequence[int], measured: Sequence[Json], *, weak: bool
) -> Json:
    """Return the measurements with their speed-up and efficiency, each measured and planned.

    The speed-up is the ratio of the tokens/s to the first count's. The efficiency is the speed-up over
    the ratio of the numbers of ranks.

    Args:
        axis: `devices` or `hosts`.
        counts: the numbers of them, as far as they are measured.
        measured: the documents of `bench`, in the same order.
        weak: True if the global batch grows with the count.
    """
    first = measured[0]
    points = []
    for count, one in zip(counts, measured, strict=True):
        ranks = one["world_size"] / first["world_size"]
        point = {axis: count, **{name: one[name] for name in _KEPT}}
        point |= _gain(one["tokens_per_s"], first["tokens_per_s"], ranks)
        plan, plan_of_first = one["predicted"], first["predicted"]
        point["predicted"] = None
        if plan and plan_of_first:
            chosen = {name: plan[name] for name in ("step_time_s", "tokens_per_s")}
            gain = _gain(plan["tokens_per_s"], plan_of_first["tokens_per_s"], ranks)
            point["predicted"] = chosen | gain
        points.append(point)
    about = {name: first[name] for name in ("model", "precision", "backend", "device")}
    return {**about, "axis": axis, "weak": weak, "points": points, "benches": list(measured)}


def _gain(speed: float, first: float, ranks: float) -> Json:
    return {"speed_up": speed / first, "efficiency": speed / first / ranks}

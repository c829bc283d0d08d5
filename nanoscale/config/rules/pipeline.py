"""Rules of the pipeline: its schedule, its stages and its micro batches."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count

from nanoscale.config.rules.resolution import Resolution, divisors
from nanoscale.config.schema import Model
from nanoscale.config.stages import (
    IN_ROUNDS,
    ONE_STAGE,
    V_SHAPED,
    keeps_busy,
    stage_layers,
    takes,
    usual_virtual_stages,
)
from nanoscale.config.violations import override

_ONLY_WITH_PP = ("parallel.schedule", "parallel.layers_per_stage")


def resolve_virtual_stages(resolution: Resolution, model: Model) -> int:
    """Check the pipeline against the model; return the stages a rank."""
    layout = resolution.config.parallel
    if layout.pp == 1:
        for key in _ONLY_WITH_PP:
            resolution.refuse_idle("layout", key, "parallel.pp=1")
        if layout.virtual_stages != 1:
            resolution.refuse_idle("layout", "parallel.virtual_stages", "parallel.pp=1")
        return 1
    virtual = _virtual_stages(resolution)
    if layout.pp * virtual > model.layers:
        _too_many_stages(resolution, model, virtual)
    else:
        _layers_per_stage(resolution, model, layout.pp * virtual)
    if model.tie_embeddings:
        resolution.refuse(
            "layout",
            "model.tie_embeddings",
            f"cannot hold with parallel.pp={layout.pp}: the embedding belongs to the first stage and "
            "the head to the last",
            "model.tie_embeddings=false",
            without_pipeline(resolution),
        )
    return virtual


def without_pipeline(resolution: Resolution) -> str:
    """Return the overrides that lead to pp=1, and reset keys that would then be ignored."""
    layout = resolution.config.parallel
    words = ["parallel.pp=1"]
    if layout.schedule != "1f1b":
        words.append("parallel.schedule=1f1b")
    if layout.virtual_stages not in ("auto", 1):
        words.append("parallel.virtual_stages=auto")
    if layout.layers_per_stage is not None:
        words.append("parallel.layers_per_stage=null")
    return " ".join(words)


def _virtual_stages(resolution: Resolution) -> int:
    layout = resolution.config.parallel
    asked, schedule = layout.virtual_stages, layout.schedule
    usual = usual_virtual_stages(schedule)
    if asked == "auto":
        return usual
    fixed = schedule in ONE_STAGE or schedule in V_SHAPED
    if not fixed or asked == usual:
        return asked
    resolution.refuse(
        "layout",
        "parallel.virtual_stages",
        f"must be {usual} where parallel.schedule={schedule}",
        f"parallel.virtual_stages={usual}",
        "parallel.schedule=" + ("interleaved-1f1b" if schedule in ONE_STAGE else "zero-bubble"),
    )
    return usual


def _too_many_stages(resolution: Resolution, model: Model, virtual: int) -> None:
    layout = resolution.config.parallel
    fewer = model.layers // layout.pp
    fixed = layout.schedule in ONE_STAGE or layout.schedule in V_SHAPED
    shorter = model.layers // virtual
    resolution.refuse(
        "layout",
        "parallel.pp",
        f"makes pp·virtual stages = {layout.pp}·{virtual} = {layout.pp * virtual} stages, and "
        f"model.layers={model.layers} leaves some stages without a block",
        f"parallel.virtual_stages={fewer}" if fewer and not fixed else None,
        "parallel.schedule=1f1b parallel.virtual_stages=1" if fewer and virtual > 1 else None,
        f"parallel.pp={shorter}" if shorter > 1 else without_pipeline(resolution),
    )


def _layers_per_stage(resolution: Resolution, model: Model, stages: int) -> None:
    asked = resolution.config.parallel.layers_per_stage
    if asked is None or (len(asked) == stages and sum(asked) == model.layers):
        return
    if len(asked) != stages:
        problem = f"has {len(asked)} entries, and there are pp·virtual stages = {stages} stages"
    else:
        problem = f"adds up to {sum(asked)} blocks, and model.layers={model.layers}"
    resolution.refuse(
        "layout",
        "parallel.layers_per_stage",
        problem,
        override("parallel.layers_per_stage", stage_layers(model, stages, None)),
        "parallel.layers_per_stage=null",
    )


# --- micro batches --------------------------------------------------------------------------------


def largest_micro_batch(resolution: Resolution, samples: int) -> int | None:
    """Return the largest micro batch of a rank's samples a step that keeps the pipeline busy.

    If there are too few samples for that, return the smallest that the schedule supports, or None.
    """
    layout = resolution.config.parallel
    counts = [n for n in divisors(samples) if takes(layout.schedule, layout.pp, n)]
    busy = keeps_busy(layout.schedule, layout.pp) if layout.pp > 1 else 1
    enough = [n for n in counts if n >= busy] or counts[-1:]
    return samples // enough[0] if enough else None


def micro_batches(resolution: Resolution, dp: int) -> None:
    """Check the number of micro batches against the schedule; the batch is divisible as required."""
    layout, train = resolution.config.parallel, resolution.config.train
    schedule, pp = layout.schedule, layout.pp
    samples, micro = train.global_batch // dp, train.micro_batch
    if micro == "auto":
        if largest_micro_batch(resolution, samples) is not None:
            return
        key, number, micro = "train.global_batch", samples, 1
        makes = f"makes at most {samples}"
    else:
        key, number = "train.micro_batch", samples // micro
        if takes(schedule, pp, number):
            return
        makes = f"makes global_batch/(dp·micro_batch) = {number}"
    sizes = [samples // n for n in _around(divisors(samples), number, schedule, pp)]
    counts = _around(range(1, number + 2 * pp + 1), number, schedule, pp)
    resolution.refuse(
        "layout",
        key,
        f"{makes} micro batches a step; parallel.schedule={schedule} needs "
        f"{_need(schedule, pp, number)}",
        *(f"train.micro_batch={size}" for size in sizes),
        *(f"train.global_batch={n * micro * dp}" for n in counts),
        "parallel.schedule=" + ("gpipe" if schedule in ONE_STAGE else "looped-bfs"),
    )


def near_batches(resolution: Resolution, step: int, dp: int) -> Iterator[int]:
    """Yield the nearest global batches that are multiples of `step` and that the schedule supports."""
    layout, train = resolution.config.parallel, resolution.config.train
    micro = train.micro_batch

    def fits(batch: int) -> bool:
        if micro == "auto":
            return largest_micro_batch(resolution, batch // dp) is not None
        return takes(layout.schedule, layout.pp, batch // (dp * micro))

    start = train.global_batch // step * step
    yield from (n for n in [next(filter(fits, range(start, 0, -step)), None)] if n)
    yield next(filter(fits, count(start + step, step)))


def _need(schedule: str, pp: int, number: int) -> str:
    if schedule in IN_ROUNDS:
        return f"rounds of equal length: {number} is not a multiple of its {number // pp} rounds of pp={pp}"
    least = keeps_busy(schedule, pp)
    return f"at least {least}, as many as there are stages"


def _around(numbers: Iterator[int] | range, value: int, schedule: str, pp: int) -> list[int]:
    """Return the legal numbers next to `value`: the last below it and the first above."""
    legal = [n for n in numbers if takes(schedule, pp, n)]
    below, above = [n for n in legal if n < value], [n for n in legal if n > value]
    return [*below[-1:], *above[:1]]

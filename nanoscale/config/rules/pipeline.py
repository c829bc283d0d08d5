"""Rules of the pipeline: its schedule, its stages and its micro batches."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count

from nanoscale.config.rules.resolution import Rule, data_parallel, divisors, idle
from nanoscale.config.schema import Config, Parallel
from nanoscale.config.stages import (
    IN_ROUNDS,
    ONE_STAGE,
    SPLIT_BACKWARD,
    V_SHAPED,
    keeps_busy,
    stage_layers,
    takes,
    usual_virtual_stages,
)
from nanoscale.config.violations import override


def has_pipeline(config: Config) -> bool:
    return config.parallel.pp > 1


def splits_backward(config: Config) -> bool:
    """True if a block's backward pass is run in two parts, for inputs and for weights."""
    return has_pipeline(config) and config.parallel.schedule in SPLIT_BACKWARD


def virtual_stages(layout: Parallel) -> int:
    """Return the stages a rank."""
    if layout.pp == 1:
        return 1
    if layout.virtual_stages == "auto" or _has_fixed_stages(layout):
        return usual_virtual_stages(layout.schedule)
    return layout.virtual_stages


def without_pipeline(config: Config) -> str:
    """Return the overrides that lead to pp=1, and reset keys that would then be ignored."""
    layout = config.parallel
    overrides = ["parallel.pp=1"]
    if layout.schedule != "1f1b":
        overrides.append("parallel.schedule=1f1b")
    if layout.virtual_stages not in ("auto", 1):
        overrides.append("parallel.virtual_stages=auto")
    if layout.layers_per_stage is not None:
        overrides.append("parallel.layers_per_stage=null")
    return " ".join(overrides)


# --- stages ---------------------------------------------------------------------------------------


def _has_fixed_stages(layout: Parallel) -> bool:
    return layout.schedule in ONE_STAGE or layout.schedule in V_SHAPED


def _stages(config: Config) -> int:
    return config.parallel.pp * virtual_stages(config.parallel)


def _has_usual_stages(config: Config) -> bool:
    layout = config.parallel
    usual = usual_virtual_stages(layout.schedule)
    return (
        layout.pp == 1
        or not _has_fixed_stages(layout)
        or layout.virtual_stages
        in (
            "auto",
            usual,
        )
    )


def _near_virtual_stages(config: Config) -> list[str]:
    schedule = config.parallel.schedule
    other = "interleaved-1f1b" if schedule in ONE_STAGE else "zero-bubble"
    usual = usual_virtual_stages(schedule)
    return [f"parallel.virtual_stages={usual}", f"parallel.schedule={other}"]


def _has_blocks(config: Config) -> bool:
    return not has_pipeline(config) or _stages(config) <= config.model.layers


def _too_many_stages(config: Config) -> str:
    pp, virtual = config.parallel.pp, virtual_stages(config.parallel)
    return (
        f"makes pp·virtual stages = {pp}·{virtual} = {pp * virtual} stages, and "
        f"model.layers={config.model.layers} leaves some stages without a block"
    )


def _near_stages(config: Config) -> list[str | None]:
    layout, layers, virtual = config.parallel, config.model.layers, virtual_stages(config.parallel)
    fewer, shorter = layers // layout.pp, layers // virtual
    return [
        f"parallel.virtual_stages={fewer}" if fewer and not _has_fixed_stages(layout) else None,
        "parallel.schedule=1f1b parallel.virtual_stages=1" if fewer and virtual > 1 else None,
        f"parallel.pp={shorter}" if shorter > 1 else without_pipeline(config),
    ]


def _lists_blocks(config: Config) -> bool:
    listed = config.parallel.layers_per_stage
    if listed is None or not has_pipeline(config) or not _has_blocks(config):
        return True
    return len(listed) == _stages(config) and sum(listed) == config.model.layers


def _wrong_list(config: Config) -> str:
    listed, stages = config.parallel.layers_per_stage or [], _stages(config)
    if len(listed) != stages:
        return f"has {len(listed)} entries, and there are pp·virtual stages = {stages} stages"
    return f"adds up to {sum(listed)} blocks, and model.layers={config.model.layers}"


def _near_lists(config: Config) -> list[str]:
    divided = stage_layers(config.model, _stages(config), None)
    return [override("parallel.layers_per_stage", divided), "parallel.layers_per_stage=null"]


# --- micro batches --------------------------------------------------------------------------------


def largest_micro_batch(config: Config, samples: int) -> int | None:
    """Return the largest micro batch of a rank's samples a step that keeps the pipeline busy.

    If there are too few samples for that, return the smallest that the schedule supports, or None.
    """
    layout = config.parallel
    counts = [n for n in divisors(samples) if takes(layout.schedule, layout.pp, n)]
    busy = keeps_busy(layout.schedule, layout.pp) if layout.pp > 1 else 1
    enough = [n for n in counts if n >= busy] or counts[-1:]
    return samples // enough[0] if enough else None


def _samples(config: Config) -> int:
    """Return a rank's samples a step."""
    return config.train.global_batch // data_parallel(config)


def _micro_batches(config: Config) -> int:
    """Return the micro batches a step: the most that there can be, if their size is open."""
    micro = config.train.micro_batch
    return _samples(config) // (1 if micro == "auto" else micro)


def divides_batch(config: Config) -> bool:
    """True if the global batch is a whole number of micro batches on each rank."""
    dp, micro = data_parallel(config), config.train.micro_batch
    return config.train.global_batch % (dp if micro == "auto" else dp * micro) == 0


def _feeds_schedule(config: Config) -> bool:
    layout = config.parallel
    if not divides_batch(config):
        return True
    if config.train.micro_batch == "auto":
        return largest_micro_batch(config, _samples(config)) is not None
    return takes(layout.schedule, layout.pp, _micro_batches(config))


def _misfed_schedule(config: Config) -> str:
    schedule, number = config.parallel.schedule, _micro_batches(config)
    makes = f"makes global_batch/(dp·micro_batch) = {number}"
    if config.train.micro_batch == "auto":
        makes = f"makes at most {number}"
    need = _need(schedule, config.parallel.pp, number)
    return f"{makes} micro batches a step; parallel.schedule={schedule} needs {need}"


def _near_micro_batches(config: Config) -> Iterator[str]:
    layout, samples, number = config.parallel, _samples(config), _micro_batches(config)
    for n in _around(divisors(samples), number, layout.schedule, layout.pp):
        yield f"train.micro_batch={samples // n}"
    per_micro_batch = config.train.global_batch // number
    counts = range(1, number + 2 * layout.pp + 1)
    for n in _around(counts, number, layout.schedule, layout.pp):
        yield f"train.global_batch={n * per_micro_batch}"
    yield "parallel.schedule=" + ("gpipe" if layout.schedule in ONE_STAGE else "looped-bfs")


def near_batches(config: Config, step: int, dp: int) -> Iterator[int]:
    """Yield the nearest global batches that are multiples of `step` and that the schedule supports."""
    layout, train = config.parallel, config.train
    micro = train.micro_batch

    def fits(batch: int) -> bool:
        if micro == "auto":
            return largest_micro_batch(config, batch // dp) is not None
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


_AXIS = ("parallel.pp", "parallel.schedule")
_BATCH = ("train.global_batch", "train.micro_batch", "parallel.dp")


def _needs_micro_batches(key: str, is_open: bool) -> Rule:
    """Return the rule that a schedule has enough micro batches, for the key that is to be changed."""
    return Rule(
        key,
        (*_AXIS, *_BATCH),
        lambda config: (config.train.micro_batch == "auto") != is_open or _feeds_schedule(config),
        _misfed_schedule,
        _near_micro_batches,
    )


RULES = (
    idle("parallel.schedule", ("parallel.pp",), has_pipeline, "parallel.pp=1"),
    idle("parallel.layers_per_stage", ("parallel.pp",), has_pipeline, "parallel.pp=1"),
    idle(
        "parallel.virtual_stages",
        ("parallel.pp",),
        lambda config: has_pipeline(config) or config.parallel.virtual_stages == 1,
        "parallel.pp=1",
    ),
    Rule(
        "parallel.virtual_stages",
        ("parallel.virtual_stages", *_AXIS),
        _has_usual_stages,
        lambda config: (
            f"must be {usual_virtual_stages(config.parallel.schedule)} where "
            f"parallel.schedule={config.parallel.schedule}"
        ),
        _near_virtual_stages,
    ),
    Rule(
        "parallel.pp",
        ("parallel.virtual_stages", *_AXIS, "model.layers"),
        _has_blocks,
        _too_many_stages,
        _near_stages,
    ),
    Rule(
        "parallel.layers_per_stage",
        ("parallel.layers_per_stage", "parallel.virtual_stages", *_AXIS, "model.layers"),
        _lists_blocks,
        _wrong_list,
        _near_lists,
    ),
    Rule(
        "model.tie_embeddings",
        ("model.tie_embeddings", "parallel.pp"),
        lambda config: not (has_pipeline(config) and config.model.tie_embeddings),
        lambda config: (
            f"cannot hold with parallel.pp={config.parallel.pp}: the embedding belongs to the first stage and "
            "the head to the last"
        ),
        lambda config: ["model.tie_embeddings=false", without_pipeline(config)],
    ),
    _needs_micro_batches("train.global_batch", is_open=True),
    _needs_micro_batches("train.micro_batch", is_open=False),
)

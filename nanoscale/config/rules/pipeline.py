"""Rules of the pipeline: its schedule, its stages and its micro batches."""

from nanoscale.config import layout as layouts
from nanoscale.config.rules.resolution import divisors
from nanoscale.config.rules.rule import Rule, data_parallel, other_than, refused, several
from nanoscale.config.schema import Config, Parallel
from nanoscale.config.violations import override


def virtual_stages(layout: Parallel) -> int:
    """Return the stages a rank."""
    if layout.pp == 1:
        return 1
    if layout.virtual_stages == "auto" or _has_fixed_stages(layout):
        return layouts.usual_virtual_stages(layout.schedule)
    return layout.virtual_stages


# --- stages ---------------------------------------------------------------------------------------


def _has_fixed_stages(layout: Parallel) -> bool:
    return layout.schedule in layouts.ONE_STAGE or layout.schedule in layouts.V_SHAPED


def _stages(config: Config) -> int:
    return config.parallel.pp * virtual_stages(config.parallel)


def _has_usual_stages(config: Config) -> bool:
    layout = config.parallel
    if layout.pp == 1 or layout.virtual_stages == "auto" or not _has_fixed_stages(layout):
        return True
    return layout.virtual_stages == layouts.usual_virtual_stages(layout.schedule)


def _has_blocks(config: Config) -> bool:
    """The first stage, with the embedding, and the last, with the head, may be listed without blocks."""
    listed = config.parallel.layers_per_stage or []
    empty = [*listed[:1], *listed[1:][-1:]].count(0)
    return config.parallel.pp == 1 or _stages(config) - empty <= config.model.layers


def _too_many_stages(config: Config) -> str:
    pp, virtual = config.parallel.pp, virtual_stages(config.parallel)
    return (
        f"makes pp·virtual stages = {pp}·{virtual} = {pp * virtual} stages, and "
        f"model.layers={config.model.layers} leaves some stages without a block"
    )


def _lists_blocks(config: Config) -> bool:
    listed = config.parallel.layers_per_stage
    if listed is None or config.parallel.pp == 1 or not _has_blocks(config):
        return True
    right_sums = len(listed) == _stages(config) and sum(listed) == config.model.layers
    return right_sums and 0 not in listed[1:-1]


def _wrong_list(config: Config) -> str:
    listed, stages = config.parallel.layers_per_stage or [], _stages(config)
    if len(listed) != stages:
        return f"has {len(listed)} entries, and there are pp·virtual stages = {stages} stages"
    if sum(listed) != config.model.layers:
        return f"adds up to {sum(listed)} blocks, and model.layers={config.model.layers}"
    return "leaves a stage between the first and the last without a block"


# --- micro batches --------------------------------------------------------------------------------


def largest_micro_batch(config: Config, samples: int) -> int | None:
    """Return the largest micro batch of a rank's samples a step that keeps the pipeline busy.

    If there are too few samples for that, return the smallest that the schedule supports, or None.
    """
    layout, whole = config.parallel, samples // config.train.rows_of_sample
    counts = [n for n in divisors(whole) if layouts.takes(layout.schedule, layout.pp, n)]
    busy = layouts.keeps_busy(layout.schedule, layout.pp) if layout.pp > 1 else 1
    enough = [n for n in counts if n >= busy] or counts[-1:]
    return samples // enough[0] if enough else None


def _samples(config: Config) -> int:
    """Return a rank's samples a step."""
    return config.train.global_batch // data_parallel(config)


def _micro_batches(config: Config) -> int:
    """Return the micro batches a step: the most that there can be, if their size is open."""
    micro = config.train.micro_batch
    return _samples(config) // (config.train.rows_of_sample if micro == "auto" else micro)


def divides_batch(config: Config) -> bool:
    """True if the global batch is a whole number of micro batches on each rank."""
    dp, micro = data_parallel(config), config.train.micro_batch
    least = config.train.rows_of_sample if micro == "auto" else micro
    return config.train.global_batch % (dp * least) == 0


def _feeds_schedule(config: Config) -> bool:
    layout = config.parallel
    if not divides_batch(config):
        return True
    if config.train.micro_batch == "auto":
        return largest_micro_batch(config, _samples(config)) is not None
    return layouts.takes(layout.schedule, layout.pp, _micro_batches(config))


def _misfed_schedule(config: Config) -> str:
    layout, number = config.parallel, _micro_batches(config)
    makes = f"makes global_batch/(dp·micro_batch) = {number}"
    if config.train.micro_batch == "auto":
        makes = f"makes at most {number}"
    need = f"at least {layouts.keeps_busy(layout.schedule, layout.pp)}, as many as there are stages"
    if layout.schedule in layouts.IN_ROUNDS:
        rounds = f"{number // layout.pp} rounds of pp={layout.pp}"
        need = f"rounds of equal length: {number} is not a multiple of its {rounds}"
    return f"{makes} micro batches a step; parallel.schedule={layout.schedule} needs {need}"


def _near_micro_batches(config: Config) -> tuple[str, ...]:
    schedule = "gpipe" if config.parallel.schedule in layouts.ONE_STAGE else "looped-bfs"
    return ("train.micro_batch", "train.global_batch", f"parallel.schedule={schedule}")


_AXIS = ("parallel.pp", "parallel.schedule")


def _needs_micro_batches(key: str, is_open: bool) -> Rule:
    """Return the rule that a schedule has enough micro batches, for the key that is to be changed."""
    return Rule(key,
        (*_AXIS, "train.global_batch", "train.micro_batch", "parallel.dp", "train.objective"),
        lambda config: (config.train.micro_batch == "auto") != is_open or _feeds_schedule(config),
        _misfed_schedule, _near_micro_batches)  # fmt: skip


RULES = (
    refused("parallel.virtual_stages",
        {"parallel.pp": 1, "parallel.virtual_stages": other_than("auto", 1)},
        "does not concern parallel.pp=1 and would be ignored", "parallel.virtual_stages=auto"),
    Rule("parallel.virtual_stages", ("parallel.virtual_stages", *_AXIS), _has_usual_stages,
        lambda config: (
            f"must be {layouts.usual_virtual_stages(config.parallel.schedule)} where "
            f"parallel.schedule={config.parallel.schedule}"
        ),
        lambda config: (
            f"parallel.virtual_stages={layouts.usual_virtual_stages(config.parallel.schedule)}",
            "parallel.schedule=interleaved-1f1b",
        )),
    Rule("parallel.pp",
        ("parallel.layers_per_stage", "parallel.virtual_stages", *_AXIS, "model.layers"), _has_blocks,
        _too_many_stages, ("parallel.virtual_stages<", "parallel.schedule=1f1b", "parallel.pp<")),
    Rule("parallel.layers_per_stage",
        ("parallel.layers_per_stage", "parallel.virtual_stages", *_AXIS, "model.layers"),
        _lists_blocks, _wrong_list,
        lambda config: (
            *([override("parallel.layers_per_stage", layouts.stage_layers(config.model, _stages(config), None))]
                if _stages(config) <= config.model.layers else ()),
            "parallel.layers_per_stage=null",
        )),
    refused("parallel.schedule",
        {"model.tie_embeddings": True, "parallel.pp": several, "parallel.schedule": tuple(layouts.V_SHAPED)},
        "has the first and the last stage on one rank, which would hold model.tie_embeddings=true twice",
        "parallel.schedule=1f1b", "model.tie_embeddings=false", "parallel.pp=1"),
    _needs_micro_batches("train.global_batch", is_open=True),
    _needs_micro_batches("train.micro_batch", is_open=False),
)  # fmt: skip

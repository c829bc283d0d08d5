"""The coordinates of ranks, pipeline stages, and the numbers of micro batches that each schedule supports.

In the order of ranks tp varies fastest, then cp, then dp, then pp. The numbers of micro batches are from
torch.distributed.pipelining's schedules: their constructors' limits, and the results of a simulation of their
actions, which deadlock or not.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from nanoscale.config import parameters
from nanoscale.config.parameters import block_products
from nanoscale.config.resolved import ResolvedConfig, ResolvedParallel
from nanoscale.config.schema import Model

ACTIVATION_MEMORY = "parallel.activation_memory"
RECOMPUTATION_KEYS = (
    "parallel.activation_checkpointing",
    "parallel.checkpoint_every",
    "parallel.selective_keep",
)
"""The keys that the plan sets in place of `parallel.activation_memory`; the first is the mode."""
GRADIENT_BUCKET = 25 << 20
"""Bytes of gradients that replicas send together, as in DistributedDataParallel."""


@dataclass(frozen=True)
class Coordinates:
    """A rank's coordinates in the layout."""

    pp: int
    dp: int
    cp: int
    tp: int


def coordinates(rank: int, parallel: ResolvedParallel) -> Coordinates:
    """Return the coordinates of a global rank."""
    rest, tp = divmod(rank, parallel.tp)
    rest, cp = divmod(rest, parallel.cp)
    pp, dp = divmod(rest, parallel.dp)
    return Coordinates(pp, dp, cp, tp)


def axis_of(members: Sequence[int], degrees: dict[str, int]) -> str:
    """Return the axes along which the members of a group differ, such as `tp` or `dp·cp`.

    `degrees`: pp, dp, cp and tp, from the slowest to the fastest.
    """
    indices: dict[str, set[int]] = {axis: set() for axis in degrees}
    for rank in members:
        rest = rank
        for axis in reversed(degrees):
            rest, index = divmod(rest, degrees[axis])
            indices[axis].add(index)
    axes = [axis for axis in degrees if len(indices[axis]) > 1]
    if len(axes) == sum(degree > 1 for degree in degrees.values()) > 1:
        return "all ranks"
    return "·".join(axes) or "one rank"


def is_replicated(config: ResolvedConfig) -> bool:
    """True if ranks of the native backend each train the whole, uncast model, and differ in tokens alone.

    Nothing is sharded, divided or cast then, and FSDP2 is not needed; see `parallel.ddp`.
    """
    layout, precision = config.parallel, config.precision
    whole = config.zero.stage == 0 and layout.tp == layout.pp == layout.ep == 1
    alike = precision.params == precision.compute == precision.reduce
    return whole and alike and layout.dp * layout.cp > 1


def narrow_weights(config: ResolvedConfig) -> int:
    """Count the weights of a block on a rank of tp that FSDP2 gathers in 8 bits (`parallel.narrow_gathers`)."""
    layout, precision = config.parallel, config.precision
    is_sharded = config.zero.stage > 0 and layout.dp * layout.cp > layout.dp_replicate
    scales = precision.fp8_recipe if precision.fp8 else None
    if scales != "tensorwise" or not is_sharded or config.offloads or keeps_frozen_whole(config):
        return 0
    table = parameters.block(config.model).items()
    linear = [it for name, it in table if name != "mlp.router.weight" and not it.is_expert]
    return sum(math.prod(it.local(layout.tp)) for it in linear if not it.is_vector)


def keeps_frozen_whole(config: ResolvedConfig) -> bool:
    """True if every rank of the native backend has the frozen weights of its stages whole.

    Only ZeRO's stage 3 without a pipeline, and offloading, shard them: else a step keeps the gathered weights.
    """
    return config.lora.rank > 0 and _gathers_once(config) and not config.offloads


def keeps_narrow_experts(config: ResolvedConfig) -> bool:
    """True if the micro batches of a step share the matrices of experts in 8 bits."""
    is_narrow = config.precision.fp8 and config.model.experts > 0
    return is_narrow and config.accumulation > 1 and _gathers_once(config)


def _gathers_once(config: ResolvedConfig) -> bool:
    return config.zero.stage < 3 or config.parallel.pp > 1


# --- pipeline stages ------------------------------------------------------------------------------


@dataclass(frozen=True)
class ScheduleRule:
    """A row of the table of pipeline schedules."""

    one_stage: bool = False
    """True if a rank has one stage."""
    v_shaped: bool = False
    """True if a rank has two stages, and the first rank has the first stage and the last."""
    splits_backward: bool = False
    """True if gradients of inputs and of weights are computed in separate passes."""
    in_rounds: bool = False
    """True if micro batches go through in rounds of equal length, each of at least pp if there are enough."""
    fewest: int = 0
    """The fewest micro batches of a step, as a multiple of pp."""


SCHEDULES = {
    "gpipe": ScheduleRule(one_stage=True),
    "1f1b": ScheduleRule(one_stage=True, fewest=1),
    "interleaved-1f1b": ScheduleRule(in_rounds=True),
    "looped-bfs": ScheduleRule(),
    "zero-bubble": ScheduleRule(in_rounds=True, splits_backward=True),
    "zbv": ScheduleRule(v_shaped=True, splits_backward=True),
    "dualpipev": ScheduleRule(v_shaped=True, splits_backward=True, fewest=2),
}
ONE_STAGE = frozenset(name for name, rule in SCHEDULES.items() if rule.one_stage)
V_SHAPED = frozenset(name for name, rule in SCHEDULES.items() if rule.v_shaped)
SPLIT_BACKWARD = frozenset(name for name, rule in SCHEDULES.items() if rule.splits_backward)
IN_ROUNDS = frozenset(name for name, rule in SCHEDULES.items() if rule.in_rounds)


def usual_virtual_stages(schedule: str) -> int:
    """Return the default number of stages a rank."""
    return 1 if schedule in ONE_STAGE else 2


def stages_of(schedule: str, pp: int, virtual_stages: int, rank: int) -> list[int]:
    """Return the stages of a pipeline rank, in the order in which tokens pass through them."""
    if schedule in V_SHAPED:
        return [rank, 2 * pp - 1 - rank]
    return [rank + pp * turn for turn in range(virtual_stages)]


def rank_of(schedule: str, pp: int, stage: int) -> int:
    """Return the pipeline rank that holds a stage."""
    if schedule in V_SHAPED:
        return min(stage, 2 * pp - 1 - stage)
    return stage % pp


def tied_ranks(config: ResolvedConfig, ranks: Iterable[int]) -> tuple[int, ...]:
    """Return the ranks that hold the same shard of a tied embedding as one of these ranks of either end."""
    stage = config.world_size // config.parallel.pp
    firsts = {rank % stage for rank in ranks}
    return tuple(sorted(firsts | {config.world_size - stage + rank for rank in firsts}))


def takes(schedule: str, pp: int, micro_batches: int) -> bool:
    """True if a schedule can run a step of this many micro batches."""
    if pp == 1:
        return True
    rule = SCHEDULES[schedule]
    in_equal_rounds = micro_batches % max(1, micro_batches // pp) == 0
    return micro_batches >= rule.fewest * pp and (in_equal_rounds or not rule.in_rounds)


def keeps_busy(schedule: str, pp: int) -> int:
    """Return the least number of micro batches with which every rank has work at once."""
    return 2 * pp if schedule in V_SHAPED else pp


def stage_layers(model: Model, stages: int, layers_per_stage: list[int] | None) -> list[int]:
    """Return the number of blocks of every stage, in the model's order.

    Without a user's list, the costliest stage is as cheap as possible, and the costs are otherwise as even as
    possible. A stage costs the parameters of its products: the last one carries the head, and the embedding of
    the first multiplies nothing.
    """
    if layers_per_stage is not None:
        return list(layers_per_stage)
    assert 1 <= stages <= model.layers
    block, head = block_products(model), model.hidden * model.vocab
    layers = [1] * stages

    def cost(stage: int) -> tuple[int, int]:
        """Return a sort key: among equally cheap stages the later comes first, since the first stage holds the
        embedding and most activations."""
        return layers[stage] * block + (head if stage == stages - 1 else 0), -stage

    # Blocks cost the same, so choosing the cheapest stage first is exact, for the largest cost and for the sum
    # of squares.
    for _ in range(model.layers - stages):
        layers[min(range(stages), key=cost)] += 1
    return layers

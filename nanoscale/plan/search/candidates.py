"""Legal layouts of one job on a number of devices: the search space.

Which layouts are legal is decided by the table of `config.rules` alone: each rule is tested as soon as the keys
that it reads are set. A held key keeps its value.
"""

import math
from collections.abc import Iterable, Iterator, Set
from dataclasses import dataclass, replace
from functools import cache
from itertools import islice, product
from typing import Any, Literal, TypeVar, get_args

from nanoscale.config import rules
from nanoscale.config.layout import ONE_STAGE, RECOMPUTATION_KEYS, V_SHAPED, usual_virtual_stages
from nanoscale.config.reference import value_of, with_values
from nanoscale.config.resolved import ResolvedConfig
from nanoscale.config.rules.devices import copies
from nanoscale.config.rules.layout import expert_ranks
from nanoscale.config.rules.resolution import divisors
from nanoscale.config.rules.rule import Rule, data_parallel
from nanoscale.config.schema import Parallel, Schedule

T = TypeVar("T")
Recomputation = Literal["none", "selective", "full"]
Kept = Literal["every-2nd-matmul", "attention", "core-attention"]
Method = Literal["ring", "ulysses"]
Stage = Literal[0, 1, 2, 3]

LONGEST_PIPELINE = 64
SHORTEST_PIECE = 512
"""The fewest tokens of a sequence on a rank of cp. With fewer, computing is too short for the exchange."""
LARGEST_MICRO_BATCH = 32
RECOMPUTATION: tuple[Recomputation, ...] = ("none", "selective", "full")
"""The modes, from the fastest to the smallest in memory."""
KEPT: tuple[Kept, ...] = ("every-2nd-matmul", "attention", "core-attention")
"""Values of `parallel.selective_keep` that keep less than its default; the last one differs with tp only."""
INTERVALS = (2, 3, 4, 8)
"""Values of `parallel.checkpoint_every` that are tried."""
USUAL: Schedule = "1f1b"
_INTERLEAVED: Schedule = "interleaved-1f1b"
_OPTIONS = ("checkpoint_every", "selective_keep")
"""Keys of `parallel` that some modes of recomputation read."""


@dataclass(frozen=True, slots=True)
class SearchSpace:
    """The space of layouts to search."""

    base: ResolvedConfig
    """The resolved configuration that gives every value outside of the layout."""
    world: int
    island: int
    """Devices joined by fast links: tp stays within them."""
    held: frozenset[str]
    """Keys that keep their values."""
    resets_compile: bool
    """True if compilation may be disabled for a schedule that forbids it."""


def shapes(space: SearchSpace) -> Iterator[ResolvedConfig]:
    """Yield degrees and ZeRO stages, with one pipeline stage a rank. Micro batch and recomputation are open."""
    for config in _degrees(space):
        for staged in _legal(_stages(space, config), {"zero.stage"}, _AFTER_STAGE):
            replicas = _replicas(space, staged)
            for copied in _legal(replicas, {"parallel.dp_replicate"}, _AFTER_REPLICAS):
                for shape in islice(expert_degrees(space, copied), 1):
                    yield from _compiled(space, shape)


def _legal(
    configs: Iterable[ResolvedConfig], changed: Set[str], open_keys: Set[str] = frozenset()
) -> Iterator[ResolvedConfig]:
    """Yield the configurations that the rules of the layout allow.

    Args:
        changed: the keys that were set just now.
        open_keys: keys that are set later. Rules that read them are tested later.
    """
    due = [rule.holds for rule in _due(rules.RULES, frozenset(changed), frozenset(open_keys))]
    return (config for config in configs if all(holds(config) for holds in due))


def _compiled(space: SearchSpace, config: ResolvedConfig) -> Iterator[ResolvedConfig]:
    """Yield the configuration with `backend.compile` as requested, or disabled if the schedule forbids it."""
    backend = config.backend
    modes = [space.base.backend.compile]
    if space.resets_compile:
        modes.append("off")
    compiled = (
        config
        if mode == backend.compile
        else replace(config, backend=replace(backend, compile=mode))
        for mode in modes
    )
    return islice(_legal(compiled, {_COMPILE}, _AFTER_SHAPE), 1)


@cache
def _due(
    table: tuple[Rule, ...], changed: frozenset[str], open_keys: frozenset[str]
) -> tuple[Rule, ...]:
    """Return the rules that read a changed key and no open one."""
    return tuple(
        rule
        for rule in table
        if not changed.isdisjoint(rule.reads) and open_keys.isdisjoint(rule.reads)
    )


def micro_batches(space: SearchSpace, config: ResolvedConfig) -> Iterator[ResolvedConfig]:
    """Yield the configuration with micro batches of rising size."""
    train, dp = config.train, data_parallel(config)
    samples = train.global_batch // dp
    sizes = [size for size in range(1, LARGEST_MICRO_BATCH + 1) if samples % size == 0]
    if _MICRO_BATCH in space.held and isinstance(train.micro_batch, int):
        sizes = [train.micro_batch]
    batched = (replace(config, train=replace(train, micro_batch=size)) for size in sizes)
    return _legal(batched, {_MICRO_BATCH})


def recomputations(space: SearchSpace, config: ResolvedConfig) -> Iterator[ResolvedConfig]:
    """Yield the configuration with more and more recomputation."""
    modes = _choices(space, "activation_checkpointing", RECOMPUTATION)
    changed = (_recomputing(config, mode) for mode in modes)
    kept = (it for it in changed if _keeps_options(space, it))
    return _legal(kept, _RECOMPUTED, {_MICRO_BATCH})


def _keeps_options(space: SearchSpace, config: ResolvedConfig) -> bool:
    """True if the mode of recomputation has a use for the options that are held."""
    pairs = ((f"parallel.{name}", getattr(config.parallel, name)) for name in _OPTIONS)
    return all(value == value_of(space.base, key) for key, value in pairs if key in space.held)


def kept_products(space: SearchSpace, config: ResolvedConfig) -> Iterator[ResolvedConfig]:
    """Yield the configuration with selective recomputation that keeps less than all products.

    If `parallel.activation_memory` bounds what is kept, also yield each mode in every k-th block only.
    """
    selective = "selective" in _choices(space, "activation_checkpointing", RECOMPUTATION)
    keeps = KEPT if selective and "parallel.selective_keep" not in space.held else ()
    keeps = keeps if config.parallel.tp > 1 else keeps[:2]
    kept = [
        _laid_out(config, activation_checkpointing="selective", selective_keep=keep)
        for keep in keeps
    ]
    yield from _legal(kept, _RECOMPUTED, {_MICRO_BATCH})
    if space.base.parallel.activation_memory and "parallel.checkpoint_every" not in space.held:
        for whole, every in product([*recomputations(space, config), *kept], INTERVALS):
            if whole.parallel.activation_checkpointing in ("full", "selective"):
                fewer = _laid_out(whole, checkpoint_every=every)
                yield from _legal([fewer], _RECOMPUTED, {_MICRO_BATCH})


def last_resorts(space: SearchSpace, config: ResolvedConfig) -> Iterator[ResolvedConfig]:
    """Yield the configuration with host memory, which is tried if nothing else fits."""
    whole = _recomputing(config, "full")
    if "parallel.activation_checkpointing" not in space.held and _keeps_options(space, whole):
        config = whole
    if "zero.offload_optimizer" not in space.held:
        config = replace(config, zero=replace(config.zero, offload_optimizer="cpu"))
        yield from _legal([config], {"zero.offload_optimizer"}, {_MICRO_BATCH})
    if "zero.offload_param" not in space.held:
        config = replace(config, zero=replace(config.zero, offload_param="cpu"))
        yield from _legal([config], _OFFLOADED, {_MICRO_BATCH})


def _recomputing(config: ResolvedConfig, mode: Recomputation) -> ResolvedConfig:
    """Return the configuration with a mode, and without options for which it has no use."""
    layout, plain = config.parallel, Parallel()
    every = (plain if mode == "none" else layout).checkpoint_every
    keep = (layout if mode == "selective" else plain).selective_keep
    return _laid_out(
        config, activation_checkpointing=mode, checkpoint_every=every, selective_keep=keep
    )


def expert_degrees(space: SearchSpace, config: ResolvedConfig) -> Iterator[ResolvedConfig]:
    """Yield the configuration with each degree of ep. The largest degree, which needs least memory, comes
    first.

    Degrees stay within an island, unless the key is held. Dense models are unchanged. Whole experts on ranks of
    tp come first: they need as much memory, and move and compute less.
    """
    kinds = (True, False) if config.model.experts and config.parallel.tp > 1 else (False,)
    for over_tp in _choices(space, "ep_over_tp", kinds):
        divided = _laid_out(config, ep_over_tp=over_tp)
        most = max(space.island // divided.parallel.expert_tp, 1)
        common = math.gcd(max(1, config.model.experts), expert_ranks(divided))
        within = [degree for degree in divisors(common) if degree <= most]
        each = (_laid_out(divided, ep=ep) for ep in _choices(space, "ep", reversed(within)))
        yield from _legal(each, _EXPERTS, _AFTER_EXPERTS)


def schedules(space: SearchSpace, config: ResolvedConfig) -> Iterator[ResolvedConfig]:
    """Yield the configuration with every other schedule."""
    layout = config.parallel
    if layout.pp == 1:
        return
    for schedule in _choices(space, "schedule", get_args(Schedule)):
        is_fixed = schedule in ONE_STAGE or schedule in V_SHAPED
        every = (usual_virtual_stages(schedule),) if is_fixed else (2, 3, 4, 5, 6, 8)
        for virtual in _choices(space, "virtual_stages", every):
            scheduled = _laid_out(config, schedule=schedule, virtual_stages=virtual)
            if scheduled is not config:
                for legal in _legal([scheduled], _SCHEDULED, _AFTER_EXPERTS):
                    yield from _compiled(space, legal)


def _degrees(space: SearchSpace) -> Iterator[ResolvedConfig]:
    """Yield the degrees of tp, pp, cp and the dp that uses all devices."""
    offloads = ("zero.offload_optimizer", "zero.offload_param")
    zero = with_values(space.base, {key: "none" for key in offloads if key not in space.held}).zero
    # Degrees grow from a layout with one stage a rank.
    stages = space.base.parallel.layers_per_stage
    stages = stages if "parallel.layers_per_stage" in space.held else None
    base = _laid_out(space.base, virtual_stages=1, layers_per_stage=stages)
    base = replace(base, zero=zero)
    for tensor in _tensor(space, base):
        for piped in _legal(_pipeline(space, tensor), _PIPED, _AFTER_PIPELINE):
            for context in _legal(_context(space, piped), _CONTEXT, _AFTER_CONTEXT):
                dp = copies(context.parallel, space.world)
                is_held = "parallel.dp" in space.held
                if dp is not None and not (is_held and dp != space.base.parallel.dp):
                    yield from _legal([_laid_out(context, dp=dp)], {"parallel.dp"}, _AFTER_DP)


def _tensor(space: SearchSpace, config: ResolvedConfig) -> Iterator[ResolvedConfig]:
    for tp in _choices(space, "tp", divisors(space.world)):
        if tp <= space.island:
            tensor = (
                _laid_out(config, tp=tp, sequence_parallel=shared)
                for shared in _choices(space, "sequence_parallel", (True, False))
            )
            yield from islice(_legal(tensor, _TENSOR, _AFTER_TENSOR), 1)


def _pipeline(space: SearchSpace, config: ResolvedConfig) -> Iterator[ResolvedConfig]:
    base = space.base.parallel
    for pp in _choices(space, "pp", divisors(space.world // config.parallel.tp)):
        is_held = "parallel.schedule" in space.held
        is_cut = "parallel.virtual_stages" in space.held and base.virtual_stages > 1
        if pp == 1 and (is_cut or (is_held and base.schedule != USUAL)):
            continue  # what the user set would have no meaning
        if pp <= LONGEST_PIPELINE:
            schedule = base.schedule if pp > 1 and is_held else _INTERLEAVED if is_cut else USUAL
            virtual = base.virtual_stages if is_cut else usual_virtual_stages(schedule)
            yield _laid_out(config, pp=pp, schedule=schedule, virtual_stages=virtual)


def _context(space: SearchSpace, config: ResolvedConfig) -> Iterator[ResolvedConfig]:
    layout, length = config.parallel, config.train.seq_len
    most = max(1, length // SHORTEST_PIECE)
    for cp in _choices(space, "cp", divisors(space.world // (layout.tp * layout.pp))):
        every: tuple[Method, ...] = ("ring", "ulysses") if cp > 1 else ("ring",)
        for method in _choices(space, "cp_method", every):
            if cp <= most or "parallel.cp" in space.held:
                yield _laid_out(config, cp=cp, cp_method=method)


def _stages(space: SearchSpace, config: ResolvedConfig) -> Iterator[ResolvedConfig]:
    """Yield ZeRO stages. In a pipeline, FSDP2 gathers once a step in stages 2 and 3, so stage 3 is left out."""
    layout, zero = config.parallel, config.zero
    every: tuple[Stage, ...] = (0, 1, 2) if layout.pp > 1 else (0, 1, 2, 3)
    if "zero.stage" in space.held:
        every = (zero.stage,)
    elif data_parallel(config) * layout.cp == 1:
        every = (0,)
    return (replace(config, zero=replace(zero, stage=stage)) for stage in every)


def _replicas(space: SearchSpace, config: ResolvedConfig) -> Iterator[ResolvedConfig]:
    """Yield one sharded model, or one in each island."""
    layout, dp = config.parallel, data_parallel(config)
    within = space.island // (layout.tp * layout.cp)
    islands = [dp // within] if 1 < within < dp and dp % within == 0 else []
    for replicas in _choices(space, "dp_replicate", (1, *islands)):
        yield _laid_out(config, dp_replicate=replicas)


# Keys in the order in which they are set: a rule is tested as soon as all the keys that it reads are set.
_MICRO_BATCH = "train.micro_batch"
_RECOMPUTED = {*RECOMPUTATION_KEYS}
_COMPILE = "backend.compile"
_OFFLOADED = {"zero.offload_optimizer", "zero.offload_param"}
_SCHEDULED = {"parallel.schedule", "parallel.virtual_stages"}
_TENSOR = {"parallel.tp", "parallel.sequence_parallel"}
_PIPED = {"parallel.pp", *_SCHEDULED, "parallel.layers_per_stage"}
_CONTEXT = {"parallel.cp", "parallel.cp_method"}
_AFTER_SHAPE = {*_RECOMPUTED, _MICRO_BATCH}
_AFTER_EXPERTS = {*_AFTER_SHAPE, _COMPILE}
_EXPERTS = {"parallel.ep", "parallel.ep_over_tp"}
_AFTER_REPLICAS = {*_AFTER_EXPERTS, "parallel.ep"}
_AFTER_STAGE = {*_AFTER_REPLICAS, "parallel.dp_replicate"}
_AFTER_DP = {*_AFTER_STAGE, "zero.stage"}
_AFTER_CONTEXT = {*_AFTER_DP, "parallel.dp"}
_AFTER_PIPELINE = {*_AFTER_CONTEXT, *_CONTEXT}
_AFTER_TENSOR = {*_AFTER_PIPELINE, *_PIPED}


def _laid_out(config: ResolvedConfig, **changes: Any) -> ResolvedConfig:
    """Return the configuration with other values in its layout, or itself if they are the same."""
    changed = replace(config.parallel, **changes)
    return config if changed == config.parallel else replace(config, parallel=changed)


def _choices(space: SearchSpace, name: str, every: Iterable[T]) -> Iterable[T]:
    """Return the possible values of a key of `parallel`."""
    held = f"parallel.{name}" in space.held
    return (getattr(space.base.parallel, name),) if held else every

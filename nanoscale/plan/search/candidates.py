"""Legal layouts of one job on a number of devices: the search space.

The rules are those of `config.rules`, in a form that generates layouts instead of refusing them. A held key
keeps its value.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import islice
from typing import Literal, TypeVar

from nanoscale.config.rules.backends import honoured
from nanoscale.config.rules.resolution import divisors
from nanoscale.config.schema import Config, Parallel
from nanoscale.config.stages import ONE_STAGE, SPLIT_BACKWARD, V_SHAPED, takes

T = TypeVar("T")
Recomputation = Literal["none", "full", "selective", "sqrt"]
Schedule = Literal[
    "gpipe", "1f1b", "interleaved-1f1b", "looped-bfs", "zero-bubble", "zbv", "dualpipev"
]
Method = Literal["ring", "ulysses"]
Stage = Literal[0, 1, 2, 3]

LONGEST_PIPELINE = 64
SHORTEST_PIECE = 512
"""Tokens of a sequence on a rank of cp; with fewer there is too little computation to overlap with the
exchange."""
LARGEST_MICRO_BATCH = 32
RECOMPUTATION: tuple[Recomputation, ...] = ("none", "selective", "full")
"""The modes from the fastest to the one that keeps least."""
USUAL: Schedule = "1f1b"


@dataclass(frozen=True, slots=True)
class SearchSpace:
    """The space of layouts to search."""

    base: Config
    """Resolved; everything but the layout comes from it."""
    world: int
    island: int
    """Devices joined by fast links: tp stays within them."""
    held: frozenset[str]
    """Keys that keep their values."""
    resets_compile: bool
    """True if compilation may be disabled for a schedule that forbids it."""


def shapes(space: SearchSpace) -> Iterator[Config]:
    """Yield degrees and ZeRO stages, with one stage a rank, accumulation still open and no recomputation
    yet."""
    base = space.base
    for tp in _tensor(space):
        for pp in _pipeline(space, tp):
            for cp, method in _context(space, tp, pp):
                dp = space.world // (tp * pp * cp)
                if base.train.global_batch % dp:
                    continue
                for stage in _stages(space, dp * cp, pp):
                    for replicas in _replicas(space, tp, cp, dp, stage):
                        shape = _shape(space, tp, pp, cp, method, dp, stage, replicas)
                        yield from islice(expert_degrees(space, shape), 1)


def micro_batches(space: SearchSpace, config: Config) -> Iterator[Config]:
    """Yield the configuration with micro batches of rising size."""
    layout, train = config.parallel, config.train
    assert isinstance(layout.dp, int)
    samples = train.global_batch // layout.dp
    sizes = [n for n in divisors(samples) if n <= LARGEST_MICRO_BATCH]
    if "train.micro_batch" in space.held:
        sizes = [n for n in sizes if n == train.micro_batch]
    for size in sizes:
        if takes(layout.schedule, layout.pp, samples // size):
            yield replace(config, train=replace(train, micro_batch=size))


def recomputations(space: SearchSpace, config: Config) -> Iterator[Config]:
    """Yield the configuration with more and more recomputation."""
    layout = config.parallel
    for mode in _choices(space, "activation_checkpointing", RECOMPUTATION):
        split = layout.pp > 1 and layout.schedule in SPLIT_BACKWARD
        if mode == "selective" and split:
            continue
        every = layout.checkpoint_every if mode == "full" else 1
        keep = layout.selective_keep if mode == "selective" else Parallel().selective_keep
        changed = replace(
            layout, activation_checkpointing=mode, checkpoint_every=every, selective_keep=keep
        )
        yield replace(config, parallel=changed)


def last_resorts(space: SearchSpace, config: Config) -> Iterator[Config]:
    """Yield the configuration with the last options if all else is too large: the recomputation that keeps
    least between the passes, then host memory, which only DeepSpeed offers."""
    if "parallel.activation_checkpointing" not in space.held:
        yield _recomputing(config, "sqrt")
        config = _recomputing(config, "full")
    zero = config.zero
    if config.backend.name != "deepspeed" or zero.stage == 0:
        return
    if "zero.offload_optimizer" not in space.held:
        zero = replace(zero, offload_optimizer="cpu")
        yield replace(config, zero=zero)
    if "zero.offload_param" not in space.held and zero.stage == 3:
        yield replace(config, zero=replace(zero, offload_param="cpu"))


def _recomputing(config: Config, mode: Recomputation) -> Config:
    plain = Parallel()
    layout = replace(
        config.parallel,
        activation_checkpointing=mode,
        checkpoint_every=plain.checkpoint_every,
        selective_keep=plain.selective_keep,
    )
    return replace(config, parallel=layout)


def expert_degrees(space: SearchSpace, config: Config) -> Iterator[Config]:
    """Yield the configuration with each degree of ep, the largest first, which needs least memory.

    Degrees stay within an island, unless the key is held. Dense models are unchanged.
    """
    layout, experts = config.parallel, max(1, config.model.experts)
    assert isinstance(layout.dp, int)
    ranks = layout.dp // layout.dp_replicate * layout.cp
    within = [
        n
        for n in divisors(math.gcd(experts, ranks))
        if n * layout.tp <= max(space.island, layout.tp)
    ]
    for ep in _choices(space, "ep", reversed(within)):
        shared = config if ep == layout.ep else replace(config, parallel=replace(layout, ep=ep))
        if ranks % ep == 0 and experts % ep == 0 and honoured(shared):
            yield shared


def schedules(space: SearchSpace, config: Config) -> Iterator[Config]:
    """Yield the configuration with every other schedule."""
    layout, backend = config.parallel, config.backend
    if layout.pp == 1 or backend.name == "deepspeed":
        return
    for schedule in _choices(space, "schedule", _SCHEDULES):
        if schedule in SPLIT_BACKWARD and backend.compile == "on" and not space.resets_compile:
            continue
        compiled = "off" if schedule in SPLIT_BACKWARD else backend.compile
        for virtual in _virtual(space, schedule, layout.pp):
            changed = replace(layout, schedule=schedule, virtual_stages=virtual)
            if changed != layout:
                yield replace(config, parallel=changed, backend=replace(backend, compile=compiled))


_SCHEDULES: tuple[Schedule, ...] = (
    "gpipe",
    "1f1b",
    "interleaved-1f1b",
    "looped-bfs",
    "zero-bubble",
    "zbv",
    "dualpipev",
)


def _tensor(space: SearchSpace) -> Iterator[int]:
    model = space.base.model
    rows = (model.vocab, model.max_seq_len) if model.position == "learned" else (model.vocab,)
    parts = math.gcd(model.heads, model.kv_heads or model.heads, model.ffn, *rows)
    for tp in _choices(space, "tp", divisors(math.gcd(parts, space.world))):
        if tp <= space.island and parts % tp == 0 and space.world % tp == 0:
            yield tp


def _pipeline(space: SearchSpace, tp: int) -> Iterator[int]:
    model, rest = space.base.model, space.world // tp
    for pp in _choices(space, "pp", divisors(rest)):
        fits = pp <= min(model.layers, LONGEST_PIPELINE) and rest % pp == 0
        if fits and (pp == 1 or not model.tie_embeddings):
            yield pp


def _context(space: SearchSpace, tp: int, pp: int) -> Iterator[tuple[int, Method]]:
    model, length, rest = space.base.model, space.base.train.seq_len, space.world // (tp * pp)
    shares = tp if space.base.backend.name == "native" else 1
    heads = math.gcd(model.heads, model.kv_heads or model.heads) // tp
    for cp in _choices(space, "cp", divisors(rest)):
        if rest % cp or (
            cp > 1 and "parallel.cp" not in space.held and length // cp < SHORTEST_PIECE
        ):
            continue
        every: tuple[Method, ...] = ("ring", "ulysses") if cp > 1 else ("ring",)
        for method in _choices(space, "cp_method", every):
            pieces = math.lcm(2 if method == "ring" and cp > 1 else 1, shares)
            if length % (cp * pieces) == 0 and (method == "ring" or heads % cp == 0):
                yield cp, method


def _stages(space: SearchSpace, ranks: int, pp: int) -> Iterator[Stage]:
    """Yield ZeRO stages; in a pipeline FSDP2 gathers once a step, with stage 2 as with stage 3."""
    if "zero.stage" in space.held:
        yield space.base.zero.stage
    elif ranks == 1:
        yield 0
    else:
        yield from (0, 1, 2) if pp > 1 else (0, 1, 2, 3)


def _replicas(space: SearchSpace, tp: int, cp: int, dp: int, stage: int) -> Iterator[int]:
    """Yield one sharded model, or one in each island."""
    if "parallel.dp_replicate" in space.held:
        wanted = space.base.parallel.dp_replicate
        if dp % wanted == 0 and (wanted == 1 or stage > 0):
            yield wanted
        return
    yield 1
    within = max(1, space.island // (tp * cp))
    if stage > 0 and dp > within and dp % within == 0 and within > 1:
        yield dp // within


def _virtual(space: SearchSpace, schedule: str, pp: int) -> Iterator[int]:
    most = space.base.model.layers // pp
    usual = (1,) if schedule in ONE_STAGE else (2,) if schedule in V_SHAPED else (2, 3, 4, 5, 6, 8)
    for virtual in _choices(space, "virtual_stages", usual):
        fixed = schedule in ONE_STAGE or schedule in V_SHAPED
        if virtual <= most and (virtual in usual or not fixed):
            yield virtual


def _shape(
    space: SearchSpace,
    tp: int,
    pp: int,
    cp: int,
    method: Method,
    dp: int,
    stage: Stage,
    replicas: int,
) -> Config:
    base = space.base
    native = base.backend.name == "native"
    layout = replace(
        base.parallel,
        tp=tp,
        pp=pp,
        cp=cp,
        cp_method=method,
        dp=dp,
        dp_replicate=replicas,
        sequence_parallel=native or tp == 1,
        schedule=base.parallel.schedule if pp > 1 and "parallel.schedule" in space.held else USUAL,
        virtual_stages=1,
        layers_per_stage=None,
    )
    if pp > 1 and layout.schedule not in ONE_STAGE:
        virtual = base.parallel.virtual_stages if "parallel.virtual_stages" in space.held else 2
        layout = replace(layout, virtual_stages=virtual)
    return replace(base, parallel=layout, zero=replace(base.zero, stage=stage))


def _choices(space: SearchSpace, name: str, every: Iterable[T]) -> Iterable[T]:
    """Return the possible values of a key of `parallel`."""
    held = f"parallel.{name}" in space.held
    return (getattr(space.base.parallel, name),) if held else every

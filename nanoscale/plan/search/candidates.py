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
class Room:
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


def shapes(room: Room) -> Iterator[Config]:
    """Yield degrees and ZeRO stages, with one stage a rank, accumulation still open and no recomputation
    yet."""
    base = room.base
    for tp in _tensor(room):
        for pp in _pipeline(room, tp):
            for cp, method in _context(room, tp, pp):
                dp = room.world // (tp * pp * cp)
                if base.train.global_batch % dp:
                    continue
                for stage in _stages(room, dp * cp, pp):
                    for replicas in _replicas(room, tp, cp, dp, stage):
                        found = _shape(room, tp, pp, cp, method, dp, stage, replicas)
                        yield from islice(expert_degrees(room, found), 1)


def micro_batches(room: Room, config: Config) -> Iterator[Config]:
    """Yield the configuration with micro batches of rising size."""
    layout, train = config.parallel, config.train
    assert isinstance(layout.dp, int)
    samples = train.global_batch // layout.dp
    sizes = [n for n in divisors(samples) if n <= LARGEST_MICRO_BATCH]
    if "train.micro_batch" in room.held:
        sizes = [n for n in sizes if n == train.micro_batch]
    for size in sizes:
        if takes(layout.schedule, layout.pp, samples // size):
            yield replace(config, train=replace(train, micro_batch=size))


def recomputations(room: Room, config: Config) -> Iterator[Config]:
    """Yield the configuration with more and more recomputation."""
    layout = config.parallel
    for mode in _choices(room, "activation_checkpointing", RECOMPUTATION):
        split = layout.pp > 1 and layout.schedule in SPLIT_BACKWARD
        if mode == "selective" and split:
            continue
        every = layout.checkpoint_every if mode == "full" else 1
        keep = layout.selective_keep if mode == "selective" else Parallel().selective_keep
        changed = replace(
            layout, activation_checkpointing=mode, checkpoint_every=every, selective_keep=keep
        )
        yield replace(config, parallel=changed)


def last_resorts(room: Room, config: Config) -> Iterator[Config]:
    """Yield the configuration with the last options if all else is too large: the recomputation that keeps
    least between the passes, then host memory, which only DeepSpeed offers."""
    if "parallel.activation_checkpointing" not in room.held:
        yield _recomputing(config, "sqrt")
        config = _recomputing(config, "full")
    zero = config.zero
    if config.backend.name != "deepspeed" or zero.stage == 0:
        return
    if "zero.offload_optimizer" not in room.held:
        zero = replace(zero, offload_optimizer="cpu")
        yield replace(config, zero=zero)
    if "zero.offload_param" not in room.held and zero.stage == 3:
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


def expert_degrees(room: Room, config: Config) -> Iterator[Config]:
    """Yield the configuration with each degree of ep, the largest first, which needs least memory.

    Degrees stay within an island, unless the key is held. Dense models are unchanged.
    """
    layout, experts = config.parallel, max(1, config.model.experts)
    assert isinstance(layout.dp, int)
    ranks = layout.dp // layout.dp_replicate * layout.cp
    within = [
        n
        for n in divisors(math.gcd(experts, ranks))
        if n * layout.tp <= max(room.island, layout.tp)
    ]
    for ep in _choices(room, "ep", reversed(within)):
        shared = config if ep == layout.ep else replace(config, parallel=replace(layout, ep=ep))
        if ranks % ep == 0 and experts % ep == 0 and honoured(shared):
            yield shared


def schedules(room: Room, config: Config) -> Iterator[Config]:
    """Yield the configuration with every other schedule."""
    layout, backend = config.parallel, config.backend
    if layout.pp == 1 or backend.name == "deepspeed":
        return
    for schedule in _choices(room, "schedule", _SCHEDULES):
        if schedule in SPLIT_BACKWARD and backend.compile == "on" and not room.resets_compile:
            continue
        compiled = "off" if schedule in SPLIT_BACKWARD else backend.compile
        for virtual in _virtual(room, schedule, layout.pp):
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


def _tensor(room: Room) -> Iterator[int]:
    model = room.base.model
    rows = (model.vocab, model.max_seq_len) if model.position == "learned" else (model.vocab,)
    parts = math.gcd(model.heads, model.kv_heads or model.heads, model.ffn, *rows)
    for tp in _choices(room, "tp", divisors(math.gcd(parts, room.world))):
        if tp <= room.island and parts % tp == 0 and room.world % tp == 0:
            yield tp


def _pipeline(room: Room, tp: int) -> Iterator[int]:
    model, rest = room.base.model, room.world // tp
    for pp in _choices(room, "pp", divisors(rest)):
        fits = pp <= min(model.layers, LONGEST_PIPELINE) and rest % pp == 0
        if fits and (pp == 1 or not model.tie_embeddings):
            yield pp


def _context(room: Room, tp: int, pp: int) -> Iterator[tuple[int, Method]]:
    model, length, rest = room.base.model, room.base.train.seq_len, room.world // (tp * pp)
    shares = tp if room.base.backend.name == "native" else 1
    heads = math.gcd(model.heads, model.kv_heads or model.heads) // tp
    for cp in _choices(room, "cp", divisors(rest)):
        if rest % cp or (
            cp > 1 and "parallel.cp" not in room.held and length // cp < SHORTEST_PIECE
        ):
            continue
        every: tuple[Method, ...] = ("ring", "ulysses") if cp > 1 else ("ring",)
        for method in _choices(room, "cp_method", every):
            pieces = math.lcm(2 if method == "ring" and cp > 1 else 1, shares)
            if length % (cp * pieces) == 0 and (method == "ring" or heads % cp == 0):
                yield cp, method


def _stages(room: Room, ranks: int, pp: int) -> Iterator[Stage]:
    """Yield ZeRO stages; in a pipeline FSDP2 gathers once a step, with stage 2 as with stage 3."""
    if "zero.stage" in room.held:
        yield room.base.zero.stage
    elif ranks == 1:
        yield 0
    else:
        yield from (0, 1, 2) if pp > 1 else (0, 1, 2, 3)


def _replicas(room: Room, tp: int, cp: int, dp: int, stage: int) -> Iterator[int]:
    """Yield one sharded model, or one in each island."""
    if "parallel.dp_replicate" in room.held:
        wanted = room.base.parallel.dp_replicate
        if dp % wanted == 0 and (wanted == 1 or stage > 0):
            yield wanted
        return
    yield 1
    within = max(1, room.island // (tp * cp))
    if stage > 0 and dp > within and dp % within == 0 and within > 1:
        yield dp // within


def _virtual(room: Room, schedule: str, pp: int) -> Iterator[int]:
    most = room.base.model.layers // pp
    usual = (1,) if schedule in ONE_STAGE else (2,) if schedule in V_SHAPED else (2, 3, 4, 5, 6, 8)
    for virtual in _choices(room, "virtual_stages", usual):
        fixed = schedule in ONE_STAGE or schedule in V_SHAPED
        if virtual <= most and (virtual in usual or not fixed):
            yield virtual


def _shape(
    room: Room, tp: int, pp: int, cp: int, method: Method, dp: int, stage: Stage, replicas: int
) -> Config:
    base = room.base
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
        schedule=base.parallel.schedule if pp > 1 and "parallel.schedule" in room.held else USUAL,
        virtual_stages=1,
        layers_per_stage=None,
    )
    if pp > 1 and layout.schedule not in ONE_STAGE:
        virtual = base.parallel.virtual_stages if "parallel.virtual_stages" in room.held else 2
        layout = replace(layout, virtual_stages=virtual)
    return replace(base, parallel=layout, zero=replace(base.zero, stage=stage))


def _choices(room: Room, name: str, every: Iterable[T]) -> Iterable[T]:
    """Return the possible values of a key of `parallel`."""
    held = f"parallel.{name}" in room.held
    return (getattr(room.base.parallel, name),) if held else every

"""Rules of the axes dp, tp, cp and ep. Those of pp are in `pipeline`, the number of devices in `devices`."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

from nanoscale.common.units import counted, listed
from nanoscale.config.rules.pipeline import without_pipeline
from nanoscale.config.rules.resolution import (
    Rule,
    data_parallel,
    idle,
    near_divisors,
    near_multiples,
)
from nanoscale.config.schema import Config, Data, Model

_PADDING = 128
"""The padding of vocabularies, a multiple of which suits the tiles of a GPU's products."""


# --- replicas -------------------------------------------------------------------------------------

_DP_REPLICATE = "parallel.dp_replicate"

_REPLICAS = Rule(
    _DP_REPLICATE,
    ("parallel.dp", _DP_REPLICATE),
    lambda config: data_parallel(config) % config.parallel.dp_replicate == 0,
    lambda config: f"must divide parallel.dp, which is {config.parallel.dp}",
    lambda config: (
        f"{_DP_REPLICATE}={n}"
        for n in near_divisors(data_parallel(config), config.parallel.dp_replicate)
    ),
)
_SHARDED = Rule(
    _DP_REPLICATE,
    (_DP_REPLICATE, "zero.stage"),
    lambda config: config.parallel.dp_replicate == 1 or config.zero.stage > 0,
    lambda _: "replicates a sharded model, and zero.stage=0 shards nothing",
    lambda _: ["zero.stage=3", f"{_DP_REPLICATE}=1"],
)

# --- tensor parallelism ---------------------------------------------------------------------------

_BLOCKS = ("model.heads", "model.kv_heads", "model.ffn")
"""The sizes of a block that tp divides."""


def _block_sizes(model: Model) -> dict[str, int]:
    return {
        "model.heads": model.heads,
        "model.kv_heads": model.kv_head_count,
        "model.ffn": model.ffn,
    }


def _divides_blocks(config: Config) -> bool:
    return not any(size % config.parallel.tp for size in _block_sizes(config.model).values())


def _undivided_blocks(config: Config) -> str:
    tp = config.parallel.tp
    broken = [f"{key}={size}" for key, size in _block_sizes(config.model).items() if size % tp]
    why = "a rank holds whole heads, of keys and values too, and an equal share of the block"
    return f"must divide {listed(broken)}: {why}"


def _near_tp(config: Config) -> Iterator[str]:
    model = config.model
    fixed = [number for _, number, _ in _rows(model)] if model.init_from is not None else []
    common = math.gcd(*_block_sizes(model).values(), *fixed)
    return (with_degree(config, "tp", n) for n in near_divisors(common, config.parallel.tp))


def _rows(model: Model) -> list[tuple[str, int, str]]:
    """List the tables whose rows tp divides: they can be padded without harm."""
    vocabulary = ("model.vocab", model.vocab, "token")
    positions = ("model.max_seq_len", model.max_seq_len, "position")
    return [vocabulary, positions] if model.position == "learned" else [vocabulary]


def _padded(key: str, number: int, tp: int) -> int:
    step = math.lcm(_PADDING, tp) if key == "model.vocab" else tp
    return -(-number // step) * step


def _table(key: str, what: str) -> Rule:
    """Return the rule that tp divides the rows of a table, unless tp must change for the blocks anyway."""

    def holds(config: Config) -> bool:
        rows = {name: number for name, number, _ in _rows(config.model)}
        return rows.get(key, 0) % config.parallel.tp == 0 or not _divides_blocks(config)

    def message(config: Config) -> str:
        more = f"unused rows may be added (no {what} uses them)"
        if config.model.init_from is not None:
            more = "a loaded model (model.init_from) keeps its number of rows"
        return f"must be a multiple of parallel.tp={config.parallel.tp}, which divides its rows; {more}"

    def nearest(config: Config) -> Iterator[str | None]:
        model, tp = config.model, config.parallel.tp
        number = next(rows for name, rows, _ in _rows(model) if name == key)
        loaded = model.init_from is not None
        fixed = [rows for _, rows, _ in _rows(model)] if loaded else []
        common = math.gcd(*_block_sizes(model).values(), *fixed, number)
        yield None if loaded else f"{key}={_padded(key, number, tp)}"
        yield with_degree(config, "tp", near_divisors(common, tp)[0])

    tables = ("model.vocab", "model.max_seq_len", "model.position")
    reads = ("parallel.tp", *tables, *_BLOCKS)
    return Rule(key, reads, holds, message, nearest)


def with_degree(config: Config, axis: str, degree: int) -> str:
    """Return the override of an axis, with those that it requires."""
    layout, model = config.parallel, config.model
    if axis == "pp" and degree == 1:
        return without_pipeline(config)
    overrides = [f"parallel.{axis}={degree}"]
    if axis == "tp":
        overrides += [f"{k}={_padded(k, n, degree)}" for k, n, _ in _rows(model) if n % degree]
        if degree == 1 and not layout.sequence_parallel:
            overrides.append("parallel.sequence_parallel=true")
    if axis == "cp" and degree == 1 and layout.cp_method != "ring":
        overrides.append("parallel.cp_method=ring")
    return " ".join(overrides)


# --- context parallelism --------------------------------------------------------------------------


def _ring_of_documents(key: str, asks: Callable[[Data], bool]) -> Rule:
    """Return the rule that a ring's attention has no mask of documents, for the key that asks for the mask."""

    def holds(config: Config) -> bool:
        layout = config.parallel
        return not asks(config.data) or layout.cp == 1 or layout.cp_method != "ring"

    return Rule(
        key,
        ("parallel.cp", "parallel.cp_method", "data.document_mask", "data.packing"),
        holds,
        lambda _: (
            "keeps attention within documents by a mask, which parallel.cp_method=ring does not "
            "support: it sees keys and values in chunks"
        ),
        lambda config: ["parallel.cp_method=ulysses", with_degree(config, "cp", 1)],
    )


def _heads_of_rank(config: Config) -> tuple[int, int]:
    """Return the heads and the key-value heads of a tp rank."""
    model, tp = config.model, config.parallel.tp
    return model.heads // tp, model.kv_head_count // tp


def _ulysses_divides(config: Config) -> bool:
    model, layout = config.model, config.parallel
    heads, kv_heads = model.heads, model.kv_head_count
    if layout.cp == 1 or layout.cp_method != "ulysses" or heads % layout.tp or kv_heads % layout.tp:
        return True
    return math.gcd(*_heads_of_rank(config)) % layout.cp == 0


def _undivided_heads(config: Config) -> str:
    heads, kv_heads = _heads_of_rank(config)
    return (
        f"must divide the heads of a rank where parallel.cp_method=ulysses: heads/tp = {heads} and "
        f"kv_heads/tp = {kv_heads}"
    )


def _near_cp(config: Config) -> list[str | None]:
    cp, length = config.parallel.cp, config.train.seq_len
    fits = length % _multiple_of(cp, _shares(config), ring=True) == 0
    smaller = near_divisors(math.gcd(*_heads_of_rank(config)), cp)[0]
    return ["parallel.cp_method=ring" if fits else None, with_degree(config, "cp", smaller)]


# --- the sequence ---------------------------------------------------------------------------------


def _shares(config: Config) -> int:
    """Return into how many shares tp divides the sequence; tp that must change implies nothing for it."""
    layout = config.parallel
    return layout.tp if layout.sequence_parallel and _divides_blocks(config) else 1


def _multiple_of(cp: int, shares: int, *, ring: bool) -> int:
    """Return the divisor that the sequence length needs; a ring's rank has one early and one late chunk."""
    return cp * math.lcm(2 if ring and cp > 1 else 1, shares)


def _sequence_step(config: Config) -> int:
    layout = config.parallel
    return _multiple_of(layout.cp, _shares(config), ring=layout.cp_method == "ring")


def _undivided_sequence(config: Config) -> str:
    layout, shares = config.parallel, _shares(config)
    why = []
    if layout.cp > 1:
        chunks = "two chunks" if layout.cp_method == "ring" else "one chunk"
        why.append(f"cp={layout.cp} gives every rank {chunks} ({layout.cp_method})")
    if shares > 1:
        why.append(f"tp={shares} divides it again (sequence_parallel)")
    return f"must be a multiple of {_sequence_step(config)}: {listed(why)}"


def _near_lengths(config: Config) -> Iterator[str | None]:
    layout, length, step = config.parallel, config.train.seq_len, _sequence_step(config)
    lengths = [n for n in near_multiples(step, length) if n <= config.model.max_seq_len]
    yield from (f"train.seq_len={n}" for n in lengths)
    if length % _multiple_of(layout.cp, 1, ring=layout.cp_method == "ring") == 0:
        yield "parallel.sequence_parallel=false"
    if not lengths:
        yield f"train.seq_len={step} model.max_seq_len={step}"


# --- expert parallelism ---------------------------------------------------------------------------


def expert_ranks(config: Config) -> int:
    """Return the ranks from which ep is taken: those of one sharded model's dp, and of cp."""
    layout = config.parallel
    return data_parallel(config) // layout.dp_replicate * layout.cp


def _divides_experts(config: Config) -> bool:
    ep, experts = config.parallel.ep, config.model.experts
    return experts == 0 or (experts % ep == 0 and expert_ranks(config) % ep == 0)


def _undivided_experts(config: Config) -> str:
    ep, ranks, experts = config.parallel.ep, expert_ranks(config), config.model.experts
    broken = [f"model.experts={experts}"] if experts % ep else []
    if ranks % ep:
        broken.append(f"the {counted(ranks, 'rank')} that it divides, (dp/dp_replicate)·cp")
    return f"must divide {listed(broken)}"


def _near_ep(config: Config) -> Iterator[str]:
    ep, experts = config.parallel.ep, config.model.experts
    common = math.gcd(experts, expert_ranks(config))
    yield from (f"parallel.ep={n}" for n in near_divisors(common, ep))
    enough = ep * config.parallel.dp_replicate
    if experts % ep == 0 and config.train.global_batch % enough == 0:
        yield f"parallel.dp={enough}"


RULES = (
    _REPLICAS,
    _SHARDED,
    idle(
        "parallel.sequence_parallel",
        ("parallel.tp",),
        lambda config: config.parallel.tp > 1,
        "parallel.tp=1",
    ),
    Rule("parallel.tp", ("parallel.tp", *_BLOCKS), _divides_blocks, _undivided_blocks, _near_tp),
    _table("model.vocab", "token"),
    _table("model.max_seq_len", "position"),
    idle(
        "parallel.cp_method",
        ("parallel.cp",),
        lambda config: config.parallel.cp > 1,
        "parallel.cp=1",
    ),
    _ring_of_documents("data.packing", lambda data: data.packing == "whole"),
    _ring_of_documents(
        "data.document_mask", lambda data: data.document_mask and data.packing == "stream"
    ),
    Rule(
        "parallel.cp",
        ("parallel.cp", "parallel.cp_method", "parallel.tp", "model.heads", "model.kv_heads"),
        _ulysses_divides,
        _undivided_heads,
        _near_cp,
    ),
    Rule(
        "train.seq_len",
        (
            *("parallel.cp", "parallel.cp_method", "parallel.tp", "parallel.sequence_parallel"),
            *("train.seq_len", *_BLOCKS),
        ),
        lambda config: config.train.seq_len % _sequence_step(config) == 0,
        _undivided_sequence,
        _near_lengths,
    ),
    idle(
        "parallel.ep",
        ("model.experts",),
        lambda config: config.model.experts > 0,
        "model.experts=0",
        "config",
    ),
    Rule(
        "parallel.ep",
        (
            *("parallel.ep", "parallel.dp", "parallel.dp_replicate", "parallel.cp"),
            "model.experts",
        ),
        _divides_experts,
        _undivided_experts,
        _near_ep,
    ),
)

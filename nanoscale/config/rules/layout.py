"""Rules of the axes dp, tp, cp and ep, and of the execution of blocks.

The rules of pp are in `pipeline`, the rules of the number of devices in `devices`.
"""

import math
from collections.abc import Callable, Iterator

from nanoscale.common.units import counted, listed
from nanoscale.config.dtypes import fp8_tile
from nanoscale.config.layout import SPLIT_BACKWARD
from nanoscale.config.model_math import experts
from nanoscale.config.rules.rule import Rule, data_parallel, other_than, refused, several
from nanoscale.config.schema import Config, Model

_PADDING = 128
"""Vocabularies are padded to a multiple of this, which suits the tiles of a GPU's products."""

# --- tensor parallelism ---------------------------------------------------------------------------

_BLOCKS = ("model.heads", "model.kv_heads", "model.ffn", "model.shared_ffn", "model.dense_ffn")
"""The sizes of a block that tp divides; the width of experts unless they are whole on a rank."""
_MIXTURE = ("model.experts", "model.hf_config")
_OVER_TP = ("parallel.ep_over_tp", "model.experts")


def _undivided(config: Config) -> list[str]:
    model, tp = config.model, config.parallel.tp
    if model.source == "hf":  # transformers is asked before the launch
        return []
    dense = model.dense_ffn if model.dense_layers else 0
    ffn = 0 if model.experts and config.parallel.ep_over_tp else model.ffn
    sizes = (model.heads, model.kv_head_count, ffn, model.shared_ffn, dense)
    return [f"{key}={size}" for key, size in zip(_BLOCKS, sizes, strict=True) if size % tp]


def _divides_blocks(config: Config) -> bool:
    return not _undivided(config)


def _table(key: str, what: str, rows: Callable[[Model], int]) -> Rule:
    """Return the rule that tp divides the rows of a table, unless tp must change for the blocks anyway.

    The rows can be padded without harm, except the rows of a loaded model.
    """

    def message(config: Config) -> str:
        more = f"unused rows may be added (no {what} uses them)"
        if config.model.init_from is not None:
            more = "a loaded model (model.init_from) keeps its number of rows"
        return f"must be a multiple of parallel.tp={config.parallel.tp}, which divides its rows; {more}"

    def advice(config: Config) -> Iterator[str]:
        tp = config.parallel.tp
        if config.model.init_from is None:
            step = math.lcm(_PADDING, tp) if key == "model.vocab" else tp
            yield f"{key}={-(-rows(config.model) // step) * step}"
        yield "parallel.tp<"

    return Rule(key,
        (
            "parallel.tp", "model.vocab", "model.max_seq_len", "model.position",
            "model.dense_layers", "model.source", *_BLOCKS, *_OVER_TP,
        ),
        lambda config: rows(config.model) % config.parallel.tp == 0 or not _divides_blocks(config),
        message, advice)  # fmt: skip


# --- context parallelism --------------------------------------------------------------------------

_RING = {"parallel.cp": several, "parallel.cp_method": "ring"}


def _heads_of_rank(config: Config) -> tuple[int, int]:
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


# --- the sequence ---------------------------------------------------------------------------------

_ROW = 64
"""Tokens of which a cut row is a multiple: few lengths mean few compilations."""


def _shares(config: Config) -> int:
    """Return into how many shares tp divides the sequence; tp that must change implies nothing for it."""
    layout = config.parallel
    return layout.tp if layout.sequence_parallel and _divides_blocks(config) else 1


def sequence_step(config: Config) -> int:
    """Return the divisor that the sequence length needs; a ring's rank has one early and one late chunk."""
    layout = config.parallel
    chunks = 2 if layout.cp_method == "ring" and layout.cp > 1 else 1
    return layout.cp * math.lcm(chunks, _shares(config))


def row_step(config: Config) -> int | None:
    """Return the multiple to which rows with padding at their ends are cut; None if they stay whole.

    They stay whole if a pipeline needs equal shapes, if frequencies depend on the length of the sequence, and
    if the training counts padding too.
    """
    layout, model, train = config.parallel, config.model, config.train
    scaling = model.rope_scaling.kind if model.rope_scaling is not None else ""
    counts_all = model.balance != "none" or config.optimizer.qk_clip is not None
    is_padded = train.is_of_answers or train.objective == "classify"
    if not is_padded or layout.pp > 1 or scaling in ("dynamic", "longrope") or counts_all:
        return None
    tile = fp8_tile(config.precision.fp8_recipe)
    return math.lcm(sequence_step(config), tile * layout.cp * layout.tp, _ROW)


def _undivided_sequence(config: Config) -> str:
    layout, shares = config.parallel, _shares(config)
    why = []
    if layout.cp > 1:
        chunks = "two chunks" if layout.cp_method == "ring" else "one chunk"
        why.append(f"cp={layout.cp} gives every rank {chunks} ({layout.cp_method})")
    if shares > 1:
        why.append(f"tp={shares} divides it again (sequence_parallel)")
    return f"must be a multiple of {sequence_step(config)}: {listed(why)}"


# --- expert parallelism ---------------------------------------------------------------------------


def expert_ranks(config: Config) -> int:
    """Return the number of ranks that ep must divide: one sharded model's dp, times cp, and possibly tp."""
    layout = config.parallel
    ranks = data_parallel(config) // layout.dp_replicate * layout.cp
    return ranks * layout.tp // layout.expert_tp


def _has_experts(config: Config) -> bool:
    return config.parallel.ep == 1 or experts(config.model) > 0


def _divides_experts(config: Config) -> bool:
    ep, number = config.parallel.ep, experts(config.model)
    return number == 0 or (number % ep == 0 and expert_ranks(config) % ep == 0)


def _fills_tp(config: Config) -> bool:
    layout = config.parallel
    return not layout.ep_over_tp or layout.ep == 1 or layout.ep % layout.tp == 0


def _undivided_experts(config: Config) -> str:
    ep, ranks, number = config.parallel.ep, expert_ranks(config), experts(config.model)
    own = "model.experts={}" if config.model.experts else "the model's {} experts"
    broken = [own.format(number)] if number % ep else []
    if ranks % ep:
        times_tp = "·tp" if config.parallel.ep_over_tp else ""
        broken.append(
            f"the {counted(ranks, 'rank')} that it divides, (dp/dp_replicate)·cp{times_tp}"
        )
    return f"must divide {listed(broken)}"


# --- the execution of blocks ----------------------------------------------------------------------

_MODE = "parallel.activation_checkpointing"
_SPLITS = {"parallel.pp": several, "parallel.schedule": tuple(SPLIT_BACKWARD)}
_OFF = "backend.compile=off"
_COMPILED = {"backend.compile": "on"}

EXECUTION = (
    Rule("parallel.checkpoint_every", ("parallel.checkpoint_every", _MODE, "model.layers"),
        lambda config: (
            config.parallel.activation_checkpointing not in ("full", "selective")
            or config.parallel.checkpoint_every <= config.model.layers
        ),
        "is more than model.layers={c.model.layers}: nothing would be recomputed",
        ("parallel.checkpoint_every<",)),
    refused(_MODE, {_MODE: "selective", **_SPLITS},
        "cannot hold with parallel.schedule={c.parallel.schedule}: it goes backward through a "
        "block twice, for the gradients of inputs and of weights, and the activations that "
        "selective stores are freed after the first",
        f"{_MODE}=full", f"{_MODE}=none", "parallel.schedule=interleaved-1f1b"),
    refused("backend.compile", {**_COMPILED, **_SPLITS},
        "cannot hold with parallel.schedule={c.parallel.schedule}: the backward pass of a compiled "
        "block cannot be split", _OFF, "parallel.schedule=interleaved-1f1b"),
    refused("backend.compile", {**_COMPILED, "parallel.offload_activations": True},
        "cannot hold with parallel.offload_activations=true: a compiled block keeps its activations itself",
        _OFF, "parallel.offload_activations=false"),
    refused("backend.attention", {"backend.attention": other_than("auto"), **_RING},
        "would be ignored by parallel.cp_method=ring, which has kernels of its own",
        "backend.attention=auto", "parallel.cp_method=ulysses"),
)  # fmt: skip

RULES = (
    Rule("parallel.dp_replicate", ("parallel.dp", "parallel.dp_replicate"),
        lambda config: data_parallel(config) % config.parallel.dp_replicate == 0,
        "must divide parallel.dp, which is {c.parallel.dp}", ("parallel.dp_replicate",)),
    refused("parallel.dp_replicate", {"parallel.dp_replicate": several, "zero.stage": 0},
        "replicates a sharded model, and zero.stage=0 shards nothing",
        "zero.stage=3", "parallel.dp_replicate=1"),
    Rule("parallel.tp",
        ("parallel.tp", "model.source", "model.dense_layers", *_BLOCKS, *_OVER_TP), _divides_blocks,
        lambda config: (
            f"must divide {listed(_undivided(config))}: a rank holds whole heads, of keys and values too, "
            "and an equal share of the block"
        ), ("parallel.tp",)),
    _table("model.vocab", "token", lambda model: model.vocab),
    _table("model.max_seq_len", "position",
        lambda model: model.max_seq_len if model.position == "learned" else 0),
    Rule("parallel.cp",
        ("parallel.cp", "parallel.cp_method", "parallel.tp", "model.heads", "model.kv_heads"),
        _ulysses_divides, _undivided_heads, ("parallel.cp_method=ring", "parallel.cp<")),
    Rule("train.seq_len",
        (
            *("parallel.cp", "parallel.cp_method", "parallel.tp", "parallel.sequence_parallel"),
            *("train.seq_len", "model.source", "model.dense_layers", *_BLOCKS, *_OVER_TP),
        ), lambda config: config.train.seq_len % sequence_step(config) == 0, _undivided_sequence,
        ("train.seq_len", "parallel.sequence_parallel=false")),
    Rule("parallel.ep", ("parallel.ep", *_MIXTURE), _has_experts,
        "divides experts, and this model has none (model.experts=0)", ("parallel.ep=1",)),
    Rule("parallel.ep",
        (
            *("parallel.ep", "parallel.dp", "parallel.dp_replicate", "parallel.cp", "parallel.tp"),
            *_MIXTURE, *_OVER_TP,
        ),
        _divides_experts, _undivided_experts, ("parallel.ep", "parallel.dp")),
    Rule("parallel.ep", ("parallel.ep", "parallel.ep_over_tp", "parallel.tp"), _fills_tp,
        "must be a multiple of parallel.tp={c.parallel.tp} with parallel.ep_over_tp=true",
        ("parallel.ep", "parallel.ep_over_tp=false")),
)  # fmt: skip

"""The parameters of every pipeline rank, divided by tp: its stages, and each stage's units."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate
from typing import NamedTuple

from nanoscale.config import model_math, parameters
from nanoscale.config.layout import stage_layers, stages_of
from nanoscale.config.resolved import ResolvedConfig
from nanoscale.config.schema import Model

EXPERT_MATRICES = 3
"""The matrices of an expert: gate, up and down."""


@dataclass(frozen=True, slots=True)
class ExpertShards:
    """The experts of a block on a rank of ep."""

    count: int
    each: int
    """Elements of one expert, on a rank of tp."""
    hidden: int
    ep: int
    """The ranks of data parallelism with different experts, for each rank with the same ones."""

    @property
    def numel(self) -> int:
        """Elements of all experts, before ZeRO."""
        return self.count * self.each

    def shard(self, ranks: int) -> int:
        """Return the elements on the rank with the largest shard, if ZeRO shards over `ranks`.

        Only ranks / ep ranks have the same experts. A shard has whole experts, or if there are too few, an
        equal part of each expert (`parallel.expert.shard_dimension`).
        """
        peers = ranks // self.ep
        if self.count % peers and self.hidden % peers == 0:
            return self.numel // peers
        return -(-self.count // peers) * self.each


@dataclass(frozen=True, slots=True)
class Unit:
    """The parameters of one module, which are gathered and reduced together."""

    name: str
    count: int
    """The number of equal units in the stage."""
    matrices: tuple[parameters.Shape, ...]
    """Rows and width of each matrix, on a rank of tp."""
    vectors: tuple[int, ...]
    """Lengths of norms and biases, on a rank of tp."""
    experts: ExpertShards | None = None

    @property
    def numel(self) -> int:
        """Elements of one unit, before ZeRO."""
        experts = self.experts.numel if self.experts else 0
        return sum(rows * width for rows, width in self.matrices) + sum(self.vectors) + experts

    @property
    def largest_product(self) -> int:
        """Elements of the last matrix, or of the last matrices of all experts. The backward pass begins with
        them."""
        if self.experts:
            return self.experts.numel // EXPERT_MATRICES
        rows, width = self.matrices[-1]
        return rows * width

    def shard(self, ranks: int) -> int:
        """Return the elements of one unit on the rank with the largest shard. ZeRO shards matrices by rows."""
        return self.matrix_shard(ranks) + sum(-(-length // ranks) for length in self.vectors)

    def matrix_shard(self, ranks: int) -> int:
        """Return the number of matrix elements in `shard`."""
        matrices = sum(-(-rows // ranks) * width for rows, width in self.matrices)
        if self.experts is None:
            return matrices
        return matrices + (self.experts.shard(ranks) if ranks > 1 else self.experts.numel)


@dataclass(frozen=True, slots=True)
class Stage:
    """One (virtual) stage of a pipeline, or the whole model if there is no pipeline."""

    number: int
    layers: int
    dense: int
    """The layers of them that have no experts, in a model with experts."""
    first: bool
    last: bool
    units: tuple[Unit, ...]
    """The blocks, then embedding and head, or the root's remaining parameters."""
    numel: int
    """Elements of all units, before ZeRO."""

    def shard(self, ranks: int) -> int:
        """Return the elements of all units on the rank with the largest shard."""
        return sum(unit.count * unit.shard(ranks) for unit in self.units)


@dataclass(frozen=True, slots=True)
class RankParameters:
    """The numbers of parameters of a pipeline rank, after tp. Without "shard" in its name, a field is before
    ZeRO."""

    stages: tuple[Stage, ...]
    blocks: int
    first: bool
    """True for the rank of the model's first stage, which has the embedding."""
    last: bool
    """True for the rank of the last stage, which has the head."""
    numel: int
    shard: int
    """The largest shard of any rank."""
    block: int
    """Parameters of the largest block."""
    head: int
    """Parameters gathered for the loss: head and norm, or the tied embedding."""
    embedding: int
    rest: int
    """Parameters of the root module, which are gathered while any micro batch is in flight."""
    largest_product: int
    """`Unit.largest_product` of the largest block."""
    head_shard: int
    in_blocks: int = 0
    """Elements of the matrices of blocks, before ZeRO."""
    in_blocks_shard: int = 0
    experts: int = 0
    adapters: RankParameters | None = None
    """LoRA's adapters alone; None without LoRA."""

    @property
    def trained(self) -> RankParameters:
        """The parameters that have gradients and optimizer states: all of them, or only the adapters."""
        return self if self.adapters is None else self.adapters


def rank_holdings(config: ResolvedConfig, shards: int) -> tuple[RankParameters, ...]:
    """Return the parameters of every pipeline rank if ZeRO shards over `shards` ranks."""
    return _rank_holdings(_key(config), shards)


def kinds_of_ranks(config: ResolvedConfig, shards: int) -> tuple[RankParameters, ...]:
    """Return one rank for each combination of blocks, embedding and head. Other ranks take the same time."""
    return _kinds(_key(config), shards)


def all_stages(config: ResolvedConfig) -> list[Stage]:
    """Return the stages in the order of the model's layers."""
    stages = [stage for rank in rank_stages(config) for stage in rank]
    return sorted(stages, key=lambda stage: stage.number)


def rank_stages(config: ResolvedConfig) -> tuple[tuple[Stage, ...], ...]:
    """Return the stages of every pipeline rank, in the order of the model's layers."""
    return _rank_stages(_key(config))


class _Key(NamedTuple):
    """The model, degrees and adapters that determine the stages of all ranks."""

    model: Model
    tp: int
    ep: int
    expert_tp: int
    data_ep: int
    pp: int
    virtual_stages: int
    schedule: str
    layers_per_stage: tuple[int, ...] | None
    whole_ends: bool
    """True if tp does not divide embedding and head, as in the DeepSpeed backend."""
    adapter_rank: int
    adapted: tuple[str, ...]
    """The names of a block's layers that have adapters."""
    dora: bool
    quantized: bool
    """True if the block's other matrices are in 4 bits, which are not among its parameters here."""


def _key(config: ResolvedConfig) -> _Key:
    layout, lora = config.parallel, config.lora
    return _Key(
        config.model,
        layout.tp,
        layout.ep,
        layout.expert_tp,
        layout.data_ep,
        layout.pp,
        layout.virtual_stages,
        layout.schedule,
        tuple(layout.layers_per_stage) if layout.layers_per_stage is not None else None,
        config.backend.name == "deepspeed",
        lora.rank,
        tuple(model_math.adapted_layers(config.model, lora).values()),
        lora.dora,
        lora.rank > 0 and lora.base == "nf4",
    )


@lru_cache(maxsize=4096)
def _rank_stages(key: _Key) -> tuple[tuple[Stage, ...], ...]:
    layers = list(key.layers_per_stage) if key.layers_per_stage is not None else None
    blocks = stage_layers(key.model, key.pp * key.virtual_stages, layers)
    starts = accumulate(blocks, initial=0)
    stages = [
        _stage(key, number, count, min(max(0, key.model.dense_layers - start), count))
        for number, (count, start) in enumerate(zip(blocks, starts, strict=False))
    ]
    return tuple(
        tuple(stages[k] for k in stages_of(key.schedule, key.pp, key.virtual_stages, rank))
        for rank in range(key.pp)
    )


@lru_cache(maxsize=4096)
def _rank_holdings(key: _Key, shards: int) -> tuple[RankParameters, ...]:
    tied = key.model.tie_embeddings and key.pp == 1
    ranks = [_parameters(stages, shards, tied) for stages in _rank_stages(key)]
    if key.adapter_rank:
        matrices = _adapter_matrices(key)
        ranks = [replace(rank, adapters=_adapters(rank, shards, matrices)) for rank in ranks]
    return tuple(ranks)


def _adapters(
    rank: RankParameters, shards: int, matrices: tuple[parameters.Shape, ...]
) -> RankParameters:
    """Return the adapters of a rank's stages, whose matrices in a block are `matrices`."""
    units = [Unit("block", stage.layers, matrices, ()) for stage in rank.stages]
    stages = (
        replace(stage, units=(unit,), numel=unit.count * unit.numel)
        for stage, unit in zip(rank.stages, units, strict=True)
    )
    return _parameters(tuple(stages), shards, tied=False)


@lru_cache(maxsize=4096)
def _kinds(key: _Key, shards: int) -> tuple[RankParameters, ...]:
    kinds: dict[tuple[int, bool, bool], RankParameters] = {}
    for rank in _rank_holdings(key, shards):
        kinds.setdefault((rank.blocks, rank.first, rank.last), rank)
    return tuple(kinds.values())


def _parameters(stages: tuple[Stage, ...], shards: int, tied: bool) -> RankParameters:
    units = [unit for stage in stages for unit in stage.units if unit.count]
    blocks = [unit for unit in units if unit.name == "block"]
    named = {unit.name: unit for unit in units}
    numel = {name: unit.numel for name, unit in named.items()}
    rest = numel.get("rest", 0)
    return RankParameters(
        stages=stages,
        blocks=sum(stage.layers for stage in stages),
        first=stages[0].first,
        last=stages[-1].last,
        numel=sum(stage.numel for stage in stages),
        shard=sum(stage.shard(shards) for stage in stages),
        block=max((block.numel for block in blocks), default=0),
        head=rest if tied else numel.get("head", 0),
        embedding=rest if tied else numel.get("embedding", 0),
        rest=rest,
        largest_product=max((block.largest_product for block in blocks), default=0),
        head_shard=named["head"].shard(shards) if "head" in named else 0,
        in_blocks=sum(block.count * block.matrix_shard(1) for block in blocks),
        in_blocks_shard=sum(block.count * block.matrix_shard(shards) for block in blocks),
        experts=sum(it.count * it.experts.numel for it in blocks if it.experts),
    )


def _stage(key: _Key, number: int, layers: int, dense: int) -> Stage:
    """Return a stage, whose first `dense` layers have no experts."""
    model, tp = key.model, 1 if key.whole_ends else key.tp
    first, last = number == 0, number == key.pp * key.virtual_stages - 1
    local = {name: parameter.local(tp) for name, parameter in parameters.ends(model).items()}
    norm = tuple(length for shape in local.values() if len(shape) == 1 for length in shape)
    vocabulary = (local["embed.weight"],)
    rest = (local["positions.weight"],) if first and "positions.weight" in local else ()
    units = [_block(key, model, layers - dense)]
    if dense:
        units.append(_block(key, model.dense, dense))
    if model.tie_embeddings and first and last:
        units.append(Unit("rest", 1, vocabulary + rest, norm))
    else:
        if first:
            units.append(Unit("embedding", 1, vocabulary, ()))
        if last:
            units.append(Unit("head", 1, vocabulary, norm))
        if rest:
            units.append(Unit("rest", 1, rest, ()))
    numel = sum(unit.count * unit.numel for unit in units)
    return Stage(number, layers, dense, first, last, tuple(units), numel)


@lru_cache(maxsize=4096)
def _block(key: _Key, model: Model, count: int) -> Unit:
    """Return the unit of `count` equal blocks."""
    ep = key.ep
    table = parameters.block(model).values()
    local = [parameter.local(key.tp, ep, key.expert_tp) for parameter in table]
    experts = None
    if model.experts:
        each = sum(math.prod(shape[1:]) for shape in local if len(shape) == 3)
        experts = ExpertShards(model.experts // ep, each, model.hidden, key.data_ep)
    own_matrices = (shape for shape in local if len(shape) == 2 and not key.quantized)
    matrices = (*_adapter_matrices(key), *own_matrices)
    vectors = tuple(shape[0] for shape in local if len(shape) == 1)
    return Unit("block", count, matrices, vectors, experts)


def _adapter_matrices(key: _Key) -> tuple[parameters.Shape, ...]:
    """Return the matrices A and B of a block's adapters on a rank of tp (`parallel.tensor.divide_adapters`) and
    DoRA's magnitudes as matrices with one column."""
    table, rank = parameters.block(key.model), key.adapter_rank
    matrices: list[parameters.Shape] = []
    for name in key.adapted:
        outputs, inputs = table[f"{name}.weight"].local(key.tp)
        matrices += [*([(outputs, 1)] if key.dora else []), (rank, inputs), (outputs, rank)]
    return tuple(matrices)

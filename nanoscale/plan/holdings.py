"""What of the model each pipeline rank holds, as far as time is concerned."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from nanoscale.config.schema import Config, Model
from nanoscale.config.stages import rank_of, stage_layers
from nanoscale.plan.blocks import linears


@dataclass(frozen=True, slots=True)
class Holding:
    """The part of the model that a pipeline rank has."""

    blocks: int
    embedding: bool
    head: bool


def rank_holdings(config: Config) -> tuple[Holding, ...]:
    """What each pipeline rank has of the model."""
    return _holdings(config.parallel.schedule, config.parallel.pp, layers_of_stages(config))


@lru_cache(maxsize=1024)
def _holdings(schedule: str, pp: int, layers: tuple[int, ...]) -> tuple[Holding, ...]:
    held = [0] * pp
    for stage, count in enumerate(layers):
        held[rank_of(schedule, pp, stage)] += count
    last = rank_of(schedule, pp, len(layers) - 1)
    return tuple(Holding(count, rank == 0, rank == last) for rank, count in enumerate(held))


@lru_cache(maxsize=1024)
def kinds_of_ranks(schedule: str, pp: int, layers: tuple[int, ...]) -> tuple[Holding, ...]:
    """The different things that ranks hold."""
    return tuple(dict.fromkeys(_holdings(schedule, pp, layers)))


def layers_of_stages(config: Config) -> tuple[int, ...]:
    """Blocks of every stage, in the model's order."""
    layout = config.parallel
    assert isinstance(layout.virtual_stages, int)
    stages = layout.pp * layout.virtual_stages if layout.pp > 1 else 1
    own = layout.layers_per_stage
    return _divided(config.model, stages, tuple(own) if own else None)


@lru_cache(maxsize=1024)
def _divided(model: Model, stages: int, own: tuple[int, ...] | None) -> tuple[int, ...]:
    return tuple(stage_layers(model, stages, list(own) if own else None))


@lru_cache(maxsize=1024)
def block_parameters(model: Model, tp: int) -> int:
    """Of one block on a rank of tp; the norms are whole."""
    return sum(p.inputs * p.outputs for p in linears(model, tp)) + 2 * model.hidden


def rank_parameters(model: Model, tp: int, holding: Holding) -> int:
    """Of a rank before ZeRO; where one rank has both ends and they are tied, the table counts once."""
    table = model.vocab * model.hidden // tp
    both = holding.embedding and holding.head and model.tie_embeddings
    ends = 1 if both else holding.embedding + holding.head
    return holding.blocks * block_parameters(model, tp) + ends * table

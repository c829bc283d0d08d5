"""The parallelization of a stage of the model; read it from top to bottom."""

from __future__ import annotations

from functools import partial

from torch.distributed import ProcessGroup
from torch.distributed._functional_collectives import all_reduce

from nanoscale.config.layout import is_replicated
from nanoscale.config.resolved import ResolvedConfig
from nanoscale.models import lora
from nanoscale.models.hf_model import HFModel
from nanoscale.models.moe import Router
from nanoscale.models.transformer import Attention, LatentAttention, Transformer
from nanoscale.parallel import activation, compile, context, expert, fsdp, tensor
from nanoscale.parallel.mesh import Layout


def parallelize(model: Transformer, config: ResolvedConfig, layout: Layout) -> None:
    """Distribute a stage on the meta device over the ranks, in place.

    The order matters: matrices are divided first, since all later steps see only a rank's shard of them;
    recomputed regions are compiled as a whole; and parameters are gathered outside of both.
    """
    parallel = config.parallel
    if layout.tensor is not None and isinstance(model, HFModel):
        tensor.apply_plan(model, layout.tensor)
    elif layout.tensor is not None:
        tensor.apply(model, layout.tensor, parallel.sequence_parallel)
    if config.model.experts:
        expert.apply(model, layout.tensor, layout.experts, parallel.sequence_parallel)
    if config.lora.rank:
        lora.attach(model, config.lora)
        if layout.tensor is not None:
            tensor.divide_adapters(model, layout.tensor)
    prepare_blocks(model, config, layout.context, layout.coordinates.cp)
    if layout.data is not None and not is_replicated(config):
        fsdp.shard(model, config, layout.data, layout.experts)


def prepare_blocks(
    model: Transformer, config: ResolvedConfig, context_group: ProcessGroup | None, cp_rank: int
) -> None:
    """Apply the steps between dividing matrices and sharding parameters, for either backend; in place."""
    if context_group is not None:
        _divide_sequence(model, config, context_group, cp_rank)
    activation.apply(model.layers, config.parallel)
    model.run_layers = activation.make_run_layers(config.parallel, model.run_layers)
    compile.apply(model.layers, config)
    compile.fuse_loss(model, config)


def _divide_sequence(
    model: Transformer, config: ResolvedConfig, group: ProcessGroup, rank: int
) -> None:
    method, degree = config.parallel.cp_method, config.parallel.cp
    model.sequence_length = lambda seq: seq * degree
    model.token_positions = lambda seq, device: context.positions(method, seq, rank, degree, device)
    for module in model.modules():
        if isinstance(module, Attention | LatentAttention):
            module.core = context.make_core(method, group, config.model)
        if isinstance(module, Router):
            module.sum_over_sequence = partial(all_reduce, reduceOp="sum", group=group)
    if model.objective is not None:
        model.objective.sum_over_sequence = partial(all_reduce, reduceOp="sum", group=group)
        model.objective.counts_values = rank == 0

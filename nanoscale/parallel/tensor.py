"""Tensor parallelism: matrices split by column then by row, the vocabulary and the sequence divided.

Source: Shoeybi et al. 2019 (Megatron-LM, arXiv:1909.08053), section 3; the division of the sequence between
the blocks is Korthikanti et al. 2022, arXiv:2205.05198, section 4.2.2.
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_reduce
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.nn import functional as F

from nanoscale.models.head import Head, TiedHead, VocabularyShard, logits_or_loss
from nanoscale.models.hf_model import HFModel, tp_styles
from nanoscale.models.lora import Adapter
from nanoscale.models.moe import MixtureOfExperts
from nanoscale.models.transformer import Transformer, WholeNorm
from nanoscale.parallel.local_parameters import (
    Placements,
    Read,
    distribute,
    divide,
    divide_tree,
    partial_grad,
    rank0_only,
    replicated_grad,
)
from nanoscale.parallel.sequence_parallel import ResidualStream, mean_over_ranks

_MLPS = ("mlp", "mlp.shared")
_BY_COLUMN = (
    *(f"attention.{name}" for name in ("wq", "wk", "wv", "wkv_b")),
    *(f"{mlp}.{name}" for mlp in _MLPS for name in ("gate", "up")),
)
_BY_ROW = ("attention.wo", *(f"{mlp}.down" for mlp in _MLPS))
_LATENTS = ("attention.wq_a", "attention.wkv_a")
_NORMS = ("attention_norm", "attention_post_norm", "mlp_norm", "mlp_post_norm")


def apply(model: Transformer, mesh: DeviceMesh, sequence_parallel: bool) -> None:
    """Split one stage of a model over the ranks of `mesh`, in place, on any device.

    Between the blocks the residual stream is `[batch, seq / tp, hidden]` with sequence parallelism, else
    whole. Every rank has the logits of its shard of the vocabulary.
    """
    stream = ResidualStream.on_mesh(mesh, sequence_parallel)
    for block in model.layers.values():
        divide_block(block, mesh, stream)
    if model.first:
        _divide_rows(model.embed, mesh, stream)
    if model.first and model.shape.position == "learned":
        _divide_rows(model.positions, mesh, stream)
    if model.last:
        _replicate(model.norm, model.norm, mesh, stream)
        _divide_head(model.head, mesh, stream)
    model.sequence_shards = mesh.size() if sequence_parallel else 1


def apply_plan(model: HFModel, mesh: DeviceMesh) -> None:
    """Split a model of transformers by its own plan over the ranks of `mesh`, in place, on the meta device.

    Layers by column and by row are divided, and experts, of which each rank has whole ones; all else is whole
    on every rank, and so is the residual stream.
    """
    stream, styles = ResidualStream.on_mesh(mesh, divided=False), tp_styles(model.hf, mesh.size())
    shared = getattr(model.hf.config, "qk_rope_head_dim", 0)
    names = {block: name for name, block in model.hf.named_modules()}
    in_blocks = {module for block in model.layers.values() for module in block.modules()}
    for block in model.layers.values():
        prefix = f"{names[block]}."
        divisions = {
            name: _division(module, styles, f"{prefix}{name}".rstrip("."))
            for name, module in block.named_modules()
        }
        twin = divide_tree(block, mesh, divisions)
        for name, module in twin.named_modules():
            _connect(module, styles.get(f"{prefix}{name}"), stream, mesh.get_local_rank(), shared)
    for name, module in list(model.hf.named_modules()):
        if module not in in_blocks and module._parameters:
            divide(module, module, mesh, *_division(module, {}, name))
    model.tie()


def _division(module: nn.Module, styles: dict[str, str], name: str) -> tuple[Placements, Read]:
    """Return the placements of a module's own parameters by the plan, and how its code reads them."""
    style = styles.get(name)
    placements: dict[str, Placement] = {
        leaf: Shard(0) if f"{name}.{leaf}" in styles else Replicate() for leaf in module._parameters
    }
    if style in ("colwise", "moe_tp_experts"):
        return dict.fromkeys(placements, Shard(0)), replicated_grad
    if style == "rowwise":
        return placements | {"weight": Shard(1)}, rank0_only
    is_inside = style == "replicated_with_grad_allreduce" or name.endswith(".act_fn")
    return placements, partial_grad if is_inside else replicated_grad


def _connect(
    module: nn.Module, style: str | None, stream: ResidualStream, rank: int, shared: int
) -> None:
    """Connect a divided module with the stream; all heads use `shared` numbers of latent keys."""
    if style == "colwise":
        module.register_forward_pre_hook(lambda _, inputs: stream.gather(inputs[0]))
    elif style == "rowwise":
        module.register_forward_hook(lambda _, __, partial_sum: stream.reduce(partial_sum))
    elif style == "mla_kv_a_proj":
        module.register_forward_hook(lambda _, __, keys: _share_keys(stream, shared, keys))
    elif style == "moe_tp_experts":
        experts: Any = module
        experts.num_experts //= stream.ranks
        experts._is_expert_parallel = True  # there are numbers of experts that it does not have
        choose = partial(_choose_local, stream, rank, experts.num_experts)
        experts.register_forward_pre_hook(lambda it, inputs: choose(_others(it), *inputs))
        experts.register_forward_hook(lambda _, __, partial_sum: stream.reduce(partial_sum))


def _share_keys(stream: ResidualStream, shared: int, keys: Tensor) -> Tensor:
    """Sum the gradient of the keys that all heads share; heads sum the latent's gradient where they read it."""
    latent, rotated = keys.tensor_split([keys.shape[-1] - shared], dim=-1)
    return torch.cat((latent, stream.gather(rotated)), dim=-1)


def _others(experts: Any) -> int:
    """Return the number that stands for experts of other ranks, whose results have the weight 0."""
    # In fp64 a loop over experts runs, which in Nemotron-H's code takes every number for one of its own.
    is_loop = experts.config._experts_implementation == "eager"
    return 0 if is_loop else experts.num_experts


def _choose_local(
    stream: ResidualStream,
    rank: int,
    count: int,
    others: int,
    hidden: Tensor,
    chosen: Tensor,
    weights: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the tokens, and their choices among this rank's `count` experts, in place of others `others`."""
    local = chosen - rank * count
    is_local = (local >= 0) & (local < count)
    weights = stream.gather(weights) * is_local
    return stream.gather(hidden), local.where(is_local, others), weights


def divide_block(block: nn.Module, mesh: DeviceMesh, stream: ResidualStream) -> None:
    """Divide one block, in place, except the router and the experts of an MoE."""
    for name, module in block.named_modules():
        if name in _BY_COLUMN:
            divide(module, block, mesh, {"weight": Shard(0), "bias": Shard(0)}, replicated_grad)
        if name in _BY_ROW:
            divide(module, block, mesh, {"weight": Shard(1), "bias": Replicate()}, rank0_only)
        if name in _LATENTS:  # every rank has whole latents, and the gradient of its heads' share
            divide(module, block, mesh, {"weight": Replicate()}, partial_grad)
        if name in _NORMS:
            _replicate(module, block, mesh, stream)
        if isinstance(module, WholeNorm):
            module.mean_over_ranks = partial(mean_over_ranks, stream)
            divide(module, block, mesh, {"weight": Shard(0)}, replicated_grad)
        elif isinstance(module, nn.RMSNorm) and name.startswith("attention."):  # for a rank's heads
            divide(module, block, mesh, {"weight": Replicate()}, partial_grad)
        if getattr(module, "sinks", None) is not None:
            divide(module, block, mesh, {"sinks": Shard(0)}, replicated_grad)
        if name in ("attention", "mlp") and not isinstance(module, MixtureOfExperts):
            stream.wrap(module)


def divide_adapters(model: Transformer, mesh: DeviceMesh) -> None:
    """Divide the LoRA adapters of a stage whose layers `apply` has divided, in place.

    For a layer divided by column every rank has all of A and its rows of B; for one divided by row its columns
    of A and all of B. So an adapter's output is divided like the layer's own result, and no further
    communication is needed, except with DoRA the sum of the squares of a row that is divided.
    """
    for block in model.layers.values():
        for layer in block.modules():
            if isinstance(getattr(layer, "adapter", None), Adapter):
                _divide_adapter(layer, block, mesh)


def _divide_adapter(layer: nn.Module, block: nn.Module, mesh: DeviceMesh) -> None:
    weight, adapter = layer.weight, layer.adapter
    assert isinstance(weight, DTensor) and isinstance(adapter, Adapter)
    columns = weight.placements[0] == Shard(0)
    placements = {
        "a": Replicate() if columns else Shard(1),
        "b": Shard(0) if columns else Replicate(),
        "magnitude": Shard(0) if columns else Replicate(),
    }
    divide(adapter, block, mesh, placements, partial_grad)
    if not columns:
        adapter.sum_over_ranks = partial(all_reduce, reduceOp="sum", group=mesh.get_group())
        adapter.adds_bias = mesh.get_local_rank() == 0


def _replicate(norm: nn.Module, unit: nn.Module, mesh: DeviceMesh, stream: ResidualStream) -> None:
    """Replicate a norm of the stream, which sees a part of its tokens, or all of them on every rank."""
    placements = {"weight": Replicate(), "bias": Replicate()}
    divide(norm, unit, mesh, placements, partial_grad if stream.divided else replicated_grad)


def _divide_rows(embedding: nn.Embedding, mesh: DeviceMesh, stream: ResidualStream) -> None:
    """Divide an embedding: every rank looks up the tokens `[…, seq]` whose rows it has."""
    distribute(embedding, mesh, {"weight": Shard(0)})
    look_up = partial(_look_up, embedding, mesh.get_local_rank(), stream)
    embedding.forward = look_up  # type: ignore[method-assign]


def _look_up(embedding: nn.Embedding, rank: int, stream: ResidualStream, tokens: Tensor) -> Tensor:
    rows = replicated_grad(embedding.weight)
    local_tokens = tokens - rank * rows.shape[0]
    is_local = (local_tokens >= 0) & (local_tokens < rows.shape[0])
    return stream.reduce(
        F.embedding(local_tokens.where(is_local, 0), rows) * is_local.unsqueeze(-1)
    )


def _divide_head(head: Head | TiedHead, mesh: DeviceMesh, stream: ResidualStream) -> None:
    """Divide a head: every rank computes the logits of its rows of the vocabulary, for all tokens."""
    apply_rows = partial(_apply_rows, head, mesh, stream)
    if isinstance(head, Head):
        distribute(head, mesh, {"weight": Shard(0)})
        head.forward = lambda hidden, *others: apply_rows(  # type: ignore[method-assign]
            hidden, head.weight, *others
        )
    else:
        head.forward = apply_rows  # type: ignore[method-assign]


def _apply_rows(
    head: Head | TiedHead,
    mesh: DeviceMesh,
    stream: ResidualStream,
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor | None = None,
    references: Tensor | None = None,
) -> Tensor:
    rows = replicated_grad(weight)
    vocabulary = VocabularyShard(mesh.get_local_rank() * len(rows), mesh.get_group())
    return logits_or_loss(stream.gather(hidden), rows, targets, head, vocabulary, references)

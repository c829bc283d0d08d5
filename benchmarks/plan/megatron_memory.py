"""The memory of Megatron-LM with Transformer Engine: its distributed optimizer, and Megatron's FSDP.

What its layers save follows from Transformer Engine's modules and from Megatron-LM's `recompute_modules`. No
number here is fitted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

from nanoscale.plan.memory.activations import entry, saved
from nanoscale.plan.memory.block_shape import Execution, Shape, Sizes
from nanoscale.plan.memory.in_flight_activations import InFlightActivations, activations_at_peaks
from nanoscale.plan.memory.peak import phases_of_step
from nanoscale.plan.memory.phases import RankPhases
from nanoscale.plan.memory.setting import MemorySetting
from nanoscale.plan.memory.shards import RankParameters, Stage

SCALED = 1 + 1 / 32
"""Bytes of a saved number in 8 bits, with MXFP8's scale of 32 of them (others have one scale a tensor)."""


@dataclass(frozen=True)
class Recipe:
    """Settings of a public recipe that determine memory, and that no key of ours describes."""

    recompute: frozenset[str] = frozenset()
    """Modules that are computed again (`recompute_modules`): layernorm, moe_act, mla_up_proj, mlp."""
    recomputed_layers: int = 0
    """Blocks that are computed again (`recompute_num_layers` of the method block)."""
    host_layers: int = 0
    """Blocks whose saved tensors wait in host memory (`cpu_offloading_num_layers`)."""
    moments: float = 8
    """Bytes of a parameter's moments: 4 with moments in bf16, or with Muon."""
    weights: float | None = None
    """Bytes of a block's weight in products, copies in 8 bits included; None: as the compute dtype."""
    fp8_attention: bool = False
    """True if attention is computed in 8 bits (`fp8_dot_product_attention`)."""
    scaled: float = SCALED
    """Bytes of a number that a product saves, with its scale: of 16 numbers in NVFP4."""
    plain_experts: bool = False
    """True if FSDP2 does not wrap experts that only one rank of data parallelism has (NeMo AutoModel)."""
    loss_in_place: bool = False
    """True if the gradient of the logits takes their place (Transformer Engine's cross-entropy)."""


def megatron_phases(
    recipe: Recipe, setting: MemorySetting, params: RankParameters, in_flight: Sequence[int]
) -> RankPhases:
    """Return the phases of Megatron-LM with its distributed optimizer, or with its FSDP in stage 3."""
    acts = _activations(setting, params.stages, in_flight, recipe)
    make = _fsdp if setting.stage == 3 else _distributed_optimizer
    static, gradients, units = make(setting, params, recipe)
    phases = phases_of_step(acts, static, (gradients,) * 3, units, 0, step=0)
    return RankPhases(phases, pools=0, host=(), explain=partial("{} of {}".format))


Static = tuple[tuple[int, int, int], int, int]
"""Bytes of weights, copies and optimizer states; of gradients; of gathered parameters."""


def _distributed_optimizer(
    setting: MemorySetting, params: RankParameters, recipe: Recipe
) -> Static:
    """Return the static bytes if weights and gradients are whole, and master weights and moments sharded.

    Every matrix of a block has a gradient tensor that is not used (Transformer Engine, if products accumulate
    gradients).
    """
    ep, shards, states = setting.config.parallel.ep, setting.shards, setting.states
    experts = experts_of(params)
    share = -(-(params.numel - experts) // shards) - -experts // max(1, shards // ep)
    of_block = setting.compute if recipe.weights is None else recipe.weights
    copies = of_block * params.in_blocks + setting.compute * (params.numel - params.in_blocks)
    static = int(states.weights * share), int(copies), int(states.optimizer * share)
    return static, setting.reduce * params.numel, setting.compute * params.block


def experts_of(params: RankParameters) -> int:
    """Return the elements of a rank's experts, before ZeRO."""
    units = (unit for stage in params.stages for unit in stage.units)
    return sum(unit.count * unit.experts.numel for unit in units if unit.experts)


def _fsdp(setting: MemorySetting, params: RankParameters, recipe: Recipe) -> Static:
    """Return the static bytes if everything is sharded.

    Two blocks are gathered, and two blocks' gradients wait for their reduction (`fsdp_double_buffer`).
    Embedding and head belong to no unit: they are whole during the step.
    """
    states, share = setting.states, params.shard
    whole = 2 * params.block + params.head + params.embedding
    static = int(states.weights * share), setting.compute * share, int(states.optimizer * share)
    return static, setting.reduce * (share + whole), setting.compute * whole


def saved_by_megatron(shape: Shape, run: Execution, recipe: Recipe) -> Sizes:
    """Return the bytes of every tensor that a block of Transformer Engine saves.

    In 8 bits or 4, products save their inputs so. Attention saves its result in 16 bits, so that the input of
    the product after it is one more tensor. With latent attention two products read the first norm's result,
    and each saves its own copy. Activation, gate and the experts' weights are one operation, which saves the
    results of the products before it. Values have their own width (cuDNN).
    """
    sizes, model = dict(saved(shape, run)), shape.model
    local = shape.tokens // shape.shares * shape.hidden
    if model.experts:
        sizes |= {"unweighted": 0, "shared inputs": 0}
        sizes |= dict.fromkeys(("activated", "shared activated"), 0) if model.is_gated else {}
    if model.kv_rank:
        of_values = shape.tokens * shape.heads * model.value_width * run.compute
        sizes |= {"v": of_values, "attended": of_values, "turned": 0}
    if run.fp8:
        narrow = ["normed", "product", "dispatched", "shared product", "normed latents"]
        narrow += [] if model.experts else ["normed middle"]
        narrow += [] if model.is_gated else ["activated"]
        for name in narrow:
            sizes[name] = int(sizes.get(name, 0) * recipe.scaled / run.compute)
        sizes["normed"] *= 2 if model.kv_rank else 1
        sizes["shared inputs"] = int(recipe.scaled * local) if model.shared_ffn else 0
        sizes["input of wo"] = int(recipe.scaled * sizes["attended"] / run.compute)
    if recipe.fp8_attention:
        for name in ("q", "k", "v", "attended"):
            sizes[name] = int(sizes[name] * SCALED / run.compute)
        sizes["input of wo"] = 0
    for module in recipe.recompute:
        sizes |= dict.fromkeys(_made_by(module, shape), 0)
    return sizes


def _made_by(module: str, shape: Shape) -> tuple[str, ...]:
    """Return the saved tensors that the recomputation of a module frees."""
    names = {
        "layernorm": ("normed", "normed middle", "shared inputs"),
        "moe_act": ("product",) if shape.model.experts else (),
        "mla_up_proj": ("q", "k", "v", "rotation", "normed latents"),
        "mlp": () if shape.model.experts else ("gate", "up", "product"),
    }
    return names[module]


def _activations(
    setting: MemorySetting, stages: Sequence[Stage], in_flight: Sequence[int], recipe: Recipe
) -> InFlightActivations:
    """Return `activations_at_peaks` with the tensors that Megatron-LM saves in place of ours.

    With recomputed blocks, only the block of the backward pass differs.
    """
    (acts,) = activations_at_peaks(setting, stages, in_flight)
    # A stage's results are freed when they are sent (`deallocate_pipeline_outputs`).
    boundary = setting.shape.tokens // setting.shape.shares * setting.shape.hidden * setting.compute
    acts = replace(acts, boundaries=min(acts.boundaries, 2 * boundary))
    shape, mode = setting.shape, setting.config.parallel.activation_checkpointing
    whole = replace(recipe, recompute=frozenset())
    if mode != "none":
        return replace(acts, extra=acts.extra - _freed(setting, shape, whole))
    last, dense = _freed(setting, shape, recipe), _freed(setting, _dense(setting), recipe)
    freed = sum(
        flying * ((stage.layers - stage.dense) * last + stage.dense * dense)
        for stage, flying in zip(stages, in_flight, strict=True)
    )
    kept = sum(saved_by_megatron(shape, setting.run, recipe).values())
    freed += recipe.recomputed_layers * (kept - entry(shape, setting.run))
    freed += max(0, recipe.host_layers - 1) * kept  # one of them is being copied
    recomputed = last - _freed(setting, shape, whole)
    changed = acts.activations - freed, acts.last - last, acts.extra + recomputed
    return replace(acts, activations=changed[0], last=changed[1], extra=changed[2])


def _freed(setting: MemorySetting, shape: Shape, recipe: Recipe) -> int:
    """Return the bytes of a block and a micro batch that Megatron-LM does not save."""
    ours, theirs = saved(shape, setting.run), saved_by_megatron(shape, setting.run, recipe)
    return sum(ours.values()) - sum(theirs.values())


def _dense(setting: MemorySetting) -> Shape:
    """Return the shape of the blocks without experts."""
    shape, tp = setting.shape, setting.config.parallel.tp
    if not shape.model.experts:
        return shape
    model, ffn = shape.model.dense, shape.model.dense_ffn // tp
    return replace(shape, model=model, ffn=ffn, local_experts=0, experts_per_token=1, shared=0)

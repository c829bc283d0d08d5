"""A small job with the layout and the methods of a large one, for a comparison on CPUs in fp64."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from nanoscale.common.errors import Violation
from nanoscale.config.objectives import rows_of_sample
from nanoscale.config.reference import value_of
from nanoscale.config.resolved import ResolvedConfig, ResolvedParallel
from nanoscale.config.rules import RULES
from nanoscale.config.rules.rule import Rule
from nanoscale.config.schema import (
    Backend,
    Checkpoint,
    Cluster,
    Data,
    Guard,
    Launcher,
    Logger,
    Model,
    Precision,
    Profile,
    Run,
    StopWhen,
)
from nanoscale.config.violations import refuse

STEPS = 3
MOST_RANKS = 16
_SEQ = 16
_FP64 = Precision("fp64", "fp64", "fp64")


def miniature(config: ResolvedConfig, root: Path) -> tuple[ResolvedConfig, list[str]]:
    """Return the small job of a resolved configuration, and what it lacks of the job, in words.

    Args:
        root: the folder of its runs.

    Raises:
        UserError: the small job cannot be computed.
    """
    if config.backend.name == "deepspeed":
        why = "does not compute in fp64, with which layouts are compared"
        refuse([Violation("backend.name", "deepspeed", "", why, ("backend=native",))])
    lacks: list[str] = []
    layout = _layout(config, lacks)
    model = _model(config, layout)
    layout = replace(layout, layers_per_stage=_layers_per_stage(config, layout))
    if layout.layers_per_stage is not None:
        model = replace(model, layers=sum(layout.layers_per_stage))
    train, rows = config.train, rows_of_sample(config.train)
    micro_batch = rows * min(2, max(1, train.micro_batch // rows))
    accumulation = 2 * layout.pp if layout.pp > 1 else min(2, config.accumulation)
    if train.phases:
        lacks.append("train.phases")
    if config.lora.base == "nf4" and config.lora.rank:
        lacks.append("lora.base=nf4")
    optimizer, scheduler = config.optimizer, config.scheduler
    if optimizer.name == "adamw8bit" or optimizer.moments_dtype != "params":
        name = "adamw" if optimizer.name == "adamw8bit" else optimizer.name
        optimizer = replace(optimizer, name=name, moments_dtype="params")
        lacks.append("the dtype of the optimizer's moments")
    data = config.data
    small = replace(
        config,
        run=Run(name="conform", root=str(root)),
        model=model,
        lora=replace(config.lora, rank=min(3, config.lora.rank), base="whole", init_from=None),
        parallel=layout,
        precision=_FP64,
        backend=Backend(name=config.backend.name),
        optimizer=optimizer,
        scheduler=replace(
            scheduler,
            name="constant" if scheduler.name == "piecewise" else scheduler.name,
            warmup_steps=min(2, scheduler.warmup_steps),
            warmup=None,
            decay_steps=None if scheduler.decay_steps is None else min(1, scheduler.decay_steps),
        ),
        data=Data(
            source="hooks" if data.source == "hooks" else "random",
            valid_fraction=0.0,
            packing=data.packing,
            document_mask=data.document_mask,
            loss_on=data.loss_on,
        ),
        checkpoint=Checkpoint(every_minutes=None, at_end=False),
        cluster=Cluster(),
        launcher=Launcher(
            device="cpu",
            devices=_ranks(layout),
            threads=1,
            preflight=False,
            env=config.launcher.env,
        ),
        logger=Logger(),
        train=replace(
            train,
            steps=STEPS,
            tokens=None,
            epochs=None,
            global_batch=micro_batch * layout.dp * accumulation,
            micro_batch=micro_batch,
            seq_len=_SEQ,
            phases={},
            eval_every=0,
            eval_tasks=[],
            statistics_every=0,
            sample_tokens=0,
            distill_top_k=min(4, train.distill_top_k),
            mask_token=None if train.mask_token is None else min(train.mask_token, model.vocab - 1),
            stop_when=StopWhen(),
            on_spike="note",
        ),
        profile=Profile(),
        guard=Guard(0),
    )
    broken = [it for it in RULES if not it.key.startswith("lora.") and not it.holds(small)]
    if broken:
        refuse(
            [
                Violation(it.key, value_of(small, it.key), "conform", _sentence(it, small))
                for it in broken
            ]
        )
    return small, lacks


def _sentence(rule: Rule, small: ResolvedConfig) -> str:
    text = rule.message
    return text.format(c=small) if isinstance(text, str) else text(small)


def in_one_process(config: ResolvedConfig) -> ResolvedConfig:
    """Return the same job in one process, whose forward pass has the whole global batch at once."""
    layout = ResolvedParallel(dp=1, virtual_stages=1)
    return replace(
        config,
        parallel=layout,
        zero=replace(config.zero, stage=0, offload_optimizer="none", offload_param="none"),
        launcher=replace(config.launcher, devices=1),
        train=replace(config.train, micro_batch=config.train.global_batch),
    )


# --- the layout -----------------------------------------------------------------------------------


def _ranks(layout: ResolvedParallel) -> int:
    return layout.dp * layout.tp * layout.pp * layout.cp


def _layout(config: ResolvedConfig, lacks: list[str]) -> ResolvedParallel:
    """Return the layout in which every degree above 1 is 2, on at most MOST_RANKS ranks."""
    layout = config.parallel
    tp, pp, cp, ep = (min(2, degree) for degree in (layout.tp, layout.pp, layout.cp, layout.ep))
    replicas = min(2, layout.dp_replicate)
    shards = min(2, layout.dp // layout.dp_replicate)
    if replicas * shards * tp * pp * cp > MOST_RANKS:
        replicas = 1
        lacks.append(f"parallel.dp_replicate={layout.dp_replicate}")
    return replace(
        layout,
        dp=replicas * shards,
        dp_replicate=replicas,
        tp=tp,
        pp=pp,
        cp=cp,
        ep=ep,
        virtual_stages=min(2, layout.virtual_stages),
        checkpoint_every=min(2, layout.checkpoint_every),
    )


def _layers_per_stage(config: ResolvedConfig, layout: ResolvedParallel) -> list[int] | None:
    """Return one block or two for each stage, or none for a first or last stage that has none."""
    counts = config.parallel.layers_per_stage
    if counts is None:
        return None
    inner = [1] * (layout.pp * layout.virtual_stages - 2)
    first, last = (min(1, counts[end]) for end in (0, -1))
    return [first, *inner, last + (1 if counts[0] != counts[-1] or not inner else 0)]


# --- the model ------------------------------------------------------------------------------------


def _model(config: ResolvedConfig, layout: ResolvedParallel) -> Model:
    """Return the shape of a few narrow blocks of the same kinds."""
    model, seq_len = config.model, config.train.seq_len
    keeps_vocab = config.data.source == "hooks"
    stages = layout.pp * layout.virtual_stages
    is_grouped = layout.activation_checkpointing == "sqrt" or layout.checkpoint_every > 1
    kinds = 1 + bool(model.experts and model.dense_layers)
    layers = max(stages, kinds, 2, 4 if is_grouped else 0)
    kv_heads = 4 if model.kv_head_count >= 4 else model.kv_head_count
    is_multiple = model.heads > model.kv_head_count
    window = model.sliding_window
    if window is not None:
        window = 5 if window < seq_len else _SEQ
    latent: dict[str, Any] = {}
    head_dim = 8
    if model.kv_rank:
        head_dim, latent = 10, {"kv_rank": 20, "rope_head_dim": 4}
        latent |= {"q_rank": model.q_rank and 12, "v_head_dim": model.v_head_dim and 8}
    has_groups = model.expert_groups > 1
    small = replace(
        model,
        layers=layers,
        hidden=32,
        heads=kv_heads * (2 if is_multiple else 1),
        kv_heads=kv_heads,
        head_dim=head_dim,
        **latent,
        ffn=32 if model.experts else 48,
        experts=(8 if has_groups else 4) if model.experts else 0,
        experts_per_token=min(2, model.experts_per_token),
        expert_groups=4 if has_groups else 1,
        expert_groups_per_token=min(2, model.expert_groups_per_token),
        shared_ffn=min(16, model.shared_ffn),
        dense_layers=min(1, model.dense_layers),
        dense_ffn=48,
        vocab=model.vocab if keeps_vocab else 64,
        max_seq_len=2 * _SEQ,
        rope_fraction=model.rope_fraction if int(8 * model.rope_fraction) % 2 == 0 else 0.5,
        rope_skip=min(2, model.rope_skip),
        sliding_window=window,
        full_attention_every=min(2, model.full_attention_every),
        init_std=0.2,
        init_from=None,
        parameters=None,
    )
    scaling = model.rope_scaling
    if scaling is not None and (scaling.short_factor or scaling.long_factor):
        half = small.rotated_width // 2
        short, long = scaling.short_factor[:half], scaling.long_factor[:half]
        scaling = replace(scaling, short_factor=short, long_factor=long)
        small = replace(small, rope_scaling=scaling)
    return small

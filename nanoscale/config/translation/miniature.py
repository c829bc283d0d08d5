"""A small job with the layout and the methods of a large one, for a comparison on CPUs in fp64."""

import math
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

from nanoscale.common.errors import Violation
from nanoscale.config.hf.any_model import SIZES, sizes
from nanoscale.config.model_math import EXPERTS
from nanoscale.config.reference import value_of
from nanoscale.config.resolved import ResolvedCheckpoint, ResolvedConfig, ResolvedParallel
from nanoscale.config.rules import RULES
from nanoscale.config.schema import Backend, Guard, Launcher, Model, Precision, Run
from nanoscale.config.violations import refuse

STEPS = 4
SAVED = 2
"""The step of the evaluation and of the checkpoint from which the job resumes."""
EVALUATED = 5
"""The samples of an evaluation, which no number of ranks divides."""
MOST_RANKS = 16
_SEQ = 16
_HF_SIZES = {
    1: "n_group topk_group first_k_dense_replace num_dense_layers num_expert_group",
    2: "num_experts_per_tok num_experts_per_token moe_topk moe_k linear_num_key_heads linear_num_heads "
    "mamba_n_groups n_groups num_query_groups index_n_heads index_topk num_kv_shared_layers "
    "decoder_layers encoder_layers decoder_attention_heads encoder_attention_heads zero_expert_num "
    "indexer_n_heads indexer_kv_heads indexer_compress_ratio ngram_size",
    4: " ".join(EXPERTS),
    8: "qk_rope_head_dim qk_nope_head_dim rotary_dim sliding_window linear_key_head_dim indexer_budget "
    "linear_value_head_dim chunk_size linear_head_dim mamba_n_heads mamba_num_heads "
    "linear_num_value_heads hidden_size_per_layer_input laurel_rank embedding_size mamba_chunk_size",
    16: "moe_intermediate_size shared_expert_intermediate_size shared_intermediate_size kv_lora_rank "
    "q_lora_rank moe_shared_expert_intermediate_size v_head_dim swa_head_dim global_head_dim "
    "mamba_d_head mamba_head_dim mamba_d_state ssm_state_size state_size time_step_rank mamba_dt_rank "
    "index_head_dim indexer_head_dim expert_ffn_hidden_size shared_experts_intermediate_size",
    48: "decoder_ffn_dim encoder_ffn_dim dim_ff dff",
    64: "vocab_size_per_layer_input lru_width word_embed_proj_dim hc_lowrank",
    128: "mamba_d_ssm",
}  # fmt: skip
"""Sizes of parts that our own model has not, by their names in config.json."""


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
    *others, last = _layouts(config)
    fitting = (layout for layout in others if _broken_rule(_small(config, layout, root)) is None)
    small = _small(config, next(fitting, last), root)
    if (broken := _broken_rule(small)) is not None:
        refuse([broken])
    optimizer = config.optimizer
    lacks = {
        "parallel.dp_replicate": small.parallel.dp_replicate < min(2, config.parallel.dp_replicate),
        "train.phases": bool(config.train.phases),
        "train.eval_tasks": bool(config.train.eval_tasks),
        "precision.fp8": config.precision.fp8,
        "backend.compile": config.backend.compile == "on",
        "lora.base=nf4": bool(config.lora.rank) and config.lora.base == "nf4",
        "optimizer=adamw8bit": optimizer.name == "adamw8bit",
        "optimizer.moments_dtype": optimizer.moments_dtype != "params",
    }
    return small, [key for key, is_lost in lacks.items() if is_lost]


def _small(config: ResolvedConfig, layout: ResolvedParallel, root: Path) -> ResolvedConfig:
    """Return the small job in a small layout."""
    train, optimizer, scheduler = config.train, config.optimizer, config.scheduler
    model = _model(config, layout)
    layout = replace(layout, layers_per_stage=_layers_per_stage(config, layout))
    if layout.layers_per_stage is not None:
        model = replace(model, layers=sum(layout.layers_per_stage))
    rows = train.rows_of_sample
    micro_batch = rows * min(2, max(1, train.micro_batch // rows))
    accumulation = 2 * layout.pp if layout.pp > 1 else min(3, config.accumulation)
    return replace(
        config,
        run=Run(name="conform", root=str(root)),
        model=model,
        lora=replace(config.lora, rank=min(3, config.lora.rank), base="whole", init_from=None),
        parallel=layout,
        precision=Precision("fp64", "fp64", "fp64"),
        backend=Backend(),
        optimizer=replace(
            optimizer,
            name="adamw" if optimizer.name == "adamw8bit" else optimizer.name,
            moments_dtype="params",
        ),
        scheduler=replace(
            scheduler,
            name="constant" if scheduler.name == "piecewise" else scheduler.name,
            warmup_steps=min(2, scheduler.warmup_steps),
            warmup=None,
            decay_steps=None if scheduler.decay_steps is None else min(1, scheduler.decay_steps),
        ),
        data=replace(
            config.data,
            source="hooks" if config.data.source == "hooks" else "random",
            path=None,
            valid_path=None,
            mixture={},
        ),
        # A save beside the training runs the code of a save that is waited for, and more.
        checkpoint=ResolvedCheckpoint(memory_every=0, asynchronous=True),
        guard=Guard(every=0),  # a difference of replicas is a difference from one process
        launcher=Launcher(device="cpu", threads=1, preflight=False, env=config.launcher.env),
        train=replace(
            train,
            steps=STEPS,
            global_batch=micro_batch * layout.dp * accumulation,
            micro_batch=micro_batch,
            seq_len=_SEQ,
            phases={},
            statistics_every=0,
            eval_samples=EVALUATED,
            eval_tasks=[],
            distill_top_k=min(4, train.distill_top_k),
            mask_token=None if train.mask_token is None else min(train.mask_token, model.vocab - 1),
        ),
    )


def in_fp32(config: ResolvedConfig, *, compiled: bool) -> ResolvedConfig:
    """Return the same job in fp32, with SGD, whose updates do not amplify rounding.

    Raises:
        UserError: its blocks cannot be compiled.
    """
    result = replace(
        config,
        precision=Precision("fp32", "fp32", "fp32"),
        backend=replace(config.backend, compile="on" if compiled else "off"),
        optimizer=replace(config.optimizer, name="sgd", lr=1e-3),
    )
    if (broken := _broken_rule(result)) is not None:
        refuse([broken])
    return result


def _broken_rule(small: ResolvedConfig) -> Violation | None:
    """Return the first rule that a small job breaks; None if there is none."""
    for rule in RULES:
        if not rule.key.startswith("lora.") and not rule.holds(small):
            text = rule.message
            message = text.format(c=small) if isinstance(text, str) else text(small)
            return Violation(rule.key, value_of(small, rule.key), "the small job", message)
    return None


def in_one_process(config: ResolvedConfig) -> ResolvedConfig:
    """Return the same job in one process, whose forward pass has the whole global batch at once."""
    layout = ResolvedParallel(dp=1, virtual_stages=1)
    return replace(
        config,
        parallel=layout,
        zero=replace(config.zero, stage=0, offload_optimizer="none", offload_param="none"),
        train=replace(config.train, micro_batch=config.train.global_batch),
    )


# --- the layout -----------------------------------------------------------------------------------


def _layouts(config: ResolvedConfig) -> Iterator[ResolvedParallel]:
    """Yield layouts on at most MOST_RANKS ranks: first those whose axes differ in degree, last degrees of 2."""
    layout = config.parallel
    shards = layout.dp // layout.dp_replicate
    every_rank = shards * layout.cp * layout.tp // layout.expert_tp  # that ep can divide
    tp = min(2, layout.tp)
    has_long_ring = layout.cp >= 4 or (layout.tp > 1 == layout.dp)
    has_part = 1 < layout.ep < every_rank  # experts are held by several ranks each
    most_shards = 4 if has_part and layout.cp == 1 else 3
    for cp, replicas, dp, pp in product(
        (1,) if layout.cp == 1 else (4, 2) if has_long_ring else (2,),
        (2, 1) if layout.dp_replicate > 1 else (1,),
        (most_shards, 2) if shards > 1 else (1,),
        (3, 2) if min(layout.tp, layout.pp) > 1 == shards else (min(2, layout.pp),),
    ):
        ranks = dp * cp * (tp if layout.ep_over_tp else 1)
        if replicas * dp * tp * pp * cp <= MOST_RANKS:
            yield replace(
                layout,
                dp=replicas * dp,
                dp_replicate=replicas,
                tp=tp,
                pp=pp,
                cp=cp,
                ep=max(2, ranks // 2) if has_part else ranks if layout.ep > 1 else 1,
                virtual_stages=min(2, layout.virtual_stages),
                checkpoint_every=min(2, layout.checkpoint_every),
                tp_overlap=False,  # the small job is not compiled, and needs no GPUs
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
    kinds = 1 + bool(model.experts and model.dense_layers)
    layers = max(stages, kinds, 2, 4 if layout.checkpoint_every > 1 else 0)
    divisor = layout.tp * (layout.cp if layout.cp_method == "ulysses" else 1)
    heads = 6 if 6 % divisor == 0 else 2 * divisor
    kv_heads = min(2, model.kv_head_count)
    if model.heads == model.kv_head_count:
        kv_heads = heads
    elif model.kv_head_count > 2:
        kv_heads = next(count for count in (heads // 2, heads // 3) if count % divisor == 0)
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
        hidden=48,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        **latent,
        ffn=32 if model.experts else 48,
        experts=math.lcm(8 if has_groups else 4, layout.ep) if model.experts else 0,
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
    if model.source == "hf":
        return small_hf_model(small, divisor, stages)
    scaling = model.rope_scaling
    if scaling is not None and (scaling.short_factor or scaling.long_factor):
        half = small.rotated_width // 2
        short, long = scaling.short_factor[:half], scaling.long_factor[:half]
        scaling = replace(scaling, short_factor=short, long_factor=long)
        small = replace(small, rope_scaling=scaling)
    return small


def small_hf_model(model: Model, divisor: int = 1, stages: int = 1) -> Model:
    """Return a small model of the same class of transformers, with each of its kinds of layers.

    Args:
        divisor: a number that divides its heads.
        stages: a number that divides its blocks.
    """
    document, heads = model.hf_config, 2 * max(2, divisor)
    widths = {"hidden": 64, "heads": heads, "kv_heads": max(2, divisor), "head_dim": 16, "ffn": 48}
    widths |= {"vocab": 64, "max_seq_len": 2 * _SEQ}
    limits = {name: widths[key] for key in widths for name in SIZES[key]}
    limits |= {name: size for size, names in _HF_SIZES.items() for name in names.split()}
    limits |= {name: widths["vocab"] - 1 for name in document if name.endswith("_token_id")}
    if "qk_rope_head_dim" in document:  # latent attention; its head_dim may be the rotated part
        is_rotated = document.get("head_dim") == document["qk_rope_head_dim"]
        limits |= {"head_dim": 8 if is_rotated else 16, "qk_head_dim": 16}
        limits |= dict.fromkeys(SIZES["kv_heads"], heads)
    depth = sizes(document).get("layers", 0)
    kept = _kept_layers(document, depth, math.lcm(2, stages))
    limits |= dict.fromkeys(SIZES["layers"], len(kept))
    small = {name: _small_value(name, it, limits, kept, depth) for name, it in document.items()}
    return replace(model, hf_config=small, **sizes(small))


def _small_value(name: str, value: Any, limits: dict[str, int], kept: list[int], depth: int) -> Any:
    if _are_numbers(value, depth):
        return [kept.index(i) for i in value if i in kept]
    if isinstance(value, list) and len(value) == depth:
        return [_small_value(name, value[i], limits, kept, depth) for i in kept]
    if isinstance(value, dict) and value and all(key.isdigit() for key in value):
        value = {str(kept.index(int(i))): it for i, it in value.items() if int(i) in kept}
    if isinstance(value, dict):
        return {key: _small_value(key, it, limits, kept, depth) for key, it in value.items()}
    return min(value, limits[name]) if name in limits and type(value) is int else value


def _are_numbers(value: Any, depth: int) -> bool:
    """True for a list of numbers of layers."""
    is_list = isinstance(value, list) and len(value) > 2
    return is_list and value == sorted({it for it in value if type(it) is int and 0 <= it < depth})


def _kept_layers(document: dict[str, Any], depth: int, multiple: int) -> list[int]:
    """Return the numbers of layers to keep: the first of each kind, and more to a multiple."""
    lists = [it for it in document.values() if isinstance(it, list) and len(it) == depth]
    lists = [it for it in lists if not _are_numbers(it, depth)]
    kinds = [str([it[i] for it in lists]) for i in range(depth)]
    kept = sorted({kinds.index(kind) for kind in kinds})
    others = [i for i in range(depth) if i not in kept]
    return sorted([*kept, *others[: -len(kept) % multiple]])

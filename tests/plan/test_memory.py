"""The planner's memory against the textbook's cases, each computed there another way."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import pytest

from nanoscale.common.units import GIB
from nanoscale.config.composing.compose import compose
from nanoscale.config.model_math import parameters
from nanoscale.config.resolved import ResolvedConfig, resolved
from nanoscale.config.schema import Model, Optimizer, Precision
from nanoscale.plan.memory import activations
from nanoscale.plan.memory.activations import block_memory, products, saved
from nanoscale.plan.memory.block_shape import Execution, Shape
from nanoscale.plan.memory.native import native_phases
from nanoscale.plan.memory.peak import HOLES, rank_memory, setting_memory
from nanoscale.plan.memory.phases import MemoryEvent, phases_of
from nanoscale.plan.memory.setting import setting_of
from nanoscale.plan.memory.shards import rank_stages
from nanoscale.plan.memory.states import bytes_per_parameter


def job(
    *words: str,
    dp: int = 1,
    stage: int = 0,
    micro_batch: int = 1,
    micro_batches: int = 1,
    seq_len: int = 2048,
    device: str = "cuda",
    backend: dict[str, Any] | None = None,
    **parallel: Any,
) -> ResolvedConfig:
    """Return a resolved configuration, without detecting the machine's devices."""
    config = compose(list(words)).config
    asked = replace(
        config,
        parallel=replace(config.parallel, **({"virtual_stages": 1, "dp": dp} | parallel)),
        zero=replace(config.zero, stage=stage),
        backend=replace(config.backend, **({"compile": "off"} | (backend or {}))),
        launcher=replace(config.launcher, device=device),
        train=replace(
            config.train,
            micro_batch=micro_batch,
            global_batch=micro_batch * micro_batches * dp,
            seq_len=seq_len,
            steps=1,
        ),
    )
    return resolved(asked)


def one_f_one_b(pp: int, micro_batches: int) -> list[list[int]]:
    return [[min(pp - rank, micro_batches)] for rank in range(pp)]


# --- bytes a parameter ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("compute", "optimizer", "expected"),
    [("bf16", "adamw", 18), ("bf16", "adamw8bit", 12), ("bf16", "sgd", 14), ("fp32", "adamw", 16)],
)
def test_bytes_of_a_parameter_in_training(compute: Any, optimizer: Any, expected: int):
    """Hugging Face, "Model training anatomy": 6 for both copies of the weights, 4 for gradients, 8 for
    AdamW."""
    per = bytes_per_parameter(Precision(compute=compute), Optimizer(name=optimizer))
    total = per.weights + per.copy + per.gradients + per.optimizer
    assert total == pytest.approx(expected, rel=0.01)


def test_a_real_rank_follows_the_same_arithmetic():
    """ZeRO-3 of a job of ours: 16 bytes a parameter, shared by all, once gradients are there."""
    config = job("model=gpt-10b", "precision=bf16", dp=8, stage=3, micro_batches=2)
    (rank,) = rank_memory(config)
    states = sum(rank.part(name).bytes for name in ("weights", "optimizer"))
    assert states == pytest.approx(12 * parameters(config.model) / 8, rel=1e-3)
    assert rank.part("gradients").bytes >= 4 * parameters(config.model) / 8
    per = bytes_per_parameter(config.precision, config.optimizer)
    assert states / parameters(config.model) == pytest.approx(
        (per.weights + per.optimizer) / 8, 1e-3
    )


@pytest.mark.parametrize(("micro_batches", "rehearsed"), [(1, 171.3), (8, 209.0)])
def test_reduced_gradients_are_in_one_pool(micro_batches: int, rehearsed: float):
    """GiB that rehearsals reserve: one gradient in fp32 is on the stream of reductions. Gradients that wait for
    the last micro batch are on the stream of products, and neither can use the other's memory."""
    config = job("model=gpt-10b", "precision=fp16", dp=8, seq_len=64, micro_batches=micro_batches)
    (rank,) = rank_memory(config)
    assert rank.reserved / 2**30 == pytest.approx(rehearsed * (1 + HOLES), rel=0.01)


# --- shards ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["llama-8b", "gpt2", "gpt-10b", "debug"])
@pytest.mark.parametrize(("pp", "virtual"), [(1, 1), (2, 1), (2, 2)])
def test_stages_hold_every_parameter_once(name: str, pp: int, virtual: int):
    config = job(f"model={name}", pp=pp, virtual_stages=virtual)
    model = replace(config.model, tie_embeddings=config.model.tie_embeddings and pp == 1)
    ranks = rank_stages(replace(config, model=model))
    assert sum(stage.numel for rank in ranks for stage in rank) == parameters(model)


def test_tensor_parallelism_divides_all_but_norms():
    whole, parts = (rank_stages(job("model=llama-8b", tp=tp))[0][0] for tp in (1, 8))
    norms = 65 * 4096
    assert parts.numel - norms == (whole.numel - norms) / 8


def test_shards_are_padded_to_whole_rows():
    """FSDP2 divides rows: most matrices have 4096 rows, and 8192 ranks cannot have half a row each."""
    stage = rank_stages(job("model=llama-8b"))[0][0]
    assert stage.shard(8) == stage.numel / 8
    assert stage.shard(8192) > 1.3 * stage.numel / 8192


# --- events ---------------------------------------------------------------------------------------


def test_levels_stay_and_what_an_event_adds_does_not():
    start = {"weights": 10, "activations": 4}
    phases = phases_of(
        start,
        [
            MemoryEvent("loss", logits=3, pooled=1),
            MemoryEvent("backward", {"activations": 1}, gradients=2, weights=-5),
            MemoryEvent("update", {"gradients": 6}),
        ],
    )
    assert [(phase.name, phase.allocated, phase.pooled) for phase in phases] == [
        ("loss", 17, 1),
        ("backward", 8, 0),
        ("update", 17, 0),
    ]
    assert phases[1].parts["weights"] == 5 and phases[2].parts["gradients"] == 6
    assert start == {"weights": 10, "activations": 4}


# --- activations ----------------------------------------------------------------------------------


def megatron(hidden: int, heads: int, seq: int, batch: int, tp: int, shares: int) -> Shape:
    """Return a GPT block of Korthikanti et al.: four times as wide within, as many key heads as query
    heads."""
    return Shape(
        model=Model(mlp="gelu", norm="layernorm"),
        tokens=seq * batch,
        span=seq,
        shares=shares,
        hidden=hidden,
        q=hidden // tp,
        kv=hidden // tp,
        ffn=4 * hidden // tp,
        heads=heads // tp,
        rotary=0,
    )


STORED = Execution(compute=2, stream=2, attention="scores", dropout=True)


@pytest.mark.parametrize(("hidden", "heads"), [(6144, 64), (12288, 96), (20480, 128), (25600, 160)])
@pytest.mark.parametrize("tp", [1, 8])
def test_korthikanti_s_formula(hidden: int, heads: int, tp: int):
    """arXiv:2205.05198, table 2, for its own four models, without the norms' statistics, which it leaves
    out."""
    s, b = 2048, 1
    run = replace(STORED, tensor_parallel=tp > 1, gathered=False)

    def per_token(shape: Shape) -> float:
        sizes = saved(shape, run)
        return (sum(sizes.values()) - sizes["statistics"]) / (s * b * hidden)

    quadratic = 5 * heads * s / hidden
    divided = per_token(megatron(hidden, heads, s, b, tp, shares=tp))
    assert divided == pytest.approx((34 + quadratic) / tp)
    whole = per_token(megatron(hidden, heads, s, b, tp, shares=1))
    assert whole == pytest.approx(10 + 24 / tp + quadratic / tp)


def test_flash_attention_removes_the_quadratic_term():
    shape = megatron(12288, 96, 2048, 1, 1, 1)
    flash = sum(saved(shape, replace(STORED, attention="flash", dropout=False)).values())
    stored = sum(saved(shape, STORED).values())
    scores = 5 * 96 * 2048 * 2048
    masks, log_sums = 2 * 2048 * 12288, 96 * 2048 * 4
    assert stored - flash == scores + masks - log_sums


def test_full_recomputation_keeps_twice_the_hidden_width():
    """2·s·b·h a layer: the same source, section 5."""
    shape = megatron(12288, 96, 2048, 1, 1, 1)
    assert block_memory(shape, STORED, "full").kept == 2 * 2048 * 12288


def test_selective_keeps_less_than_all_and_more_than_the_input():
    config = job("model=llama-8b", "precision=bf16")
    setting = setting_of(replace(config, parallel=replace(config.parallel, tp=2)))
    kept = [
        block_memory(setting.shape, setting.run, mode, keep).kept
        for mode, keep in (
            ("full", ""),
            ("selective", "core-attention"),
            ("selective", "attention"),
            ("selective", "every-2nd-matmul"),
            ("selective", "matmuls"),
            ("none", ""),
        )
    ]
    assert kept == sorted(kept) and len(set(kept)) == 6


def test_every_second_product_is_the_second_fourth_and_sixth():
    assert products(Model())[1::2] == ("wk", "wo", "up")
    assert products(Model(mlp="gelu"))[1::2] == ("wk", "wo", "down")


def test_offloaded_activations_wait_on_the_host():
    words = (
        "model=llama-8b",
        "precision=bf16",
    )  # with accumulation: gradients are kept all the time
    here = rank_memory(job(*words, micro_batches=2))[0]
    there = rank_memory(job(*words, micro_batches=2, offload_activations=True))[0]
    (waiting,) = there.host
    assert there.part("activations").bytes < here.part("activations").bytes / 4
    assert waiting.bytes > 0.9 * here.part("activations").bytes


def test_a_cpu_has_no_other_memory_to_offload_to():
    here, there = (
        rank_memory(
            job("model=llama-1b", "precision=fp32", device="cpu", offload_activations=offloaded)
        )[0]
        for offloaded in (False, True)
    )
    assert not there.host
    assert [part.bytes for part in there.parts] == [part.bytes for part in here.parts]


# --- whole cases ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("batch", "mode", "published"), [(4, "none", 14949), (1, "none", 8681), (1, "full", 6775)]
)
def test_bert_large_on_a_v100_uses_14949_mb(
    batch: int, mode: str, published: int, monkeypatch: pytest.MonkeyPatch
):
    """Hugging Face, "Model training anatomy" and "Methods and tools for efficient training on a single GPU":
    BERT-large, sequence 512, fp32 AdamW; 14,949 MB by nvidia-ml with batch 4, the others with batch 1 and
    gradients accumulated, then with checkpointing.

    Assumed: an encoder has the same blocks as our GPT, of post-norm instead of pre-norm, which keep as much;
    scores are stored before and after the softmax, as PyTorch of that time did, and dropout masks; the same
    page's 1,343 MB are the context with its kernels; a classification head of two labels is nothing beside the
    blocks, so that there are no logits; the pooler and token types add 1.1 M parameters. Gradients are kept
    from step to step, as PyTorch did then.
    """
    bert = Model(
        layers=24,
        hidden=1024,
        heads=16,
        kv_heads=16,
        head_dim=64,
        ffn=4096,
        vocab=30522,
        max_seq_len=512,
        norm="layernorm",
        mlp="gelu",
        position="learned",
        bias=True,
        tie_embeddings=True,
    )
    assert parameters(bert) == pytest.approx(335.1e6, rel=0.005)
    config = job("precision=fp32", micro_batch=batch, seq_len=512, activation_checkpointing=mode)
    setting = setting_of(replace(config, model=bert))
    saved_by_attention = activations._attention

    def with_softmax_input(shape: Shape, run: Execution) -> dict[str, int]:
        """Save the softmax's input too: PyTorch before 1.11, `_softmax_backward_data`."""
        scores = shape.tokens * shape.heads * shape.span * run.compute
        return saved_by_attention(shape, run) | {"raw scores": scores}

    monkeypatch.setattr(activations, "_attention", with_softmax_input)
    run = replace(setting.run, attention="scores", dropout=True)
    setting = replace(setting, run=run, vocabulary=2, micro_batches=2)
    (rank,) = setting_memory(setting, None, native_phases, context_bytes=1343 * 2**20)
    assert rank.total / 2**20 == pytest.approx(published, rel=0.05)


@pytest.mark.parametrize(("cp", "seq_len", "dp"), [(1, 8192, 128), (16, 131072, 8)])
def test_llama_405b_fits_16384_h100s(cp: int, seq_len: int, dp: int):
    """Llama Team 2024, arXiv:2407.21783, table 4: tp 8, pp 16, 16 M tokens a step; FSDP keeps weights whole
    meanwhile.

    Attention's results are kept and the rest is computed again, which theirs did not need, since its products
    keep divided inputs.
    """
    config = job(
        "model=llama-405b",
        "precision=bf16",
        dp=dp,
        stage=2,
        micro_batches=16,
        seq_len=seq_len,
        tp=8,
        pp=16,
        cp=cp,
        activation_checkpointing="selective",
        selective_keep="attention",
    )
    assert config.world_size == 16384
    ranks = rank_memory(config, one_f_one_b(16, 16))
    worst = max(rank.total for rank in ranks)
    assert 30 * GIB < worst < 79.6 * GIB


def test_llama_405b_does_not_fit_without_a_pipeline():
    config = job("model=llama-405b", "precision=bf16", dp=2048, stage=2, tp=8, seq_len=8192)
    (rank,) = rank_memory(config)
    assert rank.total > 100 * GIB


# --- comparison of layouts ------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["native", "deepspeed"])
def test_each_stage_of_zero_needs_less_than_the_one_before(backend: str):
    """Accumulation makes each stage matter; DeepSpeed's buckets are small beside the model."""
    more = {"name": backend, "reduce_bucket": 10**6, "allgather_bucket": 10**6}
    totals = []
    for stage in range(4):
        config = job(
            "model=gpt-10b", "precision=bf16", dp=8, stage=stage, micro_batches=4, backend=more
        )
        totals.append(rank_memory(config)[0].allocated)
    assert totals == sorted(totals, reverse=True)
    assert len(set(totals)) == 4


def test_replicas_of_a_sharded_model_hold_larger_shards():
    sharded = job("model=llama-8b", "precision=bf16", dp=16, stage=3)
    hybrid = job("model=llama-8b", "precision=bf16", dp=16, stage=3, dp_replicate=2)
    weights = [rank_memory(config)[0].part("weights").bytes for config in (sharded, hybrid)]
    assert weights[1] == 2 * weights[0]


def test_only_stage_0_in_one_precision_holds_no_copy():
    alone, both, divided, cast = (
        rank_memory(job("model=gpt2", *words, **layout))[0].part("compute copies").bytes
        for words, layout in (
            (("precision=fp32",), {}),
            (("precision=fp32",), {"dp": 2}),
            (("precision=fp32",), {"dp": 2, "tp": 2}),
            (("precision=bf16",), {"dp": 2}),
        )
    )
    assert (alone, both) == (0, 0)
    assert cast == 2 * parameters(compose(["model=gpt2"]).config.model)
    assert divided > cast


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "stage", "copied"),
    [
        ((), 0, 12),
        ((), 3, 12 / 8),
        (("optimizer=sgd", "optimizer.momentum=0"), 2, 4 / 8),
        (
            ("optimizer=adamw8bit",),
            2,
            (4 + 2 * (1 + 4 / 256)) / 8,
        ),  # codes, and a scale for each 256
        (("checkpoint.asynchronous=false",), 0, 0),
        (("checkpoint.every=0",), 0, 12),
        (("checkpoint.every=0", "checkpoint.every_minutes=null"), 0, 0),
    ],
)
@pytest.mark.parametrize("backend", ["native", "deepspeed"])
def test_the_copy_of_a_checkpoint_waits_on_the_host(
    words: tuple[str, ...], stage: int, copied: float, backend: str
):
    """Weights and moments of a rank's share; where nothing is sharded, all of them."""
    saving = ("checkpoint.asynchronous=true", "checkpoint.every=10")
    wanted = ("model=gpt-10b", "precision=bf16", *saving, *words)
    (rank,) = rank_memory(job(*wanted, dp=8, stage=stage, backend={"name": backend}))
    found = sum(part.bytes for part in rank.host)
    numel = parameters(compose(["model=gpt-10b"]).config.model)
    assert found == pytest.approx(copied * numel, rel=1e-3)


def test_deepspeed_moves_states_to_the_host():
    config = job("model=gpt-10b", "precision=bf16", dp=8, stage=3, backend={"name": "deepspeed"})
    moved = replace(config, zero=replace(config.zero, offload_optimizer="cpu"))
    here, there = rank_memory(config)[0], rank_memory(moved)[0]
    masters = 4 * parameters(config.model) / 8
    assert there.part("optimizer").bytes == 0
    assert there.host[0].bytes == pytest.approx(
        4 * masters, rel=0.01
    )  # masters, moments, gradients
    assert here.allocated - there.allocated > 2 * masters


def test_the_first_rank_of_1f1b_holds_most_activations():
    config = job("model=llama-8b", "precision=bf16", pp=4, micro_batches=8)
    ranks = rank_memory(config, one_f_one_b(4, 8))
    held = [rank.part("activations").bytes for rank in ranks]
    assert held == sorted(held, reverse=True)
    assert held[0] > 3 * held[-1]


MODES = [
    {"activation_checkpointing": "none"},
    {"activation_checkpointing": "full"},
    {"activation_checkpointing": "full", "checkpoint_every": 2},
    {"activation_checkpointing": "selective"},
    {"activation_checkpointing": "full", "offload_activations": True},
]


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["native", "deepspeed"])
def test_every_part_explains_itself(backend: str):
    for stage, mode, precision in product(range(4), MODES, ("fp32", "bf16")):
        words = ("model=llama-1b", f"precision={precision}")
        config = job(*words, dp=4, stage=stage, backend={"name": backend}, **mode)
        (rank,) = rank_memory(config)
        assert tuple(part.name for part in rank.parts) == (
            *rank.phase.parts,
            "fragmentation",
            "context",
        )
        assert all(part.bytes >= 0 and part.how for part in rank.parts)
        assert rank.allocated == sum(part.bytes for part in rank.parts[:-2])
        assert rank.total == sum(part.bytes for part in rank.parts)
        assert rank.allocated <= rank.reserved < rank.total

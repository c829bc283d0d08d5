"""MoE in the plan: a rank's experts, and their costs."""

from __future__ import annotations

from dataclasses import replace
from math import prod

import pytest

from nanoscale.checkpoint.hf.names import shapes
from nanoscale.config.model_math import active_parameters, parameters
from nanoscale.config.schema import Zero
from nanoscale.plan.memory.setting import setting_of
from nanoscale.plan.memory.shards import rank_holdings
from nanoscale.plan.predict import predict
from nanoscale.plan.time import block, moe
from nanoscale.plan.time.data_parallel import updated_parameters
from nanoscale.plan.time.step import step_time
from tests.plan.machines import job, machine, model

MIXTRAL, QWEN = model("mixtral-8x7b"), model("qwen3-30b-a3b")


@pytest.mark.parametrize(
    ("name", "total", "active"),
    [
        ("mixtral-8x7b", 46.7, 12.9),
        ("qwen3-30b-a3b", 30.5, 3.3),
        ("deepseek-v3", 671.0, 37.55),
        ("gpt-oss-20b", 20.9, 4.19),
    ],
)
def test_parameters_are_the_published_ones(name: str, total: float, active: float) -> None:
    """arXiv:2401.04088, section 2.1; arXiv:2505.09388, table 2 and its model card; arXiv:2412.19437;
    arXiv:2508.10925, table 1, and the embedding."""
    assert round(parameters(model(name)) / 1e9, 1) == total
    assert abs(active_parameters(model(name)) / 1e9 - active) < 0.06
    dense = model("llama-8b")
    assert active_parameters(dense) == parameters(dense)


def test_shared_experts_are_active_parameters() -> None:
    """Sizes and figures of Qwen1.5-MoE-A2.7B: 14.3 billion parameters, 2.7 of them active (its model card)."""
    shape = replace(
        QWEN, layers=24, hidden=2048, heads=16, kv_heads=16, head_dim=128, ffn=1408, experts=60,
        experts_per_token=4, shared_ffn=5632, shared_gate=True, qk_norm=False, qkv_bias=True, vocab=151936,
    )  # fmt: skip
    assert round(parameters(shape) / 1e9, 1) == 14.3
    assert round(active_parameters(shape) / 1e9, 1) == 2.7


def counted(name: str, degrees: dict[str, int], stage: int) -> float:
    """Elements of a rank from the shapes of all tensors, nothing padded."""
    ranks = degrees["dp"] if stage else 1
    total = 0.0
    for tensor, size in shapes(model(name)).items():
        norm = len(size) == 1
        routers = tensor.endswith("router.weight")
        width = prod(size) / (1 if norm or routers else degrees.get("tp", 1))
        total += width / (max(ranks, degrees["ep"]) if ".experts." in tensor else ranks)
    return total


@pytest.mark.parametrize(
    ("name", "degrees", "stage"),
    [
        ("mixtral-8x7b", {"dp": 8, "ep": 8}, 3),
        ("mixtral-8x7b", {"dp": 8, "ep": 8}, 0),
        ("mixtral-8x7b", {"dp": 32, "ep": 4}, 1),
        ("mixtral-8x7b", {"dp": 16, "ep": 2, "tp": 2}, 2),
        ("mixtral-8x7b", {"dp": 8, "ep": 8, "tp": 2, "ep_over_tp": True}, 3),
        ("qwen3-30b-a3b", {"dp": 64, "ep": 8}, 3),
        ("qwen3-30b-a3b", {"dp": 16, "ep": 1}, 3),
    ],
    ids=str,
)
def test_a_rank_holds_its_share(name: str, degrees: dict[str, int], stage: int) -> None:
    config = job(name, zero=Zero(stage=stage), global_batch=512, **degrees)  # type: ignore[arg-type]
    setting = setting_of(config)
    (held,) = rank_holdings(config, setting.shards)
    expected = counted(name, degrees, stage)
    assert held.shard == pytest.approx(expected, rel=2e-3)
    assert updated_parameters(config, held) == pytest.approx(expected, rel=2e-3)


def test_one_expert_that_all_take_costs_what_a_dense_block_does_and_its_routing() -> None:
    hardware, dense = machine(), replace(model("llama-8b"), ffn=14336)
    one = replace(dense, experts=1, experts_per_token=1)
    part = replace(
        block.micro_batch_shape(job("llama-8b", seq_len=4096)), model=dense, compiled=False
    )
    with_one = block.block(hardware, replace(part, model=one))
    without = block.block(hardware, part)
    router = block.product(hardware, part, block.linears(one, 1)[4])
    assert with_one.forward.matmul == pytest.approx(without.forward.matmul + router)
    moved = moe.traffic(replace(part, model=one))[0] / hardware.memory_bandwidth
    more = with_one.forward.elementwise - without.forward.elementwise
    assert more == pytest.approx(moved / hardware.efficiency.memory)


def test_products_of_many_experts_take_at_least_the_time_of_their_flops() -> None:
    """More is needed if few tokens are left for each expert, whose weights are read anyway."""
    hardware = machine()
    shares = []
    for tokens in (65536, 4096, 256):
        part = replace(block.micro_batch_shape(job("qwen3-30b-a3b", seq_len=tokens)), ep=1)
        linear = block.linears(QWEN, 1)[5]
        flops = 2.0 * tokens * QWEN.experts_per_token * QWEN.hidden * QWEN.ffn
        shares.append(flops / block.product(hardware, part, linear) / hardware.peaks["bf16"])
    assert hardware.efficiency.matmul >= shares[0] > shares[1] > shares[2] > 0
    read = 2.0 * QWEN.experts * QWEN.hidden * QWEN.ffn / hardware.memory_bandwidth
    assert block.product(hardware, part, linear) > read


def test_products_of_experts_in_fp8_have_row_wise_scales_and_cast_in_both_passes() -> None:
    """Matrices, the rows of gate and up, and the rows of down are cast, 5 bytes a number, and gradients of
    results twice. The micro batches of a step share the matrices where they stay gathered."""
    hardware, config = machine(), job("qwen3-30b-a3b", seq_len=4096)
    config = replace(config, precision=replace(config.precision, fp8=True))
    gathered = replace(config, zero=replace(config.zero, stage=3))
    shape = block.micro_batch_shape(gathered)
    others = replace(shape, software=replace(shape.software, torchao=False))
    linears = block.linears(QWEN, 1)
    for linear in linears[5:]:
        times = [block.product(hardware, it, linear) for it in (shape, others)]
        assert times[0] == pytest.approx(block.ROWWISE * times[1])
    rows, hidden, ffn = 4096 * QWEN.experts_per_token, QWEN.hidden, QWEN.ffn
    read = 3 * QWEN.experts * hidden * ffn + rows * (hidden + ffn)
    results = 2 * rows * (2 * ffn + hidden)
    both, dense = (block._casts(shape, it) for it in (linears, linears[:4]))
    assert both[0] - dense[0] == 5 * read
    assert both[1] - dense[1] == 5 * (read + results)
    assert shape.cast_share == 1
    kept = block.micro_batch_shape(config)
    assert kept.cast_share == 1 / config.accumulation < 1
    shared = block._casts(replace(shape, cast_share=kept.cast_share), linears)
    saved = 5 * (1 - kept.cast_share) * (read - rows * (hidden + ffn))
    assert both[0] - shared[0] == both[1] - shared[1] == pytest.approx(saved)


def test_tokens_travel_to_seven_of_eight_ranks_and_back() -> None:
    hardware = machine()
    part = block.micro_batch_shape(job("mixtral-8x7b", dp=8, ep=8, seq_len=4096, micro_batch=4))
    rows = 4 * 4096 * 2 * 4096 * 2 * 7 / 8
    wire = rows / (hardware.intra_bandwidth * hardware.efficiency.intra_host * 0.87)
    assert wire < moe.one_way(hardware, part) < wire + 5e-5
    assert 0 < moe.counts(hardware, part) < 1e-4
    assert moe.one_way(hardware, replace(part, ep=1)) == 0
    parts = replace(part, batch=8, tp=2, ep_over_tp=True)  # each rank routes half of the sequence
    assert moe.one_way(hardware, parts) == moe.one_way(hardware, part)


def test_one_half_of_the_batch_travels_while_the_other_is_computed() -> None:
    """Three of four exchanges of a half run behind other work, which they slow down."""
    hardware = machine()
    part = block.micro_batch_shape(job("mixtral-8x7b", dp=8, ep=8, seq_len=4096, micro_batch=4))
    once = moe.one_way(hardware, replace(part, batch=2))
    hidden = once * (1 + 3 * hardware.efficiency.overlap)
    passes = block.block(hardware, part)
    assert passes.backward.ep == pytest.approx(hidden)
    assert passes.forward.ep == pytest.approx(hidden + 2 * moe.counts(hardware, part), rel=1e-2)


@pytest.mark.parametrize(
    ("mode", "ep", "compiled", "repeated"),
    [
        ("full", 8, True, [0, 1, 2, 3, 5, 6, 7]),
        ("attention", 8, True, [0, 1, 2, 5, 6]),
        ("every-2nd-matmul", 8, True, [0, 2, 5, 6]),
        ("matmuls", 8, True, []),
        ("full", 1, True, [0, 1, 2, 3, 5, 6]),
        # `tests.parallel.test_activation` counts these.
        ("full", 8, False, [0, 1, 2, 3, 5, 6, 7]),
        ("attention", 8, False, [0, 1, 2, 5, 6, 7]),
        ("matmuls", 8, False, [7]),
    ],
)
def test_products_that_recomputation_repeats(
    mode: str, ep: int, compiled: bool, repeated: list[int]
) -> None:
    """q, k, v, output, router, gate, up, down: parts of a block are recomputed and compiled separately."""
    shape = block.micro_batch_shape(job("qwen3-30b-a3b", dp=8, ep=ep))
    shape = replace(shape, recompute=mode, compiled=compiled)
    assert block._recomputed_products(shape, block.linears(QWEN, 1, ep)) == repeated


def test_utilization_counts_the_experts_that_a_token_takes() -> None:
    config = job("mixtral-8x7b", dp=8, ep=8, seq_len=4096, global_batch=64, zero=Zero(stage=3))
    step = step_time(config, machine())
    embedding = MIXTRAL.vocab * MIXTRAL.hidden
    attention = 12 * MIXTRAL.layers * MIXTRAL.hidden * 4096
    flops = 6 * (active_parameters(MIXTRAL) - embedding) + attention
    assert step.mfu == pytest.approx(step.tokens_per_s_per_gpu * flops / 989.5e12, rel=1e-3)
    assert step.parts.ep > 0


def test_sharing_experts_out_spares_memory_and_gathers() -> None:
    alone, shared = (
        job("mixtral-8x7b", dp=16, ep=ep, seq_len=4096, global_batch=64, zero=Zero(stage=3))
        for ep in (1, 8)
    )
    before, after = predict(alone), predict(shared)
    assert (
        after.worst.part("units in flight").bytes < before.worst.part("units in flight").bytes / 3
    )
    assert after.time.parts.dp < before.time.parts.dp / 2
    assert after.time.parts.ep > before.time.parts.ep == 0

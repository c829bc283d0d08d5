"""The differences that the records of software make to a step, and the costs found by comparing them."""

from __future__ import annotations

from dataclasses import replace
from math import comb

import pytest

from benchmarks.plan.software import MEGATRON, TORCH, memory_of, record, software_setting
from nanoscale.config.model_math import parameters
from nanoscale.config.schema import Backend, Launcher, Zero
from nanoscale.plan.hardware.hardware import DTENSOR_S, NANOSCALE, Efficiency, Software
from nanoscale.plan.memory.peak import rank_memory
from nanoscale.plan.time import block, collectives, moe
from nanoscale.plan.time.step import StepBreakdown, step_time
from tests.plan.machines import BF16, changed, job, machine, model

FSDP = {"dp": 8, "zero": Zero(stage=3), "seq_len": 4096, "global_batch": 8}
FP8 = replace(BF16, fp8=True)
EAGER = Backend(compile="off")


def parts(software: Software = NANOSCALE, **keys) -> StepBreakdown:
    return step_time(job(**keys), machine(), software=software).parts


def test_computing_beside_a_collective_loses_no_less_than_was_measured():
    """Lee et al. 2025: 18.9 % longer beside collectives; 10.2 % longer still if they come one after another.

    In some of the collectives' time the device waits for the network.
    """
    beside, after = 1.189, 1.189 * 1.102
    assert (beside - 1) / (after - 1) <= Efficiency().overlap <= 1


def test_norms_of_queries_and_keys_move_as_much_for_each_number_as_those_of_the_stream():
    """In eager PyTorch before 2.9; here queries and keys are as wide as the stream."""
    plain = replace(model("llama-1b"), layers=1, heads=1, kv_heads=1, head_dim=2048)
    composed, fused = (
        replace(TORCH, dtensor=False),
        replace(TORCH, dtensor=False, composed_norm=False),
    )
    shown = [
        parts(composed, model=it, backend=EAGER).elementwise
        - parts(fused, model=it, backend=EAGER).elementwise
        for it in (plain, replace(plain, qk_norm=True))
    ]
    assert shown[1] == pytest.approx(
        2 * shown[0]
    )  # two norms of the stream, and two of as many numbers


def test_a_network_that_is_waited_for_slows_no_computing():
    hardware, size = machine(), 1e12
    near, one_a_host = (collectives.group(hardware, *it) for it in ((8, 1), (16, 8)))
    copied = collectives.with_copying(hardware, near, size)[1]
    assert copied == collectives.all_gather(hardware, near, size)
    summed = collectives.with_copying(hardware, near, size, collectives.all_reduce)[1]
    assert summed == collectives.all_reduce(hardware, near, size)
    links = hardware.intra_bandwidth * hardware.efficiency.intra_host
    for slower in (1, 2, 8):
        network = changed(hardware, inter_bandwidth=hardware.inter_bandwidth / slower)
        copied = collectives.with_copying(network, one_a_host, size)[1]
        assert copied == pytest.approx(size * 15 / 16 / links, rel=0.01)


def test_the_update_of_dtensors_waits_for_the_host():
    """Three operations for each of nine tensors of a block."""
    assert parts(TORCH, **FSDP).optimizer == pytest.approx(3 * DTENSOR_S * 9 * 32)
    assert parts(**FSDP).optimizer < 0.2 * parts(TORCH, **FSDP).optimizer
    alone = FSDP | {"dp": 1, "global_batch": 1}
    assert parts(TORCH, **alone).optimizer == parts(**alone).optimizer


def test_operations_on_dtensors_cost_the_host_more_than_small_blocks_take():
    small = {"tp": 8, "dp": 1, "seq_len": 512, "global_batch": 1}
    ours, theirs = parts(**small), parts(TORCH, **small)
    assert theirs.launch > 5 * max(ours.launch, 0.01)
    large = {"tp": 8, "dp": 1, "seq_len": 65536, "global_batch": 1}
    assert parts(TORCH, **large).launch == 0


def test_dtensors_copy_what_they_gather_along_the_sequence():
    """Four collectives forward of [1, 8192, 4096] in bf16, each read and written once more."""
    layout = {"tp": 8, "dp": 1, "global_batch": 1}
    part = block.micro_batch_shape(job(**layout))
    ours, theirs = (
        block.block(machine(), replace(part, software=software)) for software in (NANOSCALE, TORCH)
    )
    copied = 4 * 2 * 8192 * 4096 * 2 / (0.87 * 3.35e12)
    assert theirs.forward.tp - ours.forward.tp == pytest.approx(copied)


def test_a_collective_is_hidden_by_its_own_products_but_for_a_chunk():
    """`tp_overlap`: a gather or a scatter with q, k and v, with wo, with gate and up, and with down.

    Backward, sums of gradients [8192, 4096] become copies of gradients and weights, 2 numbers in place of 9.
    """
    layout = {"tp": 8, "dp": 1, "global_batch": 1, "backend": Backend(compile="on")}
    part = block.micro_batch_shape(job(**layout))
    plain = block.block(machine(), part)
    hidden = block.block(machine(), replace(part, tp_overlap=True))
    collective = plain.forward.tp / 4
    for gradients, seconds in (("", hidden.forward.tp), ("inputs", hidden.backward.tp)):
        q, k, v, wo, gate, up, down = (
            block.product(machine(), part, it, gradients) for it in block.linears(part.model, 8)
        )
        during = [min(collective, it) for it in (q + k + v, wo, gate + up, down)]
        assert during[1] < 0.5 * collective == 0.5 * during[2]
        assert seconds == pytest.approx(4 * collective - 7 / 8 * sum(during))
    received = 2 * 2 * 8192 * 4096 * 9 / 8
    added = hidden.forward.elementwise - plain.forward.elementwise
    assert added == pytest.approx(received / (0.87 * 3.35e12), rel=0.01)
    width = (4096 + 2 * 1024 + 2 * 14336) // 8
    copied = 2 * 2 * width * (8192 + 4096) - 2 * 9 * 8192 * 4096
    saved = hidden.backward.elementwise - plain.backward.elementwise
    assert saved == pytest.approx((received + copied) / (0.87 * 3.35e12), rel=0.01)


@pytest.mark.parametrize("software", [NANOSCALE, TORCH, MEGATRON], ids=lambda one: one.name)
def test_row_wise_scales_cost_products_and_casts(software: Software):
    compiled = Backend(compile="on")
    tensor, row, mixed = (
        parts(software, precision=replace(FP8, fp8_recipe=recipe), backend=compiled)
        for recipe in ("tensorwise", "rowwise", "rowwise_with_gw_hp")
    )
    wide = parts(software, backend=compiled)
    assert row.matmul > 1.2 * tensor.matmul and row.elementwise > tensor.elementwise
    assert row.matmul < wide.matmul
    assert tensor.matmul < mixed.matmul < wide.matmul


def test_block_scales_cost_casts_and_no_products():
    compiled = Backend(compile="on")
    tensor, block = (
        parts(precision=replace(FP8, fp8_recipe=recipe), backend=compiled)
        for recipe in ("tensorwise", "mxfp8")
    )
    assert block.matmul == tensor.matmul
    assert block.elementwise > tensor.elementwise


def test_nvfp4_is_faster_in_products_but_for_the_blocks_that_stay():
    compiled = Backend(compile="on")
    known = machine()
    hardware = replace(known, peaks=known.peaks | {"nvfp4": 2 * known.peaks["fp8"]})
    wide, eight, four = (
        step_time(job(precision=it, backend=compiled), hardware).parts.matmul
        for it in (BF16, *(replace(FP8, fp8_recipe=it) for it in ("mxfp8", "nvfp4")))
    )
    assert 0.15 * wide < four < 0.9 * eight < wide


def test_megatron_hides_gathers_and_reductions_behind_its_pipeline():
    layout = {"pp": 4, "dp": 16, "global_batch": 512, "zero": Zero(stage=1)}
    ours, theirs = parts(**layout), parts(MEGATRON, **layout)
    assert theirs.dp < 0.3 * ours.dp


def test_tensor_parallel_collectives_are_hidden_but_for_a_chunk():
    layout = {"tp": 4, "dp": 2}
    hidden = parts(MEGATRON, **layout).tp
    shown = step_time(
        job(**layout), machine(), software=replace(MEGATRON, hidden_tp="none")
    ).parts.tp
    ends = parts(MEGATRON, **layout | {"micro_batch": 1})
    assert 0 < hidden < 0.35 * shown and ends.tp == hidden


def test_the_sum_over_replicas_is_hidden_as_far_as_the_backward_pass_lasts():
    """HSDP: FSDP2 sums over replicas on a stream of its own."""
    layout = {"dp": 64, "dp_replicate": 8, "zero": Zero(stage=3), "global_batch": 64}
    flat = parts(**layout | {"dp_replicate": 1})
    assert parts(**layout).dp < 1.15 * flat.dp
    slow = changed(machine(), inter_bandwidth=1e9)
    exposed = step_time(job(**layout), slow).parts.dp
    summed = (
        2 * 8.03e9 / 8 * 4 * 7 / 8 / (0.85 * 1e9)
    )  # a shard of an eighth, in fp32, over the network
    assert 0.5 * summed < exposed < 1.1 * summed


def test_compiled_products_in_8_bits_keep_what_they_read_in_8_bits():
    compiled = {"backend": Backend(compile="on"), "launcher": Launcher(device="cuda")}
    wide, narrow = (
        rank_memory(job(precision=precision, **compiled))[0].part("activations").bytes
        for precision in (BF16, FP8)
    )
    normed, product = 2 * 8192 * 4096, 8192 * 14336
    assert wide - narrow == pytest.approx(32 * (normed + product), rel=0.1)


def test_a_norm_of_single_operations_keeps_its_steps_in_fp32_until_it_is_compiled():
    eager, compiled = (
        [
            memory_of(
                software_setting(
                    job(backend=Backend(compile=on), launcher=Launcher(device="cuda")), software
                ),
                None,
            )[0].allocated
            for software in (NANOSCALE, TORCH)
        ]
        for on in ("off", "on")
    )
    # the cast input and the normalized one of two norms, in place of two inputs in bf16
    assert eager[1] - eager[0] > 32 * (4 * 4 - 2 * 2) * 8192 * 4096 * 0.9
    assert compiled[0] == compiled[1]


def test_a_token_travels_once_to_each_host_and_rank_of_its_experts():
    """Eight of 128 experts on 64 ranks of 8 hosts are on 5.34 hosts, and on 7.78 ranks."""
    layout = {"dp": 64, "ep": 64, "global_batch": 64, "seq_len": 4096}
    part = block.micro_batch_shape(job("qwen3-30b-a3b", **layout), MEGATRON)
    hardware = changed(machine(), intra_latency=0.0)
    by_host, by_rank, by_expert = (
        moe.one_way(hardware, replace(part, software=replace(MEGATRON, copies=copies)))
        for copies in ("host", "rank", "expert")
    )
    hosts = 8 * (1 - comb(112, 8) / comb(128, 8))
    ranks = 64 * (1 - comb(126, 8) / comb(128, 8))
    assert (hosts, ranks) == pytest.approx((5.34, 7.78), abs=0.01)
    assert by_host / by_expert == pytest.approx(hosts / 8, rel=0.02)
    assert by_rank / by_expert == pytest.approx(ranks / 8, rel=0.02)


def test_megatron_s_master_weights_of_experts_are_divided_by_the_ranks_that_have_them():
    """Two ranks have the same experts with dp 8 and ep 4."""
    layout = {"dp": 8, "ep": 4, "seq_len": 4096, "zero": Zero(stage=1)}
    config = job("qwen3-30b-a3b", **layout, launcher=Launcher(device="cuda"))
    (rank,) = memory_of(software_setting(config, MEGATRON), None)
    experts = 48 * 128 * 3 * 2048 * 768
    others = parameters(config.model) - experts
    assert rank.part("weights").bytes == pytest.approx(4 * (others / 8 + experts / 8), rel=0.001)


def _mixture(software, **layout):
    config = job("qwen3-30b-a3b", seq_len=4096, micro_batch=1, **layout)
    hardware = machine("h100-sxm")
    shape = block.micro_batch_shape(config, software)
    return hardware, shape, block.block(hardware, shape)


def test_products_of_experts_take_the_rate_of_the_software_s_kernel():
    """In 16 and in 8 bits. A layer outside of experts is as fast."""
    for kind in ("bf16", "fp8"):
        hardware, shape, _ = _mixture(MEGATRON, dp=8, ep=8)
        shape = replace(shape, kind=kind, batch=16)
        slow = replace(shape, software=replace(MEGATRON, grouped=MEGATRON.grouped / 2))
        for linear in block.linears(shape.model, 1, 8):
            times = [block.product(hardware, it, linear) for it in (shape, slow)]
            assert times[1] == pytest.approx(times[0] * (2 if linear.of_experts else 1), rel=0.05)


def test_the_host_bounds_a_mixture_s_block_without_cuda_graphs():
    hosts = [record("megatron"), record("megatron-router-graphs"), record("megatron-graphs")]
    without, router, graphs = (sum(_mixture(it, dp=8, ep=8)[2].seconds) for it in hosts)
    assert without == pytest.approx(2 * MEGATRON.host_s) and graphs < router < without


def test_another_micro_batch_s_computation_hides_exchanges():
    fast = replace(MEGATRON, host_s=1e-6)
    exposed = _mixture(fast, dp=8, ep=8)[2].both.ep
    hidden = _mixture(replace(fast, hidden_ep=0.8), dp=8, ep=8)[2].both.ep
    assert hidden == pytest.approx(0.2 * exposed)

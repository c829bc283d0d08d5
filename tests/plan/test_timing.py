"""A step's time against closed forms, published runs, and what must never get worse."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest

from benchmarks.plan.software import MEGATRON, TORCH
from nanoscale.common.devices import Devices
from nanoscale.config.model_math import (
    flops_per_token,
    flops_per_token_causal,
    parameters,
    trained_flops_per_token,
)
from nanoscale.config.resolved import ResolvedConfig
from nanoscale.config.rules import check
from nanoscale.config.schema import Backend, Cluster, Lora, Optimizer, Precision, Zero
from nanoscale.plan.hardware.hardware import NANOSCALE, Hardware, hardware_of
from nanoscale.plan.memory.shards import rank_holdings
from nanoscale.plan.pipeline.closed_forms import bubble
from nanoscale.plan.time import block as blocks
from nanoscale.plan.time import data_parallel
from nanoscale.plan.time.step import StepBreakdown, stage_costs, step_time, training
from nanoscale.view.plan.explain import how
from tests.plan.machines import BF16, changed, job, machine, model
from tests.support.recipes import changed as recipe
from tests.support.recipes import complete

COMPILED = Backend(compile="on")
FREE = {
    "matmul": 1.0, "attention": 1.0, "memory": 1e9, "intra_host": 1e9, "inter_host": 1e9,
    "overlap": 1e-9, "jitter": 1e-9, "eager_s": 1e-12, "compiled_s": 1e-12,
    "intra_latency": 0.0, "inter_latency": 0.0, "host_bandwidth": 1e18,
}  # fmt: skip
"""A device on which only arithmetic takes time."""


def llama_405b(cp: int, seq: int, dp: int, batch: int) -> ResolvedConfig:
    """Llama 3's layout: a block a stage, none beside embedding and head (arXiv:2407.21783, section 3.3.2)."""
    return job(
        "llama-405b",
        tp=8, pp=16, cp=cp, dp=dp, seq_len=seq, global_batch=batch,
        schedule="interleaved-1f1b", virtual_stages=8, layers_per_stage=[0, *[1] * 126, 0],
        zero=Zero(stage=2), backend=COMPILED,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("cp", "seq", "dp", "batch", "published"),
    [(1, 8192, 128, 2048, 0.41), (16, 131072, 8, 128, 0.38)],
)
def test_llama_3_405b_on_16384_h100(cp, seq, dp, batch, published):
    """MFU within 4 points of the Llama 3 paper's table 4. With cp the kernel is FlashAttention, as of that time
    only it was in rings."""
    config = llama_405b(cp, seq, dp, batch)
    if cp > 1:
        config = replace(config, backend=replace(config.backend, attention="flash"))
    assert config.world_size == 16384
    assert step_time(config, hardware_of(config)).mfu == pytest.approx(published, abs=0.04)


@pytest.mark.parametrize(
    ("config", "tokens_per_s"),
    [
        # torchtitan, docs/performance.md of August 2024: 64 A100, FSDP2.
        (job("llama-8b", "a100-80", dp=64, global_batch=64, zero=Zero(stage=3),
             activation_checkpointing="selective", selective_keep="every-2nd-matmul"), 2973),
        (job("llama-70b", "a100-80", dp=64, global_batch=64, zero=Zero(stage=3),
             activation_checkpointing="full"), 331),
    ],
)  # fmt: skip
def test_published_runs(config, tokens_per_s):
    found = step_time(config, hardware_of(config)).tokens_per_s_per_gpu
    assert found == pytest.approx(tokens_per_s, rel=0.10)


def test_parts_add_up_and_rates_agree():
    config = llama_405b(1, 8192, 128, 2048)
    step = step_time(config, machine())
    assert step.seconds == pytest.approx(
        sum(getattr(step.parts, f.name) for f in fields(StepBreakdown))
    )
    assert step.tokens_per_s == pytest.approx(2048 * 8192 / step.seconds)
    assert step.tokens_per_s_per_gpu == pytest.approx(step.tokens_per_s / 16384)
    peak = machine().peak(BF16) * 16384
    assert step.mfu == pytest.approx(step.tokens_per_s * flops_per_token(config.model, 8192) / peak)
    causal = step.tokens_per_s * flops_per_token_causal(config.model, 8192) / peak
    assert step.mfu_causal == pytest.approx(causal)
    assert step.hfu == step.mfu


def test_muon_orthogonalizes_what_is_trained():
    """8 ranks divide five iterations of 4·short²·long + 2·short³ operations of each matrix of a block."""

    def update(name: str, **keys) -> float:
        config = job("llama-8b", optimizer=Optimizer(name=name), zero=Zero(stage=2), **keys)
        parts = step_time(config, changed(machine(), **FREE)).parts
        return parts.optimizer

    sides = [(4096, 4096)] * 2 + [(1024, 4096)] * 2 + [(4096, 14336)] * 3
    operations = 32 * 5 * sum(4 * a**2 * b + 2 * a**3 for a, b in sides) / 8
    expected = operations / machine().peaks["bf16"]
    assert update("muon") - update("adamw") == pytest.approx(expected, rel=0.3)
    adapters = Lora(rank=16, targets=["wq", "wv"])
    assert update("muon", lora=adapters) < 0.1 * expected


def test_ends_of_a_pipeline_sum_the_gradients_of_a_tied_embedding():
    """Each of two ranks sends and receives the fp32 gradient of its rows once, over the network here."""
    config = job("llama-1b", pp=4, dp=8, tp=2, zero=Zero(stage=1))
    hardware = machine()
    rows = 4 * config.model.vocab * config.model.hidden / 2 / 8
    sent = rows / (hardware.inter_bandwidth * hardware.efficiency.inter_host)
    assert data_parallel.tied_embedding(config, hardware) == pytest.approx(sent, rel=0.1)
    untied = replace(config, model=replace(config.model, tie_embeddings=False))
    alone = replace(config, parallel=replace(config.parallel, pp=1))
    assert [data_parallel.tied_embedding(it, hardware) for it in (untied, alone)] == [0, 0]


@pytest.mark.parametrize("name", ["llama-8b", "llama-70b", "gpt-10b"])
@pytest.mark.parametrize("layout", [{"tp": 1}, {"tp": 8}, {"cp": 4}, {"tp": 2, "cp": 2}])
def test_where_only_arithmetic_takes_time_nearly_all_of_the_peak_is_used(name, layout):
    """The sum over the operations is the closed form of the whole, but for the tiles' losses."""
    config = job(name, seq_len=4096, global_batch=64, micro_batch=8, dp=2, **layout)
    step = step_time(config, changed(machine(), **FREE))
    # 128 steps of prologue in 1000 to 8000 along k; a last wave; attention backward at 0.8 of its rate.
    assert 0.80 < step.mfu_causal < 1.0


def test_recomputing_everything_but_the_last_product():
    config = job(activation_checkpointing="full", dp=1, global_batch=1)
    model, tokens = config.model, 8192
    step = step_time(config, machine())
    block = 4096 * (2 * 4096 + 2 * 1024) + 3 * 4096 * 14336 - 4096 * 14336
    attention = 4 * 8192 * 4096
    again = tokens * model.layers * (2 * block + attention)
    assert (step.hfu - step.mfu) * step.seconds * machine().peak(BF16) == pytest.approx(again)


@pytest.mark.parametrize(
    ("mode", "keep", "products"),
    [("none", "matmuls", []), ("selective", "matmuls", []),
     ("selective", "every-2nd-matmul", [4096 * 4096, 4096 * 1024, 4096 * 14336]),
     ("selective", "attention", [2 * 4096 * 4096, 2 * 4096 * 1024, 2 * 4096 * 14336])],
)  # fmt: skip
def test_what_selective_recomputation_computes_again(mode, keep, products):
    """Among wq, wk, wv, wo, gate, up, down every 2nd is kept: wk, wo, up; and down is never needed again."""
    config = job(activation_checkpointing=mode, selective_keep=keep)
    part = blocks.micro_batch_shape(config)
    assert blocks.block(machine(), part).recomputed_flops == 2 * 8192 * sum(products)


def test_each_mode_recomputes_more_than_the_one_before():
    modes = [("none", "matmuls"), ("selective", "matmuls"), ("selective", "every-2nd-matmul"),
             ("selective", "attention"), ("selective", "core-attention"), ("full", "matmuls")]  # fmt: skip
    seconds = [
        step_time(job(activation_checkpointing=mode, selective_keep=keep, tp=2), machine()).seconds
        for mode, keep in modes
    ]
    assert seconds == sorted(seconds) and len(set(seconds)) == len(seconds)


def test_half_of_the_blocks_recomputed_cost_half():
    every, second = (
        step_time(
            job(activation_checkpointing="full", checkpoint_every=k), machine()
        ).parts.recomputed
        for k in (1, 2)
    )
    assert second == pytest.approx(every / 2)


@pytest.mark.parametrize(("stages", "micro_batches", "used"), [(8, 1, 0.125), (4, 4, 0.571)])
def test_utilization_of_a_pipeline_as_in_the_textbook(stages, micro_batches, used):
    idle = bubble("gpipe", stages, 1, micro_batches, 1.0, 1.0, 1.0, 0.0)
    assert 3 * micro_batches / (3 * micro_batches + idle) == pytest.approx(used, abs=1e-3)


def test_a_simulated_pipeline_takes_the_place_of_the_closed_form():
    config = job(pp=4, dp=2, virtual_stages=1)
    estimated = step_time(config, machine())
    costs = stage_costs(config, machine())
    busiest = 8 * max(cost.forward + cost.backward for cost in costs)
    simulated = step_time(config, machine(), makespan=busiest + 0.5)
    assert simulated.parts.bubble + simulated.parts.pp == pytest.approx(0.5)
    assert simulated.parts.matmul == estimated.parts.matmul
    none = step_time(config, machine(), makespan=busiest)
    assert none.parts.bubble + none.parts.pp == pytest.approx(0.0, abs=1e-9)


def test_costs_of_stages_are_the_busy_time_of_the_step():
    """Without links a pipeline of stages takes for a micro batch what its stages take one after another."""
    hardware = changed(machine(), **FREE)
    config = job(
        pp=4, dp=2, virtual_stages=2, schedule="interleaved-1f1b", layers_per_stage=[4] * 8
    )
    costs = stage_costs(config, hardware)
    alone = job(pp=1, dp=8, global_batch=64)
    parts = step_time(alone, hardware).parts
    busy = parts.matmul + parts.attention + parts.elementwise + parts.launch
    assert sum(cost.forward + cost.backward for cost in costs) == pytest.approx(busy / 8, rel=1e-6)
    assert all(0 < cost.weights < cost.backward for cost in costs)


def test_ranks_of_a_v_hold_the_first_and_the_last_stage():
    config = job(
        pp=4, dp=2, schedule="zbv", virtual_stages=2, layers_per_stage=[1, 2, 3, 4, 5, 6, 7, 4]
    )
    held = rank_holdings(config, 1)
    assert [rank.blocks for rank in held] == [1 + 4, 2 + 7, 3 + 6, 4 + 5]
    assert (held[0].first, held[0].last, held[3].last) == (True, True, False)


@pytest.mark.parametrize("name", ["llama-8b", "gpt2", "llama-1b"])
@pytest.mark.parametrize("pp", [1, 4])
def test_parameters_of_the_ranks_are_those_of_the_model(name, pp):
    config = job(name, pp=pp, dp=2)
    together = sum(
        data_parallel.rank_parameters(config.model, 1, held) for held in rank_holdings(config, 1)
    )
    twice = (
        config.model.vocab * config.model.hidden if config.model.tie_embeddings and pp > 1 else 0
    )
    # Biases, the last norm and learned positions are left out: too few to take time.
    assert together - twice == pytest.approx(parameters(config.model), rel=0.01)


def test_other_softwares_ways_take_what_their_steps_take():
    """RMSNorm of single operations, counted one by one, against ours of one; gradients that products sum."""
    config = job(tp=2, dp=4, global_batch=64)
    usual, composed, megatron = (
        step_time(config, machine(), software=software).parts
        for software in (NANOSCALE, TORCH, MEGATRON)
    )
    # Bytes: widen 6, square 8, mean 4, scale 8, narrow 6, weigh 4, where one kernel reads and writes 4;
    # backward 4 + 8 of the weight, 6 widened, 24 scaled, 4 + 16 of the mean and square, 12 summed, 6 narrowed.
    forward, backward = 36 - 4, 80 - 6
    number = 2 * 32 * 16 * 8192 * 4096 / 2
    seconds = number * (forward + backward) / (0.87 * 3.35e12)
    assert composed.elementwise - usual.elementwise == pytest.approx(seconds)
    assert megatron.tp < usual.tp and megatron.dp < usual.dp
    assert megatron.matmul > usual.matmul


def test_a_ring_sends_gradients_of_keys_in_full_width():
    """Links are slow: keys, values and their fp32 gradients are three times the forward traffic."""
    config = job("llama-70b", cp=8, dp=1, seq_len=16384, global_batch=1)
    hardware = changed(machine(), intra_bandwidth=1e8, intra_latency=0.0)
    ring = blocks.block(hardware, blocks.micro_batch_shape(config))
    assert ring.backward.cp / ring.forward.cp == pytest.approx(3, rel=0.01)
    part = replace(blocks.micro_batch_shape(config), cp_method="ulysses")
    seconds = ring.both.elementwise - blocks.block(hardware, part).both.elementwise
    # 7 hops, each with three quarters of 2048 tokens: 26 bytes of 64 heads, and 10 of 64 + 2 · 8 heads.
    merged = 7 * 0.75 * 2048 * 128 * (26 * 64 + 10 * 80)
    assert seconds == pytest.approx(merged / (0.87 * 3.35e12))


def test_zero_3_sends_half_as_much_again_as_zero_2():
    """Rajbhandari et al. 2020, section 7.2: 3Ψ against 2Ψ, with gradients as wide as parameters."""
    precision = Precision(compute="bf16", reduce="bf16")
    hardware = changed(machine(), intra_latency=0.0)

    def sent(stage: int) -> float:
        config = job(zero=Zero(stage=stage), precision=precision, global_batch=8)
        plan = data_parallel.plan(config, hardware, 1)
        return (
            plan.gather * plan.gathers + plan.gather_backward * plan.gathers_backward + plan.reduce
        )

    assert sent(3) / sent(2) == pytest.approx(1.5)


def test_when_each_stage_communicates():
    """The table at the head of nanoscale.parallel.data, with 4 micro batches."""

    def counts(stage: int, **keys: object) -> tuple[int, int, int]:
        plan = data_parallel.plan(job(zero=Zero(stage=stage), **keys), machine(), 4)
        return plan.gathers, plan.gathers_backward, plan.reduces

    assert [counts(stage) for stage in (0, 1, 2, 3)] == [(1, 0, 1), (1, 0, 1), (1, 0, 4), (4, 4, 4)]
    assert counts(3, pp=2, dp=4) == (1, 0, 1)


def test_hsdp_gathers_inside_a_host_and_sums_between_hosts():
    far = job(dp=64, zero=Zero(stage=3), global_batch=64)
    hybrid = replace(far, parallel=replace(far.parallel, dp_replicate=8))
    plain, both = (data_parallel.plan(c, machine(), 1) for c in (far, hybrid))
    assert both.gather < plain.gather
    assert both.all_reduce > 0 == plain.all_reduce
    assert data_parallel.shards(hybrid) == 8


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_deepspeed_without_overlap_is_never_faster(stage):
    def seconds(overlap: str) -> float:
        backend = Backend(name="deepspeed", overlap_comm=overlap)
        config = job(dp=64, global_batch=128, zero=Zero(stage=stage), backend=backend)
        return step_time(config, machine()).seconds

    assert seconds("off") >= seconds("on")


def test_zero_plus_plus_sends_less():
    def gather(**keys: object) -> float:
        config = job(
            dp=64, global_batch=64, zero=Zero(stage=3, **keys), backend=Backend(name="deepspeed")
        )
        plan = data_parallel.plan(config, machine(), 1)
        return plan.gather + plan.gather_backward + plan.reduce

    usual = gather()
    assert all(
        gather(**k) < usual
        for k in ({"hpz": 8}, {"quantized_weights": True}, {"quantized_gradients": True})
    )


LAYOUTS = [
    {"zero": Zero(stage=3), "dp": 64, "global_batch": 128},
    {"zero": Zero(stage=1), "dp": 16, "tp": 4, "global_batch": 128},
    {"dp": 4, "tp": 2, "pp": 4, "cp": 2, "global_batch": 64},
    {"dp": 4, "cp": 16, "cp_method": "ulysses", "seq_len": 32768, "zero": Zero(stage=3)},
    {"dp": 8, "tp": 8, "sequence_parallel": False, "pp": 2, "schedule": "zbv", "virtual_stages": 2,
     "global_batch": 256},
    {"dp": 8, "zero": Zero(stage=2, offload_optimizer="cpu"), "backend": Backend(name="deepspeed")},
    {"dp": 8, "offload_activations": True},
]  # fmt: skip
EXPERTS = [{"name": "mixtral-8x7b", "ep": 8}, {"name": "deepseek-v3", "ep": 8}]
BETTER = [
    "memory_bandwidth", "intra_bandwidth", "inter_bandwidth", "host_bandwidth", "host_memory_bandwidth",
    "matmul", "attention", "memory", "intra_host", "inter_host",
]  # fmt: skip
WORSE = ["intra_latency", "inter_latency", "overlap", "jitter", "eager_s"]


def value(hardware: Hardware, name: str) -> float:
    return float(getattr(hardware if hasattr(hardware, name) else hardware.efficiency, name))


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_more_of_anything_good_is_never_slower(layout):
    config, hardware = job(**layout), machine()
    seconds = step_time(config, hardware).seconds
    for names, factor in ((BETTER, 1.2), (WORSE, 1 / 1.2)):
        for name in names:
            better = changed(hardware, **{name: value(hardware, name) * factor})
            assert step_time(config, better).seconds <= seconds * (1 + 1e-12), name


@pytest.mark.parametrize("layout", [*LAYOUTS, *EXPERTS], ids=str)
def test_every_part_that_takes_time_is_explained(layout):
    config = job(**layout)
    step = step_time(config, machine())
    texts = how(config, machine(), step)
    assert set(texts) == {f.name for f in fields(StepBreakdown) if getattr(step.parts, f.name) > 0}
    assert all(text and "None" not in text for text in texts.values())


def test_a_longer_sequence_costs_tokens_and_8_bits_gain_them():
    def rate(**keys: object) -> float:
        return step_time(job(**keys), machine()).tokens_per_s

    assert (
        rate(seq_len=32768)
        < rate(seq_len=8192)
        < rate(seq_len=2048, global_batch=64, micro_batch=4)
    )
    fp8 = replace(BF16, fp8=True)
    assert rate(precision=fp8, backend=COMPILED) > rate(backend=COMPILED) > rate()
    assert rate(precision=fp8) < rate()  # casts by single operations


def test_small_blocks_wait_for_the_cpu_until_they_are_compiled():
    tiny = {"seq_len": 128, "global_batch": 8}
    eager, compiled = (
        step_time(job("gpt2", **tiny, backend=Backend(compile=on)), machine()).parts.launch
        for on in ("off", "on")
    )
    assert eager > compiled >= 0
    assert step_time(job(), machine()).parts.launch == 0


def test_the_optimizers_time_is_its_traffic():
    """AdamW without clipping: four numbers read and three written a parameter, 4 bytes each."""
    config = job(dp=1, global_batch=1, optimizer=Optimizer(clip_norm=None))
    hardware = changed(machine(), memory=1.0)
    count = data_parallel.rank_parameters(config.model, 1, rank_holdings(config, 1)[0])
    assert step_time(config, hardware).parts.optimizer == pytest.approx(28 * count / 3.35e12)


def test_a_whole_run_and_its_price():
    config = job(steps=1000)
    hardware = machine()
    step = step_time(config, hardware)
    run = training(config, replace(hardware, price=2.0), step)
    assert run.hours == pytest.approx(1000 * step.seconds / 3600)
    assert run.device_hours == pytest.approx(8 * run.hours)
    assert run.cost == pytest.approx(2 * run.device_hours)
    assert training(config, hardware, step).cost is None


def test_every_machine_takes_a_job():
    for device in ("a100-40", "h100-pcie", "gb200", "mi300x", "cpu"):
        config = job("llama-1b", device)
        assert 0 < step_time(config, hardware_of(config)).mfu < 1
    old = job("llama-1b", "v100", precision=Precision(compute="fp16"))
    assert 0 < step_time(old, hardware_of(old)).mfu < 1
    plain = complete(
        precision=Precision(compute="fp32"),
        model=old.model,
        train=old.train,
        parallel=old.parallel,
        cluster=Cluster(device="v100"),
    )
    assert 0 < step_time(plain, hardware_of(plain)).mfu < 1


@pytest.mark.parametrize(
    "words",
    [
        ["parallel=3d", "parallel.dp=2"],
        ["parallel=interleaved", "zero=stage3"],
        ["parallel=pp", "parallel.schedule=dualpipev", "train.global_batch=32"],
        ["parallel=ulysses", "parallel.activation_checkpointing=full"],
        ["parallel=cp", "parallel.tp=2", "parallel.sequence_parallel=false"],
        ["backend=deepspeed", "zero=stage3-offload", "parallel.dp=2"],
    ],
    ids=" ".join,
)
def test_what_the_laws_let_through_is_predicted(words, monkeypatch):
    monkeypatch.setattr("nanoscale.common.versions.find_spec", lambda name: name)
    config = check(recipe("cluster=cpu", *words), Devices("cpu", 2))
    hardware = hardware_of(config)
    step = step_time(config, hardware)
    assert 0 < step.mfu_causal < step.mfu < 1
    assert how(config, hardware, step)


@pytest.mark.parametrize(
    ("attention", "keys", "kernel"),
    [
        ("auto", {}, "cudnn"),
        ("cudnn", {}, "cudnn"),
        ("flash", {}, "flash"),
        ("math", {}, "flash"),
        ("auto", {"cp": 2}, "cudnn"),
        ("auto", {"cp": 2, "cp_method": "ulysses"}, "cudnn"),
        ("auto", {"precision": Precision(compute="fp32")}, "flash"),
    ],
)
def test_the_kernel_of_attention_follows_from_the_key_and_the_layout(attention, keys, kernel):
    config = job(backend=Backend(attention=attention), **keys)
    assert blocks.attention_kernel(config) == kernel
    wide = replace(config, model=replace(config.model, head_dim=256))
    assert blocks.attention_kernel(wide) == ("cudnn" if attention == "cudnn" else "flash")


def test_latent_attention_of_192_and_128_is_cudnns_without_padding():
    """An attention's time is its FLOPs over its rate, of which flash pads values from 128 to 192."""
    latent = replace(job(), model=replace(model("deepseek-v3"), layers=4))

    def seconds(**keys) -> float:
        config = replace(latent, **keys)
        return step_time(config, machine()).parts.attention

    assert blocks.attention_kernel(latent) == "cudnn"
    flash = seconds(backend=Backend(attention="flash"))
    assert flash / seconds() == pytest.approx(192 / 160 * 0.58 / 0.35, rel=0.01)
    for other in ({"v_head_dim": 192}, {"head_dim": 256}):
        config = replace(latent, model=replace(latent.model, **other))
        assert blocks.attention_kernel(config) == "flash"
    ring = replace(latent, parallel=replace(latent.parallel, cp=2))
    assert blocks.attention_kernel(ring) == "flash"


def test_cudnn_is_faster_where_pytorch_prefers_it():
    def seconds(device: str, attention: str) -> float:
        config = job(device=device, backend=Backend(attention=attention))
        return step_time(config, hardware_of(config)).parts.attention

    for device in ("h100-sxm", "h200", "b200", "gb200"):
        assert seconds(device, "auto") == seconds(device, "cudnn") < 0.8 * seconds(device, "flash")
    for device in ("a100-80", "mi300x"):
        assert seconds(device, "auto") == seconds(device, "flash")
    assert seconds("h200", "flash") / seconds("h200", "auto") == pytest.approx(
        0.58 / 0.35, rel=0.01
    )


def test_frozen_weights_take_a_third_less_arithmetic_and_no_update():
    config = job("llama-8b", dp=8, seq_len=4096, zero=Zero(stage=3), backend=COMPILED)
    adapted = replace(config, lora=Lora(rank=16))
    hardware = hardware_of(config)
    whole, frozen = step_time(config, hardware), step_time(adapted, hardware)
    assert 2 / 3 < frozen.parts.matmul / whole.parts.matmul < 0.8
    assert frozen.parts.optimizer < 0.02 * whole.parts.optimizer
    assert frozen.parts.dp < whole.parts.dp
    flops = frozen.tokens_per_s_per_gpu * trained_flops_per_token(adapted)
    assert frozen.mfu == pytest.approx(flops / hardware.peak(config.precision))


def test_attention_within_documents_and_windows_computes_what_is_seen():
    hardware, config = machine(), job("llama-8b", seq_len=8192, precision=BF16)
    short = replace(config.data, document_mask=True, document_length=1024)

    def attention(changed: ResolvedConfig) -> float:
        return blocks.block(hardware, blocks.micro_batch_shape(changed)).forward.attention

    windows = replace(config, model=replace(config.model, sliding_window=1024))
    whole = replace(config, data=replace(short, document_length=None))
    flash = replace(whole.backend, attention="flash")
    assert attention(whole) == pytest.approx(attention(replace(config, backend=flash)))
    assert (
        4 < attention(whole) / attention(replace(config, data=short)) < 8
    )  # tiles of the diagonal are whole
    assert 2.5 < attention(whole) / attention(windows) < 4.3
    # Each rank of a ring has an equal share, and sends a window's tokens of each of its halves, not 7 hops.
    ring = replace(windows, parallel=replace(windows.parallel, dp=1, cp=8))
    assert attention(windows) / attention(ring) == pytest.approx(8, rel=0.2)
    slow = changed(hardware, intra_bandwidth=1e8, intra_latency=0.0)
    sent = [
        blocks.block(slow, replace(blocks.micro_batch_shape(ring), windowed=share)).forward.cp
        for share in (0.0, 0.5, 1.0)
    ]
    assert sent[0] / sent[2] == pytest.approx(7 / 2, rel=0.01) and sent[0] > sent[1] > sent[2]
    narrow = replace(ring, model=replace(ring.model, sliding_window=128))
    shape = blocks.micro_batch_shape(narrow)
    assert sent[2] / blocks.block(slow, shape).forward.cp == pytest.approx(8, rel=0.01)

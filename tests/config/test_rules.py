"""The rules across keys: each refuses, and its suggestions are accepted."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from dataclasses import replace
from itertools import combinations, islice, product
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import pytest

from nanoscale.common.errors import UserError, Violation
from nanoscale.config.composing.compose import Setting, compose
from nanoscale.config.reference import alternatives, declared
from nanoscale.config.resolved import ResolvedConfig
from nanoscale.config.rules import JOB, RULES, Devices, check, only_with
from nanoscale.config.rules.rule import Rule
from nanoscale.config.violations import override
from tests.config.test_mixture import write_tokens
from tests.support.recipes import changed

CPU = Devices("cpu", 2)
WIDE = ("model.hidden=256", "model.heads=4", "model.kv_heads=4", "model.head_dim=64", "model.ffn=512",
        "train.seq_len=256")  # fmt: skip
"""Sizes that fill tiles of 128, also with tp=2."""
V100 = "Tesla V100-SXM2-32GB"


@pytest.fixture(autouse=True)
def _torchao(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pretend that every extra is installed."""
    monkeypatch.setattr("nanoscale.common.versions.find_spec", lambda name: name)


def gpus(count: int) -> Devices:
    return Devices("cuda", count, ("NVIDIA H100",) * count)


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def checked(*words: str, on: Devices = CPU) -> ResolvedConfig:
    return check(changed(*words), on)


@pytest.mark.parametrize(
    "words",
    [
        ["scheduler=wsd", "zero=stage3", "train.seed=7"],
        ["model.rope_scaling.factor=2"],
        ["~run"],
        ["launcher=ssh", "launcher.slurm.time=x", "launcher.env.A=1", "cluster.python=/x"],
    ],
)
def test_the_short_cut_of_these_tests_leads_to_the_same_place(words):
    options = {"launcher.nodes": Setting(2, "an option")}
    quick = changed(*words, options=options)
    slow = compose(["recipe=debug", *words], options=options)
    assert quick.config == slow.config
    for key in ("launcher.name", "launcher.nodes", "zero.stage", "scheduler.name"):
        assert quick.asked_for(key) == slow.asked_for(key), key


def violations(*words: str, on: Devices = CPU, kind: str | None = None) -> list[Violation]:
    with pytest.raises(UserError) as caught:
        checked(*words, on=on)
    assert kind is None or caught.value.kind == kind
    return caught.value.violations


DISTILL = ["train.objective=distill", "train.teacher=/models/teacher"]
BASE, DS = "model.init_from=/models/base", "backend=deepspeed"
LAWS = [
    # words, where, the key that is named
    (["parallel.dp=3"], CPU, "train.global_batch"),
    (["profile.steps=10-999999"], CPU, "profile.steps"),
    (["profile.steps=3:5"], CPU, "profile.steps"),
    (["profile.steps=2", "profile.ranks=[0,1]"], CPU, "profile.ranks"),
    (["profile.ranks=[1]", "parallel.dp=2"], CPU, "profile.ranks"),
    (["train.phases={a: {until: 5, seq_len: 7}, b: {}}"], CPU, "train.phases.a.seq_len"),
    (["train.phases={a: {until: 5, global_batch: 3}, b: {}}"], CPU, "train.phases.a.global_batch"),
    (["train.phases={a: {until: 5, weights: {x: 1}}, b: {}}"], CPU, "train.phases.a.weights"),
    (["train.phases={a: {until: 5}, b: {until: 5}, c: {}}"], CPU, "train.phases.b.until"),
    (["train.phases={a: {until_tokens: 90000}, b: {until: 9}, c: {}}"], CPU, "train.phases.b.until"),
    (["train.phases={a: {until: 5}, b: {until: 9}}"], CPU, "train.phases.b"),
    (["train.phases={a: {global_batch: 16}, b: {}}"], CPU, "train.phases.a"),
    (["train.phases={a: {lr: 1.0}}"], CPU, "train.phases.a.lr"),
    (["scheduler.name=piecewise"], CPU, "scheduler.name"),
    (["train.objective=dpo"], CPU, "train.objective"),
    (["train.objective=distill"], CPU, "train.teacher"),
    ([*DISTILL, "train.distill_top_k=999"], CPU, "train.distill_top_k"),
    ([*DISTILL, "train.z_loss=0.1"], CPU, "train.z_loss"),
    ([*DISTILL, "train.on_spike=rollback"], CPU, "train.on_spike"),
    ([*DISTILL, "data=random", "train.sample_tokens=0"], CPU, "train.objective"),
    (["train.objective=masked"], CPU, "train.objective"),
    (["train.objective=classify", "train.labels=2"], CPU, "train.objective"),
    (["launcher.notify=NOBODY_HAS_SET_IT"], CPU, "launcher.notify"),
    (["launcher.notice=leave"], CPU, "launcher.notice"),
    ([DS, "train.statistics_every=2"], CPU, "train.statistics_every"),
    ([DS, "train.phases={a: {global_batch: 16}}"], CPU, "train.phases.a.global_batch"),
    (["model.attention_softcap=30", "backend.attention=flash"], CPU, "backend.attention"),
    (["model.qk_norm=true", "model.qk_norm_whole=true", "model.norm=layernorm"], CPU, "model.norm"),
    (["model.rope_fraction=0.4"], CPU, "model.rope_fraction"),
    (["model.rope_scaling.kind=longrope", "model.rope_scaling.short_factor=[1,1,1,1]"], CPU,
     "model.rope_scaling.long_factor"),
    (["parallel.dp=2", "train.micro_batch=3"], CPU, "train.global_batch"),
    (["parallel.dp=4", "launcher.devices=2"], CPU, "parallel.dp"),
    (["parallel.dp=2", "launcher.devices=4"], CPU, "parallel.dp"),
    (["parallel.dp=8"], gpus(4), "parallel.dp"),
    (["launcher.devices=8"], gpus(4), "launcher.devices"),
    (["launcher.device=cuda"], CPU, "launcher.device"),
    (["parallel.cp=8"], gpus(4), "parallel.cp"),
    (["parallel.tp=4", "parallel.cp=4", "launcher.devices=8"], gpus(8), "parallel.tp"),
    (["parallel.pp=8", "parallel.schedule=gpipe"], gpus(4), "parallel.pp"),
    (["parallel.tp=3"], CPU, "parallel.tp"),
    (["parallel.tp=2", "model.vocab=257"], CPU, "model.vocab"),
    (["parallel.tp=4", "model.position=learned", "model.max_seq_len=66"], CPU, "model.max_seq_len"),
    (["parallel.tp=2", "parallel.tp_overlap=true", "backend.compile=off"], CPU, "parallel.tp_overlap"),
    (["parallel.cp=2", "train.seq_len=62"], CPU, "train.seq_len"),
    (["parallel.cp=2", "parallel.cp_method=ulysses", "train.seq_len=63"], CPU, "train.seq_len"),
    (["parallel.tp=4", "train.seq_len=62"], CPU, "train.seq_len"),
    (["parallel.tp=4", "parallel.cp=2", "train.seq_len=60"], CPU, "train.seq_len"),
    (["parallel.cp=32", "train.seq_len=62", "model.max_seq_len=62"], CPU, "train.seq_len"),
    (["parallel.cp=8", "parallel.cp_method=ulysses"], CPU, "parallel.cp"),
    (["parallel.cp=4", "parallel.tp=4", "parallel.cp_method=ulysses"], CPU, "parallel.cp"),
    (["parallel.virtual_stages=2"], CPU, "parallel.virtual_stages"),
    (["parallel.pp=2", "parallel.virtual_stages=2"], CPU, "parallel.virtual_stages"),
    (["parallel=interleaved", "parallel.schedule=zbv", "parallel.virtual_stages=3"], CPU,
     "parallel.virtual_stages"),
    (["parallel.pp=16", "train.global_batch=16"], CPU, "parallel.pp"),
    (["parallel.pp=2", "parallel.schedule=looped-bfs", "parallel.virtual_stages=5"], CPU, "parallel.pp"),
    (["parallel.pp=8", "parallel.schedule=zbv"], CPU, "parallel.pp"),
    (["parallel.pp=2", "parallel.layers_per_stage=[3,3,2]"], CPU, "parallel.layers_per_stage"),
    (["parallel=interleaved", "parallel.layers_per_stage=[2,2,2,1]"], CPU, "parallel.layers_per_stage"),
    (["parallel=interleaved", "parallel.layers_per_stage=[4,0,2,2]"], CPU, "parallel.layers_per_stage"),
    (["parallel=interleaved", "model.layers=3", "parallel.layers_per_stage=[0,1,2]"], CPU,
     "parallel.layers_per_stage"),
    (["parallel.pp=2", "parallel.schedule=zbv", "model.tie_embeddings=true"], CPU, "parallel.schedule"),
    (["parallel.pp=2", "backend=deepspeed", "model.tie_embeddings=true"], CPU, "model.tie_embeddings"),
    (["parallel.pp=4", "train.micro_batch=4"], CPU, "train.micro_batch"),
    (["parallel.pp=4", "parallel.dp=4"], CPU, "train.global_batch"),
    (["parallel.pp=4", "parallel.schedule=dualpipev", "train.global_batch=6"], CPU,
     "train.global_batch"),
    (["parallel=interleaved", "train.micro_batch=1", "train.global_batch=7"], CPU,
     "train.micro_batch"),
    (["parallel.pp=4", "parallel.schedule=zero-bubble", "train.micro_batch=2",
      "train.global_batch=18"], CPU, "train.micro_batch"),
    (["parallel.pp=2", "parallel.schedule=dualpipev", "train.micro_batch=4"], CPU,
     "train.micro_batch"),
    (["model.experts=8", "model.balance_rate=0.1"], CPU, "model.balance_rate"),
    (["model.experts=8", "model.experts_per_token=9"], CPU, "model.experts_per_token"),
    (["model.experts=8", "model.mlp=gelu"], CPU, "model.mlp"),
    (["model.experts=8", "model.expert_groups=3"], CPU, "model.expert_groups"),
    (["model.experts=8", "model.dense_layers=9"], CPU, "model.dense_layers"),
    (["model.kv_rank=8", "model.kv_heads=null"], CPU, "model.head_dim"),
    (["model.kv_rank=8", "model.kv_heads=null", "model.rope_head_dim=4", "model.v_head_dim=9"], CPU,
     "model.head_dim"),
    (["model.kv_rank=8", "model.kv_heads=4", "model.rope_head_dim=4"], CPU, "model.kv_heads"),
    (["model.kv_rank=8", "model.kv_heads=null", "model.rope_head_dim=4", "model.attention_sinks=true"], CPU,
        "model.attention_sinks"),
    (["model.kv_rank=8", "model.kv_heads=null", "model.rope_head_dim=4", "model.qk_norm=true"], CPU,
     "model.qk_norm"),
    (["model.experts=8", "parallel.ep=2"], CPU, "parallel.ep"),
    (["model.experts=8", "parallel.dp=4", "parallel.ep=3"], CPU, "parallel.ep"),
    (["model.experts=6", "parallel.dp=4", "parallel.ep=4"], CPU, "parallel.ep"),
    (["model.experts=8", "parallel.tp=4", "parallel.ep=2", "parallel.ep_over_tp=true"], CPU, "parallel.ep"),
    (["model.experts=8", "parallel.tp=2", "parallel.ep_over_tp=true"], CPU, "parallel.ep_over_tp"),
    (["model.experts=8", "parallel.dp=4", "parallel.dp_replicate=2", "zero=stage3", "parallel.ep=4"],
     CPU, "parallel.ep"),
    (["lora.rank=4"], CPU, "lora.rank"),
    (["lora.alpha=4"], CPU, "lora.alpha"),
    ([BASE, "lora.rank=4", "lora.base=nf4", "parallel.tp=2"], CPU, "lora.base"),
    ([BASE, "lora.rank=4", "lora.base=nf4", "lora.dora=true"], CPU, "lora.base"),
    ([BASE, "lora.targets=[wq]"], CPU, "lora.targets"),
    ([BASE, "lora.rank=4", "lora.alpha=0"], CPU, "lora.alpha"),
    ([BASE, "lora.rank=4", "lora.targets=[]"], CPU, "lora.targets"),
    ([BASE, "lora.rank=4", "lora.targets=[q_proj,wkk,norm]"], CPU, "lora.targets"),
    ([BASE, "lora.rank=4", "lora.targets=[wq,wq]"], CPU, "lora.targets"),
    ([BASE, "lora.rank=4", "lora.targets=[wq,up]", "model.experts=8"], CPU, "lora.targets"),
    ([BASE, "lora.rank=4", "lora.targets=[gate]", "model.mlp=gelu"], CPU, "lora.targets"),
    ([BASE, "lora.rank=4", "precision=fp8"], gpus(1), "precision.fp8"),
    (["parallel.activation_checkpointing=full", "parallel.checkpoint_every=9"], CPU,
     "parallel.checkpoint_every"),
    (["parallel=interleaved", "parallel.schedule=zbv", "parallel.activation_checkpointing=selective",
      "parallel.selective_keep=attention"], CPU, "parallel.activation_checkpointing"),
    (["parallel=interleaved", "parallel.schedule=zero-bubble", "backend.compile=on"], CPU,
     "backend.compile"),
    (["parallel.offload_activations=true", "backend.compile=on"], CPU, "backend.compile"),
    (["precision.reduce=fp16"], CPU, "precision.reduce"),
    (["precision=fp16", "precision.reduce=bf16"], CPU, "precision.reduce"),
    (["precision.compute=fp16", "precision.params=fp64", "precision.reduce=fp64"], CPU,
     "precision.compute"),
    (["precision=fp8"], CPU, "precision.fp8"),
    (["precision=fp8"], Devices("cuda", 1, ("NVIDIA A100-SXM4-80GB",)), "precision.fp8"),
    (["precision=fp8", "launcher.device=cpu"], gpus(1), "precision.fp8"),
    (["precision.fp8=true", "precision.compute=fp32"], gpus(1), "precision.fp8"),
    (["data.document_length=64"], CPU, "data.document_length"),
    (["backend.attention=cudnn"], CPU, "backend.attention"),
    (["backend.attention=math", "parallel=cp"], CPU, "backend.attention"),
    (["backend.attention=flash", "precision=fp32"], gpus(1), "backend.attention"),
    (["backend.attention=cudnn", "model.head_dim=192"], gpus(1), "backend.attention"),
    (["backend.attention=flash", "model.head_dim=264"], gpus(1), "backend.attention"),
    (["backend.attention=cudnn", "precision=fp16"], Devices("cuda", 1, ("Tesla T4",)), "backend.attention"),
    (["backend.attention=cudnn", "data.document_mask=true"], gpus(1), "backend.attention"),
    (["backend.attention=cudnn", "data.packing=whole"], gpus(1), "backend.attention"),
    (["precision=fp8", "parallel.tp=2", "model.ffn=176"], gpus(2), "precision.fp8"),
    (["precision=fp8", "parallel.tp=2", "parallel.tp_overlap=true"], gpus(2), "parallel.tp_overlap"),
    (["precision=fp8", "model.ffn=100"], gpus(1), "precision.fp8"),
    (["precision=mxfp8", "model.ffn=144"], Devices("cuda", 1, ("NVIDIA B200",)), "precision.fp8"),
    (["precision=mxfp8", "model.experts=8", "model.ffn=64", "model.shared_ffn=48"],
     Devices("cuda", 1, ("NVIDIA B200",)), "precision.fp8"),
    (["precision=mxfp8"], gpus(1), "precision.fp8_recipe"),
    (["precision=nvfp4", *WIDE], gpus(1), "precision.fp8_recipe"),
    (["precision=nvfp4", *WIDE, "model.ffn=320"], Devices("cuda", 1, ("NVIDIA B200",)), "precision.fp8"),
    (["precision=nvfp4", *WIDE, "precision.deterministic=true"], Devices("cuda", 1, ("NVIDIA B200",)),
     "precision.deterministic"),
    (["precision=fp8", "precision.fp8_recipe=rowwise_with_gw_hp", "model.experts=8", "model.ffn=64"],
     gpus(1), "precision.fp8_recipe"),
    (["precision=fp8", "model.experts=8", "model.ffn=40"], gpus(1), "precision.fp8"),
    (["precision=mxfp8", "cluster=h200"], Devices("cuda", 1, ("NVIDIA B200",)), "precision.fp8_recipe"),
    (["optimizer=adamw8bit", "precision=fp64"], CPU, "optimizer.name"),
    (["optimizer=lion", "precision=bf16-pure"], CPU, "optimizer.name"),
    (["optimizer=schedule-free", "optimizer.ema_decay=0.9"], CPU, "optimizer.ema_decay"),
    (["optimizer.qk_clip=100", "model.qk_norm=true"], CPU, "optimizer.qk_clip"),
    (["optimizer.qk_clip=100", "parallel.cp=2"], CPU, "optimizer.qk_clip"),
    (["optimizer.ema_decay=1"], CPU, "optimizer.ema_decay"),
    (["optimizer=sgd", "optimizer.moments_dtype=bf16"], CPU, "optimizer.moments_dtype"),
    (["precision=fp64", "optimizer.moments_dtype=bf16"], CPU, "optimizer.moments_dtype"),
    (["precision=bf16-pure", "precision.compute=fp16"], CPU, "precision.params"),
    (["parallel.dp=4", "parallel.dp_replicate=3", "zero=stage3"], CPU, "parallel.dp_replicate"),
    (["parallel.dp=4", "parallel.dp_replicate=2"], CPU, "parallel.dp_replicate"),
    (["model.kv_heads=3"], CPU, "model.kv_heads"),
    (["model.heads=7", "model.kv_heads=null", "model.head_dim=null"], CPU, "model.heads"),
    (["model.head_dim=7"], CPU, "model.head_dim"),
    (["train.seq_len=1k"], CPU, "train.seq_len"),
    (["model.rope_scaling.high_freq_factor=1"], CPU, "model.rope_scaling.high_freq_factor"),
    (["model.position=learned", "model.rope_scaling.factor=2"], CPU, "model.position"),
    (["train.steps=null"], CPU, "train.steps"),
    (["train.tokens=1M", "train.steps=3"], CPU, "train.tokens"),
    (["scheduler.warmup_steps=21"], CPU, "scheduler.warmup_steps"),
    (["scheduler=wsd", "scheduler.decay_steps=21"], CPU, "scheduler.decay_steps"),
    (["scheduler.decay_steps=5"], CPU, "scheduler.decay_steps"),
    (["precision.params=fp64"], CPU, "precision.compute"),
    (["precision.compute=fp64"], CPU, "precision.compute"),
    (["precision=fp64", "precision.reduce=fp32"], CPU, "precision.reduce"),
    (["precision.reduce=fp64"], CPU, "precision.reduce"),
    (["optimizer.beta1=1"], CPU, "optimizer.beta1"),
    (["train.eval_every=5", "data.valid_fraction=0"], CPU, "train.eval_every"),
    (["cluster.peak_tflops=0"], CPU, "cluster.peak_tflops"),
    (["cluster.peaks.bf16=0"], CPU, "cluster.peaks.bf16"),
    (["data.path=corpus"], CPU, "data.path"),
    (["data.tokenizer=bite"], CPU, "data.tokenizer"),
    (["model.vocab=256"], CPU, "model.vocab"),
    (["data=stdlib-bpe"], CPU, "data.bpe_vocab"),
    (["data=random", "data.loss_on=answers"], CPU, "data.loss_on"),
    (["data=random", "data.path=corpus"], CPU, "data.path"),
    (["data=random", "train.sample_tokens=5"], CPU, "train.sample_tokens"),
    (["checkpoint.keep_every=5"], CPU, "checkpoint.keep_every"),
    (["checkpoint.keep_best=2", "train.eval_every=0"], CPU, "checkpoint.keep_best"),
    (["checkpoint.best_metric=eval_accuracy"], CPU, "checkpoint.best_metric"),
    (["train.stop_when.patience=2", "train.eval_every=0"], CPU, "train.stop_when.patience"),
    (["train.stop_when.eval_loss=2", "train.eval_every=0"], CPU, "train.stop_when.eval_loss"),
    (["checkpoint.every=3", "checkpoint.keep_every=5"], CPU, "checkpoint.keep_every"),
    (["run.name=a/b"], CPU, "run.name"),
    (["run.name=.a"], CPU, "run.name"),
    (["run.name='" + "é" * 101 + "'"], CPU, "run.name"),
    (["run.name='" + "a" * 199 + " b'"], CPU, "run.name"),
    (["run.name=' .a'"], CPU, "run.name"),
    (["run.root=''"], CPU, "run.root"),
    (["precision.tf32=true"], CPU, "precision.tf32"),
    (["precision.tf32=true", "precision=fp32"], CPU, "precision.tf32"),
    (["precision.tf32=true"], gpus(1), "precision.tf32"),
    (["precision.tf32=true", "precision=fp64"], gpus(1), "precision.tf32"),
    (["precision.deterministic=true", "backend.attention=cudnn"], gpus(1), "backend.attention"),
    # of one backend
    (["zero.offload_optimizer=cpu"], CPU, "zero.offload_optimizer"),
    (["zero=stage3", "zero.offload_param=cpu"], CPU, "zero.offload_param"),
    (["zero=stage3-offload", "zero.stage=2"], CPU, "zero.offload_param"),
    (["zero=stage3-offload", "zero.offload_param=nvme"], CPU, "zero.offload_param"),
    (["zero=stage3-offload", "zero.offload_optimizer=nvme"], CPU, "zero.offload_optimizer"),
    (["zero=stage3-offload", "optimizer=muon"], CPU, "zero.offload_param"),
    ([BASE, "zero=stage3-offload", "lora.rank=4", "lora.base=nf4"], CPU, "zero.offload_param"),
    (["zero.hpz=2"], CPU, "zero.hpz"),
    (["backend.reduce_bucket=5M"], CPU, "backend.reduce_bucket"),
    (["backend.overlap_comm=off"], CPU, "backend.overlap_comm"),
    (["backend.extra.steps_per_print=5"], CPU, "backend.extra"),
    ([DS, "precision=bf16", "precision.reduce=bf16"], CPU, "precision.reduce"),
    ([DS, "precision=fp8", "zero=stage1"], gpus(1), "precision.fp8"),
    ([DS, "optimizer=adamw8bit"], CPU, "optimizer.name"),
    ([DS, "optimizer.moments_dtype=bf16"], CPU, "optimizer.moments_dtype"),
    ([DS, "optimizer.ema_decay=0.9"], CPU, "optimizer.ema_decay"),
    ([DS, "precision=bf16-pure"], CPU, "precision.params"),
    ([DS, "parallel.dp=4", "parallel.dp_replicate=2", "zero=stage3"], CPU, "parallel.dp_replicate"),
    ([DS, "parallel.tp=2"], CPU, "parallel.sequence_parallel"),
    ([DS, "parallel.tp=2", "parallel.sequence_parallel=false", "model.attention_sinks=true"], CPU,
     "model.attention_sinks"),
    ([DS, "parallel.tp=2", "parallel.sequence_parallel=false", "model.qk_norm=true"], CPU,
     "model.qk_norm"),
    ([DS, "parallel.pp=2", "parallel.schedule=gpipe"], CPU, "parallel.schedule"),
    ([DS, "parallel.pp=2", "parallel.schedule=zbv"], CPU, "parallel.schedule"),
    ([DS, "parallel.pp=2", "zero=stage2"], CPU, "zero.stage"),
    ([DS, "parallel.pp=2", "precision=bf16"], CPU, "precision.compute"),
    ([DS, "backend.compile=on", "zero=stage3"], CPU, "backend.compile"),
    ([DS, "zero.offload_optimizer=cpu"], CPU, "zero.offload_optimizer"),
    ([DS, "zero=stage2", "zero.offload_param=cpu"], CPU, "zero.offload_param"),
    ([DS, "backend.overlap_comm=on"], CPU, "backend.overlap_comm"),
    ([DS, "backend.reduce_bucket=5M"], CPU, "backend.reduce_bucket"),
    ([DS, "zero=stage3", "backend.allgather_bucket=5M"], CPU, "backend.allgather_bucket"),
    ([DS, "zero=stage2", "backend.prefetch_bucket=5M"], CPU, "backend.prefetch_bucket"),
    ([DS, "zero=stage2", "zero.hpz=2", "parallel.dp=2"], CPU, "zero.hpz"),
    ([DS, "zero=stage3", "zero.hpz=3", "parallel.dp=4"], CPU, "zero.hpz"),
    ([DS, "zero=stage2", "zero.quantized_weights=true"], gpus(1), "zero.quantized_weights"),
    ([DS, "zero=stage3", "zero.quantized_weights=true"], CPU, "zero.quantized_weights"),
    ([DS, "zero=stage3", "zero.quantized_gradients=true"], CPU, "zero.quantized_gradients"),
    ([DS, "model.experts=8", "parallel.dp=2", "parallel.ep=2"], CPU, "parallel.ep"),
    ([DS, "model.experts=8", "model.balance=aux"], CPU, "model.balance"),
    ([DS, "model.experts=8", "parallel.tp=2", "parallel.sequence_parallel=false"], CPU,
     "model.experts"),
    ([DS, BASE, "lora.rank=4", "parallel.tp=2", "parallel.sequence_parallel=false"], CPU, "lora.rank"),
    ([DS, BASE, "lora.rank=4", "lora.dora=true"], CPU, "lora.dora"),
    ([DS, BASE, "lora.rank=4", "lora.base=nf4"], CPU, "lora.base"),
    ([DS, "optimizer.qk_clip=100"], CPU, "optimizer.qk_clip"),
    ([DS, "zero=stage3", "zero.prefetch=2"], CPU, "zero.prefetch"),
    ([DS, BASE, "lora.rank=4", "zero=stage3", "zero.offload_param=nvme",
      "zero.offload_optimizer=nvme", "zero.nvme_path=."], CPU, "zero.offload_param"),
    ([DS, "zero.nvme_path=."], CPU, "zero.nvme_path"),
    ([DS, "zero=stage2", "zero.offload_optimizer=nvme", "zero.nvme_path=."], CPU,
     "zero.offload_optimizer"),
]  # fmt: skip


OTHER_LAWS = {"recipe=tiny", "data=megatron", "backend=native", "backend=deepspeed"}
"""Suggestions that bring laws of their own."""


@pytest.mark.parametrize(
    ("words", "on", "key"), LAWS, ids=[" ".join(words)[:80] for words, _, _ in LAWS]
)
def test_a_law_names_what_breaks_it_and_suggests_what_keeps_it(words, on, key):
    (violation,) = violations(*words, on=on)
    assert violation.key == key
    set_here = any(word.startswith(f"{key}=") for word in words)
    assert violation.source == "command line" or not set_here
    assert violation.message
    assert violation.suggestions
    for suggestion in violation.suggestions:
        if suggestion not in OTHER_LAWS and "/path/to" not in suggestion:
            checked(*words, *shlex.split(suggestion), on=on)


EVERY = (*RULES, *only_with.OF_TEXT, *JOB)
"""The rules of the tables."""
DRAWN: dict[object, tuple[Any, ...]] = {
    bool: (True, False), int: (0, 1, 2, 3, 8), float: (0.5, 2.0), str: ("x",), type(None): (None,),
    list[int]: ([1],), list[str]: (["x"],), list[float]: ([1.0],),
}  # fmt: skip
"""Values to draw for a key, by its type; a closed choice has all of its values."""
MOST_DRAWS = 30


def drawn(key: str) -> Iterator[str]:
    """Yield overrides that set a key to values within its bounds, other than its default."""
    about = declared()[key]
    low, high = about.at_least or 0.0, about.at_most or 10.0
    for kind in alternatives(about.annotation):
        for value in get_args(kind) if get_origin(kind) is Literal else DRAWN.get(kind, ()):
            is_number = isinstance(value, (int, float))
            if value != about.default and not (is_number and not low <= value <= high):
                yield shlex.split(override(key, value))[0]


def draws(rule: Rule) -> Iterator[tuple[str, ...]]:
    """Yield overrides of one and then of two of the keys that a rule reads."""
    keys = [key for key in dict.fromkeys((rule.key, *rule.reads)) if key in declared()]
    for count in (1, 2):
        for chosen in combinations(keys, count):
            yield from product(*map(drawn, chosen))


def broken(rule: Rule) -> tuple[tuple[str, ...], Violation] | None:
    """Return drawn overrides that the rule refuses, and its violation; None if two keys do not suffice."""
    for words in islice(draws(rule), MOST_DRAWS):
        try:
            if not rule.holds(changed(*words).config):
                checked(*words)
        except UserError as error:
            for each in error.violations:
                if each.key == rule.key:
                    return words, each
        except (KeyError, TypeError):  # a model without config.json, or a key that is still open
            continue
    return None


def instead(words: tuple[str, ...], advice: str) -> list[str]:
    """Return the words with advice; an option of a group replaces the keys of its section."""
    typed = shlex.split(advice)
    names = tuple(
        f"{word.partition('=')[0]}." for word in typed if "." not in word.partition("=")[0]
    )
    return [*(word for word in words if not word.startswith(names)), *typed]


def test_each_rule_refuses_a_drawn_value_and_its_advice_mends_that():
    """Rules that two drawn keys do not break have a row in LAWS."""
    reached = 0
    for rule in EVERY:
        if (found := broken(rule)) is None:
            continue
        words, wrong = found
        reached += 1
        assert wrong.suggestions, words
        for advice in wrong.suggestions:
            try:
                checked(*instead(words, advice))
            except UserError as error:
                left = {(each.key, each.message) for each in error.violations}
                assert (wrong.key, wrong.message) not in left, (words, advice)
    assert reached > 0.7 * len(EVERY)


WITHOUT_A_MEANING = """
train.preference_beta=0.2 train.desirable_weight=0.5 train.undesirable_weight=0.5
train.teacher=/models/teacher train.distill_top_k=3 train.distill_weight=0.1 train.distill_temperature=2
train.mask_share=0.2 train.mask_token=3 train.labels=2 model.bias=true model.qkv_bias=true
model.qk_norm_whole=true model.full_attention_every=2 model.balance=bias model.experts_per_token=1
parallel.ep=2 parallel.sequence_parallel=false parallel.cp_method=ulysses parallel.schedule=gpipe
parallel.layers_per_stage=[8] parallel.checkpoint_every=2 parallel.selective_keep=attention lora.rslora=true
lora.dora=true lora.base=nf4 precision.loss_scale=2 precision.loss_scale_window=2
precision.fp8_recipe=rowwise optimizer=sgd optimizer.beta2=0.9 data=random data.tokenizer=bpe
data.packing=whole data.document_mask=true
"""


def test_every_key_without_a_meaning_is_refused():
    """The test above draws for the rules of the tables, so it cannot show that a rule is missing there."""
    words = shlex.split(WITHOUT_A_MEANING)
    keys = {word.partition("=")[0] for word in words}
    refused = {each.key for each in violations(*words)}
    assert refused == keys - {"model.bias", "optimizer", "data"}


def test_the_first_and_the_last_stage_may_have_no_blocks():
    """Llama 3's pre-training had as many stages as blocks, and two more."""
    words = ("parallel=interleaved", "model.layers=2", "parallel.layers_per_stage=[0,1,1,0]")
    assert checked(*words, on=CPU).parallel.layers_per_stage == [0, 1, 1, 0]


BAD_LAYOUTS = [
    # several things are wrong at once, so that a suggestion need not make the whole legal
    (["parallel.tp=3", "parallel.pp=3", "parallel.cp=3", "parallel.dp=3"], CPU),
    (["parallel.tp=16", "parallel.cp=16", "parallel.cp_method=ulysses", "train.seq_len=100"], CPU),
    (["parallel.tp=8", "parallel.pp=16", "parallel.virtual_stages=3"], gpus(8)),
    (["parallel.pp=3", "parallel.schedule=dualpipev", "train.micro_batch=2", "backend.compile=on",
      "parallel.activation_checkpointing=full", "model.tie_embeddings=true",
      "parallel.layers_per_stage=[1,2,3]"], CPU),
    (["parallel.pp=5", "parallel.schedule=interleaved-1f1b", "train.micro_batch=1",
      "train.global_batch=21", "parallel.layers_per_stage=[4,4]"], CPU),
    (["parallel.schedule=zbv", "parallel.virtual_stages=4", "parallel.cp_method=ulysses",
      "parallel.layers_per_stage=[9]", "parallel.sequence_parallel=false",
      "parallel.checkpoint_every=3", "parallel.selective_keep=attention",
      "precision.loss_scale=8"], CPU),
    (["parallel.dp=4", "parallel.tp=4", "parallel.pp=4", "launcher.devices=8"], gpus(8)),
    (["parallel.tp=6", "parallel.cp=4", "launcher.devices=8"], gpus(8)),
    (["model.heads=12", "model.kv_heads=6", "model.head_dim=8", "parallel.tp=4", "parallel.cp=4",
      "parallel.cp_method=ulysses", "train.seq_len=33", "model.position=learned",
      "model.max_seq_len=66", "model.vocab=50257"], CPU),
    (["precision=fp8", "precision.compute=fp32", "parallel.tp=2", "optimizer=adamw8bit",
      "optimizer.momentum=0.3", "precision.reduce=fp16", "parallel.offload_activations=true",
      "backend.compile=on"], CPU),
    (["parallel.pp=2", "parallel.schedule=zero-bubble", "parallel.virtual_stages=7",
      "train.global_batch=9", "parallel.dp=2"], gpus(2)),
]  # fmt: skip


@pytest.mark.parametrize(("words", "on"), BAD_LAYOUTS, ids=range(len(BAD_LAYOUTS)))
def test_every_suggestion_mends_what_it_is_for(words, on):
    found = violations(*words, on=on)
    assert len(found) > 1
    for each in found:
        assert each.suggestions, each
        for suggestion in each.suggestions:
            try:
                checked(*words, *shlex.split(suggestion), on=on)
            except UserError as error:
                left = {(other.key, other.message) for other in error.violations}
                assert (each.key, each.message) not in left, suggestion


def test_all_violations_come_at_once():
    found = violations(
        "model.kv_heads=3", "train.seq_len=1k", "parallel.dp=3", "parallel.tp=2", "run.name=a/b",
        "precision.compute=fp64", "data=megatron", "scheduler.warmup_steps=30", kind="config",
    )  # fmt: skip
    assert [each.key for each in found] == [
        "model.kv_heads", "train.seq_len", "parallel.tp", "train.global_batch",
        "data.path", "scheduler.warmup_steps", "precision.compute", "run.name",
    ]  # fmt: skip


def test_three_way_tensor_parallelism_on_two_devices():
    count, shape = violations("parallel.tp=3", "launcher.devices=2", kind="layout")
    assert count.key == shape.key == "parallel.tp"
    assert "launcher.devices = 2" in count.message
    assert count.suggestions == ("parallel.tp=1", "launcher.devices=3")
    assert "model.heads=8, model.kv_heads=4 and model.ffn=128" in shape.message
    assert shape.suggestions == ("parallel.tp=2", "parallel.tp=4")


def test_missing_data_is_named(tmp_path):
    (missing,) = violations("data=megatron", kind="data")
    assert missing.key == "data.path"
    (missing,) = violations("data=megatron", "data.path=corpus", kind="data")
    assert "corpus.bin" in missing.message and "corpus.idx" in missing.message
    Path("corpus.bin").touch()
    (missing,) = violations("data=megatron", "data.path=corpus", kind="data")
    assert "corpus.bin" not in missing.message and "corpus.idx" in missing.message
    write_tokens(Path("corpus"))
    assert checked("data=megatron", "data.path=corpus").data.path == str(tmp_path / "corpus")
    (ending,) = violations("data=megatron", "data.path=corpus.bin", kind="data")
    assert ending.suggestions == ("data.path=corpus",)


def test_the_length_on_the_command_line_wins_over_the_recipes():
    recipe = compose(["recipe=gpt2", "train.steps=10", "scheduler.warmup_steps=1"])
    assert (recipe.config.train.tokens, recipe.config.train.steps) == (300_000_000_000, 10)
    resolved = check(recipe, CPU)
    assert (resolved.train.tokens, resolved.train.steps) == (None, 10)
    assert checked("train.tokens=1025").train.steps == 3  # 8 samples of 64 tokens, rounded up


def test_tokens_and_steps_that_say_the_same_are_fine():
    assert checked("train.tokens=1024", "train.steps=2").train.tokens == 1024


# --- open keys ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "on", "dp", "devices"),
    [
        ([], CPU, 1, 1),
        (["parallel.dp=4"], CPU, 4, 4),
        (["launcher.devices=4"], CPU, 4, 4),
        (["parallel=hsdp", "zero=stage3"], CPU, 2, 2),
        ([], gpus(4), 4, 4),
        (["parallel.dp=2"], gpus(4), 2, 2),
        (["launcher.devices=2"], gpus(4), 2, 2),
        (["launcher.device=cpu"], gpus(4), 1, 1),
        (["parallel.dp=8", "launcher.device=cpu"], gpus(4), 8, 8),
    ],
)
def test_degrees_and_devices(words, on, dp, devices):
    config = checked(*words, on=replace(on, cores=16))
    assert (config.parallel.dp, config.launcher.devices) == (dp, devices)
    assert config.launcher.threads == 16 // devices
    assert config.world_size == devices


def test_the_batch():
    config = checked("parallel.dp=2", "train.global_batch=24")
    assert (config.train.micro_batch, config.accumulation) == (12, 1)
    config = checked("parallel.dp=2", "train.global_batch=24", "train.micro_batch=3")
    assert (config.train.micro_batch, config.accumulation) == (3, 4)
    assert config.tokens_per_step == 24 * 64


@pytest.mark.parametrize(
    ("words", "micro", "accumulation"),
    [
        (["parallel.pp=4"], 2, 4),
        (["parallel.pp=4", "parallel.schedule=gpipe"], 2, 4),
        (["parallel.pp=4", "parallel.schedule=gpipe", "parallel.dp=4"], 1, 2),  # not enough to be busy
        (["parallel=interleaved"], 4, 2),
        (["parallel=interleaved", "train.global_batch=9"], 3, 3),
        (["parallel=interleaved", "train.global_batch=7"], 7, 1),  # 7 micro batches make uneven rounds
        (["parallel=interleaved", "parallel.schedule=dualpipev"], 2, 4),
        (["parallel=interleaved", "parallel.schedule=zbv", "parallel.pp=3", "train.global_batch=9"], 1, 9),
        (["parallel.tp=2", "parallel.cp=2"], 8, 1),
    ],
)  # fmt: skip
def test_a_pipeline_is_kept_busy(words, micro, accumulation):
    config = checked(*words)
    assert (config.train.micro_batch, config.accumulation) == (micro, accumulation)


@pytest.mark.parametrize(
    ("words", "virtual"),
    [
        ([], 1),
        (["parallel.virtual_stages=1"], 1),
        (["parallel=pp"], 1),
        (["parallel=pp", "parallel.schedule=gpipe", "parallel.virtual_stages=1"], 1),
        (["parallel=interleaved"], 2),
        (["parallel=interleaved", "parallel.virtual_stages=4"], 4),
        (["parallel=interleaved", "parallel.virtual_stages=1"], 1),
        (["parallel=pp", "parallel.schedule=looped-bfs"], 2),
        (["parallel=pp", "parallel.schedule=zbv", "parallel.virtual_stages=2"], 2),
    ],
)
def test_virtual_stages(words, virtual):
    assert checked(*words).parallel.virtual_stages == virtual


def test_every_axis_makes_ranks():
    config = checked("parallel=4d", on=replace(CPU, cores=32))
    assert (config.launcher.devices, config.launcher.threads) == (16, 2)
    assert config.world_size == 16
    config = checked("parallel.tp=2", "parallel.pp=2", on=gpus(8))
    assert (config.parallel.dp, config.launcher.devices) == (2, 8)
    assert checked("parallel.tp=4", "launcher.devices=8").parallel.dp == 2
    assert checked("parallel=3d", "parallel.dp_replicate=2", "zero=stage2").launcher.devices == 8


def test_auto_compiles_where_it_can():
    auto = "backend.compile=auto"
    split = ["parallel=interleaved", "parallel.schedule=zero-bubble"]
    assert checked(auto).backend.compile == "off"
    assert checked(auto, on=gpus(4)).backend.compile == "on"
    assert checked(auto, "parallel=interleaved", on=gpus(4)).backend.compile == "on"
    assert checked(auto, *split, on=gpus(4)).backend.compile == "off"
    assert checked(auto, "parallel.offload_activations=true", on=gpus(4)).backend.compile == "off"
    assert checked("backend.compile=on", "parallel.activation_checkpointing=full")
    assert checked("backend.compile=on").backend.compile == "on"


def test_the_kernel_of_attention_is_free_where_it_can_hold():
    for kernel in ("cudnn", "flash", "math"):
        for words in ([], ["parallel=ulysses"], ["parallel.tp=2"]):
            attention = f"backend.attention={kernel}"
            assert checked(attention, *words, on=gpus(4)).backend.attention == kernel
    for words in ([], ["data.document_mask=true"], ["precision=fp64"]):
        for kernel in ("flash", "math"):
            checked(f"backend.attention={kernel}", *words)


def test_reduction_in_the_width_of_the_products():
    for precision in ("bf16", "fp16"):
        for layout in ([], ["parallel.dp=2"], ["parallel=3d"], ["parallel=hsdp", "zero=stage2"]):
            words = [f"precision={precision}", f"precision.reduce={precision}", *layout]
            assert checked(*words).precision.reduce == precision
    assert checked("precision=fp16", "precision.loss_scale=1024").precision.loss_scale == 1024


def test_gpus_with_8_bit_products():
    for name in (
        "NVIDIA H100 80GB HBM3", "NVIDIA H200", "NVIDIA H200 MIG", "NVIDIA GH200 480GB", "NVIDIA B200",
        "NVIDIA L4", "NVIDIA L40S", "NVIDIA GeForce RTX 4090", "NVIDIA GeForce RTX 5070 Ti",
        "NVIDIA RTX 6000 Ada Generation", "AMD Instinct MI300X",
    ):  # fmt: skip
        assert checked("precision=fp8", on=Devices("cuda", 1, (name,))).precision.fp8
    for name in (
        "NVIDIA A100-SXM4-80GB",
        "NVIDIA A40",
        "NVIDIA GeForce RTX 3090",
        "Quadro RTX 4000",
        V100,
    ):
        (weak,) = violations("precision=fp8", on=Devices("cuda", 1, (name,)))
        assert name in weak.message


def test_gpus_with_mxfp8():
    for name in ("NVIDIA B200", "NVIDIA GB200", "NVIDIA B300 SXM6 AC", "NVIDIA GB300"):
        assert checked("precision=mxfp8", on=Devices("cuda", 1, (name,))).precision.fp8
    mixture = ("model.experts=8", "model.ffn=64", "model.shared_ffn=64")
    assert checked("precision=mxfp8", *mixture, on=Devices("cuda", 1, ("NVIDIA B200",)))
    described = ("cluster=b200", "cluster.device=ours")
    assert checked("precision=mxfp8", *described, on=gpus(1)).precision.fp8
    for name in ("NVIDIA H100 80GB HBM3", "NVIDIA GeForce RTX 5090", "AMD Instinct MI355X"):
        (weak,) = violations("precision=mxfp8", on=Devices("cuda", 1, (name,)))
        assert name in weak.message and weak.key == "precision.fp8_recipe"
        assert "precision.fp8_recipe=tensorwise" in weak.suggestions


MIXTURE = ["model.experts=8", "model.ffn=64"]


def test_gpus_with_experts_in_fp8():
    for name in ("NVIDIA H100 80GB HBM3", "NVIDIA H200", "NVIDIA GH200 480GB", "NVIDIA H20"):
        on = Devices("cuda", 1, (name,))
        for recipe in ("tensorwise", "rowwise"):
            words = "precision=fp8", f"precision.fp8_recipe={recipe}", *MIXTURE
            assert checked(*words, on=on).precision.fp8_recipe == recipe
    for name in ("NVIDIA B200", "NVIDIA L40S", "AMD Instinct MI300X"):
        on = Devices("cuda", 1, (name,))
        (weak,) = violations("precision=fp8", *MIXTURE, on=on)
        assert name in weak.message and weak.key == "precision.fp8_recipe"
        for advice in weak.suggestions:
            assert checked("precision=fp8", *MIXTURE, *shlex.split(advice), on=on)


def test_gpus_with_nvfp4():
    for name in ("NVIDIA B200", "NVIDIA GB200", "NVIDIA B300 SXM6 AC", "NVIDIA GB300"):
        on = Devices("cuda", 2, (name,) * 2)
        assert checked("precision=nvfp4", *WIDE, on=on).precision.fp8
        mixture = ("model.experts=8", "model.ffn=128")
        assert checked("precision=nvfp4", *WIDE, *mixture, on=on)
        (odd,) = violations("precision=nvfp4", *WIDE, "parallel.tp=2", "model.ffn=384", on=on)
        assert "tiles of 128" in odd.message and "model.ffn / 2 = 192" in odd.message
        for advice in odd.suggestions:
            words = ("precision=nvfp4", *WIDE, "parallel.tp=2", "model.ffn=384")
            assert checked(*words, *shlex.split(advice), on=on)
        (loose,) = violations("precision=nvfp4", *WIDE, "precision.deterministic=true", on=on)
        for advice in loose.suggestions:
            words = ("precision=nvfp4", *WIDE, "precision.deterministic=true")
            assert checked(*words, *shlex.split(advice), on=on)
    for name in ("NVIDIA H100 80GB HBM3", "NVIDIA GeForce RTX 5090", "AMD Instinct MI355X"):
        on = Devices("cuda", 1, (name,))
        (weak,) = violations("precision=nvfp4", *WIDE, on=on)
        assert name in weak.message and weak.key == "precision.fp8_recipe"
        for advice in weak.suggestions:
            recipe = checked("precision=nvfp4", *WIDE, *shlex.split(advice), on=on).precision
            assert recipe.fp8_recipe == "tensorwise"


IN_MXFP8 = ["precision.fp8=true", "precision.fp8_recipe=mxfp8"]


@pytest.mark.parametrize(
    ("words", "name"),
    [
        (["precision=mxfp8", *MIXTURE], "NVIDIA H100"),
        (IN_MXFP8, "NVIDIA H100"),
        ([*IN_MXFP8, *MIXTURE], "NVIDIA H100"),
        (["precision=mxfp8"], "NVIDIA A100-SXM4-80GB"),
    ],
)
def test_advice_on_mxfp8_is_accepted(words: list[str], name: str) -> None:
    on = Devices("cuda", 1, (name,))
    (weak,) = violations(*words, on=on)
    for advice in weak.suggestions:
        assert checked(*words, *shlex.split(advice), on=on).precision.fp8_recipe == "tensorwise"


@pytest.mark.parametrize("old", ["0.9.0", "0.17.0"])
def test_mxfp8_needs_a_new_torchao(monkeypatch, old):
    b200 = Devices("cuda", 1, ("NVIDIA B200",))
    monkeypatch.setattr("nanoscale.config.rules.numbers.version", lambda _: old)
    (violation,) = violations("precision=mxfp8", on=b200)
    assert "0.18" in violation.message
    (violation,) = violations("precision=fp8", *MIXTURE, on=gpus(1))
    assert "0.18" in violation.message
    assert checked("precision=fp8", on=gpus(1)).precision.fp8
    monkeypatch.setattr("nanoscale.config.rules.numbers.version", lambda _: "0.18.0+cu130")
    assert checked("precision=mxfp8", on=b200).precision.fp8


@pytest.mark.parametrize(
    ("word", "package", "suggestions"),
    [
        ("precision=fp8", "torchao>=0.15", ("precision.fp8=false",)),
        ("optimizer=adamw8bit", "torchao>=0.15", ("optimizer.name=adamw",)),
        ("logger.tensorboard=on", "tensorboard>=2.18", ("logger=none",)),
        ("logger=tensorboard", "tensorboard>=2.18", ("logger=none",)),
        ("backend=deepspeed", "deepspeed>=0.19", ("backend=native",)),
    ],
)
def test_a_package_is_asked_for_where_it_is_not_installed(word, package, suggestions, monkeypatch):
    monkeypatch.setattr("nanoscale.common.versions.find_spec", lambda _: None)
    (missing,) = violations(word, on=gpus(1))
    assert f"install '{package}'" in missing.message and missing.suggestions == suggestions
    checked("precision=bf16", "logger.tensorboard=auto", on=gpus(1))


def test_messages_name_the_law():
    def said(*words: str) -> str:
        return violations(*words)[0].message

    assert "a multiple of 32" in said("parallel.tp=4", "parallel.cp=8", "train.seq_len=40")
    assert "heads/tp = 4 and kv_heads/tp = 2" in said(
        "parallel.tp=2", "parallel.cp=4", "parallel.cp_method=ulysses"
    )
    assert "at least 4" in said("parallel.pp=4", "train.micro_batch=4")
    assert "no token uses them" in said("parallel.tp=2", "model.vocab=50257")
    (padded,) = violations("parallel.tp=2", "model.vocab=50257")
    assert padded.suggestions[0] == "model.vocab=50304"


def test_everything_open_is_resolved():
    config = checked("model.kv_heads=null", "model.head_dim=null", "scheduler=wsd")
    assert (config.model.kv_heads, config.model.head_dim) == (8, 8)
    assert (config.scheduler.decay_steps, config.train.micro_batch) == (2, 8)
    assert config.launcher.device == "cpu"
    assert checked("scheduler=cosine").scheduler.decay_steps is None
    assert checked("scheduler=wsd", "scheduler.warmup_steps=20").scheduler.decay_steps == 0


def test_paths_no_longer_depend_on_where_the_command_was_typed(tmp_path):
    Path("tokenizer.json").touch()
    config = checked("data.tokenizer=tokenizer.json", "data.cache_dir=cache")
    assert config.data.tokenizer == str(tmp_path / "tokenizer.json")
    assert config.data.cache_dir == str(tmp_path / "cache")


def test_token_files_need_no_room_for_bytes(tmp_path: Path) -> None:
    """Their ids may be of anything; where bytes are asked for, the vocabulary must hold them."""
    write_tokens(tmp_path / "corpus")
    words = ["data=megatron", f"data.path={tmp_path}/corpus", "model.vocab=64"]
    assert checked(*words).model.vocab == 64
    for more in ("data.tokenizer=byte", "train.sample_tokens=8"):
        (found,) = violations(*words, more)
        assert (found.key, found.value) == ("model.vocab", 64) and "257 tokens" in found.message
        assert checked(*words, more, found.suggestions[0]).model.vocab == 257
    assert found.suggestions[1] == "train.sample_tokens=0"


@pytest.mark.parametrize(
    "words", [("model.vocab=100",), ("data.tokenizer=bpe", "data.bpe_vocab=1024")]
)
def test_a_vocabulary_that_is_too_small_is_an_error_of_the_data(words):
    with pytest.raises(UserError) as caught:
        checked(*words, on=CPU)
    assert caught.value.kind == "data"


@pytest.mark.parametrize(
    ("off", "idle"),
    [
        ("lora.rank=0", "lora.alpha=32"), ("lora.rank=0", "lora.base=nf4"),
        ("launcher.max_restarts=0", "launcher.mtbf_hours=3"), ("optimizer=sgd", "optimizer.beta2=0.9"),
        ("zero.stage=0", "zero.prefetch=3"), ("parallel.pp=1", "parallel.schedule=gpipe"),
        ("precision.fp8=false", "precision.fp8_recipe=rowwise"), ("model.dense_layers=0", "model.dense_ffn=64"),
        ("train.eval_tasks=[]", "train.eval_tasks_limit=3"), ("run.from_run=null", "run.from_step=3"),
    ],
)  # fmt: skip
def test_a_key_whose_partner_is_off_is_to_be_left_out(off: str, idle: str) -> None:
    with pytest.raises(UserError) as caught:
        checked(off, idle)
    (violation,) = caught.value.violations
    assert violation.message.endswith(" and would be ignored: leave it out")
    for advice in ("", *violation.suggestions):
        checked(off, *shlex.split(advice))
    for advice in violation.suggestions:
        checked(off, idle, *shlex.split(advice))


@pytest.mark.parametrize(
    ("typed", "kind"), [("selective_keep=attention", "selective"), ("checkpoint_every=2", "full")]
)
def test_a_key_of_recomputation_advises_a_kind_that_reads_it(typed: str, kind: str) -> None:
    with pytest.raises(UserError) as caught:
        checked(f"parallel.{typed}")
    (wrong,) = caught.value.violations
    assert wrong.suggestions[0] == f"parallel.activation_checkpointing={kind}"
    assert checked(f"parallel.{typed}", wrong.suggestions[0])


def test_on_a_cpu_each_recipe_of_8_bits_names_the_gpus_that_it_needs() -> None:
    for precision, gpu in (("fp8", "H100"), ("mxfp8", "B200")):
        with pytest.raises(UserError, match=gpu) as caught:
            checked(f"precision={precision}", "launcher.device=cpu")
        assert ("H100" in str(caught.value)) == (gpu == "H100")

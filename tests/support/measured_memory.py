"""Peak memory of real training on CPUs in our layouts, against the planner.

Every rank counts the storages that PyTorch holds (`tests.support.live_memory`) through two steps. The peak
of the second step counts, and the worst rank of each pipeline rank is compared with the plan. The models
are small, but so wide and so long that activations decide, not constants. The rows are layouts of our own, then
the equivalence matrix; tests/rehearse compares all of them with rehearsals, with a large vocabulary too.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from nanoscale.config.layout import SPLIT_BACKWARD, coordinates
from nanoscale.config.resolved import ResolvedConfig
from nanoscale.config.schema import Backend, Lora, Model, Optimizer, Zero
from nanoscale.data.batch import Batch
from nanoscale.parallel import process_group
from nanoscale.plan.predict import predict
from nanoscale.rehearse.played.live_memory import LiveMemory
from nanoscale.train.job import make_engine
from tests.support.even_loads import even_loads
from tests.support.jobs import make_config
from tests.support.layouts import GPT2 as TIED
from tests.support.layouts import ROWS as MATRIX
from tests.support.ranks import run_ranks

SHAPE = Model(
    layers=4, hidden=128, heads=8, kv_heads=4, head_dim=16, ffn=352, vocab=512, max_seq_len=512
)
SEQ = 128
WIDE = replace(SHAPE, ffn=4096)
SOME: dict[str, Any] = {"experts": 4, "experts_per_token": 2, "ffn": 176, "balance": "bias"}
MIXTURE = replace(SHAPE, **SOME)
GROUPED = replace(
    MIXTURE, experts=8, router="sigmoid", expert_groups=4, expert_groups_per_token=2, shared_ffn=176,
    dense_layers=1, dense_ffn=528,
)  # fmt: skip
MLA = replace(SHAPE, kv_heads=8, head_dim=24, kv_rank=64, q_rank=96, rope_head_dim=8, v_head_dim=16)
GPT_OSS = replace(MIXTURE, mlp="swiglu-clamped", bias=True, attention_sinks=True)
SHARED = replace(MIXTURE, shared_ffn=352, shared_gate=True, normalize_experts=False)
GPT2 = replace(SHAPE, kv_heads=8, norm="layernorm", mlp="gelu", position="learned", bias=True)


def vocabulary(size: int, **more: Any) -> Model:
    """Return a shape whose embedding and head are most of it."""
    return replace(SHAPE, vocab=size, layers=2, **more)


K = 1024
SMALL_BUCKETS = {"reduce_bucket": 2**18, "allgather_bucket": 2**18, "prefetch_bucket": 2**16}


@dataclass(frozen=True)
class Row:
    name: str
    degrees: dict[str, Any] = field(default_factory=dict)
    stage: int = 0
    micro_batch: int = 4
    precision: str = "fp32"
    shape: Model = SHAPE
    backend: str = "native"
    optimizer: str = "adamw"
    global_batch: int = 16
    zero: dict[str, Any] = field(default_factory=dict)
    seq: int = SEQ
    lora: Lora = field(default=Lora())
    documents: bool = False
    """True for packed documents, whose attention has a mask."""


SCHEDULES = ("interleaved-1f1b", "looped-bfs", "zero-bubble", "zbv", "dualpipev")


def recomputed(mode: str, **more: Any) -> dict[str, Any]:
    return {"activation_checkpointing": mode, **more}


def scheduled(name: str) -> dict[str, Any]:
    return {"pp": 2, "schedule": name, "virtual_stages": 2}


def deepspeed(name: str, degrees: dict[str, Any], stage: int, **more: Any) -> Row:
    return Row(f"deepspeed {name}", degrees, stage, backend="deepspeed", **more)


ADAPTERS = Lora(rank=8)
DORA = Lora(rank=8, dora=True)
STATES = {"offload_optimizer": "cpu"}
ALL = STATES | {"offload_param": "cpu"}

ROWS = [
    Row("one process"),
    Row("one process, no accumulation", micro_batch=16),
    Row("one process, bf16", precision="bf16"),
    Row("one process, sgd", optimizer="sgd"),
    Row("one process, GPT-2", shape=GPT2),
    *(Row(f"one process, {mode}", recomputed(mode)) for mode in ("full", "selective")),
    *(
        Row(f"one process, {mode}, offloaded", recomputed(mode, offload_activations=True))
        for mode in ("none", "full", "selective")
    ),
    Row("pp 2, offloaded", {"pp": 2, "offload_activations": True}, micro_batch=2),
    *(Row(f"dp 2, stage {stage}", {"dp": 2}, stage) for stage in range(4)),
    *(Row(f"dp 2, stage {stage}, bf16", {"dp": 2}, stage, precision="bf16") for stage in range(4)),
    Row("dp 2, stage 3, no accumulation", {"dp": 2}, 3, 8),
    Row("dp 2, bf16, full, no accumulation", {"dp": 2} | recomputed("full"), 0, 8, "bf16"),
    Row("dp 2, stage 3, bf16, full", {"dp": 2} | recomputed("full"), 3, precision="bf16"),
    Row("tp 2", {"tp": 2}),
    Row("tp 2, bf16", {"tp": 2}, precision="bf16"),
    Row("tp 2 without sequence parallel", {"tp": 2, "sequence_parallel": False}),
    Row("tp 2, selective", {"tp": 2} | recomputed("selective")),
    Row("cp 2", {"cp": 2}),
    Row("ulysses cp 2", {"cp": 2, "cp_method": "ulysses"}),
    Row("cp 2, stage 3, bf16", {"cp": 2}, 3, precision="bf16"),
    Row("pp 2", {"pp": 2}, micro_batch=2),
    Row("pp 2, 0 + 4 blocks", {"pp": 2, "layers_per_stage": [0, 4]}, micro_batch=2),
    Row("pp 2, 4 + 0 blocks", {"pp": 2, "layers_per_stage": [4, 0]}, micro_batch=2),
    Row("pp 2, gpipe", {"pp": 2, "schedule": "gpipe"}, micro_batch=2),
    Row("pp 2, bf16, full", {"pp": 2} | recomputed("full"), precision="bf16", micro_batch=2),
    *(
        Row(f"pp 2, {name}, {mode}", scheduled(name) | recomputed(mode), micro_batch=2)
        for name in SCHEDULES
        for mode in ("none", "full", "selective")
        if mode != "selective" or name not in SPLIT_BACKWARD
    ),
    *(
        Row(f"pp 2, {name}, bf16", scheduled(name), precision="bf16", micro_batch=2)
        for name in ("interleaved-1f1b", "zero-bubble", "dualpipev")
    ),
    *(
        Row(f"packed documents{name}", degrees, precision=precision, documents=True, **more)
        for name, degrees, precision, more in (
            ("", {}, "fp32", {}),
            (", long", {}, "fp32", {"seq": 512, "micro_batch": 2, "global_batch": 8}),
            (", bf16, long", {}, "bf16", {"seq": 512, "micro_batch": 2, "global_batch": 8}),
            (", full, long", recomputed("full"), "fp32", {"seq": 512}),
            (", selective, long", recomputed("selective"), "bf16", {"seq": 512}),
            (", tp 2, long", {"tp": 2}, "fp32", {"seq": 512}),
            (", ulysses cp 2, long", {"cp": 2, "cp_method": "ulysses"}, "fp32", {"seq": 512}),
            (", pp 2, long", {"pp": 2}, "fp32", {"seq": 512, "micro_batch": 2}),
            (", experts, long", {}, "fp32", {"seq": 512, "shape": MIXTURE}),
        )
    ),
    Row("one process, fp64", precision="fp64"),
    Row("one process, fp16", precision="fp16"),
    Row("one process, adamw8bit", optimizer="adamw8bit"),
    Row("one process, schedule-free", optimizer="schedule-free"),
    Row("dp 2, stage 3, schedule-free", {"dp": 2}, 3, optimizer="schedule-free"),
    *(
        Row(
            f"dp 2, stage 3, prefetch 3{name}",
            {"dp": 2} | degrees,
            3,
            zero={"prefetch": 3},
            shape=replace(SHAPE, layers=6, ffn=1408),
            micro_batch=1,
            seq=32,
        )
        for name, degrees in (("", {}), (", full", recomputed("full")))
    ),
    *(
        Row(
            f"LoRA, nf4{name}",
            degrees,
            stage,
            precision=precision,
            shape=WIDE,
            lora=Lora(rank=8, base="nf4"),
        )
        for name, degrees, stage, precision in (
            ("", {}, 0, "fp32"),
            (", bf16", {}, 0, "bf16"),
            (", full, bf16", recomputed("full"), 0, "bf16"),
            (", dp 2, stage 0, bf16", {"dp": 2}, 0, "bf16"),
            (", dp 2, stage 1, fp32", {"dp": 2}, 1, "fp32"),
            (", dp 2, stage 3, full, bf16", {"dp": 2} | recomputed("full"), 3, "bf16"),
            (", pp 2, bf16", {"pp": 2}, 0, "bf16"),
        )
    ),
    Row("one process, adafactor", optimizer="adafactor"),
    Row("dp 2, stage 3, adafactor", {"dp": 2}, 3, optimizer="adafactor"),
    Row(
        "vocab 16k, adafactor",
        optimizer="adafactor",
        shape=vocabulary(16 * 2**10),
        micro_batch=1,
        seq=32,
    ),
    Row("one process, bf16 without masters", precision="bf16-pure"),
    *(
        Row(f"dp 2, stage {stage}, bf16 without masters", {"dp": 2}, stage, precision="bf16-pure")
        for stage in range(4)
    ),
    Row("tp 2, bf16 without masters", {"tp": 2}, precision="bf16-pure"),
    Row("pp 2, bf16 without masters", {"pp": 2}, precision="bf16-pure", micro_batch=2),
    Row("dp 2, stage 3, fp16", {"dp": 2}, 3, precision="fp16"),
    Row("dp 2, stage 3, fp64", {"dp": 2}, 3, precision="fp64"),
    Row("tp 2, full", {"tp": 2} | recomputed("full")),
    Row("tp 2, full, bf16", {"tp": 2} | recomputed("full"), precision="bf16"),
    Row("cp 2, full", {"cp": 2} | recomputed("full")),
    Row("cp 2, selective", {"cp": 2} | recomputed("selective")),
    Row("ulysses cp 2, selective", {"cp": 2, "cp_method": "ulysses"} | recomputed("selective")),
    Row("cp 2, bf16", {"cp": 2}, precision="bf16"),
    Row("ulysses cp 2, bf16", {"cp": 2, "cp_method": "ulysses"}, precision="bf16"),
    Row("dp 2 · pp 2, bf16, stage 1", {"dp": 2, "pp": 2}, 1, 2, "bf16"),
    Row("experts", shape=MIXTURE),
    Row("experts, aux", shape=replace(MIXTURE, balance="aux")),
    Row("experts, gpt-oss", shape=GPT_OSS),
    Row("experts, gpt-oss, bf16", precision="bf16", shape=GPT_OSS),
    Row("experts, gpt-oss, full", recomputed("full"), shape=GPT_OSS),
    Row("experts, gpt-oss, selective", recomputed("selective"), shape=GPT_OSS),
    Row("experts, gpt-oss, tp 2 · ep 2", {"dp": 2, "tp": 2, "ep": 2}, 3, shape=GPT_OSS),
    Row("clamped", shape=replace(SHAPE, mlp="swiglu-clamped", bias=True)),
    Row("sinks", shape=replace(SHAPE, attention_sinks=True)),
    Row("sinks, window", shape=replace(SHAPE, attention_sinks=True, sliding_window=32)),
    Row("experts, wide", shape=replace(MIXTURE, ffn=1408), micro_batch=1, global_batch=1),
    Row("experts, many", shape=replace(MIXTURE, experts=16, experts_per_token=4, ffn=64)),
    Row("experts, bf16", precision="bf16", shape=MIXTURE),
    *(Row(f"experts, {mode}", recomputed(mode), shape=MIXTURE) for mode in ("full", "selective")),
    Row("experts, tp 2", {"tp": 2}, shape=MIXTURE),
    *(
        Row(f"shared experts{name}", degrees, precision=precision, shape=SHARED)
        for name, degrees, precision in (
            ("", {}, "fp32"),
            (", bf16", {}, "bf16"),
            (", tp 2", {"tp": 2}, "fp32"),
            (", selective", recomputed("selective"), "fp32"),
            (", full, bf16", recomputed("full"), "bf16"),
        )
    ),
    *(
        Row(f"MLA{name}", degrees, precision=precision, shape=MLA)
        for name, degrees, precision in (
            ("", {}, "fp32"),
            (", bf16", {}, "bf16"),
            (", tp 2", {"tp": 2}, "fp32"),
            (", selective", recomputed("selective"), "fp32"),
            (", full, bf16", recomputed("full"), "bf16"),
            (", ulysses cp 2", {"cp": 2, "cp_method": "ulysses"}, "fp32"),
            (", cp 2", {"cp": 2}, "fp32"),
        )
    ),
    Row("MLA, pp 2, zero-bubble", scheduled("zero-bubble"), micro_batch=2, shape=MLA),
    Row("grouped experts", shape=GROUPED),
    Row("grouped experts, dense", shape=replace(GROUPED, dense_layers=3)),
    Row("grouped experts, dp 2, stage 3", {"dp": 2}, 3, shape=GROUPED),
    Row("grouped experts, pp 2", {"pp": 2}, micro_batch=2, shape=replace(GROUPED, dense_layers=2)),
    Row("shared experts, wide", shape=replace(SHARED, shared_ffn=1408)),
    *(Row(f"experts, dp 2, stage {s}", {"dp": 2}, s, shape=MIXTURE) for s in (0, 2, 3)),
    Row(
        "experts, larger than the head, dp 2, stage 3",
        {"dp": 2} | recomputed("full"),
        3,
        shape=replace(MIXTURE, layers=6, ffn=1024),
        micro_batch=1,
        seq=32,
    ),
    *(Row(f"experts, ep 2, stage {s}", {"dp": 2, "ep": 2}, s, shape=MIXTURE) for s in range(4)),
    Row("experts, ep 2, stage 3, bf16", {"dp": 2, "ep": 2}, 3, precision="bf16", shape=MIXTURE),
    Row("experts, ep 2, full", {"dp": 2, "ep": 2} | recomputed("full"), 3, shape=MIXTURE),
    Row("experts, ep 2, selective", {"dp": 2, "ep": 2} | recomputed("selective"), shape=MIXTURE),
    Row(
        "experts, wide, ep 2",
        {"dp": 2, "ep": 2},
        3,
        1,
        shape=replace(MIXTURE, ffn=1408),
        global_batch=2,
    ),
    Row("experts, ep 2 · tp 2", {"dp": 2, "ep": 2, "tp": 2}, 3, shape=MIXTURE),
    Row("experts, ep 2 · dp 2", {"dp": 4, "ep": 2}, 3, shape=MIXTURE),
    Row("experts, ep 2 · cp 2", {"dp": 1, "cp": 2, "ep": 2}, 2, shape=MIXTURE),
    Row("experts, pp 2", {"pp": 2}, micro_batch=2, shape=MIXTURE),
    Row("experts, zbv", scheduled("zbv"), micro_batch=2, shape=MIXTURE),
    *(deepspeed(f"experts, dp 2, stage {s}", {"dp": 2}, s, shape=MIXTURE) for s in (1, 3)),
    *(deepspeed(f"dp 2, stage {s}", {"dp": 2}, s) for s in range(4)),
    *(deepspeed(f"dp 2, stage {s}, bf16", {"dp": 2}, s, precision="bf16") for s in range(4)),
    *(deepspeed(f"dp 2, stage {s}, fp16", {"dp": 2}, s, precision="fp16") for s in (0, 2, 3)),
    deepspeed("dp 2, stage 2, full", {"dp": 2} | recomputed("full"), 2),
    *(
        deepspeed(
            f"dp 2, stage {s}, bf16, optimizer offloaded",
            {"dp": 2},
            s,
            precision="bf16",
            zero=STATES,
        )
        for s in (1, 2, 3)
    ),
    deepspeed("dp 2, stage 3, bf16, all offloaded", {"dp": 2}, 3, precision="bf16", zero=ALL),
    deepspeed("tp 2, stage 1", {"tp": 2, "sequence_parallel": False}, 1),
    deepspeed("pp 2, stage 1", {"pp": 2}, 1, micro_batch=2),
    deepspeed(
        "pp 2, stage 0, bf16, full",
        {"pp": 2} | recomputed("full"),
        0,
        precision="bf16",
        micro_batch=2,
    ),
    deepspeed("cp 2, stage 2", {"cp": 2}, 2),
    deepspeed("ulysses cp 2, stage 3", {"cp": 2, "cp_method": "ulysses"}, 3),
    Row("LoRA", lora=ADAPTERS),
    Row("LoRA, bf16, full", recomputed("full"), precision="bf16", lora=ADAPTERS),
    Row("LoRA, selective, bf16", recomputed("selective"), precision="bf16", lora=ADAPTERS),
    Row("LoRA, wq and wv, dp 2, stage 0", {"dp": 2}, lora=replace(ADAPTERS, targets=["wq", "wv"])),
    *(
        Row(f"LoRA, dp 2, stage {s}, bf16", {"dp": 2}, s, precision="bf16", lora=ADAPTERS)
        for s in (2, 3)
    ),
    Row("LoRA, tp 2", {"tp": 2}, lora=ADAPTERS),
    Row("LoRA, pp 2", {"pp": 2}, micro_batch=2, lora=ADAPTERS),
    Row("DoRA", lora=DORA),
    Row("DoRA, bf16, full", recomputed("full"), precision="bf16", lora=DORA),
    Row("DoRA, selective, bf16", recomputed("selective"), precision="bf16", lora=DORA),
    Row("DoRA, dp 2, stage 3, bf16", {"dp": 2}, 3, precision="bf16", lora=DORA),
    Row("DoRA, wq and wv, dp 2, stage 0", {"dp": 2}, lora=replace(DORA, targets=["wq", "wv"])),
    Row("DoRA, tp 2", {"tp": 2}, lora=DORA),
    Row("DoRA, zero-bubble", scheduled("zero-bubble"), micro_batch=2, lora=DORA),
    *(
        deepspeed(
            f"vocab 16k, {name}dp 2, stage {s}",
            {"dp": 2},
            s,
            shape=vocabulary(16 * K, tie_embeddings=tied),
        )
        for name, tied in (("", False), ("tied, ", True))
        for s in range(4)
    ),
    *(
        Row(
            f"matrix: {row.name}",
            row.degrees,
            row.stage,
            row.micro_batch,
            shape=replace(
                GPT2 if row.shape == TIED else SHAPE,
                layers=row.shape.layers,
                tie_embeddings=row.shape.tie_embeddings,
                qkv_bias=row.shape.qkv_bias,
                qk_norm=row.shape.qk_norm,
                **(SOME if row.shape.experts else {}),
            ),
            global_batch=8,
            lora=row.lora,
        )
        for row in MATRIX
    ),
]


def errors_of(row: Row) -> list[float]:
    """Return the relative errors of the plan for the pipeline ranks of a row, whose real ranks train here."""
    config = config_of(row)
    peaks = run_ranks(measure, config.world_size, config)
    errors = []
    for planned in predict(config).memory:
        largest = max(
            p for r, p in enumerate(peaks) if coordinates(r, config.parallel).pp == planned.rank
        )
        plan = planned.allocated + sum(part.bytes for part in planned.host)
        errors.append(plan / largest - 1)
    return errors


def config_of(row: Row) -> ResolvedConfig:
    config = make_config(
        Path(),
        dp=row.degrees.get("dp", 1),
        dp_replicate=row.degrees.get("dp_replicate", 1),
        stage=row.stage,
        precision=row.precision,
        micro_batch=row.micro_batch,
        model=row.shape,
        parallel=row.degrees,
        optimizer=Optimizer(name=row.optimizer),  # type: ignore[arg-type]
        backend=Backend(name=row.backend, **SMALL_BUCKETS),  # type: ignore[arg-type]
    )
    train = replace(config.train, seq_len=row.seq, global_batch=row.global_batch)
    zero = Zero(stage=row.stage, **row.zero)  # type: ignore[arg-type]
    data = replace(config.data, document_mask=row.documents)
    return replace(config, train=train, zero=zero, lora=row.lora, data=data)


def measure(_rank: int, config: ResolvedConfig) -> int:
    """Return the peak of live tensors on this rank, bytes."""
    with even_loads(), LiveMemory() as memory:
        train_two_steps(config, memory.reset_peak)
        return memory.peak


def train_two_steps(config: ResolvedConfig, begin: Callable[[], None]) -> None:
    """Train two steps, and call `begin` before each."""
    if not dist.is_initialized():
        cpu, alone = torch.device("cpu"), config.offloads
        process_group.join(config.world_size, cpu, 60.0, even_alone=alone)
    random = np.random.default_rng(0)
    shape = config.train.micro_batch, config.train.seq_len + 1
    engine = make_engine(config, torch.device("cpu"))
    for _ in range(2):
        gc.collect()
        begin()
        batches = [
            _documents(batch) if config.data.document_mask else batch
            for batch in (
                Batch.of_rows(random.integers(0, config.model.vocab, shape))
                for _ in range(config.accumulation)
            )
        ]
        engine.train_step(batches, 1e-3)


def _documents(batch: Batch) -> Batch:
    """Return the batch as two documents a row."""
    numbers = np.arange(batch.inputs.shape[1]) * 2 // batch.inputs.shape[1]
    return Batch(batch.inputs, batch.targets, np.broadcast_to(numbers, batch.inputs.shape).copy())

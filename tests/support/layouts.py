"""The matrix of layouts that train the same model, and real ranks that train one of its rows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from nanoscale.config.model_math import adaptable_layers
from nanoscale.config.resolved import ResolvedConfig
from nanoscale.config.schema import Guard, Lora, Model, RopeScaling, Zero
from nanoscale.data.dataset import open_data
from nanoscale.metrics.meter import Meter
from nanoscale.metrics.trackers import Record
from nanoscale.parallel import process_group
from nanoscale.runs.rank_context import StopFlag
from nanoscale.train.agreement import Agreement
from nanoscale.train.checkpointing import Progress
from nanoscale.train.job import make_engine
from nanoscale.train.loop import Training
from tests.support.jobs import SHAPE, STEPS, ZBV, make_config, packed_data
from tests.support.reference import CURVE, EVERYTHING

OFFLOADED = Zero(stage=3, offload_optimizer="cpu", offload_param="cpu")
DEEP = replace(SHAPE, layers=4)
"""Four blocks: for four stages, and for groups of blocks."""
TIED = replace(DEEP, tie_embeddings=True)
UNEVEN = replace(SHAPE, layers=7)
"""No number of stages divides it."""
GPT2 = replace(
    SHAPE,
    kv_heads=8,
    norm="layernorm",
    mlp="gelu",
    position="learned",
    bias=True,
    tie_embeddings=True,
)
QWEN2 = replace(SHAPE, qkv_bias=True)
QWEN3 = replace(SHAPE, qk_norm=True)
GEMMA = replace(
    SHAPE,
    norm="rmsnorm1p",
    norm_position="both",
    mlp="geglu",
    qk_norm=True,
    sliding_window=7,
    full_attention_every=2,
    rope_theta_local=100.0,
    rope_scaling=RopeScaling(4.0, kind="linear"),
    attention_scale=0.4,
    attention_softcap=0.7,
    logit_softcap=0.9,
    embed_scale=3.0,
)
OLMO2 = replace(SHAPE, norm_position="after", qk_norm=True, qk_norm_whole=True)
GLM4 = replace(
    SHAPE, norm_position="both", qkv_bias=True, rope_fraction=0.5, rope_pairs="neighbors"
)
MLA = replace(
    SHAPE, kv_heads=8, kv_rank=20, q_rank=12, head_dim=10, rope_head_dim=4, v_head_dim=8,
    rope_pairs="neighbors", attention_scale=0.4,
)  # fmt: skip
SMOLLM3 = replace(SHAPE, rope_skip=2, residual_scale=0.6, logit_scale=1.7)
"""SmolLM3 with the factors of Granite."""


MOE = replace(SHAPE, experts=4, experts_per_token=2, ffn=32, balance="bias", balance_rate=0.01)


AUX = replace(MOE, balance="aux", balance_rate=0.1)
GROUPED = replace(
    MOE, experts=8, router="sigmoid", expert_scale=2.5, expert_groups=4, expert_groups_per_token=2,
    shared_ffn=16, dense_layers=1, dense_ffn=48,
)  # fmt: skip
SHARED = replace(MOE, shared_ffn=16, shared_gate=True, normalize_experts=False)

GPT_OSS = replace(
    MOE, balance="none", mlp="swiglu-clamped", bias=True, attention_sinks=True, sliding_window=7,
    full_attention_every=2,
)  # fmt: skip


@dataclass(frozen=True)
class Row:
    """One layout of the matrix."""

    name: str
    degrees: dict[str, Any]
    stage: int = 0
    micro_batch: int = 4
    shape: Model = field(default=SHAPE)
    packed: bool = False
    """True if it learns the answers of packed documents, with attention within each."""
    lora: Lora = EVERYTHING
    offloaded: bool = False
    """True if parameters and optimizer states are in host memory."""

    @property
    def precisions(self) -> tuple[str, ...]:
        """In fp32 every division of our usual shapes; fp64 holds the other rows, and more closely.

        Of experts none: a token's second and third one can come so near that layouts choose differently.
        """
        special = self.packed or self.lora.rank or self.offloaded
        usual = self.shape in (SHAPE, DEEP) and not special
        layout_alone = {"activation_checkpointing", "schedule"}.isdisjoint(self.degrees)
        return ("fp64", "fp32") if usual and layout_alone else ("fp64",)


def pipeline(name: str, micro_batch: int = 2, shape: Model = DEEP, **degrees: Any) -> Row:
    stages = {"gpipe": 1, "1f1b": 1}.get(degrees.get("schedule", "1f1b"), 2)
    return Row(name, {"pp": 2, "virtual_stages": stages} | degrees, 0, micro_batch, shape)


def mixture(stage: int, micro_batch: int = 2, shape: Model = MOE, **degrees: Any) -> Row:
    words = ", ".join(f"{key} {value}" for key, value in degrees.items()) or "one process"
    return Row(f"MoE {shape.balance}, {words}, stage {stage}", degrees, stage, micro_batch, shape)


def lora(stage: int, micro_batch: int = 2, shape: Model = SHAPE, **degrees: Any) -> Row:
    """Return a row with adapters, whose rank nothing divides."""
    words = ", ".join(f"{key} {value}" for key, value in degrees.items()) or "one process"
    settings = Lora(rank=3, alpha=12.0, targets=adaptable_layers(shape))
    return Row(f"LoRA, {words}, stage {stage}", degrees, stage, micro_batch, shape, lora=settings)


def offloaded(row: Row) -> Row:
    return replace(row, name=f"offloaded, {row.name}", stage=3, offloaded=True)


def dora(row: Row) -> Row:
    settings = replace(row.lora, dora=True)
    return replace(row, name=row.name.replace("LoRA", "DoRA"), lora=settings)


def checkpointing(mode: str, stage: int, **degrees: Any) -> Row:
    changed = ", ".join(f"{key}={value}" for key, value in degrees.items())
    return Row(
        f"activations {mode}, stage {stage}, {changed}",
        {"activation_checkpointing": mode} | degrees,
        stage,
        micro_batch=8 // degrees.get("dp", 1) // 2,
        shape=DEEP if "checkpoint_every" in degrees else SHAPE,
    )


def packed(name: str, stage: int, micro_batch: int, shape: Model = SHAPE, **degrees: Any) -> Row:
    return Row(f"packed documents, {name}", degrees, stage, micro_batch, shape, packed=True)


ROWS = [
    Row("one process", {}),
    Row("dp 2", {"dp": 2}, micro_batch=2),
    Row("dp 4", {"dp": 4}, micro_batch=1),
    Row("tp 2", {"tp": 2}),
    Row("tp 4", {"tp": 4}),
    Row("pp 2", {"pp": 2}),
    Row("pp 4", {"pp": 4}, micro_batch=2, shape=DEEP),
    Row("cp 2", {"cp": 2}),
    Row("cp 4", {"cp": 4}),
    Row("dp 2 · tp 2, stage 3", {"dp": 2, "tp": 2}, 3, 2),
    Row("dp 2 · tp 2, stage 0", {"dp": 2, "tp": 2}, 0, 2),
    Row("dp 2 · pp 2, stage 1", {"dp": 2, "pp": 2}, 1, 2),
    Row("dp 2 · pp 2, stage 3", {"dp": 2, "pp": 2}, 3, 1),
    Row("dp 2 · cp 2, stage 2", {"dp": 2, "cp": 2}, 2, 2),
    Row("dp 2 · cp 2, stage 0", {"dp": 2, "cp": 2}, 0, 2),
    Row("tp 2 · pp 2", {"tp": 2, "pp": 2}),
    Row("tp 2 · cp 2, stage 3", {"tp": 2, "cp": 2}, 3),
    Row("pp 2 · cp 2", {"pp": 2, "cp": 2}),
    Row("dp 2 · tp 2 · pp 2, stage 1", {"dp": 2, "tp": 2, "pp": 2}, 1, 2),
    Row("dp 2 · pp 2 · cp 2, stage 2", {"dp": 2, "pp": 2, "cp": 2}, 2, 2),
    Row("tp 2 · pp 2 · cp 2, stage 1", {"tp": 2, "pp": 2, "cp": 2}, 1),
    Row("dp 2 · tp 2 · pp 2 · cp 2, stage 3", {"dp": 2, "tp": 2, "pp": 2, "cp": 2}, 3, 2),
    Row("HSDP 2 × 2, stage 3", {"dp": 4, "dp_replicate": 2}, 3, 1),
    Row("HSDP 2 × 2 · tp 2, stage 3", {"dp": 4, "dp_replicate": 2, "tp": 2}, 3, 1),
    Row("HSDP 2 × 2 · cp 2, stage 2", {"dp": 4, "dp_replicate": 2, "cp": 2}, 2, 1),
    *(
        pipeline(f"pp 2, {schedule}", schedule=schedule)
        for schedule in (
            "gpipe",
            "interleaved-1f1b",
            "looped-bfs",
            "zero-bubble",
            "zbv",
            "dualpipev",
        )
    ),
    pipeline("pp 2, zbv, full", schedule="zbv", activation_checkpointing="full"),
    pipeline("pp 2 · dp 2, zbv, stage 0", 1, schedule="zbv", dp=2),
    pipeline("pp 2 · tp 2, zero-bubble", schedule="zero-bubble", tp=2),
    pipeline("pp 2, 7 blocks, dualpipev", shape=UNEVEN, schedule="dualpipev"),
    pipeline("pp 2, 1 + 3 blocks", layers_per_stage=[1, 3]),
    pipeline("pp 2 · tp 2, 0 + 4 blocks", layers_per_stage=[0, 4], tp=2),
    pipeline(
        "pp 2, 0 + 2 + 2 + 0 blocks",
        layers_per_stage=[0, 2, 2, 0],
        schedule="interleaved-1f1b",
        activation_checkpointing="full",
    ),
    Row("ulysses cp 2", {"cp": 2, "cp_method": "ulysses"}),
    Row("ulysses cp 4", {"cp": 4, "cp_method": "ulysses"}),
    Row("ulysses cp 2 · tp 2 · dp 2", {"cp": 2, "cp_method": "ulysses", "tp": 2, "dp": 2}, 2, 2),
    Row("tp 2 without sequence parallel", {"tp": 2, "sequence_parallel": False}),
    Row("GPT-2, dp 2 · tp 2, stage 3", {"dp": 2, "tp": 2}, 3, 2, GPT2),
    Row("GPT-2, cp 2", {"cp": 2}, 0, 4, GPT2),
    Row("GPT-2, dp 2 · tp 2 · pp 2, stage 1", {"dp": 2, "tp": 2, "pp": 2}, 1, 2, GPT2),
    Row("tied, pp 4 · dp 2, stage 2", {"pp": 4, "dp": 2}, 2, 1, TIED),
    pipeline("tied, pp 2 · cp 2, zero-bubble", 2, TIED, schedule="zero-bubble", cp=2),
    Row("Qwen2, dp 2 · tp 2, stage 3", {"dp": 2, "tp": 2}, 3, 2, QWEN2),
    Row("Qwen3, dp 2 · tp 2, stage 3", {"dp": 2, "tp": 2}, 3, 2, QWEN3),
    Row(
        "Qwen3, tp 2 · cp 2 without sequence parallel",
        {"tp": 2, "cp": 2, "sequence_parallel": False},
        0,
        4,
        QWEN3,
    ),
    Row("Qwen3, pp 2 · cp 2", {"pp": 2, "cp": 2}, 0, 4, QWEN3),
    Row("Gemma, one process", {}, 0, 4, GEMMA),
    Row("Gemma, dp 2 · tp 2, stage 3, full",
        {"dp": 2, "tp": 2, "activation_checkpointing": "full"}, 3, 2, GEMMA),
    Row("Gemma, pp 2 · ulysses cp 2", {"pp": 2, "cp": 2, "cp_method": "ulysses"}, 0, 4, GEMMA),
    Row("OLMo-2, dp 2 · tp 2, stage 3", {"dp": 2, "tp": 2}, 3, 2, OLMO2),
    Row("OLMo-2, tp 2 · cp 2 without sequence parallel",
        {"tp": 2, "cp": 2, "sequence_parallel": False, "activation_checkpointing": "selective"}, 0, 4, OLMO2),
    Row("MLA, dp 2 · tp 2, stage 3, full",
        {"dp": 2, "tp": 2, "activation_checkpointing": "full"}, 3, 2, MLA),
    Row("MLA, tp 2 · cp 2 without sequence parallel",
        {"tp": 2, "cp": 2, "sequence_parallel": False}, 0, 4, replace(MLA, q_rank=None)),
    Row("MLA, pp 2 · ulysses cp 2", {"pp": 2, "cp": 2, "cp_method": "ulysses"}, 0, 4, MLA),
    Row("GLM-4, tp 2 · cp 2, stage 2", {"tp": 2, "cp": 2}, 2, 4, GLM4),
    Row("SmolLM3, pp 2 · dp 2, stage 1", {"pp": 2, "dp": 2}, 1, 2, SMOLLM3),
    packed("Gemma, tp 2", 0, 4, GEMMA, tp=2),
    packed("Gemma, tp 2 · ring cp 2, selective", 0, 4, GEMMA, tp=2, cp=2, activation_checkpointing="selective"),
    checkpointing("full", 3, dp=2),
    checkpointing("full", 0, tp=2, checkpoint_every=2),
    checkpointing("full", 0, cp=2, offload_activations=True),
    checkpointing("selective", 3, dp=2, selective_keep="every-2nd-matmul", checkpoint_every=2),
    checkpointing("selective", 1, tp=2, cp=2, selective_keep="attention"),
    checkpointing("selective", 2, dp=2, tp=2, selective_keep="core-attention"),
    checkpointing("selective", 0, pp=2),
    mixture(0, 4),
    mixture(3, dp=2, activation_checkpointing="full"),
    mixture(0, 4, tp=2, sequence_parallel=False),
    mixture(0, dp=2, ep=2),
    mixture(3, 1, dp=4, ep=4, shape=replace(MOE, balance="none")),
    mixture(3, 1, dp=2, tp=2, ep=2, shape=replace(SHARED, shared_gate=False)),
    mixture(3, 1, dp=2, tp=2, ep=2, shape=GROUPED),
    mixture(0, 1, dp=2, ep=2, **ZBV, shape=replace(GROUPED, balance="aux", balance_rate=0.1)),
    mixture(0, 1, tp=2, pp=2, shape=SHARED),
    mixture(2, 1, dp=4, ep=2, dp_replicate=2),
    mixture(3, 1, dp=2, tp=2, ep=2, shape=GPT_OSS, activation_checkpointing="full"),
    mixture(0, 2, pp=2, cp=2, cp_method="ulysses", shape=GPT_OSS),
    mixture(0, 1, dp=2, cp=2, ep=2, shape=GPT_OSS),
    mixture(1, 1, dp=2, tp=2, shape=replace(GPT_OSS, balance="aux"), activation_checkpointing="selective"),
    packed("gpt-oss, dp 2 · ep 2", 3, 2, GPT_OSS, dp=2, ep=2),
    mixture(3, dp=2, ep=2, tp=2, activation_checkpointing="selective"),
    mixture(0, 4, ep=2, tp=2, ep_over_tp=True, shape=AUX),
    mixture(1, 1, ep=2, tp=2, pp=2, ep_over_tp=True, shape=SHARED, activation_checkpointing="full"),
    mixture(2, dp=2, cp=2, ep=4),
    mixture(0, 4, shape=AUX),
    mixture(2, dp=2, ep=4, tp=2, cp=2, ep_over_tp=True, shape=AUX, activation_checkpointing="full"),
    mixture(0, dp=2, pp=2, shape=AUX),
    mixture(1, cp=2, ep=2, pp=2, schedule="zbv", virtual_stages=2, shape=replace(MOE, layers=4),
        activation_checkpointing="full"),
    packed("dp 2 · pp 2, stage 1, full", 1, 2, dp=2, pp=2, activation_checkpointing="full"),
    packed("tp 2 · ulysses cp 2", 0, 4, tp=2, cp=2, cp_method="ulysses"),
    packed("GPT-2, tp 2", 0, 4, GPT2, tp=2),
    packed("tp 2 · ring cp 2, selective", 0, 4, tp=2, cp=2, activation_checkpointing="selective"),
    packed("pp 2 · ring cp 2", 0, 2, DEEP, pp=2, cp=2),
    packed("pp 2, zbv", 0, 2, DEEP, pp=2, schedule="zbv", virtual_stages=2),
    lora(0, 4),
    lora(3, dp=2, tp=2, activation_checkpointing="full"),
    lora(1, 1, dp=2, pp=2, schedule="zbv", virtual_stages=2, shape=DEEP),
    lora(0, pp=2, schedule="zero-bubble", virtual_stages=2, shape=DEEP),
    lora(3, dp=2, ep=2, shape=MOE),
    lora(2, 1, dp=2, cp=2, ep=2, shape=MOE),
    lora(0, 1, dp=2, tp=2, pp=2),
    offloaded(Row("one process", {})),
    offloaded(Row("dp 2", {"dp": 2}, micro_batch=2)),
    offloaded(Row("HSDP 2 × 2, full",
        {"dp": 4, "dp_replicate": 2, "activation_checkpointing": "full"}, micro_batch=1)),
    offloaded(Row("pp 2 · dp 2", {"dp": 2, "pp": 2}, micro_batch=1)),
    offloaded(mixture(3, dp=2, ep=2, tp=2)),
    offloaded(lora(3, dp=2, tp=2)),
    dora(lora(0, 4)),
    dora(lora(3, dp=2, tp=2, shape=GPT2, activation_checkpointing="full")),
    dora(lora(0, dp=2, cp=2)),
    dora(lora(2, dp=2, tp=2, activation_checkpointing="selective")),
    dora(lora(1, 1, dp=2, pp=2, schedule="zbv", virtual_stages=2, shape=DEEP)),
    dora(lora(0, tp=2, pp=2, schedule="zero-bubble", virtual_stages=2, shape=DEEP)),
]  # fmt: skip


def row_config(folder: Path, row: Row, precision: str, steps: int = STEPS) -> ResolvedConfig:
    """Return the row's job, which compares its replicas bit by bit after each step."""
    config = make_config(
        folder,
        dp=row.degrees.get("dp", 1),
        dp_replicate=row.degrees.get("dp_replicate", 1),
        stage=row.stage,
        precision=precision,
        micro_batch=row.micro_batch,
        model=row.shape,
        parallel=row.degrees,
        **({"data": packed_data(folder)} if row.packed else {}),
        **({"zero": OFFLOADED} if row.offloaded else {}),
        lora=row.lora,
    )
    accumulation = config.accumulation
    assert accumulation >= 2, f"{row.name}: a row accumulates"
    return replace(config, train=replace(config.train, steps=steps), guard=Guard(1))


class Records(list[Record]):
    """A sink that keeps its records."""

    write = list.append

    def flush(self) -> None: ...

    def close(self, outcome: str) -> None: ...


def train_all(rank: int, configs: list[ResolvedConfig]) -> list[CURVE]:
    """Train each to its end, as the job does, in one set of processes."""
    names = ("loss", "grad_norm", "lr", "tokens")
    everything = [record_all(rank, config) for config in configs]
    return [[tuple(r[name] for name in names) for r in records] for records in everything]


def record_all(
    rank: int,
    config: ResolvedConfig,
    make: Callable[[ResolvedConfig, torch.device], Any] = make_engine,
) -> Records:
    """Return the logged records of each step."""
    if not dist.is_initialized():
        cpu, alone = torch.device("cpu"), config.offloads
        process_group.join(config.world_size, cpu, 120.0, even_alone=alone)
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    assert ranks == config.world_size, "all layouts that ranks train have their number"
    device, records = torch.device("cpu"), Records()
    training = Training(
        workspace=Path(config.run.root) / "none",
        config=config,
        engine=make(config, device),
        data=open_data(config.data, config.train, config.model.vocab),
        progress=Progress(),
        rank=rank,
        meter=Meter(config, config.world_size, device),
        sinks=[records],
        note=lambda *_, **__: None,
    )
    agreement = Agreement(StopFlag())
    assert training.run(agreement) == "completed"
    agreement.close()
    return records

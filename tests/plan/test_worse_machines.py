"""No figure of a machine that gets worse makes a planned step faster, in drawn layouts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, replace
from itertools import pairwise
from random import Random

import pytest

from nanoscale.config.layout import SCHEDULES, takes
from nanoscale.config.resolved import ResolvedConfig
from nanoscale.config.schema import Backend, Data, Lora, Optimizer, Precision, Zero
from nanoscale.plan.hardware.hardware import Efficiency, Hardware, hardware_of
from nanoscale.plan.predict import simulated
from nanoscale.plan.time.step import stage_costs, step_time
from tests.plan.machines import changed, job, model

MODELS = ("llama-1b", "llama-8b", "llama-70b", "gpt2", "qwen3-30b-a3b", "mixtral-8x7b", "gpt-oss-20b",
          "deepseek-v3")  # fmt: skip
DEVICES = ("h100-sxm", "h200", "b200", "gb200", "gb300", "mi300x", "a100-80")
LARGER_IS_WORSE = {"overlap", "jitter", "eager_s", "compiled_s", "intra_latency", "inter_latency"}
"""Figures of seconds and of losses; a smaller figure of all others is worse."""
WORSE = (1.0, 1.03, 1.25, 2.0, 4.0, 10.0, 50.0)
"""The factors by which a figure gets worse, one after the other."""


def draw(random: Random) -> ResolvedConfig | None:
    """Return a layout, or None if the model does not divide so."""
    name, device = random.choice(MODELS), random.choice(DEVICES)
    shape = model(name)
    tp, pp, cp = (
        random.choice((1, 1, 2, 4, 8)),
        random.choice((1, 1, 2, 4, 8)),
        random.choice((1, 1, 2, 4)),
    )
    dp = random.choice((1, 2, 8, 16, 64, 512))
    schedule = random.choice([*SCHEDULES]) if pp > 1 else "1f1b"
    virtual = 1 if schedule in ("gpipe", "1f1b") else 2
    micro, accumulation = random.choice((1, 1, 2, 4)), random.choice((1, 2, 8, 16, 64))
    ep = random.choice((1, 2, 4, 8, 16)) if shape.experts else 1
    divided = not (shape.heads % tp or shape.kv_head_count % tp or shape.layers < pp * virtual)
    takes_experts = (dp * cp) % ep == 0 and not (shape.experts and shape.experts % ep)
    if not (divided and takes_experts and takes(schedule, pp, accumulation)):
        return None
    stage = random.choice((0, 1, 2, 3))
    deepspeed = random.random() < 0.15 and cp == pp == ep == 1
    replicas = random.choice((1, 1, 2, 8))
    replicated = stage and not deepspeed and ep == 1 and dp % replicas == 0
    offloads = random.choice(("none", "none", "optimizer", "both", "activations"))
    adapters = random.random() < 0.15 and not (shape.experts or deepspeed)
    fp8 = random.random() < 0.25 and device != "a100-80"
    return job(
        name, device, tp=tp, pp=pp, cp=cp, dp=dp, ep=ep, micro_batch=micro, schedule=schedule,
        virtual_stages=virtual if pp > 1 else 1, seq_len=random.choice((2048, 8192, 32768)),
        global_batch=micro * dp * accumulation, dp_replicate=replicas if replicated else 1,
        cp_method=random.choice(("ring", "ulysses")), tp_overlap=tp > 1 and random.random() < 0.3,
        sequence_parallel=random.random() < 0.8, offload_activations=offloads == "activations",
        activation_checkpointing=random.choice(("none", "selective", "full")),
        precision=Precision(compute="bf16", fp8=fp8), data=Data(document_length=random.choice((None, 1024))),
        zero=Zero(
            stage=stage, offload_optimizer="cpu" if stage and offloads in ("optimizer", "both") else "none",
            offload_param="cpu" if stage == 3 and offloads == "both" else "none",
            hpz=8 if deepspeed and stage == 3 and dp > 8 else 1,
        ),
        optimizer=Optimizer(name=random.choice(("adamw", "muon"))),
        backend=Backend(
            name="deepspeed" if deepspeed else "native", compile=random.choice(("on", "off")),
            attention=random.choice(("auto", "flash")),
        ),
        lora=Lora(rank=16, targets=["wq", "wv"]) if adapters else Lora(),
    )  # fmt: skip


def worse(hardware: Hardware) -> Iterator[tuple[str, list[Hardware]]]:
    """Yield the name of each figure, and machines of which each is worse in it than the one before."""
    usual = replace(hardware, pod=hardware.pod or 4 * hardware.island)
    efficiency = [field.name for field in fields(Efficiency)]
    links = ["memory_bandwidth", "intra_bandwidth", "inter_bandwidth", "pod_bandwidth", "host_bandwidth",
             "host_memory_bandwidth", "intra_latency", "inter_latency"]  # fmt: skip
    for name in [*efficiency, *links]:
        value = getattr(hardware.efficiency if name in efficiency else hardware, name)
        steps = WORSE if name in LARGER_IS_WORSE else [1 / step for step in WORSE]
        yield name, [changed(usual, **{name: value * step}) for step in steps]
    for kind in hardware.peaks:
        yield (
            f"peaks.{kind}",
            [
                replace(usual, peaks={**hardware.peaks, kind: hardware.peaks[kind] / step})
                for step in WORSE
            ],
        )
    sizes = [size for size in (72, 64, 32, 16, 8, 4, 2, 1) if size <= hardware.island]
    yield "island", [replace(hardware, island=size) for size in sizes]
    pods = [hardware.island * size for size in (64, 16, 4, 1)]
    yield "pod", [replace(hardware, pod=size) for size in pods]


def seconds(config: ResolvedConfig, hardware: Hardware, in_order: bool) -> float:
    """Return the seconds of a step, by the closed form of its schedule or by its simulation."""
    makespan = None
    if in_order and config.parallel.pp > 1:
        makespan = simulated(config, stage_costs(config, hardware)).makespan
    return step_time(config, hardware, makespan).seconds


def faster(config: ResolvedConfig, in_order: bool) -> Iterator[str]:
    """Yield each figure with which a worse machine is planned as a faster one."""
    for name, machines in worse(hardware_of(config)):
        times = [seconds(config, machine, in_order) for machine in machines]
        for before, after in pairwise(times):
            if after < before * (1 - 1e-9):
                yield f"{name}: {before:.6f} s, then {after:.6f} s"
                break


def layouts(seed: int, count: int) -> list[ResolvedConfig]:
    random = Random(seed)
    drawn: list[ResolvedConfig] = []
    while len(drawn) < count:
        if (config := draw(random)) is not None:
            drawn.append(config)
    return drawn


@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(seed, marks=pytest.mark.exhaustive) for seed in range(1, 26))]
)
def test_a_worse_machine_is_never_planned_as_faster(seed: int) -> None:
    for number, config in enumerate(layouts(seed, 20)):
        in_order = number % 4 == 0 and config.accumulation <= 16
        assert not list(faster(config, in_order)), config

from __future__ import annotations

import os
import time
from dataclasses import replace

import pytest
import torch

from nanoscale.config.schema import Cluster, Config, Model, Peaks, PhaseSettings, Precision, Train
from nanoscale.metrics.meter import Meter, device_peak, forget_peak_memory, peak_memory_gib

LLAMA_8B = Model(
    layers=32, hidden=4096, heads=32, kv_heads=8, head_dim=128, ffn=14336, vocab=128256
)
CPU = torch.device("cpu")


def test_mfu_by_hand() -> None:
    """KempnerForge's row: 10,471 tokens/s of an 8.03 B Llama on one H200 (989 TFLOP/s), sequence 4096."""
    config = Config(model=LLAMA_8B, train=Train(seq_len=4096), cluster=Cluster(peak_tflops=989.0))
    meter = Meter(config, 2, CPU)
    meter.begin()
    time.sleep(0.01)
    meter.end()
    reading = meter.read(samples=2)
    assert reading["step_time_s"] >= 0.01
    assert reading["tokens_per_s"] == pytest.approx(2 * 4096 / reading["step_time_s"])
    matmul = 8_030_261_248 - 128256 * 4096 - 65 * 4096  # without input embedding and norms
    flops = 6 * matmul + 12 * 32 * 4096 * 4096
    expected = reading["tokens_per_s"] * flops / (2 * 989e12)
    assert reading["mfu"] == pytest.approx(expected, rel=1e-3)


def test_attention_of_a_phase_is_that_of_its_samples() -> None:
    """A step of shorter samples and two of the whole length: the mean of their FLOPs counts."""
    short = PhaseSettings(until=1, seq_len=1024, global_batch=4)
    phases = {"short": short, "long": PhaseSettings()}
    train = Train(seq_len=4096, global_batch=8, phases=phases)
    config = Config(model=LLAMA_8B, train=train, cluster=Cluster(peak_tflops=989.0))
    meter = Meter(config, 2, CPU)
    for step in (1, 2, 3):
        meter.begin()
        meter.end(step)
    reading = meter.read(samples=20)
    matmul = 8_030_261_248 - 128256 * 4096 - 65 * 4096
    flops = 6 * matmul + 12 * 32 * 4096 * (4 * 1024 + 16 * 4096) / 20
    expected = reading["tokens_per_s"] * flops / (2 * 989e12)
    assert reading["mfu"] == pytest.approx(expected, rel=1e-3)


def test_only_steps_count(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([0.0, 1.0, 9.0, 10.0, 19.0, 20.0])  # between steps an evaluation, say
    monkeypatch.setattr(time, "perf_counter", lambda: next(clock))
    meter = Meter(Config(), 1, CPU)
    for _ in range(3):
        meter.begin()
        meter.end()
    assert meter.read(100)["step_time_s"] == 1.0


def test_peak_is_unknown_on_a_cpu_unless_given() -> None:
    assert device_peak(Config(), CPU) is None
    assert device_peak(replace(Config(), cluster=Cluster(peak_tflops=2.0)), CPU) == 2e12


def test_memory_is_that_of_this_process() -> None:
    before = peak_memory_gib(CPU)
    held = torch.ones(1 << 27)  # half a GiB
    assert held.sum() > 0
    assert peak_memory_gib(CPU) >= max(before, 0.5)


def test_a_peak_can_be_forgotten() -> None:
    """The teacher of a distillation needs its memory before the training."""
    if not os.access("/proc/self/clear_refs", os.W_OK):
        pytest.skip("the system does not let a process reset its peak")
    held = torch.ones(1 << 27)
    before = peak_memory_gib(CPU)
    del held
    forget_peak_memory(CPU)
    assert peak_memory_gib(CPU) < before - 0.4


def test_the_peak_of_a_gpu_is_that_of_the_table_of_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H100 80GB HBM3")
    gpu, bf16 = torch.device("cuda"), Precision(compute="bf16")
    assert device_peak(Config(precision=bf16), gpu) == pytest.approx(989e12, rel=1e-3)
    assert device_peak(Config(precision=replace(bf16, fp8=True)), gpu) == pytest.approx(
        1979e12, rel=1e-3
    )
    assert device_peak(Config(precision=Precision(compute="fp32")), gpu) == 67e12
    own = Cluster(device="mine", peaks=Peaks(bf16=100.0))
    assert device_peak(Config(precision=bf16, cluster=own), gpu) == 100e12
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA GeForce")
    assert device_peak(Config(precision=bf16), gpu) is None

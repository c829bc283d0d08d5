"""The table of machines, and unknown devices."""

from __future__ import annotations

import json
from dataclasses import fields, replace
from pathlib import Path

import pytest

from nanoscale.common.devices import Devices
from nanoscale.common.errors import UserError
from nanoscale.config.hardware import data_sheets
from nanoscale.config.hardware.data_sheets import described, known_devices, peak_of, recognise
from nanoscale.config.schema import Cluster, Config, Launcher, Peaks, Precision
from nanoscale.plan.hardware.hardware import Efficiency, hardware_of
from nanoscale.plan.predict import predict
from tests.plan.machines import BF16, job, machine

WHOLE = Cluster(
    device="mine",
    devices_per_host=4,
    memory_gib=24.0,
    memory_gbs=1008.0,
    multiprocessors=128,
    peaks=Peaks(bf16=165.0),
    intra_host_gbs=32.0,
    inter_host_gbs=3.0,
    host_link_gbs=32.0,
    host_memory_gib=256.0,
)


def refusal(config: Config) -> str:
    with pytest.raises(UserError) as caught:
        hardware_of(config)
    assert caught.value.kind == "config"
    return str(caught.value)


@pytest.mark.parametrize("name", known_devices())
def test_a_machine_is_described_wholly_and_in_the_right_units(name):
    found = machine(name)
    assert found.device == name
    for field in fields(found):
        value = getattr(found, field.name)
        if field.name not in (
            *("hosts", "pod", "price", "device", "peaks", "efficiency", "context_gib"),
        ):
            assert value > 0, field.name
    assert 0 < found.efficiency.matmul <= 1
    assert found.intra_bandwidth > found.inter_bandwidth
    assert found.memory_bandwidth > found.intra_bandwidth
    if name != "cpu":
        assert found.peaks["fp16"] > found.peaks["fp32"] >= found.peaks["fp64"]
        assert 1e-7 < found.intra_latency < 1e-4
        capability = described(Config(cluster=Cluster(device=name))).compute_capability
        assert (capability is None) == name.startswith("mi"), "of CUDA devices"


@pytest.mark.parametrize(
    ("name", "bf16", "gbs", "gib"),
    [("a100-80", 312e12, 2039e9, 80e9 / 2**30), ("h100-sxm", 989e12, 3350e9, 80e9 / 2**30),
     ("h200", 989e12, 4800e9, 141e9 / 2**30), ("mi300x", 1307e12, 5300e9, 192)],
)  # fmt: skip
def test_figures_of_the_data_sheets(name, bf16, gbs, gib):
    found = machine(name)
    assert found.peaks["bf16"] == pytest.approx(bf16, rel=1e-3)
    assert found.memory_bandwidth == pytest.approx(gbs)
    # Sheets round to the GB, and drivers keep a little or show a little more.
    assert found.memory_gib == pytest.approx(gib, rel=0.08)


@pytest.mark.parametrize(
    ("driver", "name"),
    [("NVIDIA H100 80GB HBM3", "h100-sxm"), ("NVIDIA H100 PCIe", "h100-pcie"), ("NVIDIA H200", "h200"),
     ("NVIDIA GB200", "gb200"), ("NVIDIA B200", "b200"), ("NVIDIA A100-SXM4-40GB", "a100-40"),
     ("AMD Instinct MI300X", "mi300x"), ("NVIDIA H100 NVL", None), ("NVIDIA A2", None), ("", None),
     ("NVIDIA L4", "l4"), ("NVIDIA L40S", "l40s"), ("NVIDIA L40", None), ("NVIDIA GH200 480GB", None),
     ("NVIDIA H20", "h20"), ("NVIDIA H200 NVL", None), ("NVIDIA GeForce RTX 4090 Laptop GPU", None),
     ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", None), ("NVIDIA H100 80GB HBM3 MIG", None), ("NVIDIA", None),
     ("NVIDIA B300 SXM6 AC", "b300"), ("NVIDIA GB300", "gb300"), ("Tesla T4", "t4"),
     ("NVIDIA GeForce RTX 4090 D", None),
     ("Tesla V100-SXM2-32GB-LS", "v100"), ("NVIDIA GeForce RTX 4090", "rtx-4090")],
)  # fmt: skip
def test_devices_are_recognised_by_the_whole_of_what_tells_them_apart(driver, name):
    assert recognise(driver) == name


def test_an_unknown_device_is_an_error_that_says_what_to_type(monkeypatch):
    message = refusal(Config(cluster=Cluster(device="h100-smx"), precision=BF16))
    assert (
        "h100-smx" in message and "cluster.memory_gbs" in message and "cluster=h100-sxm" in message
    )
    monkeypatch.setattr(data_sheets, "detect", lambda: Devices("cuda", 2, ("NVIDIA A2",) * 2))
    message = refusal(Config(precision=BF16))
    assert "NVIDIA A2" in message and "cluster=h100-sxm" in message


def test_a_type_that_a_device_lacks_is_an_error():
    message = refusal(Config(cluster=Cluster(device="v100"), precision=BF16))
    assert "cluster.peaks.bf16" in message and "precision=fp16" in message


def test_a_users_own_machine_needs_no_file_of_ours():
    found = hardware_of(Config(cluster=WHOLE, precision=BF16))
    assert (found.device, found.peaks, found.island) == ("mine", {"bf16": 165e12}, 4)
    assert found.efficiency == Efficiency()
    missing = refusal(Config(cluster=replace(WHOLE, memory_gbs=None), precision=BF16))
    assert "cluster.memory_gbs" in missing and "cluster.memory_gib" not in missing


def test_an_unknown_device_needs_no_more_than_memory_bandwidth_and_a_peak():
    cluster = Cluster(device="mine", memory_gib=24.0, memory_gbs=1008.0, peaks=Peaks(bf16=165.0))
    config = job(cluster=cluster)
    plan = predict(config)
    assert plan.hardware.memory_gib == 24.0 and plan.time.seconds > 0


def test_a_key_of_the_users_goes_before_the_table():
    cluster = Cluster(device="h100-sxm", inter_host_gbs=12.5, peak_tflops=600.0)
    found = hardware_of(Config(cluster=cluster, precision=BF16))
    assert found.inter_bandwidth == 12.5e9
    assert found.peak(BF16) == 600e12
    assert found.intra_bandwidth == machine().intra_bandwidth


def test_without_a_gpu_this_machine_is_its_cpu(monkeypatch):
    monkeypatch.setattr(data_sheets, "detect", lambda: Devices("cpu", 4))
    monkeypatch.setattr(data_sheets, "cores", lambda: 4)
    ranks = hardware_of(Config(launcher=Launcher(devices=2, threads=2)))
    alone = hardware_of(Config(launcher=Launcher(devices=1, threads=1)))
    assert ranks.device == "cpu"
    assert ranks.memory_gib == pytest.approx(alone.memory_gib / 2)
    assert ranks.peaks["fp32"] == 2 * alone.peaks["fp32"]


def test_this_machines_gpus_are_recognised(monkeypatch):
    monkeypatch.setattr(data_sheets, "detect", lambda: Devices("cuda", 8, ("NVIDIA H200",) * 8))
    assert hardware_of(Config(precision=BF16)).device == "h200"
    both = Devices("cuda", 2, ("NVIDIA H200", "NVIDIA A100-SXM4-40GB"))
    monkeypatch.setattr(data_sheets, "detect", lambda: both)
    assert "not one known device" in refusal(Config(precision=BF16))


def test_measured_efficiencies_go_before_assumed_ones(tmp_path: Path):
    path = tmp_path / "measured.json"
    path.write_text(json.dumps({"efficiency": {"matmul": 0.5}, "runs": ["x"]}))
    cluster = Cluster(device="h100-sxm", efficiency=str(path))
    found = hardware_of(Config(cluster=cluster, precision=BF16)).efficiency
    assert found == replace(machine().efficiency, matmul=0.5)


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"efficiency": {"matmull": 1}}', '{"efficiency": {"matmul": 0}}']
)
def test_a_file_that_holds_no_efficiencies_is_refused(tmp_path: Path, text):
    path = tmp_path / "measured.json"
    path.write_text(text)
    cluster = Cluster(device="h100-sxm", efficiency=str(path))
    assert "cluster.efficiency=null" in refusal(Config(cluster=cluster, precision=BF16))


def test_fp32_with_tf32_has_its_own_peak_and_fp32s_where_that_is_unknown():
    tf32 = Precision(compute="fp32", tf32=True)
    a100 = hardware_of(Config(cluster=Cluster(device="a100-80"), precision=tf32))
    assert (a100.peak(tf32), a100.peak(replace(tf32, tf32=False))) == (156e12, 19.5e12)
    own = replace(WHOLE, peaks=Peaks(fp32=3.0))
    assert hardware_of(Config(cluster=own, precision=tf32)).peak(tf32) == 3e12
    assert peak_of(Config(precision=tf32), "NVIDIA A100-SXM4-80GB") == 156e12
    assert peak_of(Config(precision=tf32), "Tesla V100-SXM2-32GB") == 15.7e12


def test_the_peak_for_mfu_is_that_of_the_same_table():
    bf16 = Config(precision=BF16)
    assert peak_of(bf16, "NVIDIA H100 80GB HBM3") == machine().peak(BF16)
    fp8 = Config(precision=replace(BF16, fp8=True))
    assert peak_of(fp8, "NVIDIA H100 80GB HBM3") == pytest.approx(2 * 989.4e12, rel=1e-3)
    assert peak_of(bf16, "NVIDIA A2") is None
    assert peak_of(bf16, None) is None
    assert peak_of(Config(cluster=Cluster(peak_tflops=2.0)), None) == 2e12
    assert (
        peak_of(Config(cluster=Cluster(device="a100-80"), precision=Precision(compute="fp16")), "x")
        == 312e12
    )

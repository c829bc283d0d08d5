"""The dtypes of `precision=auto` on all devices, and in a frozen configuration."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from nanoscale.cli.common.options import as_settings
from nanoscale.config.composing import frozen
from nanoscale.config.composing.compose import compose
from nanoscale.config.rules import Devices, check
from nanoscale.config.rules.numbers import lacks_bf16
from nanoscale.config.schema import Config, Precision
from nanoscale.launch.request import check_request
from nanoscale.launch.transport.transport import read_hosts
from nanoscale.plan.hardware.planned_devices import planned_devices
from tests.support.recipes import changed

CPU = Devices("cpu", 2)
H100, A100, V100 = "NVIDIA H100 80GB HBM3", "NVIDIA A100-SXM4-80GB", "Tesla V100-SXM2-32GB"
WITHOUT = [
    V100, "Tesla P100-PCIE-16GB", "Tesla T4", "NVIDIA T4G", "Tesla K80", "Tesla M60", "Tesla P40",
    "GRID V100D-32Q", "Quadro RTX 6000", "Quadro GV100", "NVIDIA TITAN V", "TITAN RTX",
    "NVIDIA GeForce RTX 2080 Ti", "NVIDIA GeForce GTX 1660", "NVIDIA T1000 8GB", "AMD Instinct MI50", "v100",
]  # fmt: skip
WITH = [
    H100, A100, "NVIDIA A10G", "NVIDIA A2", "NVIDIA L4", "NVIDIA L40S", "NVIDIA GeForce RTX 3090",
    "NVIDIA GeForce RTX 4090", "NVIDIA GeForce RTX 5090", "NVIDIA RTX A6000",
    "NVIDIA RTX 2000 Ada Generation",
    "NVIDIA RTX 6000 Ada Generation", "NVIDIA RTX PRO 6000 Blackwell Server Edition", "NVIDIA B200",
    "NVIDIA GB200", "NVIDIA GB300",
    "NVIDIA H20", "NVIDIA GH200 480GB", "AMD Instinct MI100", "AMD Instinct MI300X", "a100-80",
    "gb200", "mi300x",
]  # fmt: skip


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("two").write_text("h1 slots=4\nh2 slots=4\n")


def gpus(*names: str) -> Devices:
    return Devices("cuda", len(names), names, cores=16)


def on(devices: Devices, *words: str) -> Precision:
    return check(changed("train.global_batch=16", *words), devices).precision


def on_hosts(*words: str) -> Precision:
    """Return the precision on two hosts with four unknown GPUs each; this machine has a V100."""
    asked = changed(*words, options=as_settings(hostfile="two"))
    return check(asked, gpus(V100), read_hosts(asked)).precision


def test_gpus_without_bf16_are_known_by_their_names():
    assert [name for name in WITHOUT if not lacks_bf16(name)] == []
    assert [name for name in WITH if lacks_bf16(name)] == []


def test_auto_is_what_all_devices_have():
    assert compose([]).config.precision == Precision()
    assert on(gpus(H100, H100)).compute == "bf16"
    assert on(gpus(V100)).compute == "fp16"
    assert on(gpus(A100, V100)).compute == "fp16"
    assert on(CPU) == Precision(compute="fp32", tf32=False)
    assert on(gpus(H100), "launcher.device=cpu") == on(CPU)
    assert on(gpus(H100), "precision.fp8=true", "model.ffn=128").compute == "bf16"


def test_a_described_cluster_decides_and_unknown_gpus_have_bf16():
    assert on_hosts().compute == "bf16"
    assert on_hosts("cluster=v100").compute == "fp16"
    assert on_hosts("cluster.device=v100").compute == "fp16"
    own = "cluster.device=ours", "cluster.peaks.fp16=100"
    assert on_hosts(*own).compute == "fp16"
    assert on_hosts(*own, "cluster.peaks.bf16=100").compute == "bf16"


@pytest.mark.parametrize(
    ("cluster", "compute"),
    [("v100", "fp16"), ("h200", "bf16"), ("mi300x", "bf16"), ("cpu", "fp32")],
)
def test_a_plan_is_made_for_the_cluster_that_is_not_here(cluster: str, compute: str) -> None:
    composed = compose(["recipe=debug", f"cluster={cluster}"])
    config = check_request(composed, devices=planned_devices(composed)).config
    assert config.precision.compute == compute


def test_fp32_on_a_gpu_has_tf32_products_where_the_gpu_has_them():
    fp32 = "precision=fp32"
    assert on(gpus(A100), fp32).tf32 is True
    assert on(gpus(A100), fp32, "precision.tf32=false").tf32 is False
    assert on(gpus(A100, V100), fp32).tf32 is False
    assert on(gpus(A100), fp32, "cluster=mi300x").tf32 is False
    assert on(gpus(A100), "precision=bf16").tf32 is False
    assert on(CPU, fp32) == Precision(compute="fp32", tf32=False)
    assert on(CPU, fp32, "precision.tf32=false").tf32 is False


def freeze(devices: Devices, *words: str) -> Config:
    composed = compose(["recipe=debug", "parallel.dp=1", *words])
    config = check(composed, devices)
    Path("config.yaml").write_text(frozen.dump(config, composed.config))
    return config


def again(devices: Devices, *words: str) -> Config:
    return check(compose(words, config_file=Path("config.yaml")), devices)


def test_a_frozen_run_keeps_its_types_on_another_gpu():
    config = freeze(gpus(H100))
    assert "precision.compute: auto" in Path("config.yaml").read_text()
    assert config.precision == replace(Precision(), compute="bf16", tf32=False)
    for name in (A100, V100):
        assert again(gpus(name)).precision == config.precision
    assert again(gpus(V100), "precision=auto").precision.compute == "fp16"
    assert again(gpus(V100), "cluster=v100").precision.compute == "fp16"


def test_a_frozen_run_takes_the_type_of_another_kind_of_device():
    freeze(gpus(H100))
    assert again(gpus(H100), "launcher.device=cpu").precision.compute == "fp32"
    freeze(CPU)
    assert again(gpus(H100)).precision.compute == "fp32"  # on the CPU still
    assert again(gpus(H100), "launcher.device=cuda").precision.compute == "bf16"
    freeze(gpus(H100), "precision=fp32")
    assert again(gpus(H100), "launcher.device=cpu").precision == Precision(
        "fp32", "fp32", tf32=False
    )
    freeze(gpus(H100), "precision=bf16")
    assert again(CPU, "launcher.device=cpu").precision.compute == "bf16"

"""The health of GPUs, read through the real module of NVML from a driver that is not there."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from nanoscale.metrics.health import Health
from nanoscale.runs.metrics import known_metrics
from nanoscale.view.run.live import figures
from tests.support.fake_nvml import build_fake_nvml, fake_environment

_PROGRAM = """
import json
from nanoscale.metrics.health import Health
health = [Health(0), Health(1)]
ranks = [each.read() for each in health]
hosts = ["n1", "n2"]
found = [health[0].warnings(ranks, hosts), health[0].warnings(ranks, hosts)]
print(json.dumps([health[0].metrics(ranks), *found]))
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_fake_nvml(tmp_path_factory.mktemp("nvml"))


def read(library: Path, **settings: Any) -> tuple[dict[str, float], list[Any], list[Any]]:
    """Return the metrics of two ranks, and the hosts and sentences of their warnings at two logged steps."""
    environment = os.environ | fake_environment(library, gpus=2, **settings)
    done = subprocess.run(
        [sys.executable, "-c", _PROGRAM], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    metrics, first, second = json.loads(done.stdout)
    return metrics, first, second


def test_the_figures_of_healthy_gpus(library: Path) -> None:
    metrics, first, _ = read(library, utilization="90,100", temperature="55,61", used_gib=70)
    assert metrics == {
        "gpu_utilization": 95.0,
        "gpu_power_w": 650.0,
        "gpu_temperature_c": 61.0,
        "gpu_clock_mhz": 1980.0,
        "gpu_memory_gib": 70.0,
        "gpus_slowed": 0.0,
    }
    assert metrics.keys() <= known_metrics().keys() and first == []
    assert figures(metrics)["GPU"] == "95%, 650 W, 61 °C, 1,980 MHz"


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        (
            {"slowed": "0,0x20", "temperature": "60,91", "clock": "1980,990"},
            "the GPU of rank 1 on n2 is slowed down by heat (91 °C, 650 W, 990 MHz)",
        ),
        (
            {"ecc": "2,0"},
            "the GPU of rank 0 on n1 reports uncorrectable errors of its memory (60 °C, 650 W, 1,980 MHz)",
        ),
        ({"xid": "0,79"}, "the GPU of rank 1 on n2 reports Xid 79 (60 °C, 650 W, 1,980 MHz)"),
    ],
)
def test_a_fault_is_told_once(library: Path, settings: dict[str, str], text: str) -> None:
    metrics, first, second = read(library, **settings)
    assert (first, second) == ([[text.split()[6], text]], [])
    assert metrics["gpus_slowed"] == ("slowed" in settings)


def test_a_power_limit_and_a_missing_counter_are_no_faults(library: Path) -> None:
    assert read(library, slowed="0x4", ecc="-1")[1] == []


def test_a_cpu_has_no_figures_and_a_gpu_without_a_driver_unknown_ones() -> None:
    assert Health(None).read() == [] and Health(None).metrics([[], []]) == {}
    unknown = Health(0)
    figures = unknown.read()
    if all(map(math.isnan, figures)):  # there is no driver here
        assert unknown.metrics([figures]) == {} and unknown.warnings([figures], ["n1"]) == []

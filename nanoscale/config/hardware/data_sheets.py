"""The data sheets of devices: the `cluster` section, completed from `conf/cluster`. The measured speed of this
machine's CPU, and the MFU that is usual on GPUs."""

import json
import math
import os
import platform
import re
from dataclasses import fields, is_dataclass, replace
from functools import cache
from pathlib import Path
from typing import TypeVar

from nanoscale.common.cache_folder import cache_path
from nanoscale.common.devices import cores, detect
from nanoscale.common.errors import UserError
from nanoscale.common.json_text import Json, parse
from nanoscale.config.composing.library import packaged
from nanoscale.config.model_math import parameters
from nanoscale.config.schema import Cluster, Config, Peaks, Precision, Reached
from nanoscale.config.values import yaml_file
from nanoscale.config.values.convert import to_config

CPU = "cpu"


class UnknownHardwareError(UserError):
    """The hardware is unknown, or its speed in the trained dtype is.

    A plan needs both, a launch does not.
    """


def kind(precision: Precision) -> str:
    """Return the dtype in which a block's products are computed."""
    return "fp8" if precision.fp8 else wide_kind(precision)


def wide_kind(precision: Precision) -> str:
    """Return the dtype of all products that are not computed in 8 bits."""
    return "tf32" if precision.tf32 is True else precision.compute


def peak_of(config: Config, driver_name: str | None) -> float | None:
    """Return the FLOP/s at the trained precision of the GPU with this driver's name; None if unknown.

    Without a GPU (no name), return `cluster.peak_tflops`: no maker states one for a CPU.
    """
    cluster = config.cluster
    if cluster.peak_tflops is not None:
        return cluster.peak_tflops * 1e12
    if driver_name is None:
        return None
    known = cluster.device or recognise(driver_name)
    cluster = _filled(cluster, _known(known or ""))
    peak: float | None = getattr(cluster.peaks, kind(config.precision))
    if kind(config.precision) == "tf32":
        peak = peak or cluster.peaks.fp32
    return None if peak is None else peak * 1e12


def described(config: Config) -> Cluster:
    """Return `config.cluster`, completed as far as the table has values."""
    cluster = config.cluster
    if cluster.device is not None:
        return _filled(cluster, _known(cluster.device) or Cluster(devices_per_host=8))
    if all(getattr(cluster, name) is not None for name in REQUIRED_KEYS):
        return replace(cluster, device="unnamed")
    here = detect()
    if config.launcher.device == "cuda" and here.kind == "cpu":
        raise UnknownHardwareError(
            "config",
            "cluster.device is null, and the devices are on other hosts. Name them, as in "
            f"cluster=h100-sxm; known are {known_overrides()}",
        )
    if config.launcher.device == "cpu" or here.kind == "cpu":
        cpu = _known(CPU)
        assert cpu is not None
        speed = known_speed() or 1.0  # a factor on the assumed one
        peaks = {name: value * speed for name, value in known_peaks(cpu).items()}
        memory = cpu.memory_gbs and cpu.memory_gbs * speed
        cpu = replace(cpu, peaks=replace(cpu.peaks, **peaks), memory_gbs=memory)
        return _this_cpu(_filled(cluster, cpu), config)
    names = sorted(set(here.names))
    known = {name: recognise(name) for name in names}
    if len(set(known.values())) != 1 or None in known.values():
        raise UnknownHardwareError(
            "config",
            f"cluster.device is null, and this machine's {' and '.join(names)} is not one known "
            f"device. Name it, as in cluster=h100-sxm; known are {known_overrides()}",
        )
    return _filled(cluster, _known(str(known[names[0]])))


def recognise(device_name: str) -> str | None:
    """Return the table's name of a device by its driver's.

    The whole name must be known, apart from the maker's words: a laptop's GPU, or a slice of one (MIG), has the
    name of a larger GPU and more.
    """
    model = _MAKER.sub("", device_name).casefold()
    for name in known_devices():
        cluster = _known(name)
        if cluster is not None and model in map(str.casefold, cluster.recognised):
            return name
    return None


_MAKER = re.compile(r"^((NVIDIA|GeForce|Tesla|AMD|Instinct) )*", re.IGNORECASE)

REQUIRED_KEYS = (
    "devices_per_host", "memory_gib", "memory_gbs", "multiprocessors", "intra_host_gbs", "inter_host_gbs",
    "host_link_gbs", "host_memory_gib",
)  # fmt: skip
"""Keys without which no machine is complete."""


@cache
def known_devices() -> tuple[str, ...]:
    folder = packaged()[0] / "cluster"
    return tuple(sorted({path.stem for path in folder.glob("*.yaml")} - {"local"}))


@cache
def _known(name: str) -> Cluster | None:
    """Return the table's entry; None if it has none of that name."""
    if name not in known_devices():
        return None
    read = yaml_file.read(packaged()[0] / "cluster" / f"{name}.yaml")
    return to_config({"cluster": read.content}, read.source).cluster


def known_overrides() -> str:
    return ", ".join(f"cluster={name}" for name in known_devices())


_Section = TypeVar("_Section", Cluster, Peaks, Reached)


def _filled(own: _Section, table: _Section | None) -> _Section:
    """Return `own` completed with the table's values, including nested sections."""
    if table is None:
        return own
    values: Json = {}
    for field in fields(own):
        value, default = getattr(own, field.name), getattr(table, field.name)
        if is_dataclass(value):
            values[field.name] = _filled(value, default)
        elif value is None or value == [] or value == {}:
            values[field.name] = default
    return replace(own, **values)


def known_peaks(cluster: Cluster) -> dict[str, float]:
    """Return the peaks that are not null, by dtype."""
    return {name: value for name, value in vars(cluster.peaks).items() if value is not None}


def _this_cpu(cluster: Cluster, config: Config) -> Cluster:
    """Return a rank's share of this host's memory and cores, if they are known here.

    More threads than cores take turns.
    """
    ranks, threads = config.launcher.devices, config.launcher.threads
    ranks = ranks if isinstance(ranks, int) else 1
    threads = threads if isinstance(threads, int) else 1
    own, speed = config.cluster, min(float(threads), cores() / ranks)
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30
    peaks = {
        name: getattr(own.peaks, name) or (value * speed if value else None)
        for name, value in vars(cluster.peaks).items()
    }
    return replace(
        cluster,
        devices_per_host=own.devices_per_host or ranks,
        memory_gib=own.memory_gib or total / ranks,
        memory_gbs=own.memory_gbs or (cluster.memory_gbs or 0.0) * min(1.0, speed / threads),
        host_memory_gib=own.host_memory_gib or total,
        peaks=replace(cluster.peaks, **peaks),
    )


# --- the measured speed of this machine's CPU -----------------------------------------------------

_SPEED_FILE = "cpu-speed.json"


def cpu_name() -> str:
    """Return the name of this machine's CPU, or its architecture where the kernel tells no name."""
    try:
        lines = Path("/proc/cpuinfo").read_text("utf-8").splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())


def known_speed() -> float | None:
    """Return the speed in the cache; None if none was measured, or another CPU's."""
    try:
        content = parse((cache_path(None) / _SPEED_FILE).read_text("utf-8"))
        speed, measured_on = float(content["speed"]), content["cpu"]
    except (OSError, ValueError, KeyError, TypeError, RuntimeError):
        return None
    return speed if measured_on == cpu_name() and 0 < speed < 1000 else None


def keep_speed(speed: float) -> None:
    """Write the measured speed, as a factor on the assumed one, into the cache.

    Raises:
        OSError: the folder cannot be written.
        RuntimeError: the user has no home.
    """
    path = cache_path(None) / _SPEED_FILE
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"cpu": cpu_name(), "speed": speed}) + "\n", "utf-8")


# --- the usual MFU --------------------------------------------------------------------------------

_16_BITS = ((1e9, 0.38, 0.53), (4e9, 0.37, 0.60), (20e9, 0.29, 0.56), (math.inf, 0.32, 0.56))
_8_BITS = ((20e9, 0.13, 0.29), (math.inf, 0.10, 0.43))
"""For models of at most so many parameters: the range of MFU that holds 80 % of published runs, 289 in 16 bits
and 40 in 8 bits, on A100, H100, H200, B200 and MI300X, of llm-foundry's scaling tables, Korthikanti et al. 2022
(arXiv:2205.05198), SimuMax, torchtitan, torchao, KempnerForge and NVIDIA's dgxc-benchmarking."""


def usual_mfu(config: Config) -> tuple[float, float] | None:
    """Return the lowest and highest usual MFU; None for mixtures of experts and for other dtypes."""
    bits = {"bf16": _16_BITS, "fp16": _16_BITS, "fp8": _8_BITS}.get(kind(config.precision))
    if bits is None or config.model.experts or config.model.source != "own":
        return None
    size = parameters(config.model)
    return next((low, high) for most, low, high in bits if size <= most)


def usual_mfu_text(usual: tuple[float, float] | None, planned: float = 0.0) -> str | None:
    if usual is None:
        return None
    low, high = usual
    more = "; this plan is above them, so expect less" if planned > high else ""
    return f"published runs of this size and dtype reach an MFU of {low:.0%} to {high:.0%}{more}"

"""What a job runs on, in SI units, from the `cluster` section and the data sheets of `conf/cluster`.

There is one table of devices, the YAML files of the group, which both halves read. A key of the user's own
goes before the table's; a device that is in no file must be described wholly.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

from nanoscale.common.devices import detect
from nanoscale.common.errors import UserError
from nanoscale.config.composing.library import packaged
from nanoscale.config.schema import Cluster, Config, Peaks, Precision, Reached
from nanoscale.config.values import yaml_file
from nanoscale.config.values.convert import to_config

CPU = "cpu"


class UnknownHardwareError(UserError):
    """Nobody has said what the hardware is, or what it does with the trained type.

    A plan needs that, a launch does not.
    """


_NOT_A_DEVICE = frozenset({"local"})


@dataclass(frozen=True, slots=True)
class Efficiency:
    """Shares of the maker's figures that are reached, and what a device does not promise.

    The first six are a device's own where `cluster.reached` says so.
    """

    matmul: float = 0.70
    """of the peak, large products in 16 bits or wider"""
    matmul_fp8: float = 0.60
    """of the peak, large products in 8 bits"""
    attention: float = 0.45
    """of the 16-bit peak, FlashAttention forward"""
    cudnn: float = 1.0
    """rate of cuDNN's attention over FlashAttention's, on devices for which PyTorch prefers it"""
    memory: float = 0.85
    """of the memory's bandwidth, element-wise work"""
    intra_host: float = 0.77
    """of the fast links' bandwidth, collectives"""
    inter_host: float = 0.85
    """of the network's bandwidth, collectives"""
    overlap: float = 0.189
    """of a hidden collective's time that computing loses: both use multiprocessors and memory (the mean of Lee
    et al. 2025, arXiv:2507.03114)"""
    jitter: float = 0.012
    """scatter of a host's step time, as a share of it; a step waits for the slowest host"""
    eager_s: float = 6e-6
    """to start an operation from Python, s"""
    compiled_s: float = 3e-6
    """to start a kernel of compiled code, s"""


@dataclass(frozen=True, slots=True, eq=False)
class Hardware:
    """One device, its host and its network. Compared by identity, which makes it a cheap key of caches."""

    device: str
    devices_per_host: int
    hosts: int | None
    """that there are; None: as many as the layout needs"""
    island: int
    """devices that the fast links join"""
    memory_gib: float
    """of a device, as torch sees it, GiB"""
    context_gib: float
    """of it, taken outside of torch's allocator, GiB"""
    memory_bandwidth: float
    """B/s"""
    multiprocessors: int
    peaks: dict[str, float]
    """dense peak by type of number, FLOP/s"""
    intra_bandwidth: float
    """fast links, a device and direction, B/s"""
    intra_latency: float
    """of a step, s"""
    inter_bandwidth: float
    """network, a device and direction, B/s"""
    inter_latency: float
    """of a step, s"""
    host_bandwidth: float
    """between a device and its host's memory, a direction, B/s"""
    host_memory_gib: float
    """of a host, GiB"""
    host_memory_bandwidth: float
    """of a host, B/s"""
    price: float | None
    """of a device for an hour"""
    efficiency: Efficiency

    def peak(self, precision: Precision) -> float:
        """FLOP/s at the trained precision."""
        return self.peaks[kind(precision)]


def kind(precision: Precision) -> str:
    """The type of number in which a block's products are computed."""
    return "fp8" if precision.fp8 else wide_kind(precision)


def wide_kind(precision: Precision) -> str:
    """The type of all products that are not computed in 8 bits."""
    return "tf32" if precision.tf32 is True else precision.compute


def hardware_of(config: Config) -> Hardware:
    """What `config.cluster` describes, the gaps filled from the table.

    Raises:
        UserError: the device is unknown, is not described wholly, or lacks the trained type.
    """
    if config.model.source == "hf":
        raise UnknownHardwareError(
            "config",
            "model=hf: what memory and time a model of transformers takes is not predicted; `nanoscale train` "
            "launches it without a plan",
        )
    cluster = described(config)
    missing = [f"cluster.{name}" for name in _NEEDED if getattr(cluster, name) is None]
    if missing:
        name = cluster.device or "the device"
        raise UserError(
            "config",
            f"{name} is in no file of the group cluster, and these keys of it are null: "
            f"{', '.join(missing)}. Set them, or take one that is known: {_known_words()}",
        )
    if config.lora.rank:
        raise UnknownHardwareError(
            "config",
            f"lora.rank={config.lora.rank}: what memory and time the training of adapters takes is not "
            "predicted; `nanoscale train` launches it without a plan",
        )
    peaks = {
        field.name: value * 1e12
        for field in fields(cluster.peaks)
        if (value := getattr(cluster.peaks, field.name)) is not None
    }
    trained = kind(config.precision)
    if trained == "tf32" and "fp32" in peaks:
        peaks.setdefault("tf32", peaks["fp32"])
    if cluster.peak_tflops is not None:
        peaks[trained] = cluster.peak_tflops * 1e12
    if trained not in peaks and trained != "auto":  # that is resolved for the devices, later
        raise UnknownHardwareError(
            "config",
            f"cluster.peaks.{trained} is null: {cluster.device} has no products in {trained} that are known. "
            f"Type one of: {', '.join(f'precision={p}' for p in peaks if p != 'tf32')}, or "
            f"cluster.peaks.{trained}=TFLOP/s",
        )
    return _in_si(cluster, peaks, _efficiency(cluster))


def peak_of(config: Config, driver_name: str | None) -> float | None:
    """FLOP/s at the trained precision of the GPU that a driver calls so; None where nobody knows.

    Without a GPU (no name) it is what `cluster.peak_tflops` says: nobody promises one of a CPU.
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
    """`config.cluster` with the gaps filled as far as the table knows."""
    cluster = config.cluster
    if cluster.device is not None:
        return _filled(cluster, _known(cluster.device))
    if all(getattr(cluster, name) is not None for name in _NEEDED):
        return replace(cluster, device="unnamed")
    here = detect()
    if config.launcher.device == "cuda" and here.kind == "cpu":
        raise UnknownHardwareError(
            "config",
            "cluster.device is null, and the devices are on other hosts. Type what they are, as in "
            f"cluster=h100-sxm; known are {_known_words()}",
        )
    if config.launcher.device == "cpu" or here.kind == "cpu":
        return _this_cpu(_filled(cluster, _known(CPU)), config)
    names = sorted(set(here.names))
    known = {name: recognise(name) for name in names}
    if len(set(known.values())) != 1 or None in known.values():
        raise UnknownHardwareError(
            "config",
            f"cluster.device is null, and this machine's {' and '.join(names)} is no one known device. "
            f"Type what it is, as in cluster=h100-sxm; known are {_known_words()}",
        )
    return _filled(cluster, _known(str(known[names[0]])))


def recognise(device_name: str) -> str | None:
    """The table's name of a device by its driver's: the longest part that it contains decides."""
    found = [
        (len(part), name)
        for name in known_devices()
        if (cluster := _known(name)) is not None
        for part in cluster.recognised
        if part.lower() in device_name.lower()
    ]
    return max(found)[1] if found else None


_NEEDED = (
    "devices_per_host", "memory_gib", "memory_gbs", "multiprocessors", "intra_host_gbs", "inter_host_gbs",
    "host_link_gbs", "host_memory_gib",
)  # fmt: skip
"""keys without which no machine is described"""


@cache
def known_devices() -> tuple[str, ...]:
    """The devices of the table, by name."""
    folder = packaged()[0] / "cluster"
    return tuple(sorted({path.stem for path in folder.glob("*.yaml")} - _NOT_A_DEVICE))


@cache
def _known(name: str) -> Cluster | None:
    """The table's entry; None where it has none of that name."""
    if name not in known_devices():
        return None
    read = yaml_file.read(packaged()[0] / "cluster" / f"{name}.yaml")
    return to_config({"cluster": read.content}, read.source).cluster


def _known_words() -> str:
    return ", ".join(f"cluster={name}" for name in known_devices())


_Section = TypeVar("_Section", Cluster, Peaks, Reached)


def _filled(own: _Section, table: _Section | None) -> _Section:
    """`own` with the table's values where it has none; sections within are filled the same way."""
    if table is None:
        return own
    values: dict[str, Any] = {}
    for field in fields(own):
        mine, theirs = getattr(own, field.name), getattr(table, field.name)
        if is_dataclass(mine):
            values[field.name] = _filled(mine, theirs)
        elif mine is None or mine == [] or mine == {}:
            values[field.name] = theirs
    return replace(own, **values)


def _this_cpu(cluster: Cluster, config: Config) -> Cluster:
    """A rank's share of this host's memory and cores, where they are known here."""
    ranks, threads = config.launcher.devices, config.launcher.threads
    ranks = ranks if isinstance(ranks, int) else 1
    threads = threads if isinstance(threads, int) else 1
    own = config.cluster
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30
    peaks = {
        field.name: getattr(own.peaks, field.name) or (value * threads if value else None)
        for field in fields(cluster.peaks)
        for value in [getattr(cluster.peaks, field.name)]
    }
    return replace(
        cluster,
        devices_per_host=own.devices_per_host or ranks,
        memory_gib=own.memory_gib or total / ranks,
        host_memory_gib=own.host_memory_gib or total,
        peaks=replace(cluster.peaks, **peaks),
    )


def _in_si(cluster: Cluster, peaks: dict[str, float], efficiency: Efficiency) -> Hardware:
    def number(name: str, usual: float = 0.0) -> float:
        value = getattr(cluster, name)
        return usual if value is None else float(value)

    assert cluster.devices_per_host is not None and cluster.multiprocessors is not None
    return Hardware(
        device=cluster.device or "unnamed",
        devices_per_host=cluster.devices_per_host,
        hosts=cluster.hosts,
        island=cluster.island or cluster.devices_per_host,
        memory_gib=number("memory_gib"),
        context_gib=number("context_gib", 1.0),
        memory_bandwidth=number("memory_gbs") * 1e9,
        multiprocessors=cluster.multiprocessors,
        peaks=peaks,
        intra_bandwidth=number("intra_host_gbs") * 1e9,
        intra_latency=number("intra_host_us", 3.4) * 1e-6,
        inter_bandwidth=number("inter_host_gbs") * 1e9,
        inter_latency=number("inter_host_us", 14.0) * 1e-6,
        host_bandwidth=number("host_link_gbs") * 1e9,
        host_memory_gib=number("host_memory_gib"),
        host_memory_bandwidth=number("host_memory_gbs", 200.0) * 1e9,
        price=cluster.price,
        efficiency=efficiency,
    )


def _efficiency(cluster: Cluster) -> Efficiency:
    """What is usual, then what the device's description says, then what was measured."""
    reached = cluster.reached
    own = {field.name: getattr(reached, field.name) for field in fields(reached)}
    cudnn = own.pop("attention_cudnn")
    if cudnn is not None:
        own["cudnn"] = cudnn / (reached.attention or Efficiency().attention)
    usual = replace(
        Efficiency(), **{name: value for name, value in own.items() if value is not None}
    )
    if cluster.efficiency is None:
        return usual
    return replace(usual, **_measured(cluster.efficiency, cluster.device))


def _measured(path: str, device: str | None) -> dict[str, float]:
    """What `plan --calibrate` has written, `{"efficiency": {"matmul": 0.71}, "device": "h100-sxm"}`; other keys
    are for people."""
    try:
        content = json.loads(Path(path).read_text(encoding="utf-8"))
        values = {name: float(value) for name, value in content["efficiency"].items()}
        of = content.get("device", device)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(
            "config",
            f"cluster.efficiency={path} is no file of efficiencies ({error}); it holds "
            '{"efficiency": {"matmul": 0.7}}. Type cluster.efficiency=null to go without',
        ) from None
    if of != device:
        raise UserError(
            "config",
            f"cluster.efficiency={path} was learned on {of}, and the device is {device}. Type "
            "cluster.efficiency=null to go without",
        )
    known = {field.name for field in fields(Efficiency)}
    wrong = sorted(name for name in values if name not in known or not 0 < values[name] < 10)
    if wrong:
        raise UserError(
            "config",
            f"cluster.efficiency={path} holds {', '.join(wrong)}, which is no efficiency or not above 0; "
            f"known are {', '.join(sorted(known))}. Type cluster.efficiency=null to go without",
        )
    return values

"""The health of this rank's GPU, as its driver reports it. Unknown figures are NaN.

The figures of all ranks become metrics of a logged step, and what is wrong with a GPU becomes a sentence.
"""

import math
from collections.abc import Callable, Sequence
from statistics import fmean
from typing import Any

from nanoscale.common.devices import gpu_uuids

_SLOWED = {
    0x08: "its hardware",
    0x20: "heat",
    0x40: "heat, by its hardware",
    0x80: "its power supply",
}
"""The reasons for a slower clock that are faults, by NVML's bit. A power limit is not one."""
_METRICS: dict[str, Callable[[Sequence[float]], float]] = {
    "gpu_utilization": fmean,
    "gpu_power_w": fmean,
    "gpu_temperature_c": max,
    "gpu_clock_mhz": min,
    "gpu_memory_gib": max,
}
"""The metrics, in the order of the first figures, and what is logged of all ranks."""


class Health:
    """The driver's view of one GPU; on a CPU there are no figures."""

    def __init__(self, index: int | None) -> None:
        """Open NVML for the GPU with this number among CUDA's visible GPUs; None: a CPU."""
        self._queries: list[Callable[[], float]] = []
        self._named: set[tuple[int, str]] = set()
        if index is not None:
            self._queries = [lambda: math.nan] * (len(_METRICS) + 3)
            uuids = gpu_uuids()
            if index < len(uuids):
                self._open(uuids[index])

    def _open(self, uuid: str) -> None:
        import pynvml as nvml

        try:
            nvml.nvmlInit()
            gpu = nvml.nvmlDeviceGetHandleByUUID(uuid)
        except nvml.NVMLError:
            return
        uncorrected = nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC
        queries: list[Callable[[], float]] = [
            lambda: nvml.nvmlDeviceGetUtilizationRates(gpu).gpu,
            lambda: nvml.nvmlDeviceGetPowerUsage(gpu) / 1e3,
            lambda: nvml.nvmlDeviceGetTemperature(gpu, nvml.NVML_TEMPERATURE_GPU),
            lambda: nvml.nvmlDeviceGetClockInfo(gpu, nvml.NVML_CLOCK_SM),
            lambda: nvml.nvmlDeviceGetMemoryInfo(gpu).used / 2**30,
            lambda: nvml.nvmlDeviceGetCurrentClocksThrottleReasons(gpu),
            lambda: nvml.nvmlDeviceGetTotalEccErrors(gpu, *uncorrected),
            _xid_reader(nvml, gpu),
        ]

        def known(query: Callable[[], float]) -> float:
            try:
                return float(query())
            except nvml.NVMLError:  # this GPU does not report it
                return math.nan

        self._queries = [lambda query=query: known(query) for query in queries]  # type: ignore[misc]

    def read(self) -> list[float]:
        """Return this rank's figures, equally many on every rank of a job."""
        return [query() for query in self._queries]

    def metrics(self, ranks: Sequence[Sequence[float]]) -> dict[str, float]:
        """Return the metrics of a step from the figures of all ranks, without unknown ones."""
        if not self._queries:
            return {}
        found: dict[str, float] = {}
        for at, (name, summary) in enumerate(_METRICS.items()):
            if values := [rank[at] for rank in ranks if not math.isnan(rank[at])]:
                found[name] = summary(values)
        if found:
            found["gpus_slowed"] = float(sum(bool(_reasons(rank)) for rank in ranks))
        return found

    def warnings(
        self, ranks: Sequence[Sequence[float]], hosts: Sequence[str]
    ) -> list[tuple[str, str]]:
        """Return the host of each new fault and a sentence on it, given the figures and host of each rank."""
        found = []
        for number, figures in enumerate(ranks if self._queries and hosts else []):
            faults = [f"is slowed down by {reason}" for reason in _reasons(figures)]
            errors, xid = figures[-2:]
            faults += ["reports uncorrectable errors of its memory"] if errors > 0 else []
            faults += [f"reports Xid {xid:.0f}"] if xid > 0 else []
            new = [fault for fault in faults if (number, fault) not in self._named]
            self._named |= {(number, fault) for fault in new}
            state = f"{figures[2]:.0f} °C, {figures[1]:.0f} W, {figures[3]:,.0f} MHz"
            where = f"the GPU of rank {number} on {hosts[number]}"
            found += [(hosts[number], f"{where} {fault} ({state})") for fault in new]
        return found


def _reasons(figures: Sequence[float]) -> list[str]:
    bits = 0 if math.isnan(figures[-3]) else int(figures[-3])
    return [reason for bit, reason in _SLOWED.items() if bits & bit]


def _xid_reader(nvml: Any, gpu: Any) -> Callable[[], float]:
    """Return a function that returns the last Xid since its previous call; 0: none."""
    events = None

    def read() -> float:
        nonlocal events
        if events is None:
            events = nvml.nvmlEventSetCreate()
            nvml.nvmlDeviceRegisterEvents(gpu, nvml.nvmlEventTypeXidCriticalError, events)
        try:
            return float(nvml.nvmlEventSetWait_v2(events, 0).eventData)
        except nvml.NVMLError_Timeout:
            return 0.0

    return read

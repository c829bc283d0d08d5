"""The time of operations and collectives that a rehearsal has recorded, by the plan's own efficiencies."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from nanoscale.config.hardware.data_sheets import wide_kind
from nanoscale.config.resolved import ResolvedConfig
from nanoscale.plan.hardware.hardware import Hardware
from nanoscale.plan.time import collectives, operations
from nanoscale.plan.time.block import ROWWISE, attention_kernel

_CALL_STARTS = 3
"""Starts of operations that the host's part of a collective costs: checks, streams and events around it."""
Call = Mapping[str, Any]


@dataclass(frozen=True)
class PlayedCosts:
    """The costs of one job's recorded work on its hardware."""

    config: ResolvedConfig
    hardware: Hardware

    @property
    def host_start(self) -> float:
        """The seconds of the host for an operation; on a CPU they are in the operation's own."""
        if self.on_cpu:
            return 0.0
        efficiency = self.hardware.efficiency
        compiled = self.config.backend.compile == "on"
        return efficiency.compiled_s if compiled else efficiency.eager_s

    @property
    def on_cpu(self) -> bool:
        return self.config.launcher.device == "cpu"

    @property
    def call_start(self) -> float:
        return _CALL_STARTS * self.hardware.efficiency.eager_s

    def seconds(self, work: Sequence[Any]) -> float:
        """Return the device's seconds of an operation (`rehearse.played.work`)."""
        # A CPU is the host, too.
        return self._computed(work) + (self.hardware.efficiency.eager_s if self.on_cpu else 0.0)

    def _computed(self, work: Sequence[Any]) -> float:
        what, name, *numbers = work
        if what == "product":
            kind, *sizes, aligned = numbers
            seconds = operations.product(self.hardware, self._kind(kind), *sizes, aligned)
            return seconds * (ROWWISE if name == "_scaled_grouped_mm" else 1.0)
        if what == "attention":
            kind, *shape, causal, backward = numbers
            limited = name.startswith(("attention", "_flash_attention"))
            kernel = "flash" if limited else attention_kernel(self.config)
            seconds = operations.attention(self.hardware, self._kind(kind), *shape, causal, kernel)
            return seconds * (operations.BACKWARD_ATTENTION if backward else 1.0)
        if what == "copy":
            return float(numbers[0]) / self.hardware.host_bandwidth + operations.FILL
        return operations.elementwise(self.hardware, numbers[0]) + operations.FILL

    def _kind(self, kind: str) -> str:
        """Return the kind of a product: fp32 ones may be computed in tf32."""
        if kind == "fp32" and wide_kind(self.config.precision) == "tf32":
            kind = "tf32"
        return kind if kind in self.hardware.peaks else wide_kind(self.config.precision)

    def slowdown(self, call: Call) -> float:
        """Return the seconds that computation loses for each second of a collective that it hides."""
        hardware, size = self.hardware, float(call["bytes"])
        ranks = _group(hardware.island, hardware.pod, *call["ranks"])
        seconds, copying = collectives.with_copying(hardware, ranks, size)
        return 0.0 if self.on_cpu else hardware.efficiency.overlap * copying / (seconds or 1.0)

    def call(self, call: Call) -> float:
        """Return the seconds of a collective or message, from the moment at which all its ranks are ready."""
        hardware, name, size = self.hardware, call["kind"].strip("_"), float(call["bytes"])
        ranks = _group(hardware.island, hardware.pod, *call["ranks"])
        if name in ("send", "recv"):
            return collectives.send(hardware, ranks, size)
        if "all" in name and "to" in name:
            sent = max(sum(call["sent"]), sum(call["received"])) or size
            return collectives.all_to_all(hardware, ranks, float(sent))
        if name.startswith(("allreduce", "all_reduce")):
            return collectives.all_reduce(hardware, ranks, size)
        return collectives.all_gather(hardware, ranks, size)


@cache
def _group(island: int, pod: int | None, *members: int) -> collectives.AxisRanks:
    """Return the group of these ranks, by the number in the first rank's island and pod."""
    first = members[0]
    inside = sum(rank // island == first // island for rank in members)
    if pod is None:
        return collectives.AxisRanks(len(members), inside)
    near = sum(rank // pod == first // pod for rank in members)
    return collectives.AxisRanks(len(members), inside, None if near == len(members) else near)

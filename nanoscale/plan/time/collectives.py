"""The time of collectives on a group of ranks, by the positions of these.

Sources: the ring algorithms' costs are Thakur, Rabenseifner & Gropp 2005 (Optimization of Collective
Communication Operations in MPICH), sections 3.1 and 3.4, with latency as α and time per byte as β; the
bandwidth of a ring is counted as the bus bandwidth of NCCL's tests (nccl-tests, PERFORMANCE.md).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from nanoscale.plan.hardware.hardware import Hardware

START = 20e-6
"""Seconds until the kernels of a collective run on every rank and have met."""
SLICE = 6e-6
"""Seconds that a rank of a ring, in addition to the link's latency, waits for a full slice of data before it
passes it on. With it the times of all-reduces of 16 MB to 1 GB on 8 A100s (Azure's AI benchmarking guide, ND
A100 v4) and gathers on 8 B200s (SimuMax's 9.2 and 8.0 µs a hop, in addition to 23 to 26 µs once) match the
measurements."""

_MESSAGES = 0.87
"""The share of a ring's bandwidth that messages between pairs reach inside a host: on A100s 195 GB/s
(sendrecv_perf) of 231, on B200s 0.60 (all to all) of 0.67."""


@dataclass(frozen=True, slots=True)
class AxisRanks:
    """The ranks of one axis: `size` of them, each `stride` ranks after the one before."""

    size: int
    inside: int
    """The number of them joined by fast links."""
    pod: int | None = None
    """The number of them in one pod; None: all."""

    @property
    def islands(self) -> float:
        return self.size / self.inside


@lru_cache(maxsize=4096)
def group(hardware: Hardware, size: int, stride: int) -> AxisRanks:
    """Return the group of an axis's ranks; those of tp have stride 1 and fill hosts first."""
    inside = max(1, min(size, hardware.island // stride))
    if hardware.pod is None or size * stride <= hardware.pod:
        return AxisRanks(size, inside)
    return AxisRanks(size, inside, max(1, hardware.pod // stride))


def all_gather(hardware: Hardware, ranks: AxisRanks, size: float) -> float:
    """Return the seconds until every rank has all of `size` bytes; a reduce-scatter of as many takes as long.

    Every rank receives (n - 1) / n of them over its fast links. Between islands the ranks of one share its
    adapters: (n - inside) / n of the bytes enter each island through as many adapters as it has ranks in the
    group.
    """
    if ranks.size == 1:
        return 0.0
    return max(_levels(hardware, ranks, size)) + _latency(hardware, ranks, size)


def _levels(hardware: Hardware, ranks: AxisRanks, size: float) -> tuple[float, float, float]:
    """Return the seconds of a gather's bytes over the fast links, between hosts, and between pods."""
    efficiency = hardware.efficiency
    inside = size * (ranks.size - 1) / ranks.size
    fast = hardware.intra_bandwidth * efficiency.intra_host
    hosts = hardware.inter_bandwidth * efficiency.inter_host * ranks.inside
    pod = ranks.pod or ranks.size
    pods = hardware.pod_bandwidth * efficiency.inter_host * pod
    return (
        inside / fast if ranks.inside > 1 else 0.0,
        size * (ranks.size - ranks.inside) / ranks.size / hosts,
        size * (ranks.size - pod) / ranks.size / pods,
    )


def device_share(hardware: Hardware, ranks: AxisRanks) -> float:
    """Return the share of a gather's time in which the device itself copies, at the rate of its fast links.

    In the rest of the time the device waits for the network, and computing beside it loses nothing.
    """
    if ranks.inside == ranks.size:
        return 1.0
    fast = hardware.intra_bandwidth * hardware.efficiency.intra_host
    inside = (ranks.size - 1) / ranks.size / fast
    return min(1.0, inside / max(_levels(hardware, ranks, 1.0)))


def reduce_scatter(hardware: Hardware, ranks: AxisRanks, size: float) -> float:
    """Return the seconds until every rank has its shard of the sum of `size` bytes."""
    return all_gather(hardware, ranks, size)


def all_reduce(hardware: Hardware, ranks: AxisRanks, size: float) -> float:
    """Return the seconds until every rank has the whole sum: a reduce-scatter and an all-gather."""
    return 2 * all_gather(hardware, ranks, size) - (START if ranks.size > 1 else 0.0)


def all_to_all(hardware: Hardware, ranks: AxisRanks, size: float) -> float:
    """Return the seconds until every rank has sent an n-th of its `size` bytes to every other."""
    if ranks.size == 1:
        return 0.0
    near, across = ((ranks.inside - 1) / ranks.size, (ranks.size - ranks.inside) / ranks.size)
    return exchange(hardware, ranks, size * near, size * across)


def exchange(hardware: Hardware, ranks: AxisRanks, near: float, across: float) -> float:
    """Return the seconds until every rank has sent `near` bytes over its fast links and `across` over the
    network."""
    efficiency = hardware.efficiency
    seconds = near / (hardware.intra_bandwidth * efficiency.intra_host * _MESSAGES)
    seconds = max(seconds, across / (hardware.inter_bandwidth * efficiency.inter_host))
    if ranks.pod is not None:
        beyond = across * (ranks.size - ranks.pod) / (ranks.size - ranks.inside)
        seconds = max(seconds, beyond / (hardware.pod_bandwidth * efficiency.inter_host))
    # Every peer's message is set up separately.
    peers = (ranks.inside - 1) * hardware.intra_latency
    across_latency = hardware.inter_latency if ranks.inside < ranks.size else 0.0
    return seconds + START + peers + across_latency


def send(hardware: Hardware, ranks: AxisRanks, size: float) -> float:
    """Return the seconds for `size` bytes from a rank to its neighbor in the group, the slowest of these."""
    efficiency = hardware.efficiency
    if ranks.inside == ranks.size:
        seconds = size / (hardware.intra_bandwidth * efficiency.intra_host * _MESSAGES)
    else:
        network = hardware.inter_bandwidth if ranks.pod is None else hardware.pod_bandwidth
        seconds = size / (network * efficiency.inter_host)
    return seconds + START + _step_latency(hardware, ranks)


def _latency(hardware: Hardware, ranks: AxisRanks, size: float) -> float:
    """Return the latency of a ring: n - 1 steps, of which as many cross the network as there are islands but
    one.

    A rank's chunk is passed on in slices; a smaller chunk is waited for by half.
    """
    hops = ranks.islands - 1
    part = size / ranks.size / (hardware.intra_bandwidth * hardware.efficiency.intra_host)
    inside = hardware.intra_latency + min(SLICE, part / 2)
    return START + hops * hardware.inter_latency + (ranks.size - 1 - hops) * inside


def _step_latency(hardware: Hardware, ranks: AxisRanks) -> float:
    return hardware.intra_latency if ranks.inside == ranks.size else hardware.inter_latency

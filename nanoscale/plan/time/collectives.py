"""The time of collectives on a group of ranks, by the ranks' hosts and pods.

Sources: the costs of ring algorithms are from Thakur, Rabenseifner & Gropp 2005 (Optimization of Collective
Communication Operations in MPICH), sections 3.1 and 3.4, with latency as α and time per byte as β. A ring's
bandwidth is the bus bandwidth of NCCL's tests (nccl-tests, PERFORMANCE.md).
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

from nanoscale.plan.hardware.hardware import Hardware

START = 20e-6
"""Seconds until the kernels of a collective have started and synchronized on every rank."""
SLICE = 6e-6
"""Seconds until a rank of a ring has received a full slice of data and can send the slice on, in addition to
the link's latency. Fitted to all-reduces of 16 MB to 1 GB on 8 A100s (Azure's AI benchmarking guide, ND A100
v4) and to gathers on 8 B200s (SimuMax: 9.2 and 8.0 µs for each hop, plus 23 to 26 µs for each collective)."""

_MESSAGES = 0.87
"""The bandwidth of messages between two ranks of a host over a ring's: on A100s 195 GB/s (sendrecv_perf)
to 231 GB/s, on B200s 0.60 (all to all) to 0.67 of the peak."""


@dataclass(frozen=True, slots=True)
class AxisRanks:
    """The ranks of one axis, for example the data-parallel ranks of one replica group."""

    size: int
    """The number of ranks in the group."""
    inside: int
    """The number of the group's ranks in one island, which fast links join."""
    pod: int | None = None
    """The number of the group's ranks in one pod; None: all."""

    @property
    def islands(self) -> float:
        return self.size / self.inside


@lru_cache(maxsize=4096)
def group(hardware: Hardware, size: int, stride: int) -> AxisRanks:
    """Return the group of `size` ranks whose numbers differ by `stride`. tp, of stride 1, fills hosts."""
    inside = max(1, min(size, hardware.island // stride))
    if hardware.pod is None or size * stride <= hardware.pod:
        return AxisRanks(size, inside)
    return AxisRanks(size, inside, max(1, hardware.pod // stride))


def all_gather(hardware: Hardware, ranks: AxisRanks, size: float) -> float:
    """Return the seconds until every rank has all `size` bytes. A reduce-scatter of `size` bytes takes as long.

    Every rank receives size · (n - 1) / n bytes over its fast links. Every island receives
    size · (n - inside) / n bytes over the network adapters of its `inside` ranks.
    """
    if ranks.size == 1:
        return 0.0
    efficiency = hardware.efficiency
    fast = hardware.intra_bandwidth * efficiency.intra_host
    hosts = hardware.inter_bandwidth * efficiency.inter_host * ranks.inside
    pod = ranks.pod or ranks.size
    pods = hardware.pod_bandwidth * efficiency.inter_host * pod
    transfer = max(
        (ranks.size - 1) / fast if ranks.inside > 1 else 0.0,
        (ranks.size - ranks.inside) / hosts,
        (ranks.size - pod) / pods,
    )
    return transfer * size / ranks.size + _latency(hardware, ranks, size)


def all_reduce(hardware: Hardware, ranks: AxisRanks, size: float) -> float:
    """Return the seconds until every rank has the whole sum: a reduce-scatter and an all-gather."""
    return 2 * all_gather(hardware, ranks, size) - (START if ranks.size > 1 else 0.0)


def with_copying(
    hardware: Hardware, ranks: AxisRanks, size: float, collective: Callable[..., float] = all_gather
) -> tuple[float, float]:
    """Return the seconds of a collective, and those in which the device copies: its time on fast links alone.

    In the rest of the time the device waits for the network, which does not slow down computation.
    """
    seconds = collective(hardware, ranks, size)
    return seconds, min(seconds, collective(hardware, AxisRanks(ranks.size, ranks.size), size))


def all_to_all(hardware: Hardware, ranks: AxisRanks, size: float) -> float:
    """Return the seconds until every rank has sent `size` / n bytes to each of the n ranks."""
    if ranks.size == 1:
        return 0.0
    near, across = ((ranks.inside - 1) / ranks.size, (ranks.size - ranks.inside) / ranks.size)
    return exchange(hardware, ranks, size * near, size * across)


def exchange(hardware: Hardware, ranks: AxisRanks, near: float, across: float) -> float:
    """Return the seconds until every rank has sent `near` bytes over its fast links and `across` bytes over the
    network."""
    efficiency = hardware.efficiency
    seconds = near / (hardware.intra_bandwidth * efficiency.intra_host * _MESSAGES)
    seconds = max(seconds, across / (hardware.inter_bandwidth * efficiency.inter_host))
    if ranks.pod is not None:
        beyond = across * (ranks.size - ranks.pod) / (ranks.size - ranks.inside)
        seconds = max(seconds, beyond / (hardware.pod_bandwidth * efficiency.inter_host))
    # A rank sends one message to each peer, and waits for the network once.
    across_latency = hardware.inter_latency if ranks.inside < ranks.size else 0.0
    return seconds + START + (ranks.size - 1) * hardware.intra_latency + across_latency


def send(hardware: Hardware, ranks: AxisRanks, size: float) -> float:
    """Return the seconds to send `size` bytes to the next rank of the group, over the group's slowest link."""
    efficiency = hardware.efficiency
    if ranks.inside == ranks.size:
        seconds = size / (hardware.intra_bandwidth * efficiency.intra_host * _MESSAGES)
        return seconds + START + hardware.intra_latency
    network = hardware.inter_bandwidth if ranks.pod is None else hardware.pod_bandwidth
    return size / (network * efficiency.inter_host) + START + hardware.inter_latency


def _latency(hardware: Hardware, ranks: AxisRanks, size: float) -> float:
    """Return the latency of a ring of n ranks: n - 1 steps, `islands` - 1 of which cross the network.

    A rank sends its chunk in slices. A step inside an island also takes the time of one slice, or half of the
    chunk's time if that is shorter.
    """
    network = ranks.islands - 1
    chunk = size / ranks.size / (hardware.intra_bandwidth * hardware.efficiency.intra_host)
    inside = hardware.intra_latency + min(SLICE, chunk / 2)
    return START + network * hardware.inter_latency + (ranks.size - 1 - network) * inside

"""The speed of the network between ranks: all-reduces of rising size, then messages between two at a time.

A time is the median of several repetitions after a warm-up; for an all-reduce it is the slowest rank's. All
ranks take the same decisions, on gathered numbers, so no rank waits for one that has stopped.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import combinations
from statistics import median
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from nanoscale.measure.host_connections import closed_ways
from nanoscale.parallel import process_group as ranks
from nanoscale.runs.directory import write_json

if TYPE_CHECKING:
    from nanoscale.runs.rank_context import RankContext

_GROWTH = 4
SIZES = tuple((1 << 10) * _GROWTH**step for step in range(9))
"""Bytes of an all-reduce, 1 KiB to 64 MiB."""
ALL_PAIRS = 8
"""Up to this many ranks, every pair is measured; beyond it, only neighbors in a ring."""
_MESSAGE = {"cpu": 1 << 22, "cuda": 1 << 26}
"""Bytes of a message, enough that its latency is negligible."""
_PING = 8
_BACKEND = {"cpu": "gloo", "cuda": "nccl"}
_SLOW = 0.5
"""The share of the median bandwidth below which a pair is slow."""

_ALL_REDUCE_S = 2.0
_PAIRS_S = 3.0
_WARM_UP, _LEAST, _MOST = 2, 3, 100
"""Numbers of repetitions."""


@dataclass(frozen=True)
class AllReduceTime:
    """The time of all-reduces of one size."""

    bytes: int
    seconds: float


@dataclass(frozen=True)
class PairTime:
    """The time of messages between two ranks, one way."""

    ranks: tuple[int, int]
    latency_s: float
    seconds: float
    """Seconds for a message of `message_bytes`."""


def run(context: RankContext) -> str:
    """Measure, and write the figures to the first rank's result; or return the reason why that is not
    possible."""
    closed = closed_ways(context.host)
    if closed:
        if context.rank == 0:
            write_json(context.run.result, {"closed": [asdict(way) for way in closed]})
        return "completed"
    device = ranks.local_device(context.config.launcher.device)
    ranks.join(context.world_size, device, context.config.launcher.collective_timeout_s)
    hosts = ranks.gather(context.host)
    reduced = all_reduces(device, SIZES, _ALL_REDUCE_S)
    wanted = rounds(ends(hosts))
    pairs = measure_pairs(wanted, device, _PAIRS_S)
    if context.rank == 0:
        figures = {
            "closed": [],
            "backend": _BACKEND[device.type],
            "hosts": hosts,
            "all_reduce": [asdict(one) for one in reduced],
            "message_bytes": _MESSAGE[device.type],
            "pairs": [asdict(pair) for pair in pairs],
            "slow": [pair.ranks for pair in slow(pairs)],
            "left_out": sum(map(len, wanted)) - len(pairs),
        }
        write_json(context.run.result, figures)
    ranks.leave()
    return "completed"


def ends(hosts: Sequence[str]) -> list[int]:
    """Return the ranks that are measured in pairs: the first of each host, or all ranks of a single host."""
    firsts = list({host: rank for rank, host in reversed(list(enumerate(hosts)))}.values())
    return sorted(firsts) if len(firsts) > 1 else list(range(len(hosts)))


def rounds(players: Sequence[int]) -> list[list[tuple[int, int]]]:
    """Return rounds of pairs: few run one by one, many at the same time, no rank twice in a round."""
    if len(players) <= ALL_PAIRS:
        return [[pair] for pair in combinations(players, 2)]
    ring = list(zip(players, [*players[1:], players[0]], strict=True))
    if len(players) % 2:
        return [ring[:-1:2], ring[1::2], ring[-1:]]
    return [ring[::2], ring[1::2]]


# --- all together ---------------------------------------------------------------------------------


def all_reduces(device: torch.device, sizes: Sequence[int], limit_s: float) -> list[AllReduceTime]:
    """Measure each size in turn, and leave out those for which the time does not suffice."""
    began = time.perf_counter()
    found: list[AllReduceTime] = []
    for size in sizes:
        reduce = partial(dist.all_reduce, torch.zeros(size // 4, device=device))
        times = _repeat(reduce, device, limit_s / len(sizes))
        gathered = ranks.gather_numbers([*times, time.perf_counter() - began])
        slowest = gathered.amax(dim=0).tolist()
        elapsed = slowest.pop()
        found.append(AllReduceTime(size, median(slowest)))
        next_s = (_LEAST + _WARM_UP) * _GROWTH * median(slowest)
        if elapsed + next_s > 2 * limit_s:
            break
    return found


def _repeat(operation: Callable[[], object], device: torch.device, limit_s: float) -> list[float]:
    """Time as many repetitions as all ranks have time for."""
    _timed(operation, device)  # establishes connections
    once = ranks.gather_numbers([_timed(operation, device)]).max().item()
    return [_timed(operation, device) for _ in range(_count(once, limit_s))]


def _count(once_s: float, limit_s: float) -> int:
    return max(_LEAST, min(_MOST, int(limit_s / max(once_s, 1e-9))))


def _timed(operation: Callable[[], object], device: torch.device) -> float:
    """Return seconds; on a GPU by its own clock, since operations start after Python has queued them."""
    if device.type == "cuda":
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        operation()
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end)) / 1e3
    began = time.perf_counter()
    operation()
    return time.perf_counter() - began


# --- two at a time --------------------------------------------------------------------------------


def measure_pairs(
    wanted: Sequence[Sequence[tuple[int, int]]], device: torch.device, limit_s: float
) -> list[PairTime]:
    """Measure all rounds for which there is time; pairs that seem slow are measured again, alone."""
    began = time.perf_counter()
    share_s = limit_s / max(1, len(wanted))
    found: dict[tuple[int, int], PairTime] = {}
    for pairs in wanted:
        played, elapsed = _play_round(pairs, device, share_s, began)
        found |= {pair.ranks: pair for pair in played}
        if elapsed > 2 * limit_s:
            break
    for pair in slow(list(found.values()))[:ALL_PAIRS]:
        (again,), _ = _play_round([pair.ranks], device, share_s, began)
        found[pair.ranks] = min(pair, again, key=lambda one: one.seconds)
    return list(found.values())


def slow(pairs: Sequence[PairTime]) -> list[PairTime]:
    """List the pairs below half of the median bandwidth of all pairs, the slowest first."""
    if not pairs:
        return []
    usual = median(1 / pair.seconds for pair in pairs)
    found = [pair for pair in pairs if 1 / pair.seconds < _SLOW * usual]
    return sorted(found, key=lambda pair: -pair.seconds)


def _play_round(
    pairs: Sequence[tuple[int, int]], device: torch.device, limit_s: float, began: float
) -> tuple[list[PairTime], float]:
    """Measure a round; return its pairs and the time since the beginning, the same on all ranks."""
    rank = dist.get_rank()
    mine = [0.0, 0.0]
    for first, second in pairs:
        if rank in (first, second):
            peer = second if rank == first else first
            sizes = (_PING, _MESSAGE[device.type])
            mine = [_exchange(peer, rank == first, size, device, limit_s / 2) for size in sizes]
    gathered = ranks.gather_numbers([*mine, time.perf_counter() - began]).tolist()
    found = [PairTime((first, second), *gathered[first][:2]) for first, second in pairs]
    return found, max(row[2] for row in gathered)


def _exchange(peer: int, begins: bool, size: int, device: torch.device, limit_s: float) -> float:
    """Return the median seconds of a message one way: half of a round trip, by the first rank's clock."""
    data = torch.zeros(size, dtype=torch.uint8, device=device)

    def there_and_back() -> None:
        for step in (dist.send, dist.recv) if begins else (dist.recv, dist.send):
            step(data, peer)

    _timed(there_and_back, device)
    count = torch.tensor([_count(_timed(there_and_back, device), limit_s)])
    (dist.send if begins else dist.recv)(count, peer)
    return median(_timed(there_and_back, device) for _ in range(int(count))) / 2

"""The speed of the network: collectives of all ranks, all-reduces within each host, and messages between hosts.
Before that, a test that every host can connect to every other one: otherwise collective operations hang.

A time is the median of several repetitions after a warm-up, and for an all-reduce the slowest rank's. A
message's time is the lower quartile: other jobs on two hosts lengthen many of its repetitions and shorten none.
All ranks take the same decisions, on gathered numbers, so no rank waits for one that has stopped.
"""

import json
import os
import re
import socket
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from functools import partial
from pathlib import Path
from statistics import median, quantiles
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import Store, TCPStore

from nanoscale.parallel import process_group as ranks
from nanoscale.runs.directory import write_json
from nanoscale.runs.rank_context import RankContext

_GROWTH = 4
SIZES = tuple((1 << 10) * _GROWTH**step for step in range(9))
"""Bytes of an all-reduce, 1 KiB to 64 MiB."""
_LARGE = {"cpu": SIZES[-1:], "cuda": (SIZES[-1], 1 << 28, 1 << 30)}
"""Bytes of the collectives below. NVLink needs more than 64 MiB; ranks on CPUs share their memory."""
_PASSES = {"all-reduce": 2, "all-gather": 1, "reduce-scatter": 1, "all-to-all": 1}
"""The sends of a rank by collective, in units of (n - 1) / n of the data of n ranks."""
_MESSAGE = {"cpu": 1 << 22, "cuda": 1 << 26}
"""Bytes of a message, enough that its latency is negligible."""
_PING = 8
_BACKEND = {"cpu": "gloo", "cuda": "nccl"}
_SLOW = 0.5
"""The share of the median bandwidth below which a host, a pair or the network is slow."""
_FEWEST = 3
"""The fewest hosts or pairs among which one can stand out."""
_MEASURED_AGAIN = 8
"""The most slow pairs that are measured again."""
_ATTEMPTS = 3
"""The most measurements of a pair that stays slow, after its first."""

_ALL_REDUCE_S, _LARGE_S, _WITHIN_S, _EXCHANGE_S = 2.0, 0.5, 0.5, 0.5
_WARM_UP, _LEAST, _MOST = 2, 3, 100
"""Numbers of repetitions."""

_CONNECT_S = 3.0
_WAIT = timedelta(seconds=30)
_AT_ONCE = 64

Figures = dict[str, Any]
"""A row of `doctor --json`."""


def run(context: RankContext) -> str:
    """Measure, and write the figures of `doctor --json` to the first rank's result, or closed connections."""
    closed = closed_ways(context.host)
    if closed:
        if context.rank == 0:
            write_json(context.run.result, {"closed": closed})
        return "completed"
    device = ranks.local_device(context.config.launcher.device)
    with TemporaryDirectory() as folder:
        log = Path(folder) / "nccl.log"
        if "NCCL_DEBUG" not in os.environ:  # else it is the user's; NCCL reads both when it starts
            os.environ |= {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_FILE": str(log)}
        ranks.join(context.world_size, device, context.config.launcher.collective_timeout_s)
        hosts = ranks.gather(context.host)
        reduced = time_collective("all-reduce", device, SIZES, _ALL_REDUCE_S)
        large = time_large(device, reduced)
        within = measure_within(hosts, device)
        slow = needs_pairs(reduced, within)
        pairs = measure_pairs(hosts, device, reduced[-1]["bytes"]) if slow else []
        text = log.read_text("utf-8", errors="replace") if log.is_file() else ""
        used = {name for names in ranks.gather(transports(text)) for name in names}
        beside_torch = max(ranks.gather(_context_gib(device)))
        if context.rank == 0:
            figures = {
                "closed": [],
                "backend": _BACKEND[device.type],
                "transports": sorted(used),
                "ranks": len(hosts),
                "hosts": list(dict.fromkeys(hosts)),
                "all_reduce": reduced,
                "collectives": large,
                "within_hosts": within,
                "point_to_point": pairs,
                "context_gib": beside_torch,
            }
            write_json(context.run.result, figures)
        ranks.leave()
    return "completed"


def _context_gib(device: torch.device) -> float:
    """Return the device memory in use outside torch's allocator, by this and other processes; 0 on a CPU."""
    if device.type != "cuda":
        return 0.0
    free, total = torch.cuda.mem_get_info(device)
    return (total - free - torch.cuda.memory_reserved(device)) / 2**30


def transports(log: str) -> list[str]:
    """Return the transports that NCCL has chosen, such as `P2P/CUMEM` or `NET/IB/GDRDMA`, by its log."""
    found = set(re.findall(r"NCCL INFO Channel .* via (\S+)", log))
    return sorted({re.sub(r"/\d+", "", name) for name in found})


def bus_gb_s(size: int, seconds: float, count: int, passes: int = 2) -> float:
    """Return the bandwidth that each rank's link must have carried for a collective, GB/s.

    That is size / time · passes · (n - 1) / n: with any algorithm, n ranks send and receive at least (n - 1) /
    n times the data, and twice as much for an all-reduce. It can be compared with the hardware's own figure,
    for any count of ranks. NVIDIA's nccl-tests define it (doc/PERFORMANCE.md, "busbw").
    """
    return size / seconds * passes * (count - 1) / count / 1e9


def ring_rounds(players: Sequence[int]) -> list[list[tuple[int, int]]]:
    """Return rounds of pairs of neighbors in a ring: no rank is twice in a round."""
    if len(players) <= 2:
        return [[(players[0], players[1])]] if len(players) == 2 else []
    ring = list(zip(players, [*players[1:], players[0]], strict=True))
    if len(players) % 2:
        return [ring[:-1:2], ring[1::2], ring[-1:]]
    return [ring[::2], ring[1::2]]


def needs_pairs(reduced: Sequence[Figures], within: Sequence[Figures]) -> bool:
    """True if the all-reduce of all ranks is slow compared with all-reduces within hosts, or there are none."""
    usual = [one["bus_gb_s"] for one in within]
    return not usual or reduced[-1]["bus_gb_s"] < _SLOW * median(usual)


def mark_slow(rows: Sequence[Figures], speed: str) -> list[Figures]:
    """Sort rows by bandwidth, the slowest first, and mark rows below half of the median of three or more."""
    limit = _SLOW * median(row[speed] for row in rows) if len(rows) >= _FEWEST else 0.0
    marked = [row | {"slow": row[speed] < limit} for row in rows]
    return sorted(marked, key=lambda row: float(row[speed]))


# --- all together ---------------------------------------------------------------------------------


def time_large(device: torch.device, reduced: Sequence[Figures]) -> list[Figures]:
    """Measure each collective with large sizes, if the time sufficed for all sizes of the all-reduce."""
    if reduced[-1]["bytes"] < SIZES[-1] or dist.get_world_size() == 1:
        return []
    return [
        {"operation": name, **row}
        for name in _PASSES
        for row in time_collective(name, device, _LARGE[device.type], _LARGE_S)
    ]


def time_collective(
    name: str, device: torch.device, sizes: Sequence[int], limit_s: float
) -> list[Figures]:
    """Measure a collective with each size in turn, until the time does not suffice.

    A size counts the larger of a rank's two tensors, before and after the collective.
    """
    began = time.perf_counter()
    figures: list[Figures] = []
    for size in sizes:
        operation = _collective(name, size, device)
        gathered = ranks.gather_numbers(
            [*_repeat(operation, device, limit_s / len(sizes)), time.perf_counter() - began]
        )
        *slowest, elapsed = gathered.amax(dim=0).tolist()
        seconds = median(slowest)
        bus = bus_gb_s(size, seconds, len(gathered), _PASSES[name])
        figures.append({"bytes": size, "latency_us": seconds * 1e6, "bus_gb_s": bus})
        if elapsed + (_LEAST + _WARM_UP) * _GROWTH * seconds > 2 * limit_s:
            break
    return figures


def _collective(name: str, size: int, device: torch.device) -> Callable[[], object]:
    if name == "all-reduce":
        return partial(dist.all_reduce, torch.zeros(size // 4, device=device))
    shard = torch.zeros(size // 4 // dist.get_world_size(), device=device)
    whole = torch.zeros(len(shard) * dist.get_world_size(), device=device)
    if name == "all-gather":
        return partial(dist.all_gather_into_tensor, whole, shard)
    if name == "reduce-scatter":
        return partial(dist.reduce_scatter_tensor, shard, whole)
    return partial(dist.all_to_all_single, torch.empty_like(whole), whole)


def measure_within(hosts: Sequence[str], device: torch.device) -> list[Figures]:
    """Measure the largest all-reduce within each of several hosts that have several ranks, at the same time."""
    members = {host: [n for n, name in enumerate(hosts) if name == host] for host in hosts}
    several = {host: numbers for host, numbers in members.items() if len(numbers) > 1}
    if len(members) == 1 or not several:
        return []
    group = dist.new_group(members[hosts[dist.get_rank()]], use_local_synchronization=True)
    reduce = partial(dist.all_reduce, torch.zeros(SIZES[-1] // 4, device=device), group=group)
    times = ranks.gather_numbers(_repeat(reduce, device, _WITHIN_S))
    seconds = {host: median(times[several[host]].amax(dim=0).tolist()) for host in several}
    rows = [
        {"host": host, "bus_gb_s": bus_gb_s(SIZES[-1], seconds[host], len(numbers))}
        for host, numbers in several.items()
    ]
    return mark_slow(rows, "bus_gb_s")


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


def measure_pairs(hosts: Sequence[str], device: torch.device, most_bytes: int) -> list[Figures]:
    """Measure neighboring hosts in a ring; pairs that seem slow are measured again, alone."""
    size = min(most_bytes, _MESSAGE[device.type])
    rounds = ring_rounds([hosts.index(host) for host in dict.fromkeys(hosts)])
    best = {row["ends"]: row for pairs in rounds for row in _play_round(pairs, device, size)}
    for _ in range(_ATTEMPTS):
        suspects = [row["ends"] for row in mark_slow(list(best.values()), "gb_s") if row["slow"]]
        for pair in suspects[:_MEASURED_AGAIN]:
            (row,) = _play_round([pair], device, size)
            best[pair] = max(best[pair], row, key=lambda row: float(row["gb_s"]))
    rows = [row | {"ends": [hosts[rank] for rank in ends]} for ends, row in best.items()]
    return mark_slow(rows, "gb_s")


def _play_round(pairs: Sequence[tuple[int, int]], device: torch.device, size: int) -> list[Figures]:
    """Return the latency of the shortest message and the bandwidth of one of `size` bytes of each pair."""
    rank, local = dist.get_rank(), [0.0, 0.0]
    for first, second in pairs:
        if rank in (first, second):
            peer = second if rank == first else first
            local = [_exchange(peer, rank == first, n, device) for n in (_PING, size)]
    gathered = ranks.gather_numbers(local).tolist()
    return [
        {
            "ends": (first, second),
            "latency_us": gathered[first][0] * 1e6,
            "gb_s": size / gathered[first][1] / 1e9,
        }
        for first, second in pairs
    ]


def _exchange(peer: int, begins: bool, size: int, device: torch.device) -> float:
    """Return the seconds of a message one way: half of a round trip, by the first rank's clock."""
    data = torch.zeros(size, dtype=torch.uint8, device=device)

    def there_and_back() -> None:
        for step in (dist.send, dist.recv) if begins else (dist.recv, dist.send):
            step(data, peer)

    _timed(there_and_back, device)
    count = torch.tensor([_count(_timed(there_and_back, device), _EXCHANGE_S)])
    (dist.send if begins else dist.recv)(count, peer)
    return quantiles(_timed(there_and_back, device) for _ in range(int(count)))[0] / 2


# --- connections ----------------------------------------------------------------------------------


def closed_ways(name: str) -> list[dict[str, str]]:
    """Try all connections from this host. Return the failed connections of all hosts, the same on all ranks.

    Each is the `host` that tried to connect, the host and the address `to` which it did, and `why` it failed.

    All ranks must call it before they have joined a process group. The hosts are numbered by the agent:
    GROUP_RANK of GROUP_WORLD_SIZE.

    Args:
        name: the launcher's name for this host.
    """
    own, count = int(os.environ["GROUP_RANK"]), int(os.environ["GROUP_WORLD_SIZE"])
    if count == 1:
        return []
    place, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = TCPStore(place, port, is_master=False, timeout=_WAIT)
    if os.environ["LOCAL_RANK"] == "0":
        family, kind, _, _, towards = socket.getaddrinfo(place, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:  # the address on the route to the rendezvous
            probe.connect(towards)  # sends nothing
            address = str(probe.getsockname()[0])
        with socket.create_server(("", 0), family=family, backlog=count) as door:
            at = {"name": name, "address": address, "port": door.getsockname()[1]}
            store.set(f"doors/{own}", json.dumps(at))
            doors = _read_all(store, "doors", count)
            with ThreadPoolExecutor(_AT_ONCE) as pool:
                closed = [way for way in pool.map(partial(_try, name), doors) if way is not None]
            store.set(f"closed/{own}", json.dumps(closed))
            _read_all(store, "closed", count)
    found = _read_all(store, "closed", count)  # until then, all ports stay open
    return [way for ways in found for way in ways]


def _try(name: str, door: dict[str, Any]) -> dict[str, str] | None:
    try:
        socket.create_connection((door["address"], door["port"]), timeout=_CONNECT_S).close()
    except OSError as error:
        why = error.strerror or str(error)
        return {"host": name, "to": door["name"], "address": door["address"], "why": why}
    return None


def _read_all(store: Store, what: str, count: int) -> Sequence[Any]:
    keys = [f"{what}/{number}" for number in range(count)]
    store.wait(keys, _WAIT)
    return [json.loads(text) for text in store.multi_get(keys)]

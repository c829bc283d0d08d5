"""A test that every host can connect to every other one: otherwise collective operations hang."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from functools import partial
from typing import Any

from torch.distributed import Store, TCPStore

_CONNECT_S = 3.0
_WAIT = timedelta(seconds=30)
_AT_ONCE = 64


def closed_ways(name: str) -> list[dict[str, str]]:
    """Try all connections from this host, and collect those of all hosts that fail; the same on all ranks.

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
        family, address = _own_address(place)
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


def _own_address(place: str) -> tuple[int, str]:
    """Return the address of this host on the route to the rendezvous."""
    family, kind, _, _, towards = socket.getaddrinfo(place, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(towards)  # sends nothing
        return family, str(probe.getsockname()[0])

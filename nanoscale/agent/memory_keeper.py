"""The agent's part in checkpoints in memory: a folder that outlives the ranks, and its server."""

from __future__ import annotations

import json
import mmap
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from nanoscale.processes import scratch
from nanoscale.processes.lifeline import MEMORY
from nanoscale.processes.messages import Message
from nanoscale.processes.peer_files import COMMITTED, PeerFileServer
from nanoscale.runs.job_messages import HostRanks
from nanoscale.runs.memory_order import MemoryOrder, peer_of, source_of, write_order


class MemoryKeeper:
    """The keeper of this host's checkpoints in memory, from the first attempt to the end of the agent."""

    def __init__(self, key: str) -> None:
        self._key = key
        self.folder = scratch.make(str(scratch.SHARED_MEMORY))
        os.environ[MEMORY] = str(self.folder)
        self._server = PeerFileServer(self.folder, bytes.fromhex(key))

    def facts(self) -> dict[str, Any]:
        """Return the port of the server, and what is kept, with every byte compared with its sum; JSON."""
        paths = sorted(self.folder.glob(f"*{COMMITTED}"))
        with ThreadPoolExecutor() as threads:
            checked = [*threads.map(_check, paths)]
        kept = [it for it in checked if isinstance(it, dict)]
        return {
            "port": self._server.port,
            "kept": kept,
            "damaged": [it for it in checked if isinstance(it, str)],
            "switch": os.environ.get("SLURM_TOPOLOGY_ADDR", "").rpartition(".")[0],
        }

    def begin(self, host: HostRanks, order: dict[str, Any]) -> None:
        """Prepare an attempt: keep only the state that it continues from, and leave the order for the ranks.

        Args:
            order: the `memory` of the order to launch.
        """
        source = source_of(order["source"])
        kept = set()
        for path in self.folder.glob(f"*{COMMITTED}"):
            about = _read(path)
            if source and (about["attempt"], about["count"]) == (source.attempt, source.count):
                kept |= {path.name, about["file"]}
        for path in self.folder.glob("*-*.*"):
            if path.name not in kept:
                path.unlink(missing_ok=True)
        write_order(
            MemoryOrder(
                folder=str(self.folder),
                key=self._key,
                attempt=host.attempt,
                node=host.node_rank,
                nodes=host.nodes,
                ranks=len(host.ranks),
                peer=peer_of(order["peers"][host.node_rank]),
                source=source,
            )
        )


def keeper_for(order: Message, present: MemoryKeeper | None) -> MemoryKeeper | None:
    """Return the keeper for an order to prepare; None if the job keeps nothing in memory."""
    key = order.get("memory_key")
    return None if key is None else present or MemoryKeeper(key)


def _read(path: Path) -> dict[str, Any]:
    document: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return document


def _check(path: Path) -> dict[str, Any] | str:
    """Return what a rank's file is, or a sentence if its bytes have changed."""
    import xxhash

    about = {
        name: value for name, value in _read(path).items() if name not in ("tensors", "manifest")
    }
    data: Any = b""
    if about["bytes"]:
        with (path.parent / about["file"]).open("rb") as file:
            data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    content = memoryview(data)[: about["bytes"]]
    if len(content) < about["bytes"] or xxhash.xxh3_128_hexdigest(content) != about["sum"]:
        return f"rank {about['rank']} of step {about['step']}: the bytes in memory differ from their sum"
    return about

"""The agent's part in checkpoints in memory: a folder that outlives the ranks, and its server."""

import os
import shutil
from collections.abc import Sequence

from nanoscale.common.json_text import Json
from nanoscale.processes import scratch
from nanoscale.processes.lifeline import MEMORY
from nanoscale.processes.messages import Message
from nanoscale.processes.peer_files import PeerFileServer, write_committed
from nanoscale.runs import memory_order
from nanoscale.runs.directory import RunDirectory
from nanoscale.runs.job_messages import HostRanks


class MemoryKeeper:
    """The keeper of this host's checkpoints in memory, from the first attempt to the end of the agent.

    Args:
        has_peers: True if the job has other hosts, which need a server.
    """

    def __init__(self, key: str, has_peers: bool = True) -> None:
        self._key = key
        self.folder = scratch.make(str(scratch.SHARED_MEMORY))
        os.environ[MEMORY] = str(self.folder)
        self._run: RunDirectory | None = None
        self._attempt = self._node = 0
        self.lost_nodes: Sequence[int] = ()
        """The hosts of this attempt, by their numbers, that the launcher has lost since."""
        self._server = PeerFileServer(self.folder, bytes.fromhex(key)) if has_peers else None

    def facts(self) -> Json:
        """Return the port of the server (0: none) and what is kept, with every byte compared with its sum."""
        kept, damaged = memory_order.checked_files(self.folder)
        return {
            "port": self._server.port if self._server else 0,
            "kept": kept,
            "damaged": damaged,
            "switch": os.environ.get("SLURM_TOPOLOGY_ADDR", "").rpartition(".")[0],
        }

    def begin(self, run: RunDirectory, host: HostRanks, order: Json) -> None:
        """Prepare an attempt: keep only the state that it continues from, and leave the order for the ranks.

        Args:
            order: the `memory` of the order to launch.
        """
        source = memory_order.source_of(order["source"])
        self._run, self._attempt, self._node = run, host.attempt, host.node_rank
        self.lost_nodes = ()
        kept = set()
        for path, about in memory_order.committed_in(self.folder):
            if source and (about["attempt"], about["count"]) == (source.attempt, source.count):
                kept |= {path.name, about["file"]}
        for path in self.folder.glob("*-*.*"):
            if path.name not in kept:
                path.unlink(missing_ok=True)
        memory_order.write_order(
            memory_order.MemoryOrder(
                folder=str(self.folder),
                key=self._key,
                attempt=host.attempt,
                node=host.node_rank,
                nodes=host.nodes,
                ranks=len(host.ranks),
                peer=memory_order.peer_of(order["peers"][host.node_rank]),
                source=source,
            )
        )

    def rescue(self) -> None:
        """Copy the states of this host's own ranks to the disk, since this process ends, and of lost hosts.

        The next launch of the run continues from them if the hosts have copied every part.
        """
        if self._run is None:
            return
        self._run.memory.mkdir(exist_ok=True)
        copied = (self._node, *self.lost_nodes)
        for path, about in memory_order.committed_in(self.folder):
            # Of an earlier attempt there is only the state that this one began with, the same on all hosts.
            if about["attempt"] == self._attempt and about["node"] not in copied:
                continue
            target = self._run.memory / about["file"]
            temporary = target.with_suffix(f".{self.folder.name}")
            shutil.copyfile(self.folder / target.name, temporary)
            temporary.replace(target)
            write_committed(self._run.memory / path.name, path.read_bytes())


def keeper_for(order: Message, present: MemoryKeeper | None) -> MemoryKeeper | None:
    """Return the keeper for an order to prepare; None if the job keeps nothing in memory."""
    if (key := order.get("memory_key")) is None:
        return None
    keeper = present or MemoryKeeper(key, order["has_peers"])
    keeper.lost_nodes = order["lost_nodes"]
    return keeper

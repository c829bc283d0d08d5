"""A host's agent as the launcher sees it."""

from __future__ import annotations

import socket
import time
from dataclasses import dataclass, field

from nanoscale.config.machines import Host
from nanoscale.launch.fleet.processes import Process
from nanoscale.processes.messages import Message, Sender, Unpacker
from nanoscale.runs.failure import RankFailure


@dataclass
class Member:
    """One host, its agent, and how it is reached."""

    host: Host
    command: tuple[str, ...]
    process: Process | None = None
    """what started the agent, and carries the channel unless the agent called back"""
    code: int | None = None
    """how it ended for this host, where it has started the agents of others too"""
    mark: str = ""
    """in the environment of all that its agent starts"""
    answered: bool = False
    """whether anything was heard of the agent"""
    socket: socket.socket | None = None
    """by which the agent called back"""
    sender: Sender | None = None
    unpacker: Unpacker = field(default_factory=Unpacker)
    heard: float = field(default_factory=time.monotonic)
    nanoscale: str | None = None
    """the version of its agent"""
    facts: Message | None = None
    lost: RankFailure | None = None
    said_bye: bool = False
    closed_at: float | None = None
    """when the stream from it ended"""
    words: bytes = b""
    """what came over standard error, while there is no log to write it to"""

    @property
    def name(self) -> str:
        return self.host.address

    @property
    def is_there(self) -> bool:
        return self.lost is None

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
    """A host, its agent, and its connection."""

    host: Host
    command: tuple[str, ...]
    process: Process | None = None
    """The process that started the agent, and carries the channel unless the agent connected itself."""
    code: int | None = None
    """Its exit code for this host, if it started the agents of others too."""
    mark: str = ""
    """A mark in the environment of all processes that its agent starts."""
    answered: bool = False
    """True once the agent has sent anything."""
    socket: socket.socket | None = None
    """The connection that the agent opened."""
    sender: Sender | None = None
    unpacker: Unpacker = field(default_factory=Unpacker)
    heard: float = field(default_factory=time.monotonic)
    nanoscale: str | None = None
    """The version of its agent."""
    facts: Message | None = None
    lost: RankFailure | None = None
    said_bye: bool = False
    closed_at: float | None = None
    """The time when its stream ended."""
    words: bytes = b""
    """Its standard error, while there is no log to write it to."""

    @property
    def name(self) -> str:
        return self.host.address

    @property
    def is_there(self) -> bool:
        return self.lost is None

"""The connections to the agents of all hosts: the processes that start them, and their streams."""

from __future__ import annotations

import errno
import math
import os
import selectors
import socket
import time
from collections.abc import Iterator, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from nanoscale.config.machines import Host, is_here
from nanoscale.launch.fleet.processes import OrphanCleanup, Process, end_all
from nanoscale.launch.fleet.processes import members as members_of
from nanoscale.launch.transport.transport import Command, Transport
from nanoscale.processes import network
from nanoscale.processes.listener import AuthenticatedListener
from nanoscale.processes.messages import MARK, Message, Sender, Unpacker
from nanoscale.processes.session import Session
from nanoscale.runs.failure import RankFailure, agent_failure

MORE_OPEN_FILES = "raise the limit of open files: ulimit -n 65536"
_READ_BYTES = 1 << 20
_SPARE = 64
"""Untrusted clients beyond the hosts that may connect at the same time."""


@dataclass
class Member:
    """A host, its agent as the launcher sees it, and its connection."""

    host: Host
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
    last_heard: float = field(default_factory=time.monotonic)
    tried: float = -math.inf
    """The time when its agent was started last."""
    is_joining: bool = False
    """True while it connects beside a running attempt, which it takes no part in."""
    nanoscale: str | None = None
    """The version of its agent."""
    facts: Message | None = None
    lost: RankFailure | None = None
    said_bye: bool = False
    closed_at: float | None = None
    """The time when its stream ended."""
    output: bytes = b""
    """The end of what it printed besides messages."""

    @property
    def name(self) -> str:
        return self.host.address

    @property
    def is_present(self) -> bool:
        return self.lost is None

    @property
    def is_waiting(self) -> bool:
        """True if its agent has not connected yet."""
        return self.sender is None and self.lost is None

    @property
    def exit_code(self) -> int | None:
        """The exit code of the command that started the agent; None while it runs."""
        if self.code is not None or self.process is None:
            return self.code
        return self.process.exit_code()

    @property
    def port(self) -> int | None:
        """The port that its agent has reserved for the rendezvous; None if it has not answered."""
        return self.facts["port"] if self.facts is not None else None

    def reset(self, mark: str) -> None:
        """Forget the former agent, before another one is started."""
        self.lost, self.facts, self.closed_at, self.code = None, None, None, None
        self.said_bye, self.answered, self.output, self.is_joining = False, False, b"", False
        self.unpacker, self.last_heard, self.mark = Unpacker(), time.monotonic(), mark
        self.tried = self.last_heard


Source = Member | Sequence[Member]
"""The member whose agent writes a stream, or all members whose agents one command has started."""


class KeyFile:
    """A file in the folder of runs, which only its owner may read: hosts that see it see the folder.

    Its content is the key by which agents authenticate when they connect to the launcher.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.key = os.urandom(32)

    def write(self) -> None:
        self.path.touch(0o600)
        self.path.write_bytes(self.key)

    def remove(self) -> None:
        self.path.unlink(missing_ok=True)


class Connections:
    """Processes that start agents, with their streams, and reverse connections if the transport needs them.

    Args:
        hosts: how many agents may connect at the same time.
        mark: the mark in the environment of all processes.
    """

    def __init__(self, transport: Transport, key_file: KeyFile, hosts: int, mark: str) -> None:
        self._transport = transport
        self._key_file = key_file
        self._mark = mark
        self._environment = {**transport.environment(os.environ), MARK: mark}
        self._cleanup = OrphanCleanup()
        self._processes: list[Process] = []
        """The started processes, until they are over and reaped."""
        self._selector = selectors.DefaultSelector()
        self._by_name: dict[str, Member] = {}
        """The members by their names, and by the first part of these."""
        self._reverse: AuthenticatedListener | None = None
        if transport.is_reverse:
            self._reverse = AuthenticatedListener(key_file.key, hosts + _SPARE)
            self._selector.register(self._reverse, selectors.EVENT_READ)

    def start(self, members: Sequence[Member]) -> None:
        """Start the agents of these hosts. A host is lost if its command cannot be started."""
        self._cleanup.finish()
        self._processes = [it for it in self._processes if not self._reap(it)]
        hosts = [member.host for member in members]
        self._by_name = {it.name.partition(".")[0]: it for it in members} | self._by_name
        self._by_name |= {member.name: member for member in members}
        if self._reverse is None:
            commands = self._transport.commands(hosts)
        else:
            addresses = [f"{it}:{self._reverse.port}" for it in _names_here(hosts)]
            launcher = Session(",".join(addresses), str(self._key_file.path))
            commands = self._transport.commands(hosts, launcher)
        groups: dict[Command, list[Member]] = {}
        for member, command in zip(members, commands, strict=True):
            groups.setdefault(command, []).append(member)
        for command, group in groups.items():
            if command:  # else another program starts the agent
                self._start(command, group)

    def _start(self, command: Command, members: Sequence[Member]) -> None:
        for member in members:
            self.hang_up(member)
            if member.process is not None and not self._transport.is_reverse:
                member.process.kill()
                member.process.close()
        try:
            process = Process(command, self._environment)
        except OSError as error:
            text = f"{command[0]} cannot be started: {error}"
            is_limit = error.errno in (errno.EMFILE, errno.ENFILE)
            remedy = MORE_OPEN_FILES if is_limit else "install it"
            for member in members:
                member.lost = agent_failure(member.name, text, remedy)
            return
        self._processes.append(process)
        for member in members:
            member.process = process
        source: Source = members
        if not self._transport.is_reverse:
            (source,) = members
            source.sender = Sender(process.stdin.fileno())
        self._register(process.stdout, source, carries_messages=isinstance(source, Member))
        self._register(process.stderr, source, carries_messages=False)

    def _reap(self, process: Process) -> bool:
        """Reap a command that is over; True if so. Orders may go through an open standard input."""
        pipes = (process.stdin, process.stdout, process.stderr)[self._transport.is_reverse :]
        is_over = all(pipe.closed for pipe in pipes) and process.exit_code() is not None
        if is_over := is_over and not members_of([process.pid], ""):
            process.reap()
        return is_over

    def _register(self, stream: object, source: Source, *, carries_messages: bool) -> None:
        self._selector.register(stream, selectors.EVENT_READ, (source, carries_messages))  # type: ignore[arg-type]

    def poll(self, timeout: float) -> Iterator[tuple[Source, bool, bytes]]:
        """Wait at most this long, and yield new bytes, none at the end of a stream.

        Yields:
            the source of the bytes; True if the stream carries messages; the bytes.
        """
        for key, _ in self._selector.select(timeout):
            if key.fileobj is self._reverse:
                continue  # `accept` serves them
            data = b""
            with suppress(OSError):  # the connection has ended in another way
                data = os.read(key.fd, _READ_BYTES)
            if not data:
                self._selector.unregister(key.fileobj)
                if not isinstance(key.fileobj, socket.socket):
                    key.fileobj.close()  # type: ignore[union-attr]
            yield *key.data, data

    def accept(self, members: Sequence[Member]) -> Iterator[Member]:
        """Yield the members whose agents have connected since the last call."""
        for accepted, hello in self._reverse.accept() if self._reverse is not None else ():
            member = self._member_of(hello["names"], set(hello["addresses"]), members)
            if member is None:
                accepted.close()
                continue
            member.socket = accepted
            member.sender = Sender(accepted.fileno())
            member.last_heard = time.monotonic()
            self._register(accepted, member, carries_messages=True)
            yield member

    def _member_of(
        self, names: Sequence[str], addresses: Set[str], members: Sequence[Member]
    ) -> Member | None:
        """Return the member that waits for an agent: by its name, or else by its address."""
        named = (self._by_name.get(name) for name in names)
        waiting = (it for it in named if it is not None and it.is_waiting)
        others = (it for it in members if it.is_waiting and addresses & {*network.resolve(it.name)})
        return next(waiting, None) or next(others, None)

    def drain(self, member: Member) -> bytes:
        """Return the rest of the standard error of a process that has ended, if it is the member's alone."""
        output = b""
        if member.process is None or self._transport.is_reverse or member.process.stderr.closed:
            return output
        self._forget(member.process.stderr)
        os.set_blocking(member.process.stderr.fileno(), False)
        with suppress(BlockingIOError):
            while data := os.read(member.process.stderr.fileno(), _READ_BYTES):
                output += data
        return output

    def hang_up(self, member: Member) -> None:
        """Close the connection, upon which the agent ends everything on its host."""
        if member.sender is not None:
            member.sender.close()
        member.sender = None
        if member.socket is not None:
            self._forget(member.socket)
            member.socket.close()
            member.socket = None
        if member.process is None or self._transport.is_reverse:
            return
        for stream in (member.process.stdout, member.process.stderr):
            self._forget(stream)
        with suppress(OSError):
            member.process.stdin.close()

    def end_orphans(self, member: Member) -> None:
        """Begin to end what a lost agent may have left on its host, if it has answered and that is possible."""
        command = self._transport.cleanup_command(member.host, member.mark)
        if member.answered and command is not None:
            self._cleanup.begin(command, self._environment)

    def _forget(self, stream: object) -> None:
        with suppress(KeyError, ValueError):
            self._selector.unregister(stream)  # type: ignore[arg-type]

    def close(self) -> None:
        """End all processes, once the cleanups are done."""
        self._cleanup.finish()
        if self._transport.leaves_session:
            end_all([process.pid for process in self._processes], self._mark)
        for process in self._processes:
            # srun's other process reports its end to SLURM, so that the tasks end.
            process.kill(alone=self._transport.is_reverse)
        for process in self._processes:
            process.reap()
        if self._reverse is not None:
            self._reverse.close()
        self._selector.close()


def _names_here(hosts: Sequence[Host]) -> list[str]:
    """Return this machine's names and addresses for these hosts, the likeliest first."""
    towards = next((host for host in hosts if not is_here(host.name)), hosts[0]).address
    likeliest = network.address_towards(towards) or socket.gethostname()
    others = (it for it in network.addresses() if ":" not in it and not network.is_loopback(it))
    return list(dict.fromkeys([likeliest, socket.gethostname(), *others]))

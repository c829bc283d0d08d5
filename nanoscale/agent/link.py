"""The agent's end of the channel: it receives orders, and sends everything else.

When the launcher is lost, by the end of the stream or by its silence, all processes of the job on this host
are killed.
"""

from __future__ import annotations

import os
import queue
import random
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from nanoscale.processes import messages, scratch
from nanoscale.processes.lifeline import clean_up, end_group
from nanoscale.processes.messages import Message
from nanoscale.processes.network import addresses as own_addresses
from nanoscale.processes.network import names

_READ_BYTES = 1 << 16
_CONNECT_S = 5.0
_ATTEMPTS, _ATTEMPT_PAUSE_S = 20, 1.0
"""The number of connection attempts to a launcher that hangs up, and the longest pause in between, seconds."""
_ENDING_S = 30.0
"""Seconds that a thread waits for the one that ends this process."""
_RESCUE_S = 600.0
"""The longest time to copy what would be lost with this process; a network disk may hang."""
_FIRST_SILENCE_S = 60.0
"""Seconds of silence until the launcher has set its own limit."""


class Link:
    """The connection to the launcher."""

    def __init__(self, reader: int, writer: int) -> None:
        self.stopped_attempt = 0
        """The last attempt that the launcher wants to stop regularly."""
        self.moved_attempt = 0
        """The last attempt that it wants to stop for a change of hosts."""
        self.killed_attempt = 0
        """The last attempt that it wants to end at once."""
        self.is_starting = False
        """True if an attempt has begun and is not watched yet: its start cannot be interrupted."""
        self.wants_stacks = False
        """True if killed ranks should write their stacks."""
        self.questions = 0
        """The number of questions for the ranks' positions so far."""
        self.rescue: Callable[[], None] = lambda: None
        """A function that is called when the launcher is lost and all ranks have ended."""
        self.scratch = scratch.make()
        """The folder for files that only this agent and its ranks read."""
        self._reader = reader
        self._sender = messages.Sender(writer)
        self._ending = threading.Event()
        self.orders: queue.Queue[Message] = queue.Queue()
        self._deferred: queue.SimpleQueue[Message] = queue.SimpleQueue()
        self.lost_after_s: float | None = _FIRST_SILENCE_S
        """Seconds of silence upon which the launcher is lost; None: it is lost at the end of the stream."""

    @classmethod
    def over_standard_streams(cls) -> Link:
        """Use the standard streams; other output goes to standard error, to keep the channel clean."""
        reader, writer = os.dup(0), os.dup(1)
        null = os.open(os.devnull, os.O_RDONLY)
        os.dup2(null, 0)
        os.dup2(2, 1)
        return cls(reader, writer)

    @classmethod
    def over_network(cls, addresses: str, key_file: Path) -> Link:
        """Connect to the launcher at one of its addresses; both prove that they can read the key file."""
        try:
            key = key_file.read_bytes()
        except OSError as error:
            sys.exit(f"nanoscale.agent: does not see the launcher's folder of runs: {error}")
        descriptor = _connect(addresses.split(","), key).detach()
        return cls(descriptor, os.dup(descriptor))

    def open(self) -> None:
        """Start listening, and sending heartbeats."""
        threading.Thread(target=self._listen, name="orders", daemon=True).start()
        threading.Thread(target=self._beat, name="beat", daemon=True).start()

    def close(self) -> None:
        """Remove the temporary files, or wait for the thread that ends this process and removes them last."""
        if self._ending.is_set():
            time.sleep(_ENDING_S)
        scratch.remove_own()

    def send(self, kind: str, carried: bytes = b"", **content: object) -> None:
        """Send a message, which may carry bytes. Blocks while the launcher does not read."""
        self._sender.send({"kind": kind, **content}, carried)

    def send_later(self, kind: str, **content: object) -> None:
        """Send a message from a signal handler, which may have interrupted a `send`."""
        self._deferred.put({"kind": kind, **content})

    def _beat(self) -> None:
        message = messages.BEAT
        while True:
            self._sender.send(message)
            try:
                message = self._deferred.get(timeout=messages.BEAT_S)
            except queue.Empty:
                message = messages.BEAT

    def _listen(self) -> None:
        unpacker = messages.Unpacker()
        last_heard = time.monotonic()
        while True:
            ready, _, _ = select.select([self._reader], [], [], messages.BEAT_S)
            if ready:
                data = b""
                with suppress(OSError):  # the connection has ended in another way
                    data = os.read(self._reader, _READ_BYTES)
                if not data:
                    self._end("the launcher is gone")
                last_heard = time.monotonic()
                for message in unpacker.feed(data):
                    if isinstance(message, dict):
                        self._handle(message)
            elif (limit_s := self.lost_after_s) and time.monotonic() - last_heard > limit_s:
                self._end(f"no heartbeat from the launcher for {limit_s:g} s")

    def _handle(self, message: Message) -> None:
        match message["kind"]:
            case "beat":
                pass
            case "stop":
                self.stopped_attempt = message["attempt"]
            case "move":
                self.moved_attempt = message["attempt"]
            case "ask":
                self.questions += 1
            case "kill":
                self.wants_stacks = message["stacks"]
                self.killed_attempt = message["attempt"]
                if self.is_starting:
                    self._end("the attempt was ended before its ranks had started")
            case _:
                self.orders.put(message)

    def _end(self, reason: str) -> None:
        """End all processes, this one last; errors on the way are ignored."""
        self._ending.set()
        self._sender.close()
        with suppress(OSError, ValueError):
            print(f"nanoscale.agent: {reason}; ending the ranks", file=sys.stderr, flush=True)
        clean_up(os.getpid())
        end_group(os.getpid())
        rescuing = threading.Thread(target=self.rescue, daemon=True)
        rescuing.start()
        rescuing.join(_RESCUE_S)
        scratch.remove_own()
        os.kill(os.getpid(), signal.SIGKILL)


def _connect(addresses: Sequence[str], key: bytes) -> socket.socket:
    """Return a connection to the launcher, at the first address where it proves to know the key.

    A launcher that is flooded with foreign connections may hang up on an agent. Then the agent connects again.
    """
    description = {"names": names(), "addresses": list(own_addresses())}
    for _ in range(_ATTEMPTS):
        was_connected = False
        for address in addresses:
            host, _, port = address.rpartition(":")
            end = (host, int(port))
            with suppress(OSError), socket.create_connection(end, _CONNECT_S) as connection:
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                was_connected = True
                with suppress(messages.HandshakeError):
                    messages.introduce(connection, key, description)
                    connection.settimeout(None)
                    return connection.dup()
        if not was_connected:
            break
        time.sleep(random.uniform(0, _ATTEMPT_PAUSE_S))
    sys.exit(f"nanoscale.agent: no answer from the launcher at {', '.join(addresses)}")

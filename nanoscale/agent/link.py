"""The agent's end of the channel: orders come in, everything else goes out.

When the launcher is lost, by the end of the stream or by its silence, everything of the job on this host dies.
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
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from nanoscale.agent.network import addresses as own_addresses
from nanoscale.agent.network import names
from nanoscale.processes import scratch
from nanoscale.processes.handshake import HandshakeError, introduce
from nanoscale.processes.lifeline import clear_up, end_group
from nanoscale.processes.messages import BEAT, BEAT_S, Message, Sender, Unpacker

_READ_BYTES = 1 << 16
_CALL_S = 5.0
_CALLS, _CALL_PAUSE_S = 20, 1.0
"""how often to call a launcher that hangs up, and the longest pause in between, seconds"""
_ENDING_S = 30.0
"""seconds that a thread waits for the one that ends this process"""
_FIRST_SILENCE_S = 60.0
"""until the launcher has said how much it takes for the end"""


class Link:
    """Talks to the launcher."""

    def __init__(self, reader: int, writer: int) -> None:
        self.stopped_attempt = 0
        """the last attempt that the launcher wants to stop in good order"""
        self.killed_attempt = 0
        """the last attempt that it wants to end at once"""
        self.is_starting = False
        """whether an attempt has begun and is not looked after yet: what it waits for cannot be interrupted"""
        self.wants_stacks = False
        """whether the ranks that are killed should say where they are"""
        self.scratch = scratch.make()
        """for files that only this agent and its ranks read"""
        self._reader = reader
        self._sender = Sender(writer)
        self._ending = threading.Event()
        self._orders: queue.Queue[Message] = queue.Queue()
        self._waiting: queue.SimpleQueue[Message] = queue.SimpleQueue()
        self._silence_s: float | None = _FIRST_SILENCE_S

    @classmethod
    def over_standard_streams(cls) -> Link:
        """Whatever else is printed goes to standard error, as the channel is no place for it."""
        reader, writer = os.dup(0), os.dup(1)
        null = os.open(os.devnull, os.O_RDONLY)
        os.dup2(null, 0)
        os.dup2(2, 1)
        return cls(reader, writer)

    @classmethod
    def over_network(cls, where: str, key_file: Path) -> Link:
        """Call the launcher back at one of its addresses; both prove that they can read the key file."""
        try:
            key = key_file.read_bytes()
        except OSError as error:
            sys.exit(f"nanoscale.agent: does not see the launcher's folder of runs: {error}")
        connected = _call(where.split(","), key).detach()
        return cls(connected, os.dup(connected))

    def open(self) -> None:
        """Begin to listen, and to be heard."""
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
        """For signal handlers, which may have interrupted a `send`."""
        self._waiting.put({"kind": kind, **content})

    def next_order(self) -> Message:
        """Wait for what to do next."""
        return self._orders.get()

    def expect_beats(self, silence_s: float | None) -> None:
        """Take the launcher for lost after so long a silence; None: only at the end of the stream."""
        self._silence_s = silence_s

    def _beat(self) -> None:
        message = BEAT
        while True:
            self._sender.send(message)
            try:
                message = self._waiting.get(timeout=BEAT_S)
            except queue.Empty:
                message = BEAT

    def _listen(self) -> None:
        unpacker = Unpacker()
        heard = time.monotonic()
        while True:
            ready, _, _ = select.select([self._reader], [], [], BEAT_S)
            if ready:
                data = self._read()
                if not data:
                    self._end("the launcher is gone")
                heard = time.monotonic()
                for message in unpacker.feed(data):
                    if isinstance(message, dict):
                        self._take(message)
            elif self._silence_s is not None and time.monotonic() - heard > self._silence_s:
                self._end(f"the launcher has been silent for {self._silence_s:g} s")

    def _read(self) -> bytes:
        """What has come; nothing where the connection has ended, in whatever way."""
        with suppress(OSError):
            return os.read(self._reader, _READ_BYTES)
        return b""

    def _take(self, message: Message) -> None:
        match message["kind"]:
            case "beat":
                pass
            case "stop":
                self.stopped_attempt = message["attempt"]
            case "kill":
                self.wants_stacks = message["stacks"]
                self.killed_attempt = message["attempt"]
                if self.is_starting:
                    self._end("the attempt was ended before its ranks had started")
            case _:
                self._orders.put(message)

    def _end(self, why: str) -> None:
        """Leave nothing behind, this process last; what it meets with meanwhile is no news."""
        self._ending.set()
        self._sender.close()
        with suppress(OSError, ValueError):
            print(f"nanoscale.agent: {why}; ending the ranks", file=sys.stderr, flush=True)
        clear_up(os.getpid())
        end_group(os.getpid())
        scratch.remove_own()
        os.kill(os.getpid(), signal.SIGKILL)


def _call(addresses: Sequence[str], key: bytes) -> socket.socket:
    """Return a connection to the launcher, at the first address where it proves to know the key.

    A launcher that strangers flood with connections may hang up on an agent. Then the agent calls again.
    """
    hello = {"names": names(), "addresses": list(own_addresses())}
    for _ in range(_CALLS):
        hung_up = False
        for address in addresses:
            host, _, port = address.rpartition(":")
            with suppress(OSError), _connected(host, int(port)) as connection:
                hung_up = True
                with suppress(HandshakeError):
                    introduce(connection, key, hello)
                    connection.settimeout(None)
                    return connection.dup()
        if not hung_up:
            break
        time.sleep(random.uniform(0, _CALL_PAUSE_S))
    sys.exit(f"nanoscale.agent: no answer of the launcher at {', '.join(addresses)}")


def _connected(host: str, port: int) -> socket.socket:
    connection = socket.create_connection((host, port), timeout=_CALL_S)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return connection

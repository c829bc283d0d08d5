"""The launcher's listener for agents, between agents and strangers."""

from __future__ import annotations

import os
import resource
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from nanoscale.agent.link import Link
from nanoscale.processes import listener as listeners
from nanoscale.processes.listener import AuthenticatedListener
from nanoscale.processes.messages import HandshakeError, introduce

KEY = b"k" * 32
HELLO = {"names": ["n1"], "addresses": ["10.0.0.1"]}
LIMIT_S = 60.0
Agent = tuple[socket.socket, Any]


@pytest.fixture
def listener() -> Iterator[AuthenticatedListener]:
    listener = AuthenticatedListener(KEY, 65)
    yield listener
    listener.close()


def connect(listener: AuthenticatedListener) -> socket.socket:
    return socket.create_connection(("127.0.0.1", listener._socket.getsockname()[1]), timeout=5)


def serve(listener: AuthenticatedListener, until: Callable[[list[Agent]], bool]) -> list[Agent]:
    """Serve all clients like the launcher, until a condition holds; return the authenticated ones."""
    agents: list[Agent] = []
    deadline = time.monotonic() + LIMIT_S
    while not until(agents):
        assert time.monotonic() < deadline
        agents += listener.accept()
    return agents


def open_files() -> list[int]:
    return [int(path.name) for path in Path("/proc/self/fd").iterdir()]


@contextmanager
def agent(
    listener: AuthenticatedListener, key: bytes = KEY
) -> Iterator[list[BaseException | None]]:
    """Run an agent that connects from a thread of its own; the list gets its result."""
    ends: list[BaseException | None] = []

    def call() -> None:
        with connect(listener) as connection:
            try:
                introduce(connection, key, HELLO)
                ends.append(None)
            except (OSError, HandshakeError) as error:
                ends.append(error)

    thread = threading.Thread(target=call)
    thread.start()
    yield ends
    thread.join()


def test_an_agent_proves_itself_and_says_who_it_is(listener: AuthenticatedListener) -> None:
    with agent(listener) as ends:
        ((connection, hello),) = serve(listener, lambda agents: len(agents) == 1)
    assert ends == [None]
    assert hello == HELLO and connection.getblocking()
    connection.close()


def test_who_has_another_key_is_refused_by_both_ends(listener: AuthenticatedListener) -> None:
    with agent(listener, b"x" * 32) as ends:
        assert serve(listener, lambda agents: bool(agents or ends)) == []
    assert isinstance(ends[0], OSError)

    ours, peer = socket.socketpair()
    peer.sendall(bytes(64))  # a challenge, and a proof that is none
    with pytest.raises(HandshakeError):
        introduce(ours, KEY, HELLO)
    ours.close(), peer.close()


def test_no_stranger_lives_long(
    listener: AuthenticatedListener, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listeners, "_PATIENCE_S", 0.05)
    stranger = connect(listener)
    serve(listener, lambda _: len(listener._untrusted) == 1)
    serve(listener, lambda _: not listener._untrusted)
    assert len(stranger.recv(100)) == 32 and stranger.recv(100) == b""


def test_idle_strangers_starve_nobody_and_cost_no_thread(listener: AuthenticatedListener) -> None:
    """On the old listener, as many as there were file descriptors ended it for good."""
    threads = threading.active_count()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    strangers = []
    # The strangers' own ends are in this process as well.
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(open_files()) + 1001, hard))
    try:
        with suppress(OSError):  # until no descriptor is left for either end
            while True:
                strangers.append(connect(listener))
                if len(strangers) % 10 == 0:
                    listener.accept()
        assert len(strangers) > 800
        listener.accept()  # has none to accept with
        assert threading.active_count() == threads
        assert len(listener._untrusted) <= 65
        strangers.pop().close()
        with agent(listener) as ends:
            ((connection, _),) = serve(listener, lambda agents: len(agents) == 1)
        assert ends == [None]
        connection.close()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for stranger in strangers:
            stranger.close()


def test_it_survives_that_no_file_descriptor_is_left(listener: AuthenticatedListener) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    stranger = connect(listener)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(open_files()), hard))
    try:
        taken = []
        with suppress(OSError):
            while True:
                taken.append(os.open(os.devnull, os.O_RDONLY))
        assert listener.accept() == [] and listener._untrusted == []
        listener.accept()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for descriptor in taken:
            os.close(descriptor)
    serve(listener, lambda _: len(listener._untrusted) == 1)
    stranger.close()


def test_strangers_from_one_address_drive_away_one_another_only(
    listener: AuthenticatedListener,
) -> None:
    first = connect(listener)
    serve(listener, lambda _: len(listener._untrusted) == 1)
    listener._untrusted[0].address = "10.0.0.1"
    flood = []
    for _ in range(100):
        flood.append(connect(listener))
        listener.accept()
    addresses = [stranger.address for stranger in listener._untrusted]
    assert len(addresses) == 65 and addresses[0] == "10.0.0.1"
    for connection in (first, *flood):
        connection.close()


def test_an_agent_calls_again_when_the_launcher_hangs_up(
    listener: AuthenticatedListener, tmp_path: Path
) -> None:
    (tmp_path / "key").write_bytes(KEY)
    port = listener._socket.getsockname()[1]
    links: list[Link] = []
    call = threading.Thread(
        target=lambda: links.append(Link.over_network(f"127.0.0.1:{port}", tmp_path / "key"))
    )
    call.start()
    serve(listener, lambda _: bool(listener._untrusted))
    listener._drop()
    ((connection, _),) = serve(listener, lambda agents: len(agents) == 1)
    call.join()
    links[0].close()
    connection.close()

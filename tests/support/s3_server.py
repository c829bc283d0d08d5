"""A real S3 server (moto's), behind a proxy that refuses, delays and cuts connections."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field

from tests.support.waiting import wait_until

BUCKET = "bucket"


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


@contextmanager
def s3_server() -> Iterator[int]:
    """Run moto's server with an empty bucket; yield its port."""
    port = free_port()
    server = subprocess.Popen(
        [sys.executable, "-m", "moto.server", "-p", str(port)],
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        wait_until(lambda: _answers(port), 60)
        yield port
    finally:
        server.kill()
        server.wait()


def _answers(port: int) -> bool:
    with suppress(OSError):
        socket.create_connection(("127.0.0.1", port), 1).close()
        return True
    return False


@dataclass
class FaultyProxy:
    """A TCP proxy; each connection that is taken while `faults` has entries suffers the next one.

    refuse: closed at once · slow: delayed · cut: closed after half of the bytes of an upload or a download ·
    lost: the server gets the request, and its answer is lost.
    """

    target: int
    faults: list[str] = field(default_factory=list)
    suffered: list[str] = field(default_factory=list)
    least_bytes: int = 2000
    """A connection is cut after this number of bytes."""

    def __post_init__(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listener.getsockname()[1])
        self._lock = threading.Lock()
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        self._listener.close()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        with self._lock:
            fault = self.faults.pop(0) if self.faults else ""
        if fault:
            self.suffered.append(fault)
        if fault == "refuse":
            client.close()
            return
        if fault == "slow":
            time.sleep(0.5)
        server = socket.create_connection(("127.0.0.1", self.target))
        limits = {"cut": self.least_bytes, "lost": 0}
        answer = threading.Thread(
            target=_copy, args=(server, client, limits.get(fault)), daemon=True
        )
        answer.start()
        _copy(client, server, limits["cut"] if fault == "cut" else None)
        answer.join()
        for end in (client, server):
            end.close()


def _copy(source: socket.socket, target: socket.socket, limit: int | None) -> None:
    """Copy bytes until the end; close both at the limit."""
    copied = 0
    with suppress(OSError):
        while data := source.recv(1 << 16):
            if limit is not None and copied + len(data) > limit:
                target.sendall(data[: limit - copied])
                for end in (source, target):
                    end.shutdown(socket.SHUT_RDWR)
                return
            target.sendall(data)
            copied += len(data)
        target.shutdown(socket.SHUT_WR)


def environment(port: int) -> dict[str, str]:
    """Return the variables that s3fs reads."""
    return {
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}",
        "AWS_ACCESS_KEY_ID": "key",
        "AWS_SECRET_ACCESS_KEY": "do-not-write-me",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_EC2_METADATA_DISABLED": "true",
    }


@contextmanager
def s3_environment(port: int) -> Iterator[None]:
    """Set these variables, with a new client: fsspec keeps the clients of a process."""
    import s3fs

    before = {name: os.environ.get(name) for name in environment(port)}
    os.environ.update(environment(port))
    s3fs.S3FileSystem.clear_instance_cache()
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
        s3fs.S3FileSystem.clear_instance_cache()

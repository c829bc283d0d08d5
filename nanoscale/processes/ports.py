"""A free TCP port for the ranks' rendezvous."""

from __future__ import annotations

import socket


class ReservedPort:
    """A port that stays free for our own ranks until this is closed.

    It is bound, so no other process is assigned it; it does not listen and shares its address, so the ranks'
    store can still bind it (SO_REUSEADDR).
    """

    def __init__(self, number: int = 0) -> None:
        """Reserve a port. Raises OSError if a given number is requested and another process listens there."""
        self._socket = socket.socket()
        if number:  # remains of an earlier job are not obstacle
            self._share()
        self._socket.bind(("", number))  # without sharing, so that nobody else has reserved it
        self._share()
        self.number: int = self._socket.getsockname()[1]

    def _share(self) -> None:
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)

    def close(self) -> None:
        self._socket.close()

    def __enter__(self) -> ReservedPort:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

from __future__ import annotations

import socket
from contextlib import ExitStack, closing

import pytest

from nanoscale.processes.network import ReservedPort


@pytest.mark.parametrize("family", [socket.AF_INET, socket.AF_INET6])
def test_a_reserved_port_can_still_be_listened_on_by_its_owner(family):
    # A TCPStore sets SO_REUSEADDR and listens on both families at once.
    with closing(ReservedPort()) as port, socket.socket(family) as store:
        store.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        store.bind(("", port.number))
        store.listen()
        with socket.create_connection(("localhost", port.number), timeout=60):
            pass


def test_it_is_given_to_nobody_else():
    with ExitStack() as stack:
        ports = [stack.enter_context(closing(ReservedPort())) for _ in range(300)]
        assert len({port.number for port in ports}) == 300
        with socket.socket() as stranger, pytest.raises(OSError, match="in use"):
            stranger.bind(("", ports[0].number))

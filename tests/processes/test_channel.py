from __future__ import annotations

import os

import pytest

from nanoscale.channel import Sender, Unpacker, pack


def test_messages_are_told_apart_from_what_a_shell_prints() -> None:
    unpacker = Unpacker()
    data = b"Welcome!\n" + pack({"kind": "a"}) + b"no end of line" + pack({"kind": "b"})
    found = [item for byte in data for item in unpacker.feed(bytes([byte]))]
    assert found == ["Welcome!", {"kind": "a"}, {"kind": "b"}]


@pytest.mark.parametrize("line", [b"\x1enot json", b"\x1e[1]", b'\x1e{"kind": 1}'])
def test_what_only_looks_like_a_message_is_a_line(line: bytes) -> None:
    assert list(Unpacker().feed(line + b"\n")) == [line.decode()]


def test_a_sender_that_is_closed_writes_nothing_more() -> None:
    reader, writer = os.pipe()
    sender = Sender(writer)
    assert sender.send({"kind": "a"})
    sender.close()
    assert not sender.send({"kind": "b"})
    os.close(writer)
    assert os.read(reader, 1000) == pack({"kind": "a"})
    assert os.read(reader, 1000) == b""
    os.close(reader)


def test_a_reader_that_is_gone_is_no_error() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    assert not Sender(writer).send({"kind": "a"})
    os.close(writer)

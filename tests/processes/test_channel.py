from __future__ import annotations

import json
import os
import threading
import tracemalloc

import pytest

from nanoscale.processes.messages import LONGEST_LINE, MOST_BYTES, Sender, Unpacker, pack


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


class Counted(bytes):
    """Bytes that count their reads and copies."""

    work = 0

    def find(self, what, start=0):  # type: ignore[override]
        Counted.work += len(self) - start
        return super().find(what, start)

    def __getitem__(self, key):
        value = super().__getitem__(key)
        Counted.work += len(value)
        return value

    def __radd__(self, other):
        Counted.work += len(self) + len(other)
        return Counted(bytes(other) + bytes(self))


def test_a_line_without_an_end_costs_time_and_memory_in_proportion():
    """The old one looked at all that it had with every byte that came: 64 MiB would be 32 GiB of work."""
    unpacker, block = Unpacker(), Counted(b"x" * (1 << 16))
    Counted.work = 0
    tracemalloc.start()
    received = 0
    for _ in range(1024):
        received += sum(len(item) for item in unpacker.feed(block))
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    received += sum(len(item) for item in unpacker.feed(b"\n"))
    assert received == 1024 * len(block)
    assert Counted.work <= 2 * received
    assert most < 4 * LONGEST_LINE


@pytest.mark.parametrize("size", [1, 7, 1000, MOST_BYTES])
def test_bytes_are_carried_as_they_are(size):
    data = bytes(range(256)) * 20  # with ends of lines, marks, and bytes that are not UTF-8
    message = {"kind": "output", "rank": 3}
    stream = (
        b"hi\n" + pack(message, data) + data + pack({"kind": "beat"}) + pack(message, b"") + b"yo\n"
    )
    unpacker = Unpacker()
    items = [i for n in range(0, len(stream), size) for i in unpacker.feed(stream[n : n + size])]
    carrying = [item for item in items if isinstance(item, dict) and "carried" in item]
    assert b"".join(item["carried"] for item in carrying) == data
    assert all(item["rank"] == 3 for item in carrying)
    others = [item for item in items if item not in carrying]
    assert others == ["hi", {"kind": "beat"}, message, "yo"]
    assert len(pack(message, data)) < 100


def test_a_sender_writes_what_a_message_carries():
    reader, writer = os.pipe()
    data = bytes(range(256)) * 4000

    def send() -> None:
        Sender(writer).send({"kind": "a"}, data)
        os.close(writer)

    thread = threading.Thread(target=send)
    thread.start()
    unpacker, received = Unpacker(), b""
    while new := os.read(reader, 1 << 16):
        received += b"".join(
            item["carried"] for item in unpacker.feed(new) if isinstance(item, dict)
        )
    thread.join()
    os.close(reader)
    assert received == data


def test_messages_that_are_too_long_are_not_sent_and_not_believed():
    with pytest.raises(ValueError, match="too long"):
        pack({"kind": "a", "text": "x" * LONGEST_LINE})
    with pytest.raises(ValueError, match="too long"):
        pack({"kind": "a"}, b"x" * (MOST_BYTES + 1))
    for count in (MOST_BYTES + 1, -1, "7"):
        line = b'\x1e{"kind": "a", "bytes": %s}' % json.dumps(count).encode()
        assert list(Unpacker().feed(line + b"\n")) == [line.decode()]

from __future__ import annotations

import errno
import json
import os
import tracemalloc
from concurrent.futures import ThreadPoolExecutor

import pytest

from nanoscale.runs import events, jsonlines, metrics
from nanoscale.runs.jsonlines import Tail
from nanoscale.runs.tail import FileTail, LineSplitter, LineTail, read_end
from tests.support.runs import create_run


def test_a_line_counts_when_its_end_has_arrived(tmp_path):
    path = tmp_path / "metrics.jsonl"
    tail = Tail(path)
    assert tail.poll() == []
    path.write_text('{"step": 1}\n{"st')
    assert tail.poll() == [{"step": 1}]
    with path.open("a") as file:
        file.write('ep": 2}\n')
    assert tail.poll() == [{"step": 2}]
    assert tail.poll() == []


def test_a_line_that_a_killed_writer_left_costs_only_itself(tmp_path):
    path = tmp_path / "events.jsonl"
    path.write_text('{"kind": "a"}\n{"kind": "torn')
    jsonlines.append(path, {"kind": "b"})
    assert [entry["kind"] for entry in jsonlines.read(path)] == ["a", "b"]


def test_lines_are_added_on_a_file_system_without_locks(tmp_path, monkeypatch):
    def refuse(*_):
        raise OSError(errno.ENOSYS, "no locks available")

    monkeypatch.setattr("fcntl.flock", refuse)
    jsonlines.append(tmp_path / "events.jsonl", {"kind": "a"})
    assert jsonlines.read(tmp_path / "events.jsonl") == [{"kind": "a"}]


def test_a_file_that_was_replaced_or_shortened_is_read_from_its_start(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"step": 2}\n{"half')
    tail = Tail(path)
    assert len(tail.poll()) == 2
    path.write_text('{"step": 1}\n')
    assert tail.poll() == [{"step": 1}]
    aside = tmp_path / "new"
    aside.write_text('{"step": 1}\n{"step": 3}\n{"step": 4}\n')
    aside.rename(path)
    assert [entry["step"] for entry in tail.poll()] == [1, 3, 4]


def test_writers_do_not_tear_each_other(tmp_path):
    path = tmp_path / "events.jsonl"
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda i: jsonlines.append(path, {"n": i, "text": "x" * 200}), range(400)))
    assert sorted(json.loads(line)["n"] for line in path.read_text().splitlines()) == [*range(400)]


def test_the_last_record_of_a_long_file(tmp_path):
    run = create_run(tmp_path, "x")
    assert metrics.last(run) is None
    with run.metrics.open("w") as file:
        for step in range(20_000):
            file.write(json.dumps({"step": step, "loss": 1.0}) + "\n")
        file.write('{"step": 20000, "lo')
    assert metrics.last(run) == {"step": 19_999, "loss": 1.0}


def test_the_last_record_with_a_metric_is_found_far_from_the_end(tmp_path):
    run = create_run(tmp_path, "x")
    with run.metrics.open("w") as file:
        for step in range(20_000):
            evaluated = {"eval_loss": float(step)} if step in (3, 9) else {}
            file.write(json.dumps({"step": step, "loss": 1.0, **evaluated}) + "\n")
    assert metrics.last(run, "eval_loss") == {"step": 9, "loss": 1.0, "eval_loss": 9.0}
    assert metrics.last(run, "loss") == {"step": 19_999, "loss": 1.0}
    assert metrics.last(run, "step_time_s") is None


def test_text_without_an_end_is_given_when_asked_for(tmp_path):
    path = tmp_path / "x.out"
    path.write_bytes(b"one\ntw")
    tail = LineTail(path)
    assert (tail.poll(), tail.take_remainder(), tail.take_remainder()) == ([b"one"], b"tw", b"")


def test_a_line_without_an_end_is_given_in_pieces(tmp_path):
    """The old one joined all that it had with every look at the file."""
    path = tmp_path / "x.out"
    tail = LineTail(path)
    total = 0
    tracemalloc.start()
    with path.open("wb", buffering=0) as file:
        for _ in range(32):
            file.write(b"x" * (1 << 20))
            total += sum(map(len, tail.poll()))
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert total + len(tail.take_remainder()) == 32 << 20
    assert most < 8 << 20


def test_lines_are_the_same_however_they_come():
    data = b"one\n\ntwo and\r\nthree \xff\nno end"
    for size in (1, 2, 5, 100):
        splitter = LineSplitter(longest=100)
        pieces = [data[n : n + size] for n in range(0, len(data), size)]
        lines = [line for piece in pieces for line in splitter.feed(piece)]
        assert lines == data.split(b"\n")[:-1] and splitter.take_remainder() == b"no end"
    assert LineSplitter(longest=3).feed(b"a\nbcdef") == [b"a", b"bcdef"]


def test_what_is_too_much_is_left_out(tmp_path):
    path = tmp_path / "x.out"
    path.write_bytes(b"0123456789")
    tail = FileTail(path)
    assert tail.read(3) == b"012"
    assert (tail.skip(4), tail.skip(4), tail.read(), tail.read()) == (3, 0, b"6789", b"")
    path.write_bytes(b"new")
    assert (tail.read(), tail.replaced) == (b"new", True)
    fresh = FileTail(path)
    assert (fresh.skip(0), fresh.read()) == (3, b"")


def test_the_end_of_a_file_begins_with_a_line(tmp_path):
    path = tmp_path / "x.out"
    path.write_bytes(b"one\ntwo\nthree")
    assert read_end(path, 100) == b"one\ntwo\nthree"
    assert read_end(path, 8) == b"three"
    assert read_end(path, 3) == b"ree"


def test_nothing_is_appended_through_a_link(tmp_path):
    """Whoever made a run folder would otherwise have another's run write to any file of theirs."""
    theirs = tmp_path / "theirs"
    theirs.write_text("kept\n")
    (tmp_path / "events.jsonl").symlink_to(theirs)
    with pytest.raises(OSError, match="events.jsonl"):
        jsonlines.append(tmp_path / "events.jsonl", {"a": 1})
    assert theirs.read_text() == "kept\n"


def test_events_of_a_full_disk_are_written_later(tmp_path, monkeypatch):
    run = create_run(tmp_path, "r")
    write = os.write
    with monkeypatch.context() as patch:
        patch.setattr(os, "write", lambda handle, data: write(handle, data[:9]))  # the disk is full
        events.append(run, "restart", "first")
        events.append(run, "attempt", "second")
    assert events.read(run) == []
    events.append(run, "running", "third")
    assert [it["message"] for it in events.read(run)] == ["first", "second", "third"]

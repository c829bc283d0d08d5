from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor

from nanoscale.runs import jsonlines, metrics
from nanoscale.runs.directory import RunDirectory
from nanoscale.runs.jsonlines import Tail
from nanoscale.runs.tail import LineTail


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
    run = RunDirectory.create(tmp_path, "x")
    assert metrics.last(run) is None
    with run.metrics.open("w") as file:
        for step in range(20_000):
            file.write(json.dumps({"step": step, "loss": 1.0}) + "\n")
        file.write('{"step": 20000, "lo')
    assert metrics.last(run) == {"step": 19_999, "loss": 1.0}
    assert len(jsonlines.read_end(run.metrics)) < 5_000


def test_text_without_an_end_is_given_when_asked_for(tmp_path):
    path = tmp_path / "x.out"
    path.write_bytes(b"one\ntw")
    tail = LineTail(path)
    assert (tail.poll(), tail.rest(), tail.rest()) == ([b"one"], b"tw", b"")

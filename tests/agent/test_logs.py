"""The ranks' output on their host, and the part of it that the launcher gets as messages."""

from __future__ import annotations

from pathlib import Path

import pytest

from nanoscale.agent.rank import RankLogs
from nanoscale.processes.messages import MOST_BYTES
from nanoscale.runs.directory import RunDirectory
from nanoscale.runs.job_messages import HostRanks

HOST = HostRanks("h", 0, 1, (4, 5), 6, "127.0.0.1", 1, attempt=2)


class Link:
    """A link that keeps its messages."""

    stopped_attempt = killed_attempt = 0

    def __init__(self, scratch):
        self.scratch = scratch
        self.sent = []

    def send(self, kind, carried=b"", **content):
        assert kind == "output"
        self.sent.append(((content["rank"], content["stream"]), carried))


@pytest.fixture
def link(tmp_path):
    (tmp_path / "scratch").mkdir()
    return Link(tmp_path / "scratch")


@pytest.fixture
def run(tmp_path):
    run = RunDirectory(tmp_path / "run")
    run.attempt_logs(HOST.attempt).mkdir(parents=True)
    return run


def append(path, data):
    with Path(path).open("ab") as file:
        file.write(data)


def test_ranks_write_the_logs_of_the_run_and_nothing_is_sent_twice(link, run):
    logs = RankLogs(link, HOST, run)
    for rank, files in logs.files.items():
        assert files.stdout == run.log(2, "h", rank, "out")
        assert files.stderr == run.log(2, "h", rank, "err")
    assert not logs.forward(60.0)
    append(logs.files[5].stdout, b"x" * (3 * MOST_BYTES))
    assert not logs.forward(60.0)
    assert not logs.forward(60.0)
    append(logs.files[4].stderr, b"more")
    assert not logs.forward(60.0)
    assert link.sent == [((5, "out"), b""), ((4, "err"), b"")]


def test_without_a_run_all_bytes_are_sent_and_none_twice(link):
    logs = RankLogs(link, HOST, None)
    assert link.scratch in logs.files[4].failure.parents
    append(logs.files[5].stdout, bytes(range(256)) * (10 * MOST_BYTES // 256))
    append(logs.files[5].stderr, b"an error\n")
    assert not logs.forward(60.0)
    sent = {key: [data for name, data in link.sent if name == key] for key, _ in link.sent}
    assert sent.keys() == {(5, "out"), (5, "err")}
    assert b"".join(sent[5, "out"]) == bytes(range(256)) * (10 * MOST_BYTES // 256)
    assert len(sent[5, "out"]) == 10
    assert sent[5, "err"] == [b"an error\n"]


def test_an_attempt_that_is_to_end_leaves_out_what_was_not_sent(link):
    logs, end = RankLogs(link, HOST, None), b"the end\n"
    append(logs.files[4].stdout, b"a" * (8 * MOST_BYTES) + end)
    logs.skip_to_end()
    assert not logs.forward(60.0)
    note, *rest = [data for _, data in link.sent]
    assert f"{7 * MOST_BYTES + len(end):,} bytes are omitted here".encode() in note
    assert b"".join(rest) == b"a" * (MOST_BYTES - len(end)) + end

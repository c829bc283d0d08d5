"""`launcher.notify`: a real server gets each change of a run's state, and its faults end no run."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from nanoscale.cli.main import run as nanoscale
from nanoscale.runs import events, status
from nanoscale.runs.directory import RunDirectory
from nanoscale.runs.goodput import goodput
from tests.support.rows import exhaustive

JOB = ("train", "recipe=debug", "train.steps=2", "parallel.dp=1", "launcher.notify=MY_HOOK")


@pytest.fixture
def received(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[dict[str, Any]]]:
    """Start a server, whose address is in MY_HOOK; yield the documents that it gets."""
    documents: list[dict[str, Any]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            documents.append(json.loads(body))
            self.send_response(500 if self.path == "/broken" else 200)
            self.end_headers()

        def log_message(self, *_: object) -> None: ...

    server = HTTPServer(("127.0.0.1", 0), Handler)
    Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setenv("MY_HOOK", f"http://127.0.0.1:{server.server_port}/hook")
    yield documents
    server.shutdown()
    server.server_close()


@pytest.mark.slow
def test_each_change_of_the_state_is_posted(tmp_path: Path, received: list[dict[str, Any]]) -> None:
    assert nanoscale([*JOB, f"run.root={tmp_path}", "run.name=first"]) == 0
    assert [it["state"] for it in received] == ["starting", "completed"]
    assert [it["step"] for it in received] == [0, 2]
    end = received[-1]
    assert (end["run"], end["path"], end["exit_code"]) == ("first", str(tmp_path / "first"), 0)
    assert end["text"] == "first completed: exit code 0"


def test_a_failure_is_posted_with_its_cause(tmp_path: Path, received: list[dict[str, Any]]) -> None:
    diverging = ("optimizer.lr=1e30", "optimizer.clip_norm=null", "train.steps=9")
    job = [*JOB, *diverging, f"run.root={tmp_path}", "run.name=first", "launcher.max_restarts=1"]
    assert nanoscale(job) == 1
    states = [it["state"] for it in received]
    assert states == ["starting", "restarting", "starting", "failed"]
    assert "rank 0" in received[-1]["message"] and received[-1]["exit_code"] == 1
    run = RunDirectory(tmp_path / "first")
    known, ended = goodput(run), status.read(run).ended
    assert known is not None and ended is not None
    began = next(it["time"] for it in events.read(run) if it["kind"] == events.ATTEMPT)
    assert sum(known.seconds.values()) == pytest.approx(ended - began, abs=0.1)
    assert min(known.seconds[name] for name in ("starting", "lost", "repairing")) > 0


@pytest.mark.slow
@pytest.mark.parametrize("address", [exhaustive("http://127.0.0.1:9/closed"), "broken"])
def test_an_address_that_does_not_answer_ends_no_run(
    tmp_path: Path, received: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch, address: str
) -> None:
    if address == "broken":
        address = os.environ["MY_HOOK"].replace("/hook", "/broken")
    monkeypatch.setenv("MY_HOOK", address)
    assert nanoscale([*JOB, f"run.root={tmp_path}", "run.name=first"]) == 0
    notes = [
        it["message"]
        for it in events.read(RunDirectory(tmp_path / "first"))
        if it["kind"] == "note"
    ]
    assert any("was not delivered" in note for note in notes)
    assert not any(address in note for note in notes)

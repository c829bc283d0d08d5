"""`nanoscale top`: all runs on a terminal, in a file, as a document and as a page."""

from __future__ import annotations

import json
import os
import pty
import re
import socket
import subprocess
import sys
import threading
import urllib.request
from pathlib import Path
from typing import Any
from urllib.error import HTTPError

import pytest

from nanoscale.cli.main import run as nanoscale
from nanoscale.config.composing.compose import compose
from nanoscale.config.composing.frozen import dump
from nanoscale.config.rules import Devices, check
from nanoscale.runs import events, status
from nanoscale.runs.directory import RunDirectory
from nanoscale.view.run import top_table
from nanoscale.view.run.top_table import RunsAtAGlance, curve
from tests.cli import Capsys
from tests.support.browser import browser
from tests.support.runs import create_run
from tests.support.waiting import wait_until

LIMIT_S = 60.0


@pytest.fixture(autouse=True)
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[RunDirectory]:
    """Two runs: the older one completed, and the newer one failed."""
    monkeypatch.chdir(tmp_path)
    made = []
    for number, (name, state) in enumerate((("old", "completed"), ("new", "failed"))):
        composed = compose(["recipe=debug", "train.steps=9"])
        run = create_run(tmp_path / "runs", name)
        run.config.write_text(dump(check(composed, Devices("cpu", 2)), composed.config))
        begun = status.Status("prepared", 0, 100.0 + number).starting(1)
        status.write(run, begun.ending(state, int(state == "failed")))
        events.append(run, "note", f"something of {name}")
        steps = [{"step": n, "loss": 9.0 - n, "tokens_per_s": 50.0} for n in range(1, 6)]
        run.metrics.write_text("".join(f"{json.dumps(it)}\n" for it in steps))
        made.append(run)
    made[0].plan.write_text('{"tokens_per_s": 200.0}')
    return made


def test_the_newest_run_comes_first_and_a_speed_stands_beside_the_plan(capsys: Capsys) -> None:
    assert nanoscale(["top"]) == 0
    header, new, old = capsys.readouterr().out.splitlines()
    assert "tokens/s (of plan)" in header
    assert new.split()[:4] == ["new", "failed", "5/9", "4.0000"] and "something of new" in new
    assert "50 (25%)" in old and "█▆▅▃▁" in old
    assert nanoscale(["top", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [(row["name"], row["step"], row["losses"][0]) for row in rows] == [
        ("new", 5, 8.0),
        ("old", 5, 8.0),
    ]


def test_only_runs_that_have_changed_are_read_again(
    runs: list[RunDirectory], monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[str] = []
    original = top_table._read

    def counted(run: RunDirectory, job: Any) -> dict[str, Any]:
        read.append(run.name)
        return original(run, job)

    monkeypatch.setattr(top_table, "_read", counted)
    glance = RunsAtAGlance(Path("runs"))
    glance.rows()
    glance.rows()
    assert sorted(read) == ["new", "old"]
    with runs[1].metrics.open("a") as file:
        file.write('{"step": 6, "loss": 1.5, "step_time_s": 2.0}\n')
    rows = {row["name"]: row for row in glance.rows()}
    assert read[2:] == ["new"] and rows["new"]["loss"] == 1.5
    assert rows["new"]["eta_s"] is None, "nobody trains it"


def test_a_damaged_run_hides_no_other(runs: list[RunDirectory], capsys: Capsys) -> None:
    runs[1].status.write_text("[" * 10_000)
    runs[0].metrics.write_text("not json\n")
    assert nanoscale(["top"]) == 0
    lines = capsys.readouterr().out
    assert "damaged" in lines and "old" in lines


@pytest.mark.parametrize(
    ("file", "line"),
    [
        ("metrics.jsonl", "[]"),
        (
            "metrics.jsonl",
            '{"step": 1, "loss": {"a": 1}, "tokens_per_s": "fast", "memory_gib": []}',
        ),
        ("events.jsonl", '{"kind": "note", "message": 5}'),
        ("events.jsonl", "[1]"),
        ("plan.json", '{"tokens_per_s": "fast"}'),
    ],
)
def test_a_line_of_another_kind_hides_no_run(
    runs: list[RunDirectory], file: str, line: str, capsys: Capsys
) -> None:
    with (runs[0].path / file).open("w" if file == "plan.json" else "a") as opened:
        opened.write(f"{line}\n")
    assert nanoscale(["top"]) == 0
    assert nanoscale(["top", "--json"]) == 0
    shown = capsys.readouterr().out
    assert "new" in shown and "old" in shown


def test_a_curve() -> None:
    assert curve([]) == "" and curve([float("nan")]) == ""
    assert curve([2.0, 2.0]) == "▁▁" and curve([1.0, 8.0, float("inf"), 4.4]) == "▁█▄"


def ours(*words: str) -> dict[str, Any]:
    source = {"PYTHONPATH": str(Path(__file__).parents[2]), "TERM": "xterm", "COLUMNS": "120"}
    command = [sys.executable, "-m", "nanoscale", "top", *words]
    return {"args": command, "env": {**os.environ, **source, "LINES": "20"}}


@pytest.mark.slow
def test_keys_choose_a_run_and_read_its_logs(runs: list[RunDirectory]) -> None:
    log = runs[0].log(1, "here", 0, "out")
    log.parent.mkdir(parents=True)
    log.write_text("a line of the old run\n")
    reader, terminal = pty.openpty()
    process = subprocess.Popen(**ours(), stdin=terminal, stdout=terminal, stderr=terminal)
    os.close(terminal)
    shown = bytearray()

    def read() -> None:
        while True:
            try:
                shown.extend(os.read(reader, 4096))
            except OSError:  # the other end is closed
                return

    thread = threading.Thread(target=read, daemon=True)
    thread.start()

    def press(keys: str, until: str) -> None:
        shown.clear()
        os.write(reader, keys.encode())
        wait_until(lambda: until in shown.decode(errors="replace"), LIMIT_S)

    wait_until(lambda: "q: quit" in shown.decode(errors="replace"), LIMIT_S)
    press("j", "\x1b[7mold")
    press("l", "back to all runs")
    assert "a line of the old run" in shown.decode(errors="replace")
    press("\n", "q: quit")
    os.write(reader, b"q")
    assert process.wait(LIMIT_S) == 0
    os.close(reader)


@pytest.mark.slow
def test_a_page_is_for_who_knows_its_token() -> None:
    process = subprocess.Popen(**ours("--web"), stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    try:
        assert process.stdout is not None
        address = process.stdout.readline().decode().strip()
        assert re.fullmatch(r"http://127\.0\.0\.1:\d+/[\w-]{20,}/", address)
        with socket.create_connection(("127.0.0.1", int(re.findall(r":(\d+)/", address)[0]))):
            answer = urllib.request.urlopen(address, timeout=LIMIT_S)  # beside one who asks nothing
        assert answer.headers["Cache-Control"] == "no-store"
        assert answer.headers["Content-Security-Policy"].startswith("default-src 'none'")
        page = answer.read().decode()
        assert "something of new" in page and 'http-equiv="refresh"' in page
        assert "<script" not in page and "width=device-width" in page
        for other in (address[:-2] + "x/", address.rpartition("/")[0].rpartition("/")[0] + "/"):
            with pytest.raises(HTTPError) as caught:
                urllib.request.urlopen(other, timeout=LIMIT_S)
            assert caught.value.code == 404
    finally:
        process.terminate()
        process.wait(LIMIT_S)


@pytest.mark.exhaustive
@pytest.mark.parametrize("width", [375, 1280])
def test_a_browser_shows_the_page(runs: list[RunDirectory], width: int) -> None:
    """The page fits the screen of a phone, shows both runs, and treats markup in a run as text."""
    events.append(runs[1], "note", "<u>marked</u> <script>document.title = 'run'</script>")
    process = subprocess.Popen(**ours("--web"), stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    try:
        assert process.stdout is not None
        with browser(width) as page:
            page.open(process.stdout.readline().decode().strip())
            assert page.ask("window.innerWidth") == width
            assert page.ask("document.documentElement.scrollWidth") <= width
            text = page.ask("document.body.innerText")
            assert "old" in text and "new" in text and "<u>marked</u>" in text
            assert page.ask("document.querySelectorAll('u, script').length") == 0
    finally:
        process.terminate()
        process.wait(LIMIT_S)

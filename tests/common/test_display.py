"""Output on a screen is harmless, and a screen that is lost or lacks characters ends nothing."""

from __future__ import annotations

import ast
import io
import json
import os
import pty
import subprocess
import sys
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path

import pytest

import nanoscale
from nanoscale.cli.common.output import print_json, show_error
from nanoscale.cli.main import run as nanoscale_cli
from nanoscale.common import display
from nanoscale.common.errors import UserError, Violation
from nanoscale.config.composing.frozen import dump
from nanoscale.config.rules import Devices, check
from nanoscale.config.schema import Parallel
from nanoscale.launch.lifecycle.attempt import Outcome
from nanoscale.launch.lifecycle.command import HostPlan, LaunchPlan, arrange
from nanoscale.runs import events, failure, status
from nanoscale.runs.failure import RankFailure
from nanoscale.view.run.live import LiveView
from tests.support.recipes import changed
from tests.support.runs import create_run

CLIPBOARD, CLEAR = "\x1b]52;c;cm0gLXJm\x07", "\x1b[2J\x1b[H"
HOSTILE = f"a{CLIPBOARD}b{CLEAR}c\rd\x00e\x9b31mf\u202eg\x7fh [bold]i[/bold] [/j] :skull:"
OBEYED = "\r\x00\x07\x9b\u202e\x7f"
MESH = arrange([("h", (0, 1))], Parallel(dp=2))
PLAN = LaunchPlan(1, 2, (HostPlan("h", 2, (0, 1), ("x",)),), "127.0.0.1", 1, {}, (), MESH)


class Terminal(io.StringIO):
    encoding = "utf-8"

    def isatty(self):
        return True


def assert_harmless(text):
    """Check that all of the hostile text is shown, and no control character but our own colors."""
    assert "]52;c;" in text, text
    assert not set(OBEYED) & set(text.replace("\r\x1b[2K", ""))  # which the live view writes itself
    assert CLIPBOARD not in text
    assert CLEAR not in text
    for shown in (r"\x1b]52", r"\x1b[2J", r"\x00", r"\x9b", r"\u202e", r"\x7f", ":skull:"):
        assert shown in text, shown
    assert "[bold]i[/bold] [/j]" in text


@pytest.fixture
def run(tmp_path, monkeypatch):
    """A run whose rank, host and model say hostile things."""
    monkeypatch.chdir(tmp_path)
    run = create_run(tmp_path / "runs", "x")
    config = check(changed(), Devices("cpu", 2))
    config = replace(config, model=replace(config.model, name=HOSTILE))
    run.config.write_text(dump(config), encoding="utf-8")
    run.attempt_logs(1).mkdir()
    run.log(1, "h", 0, "out").write_bytes(HOSTILE.encode() + b"\n")
    cause = RankFailure(
        "raised", rank=1, local_rank=1, host=HOSTILE, time=1.0, type="E", message=HOSTILE
    )
    cause = failure.digest(run, 1, [cause], {})
    cause = failure.Failure(**{**asdict(cause), "diagnosis": HOSTILE, "traceback": HOSTILE})
    failure.write(run, cause)
    events.append(run, "failure", HOSTILE)
    status.write(run, status.prepared().starting(1).ending("failed", 1))
    return run


def test_text_that_a_terminal_obeys_becomes_visible():
    assert display.clean("\x1b[2J\r\x00\x9b\u202e") == r"\x1b[2J\r\x00\x9b\u202e"
    assert display.clean("plain │ text\twith ünïcode 漢字 👩‍💻\nand lines\r\n") == (
        "plain │ text\twith ünïcode 漢字 👩‍💻\nand lines\n"
    )
    assert display.clean("name-\udcff") == r"name-\udcff"


@pytest.mark.parametrize("stream", [io.StringIO, Terminal])
def test_the_live_view_shows_nothing_that_a_terminal_obeys(run, stream):
    stream = stream()
    with LiveView(run, stream) as view:
        view.begin(PLAN, 10)
        run.log(1, "h", 0, "out").write_bytes(HOSTILE.encode() + b"\n")
        view.wrote("h", 0)
        view.poll()
    assert "h:0 │ a" in stream.getvalue()
    assert_harmless(stream.getvalue())


def test_the_panel_of_a_failure_shows_nothing_that_a_terminal_obeys(run, monkeypatch):
    from nanoscale.view.run.outcome_text import print_outcome

    screen = Terminal()
    monkeypatch.setattr(sys, "stderr", screen)
    monkeypatch.setenv("COLUMNS", "300")
    print_outcome(run, Outcome("failed", 1, failure.read(run)), io.StringIO())
    assert_harmless(screen.getvalue())


@pytest.mark.parametrize("words", [["show", "x"], ["ls"], ["report", "x"]])
def test_commands_about_runs_show_nothing_that_a_terminal_obeys(run, capsys, words):
    assert nanoscale_cli(["runs", *words]) == 0
    assert_harmless(capsys.readouterr().out)


def test_logs_are_cleaned_on_a_terminal_and_as_they_are_elsewhere(run, capfdbinary, monkeypatch):
    assert nanoscale_cli(["runs", "logs", "x"]) == 0
    assert capfdbinary.readouterr().out == b"h:0 \xe2\x94\x82 " + HOSTILE.encode() + b"\n"
    monkeypatch.setattr(sys, "stdout", screen := Terminal())
    assert nanoscale_cli(["runs", "logs", "x"]) == 0
    assert_harmless(screen.getvalue())
    assert run.log(1, "h", 0, "out").read_bytes() == HOSTILE.encode() + b"\n"


def test_errors_show_nothing_that_a_terminal_obeys(capsys):
    show_error(UserError("run", "no", [Violation("k", HOSTILE, HOSTILE, HOSTILE)]), as_json=False)
    assert_harmless(capsys.readouterr().err)


def test_json_is_the_same_document_and_harmless(capsys):
    print_json({"text": HOSTILE + "é\udcff"})
    text = capsys.readouterr().out
    assert json.loads(text) == {"text": HOSTILE + "é\udcff"}
    assert not {"\x1b", *OBEYED} & set(text)
    assert "é" in text


def test_pages_escape_what_a_run_says(run):
    from nanoscale.view.blocks import page
    from nanoscale.view.run.run_report import document, run_report

    cause = failure.read(run)
    script = "<script>alert(1)</script>"
    fields = {**asdict(cause), "diagnosis": script, "traceback": script, "host": script}
    failure.write(run, failure.Failure(**fields))
    text = page(run_report(document(run)))
    assert script not in text
    assert "&lt;script&gt;" in text


def test_nothing_prints_past_the_boundary():
    """Text that does not pass `display` is not cleaned, and can end a training."""
    printing = {"print", "typer.echo", "Console", "sys.stdout.write", "sys.stderr.write"}
    package = Path(nanoscale.__file__).parent
    rooms = [package / name for name in ("cli", "view", "launch", "plan", "runs", "config")]
    for path in [file for room in rooms for file in room.rglob("*.py")]:
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.Call):
                assert ast.unparse(node.func) not in printing, f"{path}:{node.lineno}"


# --- a screen with few characters -----------------------------------------------------------------


@contextmanager
def ascii_screen(monkeypatch):
    streams = [io.TextIOWrapper(io.BytesIO(), encoding="ascii") for _ in range(2)]
    monkeypatch.setattr(sys, "stdout", streams[0])
    monkeypatch.setattr(sys, "stderr", streams[1])
    display.prepare_streams()
    yield streams[0]


def written(stream):
    stream.flush()
    return stream.buffer.getvalue()


def test_a_screen_without_utf8_ends_no_training(run, monkeypatch):
    with ascii_screen(monkeypatch) as screen, LiveView(run, screen) as view:
        view.begin(PLAN, 10)
        run.log(1, "h", 0, "out").write_text("漢\n", encoding="utf-8")
        view.wrote("h", 0)
        view.poll()
    assert b"mesh dp 2\n" in written(screen)
    assert b"h:0 | \\u6f22\n" in written(screen)


@pytest.mark.parametrize("words", [["plan", "recipe=debug"], ["runs", "report", "x"]])
def test_commands_work_on_a_screen_without_utf8(run, monkeypatch, words):
    with ascii_screen(monkeypatch) as screen:
        assert nanoscale_cli(words) == 0
    assert b"\\u" not in written(screen).replace(rb"\u202e", b"")


def test_the_program_works_on_a_screen_without_utf8(tmp_path):
    done = started("-m nanoscale plan recipe=debug", tmp_path, PYTHONIOENCODING="ascii")
    assert (done.returncode, done.stderr) == (0, b"")
    assert b"dp 1 * tp 1" in done.stdout


def started(arguments, folder, **environment):
    path = str(Path(nanoscale.__file__).parents[1])
    environment = {**os.environ, "PYTHONPATH": path, **environment}
    command = ["sh", "-c", f"{sys.executable} {arguments}"]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, check=False)


def test_json_on_a_screen_without_utf8_is_the_same_document(monkeypatch):
    with ascii_screen(monkeypatch) as screen:
        print_json({"name": "漢 – é"})
    assert json.loads(written(screen)) == {"name": "漢 – é"}


# --- a screen that is lost ------------------------------------------------------------------------


@contextmanager
def lost_screen(kind):
    """Provide a stream, and a function that breaks it."""
    if kind == "terminal":
        reader, writer = pty.openpty()
    elif kind == "pipe":
        reader, writer = os.pipe()
    else:  # it has been full all the time
        reader, writer = os.open("/dev/null", os.O_RDONLY), os.open("/dev/full", os.O_WRONLY)
    with open(writer, "w", encoding="utf-8") as stream:  # noqa: PTH123 - a descriptor
        yield stream, lambda: os.close(reader)
        display.give_up(stream)  # with its buffer


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("kind", ["terminal", "pipe", "full disk"])
def test_a_lost_screen_ends_no_training(run, kind, late):
    with lost_screen(kind) as (stream, lose):
        lose() if not late else None
        with LiveView(run, stream) as view:
            view.begin(PLAN, 10)
            lose() if late else None
            for _ in range(3):
                view.poll()
                view.line("more")


@pytest.mark.parametrize("kind", ["terminal", "pipe", "full disk"])
def test_a_lost_standard_error_ends_nothing(monkeypatch, kind):
    with lost_screen(kind) as (stream, lose):
        monkeypatch.setattr(sys, "stderr", stream)
        lose()
        display.note("a difference, before the ranks are started")
        assert nanoscale_cli(["trian"]) == 2


@pytest.mark.parametrize(("kind", "code"), [("pipe", 0), ("full disk", 1)])
def test_what_only_shows_ends_with_its_screen(run, monkeypatch, capfd, kind, code):
    """A reader that closes the stream is not an error; a full disk is."""
    with lost_screen(kind) as (stream, lose):
        monkeypatch.setattr(sys, "stdout", stream)
        lose()
        assert nanoscale_cli(["runs", "show", "x"]) == code


def test_a_closed_descriptor_leads_nowhere(tmp_path):
    (tmp_path / "program.py").write_text("""
import sys
from nanoscale.common import display
display.prepare_streams()
file = open("file", "w", encoding="utf-8")
display.show("text")
display.note("text")
sys.exit(file.fileno() < 3)
""")
    assert started("program.py <&- >&- 2>&-", tmp_path).returncode == 0
    assert (tmp_path / "file").read_text() == ""

from __future__ import annotations

import io
import json
import re
import time
from contextlib import contextmanager
from dataclasses import replace

import pytest

from nanoscale.config.schema import Parallel
from nanoscale.launch.lifecycle.command import HostPlan, LaunchPlan, arrange
from nanoscale.runs import events
from nanoscale.view.run.live import LiveView
from tests.support.runs import create_run

PLAN = LaunchPlan(1, 2, (HostPlan("h", 2, (0, 1), ("x",)),), "127.0.0.1", 1, {}, ())


@contextmanager
def shown(run, plan, steps, stream):
    """Return a view in the middle of its first attempt."""
    with LiveView(run, stream) as view:
        view.begin(plan, steps)
        yield view


class Terminal(io.StringIO):
    def isatty(self):
        return True


class Clock:
    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


@pytest.fixture
def run(tmp_path):
    run = create_run(tmp_path, "x")
    run.attempt_logs(1).mkdir()
    return run


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(time, "monotonic", clock)
    return clock


def log_steps(run, *steps, **more):
    with run.metrics.open("a") as file:
        for step in steps:
            record = {
                "step": step,
                "loss": 2.5,
                "grad_norm": 1.25,
                "lr": 3e-4,
                "tokens": 1,
                "step_time_s": 2.0,
                "tokens_per_s": 12345.6,
                "mfu": None,
                "memory_gib": 0.5,
                "time": time.time(),
                **more,
            }
            file.write(json.dumps(record) + "\n")


def shown_steps(stream):
    return [int(step) for step in re.findall(r"^step (\d+)/", stream.getvalue(), re.M)]


def test_every_figure_is_in_a_plain_line(run, clock):
    stream = io.StringIO()
    with shown(run, PLAN, 10, stream) as view:
        events.append(run, "running", "training from step 1")
        log_steps(run, 4, mfu=0.4125, eval_loss=2.75)
        view.poll()
    assert stream.getvalue().splitlines()[-1] == (
        "step 4/10  loss 2.5000  lr 3.00e-04  grad norm 1.250  tokens/s 12,346  MFU 41.2%  "
        "memory 512 MiB  step time 2 s  eval loss 2.7500  ETA 12 s"
    )
    assert "\x1b" not in stream.getvalue()


def test_plain_lines_come_once_a_second_and_the_last_always(run, clock):
    stream = io.StringIO()
    with shown(run, PLAN, 100, stream) as view:
        events.append(run, "running", "go")
        for step in range(1, 31):
            log_steps(run, step)
            view.poll()
            clock.now += 0.125
        log_steps(run, 99, 100)
        view.poll()
    assert shown_steps(stream) == [1, 9, 17, 25, 100]


def test_slow_steps_are_all_shown_and_a_waiting_one_is_not_held_back(run, clock):
    stream = io.StringIO()
    with shown(run, PLAN, 100, stream) as view:
        events.append(run, "running", "go")
        log_steps(run, 1)
        view.poll()
        clock.now += 0.5
        log_steps(run, 2)
        view.poll()
        clock.now += 0.6
        view.poll()
        assert shown_steps(stream) == [1, 2]


def test_what_earlier_attempts_did_is_not_shown_again(run, clock):
    events.append(run, "note", "long ago")
    log_steps(run, 1, 2, 3, 4, 5)
    stream = io.StringIO()
    with shown(run, PLAN, 6, stream) as view:
        events.append(run, "resumed", "resumed from step-00000004", step=4)
        view.poll()
        run.metrics.write_text("".join(run.metrics.read_text().splitlines(True)[:4]))
        events.append(run, "running", "training from step 5")
        log_steps(run, 5, 6)
        view.poll()
    assert "long ago" not in stream.getvalue()
    assert stream.getvalue().count("step 5/6") <= 1
    assert shown_steps(stream)[-1] == 6
    assert min(shown_steps(stream)) >= 5


def test_what_ranks_print_carries_host_and_rank(run):
    stream = io.StringIO()
    with shown(run, PLAN, 6, stream) as view:
        run.log(1, "h", 1, "out").write_bytes(b"hello\n\xff no end")
        run.log(1, "h", 0, "err").write_text("for the log only\n")
        view.wrote("h", 1)
        view.poll()
    assert "h:1 │ hello\n" in stream.getvalue()
    assert "h:1 │ � no end\n" in stream.getvalue()
    assert "for the log only" not in stream.getvalue()


def test_of_a_flood_a_little_is_shown_and_the_rest_is_in_the_log(run):
    stream = io.StringIO()
    with shown(run, PLAN, 6, stream) as view, run.log(1, "h", 1, "out").open("wb") as log:
        for number in range(10):
            log.write(b"a line\n" * 100_000 if number else b"x" * 700_000)
            log.flush()
            view.wrote("h", 1)
            view.poll()
        log.write(b"the last\n")
    text = stream.getvalue()
    assert len(text) < 2 << 20
    assert "bytes of its output here are only in" in text and "h:1 │ the last" in text
    assert max(map(len, text.splitlines())) < 40_000


def test_the_beginning_of_a_line_is_shown_when_its_end_does_not_come(run, clock):
    stream = io.StringIO()
    with (
        shown(run, PLAN, 6, stream) as view,
        run.log(1, "h", 1, "out").open("wb", buffering=0) as log,
    ):
        log.write(b"waiting for")
        view.wrote("h", 1)
        view.poll()
        assert "waiting" not in stream.getvalue()
        clock.now += 6
        view.poll()
        assert "h:1 │ waiting for\n" in stream.getvalue()


def test_a_sample_is_a_block(run):
    stream = io.StringIO()
    with shown(run, PLAN, 6, stream) as view:
        events.append(run, "sample", "a sample", text="def f():\n    pass")
        view.poll()
    assert "a sample:\n    def f():\n        pass\n" in stream.getvalue()


def test_a_terminal_has_a_panel_and_lines_above_it(run):
    stream = Terminal()
    with shown(run, PLAN, 10, stream) as view:
        view.poll()
        events.append(run, "running", "training from step 1")
        events.append(run, "checkpoint", "[bold]step-00000003[/bold] saved")
        log_steps(run, 3)
        view.poll()
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", stream.getvalue())
    assert "starting the ranks" in text
    assert "[bold]step-00000003[/bold] saved" in text  # shown as it is, not as markup
    assert "step 3/10" in text and "ETA 14 s" in text and "12,346" in text


@pytest.mark.parametrize("kind", [io.StringIO, Terminal])
def test_a_reader_that_leaves_does_not_end_the_run(run, kind):
    class Broken(kind):  # type: ignore[valid-type]
        def write(self, text):
            if self.broken:
                raise BrokenPipeError(32, "Broken pipe")
            return len(text)

    stream = Broken()
    stream.broken = False
    with shown(run, PLAN, 10, stream) as view:
        stream.broken = True
        events.append(run, "running", "go")
        log_steps(run, 10)
        view.poll()
    assert view.running


def test_loss_scaling_is_shown_where_there_is_any(run, clock):
    stream = io.StringIO()
    with shown(run, PLAN, 10, stream) as view:
        events.append(run, "running", "training from step 1")
        log_steps(run, 4, loss_scale=32768.0, skipped_steps=2, grad_norm=None)
        view.poll()
    assert "loss scale 32768  skipped 2 steps" in stream.getvalue()
    assert "grad norm not finite" in stream.getvalue()


def test_the_beginning_shows_the_mesh(run):
    hosts = (HostPlan("a", 4, (0, 1, 2, 3), ("x",)), HostPlan("b", 4, (4, 5, 6, 7), ("x",)))
    mesh = arrange([(host.host, host.ranks) for host in hosts], Parallel(dp=2, tp=2, pp=2))
    stream = io.StringIO()
    with shown(run, replace(PLAN, world_size=8, hosts=hosts, mesh=mesh), 10, stream):
        pass
    assert stream.getvalue() == "starting 8 ranks on a, b, mesh pp 2 × dp 2 × tp 2\n"


def test_joining_shows_the_attempt_so_far_in_short_and_then_all(run, clock):
    events.append(run, "attempt", "attempt 1", attempt=1)
    events.append(run, "checkpoint", "of long ago")
    events.append(run, "attempt", "attempt 2", attempt=2)
    events.append(run, "resumed", "resumed from step-00000002", step=2)
    log_steps(run, 1, 2)
    events.append(run, "running", "training from step 3")
    log_steps(run, 3, 4, 5)
    run.attempt_logs(2).mkdir()
    log = run.log(2, "h", 0, "out")
    log.write_text("printed before\n")
    stream = io.StringIO()
    with LiveView(run, stream) as view:
        view.join(replace(PLAN, attempt=2), 10)
        assert view.running
        with log.open("a") as file:
            file.write("printed later\n")
        view.poll()
        clock.now += 2
        log_steps(run, 6)
        events.append(run, "checkpoint", "of now")
        view.poll()
    text = stream.getvalue()
    assert text.startswith("watching 2 ranks on h\n")
    assert shown_steps(stream) == [5, 6]
    assert "resumed from step-00000002" in text and "of now" in text and "of long ago" not in text
    assert "h:0 │ printed later" in text and "before" not in text


def test_joining_before_the_first_step_waits_for_it(run, clock):
    stream = io.StringIO()
    with LiveView(run, stream) as view:
        view.join(PLAN, 10)
        assert not view.running
        events.append(run, "attempt", "attempt 1", attempt=1)
        events.append(run, "running", "training from step 1")
        log_steps(run, 1)
        view.poll()
    assert shown_steps(stream) == [1]


def test_a_long_silence_is_told_and_again_when_it_has_doubled(run, clock):
    stream = io.StringIO()
    with shown(run, PLAN, 10, stream) as view:
        events.append(run, "running", "")
        view.poll()
        for step, at in ((1, 110.0), (2, 120.0)):
            clock.now = at
            log_steps(run, step)
            view.poll()
        for at in (149.0, 151.0, 155.0, 180.0, 183.0):  # 29 s of silence, 31, 35, 60 and 63
            clock.now = at
            view.poll()
        clock.now = 184.0
        log_steps(run, 3)
        view.poll()
        clock.now = 360.0  # less than three times the longest silence before
        view.poll()
    told = [line for line in stream.getvalue().splitlines() if line.startswith("no step for")]
    assert told == ["no step for 31 s, since step 2", "no step for 63 s, since step 2"]

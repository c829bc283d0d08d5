from __future__ import annotations

import errno
import fcntl
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path

import psutil
import pytest

from nanoscale.common.errors import UserError
from nanoscale.processes.proc import start_ticks
from nanoscale.runs import lock
from nanoscale.runs.lock import RunLock
from tests.support.runs import create_run

LAUNCHER = """
import errno, fcntl, json, os, sys, time
from pathlib import Path
from nanoscale.common.errors import UserError
from nanoscale.processes.proc import start_ticks
from nanoscale.runs import lock
from nanoscale.runs.directory import RunDirectory

options = json.loads(sys.argv[2])
lock.BEAT_S, lock.PATIENCE_BEATS = options["beat_s"], options["patience"]
if options["host"]:
    lock.kernel_id = lambda _: options["host"]
if not options["flocks"]:
    def none(*_):
        raise OSError(errno.ENOLCK, "no locks available")
    fcntl.flock = none
if options["behind_s"]:
    touch = os.utime
    os.utime = lambda path, dir_fd: touch(path, (0, time.time() - options["behind_s"]), dir_fd=dir_fd)
run = RunDirectory(Path(sys.argv[1]))
held = None
for line in sys.stdin:
    word, _, when = line.strip().partition(" ")
    while when and time.monotonic() < float(when):
        pass
    if word == "take":
        try:
            held = lock.RunLock(run).__enter__()
            answer = "held"
        except UserError as error:
            answer = f"refused: {error}"
    elif word == "lost?":
        answer = str(held.lost)
    else:
        held.__exit__(None, None, None)
        answer = "released"
    print(answer, flush=True)
"""

ELSEWHERE = {"host": "another kernel", "flocks": False}


class Launcher:
    """A process that takes the lock on request."""

    def __init__(self, run, prefix=(), **options):
        defaults = {"host": "", "flocks": True, "beat_s": 0.1, "patience": 10, "behind_s": 0}
        words = [sys.executable, "-c", LAUNCHER, str(run.path), json.dumps(defaults | options)]
        self.process = subprocess.Popen(
            [*prefix, *words],
            env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            bufsize=1,
        )

    def ask(self, line):
        self.process.stdin.write(f"{line}\n")

    def answer(self):
        return self.process.stdout.readline().strip()

    def say(self, line):
        self.ask(line)
        return self.answer()

    def kill(self):
        """Kill it; return its output for the user."""
        self.process.kill()
        return self.process.communicate()[1]


@pytest.fixture
def run(tmp_path):
    return create_run(tmp_path, "x")


@pytest.fixture
def launcher(run):
    launchers = []

    def start(*arguments, **options):
        launchers.append(Launcher(run, *arguments, **options))
        return launchers[-1]

    yield start
    for each in launchers:
        each.kill()


def tokens(run):
    return [path.name for path in run.path.glob("lock*")]


def test_the_second_launcher_is_told_who_holds_the_run(run, launcher):
    holder = launcher()
    assert holder.say("take") == "held"
    with pytest.raises(UserError) as error, RunLock(run):
        pass
    assert f"process {holder.process.pid} of " in str(error.value)
    assert f"nanoscale runs stop {run.path}" in error.value.violations[0].suggestions
    assert lock.owner(run).pid == holder.process.pid
    with pytest.raises(UserError, match="is already running"):
        lock.refuse_if_held(run)


@pytest.mark.parametrize("flocks", [True, False])
def test_a_killed_holder_of_this_host_holds_nothing(run, launcher, flocks):
    holder, second = launcher(flocks=flocks), launcher(flocks=flocks, patience=1000)
    assert holder.say("take") == "held"
    assert second.say("take").startswith("refused")
    holder.process.kill()
    holder.process.wait()
    assert second.say("take") == "held"
    assert lock.owner(run).pid == second.process.pid
    assert second.say("release") == "released"
    assert lock.owner(run) is None and tokens(run) == ["lock"]
    assert second.kill() == ""  # it did not wait


def test_the_number_of_a_dead_process_may_be_that_of_another_one(run):
    leave(run, replace(lock.Owner.me(), born=lock.Owner.me().born - 1))
    assert lock.owner(run) is None
    with RunLock(run):
        assert lock.owner(run).pid == os.getpid()


def leave(run, owner):
    """Leave the files of a launcher that was killed."""
    (path,) = run.path.glob("lock*")
    token = path.rename(run.path / "lock.dead")
    token.write_text(json.dumps({"token": token.name, **asdict(owner)}))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rounds", "flocks", "dead"), [(50, True, False), (50, False, False), (15, False, True)]
)
def test_of_two_launchers_that_race_exactly_one_wins(run, launcher, rounds, flocks, dead):
    """Also of two on two hosts without flocks that both have found the holder dead."""
    hosts = ("one", "two") if dead else ("", "")
    racers = [launcher(host=host, flocks=flocks, beat_s=0.05) for host in hosts]
    winners = []
    for _ in range(rounds):
        if dead:
            leave(run, replace(lock.Owner.me(), kernel="a third"))
        start = time.monotonic() + 0.05
        for racer in racers:
            racer.ask(f"take {start}")
        answers = [racer.answer() for racer in racers]
        assert sorted(answer.partition(":")[0] for answer in answers) == ["held", "refused"]
        winners.append(answers.index("held"))
        winner = racers[winners[-1]]
        assert f"process {winner.process.pid} of" in answers[1 - winners[-1]]
        assert winner.say("release") == "released"
        assert tokens(run) == ["lock"]


@pytest.mark.slow
def test_a_holder_on_another_host_is_watched_until_it_beats(run, launcher):
    """Its clock may be hours behind."""
    holder, second = launcher(behind_s=7200, **ELSEWHERE), launcher(flocks=False, patience=100)
    assert holder.say("take") == "held"
    assert second.say("take").startswith(
        f"refused: the run 'x' is already running: process {holder.process.pid}"
    )
    holder.process.kill()
    holder.process.wait()
    before = time.monotonic()
    third = launcher(flocks=False, patience=10)
    assert third.say("take") == "held"
    assert time.monotonic() - before > 1.0
    assert f"x is held by process {holder.process.pid} of" in (said := third.kill())
    assert "waiting up to 1 s to see if it is alive" in said


@pytest.mark.slow
def test_a_holder_that_was_suspended_finds_out(run, launcher):
    holder, second = launcher(flocks=False), launcher(**ELSEWHERE)
    assert holder.say("take") == "held"
    holder.process.send_signal(signal.SIGSTOP)
    assert second.say("take") == "held"
    holder.ask("lost?")
    holder.process.send_signal(signal.SIGCONT)
    assert holder.answer() == "True"
    assert holder.say("release") == "released"
    assert second.say("lost?") == "False"
    assert len(tokens(run)) == 1
    assert launcher(**ELSEWHERE | {"host": "a third"}).say("take").startswith("refused")
    assert second.say("release") == "released"


def test_a_taken_run_is_known_before_anything_is_written(run):
    with RunLock(run) as held:
        held.require()
        (token,) = run.path.glob("lock*")
        leave(run, replace(lock.Owner.me(), host="thief", kernel="elsewhere"))
        assert not held.lost  # no launcher takes it so soon
        held._last_beat -= lock.BEAT_S * 2
        with pytest.raises(lock.TakenOverError, match="taken over by process .* on thief"):
            held.require()
    assert tokens(run) == ["lock.dead"] and not token.exists()


@pytest.mark.parametrize("is_stale", [False, True])
def test_a_folder_out_of_sight_is_waited_for(run, monkeypatch, tmp_path, is_stale):
    """A file system is not mounted for a moment, or its open folders are stale."""
    elsewhere, looks = tmp_path / "elsewhere", iter((False, False, True))
    monkeypatch.setattr(lock, "_change_of", lambda _: None)
    monkeypatch.setattr(lock, "BEAT_S", 1e9)  # no beats but the test's

    def stale(*_, **__):
        raise OSError(errno.ESTALE, "Stale file handle")

    with RunLock(run) as held:

        def hide():
            run.path.rename(elsewhere)
            monkeypatch.setattr(os, "utime", stale if is_stale else utime)

        def sleep(_):
            if next(looks):
                elsewhere.rename(run.path)
                monkeypatch.setattr(os, "utime", utime)

        utime = os.utime
        held.require()
        hide()
        held._beat()
        assert not held.lost
        with monkeypatch.context() as patch:
            patch.setattr(time, "sleep", sleep)
            held.require()
        assert next(looks, None) is None and not held.lost
        hide()
        monkeypatch.setattr(lock, "MISSING_S", -1.0)
        with pytest.raises(lock.TakenOverError, match="was out of sight for") as caught:
            held.require()
        assert "renamed" not in caught.value.message
        elsewhere.rename(run.path)
        assert held.lost
        monkeypatch.setattr(os, "utime", utime)


@pytest.mark.skipif(
    os.geteuid() != 0 or not shutil.which("unshare"), reason="needs unshare as root"
)
def test_where_flocks_reach_another_host_it_is_refused_at_once(run, launcher, monkeypatch):
    """A suspended holder there sends no heartbeat, but still holds the run."""
    away = ("unshare", "--uts", "--pid", "--fork", "--kill-child", "sh", "-c")
    holder = launcher((*away, 'hostname elsewhere; exec "$@"', "sh"), patience=1000)
    assert holder.say("take") == "held"
    for process in psutil.Process(holder.process.pid).children(recursive=True):
        process.suspend()
    monkeypatch.setattr(lock, "_POLL_S", "never")  # which no sleep takes
    with pytest.raises(UserError, match="on elsewhere since"), RunLock(run):
        pass
    assert lock.owner(run).host == "elsewhere"
    with pytest.raises(UserError, match="held from another host") as error:
        lock.terminate(run, lock.owner(run))
    words = shlex.split(error.value.violations[0].suggestions[0])
    assert words[:2] == ["ssh", "elsewhere"]
    assert shlex.split(words[2])[-3:] == ["runs", "stop", str(run.path)]


def test_looking_at_a_free_lock_is_in_nobodys_way(run, monkeypatch):
    looking = os.open(run.lock, os.O_RDWR)
    fcntl.flock(looking, fcntl.LOCK_SH)
    monkeypatch.setattr(time, "sleep", lambda _: fcntl.flock(looking, fcntl.LOCK_UN))
    with RunLock(run):
        pass
    os.close(looking)


def test_a_run_without_its_token_is_not_taken(run):
    run.lock.unlink()
    with pytest.raises(UserError, match="it has no file `lock`") as error, RunLock(run):
        pass
    assert error.value.violations[0].suggestions == (f"touch {run.lock}",)
    assert lock.owner(run) is None


def test_a_launcher_elsewhere_cannot_be_stopped_from_here(run):
    elsewhere = lock.Owner("another-host", 1, "me", 0.0, "nanoscale train")
    with pytest.raises(UserError, match="another-host"):
        lock.terminate(run, elsewhere)
    option = replace(elsewhere, host="-oProxyCommand=touch x")
    with pytest.raises(UserError) as error:
        lock.terminate(run, option)
    assert not error.value.violations[0].suggestions


@pytest.fixture
def bystander():
    """A process of this user that has nothing to do with the run, and its Owner."""
    process = subprocess.Popen(["sleep", "60"])
    yield process, replace(lock.Owner.me(), pid=process.pid, born=start_ticks(process.pid))
    process.kill()
    process.wait()


def test_a_forged_token_names_no_holder(run, bystander):
    """Every word of the token is true, but the process does not have the run."""
    process, owner = bystander
    leave(run, owner)
    assert lock.owner(run) is None
    with RunLock(run):
        assert lock.owner(run).pid == os.getpid()
        lock.terminate(run, owner)
    assert process.poll() is None


def test_a_process_that_only_reads_the_token_does_not_hold_it(run, bystander):
    _, owner = bystander
    with run.lock.open("rb") as token:
        reader = subprocess.Popen(["sleep", "60"], stdin=token)
    try:
        leave(run, replace(owner, pid=reader.pid, born=start_ticks(reader.pid)))
        assert lock.owner(run) is None
    finally:
        reader.kill()
        reader.wait()


def test_a_process_that_has_the_token_open_for_writing_is_not_ended(run, bystander):
    """A stranger's run folder names any process of mine."""
    _, owner = bystander
    with run.lock.open("ab") as token:
        writer = subprocess.Popen(["sleep", "60"], stdin=token)
    try:
        leave(run, forged := replace(owner, pid=writer.pid, born=start_ticks(writer.pid)))
        assert lock.owner(run) == forged
        lock.terminate(run, forged)
        time.sleep(0.1)
        assert writer.poll() is None
    finally:
        writer.kill()
        writer.wait()


@pytest.mark.parametrize(
    "change", [{"pid": "1; rm x"}, {"pid": -1}, {"since": 1e300}, {"host": 1}, {"more": 1}]
)
def test_a_token_of_nonsense_is_no_process_of_this_host(run, change):
    leave(run, lock.Owner.me())
    (token,) = run.path.glob("lock*")
    token.write_text(json.dumps(json.loads(token.read_text()) | change))
    holder = lock.owner(run)
    assert holder is None or (not holder.is_here and str(holder))

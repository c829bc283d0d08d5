"""However a job ends, the exit code is true, the first cause is shown, and no process is left."""

from __future__ import annotations

import getpass
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import uuid
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from nanoscale.processes import lifeline
from nanoscale.processes.proc import is_alive
from nanoscale.runs import lock
from tests.support.rows import exhaustive

HERE = Path(__file__).parent
LIMIT_S = 60.0


class Launched:
    """A launcher that runs, with all that it starts."""

    def __init__(self, tmp_path, job, ranks=2, grace_s=30.0):
        self.mark = uuid.uuid4().hex
        self.run = tmp_path / "runs" / "run"
        self.screen = tmp_path / "screen"
        self.semaphores = []
        environment = {**os.environ, "TEST_MARK": self.mark, "PYTHONPATH": _path()}
        words = ["launch", job, str(tmp_path / "runs"), str(ranks), str(grace_s)]
        # A file of the user's that is named like a module of Python's must not be imported.
        (tmp_path / "random.py").write_text("raise RuntimeError('imported from the folder')")
        with self.screen.open("wb") as screen:
            self.process = subprocess.Popen(
                [sys.executable, str(HERE / "stand_in.py"), *words],
                cwd=tmp_path,
                env=environment,
                stdout=screen,
                stderr=screen,
                preexec_fn=_restore_interrupt,
            )

    def wait_for(self, condition, what):
        deadline = time.monotonic() + LIMIT_S
        while not condition():
            assert time.monotonic() < deadline, f"no {what}; screen:\n{self.text}"
            time.sleep(0.02)

    def wait_until_training(self):
        self.wait_for(lambda: '"running"' in _read(self.run / "events.jsonl"), "training")
        self.wait_for(lambda: len(_read(self.run / "metrics.jsonl")) > 100, "steps")
        self.wait_for(
            lambda: '"running"' in _read(self.run / "status.json"), "note of the launcher"
        )
        self.semaphores = _semaphores(self.pid(0))
        assert self.semaphores

    def pid(self, rank):
        return int((self.run / f"pid-{rank}").read_text())

    def agent(self):
        (found,) = [
            p.pid
            for p in self.processes()
            if os.getsid(p.pid) == p.pid and p.ppid() == self.process.pid
        ]
        return found

    def end(self):
        """Return the exit code, after checking that no process is left."""
        code = self.process.wait(LIMIT_S)
        assert self.processes() == []
        assert [path for path in self.semaphores if path.exists()] == []
        return code

    def processes(self):
        """Return every living descendant of the launcher, in any session."""
        return [p for p in psutil.process_iter() if _is_marked(p, self.mark)]

    @property
    def text(self):
        return _read(self.screen)

    def document(self, name):
        return json.loads((self.run / name).read_text())


def _path():
    return os.pathsep.join([str(HERE), str(HERE.parent.parent)])


def _most_memory(pid):
    """Return the peak memory of a process, KiB."""
    found = re.search(r"VmHWM:\s+(\d+)", Path(f"/proc/{pid}/status").read_text())
    assert found is not None
    return int(found[1])


def _bytes_copied(pid):
    """Return the bytes that a process has read and written so far, whatever the file."""
    counts = dict(line.split(": ") for line in Path(f"/proc/{pid}/io").read_text().splitlines())
    return int(counts["rchar"]) + int(counts["wchar"])


def _restore_interrupt():
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # a test run in the background ignores it


def _semaphores(pid):
    """Return the named semaphores that a process has open; a killed process cannot remove them."""
    maps = Path(f"/proc/{pid}/maps").read_text()
    return {Path(word) for word in maps.split() if word.startswith("/dev/shm/sem.")}


def _read(path):
    return path.read_text(errors="replace") if path.exists() else ""


def _is_marked(process, mark):
    try:
        dead = process.status() == psutil.STATUS_ZOMBIE
        return not dead and process.environ().get("TEST_MARK") == mark
    except psutil.Error:
        return False


@pytest.fixture
def launch(tmp_path):
    launched = []

    def start(*arguments, **options):
        launched.append(Launched(tmp_path, *arguments, **options))
        return launched[-1]

    yield start
    for job in launched:
        for process in job.processes():
            process.kill()
        for left in job.run.glob("nothing-*"):  # where no cgroup was delegated
            with suppress(OSError):
                os.kill(int(left.read_text()), signal.SIGKILL)


@pytest.mark.slow
def test_a_job_completes(launch):
    job = launch("short")
    assert job.end() == 0
    assert job.document("status.json")["state"] == "completed"
    assert "step 5/5  loss 0.2000" in job.text
    assert "0 │ printed by a rank" in job.text
    assert "0 │ garbage is looked for: True, in torch too: False" in job.text
    assert "    def f():\n        return 1" in job.text
    assert "completed after 5 steps" in job.text
    assert "\x1b" not in job.text
    assert not (job.run / "failure.json").exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "code", "state"),
    [(signal.SIGINT, 130, "stopped"), (signal.SIGTERM, 75, "preempted")],
)
def test_one_signal_stops_in_good_order(launch, number, code, state):
    job = launch("loop")
    job.wait_until_training()
    job.process.send_signal(number)
    assert job.end() == code
    assert job.document("status.json")["state"] == state
    assert job.document("status.json")["exit_code"] == code
    assert "stopping after the current step; Ctrl-C again to kill" in job.text
    assert '"outcome": "stopped"' in _read(job.run / "events.jsonl")
    assert "Traceback" not in job.text
    assert not (job.run / "failure.json").exists()


@pytest.mark.slow
def test_a_local_job_listens_on_the_loopback_only(launch):
    job = launch("loop")
    job.wait_until_training()
    connections = [c for process in job.processes() for c in process.net_connections("inet")]
    listening = {c.laddr.ip for c in connections if c.status == psutil.CONN_LISTEN}
    job.process.send_signal(signal.SIGTERM)
    assert job.end() == 75
    assert listening == {"127.0.0.1"}


@pytest.mark.slow
def test_ctrl_c_ends_a_rank_that_floods(launch, tmp_path, monkeypatch):
    """One line without an end, not UTF-8: neither time nor memory may depend on how much was printed.

    The rank writes its log itself. The launcher and the agent read and write a small part of it at most.
    """
    block = bytes(range(128, 256)) * 8192
    (tmp_path / "block").write_bytes(block)
    monkeypatch.setenv("FLOOD_BLOCK", str(tmp_path / "block"))
    job = launch("flood", ranks=1)
    log = job.run / "logs/attempt-1"
    job.wait_for(
        lambda: list(log.glob("*.out")) and '"running"' in _read(job.run / "events.jsonl"), "start"
    )
    (out,) = log.glob("*.out")
    processes = [job.process.pid, job.agent()]
    memory = [_most_memory(pid) for pid in processes]
    copied = sum(map(_bytes_copied, processes))
    job.wait_for(lambda: out.stat().st_size > 256 << 20, "output")
    memory = [_most_memory(pid) - before for pid, before in zip(processes, memory, strict=True)]
    copied = sum(map(_bytes_copied, processes)) - copied
    job.process.send_signal(signal.SIGINT)
    assert job.end() == 130
    assert max(memory) < 64 << 10
    assert copied < 32 << 20
    with out.open("rb") as file:
        while printed := file.read(len(block)):
            assert printed == block[: len(printed)]


@pytest.mark.slow
def test_a_second_interrupt_kills_even_stopped_ranks(launch):
    job = launch("loop")
    job.wait_until_training()
    os.kill(job.pid(1), signal.SIGSTOP)
    job.process.send_signal(signal.SIGINT)
    job.wait_for(lambda: "Ctrl-C again" in job.text, "answer to the first signal")
    job.process.send_signal(signal.SIGINT)
    assert job.end() == 130
    assert job.document("status.json")["state"] == "stopped"


@pytest.mark.slow
def test_a_stop_that_takes_too_long_is_forced(launch):
    job = launch("loop", grace_s=0.5)
    job.wait_until_training()
    os.kill(job.pid(1), signal.SIGSTOP)
    job.process.send_signal(signal.SIGTERM)
    assert job.end() == 1
    assert "did not stop within 0.5 s" in job.document("failure.json")["diagnosis"]


@pytest.mark.slow
@pytest.mark.parametrize("moment", ["before the ranks", "before the first step"])
def test_a_signal_while_starting_ends_at_once(launch, moment):
    job = launch("slow_start", grace_s=3600.0)  # nobody waits for it
    ready = "launch.json" if moment == "before the ranks" else "pid-1"
    job.wait_for(lambda: list(job.run.rglob(ready)), ready)
    job.process.send_signal(signal.SIGINT)
    assert job.end() == 130
    assert job.document("status.json")["state"] == "stopped"
    assert "Traceback" not in job.text


@pytest.mark.slow
def test_the_rank_that_raised_is_shown_and_not_those_that_lost_it(launch):
    job = launch("explode")
    assert job.end() == 1
    failure = job.document("failure.json")
    assert (failure["rank"], failure["exception"]) == (1, "ValueError")
    assert "ValueError: the ninth wave" in failure["traceback"]
    assert failure["also_failed"] in ([], [0])  # rank 0 may have been ended before it noticed
    assert "rank 1 on" in job.text
    assert job.text.count("Traceback") == 1
    assert job.document("status.json")["state"] == "failed"


@pytest.mark.slow
def test_a_killed_rank_is_the_cause(launch):
    job = launch("loop", grace_s=3600.0)
    job.wait_until_training()
    os.kill(job.pid(1), signal.SIGKILL)
    assert job.end() == 1
    failure = job.document("failure.json")
    assert (failure["rank"], failure["signal"]) == (1, "SIGKILL")
    assert "kill" in failure["diagnosis"]
    assert failure["log"].endswith("rank-1.err")


@pytest.mark.slow
def test_a_killed_fork_server_is_the_cause(launch):
    job = launch("loop")
    job.wait_until_training()
    os.kill(psutil.Process(job.pid(1)).ppid(), signal.SIGKILL)
    assert job.end() == 1
    assert "process that starts" in job.document("failure.json")["diagnosis"]


@pytest.mark.slow
def test_a_rank_with_a_wrong_request_exits_2_without_a_traceback(launch):
    job = launch("wrong_data")
    assert job.end() == 2
    assert "error: x.bin is not there" in job.text
    assert "Traceback" not in job.text
    assert job.document("failure.json")["user_error"]["violations"][0]["key"] == "data.path"


@pytest.mark.slow
def test_a_rank_fails_as_it_does_when_its_log_takes_nothing_more(launch):
    job = launch("full_log", ranks=1)
    assert job.end() == 2
    failure = job.document("failure.json")
    assert failure["exit_code"] == 2 and failure["exception"].endswith("UserError")
    assert "error: x.bin is not there" in job.text


@pytest.mark.slow
def test_a_killed_agent_takes_its_ranks_along(launch):
    job = launch("loop")
    job.wait_until_training()
    os.kill(job.agent(), signal.SIGKILL)
    assert job.end() == 1
    assert job.document("failure.json")["rank"] is None
    assert "agent" in job.document("failure.json")["diagnosis"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "killed", ["launcher", exhaustive("launcher and agent"), "launcher, agent and ranks"]
)
def test_a_killed_launcher_leaves_nothing(launch, tmp_path, monkeypatch, killed):
    """No process, not even in a session of its own, no temporary folder and no semaphore."""
    monkeypatch.setenv("TMPDIR", str(tmp_path / "t"))
    (tmp_path / "t").mkdir()
    job = launch("daemons")
    job.wait_until_training()
    strays = [int((job.run / f"session-{rank}").read_text()) for rank in (0, 1)]
    if (probe := lifeline.create_cgroup(job.mark)) is not None:
        lifeline.end_cgroup(probe)
        strays += [int((job.run / f"nothing-{rank}").read_text()) for rank in (0, 1)]
    os.kill(job.pid(1), signal.SIGSTOP)
    agent, ranks = job.agent(), [job.pid(0), job.pid(1)]
    job.process.send_signal(signal.SIGSTOP)  # or it would clear up after the agent
    for pid in {"launcher": [], "launcher and agent": [agent]}.get(killed, [*ranks, agent]):
        os.kill(pid, signal.SIGKILL)
    job.process.kill()
    job.process.wait()
    job.wait_for(lambda: not any(map(is_alive, strays)), "end of what the ranks have started")
    job.wait_for(lambda: job.processes() == [], "end of all processes")
    assert job.end() == -signal.SIGKILL
    assert {path.name for path in (tmp_path / "t").iterdir()} <= {
        f"torchinductor_{getpass.getuser()}"
    }


@pytest.mark.slow
@pytest.mark.parametrize("killed", ["launcher", "agent"])
def test_a_kill_while_ranks_start_leaves_no_folder(launch, tmp_path, monkeypatch, killed):
    folder = tmp_path / "t"
    folder.mkdir()
    monkeypatch.setenv("TMPDIR", str(folder))
    job = launch("loop")
    job.wait_for(lambda: [*folder.glob("nanoscale-*")], "temporary folder")
    job.wait_for(lambda: psutil.Process(job.agent()).children(), "fork server")
    os.kill(job.agent() if killed == "agent" else job.process.pid, signal.SIGKILL)
    job.process.wait(LIMIT_S)
    job.wait_for(lambda: job.processes() == [], "end of all processes")
    assert [path.name for path in folder.glob("nanoscale-*")] == []


@pytest.mark.slow
def test_a_launcher_that_finds_its_run_taken_over_ends_its_ranks_and_writes_nothing(launch):
    job = launch("loop")
    job.wait_until_training()
    job.process.send_signal(signal.SIGSTOP)
    (token,) = job.run.glob("lock.*")
    thief = token.rename(token.with_name("lock.thief"))
    owner = {**json.loads(thief.read_text()), "token": thief.name, "host": "elsewhere"}
    thief.write_text(json.dumps(owner))
    time.sleep(lock.PATIENCE_BEATS * lock.BEAT_S)  # before that no launcher takes it
    before = written(job.run)
    job.process.send_signal(signal.SIGCONT)
    assert job.end() == 1
    assert "was taken over by process" in job.text and "on elsewhere since" in job.text
    assert written(job.run) == before
    assert [path.name for path in job.run.glob("lock*")] == ["lock.thief"]


@pytest.mark.slow
@pytest.mark.parametrize("what", [exhaustive("renamed"), "deleted"])
def test_a_folder_that_is_taken_away_is_named_as_such(launch, what):
    """The old launcher reported another holder of the run, or failed with a traceback."""
    job = launch("loop")
    job.wait_until_training()
    elsewhere = job.run.with_name("elsewhere")
    job.process.send_signal(signal.SIGSTOP)  # else it may see the folder between its two changes
    job.run.rename(elsewhere)
    if what == "deleted":
        # Otherwise it would continue to write there.
        os.kill(int((elsewhere / "pid-0").read_text()), signal.SIGSTOP)
        shutil.rmtree(elsewhere)
    job.process.send_signal(signal.SIGCONT)
    assert job.end() == 1
    said = f"renamed to {elsewhere}" if what == "renamed" else "deleted"
    assert f"the folder of the run 'run' was {said} while the run was running" in job.text
    assert "Traceback" not in job.text and "taken over" not in job.text
    if what == "renamed":
        assert (elsewhere / "lock").exists()  # `resume` can take it there


def written(run):
    """Return the launcher's files: all but the ranks' own."""
    theirs = ("metrics.jsonl", "pid-0", "pid-1")
    files = [path for path in run.rglob("*") if path.is_file() and path.name not in theirs]
    return {path: (path.stat().st_mtime_ns, path.read_bytes()) for path in files}

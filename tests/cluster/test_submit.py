"""`nanoscale submit` to a real SLURM, and following the run from its directory."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from nanoscale.launch.submission.batch_job import batch_script
from nanoscale.runs import events, status, submission
from nanoscale.runs.directory import RunDirectory
from tests.cluster.launches import stdout_name
from tests.cluster.machines import LIMIT_S, wait_until
from tests.cluster.slurm import LOGIN, Slurm
from tests.support.batch import NASTY, STAND_IN, config

SOURCE = Path(__file__).parents[2]
WORDS = ("recipe=debug", "model.layers=2", "launcher.device=cpu", "launcher.threads=1")
MEMORY = (
    *("checkpoint.memory_every=1", "launcher.max_restarts=2"),
    *("checkpoint.every=0", "checkpoint.every_minutes=0"),
)


class User:
    """Somebody at the login node, in a folder of theirs."""

    def __init__(self, slurm: Slurm, folder: Path) -> None:
        self.slurm = slurm
        self.folder = folder

    @property
    def environment(self) -> dict[str, str]:
        return os.environ | self.slurm.environment | {"PYTHONPATH": str(SOURCE)}

    def types(self, *words: str, code: int = 0, env: dict[str, str] | None = None) -> str:
        """Type `nanoscale …` and wait for its end; return its output."""
        command = [sys.executable, "-m", "nanoscale", *words]
        environment = self.environment | (env or {})
        done = self.slurm.call(LOGIN, command, cwd=self.folder, env=environment, limit_s=LIMIT_S)
        assert done.returncode == code, done.stdout + done.stderr
        return done.stdout + done.stderr

    def begins(self, *words: str) -> subprocess.Popen[str]:
        """Type it and do not wait."""
        command = [sys.executable, "-m", "nanoscale", *words]
        pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        return self.slurm.run_in(
            LOGIN, command, cwd=self.folder, env=self.environment, text=True, **pipes
        )

    def submits(self, name: str, *words: str) -> tuple[RunDirectory, int]:
        """Submit a run; its directory and job."""
        self.types("submit", *WORDS, f"run.name={name}", *words)
        run = RunDirectory(self.folder / "runs" / name)
        job = submission.read(run)
        assert job is not None
        return run, int(job.job)

    def says_of(self, name: str) -> str:
        """Return the state of a run in `runs ls`."""
        rows = json.loads(self.types("runs", "ls", "--json"))
        (said,) = [row["message"] for row in rows if row["name"] == name]
        return str(said)


@pytest.fixture
def user(slurm: Slurm, tmp_path: Path) -> Iterator[User]:
    yield User(slurm, tmp_path)


def wait_step(run: RunDirectory, step: int) -> None:
    """Wait until so many steps are written down, and its launcher has noticed that it trains."""

    def there() -> bool:
        lines = run.metrics.read_text().splitlines() if run.metrics.exists() else []
        return len(lines) >= step and status.read(run).state == "running"

    wait_until(there, f"step {step} of {run.name}", LIMIT_S)


def steps(run: RunDirectory) -> list[int]:
    return [json.loads(line)["step"] for line in run.metrics.read_text().splitlines()]


def resumptions(run: RunDirectory) -> list[dict[str, Any]]:
    return [event for event in events.read(run) if event["kind"] == "resumed"]


def test_submitted_waited_for_watched_and_completed(user: User) -> None:
    run, job = user.submits("one", "launcher.nodes=2", 'launcher.slurm.directives=["--hold"]')
    assert user.says_of("one") == f"queued (job {job})"
    shown = user.types("runs", "show", "one")
    assert f"job {job}: PENDING (JobHeldUser), queued since" in shown
    watch = user.begins("runs", "watch", "one")
    assert watch.stdout is not None
    assert "PENDING" in watch.stdout.readline()
    user.slurm.command("scontrol", "release", job)
    printed, _ = watch.communicate(timeout=LIMIT_S)
    assert watch.returncode == 0, printed
    assert "watching 2 ranks on s1, s2" in printed and "completed after 20 steps" in printed
    assert steps(run) == list(range(1, 21))
    user.slurm.wait_state(job, "COMPLETED")
    assert f"job {job}: COMPLETED, on s[1-2] since" in user.types("runs", "show", "one")
    assert "completed after 20 steps" in user.types("runs", "logs", "one", "--batch")


def test_a_job_stops_in_the_queue_and_while_it_runs(user: User) -> None:
    run, job = user.submits("two", "train.steps=100000", 'launcher.slurm.directives=["--hold"]')
    other, second = user.submits("other", "train.steps=100000", "checkpoint.every=1000")
    assert f"job {job} was removed from the queue" in user.types("runs", "stop", "two")
    assert user.slurm.show(job)["JobState"] == "CANCELLED"
    assert user.says_of("two") == f"never began (job {job}: cancelled)"
    assert not run.launch.exists()
    wait_step(other, 5)
    watch = user.begins("runs", "watch", "other")
    printed = user.types("runs", "stop", "other")
    assert f"asked job {second} to stop" in printed and "other is stopped" in printed
    assert user.slurm.wait_state(second, "FAILED", limit_s=LIMIT_S)["ExitCode"] == "130:0"
    shown, _ = watch.communicate(timeout=LIMIT_S)
    assert watch.returncode == 130, shown
    assert other.checkpoint_steps() == [steps(other)[-1]]
    assert "nanoscale submit --resume other" in shown and "--resume other" in printed
    saved = steps(other)[-1]
    more = f"train.stop_when.last_step={saved + 5}"
    queued = user.types("submit", "--resume", "other", more).partition("queued as job ")[2]
    again = int(queued.split()[0])
    user.slurm.wait_state(again, "COMPLETED", limit_s=LIMIT_S)
    assert steps(other) == list(range(1, saved + 6))


@pytest.mark.exhaustive
def test_how_slurm_ended_a_job_is_told(user: User) -> None:
    run, job = user.submits("killed", "train.steps=100000", "launcher.nodes=2")
    wait_step(run, 3)
    watch = user.begins("runs", "watch", "killed")
    for node in ("s1", "s2"):
        user.slurm.power_off(node)
    user.slurm.wait_state(job, "PENDING", limit_s=LIMIT_S)
    assert user.says_of("killed") == f"queued (job {job})"
    user.slurm.cancel(job)
    shown, _ = watch.communicate(timeout=LIMIT_S)
    assert watch.returncode == 1, shown
    assert user.says_of("killed") == f"running, then cancelled (job {job})"
    assert f"running, then cancelled (job {job})" in shown


@pytest.mark.exhaustive
def test_the_time_limit_saves_and_queues_again_a_limited_number_of_times(user: User) -> None:
    """20 to 50 s: slurmctld looks at time limits every 30 s, and sends signals as much too early."""
    run, job = user.submits(
        "long",
        "train.steps=100000",
        "launcher.slurm.time=0:30:00",
        "launcher.slurm.signal_before_s=10",
        "launcher.slurm.max_requeues=1",
        *MEMORY,
    )
    wait_step(run, 1)
    hours, minutes, seconds = map(int, user.slurm.show(job)["RunTime"].split(":"))
    user.slurm.limit(job, 60 * hours + minutes + (1 if seconds < 40 else 2))
    user.slurm.hasten(job)
    user.slurm.limit(job, 30)
    before = steps(run)[-1]
    assert run.checkpoint_steps()[-1] == before
    wait_step(run, before + 3)
    user.slurm.command("scancel", "--batch", "--signal=USR1", job)
    last = user.slurm.wait_state(job, "FAILED", limit_s=LIMIT_S)
    assert (last["Restarts"], last["ExitCode"]) == ("1", "75:0")
    heard = [event["signal"] for event in events.read(run) if event["kind"] == "signal"]
    assert heard == ["SIGUSR1", "SIGUSR1"]
    (resumed,) = resumptions(run)
    assert resumed["step"] == before
    assert steps(run) == list(range(1, steps(run)[-1] + 1))
    assert "was queued again 1 times already" in user.types("runs", "logs", "long", "--batch")


def test_a_preempted_run_saves_makes_room_and_goes_on(user: User) -> None:
    """Before, a rank is killed, and the run continues from memory."""
    run, job = user.submits("low", "train.steps=100000", "launcher.nodes=2", *MEMORY)
    wait_step(run, 3)
    (rank,) = [pid for pid in user.slurm.processes("s2") if ".rank-" in stdout_name(pid)]
    os.kill(rank, signal.SIGKILL)
    wait_until(lambda: resumptions(run), "the restart", LIMIT_S)
    (resumed,) = resumptions(run)
    assert "memory" in resumed["message"] and not run.checkpoint_steps()
    wait_step(run, resumed["step"] + 2)
    urgent = user.slurm.sbatch(
        "-N2", "--exclusive", "-phigh", "--output=/dev/null", "--wrap", "true"
    )
    user.slurm.wait_state(urgent, "COMPLETED", limit_s=LIMIT_S)
    before = steps(run)[-1]
    assert run.checkpoint_steps()[-1] == before
    user.slurm.hasten(job)
    wait_step(run, before + 3)
    user.types("runs", "stop", "low")
    assert steps(run) == list(range(1, steps(run)[-1] + 1))


@pytest.mark.exhaustive
def test_many_runs_are_one_array(user: User) -> None:
    words = ("train.seed=1,2", "optimizer.lr=1e-3,1e-2", "launcher.slurm.exclusive=false")
    hold = 'launcher.slurm.directives=["--hold"]'
    printed = user.types(
        "submit", *WORDS, "run.name=many", *words, "--at-once", "2", hold, "--json"
    )
    document = json.loads(printed)
    job = int(document["job"])
    assert [run["job"] for run in document["runs"]] == [f"{job}_{task}" for task in range(4)]
    user.types("runs", "stop", "many-1")
    assert user.says_of("many-1") == f"never began (job {job}_1: cancelled)"
    assert user.says_of("many-2") == f"queued (job {job}_2)"
    user.slurm.command("scontrol", "release", job)
    for number, values in ((0, ("1", "0.001")), (2, ("2", "0.001")), (3, ("2", "0.01"))):
        shown = user.types("runs", "watch", f"many-{number}")
        assert "completed after 20 steps" in shown
        assert tuple(document["runs"][number]["values"].values()) == values
    assert user.says_of("many-1") == f"never began (job {job}_1: cancelled)"
    losses = {
        (user.folder / f"runs/many-{number}/metrics.jsonl").read_text() for number in (0, 2, 3)
    }
    assert len(losses) == 3


def test_a_sweep_is_an_array_and_only_what_is_missing_is_submitted_again(user: User) -> None:
    """Its process is killed, one of its jobs is cancelled, and the other has never begun."""
    words = (
        *WORDS,
        "train.seed=1,2",
        "launcher.slurm.exclusive=false",
        "--name",
        "seeds",
        "--slurm",
    )
    assert "sweep seeds: 2 trials" in user.types("sweep", *words, "--dry-run")
    assert not (user.folder / "sweeps").exists()
    hold = 'launcher.slurm.directives=["--hold"]'
    following = user.begins("sweep", *words, hold)
    runs = [RunDirectory(user.folder / f"sweeps/seeds/runs/seed={seed}") for seed in (1, 2)]
    wait_until(lambda: all(submission.find(run) for run in runs), "the array", LIMIT_S)
    first = submission.find(runs[0])
    assert first is not None and first.task == 0
    following.kill()
    following.wait()
    user.slurm.command("scancel", f"{first.job}_1")
    following = user.begins("sweep", "--resume", "seeds", "--json")
    wait_until(lambda: submission.find(runs[1]) != submission.Submission(
        first.job, 1, first.script, first.cluster, first.time), "another job", LIMIT_S)  # fmt: skip
    second = submission.find(runs[1])
    assert second is not None and (second.job, second.task) != (first.job, 1) and second.task == 1
    assert submission.find(runs[0]) == first, "it still waits in the queue"
    user.slurm.command("scontrol", "release", first.job)
    user.slurm.command("scontrol", "release", second.job)
    printed, _ = following.communicate(timeout=LIMIT_S)
    assert following.returncode == 0, printed
    rows = (user.folder / "sweeps/seeds/results.csv").read_text().splitlines()[1:]
    assert all("completed" in row for row in rows) and len(rows) == 2
    assert [steps(run) for run in runs] == [list(range(1, 21))] * 2
    assert len({run.metrics.read_text() for run in runs}) == 2
    again = user.types("sweep", "--resume", "seeds")
    assert "queued as job" not in again and "lowest loss" in again


def test_what_sbatch_refuses_leaves_nothing_and_names_the_key(user: User) -> None:
    refused = user.types(
        "submit", *WORDS, "run.root=new/place", "launcher.slurm.partition=nope", code=2
    )
    assert "launcher.slurm.partition=nope: invalid partition specified" in refused
    both = ("train.seed=1,2", "launcher.slurm.constraint=green")
    assert "Invalid feature" in user.types("submit", *WORDS, "run.root=new", *both, code=2)
    assert list(user.folder.iterdir()) == []


def test_what_a_job_leaves_in_the_environment_is_no_option_of_the_next(user: User) -> None:
    inherited = {
        "SLURM_JOB_ID": "77",
        "SLURM_NTASKS_PER_NODE": "9",
        "SBATCH_PARTITION": "nope",
        "SLURM_HINT": "nonsense",
        "SQUEUE_PARTITION": "high",
    }
    hold = 'launcher.slurm.directives=["--hold"]'
    user.types("submit", *WORDS, "run.name=clean", hold, env=inherited)
    assert "PENDING" in user.types("runs", "show", "clean", env=inherited)


def test_sbatch_reads_every_value_as_it_is(user: User) -> None:
    folder = user.folder / NASTY
    (folder / "logs").mkdir(parents=True)
    marked = config(python=str(STAND_IN), directives=[f"--comment={NASTY}"])
    script = user.folder / "script"
    script.write_text(batch_script(marked, RunDirectory(folder)))
    stand_in = {"STAND_IN_DIR": str(user.folder), "STAND_IN_CODE": "0"}
    job = user.slurm.sbatch(script, cwd=user.folder, env=os.environ | stand_in)
    user.slurm.wait_state(job, "COMPLETED")
    asked = ["squeue", "--noheader", "--states=all", f"--jobs={job}"]
    for field in ("Name", "Comment"):
        assert user.slurm.command(*asked, f"--Format={field}:200").strip() == NASTY
    assert (folder / f"logs/slurm-{job}.out").exists()
    assert json.loads((user.folder / "called").read_text())["argv"][-1] == str(folder)
    assert not list(user.folder.rglob("x"))


@pytest.mark.exhaustive
def test_a_job_of_the_wrapper_is_known_by_its_run_and_stops(user: User) -> None:
    programs = user.folder / "bin"
    programs.mkdir()
    (programs / "nanoscale").write_text(f'#!/bin/sh\nexec {sys.executable} -m nanoscale "$@"\n')
    (programs / "nanoscale").chmod(0o755)
    path = {"PATH": f"{programs}:{os.environ['PATH']}", "PYTHONPATH": str(SOURCE)}
    script = SOURCE / "scripts" / "sbatch" / "train.sbatch"
    words = ("-N2", script, *WORDS, "train.steps=100000")
    job = user.slurm.sbatch(*words, cwd=user.folder, env=os.environ | path)
    run = RunDirectory(user.folder / "runs" / f"job-{job}")
    wait_step(run, 3)
    assert f"job {job}: RUNNING, on s[1-2]" in user.types("runs", "show", run.name)
    assert f"asked job {job} to stop" in user.types("runs", "stop", run.name)
    assert user.slurm.wait_state(job, "FAILED", limit_s=LIMIT_S)["ExitCode"] == "130:0"
    assert run.checkpoint_steps() == [steps(run)[-1]]


def test_a_launcher_within_a_job_says_which_nodes_stay_idle(user: User) -> None:
    """And is refused where srun starts it several times."""
    plan = [sys.executable, "-m", "nanoscale", "train", *WORDS, "--dry-run"]
    output = user.folder / "output"
    job = user.slurm.sbatch(
        "-N2", f"--output={output}", "--wrap", shlex.join(plan), env=user.environment
    )
    assert user.slurm.wait_state(job, "COMPLETED", "FAILED")["JobState"] == "COMPLETED"
    line = (
        f"job {job} of SLURM has 2 nodes (s[1-2]), and all ranks will run on s1; to use the nodes"
    )
    assert line in output.read_text() and "add launcher=slurm" in output.read_text()
    for words, code, said in (
        (["salloc", "-N2"], 0, "has 2 nodes (s[1-2]), and all ranks will run on"),
        (["srun", "-n2"], 2, "srun starts this command 2 times"),
        (["srun", "-n1"], 0, ""),
    ):
        done = user.slurm.call(
            LOGIN, [*words, *plan], cwd=user.folder, env=user.environment, limit_s=LIMIT_S
        )
        assert done.returncode == code, done.stderr
        assert said in done.stderr
    assert "of SLURM has" not in done.stderr

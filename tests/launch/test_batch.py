"""The batch script, run by a real bash with a stand-in for the launcher."""

from __future__ import annotations

import os
import signal
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from nanoscale.common.errors import UserError
from nanoscale.config import schema
from nanoscale.config.schema import Config
from nanoscale.launch.batch.systems import SYSTEMS, Pbs
from nanoscale.launch.submission.batch_job import array_script, batch_script, runs_list
from nanoscale.launch.transport.transport import read_hosts
from nanoscale.runs.directory import RunDirectory
from tests.support.batch import LIMIT_S, NASTY, STAND_IN, Batch, config
from tests.support.recipes import changed


def options(script: str) -> list[str]:
    head = script.split("\n\n")[0].splitlines()
    assert head[0] == "#!/bin/bash" and all(line.startswith("#SBATCH --") for line in head[1:])
    return [line.removeprefix("#SBATCH ") for line in head[1:]]


def launcher(config: Config, **changes: Any) -> Config:
    return replace(config, launcher=replace(config.launcher, **changes))


# --- options --------------------------------------------------------------------------------------


def test_the_options_of_a_plain_job() -> None:
    run = RunDirectory(Path("/runs/run"))
    assert options(batch_script(config(), run)) == [
        "--job-name=run",
        "--output=/runs/run/logs/slurm-%j.out",
        "--open-mode=append",
        "--nodes=1",
        "--ntasks-per-node=1",
        "--exclusive",
        "--mem=0",
        "--requeue",
        "--signal=B:USR1@120",
    ]


def test_everything_that_can_be_asked_for() -> None:
    asked = config(
        partition="a,b", account="me", qos="high", time="1-00:00:00", exclusive=False,
        constraint="[rack1|rack2]", directives=["--mail-type=END", "--mem=0", "--comment=a b"],
        signal_before_s=0,
    )  # fmt: skip
    asked = launcher(asked, nodes="2:4", device="cuda", devices=8, threads=3)
    found = options(batch_script(asked, RunDirectory(Path("/runs/run"))))
    assert found[3:] == [
        "--nodes=2-4",
        "--ntasks-per-node=1",
        "--gpus-per-node=8",
        "--no-kill",
        "--cpus-per-task=24",
        "--partition=a,b",
        "--account=me",
        "--qos=high",
        "--time=1-00:00:00",
        '--constraint="[rack1|rack2]"',
        "--requeue",
        "--mail-type=END",
        "--mem=0",
        '--comment="a b"',
    ]


@pytest.mark.parametrize(
    ("slurm", "expected"),
    [
        ({"gpus": "h100:8"}, ["--gpus-per-node=h100:8"]),
        ({}, ["--gpus-per-node=4"]),
        ({"directives": ["--gres=gpu:4"]}, ["--gres=gpu:4"]),
    ],
)
def test_gpus_are_asked_for_once(slurm: dict[str, Any], expected: list[str]) -> None:
    asked = launcher(config(**slurm), device="cuda", devices=4)
    found = options(batch_script(asked, RunDirectory(Path("/runs/run"))))
    assert [option for option in found if "g" in option[2:4]] == expected


def test_memory_is_all_of_a_node_unless_it_is_asked_for_otherwise() -> None:
    for directives in ([], ["--mem=4G"], ["--mem-per-gpu=9G"]):
        found = options(
            batch_script(config(directives=directives), RunDirectory(Path("/runs/run")))
        )
        assert [one for one in found if one.startswith("--mem")] == (directives or ["--mem=0"])


def test_names_of_any_kind_are_quoted_as_sbatch_reads_them() -> None:
    """tests/cluster/test_submit.py asks the real one."""
    folder = Path("/runs") / "a\"b%'#"
    found = options(batch_script(config(), RunDirectory(folder)))
    assert found[0] == '--job-name="a\\"b%\'#"'
    assert found[1] == '--output="/runs/a\\"b%%\'#/logs/slurm-%j.out"'


@pytest.mark.parametrize("root", ["/runs/a\\b", "/runs/a\nb", "/runs/a\x07"])
def test_a_folder_that_slurm_cannot_write_to_is_refused(root: str) -> None:
    with pytest.raises(UserError) as caught:
        batch_script(config(), RunDirectory(Path(root) / "run"))
    assert caught.value.violations[0].key == "run.root"


def test_no_value_ends_a_line() -> None:
    with pytest.raises(AssertionError):
        batch_script(config(account="a\n#SBATCH --nodes=9"), RunDirectory(Path("/runs/run")))


# --- execution ------------------------------------------------------------------------------------


@pytest.fixture
def batch(tmp_path: Path) -> Any:
    started: list[Batch] = []

    def start(script: str | None = None, **environment: str) -> Batch:
        text = script or batch_script(config(python=str(STAND_IN)), RunDirectory(tmp_path / "run"))
        started.append(Batch(tmp_path / "job", text, **environment))
        return started[-1]

    yield start
    for one in started:
        one.process.kill()
        one.process.wait()


def test_nothing_of_a_configuration_is_interpreted(tmp_path: Path, batch: Any) -> None:
    python = tmp_path / NASTY
    python.symlink_to(STAND_IN)
    run = RunDirectory(tmp_path / NASTY.replace("/", "") / "run")
    asked = config(python=str(python), account=NASTY, directives=[f"--comment={NASTY}"])
    job = batch(batch_script(asked, run), STAND_IN_CODE="0")
    assert job.end() == 0
    assert job.wait_called()["argv"] == [
        "-P",
        "-m",
        "nanoscale",
        "resume",
        "--trust",
        str(run.path),
    ]
    assert not list(tmp_path.rglob("x"))


def test_an_array_task_takes_its_run_from_the_list(tmp_path: Path, batch: Any) -> None:
    folder = tmp_path / f"{NASTY}.array"
    folder.mkdir()
    runs = [f"/runs/{NASTY}-{number}" for number in range(3)]
    runs_list(folder).write_text("".join(f"{run}\n" for run in runs))
    script = array_script(config(python=str(STAND_IN)), folder, "many", 3, at_once=2)
    assert "--array=0-2%2" in options(script)
    assert options(script)[1].endswith('/slurm-%A_%a.out"')
    job = batch(script, STAND_IN_CODE="0", SLURM_ARRAY_TASK_ID="1")
    assert job.end() == 0
    assert job.wait_called()["argv"][-1] == runs[1]


def test_lines_of_setup_run_first_and_the_job_is_known(tmp_path: Path, batch: Any) -> None:
    asked = config(python=str(STAND_IN), setup=["set -eu", "export FROM_SETUP=$((6 * 7))"])
    job = batch(batch_script(asked, RunDirectory(tmp_path / "run")), STAND_IN_CODE="3")
    assert job.end() == 3
    assert (job.wait_called()["setup"], job.wait_called()["batch"]) == ("42", "12")


@pytest.mark.parametrize("code", [0, 1, 2, 75])
def test_the_exit_code_is_that_of_the_launcher(batch: Any, code: int) -> None:
    job = batch(STAND_IN_CODE=str(code))
    assert job.end() == code
    assert not job.requeued


@pytest.mark.parametrize(
    ("number", "restarts", "requeued"),
    [
        (signal.SIGUSR1, "", True),
        (signal.SIGUSR1, "9", True),
        (signal.SIGUSR1, "10", False),
        (signal.SIGTERM, "", False),
    ],
)
def test_signals_reach_the_launcher_and_only_the_time_limit_requeues(
    batch: Any, number: signal.Signals, restarts: str, requeued: bool
) -> None:
    job = batch(SLURM_RESTART_COUNT=restarts)
    job.wait_called()
    job.process.send_signal(number)
    assert job.end() == 75
    assert (job.folder / "heard").read_text() == number.name
    assert job.requeued == requeued


def test_the_first_signal_tells_why(batch: Any) -> None:
    """At the limit SLURM sends TERM as well, while the launcher may still be saving."""
    job = batch()
    job.wait_called()
    os.kill(job.process.pid, signal.SIGSTOP)
    for number in (signal.SIGUSR1, signal.SIGTERM, signal.SIGCONT):
        os.kill(job.process.pid, number)
    assert job.end() == 75


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGTERM])
def test_a_launcher_too_young_to_listen_counts_as_stopped(
    batch: Any, number: signal.Signals
) -> None:
    job = batch(STAND_IN_YOUNG="1")
    job.wait_called()
    job.process.send_signal(number)
    assert job.end() == 75
    assert job.requeued == (number == signal.SIGUSR1)


@pytest.mark.slow
def test_a_signal_during_the_setup_is_passed_on_later(tmp_path: Path, batch: Any) -> None:
    asked = config(
        python=str(STAND_IN), setup=["touch ready", "while [ ! -e go ]; do sleep 0.05; done"]
    )
    job = batch(batch_script(asked, RunDirectory(tmp_path / "run")))
    deadline = time.monotonic() + LIMIT_S
    while not (job.folder / "ready").exists():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    job.process.send_signal(signal.SIGUSR1)
    (job.folder / "go").touch()
    assert job.end() == 75
    assert job.requeued


def test_a_preemption_of_which_only_the_agents_heard_requeues(batch: Any) -> None:
    """SLURM treats a job that ends in its GraceTime as failed, and requeues it no more."""
    job = batch(STAND_IN_CODE="75", PREEMPTED="2026-11-21T19:48:48")
    assert job.end() == 75
    assert job.requeued


def test_a_stop_is_no_preemption(batch: Any) -> None:
    job = batch(PREEMPTED="2026-11-21T19:48:48")
    job.wait_called()
    job.process.send_signal(signal.SIGTERM)
    assert job.end() == 75
    assert not job.requeued


# --- PBS and LSF ----------------------------------------------------------------------------------


def batch_config(name: Any, **settings: Any) -> Config:
    launcher = replace(
        config(python=str(STAND_IN)).launcher, name=name, batch=schema.BatchSettings(**settings)
    )
    return replace(config(python=str(STAND_IN)), launcher=launcher)


def test_the_options_of_pbs_and_lsf() -> None:
    settings = {
        "queue": "q", "account": "me", "time": "1-00:00:30", "directives": ["-m ae"],
    }  # fmt: skip
    run = RunDirectory(Path("/runs/a b"))
    changes: dict[str, Any] = {"nodes": "2:4", "device": "cuda", "devices": 8, "threads": 3}
    for name, expected in {
        "pbs": [
            "-j oe", "-r y", "-l place=scatter:excl", "-N a-b", "-o '/runs/a b/logs/pbs.out'",
            "-l select=4:ncpus=24:ngpus=8:mpiprocs=1", "-l walltime=86430", "-q q", "-A me", "-m ae",
        ],
        "lsf": [
            "-r", "-x", "-J a-b", "-o '/runs/a b/logs/lsf.out'", "-n 96", "-R 'span[ptile=24]'",
            "-gpu num=8", "-W 1441", "-q q", "-P me", "-m ae",
        ],
    }.items():  # fmt: skip
        script = batch_script(launcher(batch_config(name, **settings), **changes), run)
        head = script.split("\n\n")[0].splitlines()[1:]
        mark = f"#{'PBS' if name == 'pbs' else 'BSUB'} "
        assert [line.removeprefix(mark) for line in head] == expected
    nnodes = launcher(batch_config("lsf", directives=["-nnodes 2"]), nodes=2)
    script = batch_script(nnodes, run)
    assert "#BSUB -nnodes 2\n" in script and "ptile" not in script


def test_the_hosts_of_a_job_of_pbs_and_lsf(tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text("h2\nh2\nh1\n")
    file = str(tmp_path / "hosts")
    assert SYSTEMS["pbs"].hosts({"PBS_NODEFILE": file}) == ["h2", "h1"]
    assert SYSTEMS["lsf"].hosts({"LSB_DJOB_HOSTFILE": file}) == ["h2", "h1"]
    assert SYSTEMS["lsf"].hosts({"LSB_MCPU_HOSTS": "h1 8 h2 8"}) == ["h1", "h2"]
    slurms_qsub = {"PBS_JOBID": "7", "SLURM_JOB_NODELIST": "s1"}
    assert SYSTEMS["pbs"].hosts(slurms_qsub) == ["s1"]
    assert SYSTEMS["pbs"].hosts({}) is SYSTEMS["lsf"].hosts({}) is None


def test_a_program_of_two_words_is_named_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Flux(Pbs):
        commands = ("flux batch --quiet", "flux cancel", "flux job kill -s")

    monkeypatch.setitem(SYSTEMS, "pbs", Flux())
    script = batch_script(batch_config("pbs"), RunDirectory(tmp_path / "run"))
    assert "# Written by `nanoscale submit`. Submitted again with flux batch, it" in script
    assert Flux().program == "flux"


def test_a_job_does_not_use_its_excluded_nodes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "hosts").write_text("h2\nh1\nh3\n")
    (tmp_path / "bad").write_text("h1\n")
    monkeypatch.setenv("PBS_NODEFILE", str(tmp_path / "hosts"))
    job = "launcher=pbs", f"launcher.exclude_file={tmp_path}/bad", "launcher.devices=1"
    assert [it.name for it in read_hosts(changed(*job))] == ["h2", "h3"]
    with pytest.raises(UserError, match=r"more than the 2 nodes of this job \(h2,h3\)"):
        read_hosts(changed(*job, "launcher.nodes=3"))


def test_the_alarm_of_pbs_and_lsf_comes_before_the_limit(tmp_path: Path, batch: Any) -> None:
    run = RunDirectory(tmp_path / "run")
    run.logs.mkdir(parents=True)
    script = batch_script(batch_config("lsf", time="0:02:01", signal_before_s=120), run)
    again = f"{STAND_IN} -P -m nanoscale.launch.submission.requeue"
    assert again in script
    script = script.replace(again, "echo >> again")
    job = batch(script, LSB_JOBID="7")
    assert job.end() == 75
    assert (job.folder / "again").read_text() == f"{run.path}\n"
    assert (run.logs / "lsf-7.out").exists()

"""Ranks of processes that torchrun has started: `torchrun -m nanoscale train launcher=env`."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from nanoscale.agent import __main__ as join_module
from nanoscale.cli.main import run as nanoscale
from nanoscale.common.errors import UserError
from nanoscale.config.composing.compose import compose
from nanoscale.launch.hosts.outer_processes import OuterProcess, outer_hosts, this_process
from nanoscale.processes import session
from nanoscale.runs import metrics
from nanoscale.runs.directory import RunDirectory
from tests.support.waiting import wait_until

LIMIT_S = 120.0
WORDS = (
    "recipe=debug",
    "model.layers=2",
    "launcher=env",
    "launcher.device=cpu",
    "train.sample_tokens=0",
    "run.name=r",
)


def torchrun(folder: Path, *words: str) -> subprocess.Popen[str]:
    options = ["--standalone", "--nproc-per-node=2", "-m", "nanoscale", "train"]
    return subprocess.Popen(
        [sys.executable, "-m", "torch.distributed.run", *options, *WORDS, *words],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.slow
def test_the_same_command_under_torchrun_continues(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path / "runs" / "r")
    for steps in (3, 5):
        process = torchrun(tmp_path, f"train.steps={steps}")
        out, err = process.communicate(timeout=LIMIT_S)
        assert process.returncode == 0, err
        assert f"completed after {steps} steps" in out
    last = metrics.last(run)
    assert last is not None and last["step"] == 5
    assert json.loads(run.launch.read_text())["world_size"] == 2
    assert "resumed from step-00000003" in out


@pytest.mark.slow
@pytest.mark.exhaustive
def test_a_changed_value_is_refused_once(tmp_path: Path) -> None:
    assert torchrun(tmp_path, "train.steps=3").wait(LIMIT_S) == 0
    process = torchrun(tmp_path, "train.steps=5", "train.seed=9")
    _, err = process.communicate(timeout=LIMIT_S)
    assert err.count("a changed value would make it another run") == 1
    assert err.count("exitcode  : 2") == 2


@pytest.mark.slow
def test_a_signal_saves_and_leaves_nothing(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path / "runs" / "r")
    process = torchrun(tmp_path, "train.steps=100000")

    def step() -> int:
        last = metrics.last(run) if run.metrics.is_file() else None
        return 0 if last is None else int(last["step"])

    wait_until(lambda: step() >= 3, LIMIT_S)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=LIMIT_S)
    assert run.checkpoint_steps() == [step()]
    assert not list((tmp_path / "runs").glob(".nanoscale-*"))


def test_the_place_of_a_process_among_all() -> None:
    torch = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"}
    assert this_process(torch) == OuterProcess(1, 2, 4, 1)
    assert this_process({"RANK": "3", "WORLD_SIZE": "8"}) == OuterProcess(3, 8, 1, 0)
    slurm = {"SLURM_PROCID": "2", "SLURM_STEP_NUM_TASKS": "4", "SLURM_LOCALID": "0"}
    slurm |= {"SLURM_STEP_TASKS_PER_NODE": "2(x2)"}
    assert this_process(slurm) == OuterProcess(1, 2, 2, 0)
    assert this_process(slurm | torch) == OuterProcess(1, 2, 4, 1)
    with pytest.raises(UserError, match="each host needs the same number"):
        this_process(slurm | {"SLURM_STEP_TASKS_PER_NODE": "3,1"})
    with pytest.raises(UserError, match="put torchrun, srun or mpirun before"):
        this_process({})
    for wrong in (
        {"RANK": "abc"}, {"RANK": "1e3"}, {"RANK": "5"}, {"WORLD_SIZE": "0"}, {"WORLD_SIZE": "1000000000000"},
        {"RANK": "-1"}, {"LOCAL_RANK": "7", "LOCAL_WORLD_SIZE": "2"},
    ):  # fmt: skip
        with pytest.raises(UserError, match="launcher=env: "):
            this_process({"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0"} | wrong)


def test_other_devices_than_processes_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "0", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "4"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UserError) as caught:
        outer_hosts(compose(["launcher=env", "launcher.devices=2"]))
    (advice,) = caught.value.violations[0].suggestions
    assert [host.slots for host in outer_hosts(compose(["launcher=env", advice]))] == [4]
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    hosts = outer_hosts(compose(["launcher=env", "launcher.devices=2"]))
    assert [(host.name, host.slots) for host in hosts] == [(f"host{n}", 2) for n in range(4)]


def test_a_file_of_an_earlier_start_is_not_believed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "session"
    monkeypatch.setattr(session, "STALE_S", 0.4)
    monkeypatch.setattr(session, "_TOUCH_S", 0.1)
    monkeypatch.setattr(session, "_SHOWN_S", 0.3)
    session.write(file, session.Session("old:1", "key"))
    follower = session.Follower(file)
    follower.read()
    time.sleep(0.3)  # as long as a launcher that lives would need to touch it
    assert follower.read() is None
    with session.Keeper(file, True) as keeper:
        session.write(file, session.Session("new:2", "key"))
        wait_until(lambda: follower.read() == session.Session("new:2", "key"), LIMIT_S)
        time.sleep(0.6)
        wait_until(lambda: follower.read() is not None, LIMIT_S)  # since it is touched
        with monkeypatch.context() as failing:  # as NFS may while the file is replaced
            failing.setattr(session, "_parsed", lambda _: (_ for _ in ()).throw(OSError("stale")))
            assert follower.read() == session.Session("new:2", "key")
        keeper.exit_code = 75
        with pytest.raises(UserError, match="another start of the same command"):
            session.Keeper(file, True).__enter__()
        assert follower.read() == session.Session("new:2", "key")
    assert not file.exists() and follower.read() is None
    assert file.parent.exists()


def test_a_process_that_waits_ends_with_its_launcher_and_by_a_signal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, numbers = (
        tmp_path / "session",
        (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1),
    )
    before = {number: signal.getsignal(number) for number in numbers}
    keep = "import sys, time; from nanoscale.processes.session import *"
    keep += "; k = Keeper(Path(sys.argv[1]), True).__enter__(); print(flush=True); time.sleep(600)"
    launcher = subprocess.Popen([sys.executable, "-c", keep, file], stdout=subprocess.PIPE)

    def after_a_look(_: float) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        launcher.kill()
        launcher.wait()

    clock = SimpleNamespace(monotonic=time.monotonic, sleep=after_a_look)
    monkeypatch.setattr(join_module, "time", clock)
    try:
        assert launcher.stdout is not None and launcher.stdout.readline()
        assert (
            join_module.join(file, 600, serves=False) == 1
        )  # the signal was the launcher's matter
        file.unlink()
        with pytest.raises(SystemExit) as ended:
            join_module.join(file, 600, serves=False)
        assert ended.value.code == 128 + signal.SIGTERM
    finally:
        launcher.kill()
        for number, handler in before.items():
            signal.signal(number, handler)


def test_every_process_shows_why_its_request_is_refused(monkeypatch, capsys):
    """The first one may be on another host, where the same words are accepted."""
    for name, value in (("RANK", "1"), ("WORLD_SIZE", "2"), ("LOCAL_RANK", "0")):
        monkeypatch.setenv(name, value)
    assert nanoscale(["train", "recipe=nowhere", "launcher=env", "run.name=x"]) == 2
    assert "unknown recipe" in capsys.readouterr().err

"""A SLURM job's environment; tests/cluster/test_submit.py reads a real one's."""

from __future__ import annotations

from pathlib import Path

import pytest

from nanoscale.cli.main import run as nanoscale

TRAIN = ["train", "recipe=debug", "launcher.device=cpu", "--dry-run"]
BATCH = {
    "SLURM_JOB_ID": "7",
    "SLURM_JOB_NODELIST": "s1,s2",
    "SLURM_JOB_NUM_NODES": "2",
    "SLURMD_NODENAME": "s1",
}


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def said(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    env: dict[str, str],
    *words: str,
    code: int = 0,
) -> str:
    """Return the command's standard error with these variables."""
    with monkeypatch.context() as patch:
        for name, value in env.items():
            patch.setenv(name, value)
        assert nanoscale(list(words)) == code
    return capsys.readouterr().err


@pytest.mark.parametrize(
    ("env", "host"),
    [
        (BATCH, "s1"),
        (BATCH | {"SLURM_STEP_ID": "4294967290", "SLURM_STEP_NUM_TASKS": "1"}, "s1"),
        ({**BATCH, "SLURMD_NODENAME": ""}, None),  # the shell of salloc, on the login node
        (
            {
                **BATCH,
                "SLURM_JOB_NODELIST": "s1",
                "SLURM_JOB_NUM_NODES": "1",
                "SLURMD_NODENAME": "",
            },
            None,
        ),
    ],
)
def test_nodes_that_stay_idle_are_named_in_one_line(env, host, capsys, monkeypatch):
    monkeypatch.setattr("socket.gethostname", lambda: "login.example.org")
    (line,) = said(capsys, monkeypatch, env, *TRAIN).splitlines()
    assert "job 7 of SLURM has" in line and env["SLURM_JOB_NODELIST"] in line
    assert f"all ranks will run on {host or 'login'};" in line and "add launcher=slurm" in line


@pytest.mark.parametrize(
    "env",
    [
        BATCH | {"SLURM_JOB_NODELIST": "s1", "SLURM_JOB_NUM_NODES": "1"},
        BATCH | {"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "1"},  # srun -n1, on purpose
        {},
    ],
)
def test_nothing_is_said_where_all_nodes_are_used(env, capsys, monkeypatch):
    assert said(capsys, monkeypatch, env, *TRAIN) == ""
    through_slurm = said(capsys, monkeypatch, BATCH, *TRAIN, "launcher=slurm", "--num-gpus", "1")
    assert "add launcher=slurm" not in through_slurm


STEP = BATCH | {"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "4", "SLURM_PROCID": "0"}
COPIES = [
    STEP,
    STEP | {"SLURM_PTY_PORT": "39999", "SLURM_PROCID": "1"},
    {"TORCHELASTIC_RUN_ID": "none", "WORLD_SIZE": "4"},
    {"OMPI_COMM_WORLD_RANK": "2", "OMPI_COMM_WORLD_SIZE": "4"},
]


@pytest.mark.parametrize("env", COPIES)
@pytest.mark.parametrize("verb", ["train", "resume", "submit", "bench", "eval"])
def test_copies_of_the_launcher_are_refused(verb, env, capsys, monkeypatch, tmp_path_factory):
    words = ["recipe=debug"]
    if verb in ("resume", "eval"):
        run = tmp_path_factory.mktemp("runs")
        (run / "config.yaml").touch()
        words = [str(run)]
    message = said(capsys, monkeypatch, env, verb, *words, code=2)
    assert "starts this command 4 times" in message and "type the same command without" in message
    assert not list(Path().iterdir())


@pytest.mark.parametrize(
    "env",
    [
        STEP | {"SLURM_STEP_NUM_TASKS": "1"},
        STEP | {"SLURM_PTY_PORT": "39999"},  # typed into the shell of `srun -n4 --pty bash`
        STEP | {"SLURM_STEP_ID": "4294967290"},
    ],
)
def test_one_launcher_is_not_refused_for_the_step_it_is_in(env, capsys, monkeypatch):
    assert "error" not in said(capsys, monkeypatch, env, *TRAIN)

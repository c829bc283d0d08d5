"""A run folder of another user starts none of its programs before the user confirms."""

from __future__ import annotations

import io
import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from nanoscale.cli.main import run as nanoscale
from nanoscale.config.composing.frozen import dump
from nanoscale.config.reference import declared, with_values
from nanoscale.config.rules import Devices, check
from nanoscale.config.schema import Config, Launcher, Model
from nanoscale.config.values.hooks import file_name, read
from nanoscale.launch.lifecycle.prepare import new_run
from nanoscale.launch.request import Request
from nanoscale.runs import status
from nanoscale.runs.trust import executed, is_signed, sign
from nanoscale.sweep.sweep import Settings, Sweep, Trial
from tests.support.recipes import changed
from tests.support.runs import create_run

PROGRAMS = ["launcher.env={LD_PRELOAD: ./theirs.so, A: one}"]
COMMANDS = [
    ["resume", "x"],
    ["resume", "x", "--dry-run"],
    ["train", "--config", "runs/x/config.yaml"],
    ["bench", "--config", "runs/x/config.yaml"],
    ["submit", "--config", "runs/x/config.yaml", "launcher=slurm"],
    ["eval", "x"],
    ["conform", "--config", "runs/x/config.yaml"],
]


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "settings"))
    monkeypatch.setattr(sys, "stdin", io.StringIO())


def make(*words):
    """Create a run folder that nobody has signed, with its configuration."""
    composed = changed(*words)
    config = check(composed, Devices("cpu", 2))
    run = create_run(Path("runs"), "x")
    run.config.write_text(dump(config, composed.config))
    status.write(run, status.prepared())
    return run, config


def tree(folder):
    return {str(path): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_nothing_is_started_or_written_before_somebody_was_asked(command, capsys, tmp_path):
    make(*PROGRAMS)
    before = tree(tmp_path)
    assert nanoscale(command) == 2
    said = capsys.readouterr().err
    assert "add --trust" in said and "was not made by your own runs" in said
    assert "launcher.env.LD_PRELOAD=./theirs.so" in said and "launcher.env.A=one" in said
    assert tree(tmp_path) == before


CODE = {
    "hooks": ["hooks.path=hooks.py", "model.source=hooks"],
    "tasks": ["train.eval_tasks=[theirs]", "train.eval_tasks_dir=tasks"],
    "model": ["model.source=hf", "model.name=theirs", "model.trust_remote_code=true"],
}
"""Code of a stranger's folder, by the keys that name it. It writes a file when it is run."""
READERS = [
    *COMMANDS,
    ["plan", "--config", "runs/x/config.yaml"],
    ["rehearse", "--config", "runs/x/config.yaml"],
    ["replay", "x", "--steps", "1"],
]
"""Every command that makes a job of another user's configuration."""


@pytest.mark.parametrize("code", CODE)
def test_no_command_runs_a_strangers_code(code, capsys, tmp_path):
    writes = "from pathlib import Path\nPath('ran').touch()\n"
    (tmp_path / "hooks.py").write_text(writes + "def model(config): ...\n")
    tasks = tmp_path / "tasks"
    tasks.mkdir()
    (tasks / "utils.py").write_text(writes + "def f(*_): ...\n")
    (tasks / "theirs.yaml").write_text("task: theirs\nprocess_docs: !function utils.f\n")
    model = {"model_type": "theirs", "auto_map": {"AutoConfig": "code.Theirs"}, "vocab_size": 256}
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs" / "config.json").write_text(json.dumps(model))
    (tmp_path / "theirs" / "code.py").write_text(writes)
    run, config = make()
    values = dict(word.split("=") for word in CODE[code])
    theirs = with_values(config, {key: yaml.safe_load(value) for key, value in values.items()})
    if code == "hooks":
        sha256 = read(tmp_path / "hooks.py").sha256
        (tmp_path / "hooks.py").rename(run.path / file_name(sha256))
        theirs = replace(theirs, hooks=replace(theirs.hooks, sha256=sha256))
    if code == "model":
        theirs = replace(theirs, model=replace(theirs.model, hf_config=model))
    run.config.write_text(dump(theirs, theirs))
    for command in READERS[: -1 if code == "tasks" else None]:  # a replay evaluates nothing
        assert nanoscale(command) == 2, command
        assert "add --trust" in capsys.readouterr().err, command
    assert not (tmp_path / "ran").exists()


def test_a_strangers_sweep_is_asked_about(capsys, tmp_path):
    values = {"launcher.env": "{LD_PRELOAD: ./theirs.so}"}
    trial = Trial("a", {"train.seed": "1"})
    for overrides, trials in (
        (["recipe=debug", "train.seed=1,2", "launcher.env={LD_PRELOAD: ./theirs.so}"], [trial]),
        (["recipe=debug", "train.seed=1,2"], [replace(trial, values=values)]),
    ):
        sweep = Sweep(tmp_path / "sweeps" / str(len(trials[0].values)))
        sweep.path.mkdir(parents=True, exist_ok=True)
        sweep.write(Settings(overrides), trials)
        assert nanoscale(["sweep", "--resume", sweep.name, "--dry-run"]) == 2
        said = capsys.readouterr().err
        assert "add --trust" in said and "launcher.env" in said
        sign(sweep.path, {"overrides": overrides, "config_dir": None})
        signed = 0 if "launcher" in overrides[-1] else 2
        assert nanoscale(["sweep", "--resume", sweep.name, "--dry-run"]) == signed
        capsys.readouterr()


def test_trust_says_yes(capsys):
    make(*PROGRAMS)
    assert nanoscale(["resume", "x", "--dry-run", "--trust"]) == 0
    assert nanoscale(["train", "--config", "runs/x/config.yaml", "--dry-run", "--trust"]) == 0


@pytest.mark.parametrize(("answer", "code"), [("y\n", 0), ("n\n", 2), ("\n", 2), ("", 2)])
def test_on_a_terminal_it_is_a_question(answer, code, capsys, monkeypatch):
    make(*PROGRAMS)
    monkeypatch.setattr(sys, "stdin", io.StringIO(answer))
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    assert nanoscale(["resume", "x", "--dry-run"]) == code
    said = capsys.readouterr().err
    assert "  launcher.env.A=one  (environment variables to set" in said and "[y/N]" in said


def test_ones_own_runs_are_known_wherever_they_are(capsys):
    composed = changed(*PROGRAMS, "run.name=x")
    config = check(composed, Devices("cpu", 2))
    with new_run(Request(composed, config, Devices("cpu", 2))):
        pass
    assert nanoscale(["resume", "x", "--dry-run"]) == 0
    Path("runs/x").rename("elsewhere")
    assert nanoscale(["resume", "./elsewhere", "--dry-run"]) == 0
    assert nanoscale(["train", "--config", "elsewhere/config.yaml", "--dry-run"]) == 0


def test_a_value_that_is_changed_later_is_asked_about(capsys):
    run, config = make(*PROGRAMS)
    sign(run.path, executed(config))
    assert nanoscale(["resume", "x", "--dry-run"]) == 0
    run.config.write_text(run.config.read_text().replace("./theirs.so", "./other.so"))
    assert nanoscale(["resume", "x", "--dry-run"]) == 2
    assert "launcher.env.LD_PRELOAD=./other.so" in capsys.readouterr().err


def test_another_users_signature_proves_nothing(capsys, monkeypatch, tmp_path):
    run, config = make(*PROGRAMS)
    sign(run.path, executed(config))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "another"))
    assert nanoscale(["resume", "x", "--dry-run"]) == 2
    sign(create_run(Path("runs"), "mine").path, {})  # this user has a secret as well
    assert nanoscale(["resume", "x", "--dry-run"]) == 2


def test_what_the_command_line_sets_needs_no_question(capsys):
    make(*PROGRAMS)
    words = ["resume", "x", "--dry-run", "launcher.env.LD_PRELOAD=mine"]
    assert nanoscale(words) == 2
    said = capsys.readouterr().err
    assert "launcher.env.A=one" in said and "LD_PRELOAD" not in said and "theirs" not in said
    assert nanoscale([*words, "launcher.env.A=2"]) == 0


def test_a_folder_that_names_no_program_needs_no_question(capsys):
    make()
    assert nanoscale(["resume", "x", "--dry-run"]) == 0


def test_every_key_that_names_code_or_programs_is_marked():
    """A new key of this kind belongs here and has `executes` in the schema."""
    assert {name for name, key in declared().items() if key.executes} == {
        "backend.extra",
        "cluster.python",
        "hooks.path",
        "hooks.settings",
        "hooks.sha256",
        "launcher.batch.directives",
        "launcher.batch.setup",
        "launcher.container",
        "launcher.container_mounts",
        "launcher.env",
        "launcher.hostfile",
        "launcher.pass_env",
        "launcher.slurm.directives",
        "launcher.slurm.setup",
        "launcher.ssh_args",
        "model.hf_config",
        "model.name",
        "model.trust_remote_code",
        "train.eval_tasks_dir",
    }


def test_a_models_name_is_one_of_code_if_its_code_is_run():
    theirs = Model(source="hf", name="org/model", hf_config={"auto_map": {}})
    assert executed(Config(model=theirs)) == {}
    trusting = Config(model=replace(theirs, trust_remote_code=True))
    assert set(executed(trusting)) == {"model.name", "model.trust_remote_code", "model.hf_config"}


def test_a_user_without_settings_signs_nothing(monkeypatch, tmp_path):
    run, config = make(*PROGRAMS)
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "file"))
    sign(run.path, executed(config))
    assert not run.signature.exists()


def test_the_secret_is_the_users_alone_and_stays(tmp_path):
    run, _ = make()
    config = Config(launcher=Launcher(env={"A": "1"}))
    sign(run.path, executed(config))
    secret = tmp_path / "settings" / "nanoscale" / "secret"
    assert secret.stat().st_mode & 0o777 == 0o600 and len(secret.read_bytes()) == 32
    assert [path.name for path in secret.parent.iterdir()] == ["secret"]
    assert secret.read_bytes().hex() not in run.signature.read_text()
    sign(run.path, executed(config))
    assert is_signed(run.path, executed(config))

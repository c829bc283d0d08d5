"""hooks.path on the command line: shown, checked before anything starts, copied, and run only as it was."""

from __future__ import annotations

import io
import json
import re
import sys
from pathlib import Path

import pytest

from nanoscale.cli.main import run as nanoscale
from nanoscale.config.composing.frozen import load
from nanoscale.config.values import hooks
from tests.support.hf_families import save

pytestmark = pytest.mark.usefixtures("forked_ranks")

LOSS = """
def loss(logits, targets, config):
    import torch
    return torch.nn.functional.cross_entropy(logits, targets, reduction="none")
"""


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "settings"))
    monkeypatch.setattr(sys, "stdin", io.StringIO())
    Path("mine.py").write_text(LOSS)


def dry(*words):
    return nanoscale(["train", "recipe=debug", *words, "--dry-run"])


def test_a_dry_run_shows_the_file_and_runs_nothing_of_it(capsys):
    Path("mine.py").write_text(LOSS + "raise SystemExit(9)\n")
    assert dry("hooks.path=mine.py", "train.objective=hooks", "--json") == 0
    shown = json.loads(capsys.readouterr().out)["settings"]["hooks"]
    digest = hooks.read(Path("mine.py")).sha256
    assert shown == f"loss of {Path('mine.py').absolute()}, sha256 {digest[:12]}"


@pytest.mark.parametrize(
    ("text", "words", "message"),
    [
        (None, ["hooks.path=other.py"], "there is no such file"),
        ("def loss(:", ["hooks.path=mine.py"], "is not Python: invalid syntax, in line 1"),
        ("x = " + "(" * 10**4, ["hooks.path=mine.py"], "is not Python"),
        ("#" * (1 << 20) + "\n", ["hooks.path=mine.py"], "is larger than 1 MiB"),
        (LOSS, ["hooks.path=mine.py"], "defines loss(), which would be ignored"),
        (LOSS, ["train.objective=hooks"], "needs hooks.path, a file that defines loss(logits"),
        (LOSS, ["hooks.path=mine.py", "train.objective=hooks", "data=hooks"], "defines no data("),
        ("def on_step(moment): 1", ["hooks.path=mine.py"], "never called: on_step_end()?"),
        ("def on_step_end(): 1", ["hooks.path=mine.py"], "another number of parameters"),
        (LOSS, ["hooks.settings.a=1"], "does not concern hooks.path=null"),
        (
            LOSS,
            ["hooks.path=mine.py", "train.objective=hooks", "hooks.sha256=00"],
            "another digest",
        ),
    ],
)
def test_mistakes_are_found_before_the_launch(capsys, text, words, message):
    if text is not None:
        Path("mine.py").write_text(text)
    assert dry(*words) == 2
    said = capsys.readouterr().err
    assert message in said
    assert not Path("runs").exists()
    advice = re.search(r"type instead: (\S+)", said)
    if advice is not None and "other" not in words[0]:
        keys = [advice[1].partition("=")[0]]
        kept = [word for word in words if word.partition("=")[0] not in keys]
        code = dry(*kept, advice[1])
        assert code == 0 or advice[1] not in capsys.readouterr().err


def test_a_file_of_another_encoding_is_one_sentence(capsys):
    Path("mine.py").write_bytes(b'a = 1\nb = "\xe9"\n')
    assert dry("hooks.path=mine.py") == 2
    said = capsys.readouterr().err
    assert "is not UTF-8, in line 2" in said and "codec" not in said


@pytest.mark.slow
def test_a_run_keeps_its_copy_and_runs_no_other(capsys, tmp_path):
    words = ["hooks.path=mine.py", "train.objective=hooks", "run.name=x", "train.steps=2"]
    assert nanoscale(["train", "recipe=debug", "checkpoint.every=1", *words]) == 0
    (copy,) = Path("runs/x").glob("hooks-*.py")
    assert copy.read_text() == LOSS
    Path("mine.py").write_text("def other(): pass")  # the run has its own
    Path("runs/x").rename("moved")
    copy = Path("moved") / copy.name
    assert nanoscale(["resume", "./moved", "train.steps=4"]) == 0
    capsys.readouterr()
    copy.write_text(LOSS + "\n# changed\n")
    assert nanoscale(["resume", "./moved", "train.steps=5"]) == 2
    said = capsys.readouterr().err
    assert "has another digest" in said and f"hooks.path={copy.absolute()}" in said
    assert nanoscale(["resume", "./moved", "train.steps=5", f"hooks.path={copy.absolute()}"]) == 0
    assert len(list(Path("moved").glob("hooks-*.py"))) == 2


@pytest.mark.slow
def test_anothers_run_is_asked_about(capsys, monkeypatch, tmp_path):
    words = ["hooks.path=mine.py", "train.objective=hooks", "run.name=x", "train.steps=1"]
    assert nanoscale(["train", "recipe=debug", *words]) == 0
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "another"))
    for command in (["resume", "x", "train.steps=2"], ["eval", "x"]):
        capsys.readouterr()
        assert nanoscale(command) == 2
        assert "hooks.path=" in capsys.readouterr().err


@pytest.mark.slow
def test_an_own_model_is_counted_before_the_launch(capsys):
    Path("mine.py").write_text("""
import torch

def model(config):
    return torch.nn.Sequential(torch.nn.Embedding(320, 8), torch.nn.Linear(8, 320))
""")
    words = ["train", "recipe=debug", "hooks.path=mine.py", "model=hooks", "train.steps=1"]
    assert nanoscale([*words, "run.name=x"]) == 0
    assert load(Path("runs/x/config.yaml")).model.parameters == 320 * 17
    capsys.readouterr()
    Path("mine.py").write_text("def model(config): return 1 / 0")
    assert nanoscale([*words, "run.name=y"]) == 2
    assert "model() fails with ZeroDivisionError: division by zero" in capsys.readouterr().err
    assert not Path("runs/y").exists()
    assert nanoscale([*words, "--dry-run"]) == 0, "which runs none of it"
    save("llama", Path("folder"))
    assert dry("hooks.path=mine.py", "model.source=hooks", "model.init_from=folder") == 2
    assert "from which model.init_from takes the shape" in capsys.readouterr().err
    assert dry("hooks.path=mine.py", "model=hooks", "parallel.tp=2") == 2
    assert "those of model=hooks are your own" in capsys.readouterr().err

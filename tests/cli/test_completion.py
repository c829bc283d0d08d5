"""Completion as shells ask for it: by environment variables, in a process; in a bash that is present."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from nanoscale.cli.main import VERBS
from nanoscale.config.composing.library import Library
from nanoscale.config.reference import declared

HEAVY = {"torch", "numpy", "hydra", "omegaconf", "rich", "yaml", "pydantic_core"}
PROGRAM = f"""
import sys
from nanoscale.cli.main import main
try:
    main()
finally:
    print(*{HEAVY!r} & set(sys.modules), file=sys.stderr)
"""


def ask(folder: Path, variables: dict[str, str]) -> list[str]:
    """Ask as a shell does, and return the answer's lines."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        cwd=folder, capture_output=True, text=True, timeout=120,
        env={"PATH": "/usr/bin:/bin", "PYTHONPATH": str(Path(__file__).parents[2]), **variables},
    )  # fmt: skip
    assert (done.returncode, done.stderr.strip()) == (0, "")
    return done.stdout.strip().splitlines()


def bash(folder: Path, *words: str) -> list[str]:
    """Return what bash gets at the end of the last word; it splits words at `=`."""
    variables = {
        "_NANOSCALE_COMPLETE": "complete_bash",
        "COMP_WORDS": "\n".join(["nanoscale", *words]),
        "COMP_CWORD": str(len(words)),
    }
    return ask(folder, variables)


def test_recipes_options_and_values_follow_the_equals_sign(tmp_path):
    (tmp_path / "recipes").mkdir()
    (tmp_path / "recipes/llama-mine.yaml").write_text("# Mine.\ntrain: {steps: 3}\n")
    ours = [name for name in Library().options("recipe") if name.startswith("llama-")]
    answer = bash(tmp_path, "train", "train.steps", "=", "4", "recipe", "=", "llama-")
    assert sorted(answer) == sorted([*ours, "llama-mine"])
    assert bash(tmp_path, "plan", "parallel", "=") == list(Library().options("parallel"))
    assert bash(tmp_path, "resume", "first", "backend.attention", "=", "f") == ["flash"]
    # a bash whose COMP_WORDBREAKS has no `=`
    assert bash(tmp_path, "train", "zero=stage1") == ["zero=stage1"]


def test_groups_and_keys(tmp_path):
    first = bash(tmp_path, "train", "")
    assert {f"{group}=" for group in Library.groups()} <= set(first)
    assert {"train.", "run."} <= set(first)
    train = bash(tmp_path, "train", "recipe", "=", "tiny", "train.")
    assert train == [f"{name}=" for name in declared() if name.startswith("train.")]


def test_what_is_not_a_whole_word_is_never_alone(tmp_path):
    """A shell adds a space after a single candidate."""
    assert bash(tmp_path, "train", "rec")[0] == "recipe=chat"
    assert bash(tmp_path, "train", "train.ste") == ["train.steps=", "train.steps=null"]
    keys = [f"{name}=" for name in declared() if name.startswith("run.")]
    assert bash(tmp_path, "train", "run") == keys and len(keys) > 1


@pytest.mark.slow
def test_runs_topics_keys_verbs_and_options(tmp_path):
    (tmp_path / "runs/first").mkdir(parents=True)
    (tmp_path / "runs/first/config.yaml").touch()
    assert bash(tmp_path, "runs", "show", "f") == ["first"]
    assert bash(tmp_path, "resume", "") == ["first"]
    assert bash(tmp_path, "help", "lay") == ["layouts"]
    assert bash(tmp_path, "recipes", "show", "deb") == ["debug"]
    assert bash(tmp_path, "config", "explain", "zero.st") == ["zero.stage"]
    assert bash(tmp_path, "config", "ls", "prec") == ["precision"]
    assert bash(tmp_path, "train", "--dry") == ["--dry-run"]
    assert set(bash(tmp_path, "")) == set(VERBS)


def test_files_are_left_to_the_shell(tmp_path):
    assert bash(tmp_path, "train", "data.path", "=") == []
    assert bash(tmp_path, "train", "recipe", "=", "./") == []


@pytest.mark.slow
def test_zsh_and_fish(tmp_path):
    asked = {"_TYPER_COMPLETE_ARGS": "nanoscale train recipe=deb"}
    fish = {"_TYPER_COMPLETE_FISH_ACTION": "get-args", "_NANOSCALE_COMPLETE": "complete_fish"}
    zsh = {"_NANOSCALE_COMPLETE": "complete_zsh"}
    helps = Library().options("recipe")["debug"].about
    answers = {}
    for name, shell in (("fish", fish), ("zsh", zsh)):
        done = subprocess.run(
            [sys.executable, "-m", "nanoscale"],
            cwd=tmp_path, capture_output=True, text=True, timeout=120,
            env={"PATH": "/usr/bin:/bin", "PYTHONPATH": str(Path(__file__).parents[2]), **asked, **shell},
        )  # fmt: skip
        assert (done.returncode, done.stderr) == (0, "")
        answers[name] = done.stdout.strip()
    assert answers["fish"] == f"recipe=debug\t{helps}"
    assert answers["zsh"].startswith('_arguments \'*: :(("recipe=debug":"')


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
def test_a_real_bash_completes_with_the_script_that_is_shown(tmp_path):
    program = tmp_path / "nanoscale"
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -m nanoscale "$@"\n')
    program.chmod(0o755)
    environment = {
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "PYTHONPATH": str(Path(__file__).parents[2]),
        "_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION": "1",
    }
    # What readline does at the Tab key: words, the cursor's word, the function.
    script = """
        set -e
        eval "$(nanoscale --show-completion bash)"
        COMP_WORDS=(nanoscale train recipe = deb) COMP_CWORD=4
        _nanoscale_completion nanoscale
        echo "${COMPREPLY[@]}"
    """
    done = subprocess.run(
        ["bash", "-c", script],
        cwd=tmp_path, capture_output=True, text=True, timeout=120, env=environment,
    )  # fmt: skip
    assert (done.returncode, done.stdout, done.stderr) == (0, "debug\n", "")

"""Advice on runs that another host holds, on data and on hostfiles: each is typed back.

test_pasted_commands.py reads the commands for a run that is running, and test_runs.py types them.
"""

from __future__ import annotations

import json
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest

from nanoscale.cli.main import run as nanoscale
from nanoscale.common.devices import Devices
from nanoscale.common.errors import UserError
from nanoscale.config.composing.frozen import dump
from nanoscale.config.rules import check
from nanoscale.runs.lock import Owner, terminate
from tests.cli import Capsys
from tests.support.recipes import changed
from tests.support.runs import create_run
from tests.support.token_files import write_indexed

LIMIT_S = 120.0
MISTYPED = [
    "node1 8",
    "node1 slots:8",
    "node1 slots = 8",
    "node1 slots=8 # eight\nnode1 slots=8",
    "node1 slots=99999",
    "node1 slots=8 gpus=2",
    "node1:22 slots=8",
]
"""Hostfiles with a line that is refused."""


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def advised(capsys: Capsys, *words: str) -> list[str]:
    """Return the suggestions in the error of a command."""
    capsys.readouterr()
    assert nanoscale([*words, "--json"]) == 2
    found: list[dict[str, Any]] = json.loads(capsys.readouterr().out)["error"]["violations"]
    return [text for violation in found for text in violation["suggestions"]]


def test_the_command_for_the_host_that_holds_a_run_is_read_by_the_shell_there() -> None:
    """ssh begins in another folder, and the run has ended meanwhile."""
    run = create_run(Path("runs"), "a run; 'x'")
    run.config.write_text(dump(check(changed(), Devices("cpu", 2))))
    holder = Owner("another-host", 1, "me", 0.0, "nanoscale train")
    with pytest.raises(UserError) as error:
        terminate(run, holder)
    (advice,) = error.value.violations[0].suggestions
    ssh, host, command = shlex.split(advice)
    assert (ssh, host) == ("ssh", "another-host")
    done = subprocess.run(
        ["sh", "-c", command], cwd="/", capture_output=True, text=True, timeout=LIMIT_S
    )
    assert done.returncode == 0, done.stderr
    assert "is not running" in done.stdout


def test_a_vocabulary_that_is_enough_is_enough(capsys: Capsys) -> None:
    write_indexed("tokens", [range(900)])
    inspect = ["data", "inspect", "tokens", "recipe=debug", "--json"]
    assert nanoscale(inspect) == 1
    (problem,) = json.loads(capsys.readouterr().out)["problems"]
    (word,) = [word for word in problem.split() if word.startswith("model.vocab=")]
    assert nanoscale([*inspect, word]) == 0


@pytest.mark.parametrize("text", MISTYPED)
def test_a_line_of_a_hostfile_is_written_as_advised(text: str, capsys: Capsys) -> None:
    Path("hosts").write_text(f"node2 slots=8\n{text}\n")
    launch = ["train", "recipe=debug", "--dry-run", "--hostfile", "hosts", "train.global_batch=480"]
    (line,) = advised(capsys, *launch)
    *before, _ = text.splitlines()
    Path("hosts").write_text("\n".join(["node2 slots=8", *before, line.replace("=N", "=8")]))
    assert nanoscale([*launch, "parallel.dp=auto"]) == 0

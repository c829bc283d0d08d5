"""`nanoscale runs ls`: columns, conditions, order and limit, and the advice on mistyped ones."""

from __future__ import annotations

import json
import re
import shlex
import shutil
from pathlib import Path
from typing import Any

import pytest

from nanoscale.cli.main import run as nanoscale
from nanoscale.config import reference
from nanoscale.config.composing.compose import compose
from nanoscale.config.composing.frozen import dump, load, read_values
from nanoscale.config.rules import Devices, check
from nanoscale.launch.lifecycle.prepare import replace_configuration
from nanoscale.launch.request import Request
from nanoscale.runs import status
from nanoscale.runs.changes import current_tags
from nanoscale.runs.directory import RunDirectory
from tests.cli import Capsys
from tests.support.runs import create_run

MISTYPED = {
    ("--columns", "lrr,loss"): "lr,loss",
    ("--columns", "stps"): "steps",
    ("--columns", "source"): "data.source",
    ("--columns", "optimzer.lr"): "optimizer.lr",
    ("--columns", "loss,,lr"): None,
    ("--sort", "lrr"): "lr",
    ("--sort", "-lrr"): "-lr",
    ("--where", "lrr<3"): "lr<3",
    ("--where", "stat=failed"): "state=failed",
    ("--where", "failed"): "state=failed",
    ("--where", "=failed"): "state=failed",
    ("--limit", "0"): None,
    ("--limit", "x"): None,
}
"""Option and value → the value that is advised, if any."""


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three runs: losses 3, 1 and 2; the second was evaluated and then logged more, the third failed."""
    root = tmp_path_factory.mktemp("ls") / "runs"
    for number, loss in enumerate((3.0, 1.0, 2.0)):
        composed = compose(["recipe=debug", f"optimizer.lr={(number + 1) * 1e-3}"])
        run, config = create_run(root, f"r{number}"), check(composed, Devices("cpu", 2))
        run.config.write_text(dump(config, composed.config))
        end = ("failed", 1) if number == 2 else ("completed", 0)
        begun = status.Status("prepared", 0, 100.0 + number).starting(1)
        status.write(run, begun.ending(*end))
        lines: list[dict[str, Any]] = [{"step": 6, "loss": 9.0, "eval_loss": 4.5}] * (number == 1)
        lines.append({"step": 7, "loss": loss, "lr": 1e-5 * loss, "mfu": None})
        run.metrics.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return root


@pytest.fixture(autouse=True)
def _here(whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copytree(whole, tmp_path / "runs")
    monkeypatch.chdir(tmp_path)


def rows(capsys: Capsys, *words: str) -> list[dict[str, Any]]:
    assert nanoscale(["runs", "ls", *words, "--json"]) == 0
    listed: list[dict[str, Any]] = json.loads(capsys.readouterr().out)
    return listed


def names(capsys: Capsys, *words: str) -> list[str]:
    return [row["name"] for row in rows(capsys, *words)]


def test_columns_are_metrics_keys_and_states(capsys: Capsys) -> None:
    wanted = "lr,eval_loss,optimizer.lr,mlp,exit_code"
    (row,) = rows(capsys, "--columns", wanted, "--where", "name=r1")
    assert [row[name] for name in wanted.split(",")] == [1e-5, 4.5, 0.002, "swiglu", 0]
    assert nanoscale(["runs", "ls", "--columns", wanted]) == 0
    head, *lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert head == ["run", "state", *wanted.split(",")]
    assert lines[1] == ["r1", "completed", "1e-05", "4.5", "0.002", "swiglu", "0"]


def test_the_last_word_of_two_keys_is_refused_with_both(capsys: Capsys) -> None:
    Path("runs/r1/config.yaml").write_text(
        Path("runs/r1/config.yaml").read_text().replace("  path: null", "  path: /corpus", 1)
    )
    assert nanoscale(["runs", "ls", "--columns", "path"]) == 2
    assert "--columns data.path or --columns hooks.path" in capsys.readouterr().err
    (row,) = rows(capsys, "--columns", "data.path", "--where", "data.path=/corpus")
    assert (row["data.path"], row["path"]) == ("/corpus", str(Path("runs/r1").absolute()))


@pytest.mark.parametrize(
    ("conditions", "expected"),
    [
        (["state=failed"], ["r2"]),
        (["state!=failed"], ["r0", "r1"]),
        (["loss<2"], ["r1"]),
        (["loss<=2"], ["r1", "r2"]),
        (["loss>1.5", "state=completed"], ["r0"]),
        (["loss>=2", "optimizer.lr!=3e-3"], ["r0"]),
        (["eval_loss>0"], ["r1"]),
        (["eval_loss=4.50"], ["r1"]),
        (["mfu<1"], []),
        (["tokens=null"], ["r0", "r1", "r2"]),
        (["sliding_window=null"], ["r0", "r1", "r2"]),
        (["sequence_parallel=true"], ["r0", "r1", "r2"]),
        (["model.name > a"], ["r0", "r1", "r2"]),
        (["created<1971"], ["r0", "r1", "r2"]),
    ],
)
def test_conditions(conditions: list[str], expected: list[str], capsys: Capsys) -> None:
    words = [word for condition in conditions for word in ("--where", condition)]
    assert names(capsys, *words) == expected


def test_order_and_limit(capsys: Capsys) -> None:
    assert names(capsys, "--sort", "loss") == ["r1", "r2", "r0"]
    assert names(capsys, "--sort", "-loss") == ["r0", "r2", "r1"]
    assert names(capsys, "--sort", "eval_loss", "--limit", "1") == ["r1"]
    assert names(capsys, "--sort", "-eval_loss", "--limit", "1") == ["r1"]
    assert names(capsys, "--limit", "2") == ["r1", "r2"]


def test_no_run_fulfils_the_conditions(capsys: Capsys) -> None:
    assert nanoscale(["runs", "ls", "--where", "loss>100"]) == 0
    assert capsys.readouterr().out.startswith("no such runs in ")


def test_a_damaged_run_is_listed_and_last(capsys: Capsys) -> None:
    Path("runs/r1/config.yaml").write_text("optimizer: [")
    assert names(capsys, "--columns", "optimizer.lr", "--sort", "optimizer.lr") == [
        "r0",
        "r2",
        "r1",
    ]
    assert names(capsys, "--where", "optimizer.lr>0") == ["r0", "r2"]


@pytest.mark.parametrize(("option", "value"), MISTYPED)
def test_a_mistake_is_one_line_and_its_advice_is_accepted(
    option: str, value: str, capsys: Capsys
) -> None:
    assert nanoscale(["runs", "ls", option, value]) == 2
    out, err = capsys.readouterr()
    assert not out and err.count("error:") == 1
    expected = MISTYPED[option, value]
    advice = [shlex.split(it) for it in re.split(" or |\n", err.partition("instead: ")[2]) if it]
    assert expected is None or [option, expected] in advice
    for words in advice:
        assert nanoscale(["runs", "ls", *words]) == 0, words


def test_values_of_a_frozen_file_are_those_of_the_whole_configuration() -> None:
    path = Path("runs/r1/config.yaml").absolute()
    path.write_text(path.read_text().replace("  project: nanoscale", r"  project: 'a: \${b}'"))
    config = load(path)
    for name, value in read_values(path, reference.declared()).items():
        whole: Any = config
        for part in name.split("."):
            whole = getattr(whole, part, None)
        assert value == whole, name
    assert read_values(path, ["logger.project"]) == {"logger.project": "a: ${b}"}


def test_tags(capsys: Capsys) -> None:
    """The tags of the configuration count until they are changed, and again after a resume that sets them."""

    def tagged(*words: str) -> str:
        assert nanoscale(["runs", "tag", *words]) == 0
        return capsys.readouterr().out.strip()

    def listed(*words: str) -> list[str]:
        assert nanoscale(["runs", "ls", "--json", *words]) == 0
        return [row["name"] for row in json.loads(capsys.readouterr().out)]

    run = RunDirectory.open("r0")
    run.config.write_text(run.config.read_text().replace("tags: []", "tags: [first, paper]"))
    assert tagged("r0") == "first, paper" and not run.tags.exists()
    assert tagged("r0", "best", "first", "--remove", "paper") == "first, best"
    assert tagged("r1", "best") == "best" and tagged("r2") == "no tags"
    assert listed("--where", "tags=best") == ["r0", "r1"]
    assert listed("--where", "tags=paper") == [] and listed("--where", "tags!=best") == ["r2"]
    assert nanoscale(["runs", "ls", "--columns", "run.tags"]) == 0
    assert "[first,best]" in capsys.readouterr().out.replace(" ", "")
    assert nanoscale(["runs", "show", "r0"]) == 0
    assert re.search(r"^tags +first, best$", capsys.readouterr().out, re.M)
    assert current_tags(run, ["other"]) == ["first", "best"], "as trackers have it"

    for words, said in (
        (["r0", "a,b"], "must not contain spaces or commas"),
        (["r0", ""], "must not contain spaces or commas"),
        (["r0", "--", "-a"], "must not start with `-`"),
        (["r0", "ok", "--remove", "bets"], "its tags: first, best"),
        (["r9", "a"], "no run 'r9'"),
    ):
        assert nanoscale(["runs", "tag", *words]) == 2
        assert said in capsys.readouterr().err
    assert nanoscale(["runs", "tag", "r0", "--remove", "bets"]) == 2
    advice = re.findall(r"type instead: (.*)", capsys.readouterr().err)
    assert advice == ["--remove best"] and tagged("r0", *shlex.split(advice[0])) == "first"

    composed = compose(["run.tags=[new]"], config_file=run.config)
    request = Request(composed, check(composed, Devices("cpu", 2)), Devices("cpu", 2))
    replace_configuration(run, request, 1)
    assert tagged("r0") == "new"
    run.tags.write_text('{"tags": 3}')
    assert nanoscale(["runs", "tag", "r0"]) == 2
    assert "holds no list of tags" in capsys.readouterr().err


def test_trials_of_sweeps_are_shown_to_be_elsewhere(capsys: Capsys) -> None:
    Path("runs").rename("kept")
    Path("sweeps/a b").mkdir(parents=True)
    Path("kept").rename("sweeps/a b/runs")
    Path("sweeps/a b/sweep.json").write_text("{}")
    assert nanoscale(["runs", "ls"]) == 0
    command = capsys.readouterr().err.strip().rpartition(": nanoscale ")[2]
    assert nanoscale(shlex.split(command)) == 0
    assert "r0" in capsys.readouterr().out


def test_a_run_that_may_not_be_read_hides_no_other(
    capsys: Capsys, monkeypatch: pytest.MonkeyPatch
) -> None:
    locked, stat = Path("runs/r1").absolute(), Path.stat

    def refuse(path: Path, **options: Any) -> Any:
        if locked in path.absolute().parents:
            raise PermissionError(13, "Permission denied", str(path))
        return stat(path, **options)

    monkeypatch.setattr(Path, "stat", refuse)
    monkeypatch.setattr(Path, "read_bytes", lambda path: refuse(path) and path.open("rb").read())
    assert set(names(capsys)) == {"r0", "r1", "r2"}
    assert nanoscale(["runs", "ls"]) == 0
    printed = capsys.readouterr().out
    assert "damaged: " in printed and max(map(len, printed.splitlines())) <= 110
    assert nanoscale(["runs", "show", "r1"]) == 2
    assert "Permission denied" in capsys.readouterr().err

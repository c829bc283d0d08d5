"""`nanoscale runs compare`: keys, losses at equal points, the page, and bad lines."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest

from nanoscale.cli.main import run as nanoscale
from nanoscale.common.devices import Devices
from nanoscale.config.composing.frozen import dump
from nanoscale.config.rules import check
from nanoscale.launch.lifecycle.attempt import Outcome
from nanoscale.runs import status
from nanoscale.runs.directory import RunDirectory, write_json
from nanoscale.view.job_text import seen_text
from nanoscale.view.run.outcome_text import print_outcome
from tests.cli import Capsys
from tests.support.recipes import changed
from tests.support.runs import create_run

BAD = [
    ["a"],
    ["a", "runs/a"],
    ["a", "nothing"],
    ["a", "b", "--html", "nowhere/page.html"],
    ["a", "b", "--html", "runs/a/config.yaml"],
]


@pytest.fixture(autouse=True)
def _runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run a: 8 steps of 1 s with 100 tokens. Run b: 4 steps of 4 s with 200 tokens."""
    monkeypatch.chdir(tmp_path)
    for name, steps, tokens, seconds in (("a", 8, 100, 1.0), ("b", 4, 200, 4.0)):
        run = create_run(Path("runs"), name)
        config = check(changed(f"run.name={name}", f"train.steps={steps}"), Devices("cpu", 2))
        run.config.write_text(dump(config))
        begun = status.Status("prepared", 0, 1.0).starting(1)
        status.write(run, begun.ending("completed", 0))
        records = [
            {"step": it, "loss": 10.0 - it, "tokens": it * tokens, "step_time_s": seconds}
            for it in range(1, steps + 1)
        ]
        run.metrics.write_text("".join(json.dumps(record) + "\n" for record in records))


def test_what_differs_and_losses_at_equal_points(capsys: Capsys) -> None:
    assert nanoscale(["runs", "compare", "a", "b", "--json"]) == 0
    about = json.loads(capsys.readouterr().out)
    assert about["keys"] == [{"key": "train.steps", "values": [8, 4]}]
    losses = {(row["axis"], row["at"]): row["losses"] for row in about["losses"]}
    assert losses["step", 4] == [6.0, 6.0]
    assert losses["tokens", 800] == [2.0, 6.0]
    assert losses["tokens", 400] == [6.0, 8.0]
    assert losses["seconds", 8.0] == [2.0, 8.0]
    assert losses["seconds", 2.0] == [8.0, None]
    assert [run["seconds"] for run in about["runs"]] == [8.0, 16.0]
    assert about["curves"]["loss"][1] == [[1, 9.0], [2, 8.0], [3, 7.0], [4, 6.0]]


def test_losses_are_those_of_the_steps_that_are_named(capsys: Capsys) -> None:
    logged = {"a": (2, 4, 7), "b": (2, 3, 4)}
    for name, steps in logged.items():
        file = RunDirectory(Path("runs", name)).metrics
        records = map(json.loads, file.read_text().splitlines())
        kept = [json.dumps(record) for record in records if record["step"] in steps]
        file.write_text("".join(f"{line}\n" for line in kept))
    assert nanoscale(["runs", "compare", "a", "b", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["losses"]
    losses = {(row["axis"], row["at"]): row["losses"] for row in rows}
    assert {at for axis, at in losses if axis == "step"} == {2, 4}
    assert losses["step", 4] == [6.0, 6.0]
    assert {at for axis, at in losses if axis == "tokens"} == {400}
    assert losses["tokens", 400] == [6.0, 8.0]
    assert losses["seconds", 3.5] == [6.5, None]  # on the line from step 2 to step 4


def test_terminal_and_page(capsys: Capsys) -> None:
    assert nanoscale(["runs", "compare", "a", "b", "--html", "page.html"]) == 0
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert "train.steps 8 4" in lines
    assert not any(line.startswith("eval_loss") for line in lines), "no run was evaluated"
    assert "loss at 800 tokens 2.0000 6.0000" in lines
    blocks = [line.split()[2] for line in lines if "█" in line]
    assert [block[0] for block in blocks] == ["█", "█"]
    assert blocks[0].endswith("▁") and not blocks[1].endswith("▁")  # one scale for both
    page = Path("page.html").read_text()
    assert "train.steps" in page and "curve-1" in page and page.count("<svg") == 1


@pytest.mark.parametrize("words", BAD, ids=" ".join)
def test_a_bad_line_writes_nothing(words: list[str], capsys: Capsys) -> None:
    before = sorted(Path().rglob("*"))
    assert nanoscale(["runs", "compare", *words]) == 2
    out, err = capsys.readouterr()
    assert not out and err.count("error:") == 1
    assert sorted(Path().rglob("*")) == before


def test_the_end_of_a_run_and_the_comparison_have_one_speed(capsys: Capsys) -> None:
    run, stream = RunDirectory.open("a"), io.StringIO()
    plan = {"tokens_per_s": 70.0, "hardware": {"device": "cpu"}, "memory": {"allocated_gib": 1.0}}
    write_json(run.plan, plan)
    lines = [json.loads(line) for line in run.metrics.read_text().splitlines()]
    for line, speed in zip(lines, (1.0, 1.0, 1.0, 30.0, 50.0, 40.0, 20.0, 9.0), strict=True):
        line |= {"tokens_per_s": speed, "samples_per_s": speed / 8, "step_time_s": 120 / speed}
        line |= {"memory_gib": 1.5 - speed / 100, "mfu": 0.25}
    run.metrics.write_text("".join(json.dumps(line) + "\n" for line in lines))
    print_outcome(run, Outcome("completed", 0), stream)
    assert (
        "  speed       30 tokens/s, 3.75 samples/s (median), planned 70\n"
        "  step        4 s; at the peak of the devices it would take 1 s\n"
        "  memory      1.49 GiB at the peak\n"
    ) in stream.getvalue()
    assert nanoscale(["runs", "compare", "a", "b", "--json"]) == 0
    speeds = [one["tokens_per_s"] for one in json.loads(capsys.readouterr().out)["runs"]]
    assert speeds == [30.0, None]


@pytest.mark.parametrize(
    ("changes", "prompt"),
    [
        ({}, "'Once'"),
        ({"loss_on: all": "loss_on: answers"}, "'What can you do?'"),
        ({"objective: next-token": "objective: dpo"}, "'What can you do?'"),
    ],
)
def test_a_model_that_learned_answers_is_asked_a_question(
    changes: dict[str, str], prompt: str
) -> None:
    run, stream = RunDirectory.open("a"), io.StringIO()
    run.checkpoint(3).mkdir(parents=True)
    text = run.config.read_text()
    for old, new in changes.items():
        assert old in text
        text = text.replace(old, new)
    run.config.write_text(text)
    print_outcome(run, Outcome("completed", 0), stream)
    assert f"generate a --prompt {prompt}\n" in stream.getvalue()


def test_a_part_of_the_data_is_a_percentage() -> None:
    texts = [seen_text(times) for times in (0.00103, 0.25, 1, 1.5, 123.4)]
    assert texts == ["0.103% of an epoch", "25% of an epoch", "1 epoch", "1.5 epochs", "123 epochs"]

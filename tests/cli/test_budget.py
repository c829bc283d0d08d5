"""`nanoscale plan --budget`, run in this process."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.cli import Capsys
from tests.cli.test_plan import H100, output, refusal

PRICED = (*H100, "cluster.price=2.5")


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def plan(capsys: Capsys, *words: str) -> dict[str, Any]:
    document: dict[str, Any] = json.loads(output(capsys, *words, "--json"))
    return document


@pytest.mark.parametrize(
    ("text", "key", "amount"),
    [("20000EUR", "cost", 20000), ("2000.5h", "device_hours", 2000.5), ("14d", "hours", 336)],
)
def test_the_most_steps_within_a_budget(capsys: Capsys, text: str, key: str, amount: float) -> None:
    document = plan(capsys, *PRICED, "--budget", text)
    bought, step_s = document["budget"], document["step_time_s"]
    each = {
        "cost": 2.5 * 8 * step_s / 3600,
        "device_hours": 8 * step_s / 3600,
        "hours": step_s / 3600,
    }
    assert bought["steps"] == int(amount / each[key])
    assert bought["tokens"] == bought["steps"] * 512 * 8192
    for name, per_step in each.items():
        assert bought[name] == pytest.approx(bought["steps"] * per_step)
    assert amount - each[key] < bought[key] <= amount
    # The override asks for these steps, and the plan of the request itself is unchanged.
    assert bought["override"] == f"train.steps={bought['steps']}"
    assert document["training"]["steps"] == 3_576_279
    training = plan(capsys, *PRICED, bought["override"])["training"]
    assert training["steps"] == bought["steps"]
    assert training["device_hours"] == pytest.approx(bought["device_hours"])
    lines = output(capsys, *PRICED, "--budget", text).splitlines()
    shown = next(line for line in lines if " buys " in line)
    assert shown.startswith(f"{text} buys {bought['steps']:,} steps")
    assert shown.endswith(bought["override"])


@pytest.mark.parametrize(
    "words",
    [
        ("train.tokens=1T",),
        ("scheduler.warmup_steps=2000",),
        ("train.steps=9000", "profile.steps=3000-3001"),
        ("scheduler=wsd", "scheduler.decay_steps=2000"),
    ],
)
def test_the_override_is_accepted_where_it_is_typed(capsys: Capsys, words: tuple[str, ...]) -> None:
    bought = plan(capsys, *H100, *words, "--budget", "10h")["budget"]
    again = plan(capsys, *H100, *words, *bought["override"].split())
    assert again["training"]["steps"] == bought["steps"] < 100


def test_a_length_is_not_needed(capsys: Capsys) -> None:
    words = ("model=llama-1b", "cluster=h100-sxm", "train.seq_len=2k", "--budget", "1d")
    document = plan(capsys, *words)
    assert document["training"]["steps"] == document["budget"]["steps"] > 1000


def test_less_than_a_step_is_refused_with_what_is_enough(capsys: Capsys) -> None:
    for text in ("0.01h", "0.00001d", ".02usd"):
        error = refusal(capsys, *PRICED, "--budget", text)
        assert "is not enough for one step" in error
        enough = error.strip().rpartition("--budget ")[2]
        assert plan(capsys, *PRICED, "--budget", enough)["budget"]["steps"] >= 1


def test_more_steps_than_a_training_may_have_are_refused(capsys: Capsys) -> None:
    assert "1,000,000,000,000 steps" in refusal(capsys, *PRICED, "--budget", "9" * 20 + "EUR")


@pytest.mark.parametrize("text", ["20k", "0d", "-3h", "1e400h", "EUR", "3 weeks", ""])
def test_other_texts_are_refused_with_ones_that_are_accepted(capsys: Capsys, text: str) -> None:
    error = refusal(capsys, *H100, f"--budget={text}")
    assert "--budget 20000EUR or --budget 2000h or --budget 14d" in error
    assert "budget" in plan(capsys, *H100, "--budget", "2000h")


def test_money_needs_a_price(capsys: Capsys) -> None:
    assert "cluster.price=2.5" in refusal(capsys, *H100, "--budget", "1000usd")
    assert plan(capsys, *PRICED, "--budget", "1000usd")["budget"]["amount"] == "1000usd"


def test_it_goes_with_no_other_mode(capsys: Capsys) -> None:
    assert "--budget is for one plan" in refusal(capsys, *H100, "--budget", "2000h", "--search")
    assert "--calibrate goes with" in refusal(capsys, *H100, "--budget", "2000h", "--calibrate")

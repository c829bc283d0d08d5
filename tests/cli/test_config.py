"""`nanoscale config`, run in this process."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import pytest
import yaml

from nanoscale.cli.main import run as nanoscale
from nanoscale.config.composing.compose import compose
from tests.cli import Capsys


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def output(capsys: Capsys, *words: str) -> str:
    assert nanoscale([*words]) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    return captured.out


def refusal(capsys: Capsys, *words: str) -> str:
    assert nanoscale([*words]) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and "Traceback" not in captured.err
    return captured.err


def test_show_prints_yaml_that_can_be_taken_up_again(capsys):
    words = [
        "recipe=llama-8b",
        "train.tokens=null",
        "train.steps=7",
        "scheduler.warmup_steps=0",
        "run.name='1e5'",
    ]
    text = output(capsys, "config", "show", *words)
    assert yaml.safe_load(text)["train"]["steps"] == 7
    assert "\x1b" not in text
    Path("mine.yaml").write_text(text)
    assert compose(["recipe=./mine.yaml"]).config == compose(words).config
    assert output(capsys, "config", "show", "--config", "mine.yaml") == text


def test_show_json(capsys):
    shown = json.loads(output(capsys, "config", "show", "recipe=debug", "--json"))
    assert shown == asdict(compose(["recipe=debug"]).config)


def test_show_takes_a_folder_of_the_users(capsys):
    Path("mine/zero").mkdir(parents=True)
    Path("mine/zero/stage3.yaml").write_text("stage: 1\n")
    words = ["config", "show", "zero=stage3", "--json"]
    assert json.loads(output(capsys, *words))["zero"]["stage"] == 3
    assert json.loads(output(capsys, *words, "--config-dir", "mine"))["zero"]["stage"] == 1


def test_explain_says_what_an_open_value_becomes(capsys):
    def explained(*words: str) -> dict:
        return json.loads(
            output(capsys, "config", "explain", "precision.compute", *words, "--json")
        )

    assert (
        explained("recipe=debug", "cluster=v100").items()
        >= {"value": "auto", "becomes": "fp16"}.items()
    )
    assert explained("recipe=debug", "cluster=v100", "precision=bf16")["becomes"] is None
    assert explained("parallel.tp=3")["becomes"] is None  # which breaks a law
    shown = output(capsys, "config", "explain", "precision.compute", "recipe=debug", "cluster=h200")
    assert "precision.compute = auto\n" in shown and "becomes  bf16\n" in shown
    assert "set by   default" in shown


def test_explain_says_who_set_a_value_and_what_that_overrode(capsys):
    text = output(capsys, "config", "explain", "train.steps", "recipe=debug", "train.steps=1e3")
    assert "train.steps = 1000 steps" in text
    assert "optimizer steps" in text and "an integer or null, at least 1" in text
    lines = text.splitlines()
    assert lines[3].split() == ["set", "by", "command", "line"]
    assert "20, nanoscale/recipes/debug.yaml:" in lines[4]
    assert "null, default" in lines[-1]


def test_explain_json(capsys):
    Path("mine.yaml").write_text("defaults: [override /zero: stage2]\n")
    words = ("config", "explain", "zero.stage", "recipe=./mine.yaml", "--json")
    explained = json.loads(output(capsys, *words))
    assert explained == {
        "key": "zero.stage",
        "value": 2,
        "becomes": None,
        "type": "one of 0, 1, 2, 3, auto",
        "unit": "",
        "bounds": "",
        "meaning": explained["meaning"],
        "default": 0,
        "set_by": "nanoscale/conf/zero/stage2.yaml:3",
        "overrode": [{"value": 0, "source": "default"}],
    }


def test_explain_a_section(capsys):
    explained = json.loads(output(capsys, "config", "explain", "model", "model=llama-8b", "--json"))
    keys = {each["key"] for each in explained}
    assert {"model.layers", "model.rope_scaling.factor"} <= keys
    assert "model.rope_scaling" not in keys  # its keys are shown instead
    assert "model.rope_scaling = null" in output(capsys, "config", "explain", "model")


def test_explain_what_is_not_there(capsys):
    assert "config explain train.steps" in refusal(capsys, "config", "explain", "train.stesp")
    assert "config explain model" in refusal(capsys, "config", "explain", "modle")
    assert "optimizer" in refusal(capsys, "config", "explain", "zzz")


def test_ls(capsys):
    groups = json.loads(output(capsys, "config", "ls", "--json"))
    stages = ["stage0", "stage1", "stage2", "stage2-offload", "stage3", "stage3-offload"]
    assert groups["zero"]["options"] == stages
    assert "llama-8b" in groups["recipe"]["options"]
    assert all(group["meaning"] for group in groups.values())
    assert "stage0, stage1" in output(capsys, "config", "ls")
    text = output(capsys, "config", "ls", "zero")
    assert "zero=stage3" in text and "zero.stage" in text
    assert "run.name" in output(capsys, "config", "ls", "run")
    assert "config ls zero" in refusal(capsys, "config", "ls", "zeor")


def test_an_error_says_what_where_and_what_instead(capsys):
    Path("mine.yaml").write_text("train:\n  stepz: 3\n")
    text = refusal(capsys, "config", "show", "recipe=./mine.yaml")
    assert "train.stepz=3: unknown key" in text
    assert "mine.yaml:2" in text
    assert "train.steps=3" in text


def test_several_errors_are_a_list(capsys):
    text = refusal(capsys, "config", "show", "model.layer=3", "recipe=lama-8b")
    assert "2 things are wrong" in text
    assert "model.layers=3" in text and "recipe=llama-8b" in text


def test_an_error_as_json(capsys):
    assert nanoscale(["config", "show", "model.layer=3", "--json"]) == 2
    captured = capsys.readouterr()
    error = json.loads(captured.out)["error"]
    assert error["kind"] == "config"
    assert "model.layer" in error["message"]
    assert error["violations"] == [
        {
            "key": "model.layer",
            "value": 3,
            "source": "command line",
            "message": "unknown key",
            "suggestions": ["model.layers=3"],
        }
    ]
    assert "model.layers=3" in captured.err


def test_a_value_that_json_cannot_hold(capsys):
    assert nanoscale(["config", "show", "optimizer.lr=nan", "--json"]) == 2
    error = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)["error"]
    assert error["violations"][0]["value"] == "nan"


# --- the command line itself ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "meant"),
    [
        (["trian"], "type instead: nanoscale train"),
        (["config", "shw"], "type instead: nanoscale config show"),
        (["config", "show", "--jsno"], "--json"),
        (["train", "--dry-rnu"], "--dry-run"),
        (["train", "--steps=3"], "train.steps=3"),
        (["train", "--train.steps", "3"], "train.steps=3"),
        (["train", "recipe=debug", "--lr", "1e-4"], "optimizer.lr=1e-4"),
        (["config", "show", "--global-batch", "8"], "train.global_batch=8"),
        (["resume"], "Missing argument"),
    ],
)
def test_a_mistyped_command_line(capsys, words, meant):
    assert meant in refusal(capsys, *words)


def test_a_mistyped_command_line_as_json(capsys):
    assert nanoscale(["config", "show", "--steps=3", "--json"]) == 2
    error = json.loads(capsys.readouterr().out)["error"]
    assert error["kind"] == "usage"
    assert error["violations"][0]["suggestions"] == ["train.steps=3", "profile.steps=3"]


def test_help_and_version(capsys):
    text = output(capsys, "--help")
    assert output(capsys) == text
    for verb in ("train", "resume", "runs", "checkpoints", "config", "recipes"):
        assert f"\n  {verb} " in text
        assert output(capsys, verb, "--help").startswith(f"Usage: nanoscale {verb} ")
    assert output(capsys, "--version").startswith("nanoscale 0.")


def test_a_verb_without_its_sub_command_shows_its_help(capsys):
    assert "explain" in refusal(capsys, "config")


def test_a_fault_of_ours_shows_where_and_exits_1(capsys, monkeypatch):
    def broken(*_, **__):
        raise ZeroDivisionError("never")

    monkeypatch.setattr("nanoscale.config.composing.compose.compose", broken)
    assert nanoscale(["config", "show"]) == 1
    text = capsys.readouterr().err
    assert "ZeroDivisionError: never" in text and "please report" in text

"""Advice of errors works when it is typed: every `type instead` is typed back through the same entry."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from nanoscale.cli.main import run
from nanoscale.common.errors import UserError
from nanoscale.config.composing.compose import compose
from tests.cli import Capsys
from tests.support.recipes import changed

RECIPES = {
    "group": "model: llama-1b\n",
    "group-typo": "model: llama-1bb\n",
    "group-number": "zero: 3\n",
    "key": "train:\n  stepz: 3\n",
    "section": "trian:\n  steps: 3\n",
    "dots": "train.steps: 3\n",
    "value": "parallel:\n  schedule: interleaved\n",
    "text": "optimizer:\n  lr: '1e-3'\n",
    "base": "defaults: [tinyy, _self_]\n",
    "override": "defaults: [override /modle: tiny]\n",
    "option": "defaults: [override /zero: stage9]\n",
    "reference": "train:\n  eval_samples: ${train.log_evry}\n",
    "trainer": "learning_rate: 1e-3\nper_device_train_batch_size: 2\n",
    "deepspeed": "zero_optimization:\n  stage: 2\n",
}
"""recipes/<name>.yaml: one mistake each."""

WORDS = [
    # keys and groups
    "model.layer=8",
    "trian.steps=8",
    "steps=8",
    "lr=1e-4",
    "+train.stepz=4",
    "modle=llama-8b",
    "zero=3",
    "precision=bf61",
    "cluster=h100",
    "model=[tiny]",
    "model/llama-8b=1",
    "zero@foo=stage1",
    "~trian.steps",
    "~zero=stage1",
    "resume=true",
    "model.zzz=1",
    "tiny",
    "zero",
    "steps",
    "recipe=lama-8b",
    "recipe=./recipes/rihgt.yaml",
    # values
    "train.steps=x",
    "train.log_every=0",
    "train.eval_every=1,2",
    "parallel.schedule=interleaved",
    "parallel.sequence_parallel=yes",
    "parallel.layers_per_stage=4,4",
    "profile.ranks=8",
    "optimizer.lr='1e-3'",
    "optimizer.beta1='-1'",
    "data.document_mask=null",
    "run.name=5",
    "launcher.pass_env=A",
    "launcher.include=h1@h2:0,2",
    "launcher.env={A: 1",
    "launcher.slurm.directives=[--x=1, --y]",
    "data.path=epoch=1.ckpt",
    "run.root=a(b",
    "data.valid_path=it's",
    "{x}=5",
    "override==5",
    "=5",
    # references
    "train.eval_samples=${train.log_evry}",
    "data.tokenizer=${data.cache_dir}",
    "data.cache_dir=${data.tokenizer}",
    "optimizer.eps=${optimizer.eps}",
]
NO_ADVICE = {
    "model.zzz": "it resembles nothing: the keys of the section are listed",
    "train.steps": "nobody can tell which number is meant",
    "optimizer.beta1": "nobody can tell which number is meant",
    "{x}=5": "it resembles nothing",
    "override": "it resembles nothing",
    "=5": "it resembles nothing",
    "data.tokenizer": "the remedy says it",
    "data.cache_dir": "the remedy says it",
    "optimizer.eps": "the remedy says it",
}
"""Keys of mistakes without anything to type instead, and why."""
LINES = [
    "train --hlep",
    "config show --jsn recipe=tiny",
    "train recipe=debug --num_gpus 1 --dry-run",
    "train recipe=debug --num-gpu 1 --dry-run",
    "plan --steps 3 recipe=debug cluster=h100-sxm",
    "plan --recipe debug cluster=h100-sxm",
    "plan recipe=debug cluster=h100-sxm --bf16",
    "plan recipe=debug cluster=h100-sxm --tensor-model-parallel-size=2",
    "plan recipe=debug cluster=h100-sxm --per_device_train_batch_size 1",
    "config explain train.stepz",
    "config explain learning_rate",
    "config ls optimiser",
    "recipes show tinyy",
    "checkpoints ls absentt",
    "train recipe=debug parallel.tp=3 --dry-run",
    "train recipe=debug parallel.dp=1 parallel.tp=8 launcher.devices=8 launcher.device=cpu --dry-run",
    "config show recipe=debug model.rope_scale=4",
    "config show recipe=debug model.rope_scale=yarn",
    "config show --deepspeed recipe=debug",
    "sweep recipe=debug optimizer.lr=1e-3,2e-3 --sampler griid --dry-run",
]


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name, text in RECIPES.items():
        path = Path(f"recipes/{name}.yaml")
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    Path("recipes/right.yaml").write_text("train:\n  steps: 3\n")
    absent = Path("runs/absent")
    absent.mkdir(parents=True)
    (absent / "config.yaml").write_text("")


def violations(arguments: list[str], capsys: Capsys) -> list[dict[str, Any]]:
    """Return the violations of a command line; none if it is accepted."""
    code = run([*arguments, "--json"] if "--json" not in arguments else arguments)
    out = capsys.readouterr().out
    if code == 0:
        return []
    found: list[dict[str, Any]] = json.loads(out)["error"]["violations"]
    return found or [{"key": "", "suggestions": [], "message": out}]


def type_back(arguments: list[str], wrong: dict[str, Any], advice: str) -> list[str]:
    """Return the command line with the advice in place of the mistake."""
    if advice.startswith("nanoscale "):
        return shlex.split(advice)[1:]
    key, typed = wrong["key"], shlex.split(advice)
    for position, word in enumerate(arguments):
        if word == key and word.startswith("--"):  # an option, and a value of its own
            valued = arguments[position + 1 : position + 2]
            used = bool(valued) and not valued[0].startswith("-") and "=" not in valued[0]
            return [*arguments[:position], *typed, *arguments[position + 1 + used :]]
        name = re.split(r"=", word.lstrip("+"), maxsplit=1)[0]
        if word == key or name in (key, key.split("=")[0]) or word == str(wrong["value"]):
            return [*arguments[:position], *typed, *arguments[position + 1 :]]
    return [*arguments, *typed]


def test_what_an_error_of_overrides_advises_is_accepted() -> None:
    with pytest.raises(UserError) as caught:
        compose(WORDS)
    wrong = caught.value.violations
    assert len(wrong) >= len(WORDS)
    assert {each.key for each in wrong if not each.suggestions} == set(NO_ADVICE)
    assert all(each.remedy for each in wrong if NO_ADVICE.get(each.key) == "the remedy says it")
    for each in wrong:
        for text in each.suggestions:
            if text.startswith("nanoscale "):
                assert run(shlex.split(text)[1:]) == 0, text
            elif text.startswith(("~", "recipe=")) or "${" in text:
                compose(shlex.split(text))
            else:
                changed(*shlex.split(text))  # raises a UserError or fails if it is refused


@pytest.mark.parametrize("line", LINES)
def test_what_an_error_of_a_command_advises_is_accepted(line: str, capsys: Capsys) -> None:
    arguments = shlex.split(line)
    wrong = violations(arguments, capsys)
    advice = [(each, text) for each in wrong for text in each["suggestions"]]
    assert advice, wrong
    for each, text in advice:
        again = violations(type_back(arguments, each, text), capsys)
        assert not again, text


def test_a_wrong_value_of_an_option_is_answered_in_our_words(capsys: Capsys) -> None:
    assert run(shlex.split("data prepare x.txt --out x --bad skipp")) == 2
    shown = capsys.readouterr().err
    assert shown.startswith("error: --bad skipp: is not one of refuse, skip\n")
    assert "type instead: --bad skip\n" in shown
    assert run(shlex.split("data inspect x --samples many")) == 2
    assert "'--samples': must be a valid integer\n" in capsys.readouterr().err
    assert run(shlex.split("train recipe=tiny --hostfile")) == 2
    assert capsys.readouterr().err == "error: Option '--hostfile' requires an argument\n"


@pytest.mark.parametrize("name", RECIPES)
def test_what_an_error_in_a_recipe_advises_is_accepted(name: str, capsys: Capsys) -> None:
    arguments, path = ["config", "show", f"recipe={name}"], Path(f"recipes/{name}.yaml")
    wrong = violations(arguments, capsys)
    assert wrong and all(each["suggestions"] for each in wrong)
    for each in wrong:
        for text in each["suggestions"]:
            path.write_text(_mended(RECIPES[name], each, text))
            again = violations(arguments, capsys)
            assert each["key"] not in [other["key"] for other in again], (text, again)
            assert len(again) < len(wrong), (text, again)


def _mended(text: str, wrong: dict[str, Any], advice: str) -> str:
    """Return the recipe with the advice in its line."""
    lines = text.splitlines()
    number = int(wrong["source"].rpartition(":")[2]) - 1
    if wrong["key"] == "defaults":
        return text.replace(_entry(wrong["value"]), advice)
    if advice.startswith("override /"):
        return f"defaults:\n  - {advice}\n" + "\n".join(lines[:number] + lines[number + 1 :])
    if ": " in advice and "=" not in advice:  # a mapping, or the name of a section
        name = advice.removesuffix(": …")
        lines[number] = advice if name == advice else f"{name}:"
        return "\n".join(lines)
    top = wrong["key"].partition(".")[0]
    kept = [line for line in lines if not line.startswith((f"{top}:", " "))]
    for word in shlex.split(advice):
        key, _, value = word.partition("=")
        section, _, name = key.partition(".")
        kept.append(f"{section}:\n  {name}: {value}")
    return "\n".join(kept)


def _entry(value: object) -> str:
    return str(value)


def test_the_choice_of_an_option_in_a_recipe_is_shown_as_it_is_written(capsys: Capsys) -> None:
    (wrong,) = violations(["config", "show", "recipe=group"], capsys)
    assert wrong["suggestions"] == ["override /model: llama-1b"]
    assert "defaults:" in wrong["remedy"]


def test_a_device_of_several_options_means_the_usual_one_first(capsys: Capsys) -> None:
    (wrong,) = violations(["config", "show", "cluster=h100"], capsys)
    assert wrong["suggestions"][0] == "cluster=h100-sxm"


@pytest.mark.parametrize(
    ("line", "shown"),
    [
        ("zero@foo=stage1", "zero@foo=stage1: moves"),
        ("=5", "=5: is not KEY=VALUE"),
        ("optimizer.lr='1e-3'", "optimizer.lr='1e-3': must"),
        ("parallel.dp=1e3x", "parallel.dp=1e3x: must"),
        ("optimizer.beta1=2e0", "optimizer.beta1=2e0: must"),
        ("train.eval_samples=1Gb", "train.eval_samples=1Gb: must"),
    ],
)
def test_a_value_is_shown_as_it_was_typed(line: str, shown: str, capsys: Capsys) -> None:
    assert run(["config", "show", line]) == 2
    assert f"error: {shown}" in capsys.readouterr().err


def test_an_unsupported_family_is_trained_with_its_own_code(tmp_path: Path, capsys: Capsys) -> None:
    folder = tmp_path / "neox"
    folder.mkdir()
    sizes = {"num_hidden_layers": 2, "hidden_size": 8, "num_attention_heads": 2, "vocab_size": 320}
    document = {"model_type": "gpt_neox", "architectures": ["GPTNeoXForCausalLM"], **sizes}
    (folder / "config.json").write_text(json.dumps(document))
    (wrong,) = violations(["config", "show", f"model.init_from={folder}"], capsys)
    assert wrong["suggestions"] == [f"model=hf model.name={folder}"]
    assert violations(["config", "show", *wrong["suggestions"][0].split()], capsys) == []


@pytest.mark.parametrize(
    ("typed", "advised"),
    [
        ("fine-tune", "nanoscale train recipe=finetune"),
        ("recipe=debug", "nanoscale train recipe=debug"),
        ("/nope", "nanoscale --help"),
        ("runs lst", "nanoscale runs ls"),
        ("runs ls --frobnicate", "nanoscale runs ls --help"),
        ("train -c x.yaml", "--config x.yaml"),
        ("train --config-path x", "--config-dir x"),
        ("train recipe=debug --cfg job", "nanoscale config show --help"),
        ("train recipe=debug --info", "nanoscale config show --help"),
        ("train recipe=debug -m train.seed=1,2", "nanoscale sweep --help"),
        ("train recipe=debug --verbose", "nanoscale runs logs --help"),
        ("train zero=stage4", "zero=stage3 or zero=stage2 or zero=stage1"),
        ("train recipe=debug zero.reshard_after_forward=true", "zero=stage3"),
        (
            "train recipe=debug optimizer=sgd optimizer.beta2=0.9",
            "optimizer=adamw or optimizer.beta2=0.95",
        ),
    ],
)
def test_words_of_other_programs_are_understood(typed: str, advised: str, capsys: Capsys) -> None:
    assert run(typed.split()) == 2
    assert capsys.readouterr().err.partition("type instead: ")[2].rstrip() == advised


@pytest.mark.parametrize(
    ("typed", "reported"),
    [
        ("train /nope", "remedy: a file is given as recipe=FILE"),
        ("generate first --compile", "it is a key of trainings: backend.compile"),
        ("plan --beams 4", "it is an option of `nanoscale generate`: --beams N"),
        ("train --config empty.yaml", "--config=empty.yaml: is empty"),
    ],
)
def test_what_has_no_override_is_explained(
    typed: str, reported: str, capsys: Capsys, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("empty.yaml").touch()
    assert run(typed.split()) == 2
    assert reported in capsys.readouterr().err


@pytest.mark.parametrize("option", ["--deepspeed", "--deepspeed_config"])
def test_the_file_of_deepspeed_is_translated(option, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("ds.json").write_text('{"train_batch_size": 8, "gradient_accumulation_steps": 2}')
    assert run(["train", "recipe=debug", option, "ds.json"]) == 2
    line = capsys.readouterr().err.partition("type instead: ")[2].strip()
    assert line == "nanoscale config from ds.json"
    assert run(shlex.split(line)[1:]) == 0
    assert "train.global_batch=8" in capsys.readouterr().err

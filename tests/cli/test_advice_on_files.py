"""Advice on runs, checkpoints, data and hosts works when it is typed, in place of the mistake."""

from __future__ import annotations

import json
import shlex
import shutil
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nanoscale.cli.main import run as nanoscale
from nanoscale.data.tokens.tokenizer import train_bpe
from nanoscale.runs import status
from nanoscale.runs.directory import RunDirectory
from tests.cli import Capsys
from tests.support.jobs import SHAPE, run_of_bytes
from tests.support.rows import exhaustive
from tests.support.token_files import write_indexed

DRY = "train recipe=debug --dry-run"
HOSTS = f"{DRY} train.global_batch=480 --hostfile"
DEEPSPEED = f"{DRY} backend=deepspeed"
PREPARE = "data prepare docs.jsonl --workers 1"
WRITE = "generate first --prompt a --max-tokens 1"
SUBMIT = "submit recipe=debug --num-gpus 1 --dry-run"
LONG = "n" * 200
LINES = {
    # generate and eval
    f"{WRITE} --temperature -1 --top-k 0 --top-p 2 --stop ''": "",
    f"{WRITE} --max-tokens 0": "",
    f"{WRITE} --device cuda:99": "",
    f"{WRITE} --step 9": "",
    "generate firts --prompt a --max-tokens 1": "",
    "generate typeless --prompt a --max-tokens 1": "--tokenizer byte",
    # checkpoints and runs
    "checkpoints inspect first --step 9": "",
    "checkpoints verify firts": "",
    "checkpoints ls plain": "",
    "runs show firts": "",
    # plan
    "plan recipe=debug cluster=h100-sxm --html plan.html": "",
    # data
    f"{PREPARE} --out out": "",
    f"{PREPARE} --out out --tokenizer byte --validation 1e-9": "",
    f"{DRY} data=megatron data.path=tokens.bin train.seq_len=64": "",
    f"{DRY} data=megatron data.path=tokens data.valid_path=tokens.bin train.seq_len=64": "",
    "data inspect tokens --tokenizer ./tokeniser": "--tokenizer tokenizer",
    f"{PREPARE} --out out --tokenizer './my tokeniser'": "--tokenizer 'my tokenizer'",
    "generate typeless --prompt a --max-tokens 1 --tokenizer ./tokeniser": "--tokenizer tokenizer",
    # hosts
    f"{HOSTS} hosst": "",
    f"{HOSTS} hosts --include node9": "",
    f"{HOSTS} hosts --include node1 --exclude node2": "",
    f"{HOSTS} hosts --num-nodes 9": "",
    f"{HOSTS} hosts --num-gpus 8": "",
    f"{HOSTS} hosts cluster.python=-": "cluster.python=null",
    f"{DRY} train.global_batch=480 cluster.python=/a": "cluster.python=null",
    f"{HOSTS} hosts 'launcher.ssh_args=[-p,22]'": "",
    f"{HOSTS} hosts launcher.ssh_args=-v": "",
    # settings handed on to DeepSpeed
    f"{DEEPSPEED} backend.extra.gradient_clipping=0.5": "~backend.extra optimizer.clip_norm=0.5",
    f"{DEEPSPEED} 'backend.extra={{zero_optimization: {{stage: 2}}, log_level: error}}'": (
        "~backend.extra zero.stage=2 'backend.extra={log_level: error}'"
    ),
    f"{DEEPSPEED} backend.extra.gradient_cliping=0.5": "optimizer.clip_norm=0.5",
    f"{DEEPSPEED} backend.extra.log_leve=error": "backend.extra.log_level=error",
    # runs that exist already, and other runs
    f"{DRY} run.name=plain": "run.name=plain-2",
    f"{DRY} run.name={LONG}": f"run.name={LONG[:198]}-2",
    f"{DRY} run.name=first": "",
    "resume first model.layers=3 model.rope_theta=5e5 --dry-run": "",
    "resume first model=gpt2 --dry-run": "",
    "resume first run.name=second --dry-run": "",
    # submit
    "submit recipe=debug --num-gpus 1 --dry-run launcher=ssh": "",
    "submit recipe=debug --num-gpus 1 --dry-run launcher.nodes=1,2": "",
    "submit recipe=debug --num-gpus 1 --dry-run run.name=first": "",
    "submit recipe=debug --dry-run launcher.device=cuda": "",
    f"{SUBMIT} train.steps=4,4,5": "train.steps=4,5",
    f"{SUBMIT} 'train.steps=range(1,3)'": "train.steps=A,B,C",
    "submit recipe=debug --num-gpus 2 --dry-run parallel.pp=2 parallel.layers_per_stage=4,4": (
        "'parallel.layers_per_stage=[4,4]'"
    ),
    f"{SUBMIT} run.name=a,b": "'run.name=\"a,b\"'",
    f"{SUBMIT} launcher.slurm.partition=a,b": "",
    f"{SUBMIT} launcher.slurm.time=1:00:00,2:00:00": "",
    f"{SUBMIT} launcher.pass_env=A,B": "'launcher.pass_env=[A,B]'",
    f"{SUBMIT} 'run.root=a\\b'": "run.root=/…",
}
"""A mistake each, and the only thing that may be advised, if it matters."""
PLACEHOLDERS = {
    "PATH/tokenizer.json": "tokenizer.json",
    "TEXT": "x",
    "=A,B,C": "=4,5",
    "=/…": "=/shared/runs",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    here = tmp_path_factory.mktemp("here")
    runs = here / "runs"
    for name in ("", "plain", LONG):
        (runs / name).mkdir()
    run = run_of_bytes(runs, name="first")
    ended = status.Status("prepared", 0, 100.0).starting(1).ending("stopped", 130)
    status.write(run, ended)
    config = run_of_bytes(runs, name="typeless").config
    config.write_text(config.read_text().replace("source: stdlib", "source: megatron"))
    run_of_bytes(runs, SHAPE, name="small")
    documents = [{"text": f"def f{number}(): pass"} for number in range(30)]
    (here / "docs.jsonl").write_text("".join(json.dumps(one) + "\n" for one in documents))
    for name in ("tokenizer", "my tokenizer"):
        (here / name).mkdir()
        train_bpe(["a b c"], 257, here / name / "tokenizer.json")
    (here / "hosts").write_text("node1 slots=8\nnode2 slots=8\nnode3 slots=4\n")
    write_indexed(here / "tokens", [np.arange(20000) % 250])
    return here


@pytest.fixture
def _here(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    (folder / "plan.html").write_text("somebody's")
    shutil.rmtree(folder / "out", ignore_errors=True)


def violations(arguments: list[str], capsys: Capsys) -> list[dict[str, Any]]:
    """Return the violations of a command line; none if it is accepted, or only too large for this machine."""
    code = nanoscale([*arguments, "--json"])
    out = capsys.readouterr().out
    if code == 0:
        return []
    error = json.loads(out)["error"]
    if code == 3:
        return []
    found: list[dict[str, Any]] = error["violations"]
    return found or [{"key": "", "value": None, "suggestions": [], "message": error["message"]}]


def typed_back(arguments: list[str], wrong: dict[str, Any], advice: str) -> list[str]:
    """Return the command line with the advice in place of the mistake."""
    for placeholder, value in PLACEHOLDERS.items():
        advice = advice.replace(placeholder, value)
    typed = shlex.split(advice)
    if typed[0] == "nanoscale":
        return [*typed[1:], *(["--dry-run"] if "--dry-run" in arguments else [])]
    kept = list(_without(arguments, _names(wrong, typed[0])))
    if len(typed) == 1 and wrong["key"] == "RUN":  # the name of a run stands in its place
        return [typed[0] if word == wrong["value"] else word for word in arguments]
    return [*kept, *typed]


def _names(wrong: dict[str, Any], advice: str) -> set[str]:
    """Options and keys that the advice replaces."""
    key = advice.partition("=")[0]
    short = key.rpartition(".")[2].replace("devices", "num-gpus").replace("nodes", "num-nodes")
    option = wrong["key"] if wrong["key"].startswith("--") and key != "--overwrite" else ""
    typed = wrong["key"] if "." in wrong["key"] else ""
    return {key, f"--{short}", option, typed} - {"", "--overwrite"}


def _without(arguments: list[str], names: set[str]) -> Iterator[str]:
    words = iter(arguments)
    for word in words:
        if word in names and word.startswith("--"):
            next(words)  # its value
        elif word.partition("=")[0] not in names:
            yield word


def marked(line: str) -> Any:
    """DeepSpeed itself judges its settings, in a process that takes seconds to load it."""
    return exhaustive(line) if f"{DEEPSPEED} " in line else pytest.param(line)


@pytest.mark.usefixtures("_here")
@pytest.mark.parametrize("line", [marked(line) for line in LINES])
def test_what_an_error_advises_is_accepted(line: str, capsys: Capsys) -> None:
    arguments = shlex.split(line)
    if DEEPSPEED in line and find_spec("deepspeed") is None:
        pytest.skip("deepspeed is not installed")
    wrong = violations(arguments, capsys)
    advice = [(each, text) for each in wrong for text in each["suggestions"]]
    assert advice, wrong
    only = LINES[line]
    assert not only or only in [text for _, text in advice]
    others = {each["key"] for each in wrong}
    for each, text in advice:
        if "PATH/" in text:
            continue  # the file does not exist
        shutil.rmtree("out", ignore_errors=True)
        after = violations(typed_back(arguments, each, text), capsys)
        left = {one["key"] for one in after}
        assert each["key"] not in left and left <= others, (text, after)


@pytest.mark.usefixtures("_here")
def test_bytes_are_not_advised_to_a_model_without_room_for_them(capsys: Capsys) -> None:
    config = RunDirectory(Path("runs/small")).config
    text = config.read_text()
    config.write_text(text.replace("source: stdlib", "source: megatron"))
    (wrong,) = violations(shlex.split("generate small --prompt a --max-tokens 1"), capsys)
    config.write_text(text)
    assert wrong["suggestions"] == ["--tokenizer PATH/tokenizer.json"]

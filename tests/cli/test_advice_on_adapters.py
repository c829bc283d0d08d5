"""Advice on a run with `lora` whose base model has moved: each command and override is typed back."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest
import torch

from nanoscale.checkpoint import sharded
from nanoscale.checkpoint.hf.load import fingerprint
from nanoscale.checkpoint.hf.names import shapes
from nanoscale.cli.common.request import CommandLine
from nanoscale.cli.main import run as nanoscale
from nanoscale.cli.measure.eval import _of_run
from nanoscale.common.devices import Devices
from nanoscale.common.errors import UserError
from nanoscale.config import model_math
from nanoscale.config.composing.compose import compose
from nanoscale.config.rules import check
from nanoscale.runs import fence, status
from nanoscale.runs.directory import RunDirectory
from tests.cli import Capsys
from tests.support import hf_families
from tests.support.hf_families import COMMON, FAMILIES
from tests.support.jobs import make_run

EXPORT = ["checkpoints", "export", "run", "--format", "hf"]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunDirectory:
    """A run with a checkpoint of adapters; the folder `base` of its frozen weights is now `moved here`."""
    monkeypatch.chdir(tmp_path)
    settings = COMMON | {"vocab_size": 257, "max_position_embeddings": 64}
    monkeypatch.setitem(FAMILIES, "llama", ("Llama", settings))
    base = tmp_path / "base"
    hf_families.save("llama", base)
    words = ["recipe=debug", "launcher.device=cpu", "model.init_from=base", "lora.rank=2"]
    config = check(compose([*words, "train.seq_len=32", "run.name=run"]), Devices("cpu", 1))
    shape = config.model
    made = make_run(config)
    status.write(made, status.Status("prepared", 0, 100.0).starting(1).ending("stopped", 130))
    sizes, state = shapes(shape), {}
    for block in range(shape.layers):
        for module in model_math.adapted_layers(shape, config.lora).values():
            name = f"layers.{block}.{module}"
            outputs, inputs = sizes[f"{name}.weight"]
            state[f"model.{name}.adapter.a"] = torch.zeros(2, inputs)
            state[f"model.{name}.adapter.b"] = torch.zeros(outputs, 2)
    about = {"step": 1, "consumed_samples": 0, "tokens": 0, "world_size": 1, "time": 1.0}
    fence.begin(made, 1)
    sharded.save(made.workspace(1), state, about | {"base": fingerprint(base, shape)})
    base.rename("moved here")
    return made


def advised(capsys: Capsys, *words: str) -> list[str]:
    capsys.readouterr()
    assert nanoscale([*words, "--json"]) == 2
    found = json.loads(capsys.readouterr().out)["error"]["violations"]
    assert [each["key"] for each in found] == ["model.init_from"], found
    (text,) = found[0]["suggestions"]
    return shlex.split(
        text.replace("/where/it/is/now", "'moved here'").replace("DIR", "'moved here'")
    )


@pytest.mark.slow
@pytest.mark.usefixtures("run")
def test_the_base_is_named_where_it_is_now(capsys: Capsys) -> None:
    resume = ["resume", "run", "--dry-run"]
    assert nanoscale([*resume, *advised(capsys, *resume)]) == 0

    with pytest.raises(UserError) as caught:
        _of_run("run", CommandLine(), None)
    (word,) = caught.value.violations[0].suggestions
    config, *_ = _of_run("run", CommandLine([word.replace("/where/it/is/now", "moved here")]), None)
    assert config.model.init_from == str(Path("moved here").absolute())

    assert nanoscale([*EXPORT, "--out", "whole", *advised(capsys, *EXPORT)]) == 0
    command = advised(capsys, "generate", "run", "--prompt", "a", "--max-tokens", "1")
    assert command[:2] == ["nanoscale", "checkpoints"]
    typed = ["run" if word == "RUN" else word for word in command[1:]]
    assert nanoscale(typed) == 0
    write = ["--prompt", "a", "--max-tokens", "1", "--tokenizer", "byte"]
    assert nanoscale(["generate", "runs/run/hf/step-00000001", *write]) == 0

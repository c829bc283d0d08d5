"""The frozen configuration: complete, strict, and the same run when it is taken up again."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import pytest

from nanoscale.common.errors import UserError
from nanoscale.config.composing import frozen
from nanoscale.config.composing.compose import compose
from nanoscale.config.resolved import resolved
from nanoscale.config.rules import Devices, check
from nanoscale.config.schema import Config

CPU = Devices("cpu", 2)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "config.yaml"


def freeze(file: Path, *words: str, devices: Devices = CPU) -> Config:
    composed = compose(words)
    config = check(composed, devices)
    file.write_text(frozen.dump(config, composed.config))
    return config


@pytest.mark.parametrize("recipe", ["debug", "llama-8b", "gpt2-xl"])
def test_it_is_read_as_it_was_written(file, recipe):
    config = freeze(file, f"recipe={recipe}", "run.name='1e5'", "train.sample_prompt='on: #x\\n'")
    assert frozen.load(file) == config


def test_it_repeats_the_run_on_any_machine(file):
    config = freeze(file, "recipe=gpt2", devices=Devices("cuda", 4, ("H100",) * 4))
    again = compose([], config_file=file)
    assert resolved(again.config) == config
    assert check(again, Devices("cuda", 8, ("H100",) * 8)) == config
    assert resolved(compose([f"recipe={file}"]).config) == config


def test_it_is_written_in_the_schemas_order_and_by_nothing_else(file):
    config = freeze(file, "recipe=debug")
    assert frozen.dump(config) == frozen.dump(frozen.load(file))
    sections = [
        line[:-1]
        for line in frozen.dump(config).splitlines()
        if line[-1:] == ":" and line[0] != " "
    ]
    assert sections == list(asdict(config))


def test_unknown_keys_and_bad_values_are_refused_with_their_lines(file):
    freeze(file, "recipe=debug", "zero=stage2")
    text = file.read_text().replace("\ntrain:\n", "\ntrain:\n  stepz: 4\n")
    file.write_text(text.replace("  stage: 2\n", "  stage: 9\n"))
    with pytest.raises(UserError) as caught:
        frozen.load(file)
    lines = file.read_text().splitlines()
    places = {"train.stepz": "  stepz: 4", "zero.stage": "  stage: 9"}
    found = {(each.key, each.source) for each in caught.value.violations}
    assert found == {(key, f"{file}:{lines.index(line) + 1}") for key, line in places.items()}


def test_no_hydra_and_nothing_heavy_is_needed_to_read_it(file):
    freeze(file, "recipe=debug")
    code = (
        "import sys; from pathlib import Path; from nanoscale.config.composing import frozen;"
        f"frozen.load(Path({str(file)!r}));"
        "print(*{'hydra', 'omegaconf', 'torch', 'numpy', 'rich', 'typer'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""


# --- taken up with another layout -----------------------------------------------------------------


def test_what_was_open_follows_the_change(file):
    config = freeze(file, "recipe=debug", "parallel.dp=4")
    assert (config.launcher.devices, config.train.micro_batch) == (4, 2)
    resumed = check(compose(["parallel.dp=2"], config_file=file), CPU)
    assert (resumed.launcher.devices, resumed.train.micro_batch) == (2, 4)
    assert check(compose(["train.global_batch=16"], config_file=file), CPU).train.micro_batch == 4
    assert check(compose(["launcher.devices=4"], config_file=file), CPU) == config


def test_what_was_asked_for_stays(file):
    freeze(file, "recipe=debug", "parallel.dp=4", "launcher.devices=4", "train.micro_batch=1")
    with pytest.raises(UserError) as caught:
        check(compose(["parallel.dp=2"], config_file=file), CPU)
    assert [each.key for each in caught.value.violations] == ["parallel.dp"]
    assert "launcher.devices=2" in caught.value.violations[0].suggestions


def test_steps_follow_the_tokens_they_came_from(file):
    assert freeze(file, "recipe=debug", "train.tokens=10240", "~train.steps").train.steps == 20
    longer = check(compose(["train.tokens=20480"], config_file=file), CPU)
    assert longer.train.steps == 40
    assert check(compose(["train.global_batch=16"], config_file=file), CPU).train.steps == 10
    by_steps = check(compose(["train.steps=50"], config_file=file), CPU)
    assert (by_steps.train.steps, by_steps.train.tokens) == (50, None)


def test_another_model_brings_its_own_heads(file):
    freeze(file, "recipe=debug", "model.kv_heads=null")
    assert check(compose(["model.heads=4"], config_file=file), CPU).model.kv_heads == 4


def test_lists_are_read_as_they_were_written(file):
    words = ["recipe=debug", "parallel=interleaved", "parallel.layers_per_stage=[1,2,2,3]"]
    config = freeze(file, *words)
    assert config.parallel.layers_per_stage == [1, 2, 2, 3]
    assert frozen.load(file) == config
    assert resolved(compose([], config_file=file).config) == config
    text = file.read_text()
    written = "layers_per_stage:\n  - 1\n  - 2\n  - 2\n  - 3"
    assert written in text
    file.write_text(text.replace(written, "layers_per_stage: [1, -1]"))
    with pytest.raises(UserError) as caught:
        frozen.load(file)
    (wrong,) = caught.value.violations
    line = file.read_text().splitlines().index("  layers_per_stage: [1, -1]") + 1
    assert (wrong.key, wrong.source) == ("parallel.layers_per_stage", f"{file}:{line}")


@pytest.mark.slow
def test_a_pipeline_is_taken_up_in_every_other_layout(file):
    frozen_ones = ["parallel=interleaved", "parallel=4d", "parallel=dp", "parallel=ulysses"]
    others = [
        ["parallel=dp"],
        ["parallel=tp"],
        ["parallel=cp"],
        ["parallel=4d"],
        ["parallel.pp=2", "parallel.schedule=zbv"],
        ["parallel.pp=2", "parallel.schedule=gpipe", "parallel.dp=1"],
    ]
    for layout in frozen_ones:
        freeze(file, "recipe=debug", layout)
        for words in others:
            resumed = check(compose(words, config_file=file), CPU).parallel
            one_stage = resumed.schedule in ("1f1b", "gpipe")
            assert resumed.virtual_stages == (1 if one_stage else 2), (layout, words)


def test_what_was_compiled_on_a_gpu_is_not_on_a_cpu(file):
    gpus = Devices("cuda", 4, ("H100",) * 4)
    assert (
        freeze(file, "recipe=debug", "backend.compile=auto", devices=gpus).backend.compile == "on"
    )
    again = check(compose(["launcher.device=cpu"], config_file=file), gpus)
    assert again.backend.compile == "off"


def test_unrelated_changes_reopen_nothing(file):
    freeze(file, "recipe=debug", devices=Devices("cuda", 4, ("H100",) * 4))
    resumed = check(
        compose(["train.steps=30"], config_file=file), Devices("cuda", 8, ("H100",) * 8)
    )
    assert resumed.parallel.dp == 4

"""The laws across keys: each refuses, and what it suggests is accepted."""

from __future__ import annotations

import shlex
from dataclasses import asdict, replace
from functools import cache
from pathlib import Path

import pytest

from nanoscale.config.compose import Composed, Setting, compose
from nanoscale.config.convert import to_config
from nanoscale.config.derive import derive
from nanoscale.config.library import Library
from nanoscale.config.rules import Devices, check
from nanoscale.config.schema import Config
from nanoscale.config.words import read_words
from nanoscale.errors import UserError, Violation

CPU = Devices("cpu", 2)


def gpus(count: int) -> Devices:
    return Devices("cuda", count, ("NVIDIA H100",) * count)


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@cache
def debug_recipe() -> Composed:
    return compose(["recipe=debug"])


def changed(*words: str) -> Composed:
    """What `compose(["recipe=debug", *words])` gives, without asking Hydra hundreds of times."""
    library, base = Library(), debug_recipe()
    asked = read_words(words, library)
    assert not asked.violations
    raw, history = asdict(base.config), dict(base.history)
    for group, option in asked.choices.items():
        raw[group] = {**raw[group], **library.serve(f"{group}/{option}").content}
    for key, value in asked.settings:
        *sections, name = key.split(".")
        values = raw
        for section in sections:
            values[section] = values[section] or {}
            values = values[section]
        values[name] = value
        history[key] = [Setting(value, "command line")]
    config = to_config(raw, lambda key: history[key][-1].source)
    return Composed(config, history, "debug", tuple(words))


def checked(*words: str, on: Devices = CPU) -> Config:
    return check(changed(*words), on)


@pytest.mark.parametrize(
    "words",
    [["scheduler=wsd", "zero=stage3", "train.seed=7"], ["model.rope_scaling.factor=2"], ["~run"]],
)
def test_the_short_cut_of_these_tests_leads_to_the_same_place(words):
    assert changed(*words).config == compose(["recipe=debug", *words]).config


def violations(*words: str, on: Devices = CPU, kind: str | None = None) -> list[Violation]:
    with pytest.raises(UserError) as caught:
        checked(*words, on=on)
    assert kind is None or caught.value.kind == kind
    return caught.value.violations


LAWS = [
    # words, where, the key that is named
    (["parallel.dp=3"], CPU, "train.global_batch"),
    (["train.global_batch=6", "parallel.dp=4"], CPU, "train.global_batch"),
    (["parallel.dp=2", "train.micro_batch=3"], CPU, "train.global_batch"),
    (["parallel.dp=4", "launcher.devices=2"], CPU, "parallel.dp"),
    (["parallel.dp=2", "launcher.devices=4"], CPU, "parallel.dp"),
    (["parallel.dp=8"], gpus(4), "parallel.dp"),
    (["launcher.devices=8"], gpus(4), "launcher.devices"),
    (["launcher.device=cuda"], CPU, "launcher.device"),
    (["parallel.tp=2"], CPU, "parallel.tp"),
    (["parallel.pp=2"], CPU, "parallel.pp"),
    (["parallel.cp=2"], gpus(4), "parallel.cp"),
    (["parallel.tp=2", "parallel.dp=4"], CPU, "parallel.tp"),
    (["parallel.dp=4", "parallel.dp_replicate=3", "zero=stage3"], CPU, "parallel.dp_replicate"),
    (["parallel.dp=4", "parallel.dp_replicate=2"], CPU, "parallel.dp_replicate"),
    (["model.kv_heads=3"], CPU, "model.kv_heads"),
    (["model.heads=7", "model.kv_heads=null", "model.head_dim=null"], CPU, "model.heads"),
    (["model.head_dim=7"], CPU, "model.head_dim"),
    (["train.seq_len=1k"], CPU, "train.seq_len"),
    (["model.rope_scaling.high_freq_factor=1"], CPU, "model.rope_scaling.high_freq_factor"),
    (["model.position=learned", "model.rope_scaling.factor=2"], CPU, "model.position"),
    (["train.steps=null"], CPU, "train.steps"),
    (["train.tokens=1M", "train.steps=3"], CPU, "train.tokens"),
    (["scheduler.warmup_steps=21"], CPU, "scheduler.warmup_steps"),
    (["scheduler=wsd", "scheduler.decay_steps=21"], CPU, "scheduler.decay_steps"),
    (["scheduler.decay_steps=5"], CPU, "scheduler.decay_steps"),
    (["precision.params=fp64"], CPU, "precision.compute"),
    (["precision.compute=fp64"], CPU, "precision.compute"),
    (["precision=fp64", "precision.reduce=fp32"], CPU, "precision.reduce"),
    (["precision.reduce=fp64"], CPU, "precision.reduce"),
    (["precision.reduce=bf16"], CPU, "precision.reduce"),
    (["precision=bf16", "precision.reduce=bf16", "zero.stage=0"], CPU, "precision.reduce"),
    (["optimizer=sgd", "optimizer.beta2=0.9"], CPU, "optimizer.beta2"),
    (["optimizer.momentum=0.5"], CPU, "optimizer.momentum"),
    (["optimizer.beta1=1"], CPU, "optimizer.beta1"),
    (["train.eval_every=5", "data.valid_fraction=0"], CPU, "train.eval_every"),
    (["cluster.peak_tflops=0"], CPU, "cluster.peak_tflops"),
    (["data.path=corpus"], CPU, "data.path"),
    (["data.tokenizer=bite"], CPU, "data.tokenizer"),
    (["model.vocab=256"], CPU, "model.vocab"),
    (["data=stdlib-bpe"], CPU, "data.bpe_vocab"),
    (["checkpoint.keep_every=5"], CPU, "checkpoint.keep_every"),
    (["checkpoint.every=3", "checkpoint.keep_every=5"], CPU, "checkpoint.keep_every"),
    (["run.name=a/b"], CPU, "run.name"),
    (["run.name=-a"], CPU, "run.name"),
    (["run.name=.a"], CPU, "run.name"),
    (["run.name=" + "a" * 201], CPU, "run.name"),
    (["run.root=''"], CPU, "run.root"),
]  # fmt: skip


@pytest.mark.parametrize(("words", "on", "key"), LAWS, ids=lambda value: str(value)[:60])
def test_a_law_names_what_breaks_it_and_suggests_what_keeps_it(words, on, key):
    (violation,) = violations(*words, on=on)
    assert violation.key == key
    set_here = any(word.startswith(f"{key}=") for word in words)
    assert violation.source == "command line" or not set_here
    assert violation.message
    assert violation.suggestions
    for suggestion in violation.suggestions:
        if suggestion not in ("recipe=tiny", "data=megatron"):  # these bring laws of their own
            checked(*words, *shlex.split(suggestion), on=on)


def test_all_violations_come_at_once():
    found = violations(
        "model.kv_heads=3", "train.seq_len=1k", "parallel.dp=3", "parallel.tp=2", "run.name=a/b",
        "precision.compute=fp64", "data=megatron", "scheduler.warmup_steps=30", kind="config",
    )  # fmt: skip
    assert [each.key for each in found] == [
        "model.kv_heads", "train.seq_len", "parallel.tp", "train.global_batch",
        "scheduler.warmup_steps", "precision.compute", "data.path", "run.name",
    ]  # fmt: skip


def test_three_way_tensor_parallelism_on_two_devices():
    found = violations("parallel.tp=3", "launcher.devices=2", kind="layout")
    assert {each.key for each in found} == {"parallel.tp"}
    assert "launcher.devices = 2" in found[0].message
    assert "native backend" in found[1].message
    assert found[0].suggestions == found[1].suggestions == ("parallel.tp=1",)


def test_missing_data_is_named(tmp_path):
    (missing,) = violations("data=megatron", kind="data")
    assert missing.key == "data.path"
    (missing,) = violations("data=megatron", "data.path=corpus", kind="data")
    assert "corpus.bin" in missing.message and "corpus.idx" in missing.message
    Path("corpus.bin").touch()
    (missing,) = violations("data=megatron", "data.path=corpus", kind="data")
    assert "corpus.bin" not in missing.message and "corpus.idx" in missing.message
    Path("corpus.idx").touch()
    assert checked("data=megatron", "data.path=corpus").data.path == str(tmp_path / "corpus")
    (ending,) = violations("data=megatron", "data.path=corpus.bin", kind="data")
    assert ending.suggestions == ("data.path=corpus",)


def test_the_length_on_the_command_line_wins_over_the_recipes():
    recipe = compose(["recipe=gpt2", "train.steps=10", "scheduler.warmup_steps=1"])
    assert (recipe.config.train.tokens, recipe.config.train.steps) == (300_000_000_000, 10)
    resolved = check(recipe, CPU)
    assert (resolved.train.tokens, resolved.train.steps) == (None, 10)
    assert checked("train.tokens=1025").train.steps == 3  # 8 samples of 64 tokens, rounded up


def test_tokens_and_steps_that_say_the_same_are_fine():
    assert checked("train.tokens=1024", "train.steps=2").train.tokens == 1024


# --- what was left open ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "on", "dp", "devices"),
    [
        ([], CPU, 1, 1),
        (["parallel.dp=4"], CPU, 4, 4),
        (["launcher.devices=4"], CPU, 4, 4),
        (["parallel=hsdp", "zero=stage3"], CPU, 2, 2),
        ([], gpus(4), 4, 4),
        (["parallel.dp=2"], gpus(4), 2, 2),
        (["launcher.devices=2"], gpus(4), 2, 2),
        (["launcher.device=cpu"], gpus(4), 1, 1),
        (["parallel.dp=8", "launcher.device=cpu"], gpus(4), 8, 8),
    ],
)
def test_degrees_and_devices(words, on, dp, devices):
    config = checked(*words, on=replace(on, cores=16))
    assert (config.parallel.dp, config.launcher.devices) == (dp, devices)
    assert config.launcher.threads == 16 // devices
    assert derive(config).world_size == devices


def test_the_batch():
    derived = derive(checked("parallel.dp=2", "train.global_batch=24"))
    assert (derived.micro_batch, derived.accumulation) == (12, 1)
    derived = derive(checked("parallel.dp=2", "train.global_batch=24", "train.micro_batch=3"))
    assert (derived.micro_batch, derived.accumulation) == (3, 4)
    assert derived.tokens_per_step == 24 * 64


def test_everything_open_is_resolved():
    config = checked("model.kv_heads=null", "model.head_dim=null", "scheduler=wsd")
    assert (config.model.kv_heads, config.model.head_dim) == (8, 8)
    assert (config.scheduler.decay_steps, config.train.micro_batch) == (2, 8)
    assert config.launcher.device == "cpu"
    assert checked("scheduler=cosine").scheduler.decay_steps is None
    assert checked("scheduler=wsd", "scheduler.warmup_steps=20").scheduler.decay_steps == 0


def test_paths_no_longer_depend_on_where_the_command_was_typed(tmp_path):
    Path("tokenizer.json").touch()
    config = checked("data.tokenizer=tokenizer.json", "data.cache_dir=cache")
    assert config.data.tokenizer == str(tmp_path / "tokenizer.json")
    assert config.data.cache_dir == str(tmp_path / "cache")


def test_tensorboard_is_asked_for_where_it_is_not_installed(monkeypatch):
    monkeypatch.setattr("nanoscale.config.rules.find_spec", lambda _: None)
    (missing,) = violations("logger.tensorboard=on")
    assert "pip install 'nanoscale[tensorboard]'" in missing.message
    assert checked("logger.tensorboard=auto").logger.tensorboard == "auto"

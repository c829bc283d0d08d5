"""Names of other trainers are answered with ours, and the answers are accepted."""

from __future__ import annotations

import shlex

import pytest

from nanoscale.cli.main import run
from nanoscale.config import reference
from nanoscale.config.composing.library import Library
from nanoscale.config.values.convert import fits, unknown_key
from nanoscale.config.values.equivalents import Equivalent, equivalent, equivalents
from tests.support.recipes import changed


@pytest.mark.parametrize(
    ("typed", "value", "answers"),
    [
        ("train.batch_size", 8, ("train.global_batch=8", "train.micro_batch=8")),
        ("per_device_train_batch_size", 4, ("train.micro_batch=4",)),
        ("training.local_batch_size", 4, ("train.micro_batch=4",)),
        ("micro-batch-size", 4, ("train.micro_batch=4",)),
        ("gradient_accumulation_steps", 4, ("nanoscale config explain train.global_batch",)),
        ("learning_rate", 0.001, ("optimizer.lr=0.001",)),
        ("optimizer.params.lr", 0.001, ("optimizer.lr=0.001",)),
        ("bf16", True, ("precision=bf16",)),
        ("trainer.fp16", False, ("precision=fp32",)),
        ("tensor_parallel_size", 8, ("parallel.tp=8",)),
        ("parallelism.tensor_parallel_degree", 8, ("parallel.tp=8",)),
        ("tensor_parallel_size", "auto", ("parallel.tp=auto",)),
        ("fsdp", "full_shard auto_wrap", ("zero=stage3",)),
        ("zero_optimization", {"stage": 2, "reduce_bucket_size": 1000},
         ("zero.stage=2 backend.reduce_bucket=1000",)),
        ("bf16", {"enabled": True}, ("precision=bf16",)),
        ("deepspeed", "ds_config.json", ("backend=deepspeed",)),
        ("use_lora", True, ("lora.rank=16",)),
        ("flash_attention", True, ("backend.attention=flash",)),
        ("attn_implementation", "sdpa", ("backend.attention=auto",)),
        ("load_in_4bit", True, ("lora.base=nf4 lora.rank=16",)),
        ("resume_from_checkpoint", True, ("nanoscale resume --help",)),
    ],
)  # fmt: skip
def test_a_term_of_another_trainer_is_answered(
    typed: str, value: object, answers: tuple[str, ...]
) -> None:
    assert unknown_key(typed, value, "command line").suggestions == answers


@pytest.mark.parametrize(
    ("typed", "answer"),
    [
        ("train --config_file debug", "recipe=debug"),
        ("train config_name=debug", "recipe=debug"),
        ("train -cn debug", "recipe=debug"),
        ("train --save x", "run.root=x"),
        ("train --load x", "nanoscale resume --help"),
        ("train --temp 0", "nanoscale config explain train.distill_temperature"),
        ("generate x --temp 0", "--temperature 0"),
        ("generate x --num-beams 3", "--beams 3"),
        ("train main_process_port=1", "launcher.master_port=1"),
        ("train report_to=wandb", "logger=wandb"),
        ("train log_level=debug", ""),
        ("train --cfg job", "nanoscale config show --help"),
        ("train --multirun", "nanoscale sweep --help"),
        ("train recipe=debug train.steps = 5", "train.steps=5"),
        ("train recipe debug", "recipe=debug"),
        ("config show optimizer", "nanoscale config explain optimizer"),
        ("train --model x", "model.init_from=x"),
        ("train model=meta-llama/Llama-3.1-8B", "model.init_from=meta-llama/Llama-3.1-8B"),
        ("train recipe=sft", "recipe=chat"),
        ("train zero=fsdp", "zero=stage3"),
        ("train launcher=k8s", "launcher=kubernetes"),
        ("train lora.r=8", "lora.rank=8"),
        ("train data.workers=3", ""),
        ("train load_best_model_at_end=true", "checkpoint.keep_best=1"),
        ("train val_set_size=0.1", "data.valid_fraction=0.1"),
        ("version", "nanoscale --version"),
        ("help lora", "nanoscale config explain lora"),
    ],
)
def test_what_people_type_first_is_answered(
    typed: str, answer: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(shlex.split(typed)) == 2
    error = capsys.readouterr().err
    advised = error.partition("type instead: ")[2].splitlines()[:1]
    assert (answer in advised[0].split(" or ")) if answer else not advised, error


@pytest.mark.parametrize("typed", ["rl", "ppo", "load_in_8bit", "lora_dropout"])
def test_a_method_that_does_not_exist_here_is_answered_with_what_does(typed: str) -> None:
    assert "unknown key; it does not exist here: " in unknown_key(typed, "x", "").message


def test_no_name_is_in_the_table_twice_or_a_key_of_ours() -> None:
    names = " ".join(equivalents()).split()
    spelled = [name.replace("_", "") for name in names]
    assert len(spelled) == len(set(spelled))
    assert not set(names) & set(reference.declared())


def _overrides(meant: Equivalent) -> set[str]:
    ours = {f"{key}={reference.example(key)}" for key in meant.keys if key != "recipe"}
    return ours | set(meant.overrides.values())


@pytest.mark.parametrize("line", equivalents(), ids=lambda line: line.split()[0])
def test_every_answer_names_what_exists_and_is_accepted(line: str) -> None:
    meant = equivalents()[line]
    assert all(equivalent(name) is meant for name in line.split())
    known = {*reference.declared(), *reference.sections(), "recipe"}
    assert set(meant.about) <= known
    for key in meant.keys:
        assert key == "recipe" or fits(key, reference.example(key))
    for advice in _overrides(meant):
        if advice.startswith("recipe="):
            assert Library().find(advice.replace("=", "/"))
        else:
            changed(*shlex.split(advice))  # raises a UserError or fails if it is refused


def test_every_command_of_the_table_runs(capsys: pytest.CaptureFixture[str]) -> None:
    for command in {command for meant in equivalents().values() for command in meant.commands}:
        assert run(shlex.split(command)[1:]) == 0, command


def test_all_unknown_options_are_answered_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    line = "train --gres=gpu:8 --partition x --nodes 2 --mem=4G --dry-run"
    assert run(line.split()) == 2
    text = capsys.readouterr().err
    assert "error: 4 things are wrong" in text and "--dry-run:" not in text
    for answer in (
        "explain launcher.slurm.gpus",
        "launcher.slurm.partition=x",
        "launcher.nodes=2",
        "explain launcher.slurm.directives",
    ):
        assert answer in text

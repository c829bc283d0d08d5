"""Configurations of other trainers become recipes: facts of their public examples, written as small files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from nanoscale.cli.main import run as nanoscale
from tests.cli import Capsys

FILES = {
    "axolotl.yml": """
base_model: meta-llama/Meta-Llama-3-8B-Instruct
load_in_8bit: false
load_in_4bit: true
rl: dpo
datasets:
  - path: someone/pairs
    type: chat_template.default
    roles: {user: [user]}
adapter: qlora
lora_r: 32
lora_target_modules: [q_proj, down_proj]
lora_dropout: 0.05
sequence_len: 4096
gradient_accumulation_steps: 4
micro_batch_size: 2
num_epochs: 4
optimizer: adamw_bnb_8bit
lr_scheduler: cosine
learning_rate: 0.0002
bf16: auto
warmup_ratio: 0.1
special_tokens: {pad_token: x}
wandb_project:
""",
    "titan.toml": """
[model]
name = "llama3"
flavor = "70B"
[optimizer]
name = "AdamW"
lr = 1.5e-4
[lr_scheduler]
warmup_steps = 2_000
decay_type = "cosine"
min_lr_factor = 0.1
[training]
local_batch_size = 8
seq_len = 8192
steps = 10_000
dataset = "c4"
[parallelism]
data_parallel_shard_degree = 4
tensor_parallel_degree = 8
pipeline_parallel_degree = 1
pipeline_parallel_schedule = "Interleaved1F1B"
[checkpoint]
enable = false
[activation_checkpoint]
mode = "full"
""",
    "accelerate.yaml": """
compute_environment: LOCAL_MACHINE
distributed_type: FSDP
fsdp_config:
  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
  fsdp_reshard_after_forward: true
  fsdp_offload_params: false
mixed_precision: bf16
num_machines: 2
num_processes: 16
use_cpu: false
""",
    "factory.yaml": """
model_name_or_path: Qwen/Qwen3-4B
stage: dpo
finetuning_type: lora
lora_rank: 8
lora_target: all
pref_loss: orpo
pref_beta: 0.2
dataset: dpo_en_demo
template: qwen3
cutoff_len: 2048
per_device_train_batch_size: 1
gradient_accumulation_steps: 8
lr_scheduler_type: cosine
report_to: none
bf16: true
pissa_init: true
""",
    "megatron.sh": """#!/bin/bash
GPUS=8  # of a host
LR=${LR:-6.0e-5}
DATA_PATH=$1
rm -rf /tmp/never
ARGS=(
    --num-layers 24
    --hidden-size 1024
    --num-attention-heads 16
    --seq-length 2048
    --max-position-embeddings 2048
    # --bf16
    --fp16
    "--lr $LR"
    --min-lr 6.0e-6
    --global-batch-size 128
    --micro-batch-size 8
    --train-samples 1280000
    --lr-warmup-fraction .01
    --tensor-model-parallel-size 8
    --data-path $DATA_PATH
    --split 949,50,1
)
torchrun --nproc_per_node $GPUS pretrain_gpt.py ${ARGS[@]} 2>&1 | tee log
""",
    "args.json": json.dumps(
        {
            "model_name_or_path": "gpt2",
            "per_device_train_batch_size": 8,
            "learning_rate": 5e-05,
            "max_steps": -1,
            "num_train_epochs": 2.0,
            "save_strategy": "no",
            "report_to": ["tensorboard", "wandb"],
            "bf16": True,
            "fp16": False,
        }
    ),
    "words.txt": "torchrun --nproc_per_node=4 train.py --model_name_or_path=gpt2 --learning_rate 1e-5 "
    "--per_device_train_batch_size 2 --max_steps 50 --bf16 True --fsdp 'full_shard auto_wrap' --lazy\n",
    "ds.json": json.dumps({"train_batch_size": 16, "optimizer": {"type": "OneBitAdam"}}),
}
VALUES: dict[str, dict[str, Any]] = {
    "axolotl.yml": {
        "model.init_from": "meta-llama/Meta-Llama-3-8B-Instruct",
        "train.objective": "dpo",
        "lora.rank": 32,
        "lora.base": "nf4",
        "lora.targets": ["wq", "down"],
        "train.micro_batch": 4,  # pairs are two sequences
        "train.global_batch": 16,
        "train.epochs": 4,
        "optimizer.name": "adamw8bit",
        "optimizer.beta2": 0.999,
        "scheduler.warmup": 0.1,
        "scheduler.min_ratio": 0.0,
    },
    "titan.toml": {
        "model.layers": 80,
        "parallel.dp": 4,
        "parallel.tp": 8,
        "train.global_batch": 32,
        "train.steps": 10_000,
        "scheduler.warmup_steps": 2000,
        "scheduler.min_ratio": 0.1,
        "zero.stage": 3,
        "checkpoint.at_end": False,
    },
    "accelerate.yaml": {"zero.stage": 3, "precision.compute": "bf16"},
    "factory.yaml": {
        "train.objective": "orpo",
        "train.preference_beta": 0.2,
        "lora.rank": 8,
        "lora.targets": None,
        "train.epochs": 3,
        "train.global_batch": 16,
        "optimizer.lr": 5e-5,
    },
    "megatron.sh": {
        "model.layers": 24,
        "model.ffn": 4096,
        "model.kv_heads": None,
        "model.mlp": "gelu",
        "optimizer.lr": 6e-5,
        "scheduler.min_ratio": 0.1,
        "train.steps": 10_000,
        "precision.compute": "fp16",
        "scheduler.warmup": 0.01,
    },
    "args.json": {
        "train.epochs": 2.0,
        "data.packing": "whole",
        "precision.compute": "bf16",
        "checkpoint.at_end": False,
        "logger.wandb": "online",
        "logger.tensorboard": "on",
        "scheduler.name": "linear",
    },
    "words.txt": {"train.global_batch": 8, "train.steps": 50, "zero.stage": 3},
    "ds.json": {"train.global_batch": 16, "backend.name": "deepspeed"},
}
NONE = "no counterpart"
BECAME = {
    "axolotl.yml": {"lora_dropout": NONE, "datasets.path": "data prepare hf:someone/pairs",
                    "special_tokens.pad_token": "not needed", "wandb_project": "not set"},
    "titan.toml": {"(parallel.schedule=interleaved-1f1b)": "left out: does not concern"},
    "accelerate.yaml": {"fsdp_config.fsdp_auto_wrap_policy": "not needed"},
    "factory.yaml": {"pissa_init": NONE, "(global batch)": "assumes 1 data-parallel rank"},
    "megatron.sh": {"data-path": "$1 is a variable; set data.path=…", "split": "data.valid_fraction"},
    "args.json": {"max_steps": "not set"},
    "words.txt": {"(global batch)": "2 · 1 · 4"},
    "ds.json": {"optimizer.type": f"{NONE}: is not an optimizer here"},
}  # fmt: skip


@pytest.mark.parametrize("name", FILES)
def test_a_file_becomes_a_recipe(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capsys
) -> None:
    monkeypatch.chdir(tmp_path)
    Path(name).write_text(FILES[name])
    assert nanoscale(["config", "from", name, "--out", "mine.yaml", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["values"] == document["values"] | VALUES[name]
    became = {it["setting"]: it["became"] for it in document["became"]}
    for setting, text in BECAME[name].items():
        assert text in became[setting]
    # the weights of a model are not here: everything else is accepted
    assert nanoscale(["config", "show", "recipe=./mine.yaml", "model.init_from=null"]) == 0


@pytest.mark.parametrize("name", FILES)
def test_a_file_in_place_of_a_recipe_names_the_command(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capsys
) -> None:
    monkeypatch.chdir(tmp_path)
    Path(name).write_text(FILES[name])
    whole = name in ("axolotl.yml", "factory.yaml", "titan.toml", "megatron.sh")
    for option in (f"--config={name}", *([f"recipe=./{name}"] if whole else [])):
        assert nanoscale(["config", "show", option]) == 2
        assert f"type instead: nanoscale config from {name}\n" in capsys.readouterr().err


def test_another_file_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capsys
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, content, message in (
        ("a.yaml", b"a: 1\n", "these are read: torchtitan's TOML, "),
        ("empty.sh", b"", "is not recognized"),
        (
            "kto.yaml",
            b"base_model: a\nadapter: lora\nrl: kto\n",
            "this way of training is not here",
        ),
        ("binary.sh", b"\xff\x00", "is not UTF-8 text"),
        ("broken.toml", b"[a\n", "is not TOML"),
        ("broken.yaml", b"a: [\n", "is not YAML"),
        (
            "mine.yaml",
            b"train: {steps: 3}\n",
            "is a recipe already: nanoscale train recipe=./mine.yaml",
        ),
    ):
        Path(name).write_bytes(content)
        assert nanoscale(["config", "from", name]) == 2
        assert message in capsys.readouterr().err
    assert nanoscale(["config", "from", "absent.yml"]) == 2


def test_a_script_is_not_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capsys
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("x.sh").write_text(
        "A=$(touch x)\nB=`touch y`\npython t.py --learning_rate $A --output_dir ${B:-`touch z`}\n"
    )
    assert nanoscale(["config", "from", "x.sh"]) == 0
    assert [it.name for it in tmp_path.iterdir()] == ["x.sh"]
    Path("x.sh").write_text("A=$B$B\nB=$A$A\npython t.py --learning_rate $A\n")
    assert nanoscale(["config", "from", "x.sh"]) == 0  # variables that name each other end

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
        "logger.wandb": "online",
        "logger.tensorboard": "on",
        "scheduler.name": "linear",
    },
    "words.txt": {"train.global_batch": 8, "train.steps": 50, "zero.stage": 3},
    "ds.json": {"train.global_batch": 16, "backend.name": "deepspeed"},
}
NONE = "no counterpart"
BECAME = {
    "axolotl.yml": {"lora_dropout": NONE, "load_in_4bit": "lora.base=nf4",
                    "(data)": "type `nanoscale data prepare hf:someone/pairs --out data --pairs --tokenizer "
                    "meta-llama/Meta-Llama-3-8B-Instruct` first",
                    "special_tokens.pad_token": "not needed", "wandb_project": "not set"},
    "titan.toml": {"(parallel.schedule=interleaved-1f1b)": "left out: does not concern"},
    "accelerate.yaml": {"fsdp_config.fsdp_auto_wrap_policy": "not needed"},
    "factory.yaml": {"pissa_init": NONE, "(global batch)": "assumes 1 data-parallel rank"},
    "megatron.sh": {"data-path": "$1 is a variable; set data.path=…", "split": "data.valid_fraction"},
    "args.json": {"max_steps": "not set", "fp16": "off"},
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
    is_part = name in ("accelerate.yaml", "ds.json")  # of a job, without its length
    assert ("this recipe trains" in str(document["verdict"])) != is_part
    assert document["verdict"][-1] == "next: nanoscale train recipe=./mine.yaml"
    assert (document["became"][0]["setting"] == "(model)") == is_part
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
            "grpo.yaml",
            b"base_model: a\nadapter: lora\nsequence_len: 8\nrl: grpo\n",
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


@pytest.mark.parametrize(
    ("name", "content", "title"),
    [
        ("tune.yaml", "model: {_component_: a}\noptimizer: {_component_: b, lr: 3e-4}\noutput_dir: x",
         "torchtune's YAML"),
        ("swift.sh", "swift sft --model a --tuner_type lora --learning_rate 1e-4 --model_author c",
         "ms-swift's arguments"),
        ("lit.yaml", "out_dir: a\ncheckpoint_dir: b\ndata: {class_path: c}\ntrain: {epochs: 2}",
         "litgpt's YAML"),
        ("nemo.yaml", "step_scheduler: {num_epochs: 1}\nmodel: {_target_: a}\noptimizer: {lr: 1e-5}",
         "NeMo AutoModel's"),
        ("olmo.json", '{"model": {"_CLASS_": "a"}, "trainer": {"_CLASS_": "b"}, "learning_rate": 1}',
         "OLMo-core's"),
        ("nano.yaml", "general: {run: a}\nparallelism: {dp: 2, pp_engine: 1f1b}\nmodel: {model_config: {}}",
         "nanotron's"),
        ("rl.toml", "max_steps = 5\n[optim]\nlr = 1e-5\n[model]\nname = 'a'\n", "prime-rl's TOML"),
        ("config_registry.py", "def llama3_8b(): pass", "is a program, as torchtitan's registry"),
    ],
)  # fmt: skip
def test_a_file_that_is_not_read_is_named(
    name: str,
    content: str,
    title: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: Capsys,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path(name).write_text(content)
    assert nanoscale(["config", "from", name, "--out", "mine.yaml"]) == 2
    assert title in capsys.readouterr().err and not Path("mine.yaml").exists()


HF = "model_name_or_path: gpt2\nlearning_rate: 1e-5\nmax_steps: 9\n"
TITAN = "[training]\nsteps = 10\nlocal_batch_size = 1\n"
AXOLOTL = "base_model: gpt2\nsequence_len: 64\nmax_steps: 9\nmicro_batch_size: 1\n"


@pytest.mark.parametrize(
    ("name", "content", "values"),
    [
        ("a.yaml", HF + "deepspeed: configs/x.json", {"zero.stage": 3, "backend.reduce_bucket": 5000}),
        ("a.yaml", HF + "deepspeed: ds_z2.json", {"zero.stage": 2, "backend.name": "deepspeed"}),
        ("a.toml", TITAN, {"scheduler.name": "linear", "scheduler.min_ratio": 0.0}),
        ("a.toml", TITAN + "[lr_scheduler]\ndecay_ratio = 0.8\n",
         {"scheduler.name": "wsd", "scheduler.decay_steps": 8}),
        ("a.toml", TITAN + "[validation]\nseq_len = 7\n", {"train.seq_len": None}),
        ("a.yaml", "distributed_type: FSDP\nparallelism_config: {parallelism_config_dp_shard_size: 2,"
         " parallelism_config_dp_replicate_size: 2, parallelism_config_tp_size: 4}\n",
         {"parallel.dp": 4, "parallel.dp_replicate": 2, "parallel.tp": 4}),
        ("a.yaml", AXOLOTL + "dp_shard_size: 4\n", {"parallel.dp": 4, "train.global_batch": 4}),
        ("a.yaml", AXOLOTL + "expert_parallel_size: 8\n", {"parallel.ep": 8, "train.global_batch": 8}),
        ("a.yaml", AXOLOTL + "warmup_steps: 0.1\n", {"scheduler.warmup": 0.1}),
        ("a.yaml", AXOLOTL + "optimizer: adamw_torch_8bit\nactivation_offloading: true\n"
         "gradient_checkpointing: true\n",
         {"optimizer.name": "adamw8bit", "parallel.offload_activations": True}),
        ("a.yaml", HF + "save_strategy: 'no'\nsave_steps: 5\n",
         {"checkpoint.every": None, "checkpoint.every_minutes": 0, "checkpoint.at_end": None}),
        ("a.yaml", HF + "generation_config: {max_length: 7, seed: 3}\n",
         {"train.seq_len": None, "train.seed": 42}),
    ],
)  # fmt: skip
def test_a_setting_is_not_lost(
    name: str,
    content: str,
    values: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: Capsys,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path(name).write_text(content)
    zero = {"stage": 3, "reduce_bucket_size": 5e3}
    Path("x.json").write_text(json.dumps({"zero_optimization": zero, "bf16": {"enabled": "auto"}}))
    assert nanoscale(["config", "from", name, "--json"]) == 0
    present = json.loads(capsys.readouterr().out)["values"]
    assert {key: present.get(key) for key in values} == values


def test_what_lines_say_is_true(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capsys
) -> None:
    monkeypatch.chdir(tmp_path)
    rows = [{"id": f"d/{i}", "config": "c", "split": "s"} for i in range(25)]
    settings = {
        "model_name_or_path": "gpt2", "learning_rate": 1e-5, "lr_scheduler_type": "cosine",
        "model_revision": "x", "chat_template": "{{ x }}", "dataset_mixture": {"datasets": rows}, "bf16": True,
        "fp16": False,
    }  # fmt: skip
    Path("a.json").write_text(json.dumps(settings))
    assert nanoscale(["config", "from", "a.json", "--json"]) == 0
    became = {it["setting"]: it["became"] for it in json.loads(capsys.readouterr().out)["became"]}
    assert "(lr_scheduler_type=linear, not in the file)" not in became and became["fp16"] == "off"
    assert "has no key" in became["model_revision"] and "--chat-template" in became["chat_template"]
    command = became["(data)"].partition("`")[2].partition("`")[0]
    sources = " ".join(f"hf:d/{i}:c:s" for i in range(25))
    options = "--out data --chat --chat-template FILE --tokenizer gpt2"
    assert command == f"nanoscale data prepare {sources} {options}"
    Path("long.yaml").write_text(
        AXOLOTL + f"rl: dpo\ndatasets: [{{path: {'a' * 5000}, type: alpaca}}]\n"
    )
    assert nanoscale(["config", "from", "long.yaml"]) == 0
    assert "is a form of records that is not read" in capsys.readouterr().err.replace(
        "→  a form", "is a form"
    )
    Path("long.yaml").write_text(HF + f"deepspeed: {'z3' * 3000}\n")
    assert nanoscale(["config", "from", "long.yaml"]) == 0
    Path("b.yaml").write_text(HF + "deepspeed: own.json\n")
    assert nanoscale(["config", "from", "b.yaml"]) == 2
    assert "is not beside the file" in capsys.readouterr().err
    Path("c.yaml").write_text(
        HF + "per_device_train_batch_size: 1\ntensor_parallel_size: 8\npipeline_parallel_size: 64\n"
    )
    assert nanoscale(["config", "from", "c.yaml"]) == 0
    assert "error: `train` refuses this recipe: parallel.pp=64" in capsys.readouterr().err


def test_a_script_is_not_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capsys
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("x.sh").write_text(
        "A=$(touch x)\nB=`touch y`\npython t.py --learning_rate $A --output_dir ${B:-`touch z`}\n"
    )
    assert nanoscale(["config", "from", "x.sh"]) == 0
    assert [it.name for it in tmp_path.iterdir()] == ["x.sh"]
    Path("x.sh").write_text("A=$B$B\nB=$A$A\npython t.py --learning_rate $A --max_steps 3\n")
    assert nanoscale(["config", "from", "x.sh"]) == 0  # variables that name each other end

"""DeepSpeed's JSON in nanoscale's keys, compared with the JSON that nanoscale makes of them again."""

from __future__ import annotations

import json
import os
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from nanoscale.cli.main import run as nanoscale
from nanoscale.common.errors import UserError
from nanoscale.config.translation.from_file import translate

WHOLE: dict[str, Any] = {
    "train_batch_size": 16,
    "train_micro_batch_size_per_gpu": 2,
    "gradient_accumulation_steps": 8,
    "gradient_clipping": 1.0,
    "steps_per_print": 10,
    "bf16": {"enabled": True},
    "fp16": {"enabled": False, "hysteresis": 2},
    "optimizer": {
        "type": "AdamW",
        "params": {"lr": 6e-4, "betas": [0.8, 0.99], "eps": 1e-7, "weight_decay": 0.2},
    },
    "scheduler": {
        "type": "WarmupDecayLR",
        "params": {
            "warmup_min_lr": 0,
            "warmup_num_steps": 10,
            "total_num_steps": 100,
            "warmup_type": "linear",
        },
    },
    "zero_optimization": {
        "stage": 2,
        "overlap_comm": True,
        "contiguous_gradients": True,
        "reduce_bucket_size": 5e7,
        "allgather_bucket_size": 4e7,
        "round_robin_gradients": True,
    },
    "wall_clock_breakdown": False,
    "csv_monitor": {"enabled": True, "output_path": "x"},
}


@pytest.mark.slow
def test_what_it_became_makes_the_same_json_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("ds.json").write_text(json.dumps(WHOLE))
    assert nanoscale(["config", "from-deepspeed", "ds.json", "--out", "mine.yaml"]) == 0
    notes = capsys.readouterr().err
    for path in (
        "optimizer.params.betas",
        "zero_optimization.round_robin_gradients",
        "csv_monitor",
    ):
        assert path in notes
    base = ["recipe=./mine.yaml", "model=debug", "train.seq_len=64", "precision.compute=bf16"]
    assert nanoscale(["config", "show", *base, "--deepspeed"]) == 0
    made = json.loads(capsys.readouterr().out)
    assert made["train_micro_batch_size_per_gpu"] == 2
    assert made["gradient_accumulation_steps"] == 8 and made["gradient_clipping"] == 1.0
    assert made["bf16"]["enabled"] and made["wall_clock_breakdown"] is False
    assert made["zero_optimization"] == WHOLE["zero_optimization"]
    assert nanoscale(["config", "show", *base, "--json"]) == 0
    config = json.loads(capsys.readouterr().out)
    assert (config["train"]["global_batch"], config["train"]["steps"]) == (16, 100)
    assert (config["optimizer"]["beta2"], config["optimizer"]["eps"]) == (0.99, 1e-7)
    assert (config["scheduler"]["name"], config["scheduler"]["min_ratio"]) == ("linear", 0.0)
    assert config["logger"]["csv"] is True and config["train"]["log_every"] == 10


MICRO, STEPS = "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"
BATCH = {"train_batch_size": 16, STEPS: 4}
FP16 = {"enabled": True}


@pytest.mark.parametrize(
    ("settings", "dp", "values"),
    [
        ({MICRO: 2, STEPS: 4}, 8, {"train.global_batch": 64, "train.micro_batch": 2}),
        ({"train_batch_size": 64, STEPS: 4}, 8, {"train.global_batch": 64, "train.micro_batch": 2}),
        (BATCH | {MICRO: 2}, 2, {"train.global_batch": 16, "train.micro_batch": 2}),
        (BATCH, 4, {"train.global_batch": 16, "train.micro_batch": 1}),
        ({"fp16": FP16 | {"loss_scale_window": 500}}, None, {"precision.loss_scale_window": 500}),
        ({"fp16": FP16 | {"initial_scale_power": 8}}, None, {"precision.loss_scale": 256.0}),
        ({"fp16": FP16 | {"loss_scale": 0.0, "hysteresis": 2}}, None, {"precision.compute": "fp16"}),
        ({"zero_optimization": {"cpu_offload": True}}, None, {"zero.offload_optimizer": "cpu"}),
        ({"zero_optimization": {"overlap_comm": False}}, None, {"backend.overlap_comm": "off"}),
        ({"activation_checkpointing": {"cpu_checkpointing": True, "profile": False}}, None,
         {"parallel.offload_activations": True}),
        ({"data_types": {"grad_accum_dtype": "bf16"}}, None, {"precision.reduce": "bf16"}),
        ({"sequence_parallel_size": 2}, None,
         {"parallel.cp": 2, "parallel.cp_method": "ulysses"}),
        ({"wandb": {"enabled": True, "project": "p", "team": ""}}, None,
         {"logger.wandb": "online", "logger.project": "p"}),
        ({"scheduler": {"type": "WarmupCosineLR", "params": {"cos_min_ratio": 0.2}}}, None,
         {"scheduler.name": "cosine", "scheduler.min_ratio": 0.2}),
    ],
)  # fmt: skip
def test_a_setting_becomes_a_key(
    settings: dict[str, Any], dp: int | None, values: dict[str, Any]
) -> None:
    rest = {"backend.name": "deepspeed", "precision.compute": "fp32"}
    if "fp16" in settings:
        rest["precision.compute"] = "fp16"
    assert translate(settings, dp).values == rest | values


@pytest.mark.parametrize(
    ("settings", "dp", "path", "message"),
    [
        ({MICRO: 2, STEPS: 4}, None, STEPS, "give it with --dp N"),
        ({"train_batch_size": 64, STEPS: 4}, None, STEPS, "give it with --dp N"),
        (BATCH, 3, STEPS, "do not divide train_batch_size=16"),
        (BATCH | {MICRO: 2}, 4, STEPS, "2·4·4 = 32, 16"),
        (BATCH | {MICRO: 3}, None, STEPS, "does not divide"),
        ({"train_batch_size": 8, STEPS: "4"}, None, STEPS, "must be an integer, at least 1"),
        ({"optimizer": {"type": "OneBitAdam"}}, None, "optimizer.type", "is not an optimizer"),
        ({"optimizer": {"type": "Adam", "params": {"adam_w_mode": False}}}, None,
         "optimizer.params.adam_w_mode", "L2 regularization"),
        ({"optimizer": {"type": "AdamW", "params": {"amsgrad": "auto"}}}, None,
         "optimizer.params.amsgrad", "has no key"),
        ({"optimizer": None}, None, "optimizer", "must be an object"),
        ({"optimizer": {"type": "AdamW", "params": [1]}}, None, "optimizer.params", "an object"),
        ({"optimizer": {"type": "AdamW", "params": {"betas": [0.9]}}}, None,
         "optimizer.params.betas", "a list of two numbers"),
        ({"optimizer": {"type": "AdamW", "params": {"lr": {}}}}, None, "optimizer.params.lr",
         "one value, not an object"),
        ({"scheduler": {"type": "OneCycle"}}, None, "scheduler.type", "is not a schedule"),
        ({"scheduler": {"type": "WarmupLR", "params": {"warmup_type": "log"}}}, None,
         "scheduler.params.warmup_type", "set it to linear"),
        ({"scheduler": {"type": "WarmupLR", "params": {"warmup_min_lr": 0.1}}}, None,
         "scheduler.params.warmup_min_lr", "set it to 0"),
        ({"fp16": FP16 | {"loss_scale": 128}}, None, "fp16.loss_scale", "a constant loss scale"),
        ({"fp16": FP16 | {"hysteresis": 4}}, None, "fp16.hysteresis", "set it to 2"),
        ({"fp16": FP16 | {"min_loss_scale": 2}}, None, "fp16.min_loss_scale", "set it to 1"),
        ({"fp16": FP16 | {"initial_scale_power": 5000}}, None, "fp16.initial_scale_power",
         "from 0 to 127"),
        ({"fp16": None}, None, "fp16", "must be an object"),
        ({"bf16": True}, None, "bf16", "must be an object"),
        ({"bf16": {"enabled": "yes"}}, None, "bf16.enabled", "true, false or"),
        ({"bf16": {"enabled": True, "bf16_master_weights_and_grads": True}}, None,
         "bf16.bf16_master_weights_and_grads", "has no key of nanoscale"),
        ({"activation_checkpointing": {"number_checkpoints": 4}}, None,
         "activation_checkpointing.number_checkpoints", "remove it"),
        ({"data_types": 1}, None, "data_types", "must be an object"),
        ({"communication_data_type": [1]}, None, "communication_data_type", "has no key"),
        ({"zero_optimization": {"stage": 3, "overlap_comm": 1}}, None,
         "zero_optimization.overlap_comm", "has no key of nanoscale"),
    ],
)  # fmt: skip
def test_what_cannot_be_honored_is_refused(
    settings: dict[str, Any], dp: int | None, path: str, message: str
) -> None:
    with pytest.raises(UserError) as raised:
        translate(settings, dp)
    (violation,) = raised.value.violations
    assert violation.key == path and message in violation.message + violation.remedy


@pytest.mark.parametrize("enabled", [False, "auto", None])
def test_a_loss_scale_concerns_fp16_alone(enabled: bool | str | None) -> None:
    scale = {"loss_scale": 128, "loss_scale_window": 500, "initial_scale_power": 16}
    fp16 = scale | {"hysteresis": 4} | ({} if enabled is None else {"enabled": enabled})
    found = translate({"train_batch_size": 8, "fp16": fp16})
    assert not any("loss_scale" in key for key in found.values)
    assert {f"fp16.{name}" for name in fp16} <= {path for path, _ in found.became}


def test_auto_is_left_to_nanoscale() -> None:
    found = translate(
        {
            "train_batch_size": "auto",
            "gradient_accumulation_steps": "auto",
            "bf16": {"enabled": "auto"},
            "fp16": {"enabled": "auto", "loss_scale": 0},
            "optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": "auto"}},
            "zero_optimization": {"stage": 3, "reduce_bucket_size": "auto"},
        }
    )
    assert found.values == {
        "backend.name": "deepspeed",
        "zero.stage": 3,
        "precision.compute": "auto",
        "optimizer.name": "adamw",
    }


def test_bad_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for text, said in (("[1]", "no JSON object"), ("{", "is not JSON"), (None, "No such file")):
        file = tmp_path / "ds.json"
        file.unlink(missing_ok=True)
        if text is not None:
            file.write_text(text)
        assert nanoscale(["config", "from-deepspeed", str(file)]) == 2
        assert said in capsys.readouterr().err
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    Thread(target=pipe.write_text, args=("[1]",), daemon=True).start()  # so that no reader waits
    assert nanoscale(["config", "from-deepspeed", str(pipe)]) == 2
    assert "is a pipe" in capsys.readouterr().err
    file.write_text('{"train_batch_size": 8}')
    (tmp_path / "mine.yaml").write_text("mine")
    line = ["config", "from-deepspeed", str(file), "--out", str(tmp_path / "mine.yaml")]
    assert nanoscale(line) == 2 and "File exists" in capsys.readouterr().err
    assert (tmp_path / "mine.yaml").read_text() == "mine"


def test_an_unknown_optimizer_keeps_its_rate() -> None:
    params = {"lr": 0.001, "weight_decay": 0.2, "betas": [0.8, 0.9], "rho": 2}
    settings = {"optimizer": {"type": "Sam", "params": params}, "train_batch_size": 8}
    translation = translate(settings, strict=False)
    kept = {key: value for key, value in translation.values.items() if key.startswith("optimizer.")}
    assert kept == {
        "optimizer.lr": 0.001, "optimizer.weight_decay": 0.2, "optimizer.beta1": 0.8, "optimizer.beta2": 0.9
    }  # fmt: skip
    lost = dict(translation.became)
    assert "AdamW trains" in lost["optimizer.type"] and "no key" in lost["optimizer.params.rho"]

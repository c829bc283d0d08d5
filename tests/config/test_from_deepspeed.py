"""DeepSpeed's JSON in nanoscale's keys, compared with the JSON that nanoscale makes of them again."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from nanoscale.cli.main import run as nanoscale
from nanoscale.common.errors import UserError
from nanoscale.config.from_deepspeed import translate

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


@pytest.mark.parametrize(
    ("settings", "dp", "values"),
    [
        (
            {"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 4},
            8,
            ("global", 64),
        ),
        ({"train_batch_size": 64, "gradient_accumulation_steps": 4}, 8, ("micro", 2)),
    ],
)
def test_a_batch_by_accumulation_needs_the_degree(
    settings: dict[str, Any], dp: int, values: tuple[str, int]
) -> None:
    with pytest.raises(UserError) as raised:
        translate(settings)
    assert raised.value.violations[0].remedy == "give it with --dp N"
    assert translate(settings, dp).values[f"train.{values[0]}_batch"] == values[1]


@pytest.mark.parametrize(
    ("settings", "path"),
    [
        ({"optimizer": {"type": "OneBitAdam"}}, "optimizer.type"),
        ({"optimizer": {"type": "Adam", "params": {"adam_w_mode": False}}}, "adam_w_mode"),
        ({"scheduler": {"type": "OneCycle"}}, "scheduler.type"),
        ({"scheduler": {"type": "WarmupLR", "params": {"warmup_type": "log"}}}, "warmup_type"),
        ({"fp16": {"enabled": True, "loss_scale": 128}}, "fp16.loss_scale"),
        ({"activation_checkpointing": {"number_checkpoints": 4}}, "number_checkpoints"),
        ({"bf16": {"enabled": True, "bf16_master_weights_and_grads": True}}, "bf16_master"),
        ({"bf16": True}, "bf16"),
        ({"bf16": {"enabled": "yes"}}, "bf16.enabled"),
        ({"fp16": None}, "fp16"),
        ({"fp16": {"enabled": True, "initial_scale_power": 5000}}, "fp16.initial_scale_power"),
        ({"optimizer": None}, "optimizer"),
        ({"optimizer": {"type": "AdamW", "params": [1]}}, "optimizer.params"),
        ({"optimizer": {"type": "AdamW", "params": {"betas": [0.9]}}}, "optimizer.params.betas"),
        (
            {"train_batch_size": 8, "gradient_accumulation_steps": "4"},
            "gradient_accumulation_steps",
        ),
        ({"data_types": 1}, "data_types"),
        ({"communication_data_type": [1]}, "communication_data_type"),
        ({"zero_optimization": {"stage": 3, "sub_group_size": 1e9}, "fp16": 0}, "fp16"),
    ],
)
def test_what_cannot_be_honored_is_refused(settings: dict[str, Any], path: str) -> None:
    with pytest.raises(UserError) as raised:
        translate(settings)
    assert path in raised.value.violations[0].key


BATCH = {"train_batch_size": 16, "gradient_accumulation_steps": 4}


@pytest.mark.parametrize(
    ("settings", "dp", "message"),
    [
        (BATCH, 3, "do not divide train_batch_size=16"),
        (BATCH | {"train_micro_batch_size_per_gpu": 2}, 4, "2·4·4 = 32, 16"),
        (BATCH | {"train_micro_batch_size_per_gpu": 3}, None, "does not divide"),
    ],
)
def test_an_accumulation_that_contradicts_the_batches_is_refused(
    settings: dict[str, Any], dp: int | None, message: str
) -> None:
    with pytest.raises(UserError) as raised:
        translate(settings, dp)
    (violation,) = raised.value.violations
    assert violation.key == "gradient_accumulation_steps" and message in violation.message
    degree = 2 if "train_micro_batch_size_per_gpu" in settings else 4
    assert translate(BATCH | {"train_micro_batch_size_per_gpu": 2}, 2) and translate(BATCH, degree)


@pytest.mark.parametrize("enabled", [False, "auto", None])
def test_a_loss_scale_concerns_fp16_alone(enabled: bool | str | None, tmp_path: Path) -> None:
    scale = {"loss_scale": 128, "loss_scale_window": 500, "initial_scale_power": 16}
    fp16 = scale | {"hysteresis": 4} | ({} if enabled is None else {"enabled": enabled})
    found = translate({"train_batch_size": 8, "fp16": fp16})
    assert not any("loss_scale" in key for key in found.values)
    assert {f"fp16.{name}" for name in fp16} <= {path for path, _ in found.became}
    on = translate({"fp16": {"enabled": True, "loss_scale_window": 500}})
    assert on.values["precision.loss_scale_window"] == 500


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
    file.write_text('{"train_batch_size": 8}')
    (tmp_path / "mine.yaml").write_text("mine")
    line = ["config", "from-deepspeed", str(file), "--out", str(tmp_path / "mine.yaml")]
    assert nanoscale(line) == 2 and "File exists" in capsys.readouterr().err
    assert (tmp_path / "mine.yaml").read_text() == "mine"

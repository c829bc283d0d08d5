"""The command `nanoscale bench`: its measurements of a real job, its output, and its errors."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from nanoscale.cli.main import run as nanoscale
from nanoscale.common.errors import UserError
from nanoscale.config.model_math import flops_per_token
from nanoscale.config.schema import Cluster, Train
from nanoscale.launch.lifecycle.bench import compare_figures, document
from nanoscale.metrics.step_parts import PARTS
from nanoscale.view.measured_text import _parts
from tests.cli import Capsys
from tests.support.jobs import make_config
from tests.support.recipes import complete
from tests.support.runs import create_run

LIMIT_S = 60.0


@pytest.mark.slow
@pytest.mark.usefixtures("forked_ranks")
def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capsys) -> None:
    """The job has two ranks and a checkpoint; another has one rank."""
    monkeypatch.chdir(tmp_path)
    words = ["recipe=debug", "parallel.dp=2", "train.steps=6", "train.sample_tokens=0"]
    words += ["train.seq_len=32", "launcher.threads=1"]
    saving = ["checkpoint.every=5", "checkpoint.asynchronous=true", "run.root=elsewhere"]
    assert nanoscale(["bench", *words, *saving, "--steps", "4", "--warmup", "1", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [path.name for path in tmp_path.iterdir()] == []
    assert found["steps"] == 4 and found["warmup"] == 1 and found["world_size"] == 2
    assert found["step_time_least_s"] <= found["step_time_s"] <= found["step_time_most_s"]
    speed = found["tokens_per_step"] / found["step_time_mean_s"]
    assert found["tokens_per_s"] == pytest.approx(speed) and found["tokens_per_step"] == 8 * 32
    assert found["mfu"] is None and 0 < found["mfu_of_measured"] == found["hfu_of_measured"]
    assert found["predicted"]["step_time_s"] > 0
    parts = found["parts"]
    assert parts["where"] == "host" and parts["steps"] == 2
    assert sum(parts[f"{name}_s"] for name in PARTS) == pytest.approx(parts["step_s"])
    for name in ("data", "forward", "backward", "optimizer", "communication"):
        assert parts[f"{name}_s"] > 0, name
    checkpoint = found["checkpoint"]
    assert checkpoint["asynchronous"] and 0 < checkpoint["stall_s"] < checkpoint["seconds"]
    # parameters and two moments, in fp32
    assert checkpoint["gib"] == pytest.approx(12 * found["parameters"] / 2**30, rel=0.2)
    kept = tmp_path / "kept.json"
    kept.write_text(json.dumps(found))

    bench = ["bench", *words, "parallel.dp=1", "--steps", "1", "--warmup", "0"]
    assert nanoscale([*bench, "--compare", str(kept)]) == 0
    shown = capsys.readouterr().out
    for said in ("tokens/s", "planned", "backward", "unknown: no data sheet gives one for cpu"):
        assert said in shown
    assert "checkpoint" not in shown and "ratio" in shown and str(kept) in shown
    assert [path.name for path in tmp_path.iterdir()] == ["kept.json"]

    for wrong, said in (
        (["--steps", "0"], "at least 1"),
        (["--compare", "two"], "no run 'two'"),
        (["--compare", __file__], "not the JSON of a bench"),
        (["parallel.tp=3"], "tp"),
        (["profile.steps=2"], "creates none"),
    ):
        assert nanoscale(["bench", *words, *wrong]) == 2, wrong
        assert said in capsys.readouterr().err


@pytest.mark.exhaustive
def test_scaling(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capsys) -> None:
    monkeypatch.chdir(tmp_path)
    words = [
        "bench",
        "recipe=debug",
        "train.seq_len=32",
        "launcher.threads=1",
        "train.micro_batch=1",
    ]
    words += ["train.global_batch=4", "--steps", "2", "--warmup", "1", "--devices", "1,2"]
    assert nanoscale([*words, "--weak", "--json", "--html", "page.html"]) == 0
    about = json.loads(capsys.readouterr().out)
    one, two = about["points"]
    assert (one["devices"], two["devices"], two["world_size"]) == (1, 2, 2)
    assert (one["global_batch"], two["global_batch"], about["weak"]) == (4, 8, True)
    assert [it["tokens_per_s"] for it in about["benches"]] == [
        one["tokens_per_s"],
        two["tokens_per_s"],
    ]
    assert two["predicted"]["speed_up"] > 0 and one["speed_up"] == one["efficiency"] == 1
    page = Path("page.html").read_text()
    assert page.count("<svg") == 2 and "planned" in page and "ideal" in page
    assert [path.name for path in tmp_path.iterdir()] == ["page.html"]


def test_what_is_wrong_with_a_scaling_test_starts_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capsys
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("page.html").touch()
    scale = ["--devices", "1,2"]
    for words, said in (
        (["--devices", "2"], "ascending numbers, as in --devices 1,2,4"),
        (["--devices", "2,1"], "ascending"),
        (["--devices", "1,1"], "ascending"),
        (["--devices", "0,1"], "ascending"),
        (["--devices", "1,x"], "ascending"),
        (["--num-nodes", "1,"], "--num-nodes 1,2,4"),
        ([*scale, "--num-nodes", "1,2"], "remove one of them"),
        ([*scale, "--num-gpus", "2"], "remove one of them"),
        ([*scale, "--compare", "run"], "not for a scaling test"),
        ([*scale, "--html", "page.html"], "already exists"),
        (["--weak"], "add --devices 1,2"),
        (["--html", "other.html"], "add --devices 1,2"),
        (["--devices", "1,2", "parallel.dp=2"], "--devices 1"),
        (["--devices", "1,3"], "train.global_batch"),
    ):
        assert nanoscale(["bench", "recipe=debug", "launcher.device=cpu", *words]) == 2, words
        seen = capsys.readouterr()
        assert said in seen.err and "Traceback" not in seen.err and seen.out == "", (
            words,
            seen.err,
        )
    assert [path.name for path in tmp_path.iterdir()] == ["page.html"]


def test_speed_up_and_efficiency_by_hand(capsys: Capsys) -> None:
    """Twice as fast on four times as many ranks; the plan expects three times."""
    from nanoscale.common.display import console
    from nanoscale.launch.lifecycle.bench import scaling_document
    from nanoscale.view.blocks import show
    from nanoscale.view.measured_text import scaling_report

    def bench(ranks: int, speed: float, planned: float) -> dict[str, Any]:
        names = ("model", "precision", "backend", "device")
        figures = dict.fromkeys(("step_time_s", "memory_gib"), 1.0) | {
            "mfu": None,
            "global_batch": 8,
        }
        plan = {"step_time_s": 1.0, "tokens_per_s": planned}
        speeds = {"tokens_per_s": speed, "tokens_per_s_per_device": speed / ranks}
        return (
            dict.fromkeys(names, "x") | figures | speeds | {"world_size": ranks, "predicted": plan}
        )

    about = scaling_document("hosts", [1, 4], [bench(2, 100, 90), bench(8, 200, 270)], weak=False)
    point = about["points"][1]
    assert (point["speed_up"], point["efficiency"]) == (2, 0.5)
    assert (point["predicted"]["speed_up"], point["predicted"]["efficiency"]) == (3, 0.75)
    show(console(), scaling_report(about))
    row = capsys.readouterr().out.splitlines()[-1].split()
    assert row[0] == "4" and row[-6:] == ["2.00", "3.00", "50.0%", "75.0%", "1", "GiB"]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_ended_by_a_signal_it_leaves_nothing(tmp_path: Path, number: signal.Signals) -> None:
    words = ["recipe=debug", "checkpoint.every=5", "launcher.device=cpu", "run.root=runs"]
    source = str(Path(__file__).parents[2])
    with subprocess.Popen(
        [sys.executable, "-m", "nanoscale", "bench", *words, "--steps", "100000"],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": source},
        stderr=subprocess.DEVNULL,
        start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    ) as process:
        deadline = time.monotonic() + LIMIT_S
        while not list(tmp_path.glob("runs/.bench-*")):
            assert time.monotonic() < deadline and process.poll() is None
            time.sleep(0.01)
        process.send_signal(number)
        assert process.wait(LIMIT_S) == 128 + number
    assert list(tmp_path.iterdir()) == []


def test_the_most_expensive_kernels() -> None:
    """A GPU's kernels that take most time, with names cut at the end of the column."""
    parts: dict[str, Any] = {f"{name}_s": 0.0 for name in PARTS}
    parts |= {"where": "device", "steps": 2, "step_s": 0.1, "forward_s": 0.1, "data_on_host_s": 0.0}
    parts |= {"communication_in_all_s": 0.0, "waits": {}, "waits_between": {}}
    parts["kernels"] = {"x" * 80: 0.04} | {f"kernel_{number}": 0.01 for number in range(20)}
    lines = list(_parts({"parts": parts, "step_time_s": 0.1}))
    first, last = lines[-8], lines[-1]
    assert lines[-9] == "  the most expensive kernels"
    assert first.split() == ["x" * 65 + "…", "40.0%", "40", "ms"]
    assert last.split() == ["kernel_6", "10.0%", "10", "ms"] and len(first) == len(last)


def test_figures_beside_a_run(tmp_path: Path) -> None:
    """The figures are the median of the logged steps, after the first ones."""
    from nanoscale.launch.lifecycle.bench import read_other

    config = make_config(tmp_path, dp=2)
    run = create_run(tmp_path, "run")
    from nanoscale.config.composing import frozen

    run.config.write_text(frozen.dump(config))
    lines = [
        {"step": step, "step_time_s": seconds, "tokens_per_s": 128 / seconds, "mfu": 0.1 / seconds}
        | {"memory_gib": 1.5}
        for step, seconds in enumerate((9.0, 9.0, 9.0, 1.0, 2.0, 4.0), 1)
    ]
    run.metrics.write_text("".join(json.dumps(line) + "\n" for line in lines))
    other = read_other(str(run.path))
    assert other["step_time_s"] == 2.0 and other["tokens_per_s"] == 8 * 16 / 2.0
    assert other["tokens_per_s_per_device"] == other["tokens_per_s"] / 2
    assert other["mfu"] == pytest.approx(0.05) and other["hfu"] is None
    mine: dict[str, Any] = {**other, "step_time_s": 1.0, "hfu": 0.5}
    ratios = compare_figures(mine, other)["ratios"]
    assert ratios["step_time_s"] == 0.5 and ratios["mfu"] == 1 and "hfu" not in ratios
    del lines[-1]["tokens_per_s"]
    run.metrics.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert read_other(str(run.path))["mfu"] is None


@pytest.mark.parametrize(
    "text",
    ["[]", '{"step_time_s": "1"}', '{"step_time_s": null}', '{"step_time_s": 1, "mfu": "x"}'],
)
def test_figures_of_another_file_are_numbers(text: str, tmp_path: Path) -> None:
    from nanoscale.launch.lifecycle.bench import read_other

    (tmp_path / "other.json").write_text(text)
    with pytest.raises(UserError, match="is not the JSON of a bench"):
        read_other(str(tmp_path / "other.json"))


def test_use_of_the_device_by_hand() -> None:
    """KempnerForge's row: 10,471 tokens/s of an 8.03 B Llama on one H200 (989 TFLOP/s), sequence 4096."""
    from dataclasses import replace

    from tests.metrics.test_meter import LLAMA_8B

    train = Train(steps=1, global_batch=1, micro_batch=1, seq_len=4096)
    config = complete(model=LLAMA_8B, train=train, cluster=Cluster(peak_tflops=989.0))
    times = [4096 / 10471 * factor for factor in (0.9, 1.0, 1.1)]
    measured: dict[str, Any] = {
        "device": "NVIDIA H200",
        "matmul_flops": 700e12,
        "times_s": times,
        "first_step_s": 1.0,
        "loss": 5.0,
        "memory_gib": 100.0,
        "parts": None,
        "checkpoint": None,
    }
    found = document(config, measured, None)
    flops = 10471 * flops_per_token(LLAMA_8B, 4096)
    assert found["tokens_per_s_per_device"] == pytest.approx(10471)
    assert found["mfu"] == found["hfu"] == pytest.approx(flops / 989e12)
    assert found["mfu_of_measured"] == pytest.approx(flops / 700e12)
    full = replace(config.parallel, activation_checkpointing="full")
    plan = {"mfu": 0.3, "hfu": 0.4, "memory": {"allocated_gib": 90.0}, "step_time_s": 0.4}
    plan |= {"tokens_per_s": 1.0, "hardware": {"device": "h200"}}
    found = document(replace(config, parallel=full), measured, plan)
    assert found["hfu"] == pytest.approx(found["mfu"] * 4 / 3)
    assert document(replace(config, parallel=full), measured, None)["hfu"] is None

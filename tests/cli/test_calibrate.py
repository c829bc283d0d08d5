"""`plan --calibrate` from real runs on this machine, and from none."""

from __future__ import annotations

import io
import json
import math
from contextlib import redirect_stdout
from dataclasses import replace
from pathlib import Path

import pytest

from nanoscale.cli.main import run as nanoscale
from nanoscale.config.composing import frozen
from nanoscale.config.schema import Scheduler, Train
from nanoscale.runs.directory import write_json
from tests.support.jobs import SHAPE, make_config, make_run, read_metrics, train, write_tokens

SEQ_LEN = 128
FAST = ("cluster=cpu", "cluster.peak_tflops=10", "cluster.memory_gbs=1000")
"""Far more than a core of any machine has."""
TRUE = ("cluster=cpu", "cluster.peak_tflops=0.04", "cluster.memory_gbs=6")
"""The machine of the runs: their step times are its plan's, since a busy machine measures others."""


def config_of(folder: Path):
    model = replace(SHAPE, layers=2, hidden=128, head_dim=16, ffn=256, vocab=320)
    model = replace(model, max_seq_len=SEQ_LEN)
    config = make_config(folder, model=model, precision="fp32")
    sizes = Train(steps=9, global_batch=4, micro_batch=4, seq_len=SEQ_LEN, seed=3, log_every=1)
    return replace(config, train=sizes, scheduler=Scheduler(name="constant"))


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Runs of three shapes with the step times of the machine TRUE, in a folder that has nothing else."""
    folder = tmp_path_factory.mktemp("runs")
    write_tokens(folder, 4 * SEQ_LEN)
    for name, shape in {"a": {}, "b": {"vocab": 2048}, "c": {"layers": 4}}.items():
        config = config_of(folder)
        config = replace(config, model=replace(config.model, **shape))
        run = make_run(config, name)
        train(run, config)
        seconds = step_time(run.config, *TRUE)
        records = [record | {"step_time_s": seconds} for record in read_metrics(run)]
        run.metrics.write_text("".join(f"{json.dumps(record)}\n" for record in records))
    return folder


def step_time(config: Path, *words: str) -> float:
    """Return the planned seconds of a step."""
    printed = io.StringIO()
    with redirect_stdout(printed):
        assert nanoscale(["plan", "--config", str(config), *words, "--json"]) == 0
    return float(json.loads(printed.getvalue())["step_time_s"])


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def told(capsys, *words):
    assert nanoscale(["plan", *words, "--json"]) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    return json.loads(captured.out)


def refused(capsys, *words):
    assert nanoscale(["plan", "--calibrate", *words]) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and "Traceback" not in captured.err
    assert not list(Path().iterdir())
    return captured.err


@pytest.mark.slow
def test_what_two_runs_teach_holds_for_a_third(trained, capsys):
    """The machine is described as two hundred times too fast. What is learned must take off five sixths of the
    orders of magnitude by which the plan of another shape is off."""
    runs = [str(trained / name) for name in "ab"]
    learned = told(capsys, "--calibrate", *runs, *FAST)
    for run in learned["runs"]:
        assert abs(math.log1p(run["after_error"])) < abs(math.log1p(run["before_error"])) / 6
    other = told(capsys, "--calibrate", str(trained / "c"), *FAST, "--write", "other.json")
    config = trained / "c" / "config.yaml"
    before = step_time(config, *FAST)
    after = step_time(config, *FAST, learned["override"])
    seen = other["runs"][0]["measured_s"]
    assert before == pytest.approx(other["runs"][0]["before_s"])
    assert before < seen / 4
    assert abs(math.log(after / seen)) < abs(math.log(before / seen)) / 6


def test_the_file_is_what_was_told(trained, capsys):
    document = told(capsys, "--calibrate", str(trained / "a"), "--write", "mine.json")
    assert json.loads(Path("mine.json").read_text()) == document
    assert document["device"] == "cpu" and document["runs"][0]["steps"] == 6
    assert document["runs"][0]["after_error"] == pytest.approx(0, abs=0.01)
    assert nanoscale(["plan", "--calibrate", str(trained / "a")]) == 0
    assert nanoscale(["plan", "--calibrate", str(trained / "a")]) == 0  # its own file is replaced
    Path("mine.json").write_text("[1]")
    assert nanoscale(["plan", "--calibrate", str(trained / "a"), "--write", "mine.json"]) == 2
    assert Path("mine.json").read_text() == "[1]"
    shown = capsys.readouterr().out
    assert f"type  cluster.efficiency={Path('efficiency-cpu.json').absolute()}" in shown
    assert "of the assumed speed" in shown


def test_an_earlier_calibration_is_not_the_ground_of_another(trained, capsys, tmp_path):
    first = told(capsys, "--calibrate", str(trained / "a"))
    config = frozen.load(trained / "a" / "config.yaml")
    cluster = replace(config.cluster, efficiency=str(Path("efficiency-cpu.json").absolute()))
    again = make_run(
        replace(config, cluster=cluster, run=replace(config.run, root=str(tmp_path))), "again"
    )
    again.metrics.write_bytes((trained / "a" / "metrics.jsonl").read_bytes())
    second = told(capsys, "--calibrate", str(again.path))
    assert second["efficiency"] == pytest.approx(first["efficiency"])


def test_a_file_of_another_device_is_refused(trained, capsys):
    told(capsys, "--calibrate", str(trained / "a"))
    words = ["recipe=llama-8b", "cluster=h100-sxm", "cluster.efficiency=efficiency-cpu.json"]
    assert nanoscale(["plan", *words]) == 2
    assert "learned on cpu, and the device is h100-sxm" in capsys.readouterr().err


def test_runs_that_teach_nothing_are_each_named(trained, capsys):
    good = str(trained / "a")
    empty = make_run(config_of(trained), "empty")
    short = make_run(config_of(trained), "short")
    lines = (trained / "a" / "metrics.jsonl").read_text().splitlines(keepends=True)
    short.metrics.write_text("".join(lines[:7]))
    config = config_of(trained)
    gpu = make_run(replace(config, launcher=replace(config.launcher, device="cuda")), "gpu")
    gpu.metrics.write_text("".join(lines))
    write_json(gpu.environment, {"gpus": ["NVIDIA H100 80GB HBM3"]})
    strange = make_run(replace(config, launcher=replace(config.launcher, device="cuda")), "strange")
    strange.metrics.write_text("".join(lines))
    write_json(strange.environment, {"gpus": ["Voodoo 3"]})
    message = refused(capsys, good, *(str(run.path) for run in (empty, short, gpu, strange)))
    assert "empty: has no metrics.jsonl" in message
    assert "short: has 4 steps" in message
    assert "gpu: ran on h100-sxm, not on cpu" in message
    assert "strange: ran on Voodoo 3, which is not one known device" in message
    assert "a: " not in message.replace("Voodoo 3", "")
    assert "not on h100-sxm" in refused(capsys, good, "cluster=h100-sxm")


def test_bad_requests(trained, capsys):
    assert "needs runs" in refused(capsys, "cluster=cpu")
    assert "train.steps=3 cannot be given" in refused(capsys, str(trained / "a"), "train.steps=3")
    assert "alone" in refused(capsys, str(trained / "a"), "--search")
    assert "no run 'nowhere'" in refused(capsys, "nowhere")

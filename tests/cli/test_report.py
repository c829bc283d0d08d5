"""`runs report`: the document, the lines and the page, from run directories alone."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from nanoscale.cli.main import run as nanoscale
from nanoscale.config.composing.compose import compose
from nanoscale.config.composing.frozen import dump, load
from nanoscale.config.rules import Devices, check
from nanoscale.plan.predict import predict
from nanoscale.runs import events, failure, status
from nanoscale.runs.directory import RunDirectory, write_json
from nanoscale.runs.failure import RankFailure
from nanoscale.view.blocks import Report, Table, page
from nanoscale.view.plan.prediction import document as plan_document
from nanoscale.view.run.run_report import MOST_POINTS, document, run_report, thinned
from tests.support.runs import create_run


def make(name="r", state="completed", words=()):
    words = ["recipe=debug", "cluster=cpu", "train.steps=40", f"run.name={name}", *words]
    composed = compose(words)
    run = create_run(Path("runs"), name)
    config = check(composed, Devices("cpu", 2))
    run.config.write_text(dump(config, composed.config))
    status.write(run, status.Status("prepared", 0, 100.0).starting(1).ending(state, 0))
    write_json(run.plan, plan_document(predict(config)))
    return run


def log(run, steps, **figures):
    with run.metrics.open("a") as file:
        for step in steps:
            record = {
                "step": step,
                "loss": 6.0 - step / 10,
                "grad_norm": 1.0,
                "lr": 1e-3,
                "tokens": 512 * step,
                "step_time_s": 0.5,
                "tokens_per_s": 1024.0,
                "mfu": None,
                "memory_gib": 0.3,
                "time": 100.0 + step,
            }
            file.write(json.dumps(record | figures) + "\n")


def attempt(run, number, after=0):
    events.append(run, "attempt", "", attempt=number, world_size=1)
    if after:
        events.append(run, "resumed", "", step=after)


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def shown(capsys, *words):
    assert nanoscale(["runs", "report", *words]) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    return captured.out


def test_prediction_beside_measurement(capsys):
    run = make()
    attempt(run, 1)
    log(run, range(1, 3), step_time_s=9.0)  # these do not count
    log(run, range(3, 41))
    about = json.loads(shown(capsys, "r", "--json"))
    plan = json.loads(run.plan.read_text())
    rows = {row["what"]: row for row in about["against_plan"]}
    assert rows["step time"]["measured"] == 0.5
    assert rows["step time"]["error"] == pytest.approx(0.5 / plan["step_time_s"] - 1)
    tokens = 8 * 64  # of a step: the recipe's global batch and sequence
    assert rows["tokens/s"]["measured"] == pytest.approx(tokens / 0.5)
    assert rows["memory allocated"]["measured"] is None  # a CPU's figure is of the whole process
    assert rows["memory of a process"]["measured"] == 0.3
    text = shown(capsys, "r")
    assert f"{plan['tokens_per_s']:,.0f}" in text and f"{rows['tokens/s']['error']:+.1%}" in text
    assert "completed after step 40 of 40" in text and "\x1b" not in text


def test_the_page_needs_nothing_else_and_has_the_curves(capsys):
    run = make()
    attempt(run, 1)
    log(run, range(1, 21))
    log(run, [30], loss=None, grad_norm=None)
    attempt(run, 2, after=30)
    log(run, range(31, 41), eval_loss=4.0)
    run.checkpoint(40).mkdir()
    shown(capsys, "r")
    page = run.report.read_text()
    addresses = set(re.findall(r"https?://[^\"' <]+", page))
    assert addresses == {"http://www.w3.org/2000/svg"}
    assert "<script" not in page and "src=" not in page
    assert page.count("<svg") == page.count("</svg>") == 4
    loss = page[page.index("<svg") : page.index("</svg>")]
    assert 'class="bad"' in loss and "step 30: not finite" in loss
    assert loss.count("<polyline") == 3  # before and after that step, and the evaluations
    assert 'class="start"' in loss and "evaluation" in loss
    assert "nan" not in page.lower().replace("nanoscale", "")


def test_a_failure_is_told(capsys):
    run = make(state="failed")
    log(run, [1, 2])
    failure.write(
        run, failure.digest(run, 1, [RankFailure("ended", 1, 1, "h", 1.0, exit_code=-9)], {})
    )
    text = shown(capsys, "r")
    assert "failed after step 2 of 40" in text and "rank 1 on h: " in text
    assert "rank 1 on h: " in run.report.read_text()


def test_a_plan_of_another_layout_says_nothing(capsys):
    run = make()
    log(run, range(1, 41))
    assert document(run)["against_plan"]
    plan = json.loads(run.plan.read_text())
    write_json(run.plan, plan | {"layout": plan["layout"] | {"dp": 2}})
    assert document(run)["against_plan"] == []
    assert "There is no plan of this layout" in (shown(capsys, "r"), run.report.read_text())[1]


def test_a_page_that_cannot_be_written_is_put_elsewhere_as_advised(capsys):
    run = make()
    log(run, range(1, 41))
    run.report.mkdir()
    assert nanoscale(["runs", "report", "r"]) == 0
    assert "choose another file with --html FILE" in capsys.readouterr().err
    assert nanoscale(["runs", "report", "r", "--html", "elsewhere.html"]) == 0
    assert Path("elsewhere.html").is_file()


def test_a_run_that_never_began_and_a_damaged_one(capsys):
    run = make(state="prepared")
    assert "prepared after step 0 of 40" in shown(capsys, "r")
    assert "<svg" not in run.report.read_text()
    run.config.write_text("train: [")
    assert nanoscale(["runs", "report", "r"]) == 2
    assert "config.yaml" in capsys.readouterr().err


def test_the_page_goes_where_it_is_told(capsys):
    run = make()
    log(run, [1])
    shown(capsys, "r", "--html", "there.html")
    assert Path("there.html").exists() and not run.report.exists()
    assert nanoscale(["runs", "report", "r", "--html", "no/there.html"]) == 2
    assert "folder that exists" in capsys.readouterr().err


def test_no_spike_is_lost_where_curves_are_thinned():
    points = [(step, 1.0) for step in range(10_000)]
    points[7777] = (7777, 50.0)
    points[3333] = (3333, None)
    few = thinned(points)
    assert len(few) <= MOST_POINTS + 2
    assert points[7777] in few and points[3333] in few and few[0] == points[0]
    assert few[-1] == points[-1] and few == sorted(few, key=lambda point: point[0])


def test_the_predicted_speed_is_drawn_where_its_layout_trained(capsys):
    run = make()
    attempt(run, 1)
    log(run, range(1, 21))
    run.attempt_config(1).write_text(run.config.read_text())
    attempt(run, 2, after=20)
    log(run, range(21, 41))
    shown(capsys, "r", "--html", "page.html")
    speed = Path("page.html").read_text().partition("tokens/s by step")[2].partition("</svg>")[0]
    level = re.search(r'<line x1="([\d.]+)"[^>]*x2="([\d.]+)"[^>]*class="level"', speed)
    border = re.search(r'<line x1="([\d.]+)"[^>]*class="start"', speed)
    assert level and border and level[1] == border[1] != level[2]


@pytest.mark.slow
@pytest.mark.usefixtures("forked_ranks")
def test_training_leaves_a_report_and_resuming_plans_again(capsys):
    words = ["recipe=debug", "model.layers=1", "train.steps=2", "train.log_every=1", "logger=none"]
    words += ["launcher.device=cpu", "launcher.threads=1", "run.name=real"]
    assert nanoscale(["train", *words]) == 0
    run = RunDirectory(Path("runs/real").absolute())
    assert f"report      {run.report}" in capsys.readouterr().out
    assert "completed after step 2 of 2" in run.report.read_text()
    before = json.loads(run.plan.read_text())
    assert nanoscale(["resume", "real", "train.steps=3", "train.micro_batch=2"]) == 0
    assert "completed after step 3 of 3" in run.report.read_text()
    after = json.loads(run.plan.read_text())
    assert after["training"]["steps"] == 3
    assert after["memory"]["allocated_gib"] < before["memory"]["allocated_gib"]
    again = plan_document(predict(load(run.config)))
    for planned in (after, again):
        del planned["checkpoints"]["free_bytes"]  # of a disk that others use, too
    assert after == again


def test_an_attempt_that_trained_nothing_has_no_first_step():
    run = make(state="failed")
    attempt(run, 1, after=550)
    attempt(run, 2)
    events.append(run, "failure", "rank 0 failed")
    attempt(run, 3)
    events.append(run, "running", "training from step 1")
    assert [it["after_step"] for it in document(run)["attempts"]] == [550, None, 0]
    (shown,) = [
        it for it in run_report(document(run)).blocks if getattr(it, "title", "") == "attempts"
    ]
    assert [row[shown.header.index("from step")] for row in shown.rows] == ["551", "", "1"]


def test_bars_have_a_color():
    shares = Table(["", "bar"], [["starts", "██"]], "goodput")
    page_of = page(Report("r", [shares]))
    assert '<td class="n blue">██</td>' in page_of and '<th class="n">bar</th>' in page_of


def test_what_was_noticed_and_the_state_of_the_gpus(capsys):
    run = make()
    attempt(run, 1)
    late = "rank 3 on n5 arrives 41 ms late in every step since step 9, and the others wait"
    hot = "the GPU of rank 1 on n2 is slowed down by heat (91 °C, 650 W, 990 MHz)"
    events.append(run, "straggler", late)
    events.append(run, "health", hot)
    events.append(run, "health", hot)  # again after a resume
    gpus = {"gpu_utilization": 97.0, "gpu_power_w": 640.0, "gpu_temperature_c": 91.0}
    log(run, range(1, 41), mfu=0.4, hfu=0.5, samples_per_s=16.0, gpus_slowed=1.0, **gpus)
    out = " ".join(shown(capsys, "r").split())
    assert out.count(f"noticed: {hot}") == 1 and f"noticed: {late}" in out
    assert "GPUs at the last logged step: 97%, 640 W, 91 °C, 1 slowed down" in out
    rows = {row["what"]: row["measured"] for row in document(run)["against_plan"]}
    assert (rows["MFU"], rows["HFU"], rows["samples/s"]) == (40.0, 50.0, 16.0)

"""The table of `make bench-plan`, from sources whose machines are known."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from statistics import mean

import pytest

from benchmarks.plan import __main__ as bench_plan
from benchmarks.plan import choices, published_memory, published_runs, published_speed, software
from benchmarks.plan.__main__ import held_out, render
from nanoscale.plan.calibration import Observation
from nanoscale.plan.hardware.hardware import Efficiency, hardware_of
from nanoscale.plan.predict import predict
from tests.plan.machines import changed, job, machine, model

ASSUMED = machine("h100-sxm")
SLOWER = changed(ASSUMED, matmul=0.52, attention=0.28, memory=0.696)


def source(true, *lengths):
    shape = replace(model("gpt2"), vocab=50304)  # with aligned rows
    configs = [job(model=shape, seq_len=length, dp=1, micro_batch=8) for length in lengths]
    return [Observation("row", c, ASSUMED, predict(c, true).time.seconds) for c in configs]


@pytest.mark.slow
def test_a_source_is_judged_by_what_the_others_teach():
    observed = {"a, first": source(SLOWER, 512, 1024), "a, second": source(SLOWER, 768)}
    observed["b, third"] = source(ASSUMED, 768)
    found = held_out(observed, "a, second")
    assert (found.assumed.rows, found.same_software.rows, found.any_software.rows) == (1, 2, 3)
    assert found.assumed.worst > 0.15 and abs(found.same_software.errors.worst) < 0.02
    assert found.any_software.errors.worst > 0.02
    observed["a, second"][0] = replace(observed["a, second"][0], seconds=1e9)
    assert held_out(observed, "a, second").same_software.factor == found.same_software.factor


def test_it_is_said_where_calibration_makes_it_worse_or_cannot_be():
    observed = {"a, first": source(SLOWER, 512), "b, second": source(ASSUMED, 768)}
    speeds = [held_out(observed, name) for name in observed]
    text = render(speeds, {})
    assert "worse with b, second: 0.0% as assumed" in text
    assert speeds[0].same_software is None and "nothing to learn from" in text


def test_the_slowdown_by_collectives_is_the_one_that_fits_published_steps(monkeypatch):
    """The rows for fitting have larger errors with 15 % more or less of it."""
    own = Efficiency().overlap
    rows = [row for row in published_speed.read() if published_speed.is_fitted(row)]

    def error(overlap: float) -> float:
        def slowed(config):
            return changed(hardware_of(config), overlap=overlap)

        monkeypatch.setattr(software, "hardware_of", slowed)
        published_runs.compare.cache_clear()
        building = [it.time_error for it in published_runs.compare() if it.half == "building"]
        predicted = published_speed.predict(rows, overlap=overlap / own)
        return mean(map(abs, [*building, *published_speed.errors(rows, predicted)]))

    less, fitted, more = (error(own * factor) for factor in (0.85, 1, 1.15))
    published_runs.compare.cache_clear()
    assert fitted < min(less, more)


def test_the_page_of_errors_is_as_the_planner_is():
    page = Path("docs/planner-errors.md")
    of_2026 = published_runs.compare(published_runs.RUNS_OF_2026)
    assert page.read_text() == published_runs.page(published_runs.compare(), of_2026)


def test_runs_of_2026_that_no_constant_was_fitted_to_are_planned_within_their_bounds():
    checking = [
        one for one in published_runs.compare(published_runs.RUNS_OF_2026) if one.half == "checking"
    ]
    errors = published_runs.grouped(checking, lambda one: one.time_error)
    assert mean(map(abs, errors["all"])) < 0.15
    assert mean(map(abs, errors["family dense"])) < 0.06
    assert mean(map(abs, errors["family experts"])) < 0.17


def test_a_word_behind_a_record_s_name_changes_it():
    found = software.record("megatron-alltoall-overlap")
    assert (found.copies, found.hidden_ep) == ("expert", 0.8)
    assert found.host_s == software.MEGATRON.host_s
    assert found is software.record("megatron-alltoall-overlap")


def test_two_sources_are_compared_and_stored(tmp_path, monkeypatch, capsys):
    names = ("Megatron-LM, SC21", "Megatron-LM, Korthikanti et al.")
    observed = bench_plan.observations()
    assert sum(map(len, observed.values())) == 294
    monkeypatch.setattr(bench_plan, "observations", lambda: {it: observed[it][:2] for it in names})
    monkeypatch.setattr(bench_plan, "RESULTS", tmp_path)
    monkeypatch.setattr("sys.argv", ["benchmarks.plan"])
    bench_plan.main()
    (text,) = tmp_path.glob("*-plan.txt")
    assert text.read_text() == capsys.readouterr().out
    rows = [line for line in text.read_text().splitlines() if line.startswith(names)]
    assert len(rows) == 2 and all("of" in row and "rows" in row for row in rows)


@pytest.mark.parametrize(
    ("module", "rows"), [(published_memory, 49), (published_runs, 55), (published_speed, 294)]
)
def test_a_comparison_prints_every_row(module, rows, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", [module.__name__, "--rows"])
    module.main()
    assert len(capsys.readouterr().out.splitlines()) > rows


def test_the_plan_takes_layouts_that_were_among_the_fastest():
    found = choices.choices()
    assert len(found) >= 22
    slow = [choice.job[0] for choice in found if choice.regret > choices.NEAR]
    # Two dispatchers on EFA, which are planned as equally fast.
    assert [source.partition("@")[0] for source in slow] == ["awslabs/awsome-distributed-ai"]

"""config.yaml compared with the newest checkpoint's configuration: no flipped bit becomes another model."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from nanoscale.checkpoint import configuration, store
from nanoscale.cli.common.request import CommandLine
from nanoscale.cli.jobs.resume import next_request
from nanoscale.cli.main import run as nanoscale
from nanoscale.common.errors import UserError, Violation
from nanoscale.config.composing.compose import compose
from nanoscale.config.composing.frozen import load
from nanoscale.config.rules import Devices, check
from nanoscale.launch.lifecycle.prepare import name_run, new_run, replace_configuration
from nanoscale.launch.request import Request
from nanoscale.runs import fence
from nanoscale.runs.directory import RunDirectory

CPU = Devices("cpu", 1)


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunDirectory:
    """A run with one checkpoint."""
    monkeypatch.chdir(tmp_path)
    composed = compose(["recipe=debug", "run.name=x", "model.rope_scaling.factor=4.0"])
    config = name_run(composed, check(composed, CPU), repeats=False)
    with new_run(Request(composed, config, CPU)) as held:
        fence.begin(held.run, 1)
        save(held.run, 5)
        return held.run


def save(run: RunDirectory, step: int, *, recorded: bool = True) -> None:
    values = {configuration.IN_MANIFEST: configuration.values(load(run.config))} if recorded else {}
    staging = store.staging_path(run.workspace(1), step)
    staging.mkdir()
    store.publish(staging, {"step": step, "tensors": {}, **values}, {})


def edit(run: RunDirectory, before: str, after: str) -> None:
    text = run.config.read_text()
    assert before in text
    run.config.write_text(text.replace(before, after, 1))


def further(run: RunDirectory, *overrides: str) -> None:
    """Do the first part of `resume` with these overrides."""
    composed = compose(overrides, config_file=run.config)
    request = Request(composed, check(composed, CPU), CPU, repeats=run.config)
    replace_configuration(run, request, 1)


def refused(run: RunDirectory, *overrides: str) -> list[Violation]:
    """Return the violations that `resume` reports with these overrides before it examines any machine."""
    try:
        next_request(run, CommandLine(overrides, run.config, trust=True))
    except UserError as error:
        return error.violations
    return []


def test_a_flipped_value_is_refused_with_both_overrides(
    run: RunDirectory, capsys: pytest.CaptureFixture[str]
) -> None:
    edit(run, "rope_theta: 10000.0", "rope_theta: 10100.0")
    assert nanoscale(["resume", "x", "optimizer.lr=1e-4"]) == 2
    said = capsys.readouterr().err
    assert "model.rope_theta=10100.0: was 10000.0 when step-00000005 was saved" in said
    assert re.search(r"from: runs/x/config.yaml:\d+", said)
    assert "type instead: model.rope_theta=10000.0 or model.rope_theta=10100.0" in said
    for accepted in ("model.rope_theta=10000.0", "model.rope_theta=10100.0"):
        assert nanoscale(["resume", "x", "--dry-run", accepted]) == 0, accepted
    assert refused(run, "model.rope_theta=10200.0")  # which is neither


@pytest.mark.parametrize(
    ("before", "after", "key"),
    [
        ("factor: 4.0", "factor: 4.5", "model.rope_scaling.factor"),
        ("sample_prompt: ''", "sample_prompt: it's, $x", "train.sample_prompt"),
        ("  lr: 0.003", "  lr: 0.103", "optimizer.lr"),
    ],
)
def test_the_overrides_that_are_named_are_accepted(
    run: RunDirectory, before: str, after: str, key: str
) -> None:
    edit(run, before, after)
    (violation,) = refused(run)
    assert violation.key == key
    for suggestion in violation.suggestions:
        assert refused(run, *shlex.split(suggestion)) == [], suggestion


def test_a_section_that_is_gone_is_one_difference(run: RunDirectory) -> None:
    text = run.config.read_text()
    run.config.write_text(re.sub(r"rope_scaling:\n(    .*\n)+", "rope_scaling: null\n", text))
    (violation,) = refused(run)
    assert violation.key == "model.rope_scaling" and "'factor': 4.0" in violation.message
    for suggestion in violation.suggestions:
        assert refused(run, *shlex.split(suggestion)) == [], suggestion


def test_where_a_run_lies_and_what_it_writes_may_be_edited(run: RunDirectory) -> None:
    edit(run, "  preflight: true", "  preflight: false")
    edit(run, "  keep_last: 2", "  keep_last: 5")
    edit(run, "  max_restarts: 0", "  max_restarts: 3")
    assert refused(run) == []


def test_what_an_override_changed_stays_explained(run: RunDirectory) -> None:
    """Also if no checkpoint was saved since, after more overrides, and if it was edited back."""
    further(run, "optimizer.lr=1e-4")
    assert refused(run) == []
    further(run, "train.steps=50", "train.micro_batch=2")
    assert refused(run) == []
    save(run, 6)
    further(run, "optimizer.lr=2e-4")
    assert refused(run) == []
    edit(run, "lr: 0.0002", "lr: 0.0001")  # as step 6 was saved
    assert refused(run) == []
    edit(run, "lr: 0.0001", "lr: 0.5")
    assert refused(run)[0].suggestions == ("optimizer.lr=0.0001", "optimizer.lr=0.5")
    further(run, "optimizer.lr=0.5")  # accepted, once and for all
    assert refused(run) == []


def test_an_older_checkpoint_gives_one_line(
    run: RunDirectory, capsys: pytest.CaptureFixture[str]
) -> None:
    save(run, 6, recorded=False)
    edit(run, "rope_theta: 10000.0", "rope_theta: 10100.0")
    assert refused(run) == []
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("step-00000006 was saved by an earlier version")


def test_keys_of_other_versions_are_not_compared(run: RunDirectory) -> None:
    values = configuration.values(load(run.config))
    del values["train.eval_every"]
    values["train.of_a_later_version"] = 5
    values["model.rope_scaling"]["of_a_later_version"] = 5
    staging = store.staging_path(run.workspace(1), 7)
    staging.mkdir()
    store.publish(staging, {"step": 7, configuration.IN_MANIFEST: values}, {})
    assert refused(run) == []


@pytest.mark.parametrize(
    "words", [["generate", "x", "--prompt", "a"], ["checkpoints", "export", "x", "--format", "hf"]]
)
def test_no_command_makes_another_model_of_a_checkpoint(
    run: RunDirectory, capsys: pytest.CaptureFixture[str], words: list[str]
) -> None:
    edit(run, "rope_theta: 10000.0", "rope_theta: 10100.0")
    assert nanoscale(words) == 2
    said = capsys.readouterr().err
    assert "was 10000.0 when step-00000005 was saved" in said
    assert f"correct it in {run.config}: rope_theta: 10000.0" in said

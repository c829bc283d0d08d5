"""Run folders of earlier versions: each later version uses them, in every layout.

`earlier/DATE` is a run of three steps in one process, in fp64, as the version of that day wrote it.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from nanoscale.cli.main import run as nanoscale
from nanoscale.common.errors import UserError
from nanoscale.config.composing.frozen import load
from nanoscale.runs import metrics
from nanoscale.runs.directory import RunDirectory
from tests.support.rows import exhaustive

pytestmark = pytest.mark.usefixtures("forked_ranks")
EARLIER = Path(__file__).parent / "earlier"
VERSIONS = sorted(it.name for it in EARLIER.iterdir())
LOSSES = [
    3.4616777147251043, 3.465580161503753, 3.4684066947765326, 3.483115563578599, 3.4537076793673087,
    3.4403738782211324,
]  # fmt: skip
"""The losses of six steps, as each of these versions computed them without an interruption."""
LAYOUTS = ("parallel.tp=2 launcher.devices=2", "zero=stage3 launcher.devices=2", "")
ROWS = [(version, layout) for version in VERSIONS for layout in LAYOUTS]


@pytest.fixture
def run(tmp_path: Path, request: pytest.FixtureRequest) -> RunDirectory:
    version = getattr(request, "param", VERSIONS[0])
    copied = RunDirectory(shutil.copytree(EARLIER / version, tmp_path / version))
    (copied.path / "lock").touch()  # it names the process and the host of the launcher
    return copied


def set_value(run: RunDirectory, before: str, after: str) -> None:
    text = run.config.read_text()
    assert before in text
    run.config.write_text(text.replace(before, after))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("run", "layout"),
    [row if number % 4 == 0 else exhaustive(*row) for number, row in enumerate(ROWS)],
    indirect=["run"],
)
def test_a_run_of_an_earlier_version_is_resumed(run: RunDirectory, layout: str) -> None:
    assert nanoscale(["resume", str(run.path), "train.steps=6", *layout.split()]) == 0
    losses = [record["loss"] for record in metrics.read(run)]
    assert losses == pytest.approx(LOSSES, rel=1e-9)


@pytest.mark.parametrize("run", VERSIONS, indirect=True)
def test_a_run_of_an_earlier_version_is_shown_and_exported(
    run: RunDirectory, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert nanoscale(["runs", "show", str(run.path)]) == 0
    assert "completed" in capsys.readouterr().out
    export = [
        "checkpoints",
        "export",
        str(run.path),
        "--format",
        "hf",
        "--out",
        str(tmp_path / "hf"),
    ]
    assert nanoscale(export) == 0
    assert json.loads((tmp_path / "hf" / "config.json").read_text())["vocab_size"] == 32


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        ("  pythons: {}", "  pythons: {n1: python3}", "was removed on 2026-11-27: cluster.python"),
        ("  seed: 0", "  seeds: 0", "a newer version of nanoscale may have written the file"),
    ],
)
def test_keys_that_this_version_lacks_are_named(
    run: RunDirectory, before: str, after: str, message: str
) -> None:
    set_value(run, before, after)
    with pytest.raises(UserError) as caught:
        load(run.config)
    (violation,) = caught.value.violations
    assert message in violation.message
    assert ".yaml:" in violation.source


def test_groups_of_blocks_are_recomputed_as_blocks(run: RunDirectory) -> None:
    set_value(run, "activation_checkpointing: none", "activation_checkpointing: sqrt")
    assert load(run.config).parallel.activation_checkpointing == "full"

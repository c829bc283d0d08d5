"""A run in the place of a Hugging Face folder: `model.init_from=RUN`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from nanoscale.common.errors import UserError
from nanoscale.config.composing import frozen
from nanoscale.config.composing.compose import compose
from tests.support.jobs import SHAPE, make_config


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run `first` with a model that no recipe has, in the folder `runs`."""
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "runs" / "first"
    (folder / "checkpoints").mkdir(parents=True)
    config = make_config(tmp_path, model=replace(SHAPE, qk_norm=True, init_from="/gone"))
    (folder / "config.yaml").write_text(frozen.dump(config))
    return folder


@pytest.mark.parametrize("named", ["first", "runs/first", "./runs/first"])
def test_a_run_gives_its_shape_and_its_weights(source: Path, named: str) -> None:
    composed = compose(["recipe=llama-1b", f"model.init_from={named}", "model.max_seq_len=64"])
    wanted = replace(SHAPE, qk_norm=True, max_seq_len=64, init_std=composed.config.model.init_std)
    assert replace(composed.config.model, name=wanted.name) == wanted
    assert composed.config.run.from_run == str(source)
    assert composed.source("run.from_run") == f"model.init_from={named}"


def test_another_shape_and_two_sources_are_refused(source: Path) -> None:
    with pytest.raises(UserError) as caught:
        compose(["recipe=tiny", "model.init_from=first", "model.layers=7"])
    (violation,) = caught.value.violations
    assert violation.suggestions == ("model.layers=2",)
    assert f"{source}/config.yaml" in violation.message
    with pytest.raises(UserError) as caught:
        compose(["recipe=tiny", "model.init_from=first", "run.from_run=other"])
    (violation,) = caught.value.violations
    assert violation.key == "model.init_from" and violation.suggestions
    compose(["recipe=tiny", "model.init_from=first", "run.from_run=other", *violation.suggestions])

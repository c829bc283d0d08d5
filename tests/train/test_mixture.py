"""Several sources through a training: stopped, resumed in another layout, evaluated source by source."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from nanoscale.checkpoint.store import list_checkpoints
from nanoscale.config.schema import Config, DataSource
from tests.support.jobs import (
    SAMPLES,
    SAVED_STEPS,
    SEQ_LEN,
    SHAPE,
    StopBefore,
    assert_same_training,
    make_run,
    never_stopped,
    read_metrics,
    resumed_at,
    saving_config,
    train,
)
from tests.support.token_files import write_indexed
from tests.train.test_loop import plain_eval_loss

SHARES = {"web": 0.7, "code": 0.25, "maths": 0.05}
HELD_OUT = 0.5


def write_source(folder: Path, name: str, samples: int) -> np.ndarray:
    """Write two documents; half of all tokens are held out."""
    seed = list(SHARES).index(name)
    tokens = np.random.default_rng(seed).integers(0, SHAPE.vocab, samples * SEQ_LEN + 1)
    write_indexed(folder / name, np.array_split(tokens, 2))
    return tokens


def mixture(folder: Path, shares: dict[str, float] = SHARES, **changes: object) -> Config:
    config = saving_config(folder, **changes)
    entries = {
        name: DataSource(str(folder / name), weight=7 * share) for name, share in shares.items()
    }
    data = replace(config.data, path=None, mixture=entries, valid_fraction=HELD_OUT)
    return replace(
        config, data=data, train=replace(config.train, eval_every=SAVED_STEPS, eval_samples=SAMPLES)
    )


@pytest.fixture
def tokens(tmp_path: Path) -> dict[str, np.ndarray]:
    return {
        name: write_source(tmp_path, name, n) for name, n in zip(SHARES, (80, 40, 8), strict=True)
    }


@pytest.mark.slow
def test_resumed_in_another_layout(tmp_path: Path, tokens: dict[str, np.ndarray]) -> None:
    whole = never_stopped(tmp_path, mixture(tmp_path))
    run = make_run(mixture(tmp_path))
    train(run, mixture(tmp_path, dp=2, stage=3), StopBefore(3))
    with pytest.raises(RuntimeError, match="same sources and weights"):
        train(run, mixture(tmp_path, SHARES | {"code": 0.5}))
    train(run, mixture(tmp_path, parallel={"pp": 2}), StopBefore(6, first=4))
    train(run, mixture(tmp_path))
    assert resumed_at(run) == [3, 6]
    assert_same_training(run, whole)
    shown = next(record for record in read_metrics(whole) if record["step"] == SAVED_STEPS)
    assert f"eval_loss/{next(iter(SHARES))}" in shown


@pytest.mark.slow
def test_each_source_is_evaluated(tmp_path: Path, tokens: dict[str, np.ndarray]) -> None:
    run = make_run(mixture(tmp_path, dp=2))
    train(run, mixture(tmp_path, dp=2))
    found = read_metrics(run)[-1]
    expected = {
        name: plain_eval_loss(
            list_checkpoints(run.checkpoints)[-1].path,
            tokens[name][len(tokens[name]) // 2 :],
            max(1, round(share * SAMPLES)),
        )
        for name, share in SHARES.items()
    }
    assert {name: found[f"eval_loss/{name}"] for name in SHARES} == pytest.approx(
        expected, rel=1e-12
    )
    mean = sum(SHARES[name] * loss for name, loss in expected.items())
    assert found["eval_loss"] == pytest.approx(mean, rel=1e-12)

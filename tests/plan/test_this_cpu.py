"""Plans on this machine's CPU, before and after its speed was measured."""

from __future__ import annotations

from pathlib import Path

import pytest

from nanoscale.common.devices import Devices
from nanoscale.config.composing.compose import compose
from nanoscale.config.hardware import data_sheets
from nanoscale.config.rules import check
from nanoscale.config.schema import Config
from nanoscale.launch.lifecycle.examination import measure_cpu
from nanoscale.measure.this_cpu import fastest_step
from nanoscale.plan.hardware.hardware import hardware_of
from nanoscale.plan.predict import predict
from nanoscale.view.plan.prediction import outcome


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NANOSCALE_CACHE", str(tmp_path))


def resolved(*words: str) -> Config:
    words = ("launcher.device=cpu", "launcher.threads=2", *words)
    return check(compose(list(words)), Devices("cpu", 2, cores=2))


def test_a_plan_is_rough_until_the_speed_is_measured():
    config = resolved("recipe=tiny")
    rough = predict(config)
    assert any(line.startswith("rough: ") for line in outcome(rough))
    data_sheets.keep_speed(2.0)
    measured = predict(config)
    assert not any(line.startswith("rough: ") for line in outcome(measured))
    assert measured.time.seconds == pytest.approx(rough.time.seconds / 2, rel=0.1)


def test_keys_of_the_user_win_over_the_measured_speed():
    data_sheets.keep_speed(2.0)
    own = resolved("recipe=tiny", "cluster.memory_gbs=33")
    assert hardware_of(own).memory_bandwidth == 33e9
    assert hardware_of(resolved("recipe=tiny")).memory_bandwidth == 32e9


def test_ranks_that_share_cores_are_as_slow_as_their_share(monkeypatch: pytest.MonkeyPatch):
    def speed(ranks: int, cores: int) -> tuple[float, float]:
        monkeypatch.setattr(data_sheets, "cores", lambda: cores)
        words = ("parallel=dp", f"launcher.devices={ranks}", "launcher.threads=1")
        found = hardware_of(resolved("recipe=tiny", *words))
        return found.peaks["fp32"], found.memory_bandwidth

    (peak, memory), alone = speed(4, 4), speed(1, 1)
    assert (peak, memory) == alone == speed(4, 16)
    assert speed(4, 2) == (peak / 2, memory / 2)


@pytest.mark.parametrize(
    "content",
    [
        *("", "[]", '{"cpu": "another", "speed": 2}', '{"cpu": 1}', '{"speed": "fast"}'),
        '{"speed": 2}',
    ],
)
def test_a_speed_that_is_damaged_or_another_cpu_s_is_ignored(content: str, tmp_path: Path):
    (tmp_path / "cpu-speed.json").write_text(content)
    assert data_sheets.known_speed() is None


@pytest.mark.slow
def test_a_step_is_measured_with_the_model_itself():
    assert fastest_step(resolved("recipe=debug", "train.global_batch=2")) > 0


@pytest.mark.exhaustive
def test_the_speed_is_measured_whatever_the_users_files_say(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "recipes").mkdir()
    (tmp_path / "recipes/tiny.yaml").write_text("train: {stepz: 1}")
    (tmp_path / "sitecustomize.py").write_text("print('a greeting')")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr("os.getloadavg", lambda: (0.0, 0.0, 0.0))
    measure_cpu(lambda _: None)
    assert data_sheets.known_speed() is not None


def test_one_rank_that_computes_with_its_weights_copies_nothing():
    alone = predict(resolved("recipe=tiny")).time.parts
    assert alone.dp == 0

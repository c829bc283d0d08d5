"""The loop besides updates: evaluating, logging, keeping checkpoints, stopping, giving up."""

from __future__ import annotations

import gc
import json
import os
import threading
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.nn import functional as F

from nanoscale.backends.native import NativeEngine
from nanoscale.checkpoint import sharded
from nanoscale.checkpoint.store import find_damage, list_checkpoints
from nanoscale.config.schema import Checkpoint, Config, Data, Optimizer, StopWhen
from nanoscale.metrics import meter
from nanoscale.metrics.sinks import JsonLines
from nanoscale.models.transformer import Transformer
from nanoscale.runs import events
from nanoscale.runs.directory import RunDirectory
from nanoscale.runs.position import NOW
from nanoscale.runs.rank_context import StopFlag
from nanoscale.train.agreement import Agreement
from nanoscale.train.loop import Training
from tests.support.jobs import (
    SEQ_LEN,
    SHAPE,
    StopBefore,
    make_config,
    make_run,
    train,
    train_rank,
    write_tokens,
)
from tests.support.ranks import run_ranks
from tests.support.rows import exhaustive

STEPS = 10
EVAL_SAMPLES = 7  # no multiple of dp or of the micro batch: the last batches are padded
SPLIT = {"samples": 20, "valid_fraction": 0.4}  # 321 tokens, of them 129 for validation


@pytest.fixture(autouse=True)
def tokens(tmp_path: Path) -> np.ndarray:
    return write_tokens(tmp_path, samples=SPLIT["samples"])


def config_for(folder: Path, *, every: dict[str, int], **changes: Any) -> Config:
    """Ten steps with these changes to the training's settings."""
    checkpoint = changes.pop("checkpoint", Checkpoint(every=0, at_end=False))
    config = make_config(folder, checkpoint=checkpoint, **changes)
    settings = {"steps": STEPS, "eval_samples": EVAL_SAMPLES} | every
    data = Data(
        source="megatron", path=str(folder / "tokens"), valid_fraction=SPLIT["valid_fraction"]
    )
    return replace(config, data=data, train=replace(config.train, **settings))


def refuse(constant: str) -> None:
    raise AssertionError(f"{constant} is not JSON")


def records(run: RunDirectory) -> list[dict[str, Any]]:
    lines = run.metrics.read_text().splitlines()
    return [json.loads(line, parse_constant=refuse) for line in lines]


def figures(run: RunDirectory) -> np.ndarray:
    return np.array([[record["loss"], record["grad_norm"]] for record in records(run)])


def trained(config: Config, name: str) -> RunDirectory:
    run = make_run(config, name)
    assert train(run, config) == ["completed"] * config.parallel.dp
    return run


def steps_kept(run: RunDirectory) -> list[int]:
    return [checkpoint.step for checkpoint in list_checkpoints(run.checkpoints)]


def plain_eval_loss(checkpoint: Path, held_out: np.ndarray, samples: int) -> float:
    """Return the mean loss of the first samples in a plain model with the checkpoint's weights."""
    model = Transformer(SHAPE).double()
    dcp.load(
        {f"model.{n}": p.detach() for n, p in model.named_parameters()},
        checkpoint_id=checkpoint,
        no_dist=True,
    )
    tokens = torch.tensor(held_out)
    losses = []
    for sample in range(samples):
        window = tokens[sample * SEQ_LEN : (sample + 1) * SEQ_LEN + 1]
        losses.append(F.cross_entropy(model(window[None, :-1])[0], window[1:]).item())
    return float(np.mean(losses))


@pytest.fixture(scope="module")
def without_evaluation(tmp_path_factory: pytest.TempPathFactory) -> np.ndarray:
    folder = tmp_path_factory.mktemp("plain")
    write_tokens(folder, samples=SPLIT["samples"])
    return figures(trained(config_for(folder, every={"eval_every": 0}), "run"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dp", "stage", "dp_replicate"),
    [(1, 0, 1), (2, 3, 1), exhaustive(2, 0, 1), exhaustive(4, 2, 2)],
)
def test_evaluation_is_that_of_the_plain_model_and_changes_nothing(
    tmp_path: Path,
    tokens: np.ndarray,
    without_evaluation: np.ndarray,
    dp: int,
    stage: int,
    dp_replicate: int,
) -> None:
    config = config_for(
        tmp_path,
        every={"eval_every": 3},
        dp=dp,
        stage=stage,
        dp_replicate=dp_replicate,
        checkpoint=Checkpoint(every=3, keep_last=None, at_end=False),
    )
    run = trained(config, "run")
    stored = list_checkpoints(run.checkpoints)
    expected = {c.step: plain_eval_loss(c.path, tokens[-129:], EVAL_SAMPLES) for c in stored}
    found = {r["step"]: r["eval_loss"] for r in records(run) if "eval_loss" in r}
    assert list(found) == [3, 6, 9] and found == pytest.approx(expected, rel=1e-12)
    np.testing.assert_allclose(figures(run), without_evaluation, rtol=1e-9)


def test_logged_evaluated_and_kept_steps(tmp_path: Path) -> None:
    kept = Checkpoint(every=2, keep_last=1, keep_every=4, at_end=False)
    config = config_for(tmp_path, every={"log_every": 3, "eval_every": 4}, checkpoint=kept)
    run = trained(config, "run")
    found = records(run)
    assert [record["step"] for record in found] == [1, 3, 4, 6, 8, 9, 10]
    assert [record["step"] for record in found if "eval_loss" in record] == [4, 8]
    assert steps_kept(run) == [4, 8, 10]


def test_the_first_and_the_last_step_are_logged_whatever_the_cadence(tmp_path: Path) -> None:
    kept = Checkpoint(every=3, keep_last=2, keep_every=None, at_end=True)
    config = config_for(tmp_path, every={"log_every": 4, "eval_every": 0}, checkpoint=kept)
    run = trained(config, "run")
    assert [record["step"] for record in records(run)] == [1, 4, 8, 10]
    assert steps_kept(run) == [9, 10]


def test_the_last_step_before_a_stop_is_logged_whatever_the_cadence(tmp_path: Path) -> None:
    config = config_for(tmp_path, every={"log_every": 4})
    run = make_run(config)
    assert train(run, config, StopBefore(7)) == ["stopped"]
    assert [record["step"] for record in records(run)] == [1, 4, 6]
    assert train(run, config, StopBefore(1)) == ["stopped"]  # before a step: nothing to log
    assert train(run, config) == ["completed"]
    assert [record["step"] for record in records(run)] == [1, 4, 6, 8, 10]
    trained(config_for(tmp_path, every={"log_every": 2}), "all")
    same = figures(RunDirectory(run.path.with_name("all")))[[0, 2, 3, 4, 5]]  # without step 2
    assert np.array_equal(figures(run), same)


def train_with_figure(rank: int, path: Path, stop: StopFlag) -> str:
    """Train; a metric needs what only the passes of logged steps compute."""
    accumulate, passes = NativeEngine._accumulate, list[int]()

    def counted(self: NativeEngine, *given: Any) -> Any:
        passes.extend([NOW.step] * self.logged)
        return accumulate(self, *given)

    figures = NativeEngine.figures
    NativeEngine._accumulate = counted  # type: ignore[method-assign]
    NativeEngine.figures = lambda self: figures(self) | {"computed_at": float(passes[-1])}  # type: ignore[method-assign]
    return train_rank(rank, path, stop)


def test_a_metric_is_computed_in_the_passes_of_logged_steps(tmp_path: Path) -> None:
    """The step before a stop is logged as well, and has the metric of the step before."""
    run = make_run(config_for(tmp_path, every={"log_every": 4}))
    assert run_ranks(train_with_figure, 1, run.path, StopBefore(7)) == ["stopped"]
    found = [(record["step"], record["computed_at"]) for record in records(run)]
    assert found == [(1, 1), (4, 4), (6, 4)]


class StopOneBefore(StopBefore):
    """Only rank 1 is asked to stop."""

    @property
    def requested(self) -> bool:  # type: ignore[override]
        raised = StopBefore.requested.fget(self)  # type: ignore[attr-defined]
        return raised and os.environ["RANK"] == "1"


@pytest.mark.slow
def test_one_rank_that_is_asked_stops_all_at_the_same_step(tmp_path: Path) -> None:
    config = config_for(tmp_path, every={}, dp=2, stage=1)
    run = make_run(config)
    assert train(run, config, StopOneBefore(5)) == ["stopped"] * 2
    (only,) = list_checkpoints(run.checkpoints)
    # Asked before step 5, the ranks have agreed before step 6.
    assert only.step == 5 and [record["step"] for record in records(run)] == [1, 2, 3, 4, 5]
    assert find_damage(only.path) == [] and only.manifest["consumed_samples"] == 5 * 8
    assert train(run, config) == ["completed"] * 2


def diverging(folder: Path, checkpoint: Checkpoint, log_every: int, **changes: Any) -> Config:
    """Return a job whose first update moves the weights so far that the second step's gradients are not
    finite."""
    return config_for(
        folder,
        every={"log_every": log_every},
        precision="fp32",
        optimizer=Optimizer(lr=1e30),
        checkpoint=checkpoint,
        **changes,
    )


def test_divergence_ends_the_run_in_strict_json(tmp_path: Path) -> None:
    config = diverging(tmp_path, Checkpoint(every=1), log_every=1)
    run = make_run(config)
    with pytest.raises(RuntimeError, match="NonFiniteError: .*grad_norm is nan.* at step 2"):
        train(run, config)
    assert [(r["step"], r["grad_norm"] is None) for r in records(run)] == [(1, False), (2, True)]
    assert steps_kept(run) == [1]


def test_divergence_ends_every_rank(tmp_path: Path) -> None:
    config = diverging(tmp_path, Checkpoint(every=1), log_every=1, dp=2, stage=2)
    run = make_run(config)
    # A slow rank may learn of it from the connection that the fast one has closed.
    with pytest.raises(RuntimeError, match="NonFiniteError|[Cc]onnection"):
        train(run, config)
    assert records(run)[0]["grad_norm"] > 0
    assert steps_kept(run) == [1]


@pytest.mark.parametrize(
    ("checkpoint", "stop"),
    [(Checkpoint(every=2), None), (Checkpoint(every=0, at_end=False), 3)],
    ids=["every", "at_stop"],
)
def test_a_poisoned_step_is_not_kept_even_where_it_was_not_logged(
    tmp_path: Path, checkpoint: Checkpoint, stop: int | None
) -> None:
    config = diverging(tmp_path, checkpoint, log_every=100)
    run = make_run(config)
    with pytest.raises(RuntimeError, match="NonFiniteError: .*grad_norm is nan at step 2"):
        train(run, config, StopBefore(stop) if stop else None)
    assert steps_kept(run) == []
    (step, norm), *others = [(r["step"], r["grad_norm"]) for r in records(run)]
    assert (step, norm > 0) == (1, True) and others == ([(2, None)] if stop else [])


def fail_beside_a_lost_peer(rank: int, run: RunDirectory) -> None:
    """Fail in step 3, while the checkpoint of step 2 is being written; that and the metrics fail then too."""
    failing = threading.Event()
    advance = Training.advance

    def save(*_: Any) -> None:
        failing.wait(60)
        raise RuntimeError("Connection closed by peer")

    def close(*_: Any) -> None:
        raise RuntimeError("the service of metrics does not answer")

    def fail_in_step_3(training: Training) -> Any:
        if training.progress.step < 2:
            return advance(training)
        failing.set()
        raise ValueError("the cause")

    sharded.save, Training.advance = save, fail_in_step_3  # type: ignore[assignment,method-assign]
    JsonLines.close = close  # type: ignore[method-assign]
    train_rank(rank, run.path, StopFlag())


def test_a_lost_peer_of_a_checkpoint_and_a_failing_sink_hide_no_cause(tmp_path: Path) -> None:
    in_background = Checkpoint(every=2, asynchronous=True)
    run = make_run(config_for(tmp_path, every={}, checkpoint=in_background))
    with pytest.raises(RuntimeError, match=r"ValueError: the cause\s*$"):
        run_ranks(fail_beside_a_lost_peer, 1, run)


def wait_for_another_host(rank: int, run: RunDirectory) -> None:
    """Train on a clock that only the answers of other ranks move, by 3 s each."""
    clock = [0.0]
    stops = Agreement.stops

    def answered(agreement: Agreement, *args: bool) -> bool:
        clock[0] += 3
        return stops(agreement, *args)

    vars(meter)["time"] = SimpleNamespace(perf_counter=lambda: clock[0])
    Agreement.stops = answered  # type: ignore[method-assign]
    train_rank(rank, run.path, StopFlag())


def test_waiting_for_another_host_is_a_part_of_the_step(tmp_path: Path) -> None:
    """On a GPU steps are queued, so the fastest host waits there, while its device computes."""
    run = make_run(config_for(tmp_path, every={"log_every": 5}))
    run_ranks(wait_for_another_host, 1, run)
    assert [record["step_time_s"] for record in records(run)] == [3.0, 3.0, 3.0]


@pytest.mark.slow
def test_the_best_checkpoints_are_kept_beside_the_newest(tmp_path: Path) -> None:
    """The data are noise, so the evaluation loss of a small model rises again; a resume changes nothing."""
    kept = Checkpoint(every=0, keep_last=1, keep_best=2, at_end=True, at_stop=True)
    config = config_for(tmp_path, every={"eval_every": 2}, checkpoint=kept, dp=2)
    run = trained(config, "run")
    losses = {r["step"]: r["eval_loss"] for r in records(run) if "eval_loss" in r}
    best = sorted(losses, key=lambda step: (losses[step], step))[:2]
    assert steps_kept(run) == sorted({*best, 10})
    stored = {c.step: c.manifest for c in list_checkpoints(run.checkpoints)}
    assert all(stored[step]["eval_loss"] == losses[step] for step in best)
    assert [step for _, step in stored[10]["best"]] == best

    interrupted = make_run(config, "interrupted")
    assert train(interrupted, config, StopBefore(6)) == ["stopped"] * 2
    assert train(interrupted, config) == ["completed"] * 2
    assert steps_kept(interrupted) == steps_kept(run)
    again = {c.step: c.manifest for c in list_checkpoints(interrupted.checkpoints)}
    assert again[10]["best"] == stored[10]["best"]


@pytest.mark.slow
def test_a_training_ends_when_its_evaluations_say_so(tmp_path: Path) -> None:
    config = config_for(tmp_path, every={"eval_every": 2}, checkpoint=Checkpoint(at_end=True))
    every = trained(config, "every")
    losses = {r["step"]: r["eval_loss"] for r in records(every) if "eval_loss" in r}

    def limited(name: str, **limits: Any) -> RunDirectory:
        settings = replace(config.train, stop_when=StopWhen(**limits))
        return trained(replace(config, train=settings), name)

    at = next(step for step, loss in losses.items() if loss <= losses[4])
    ended = limited("ended", eval_loss=losses[4])
    assert steps_kept(ended) == [at] and records(ended)[-1]["step"] == at
    (event,) = [event for event in events.read(ended) if event["kind"] == "enough"]
    assert f"the training ends at step {at}" in event["message"]
    patient = limited(
        "patient", patience=2, min_delta=100.0
    )  # the first evaluation counts as lower
    assert records(patient)[-1]["step"] == 6
    assert records(limited("on", patience=9))[-1]["step"] == STEPS


def collections_of(rank: int, path: Path) -> tuple[list[Any], set[bool], bool]:
    """Train, and return the collections by hand, and whether Python collected by itself in steps and after."""
    collected: list[Any] = []
    in_steps: set[bool] = set()
    end = meter.Meter.end

    def end_step(self: meter.Meter, step: int) -> None:
        in_steps.add(gc.isenabled())
        end(self, step)

    gc.collect = lambda *generation: collected.append(generation) or 0  # type: ignore[assignment]
    meter.Meter.end = end_step  # type: ignore[method-assign]
    train_rank(rank, path, StopFlag())
    return collected, in_steps, gc.isenabled()


def test_garbage_is_collected_at_fixed_steps_only(tmp_path: Path) -> None:
    run = make_run(config_for(tmp_path, every={"gc_every": 4}))
    for found in run_ranks(collections_of, 1, run.path):
        assert found == ([(), (1,), (1,)], {False}, True)

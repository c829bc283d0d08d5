"""The life of a played rank: its loop, equal micro batches, resuming, and the history of its memory."""

from __future__ import annotations

import os
import pickle
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from torch.cuda import _memory_viz

from nanoscale.config.resolved import ResolvedConfig
from nanoscale.config.schema import Checkpoint, PhaseSettings
from nanoscale.rehearse import life
from nanoscale.rehearse.document import document
from nanoscale.rehearse.life import of_resuming
from nanoscale.rehearse.played import world
from nanoscale.rehearse.played.cuda import Gpu
from nanoscale.rehearse.played.record import RankRecord
from tests.rehearse.real_ranks import sequence_of
from tests.support import hf_models
from tests.support.measured_memory import MIXTURE, SHAPE, Row, config_of, recomputed, scheduled
from tests.support.ranks import run_ranks
from tests.support.rows import usual_rows

H200 = Gpu("NVIDIA H200", 140 << 30, 8)
TINY, EXPERTS = replace(SHAPE, layers=2), replace(MIXTURE, layers=2)


def play(_: int, config: ResolvedConfig, rank: int = 0, *given: Any, **how: Any) -> RankRecord:
    return life.play(config, rank, 2, H200, *given, **how)


def play_all(number: int, config: ResolvedConfig, *given: Any) -> RankRecord:
    """Play every micro batch."""
    return play(number, config, *given, every_batch=True)


def row(degrees: dict[str, Any], stage: int, **changes: Any) -> ResolvedConfig:
    batch = 6 * degrees.get("dp", 1)
    changes = {"precision": "bf16", "shape": TINY} | changes
    return config_of(Row("", degrees, stage, 1, global_batch=batch, **changes))


def play_large_model_of_transformers(number: int, folder: Path) -> RankRecord:
    world._LARGE = 0  # every parameter counts as large
    return play(number, row({"dp": 2}, 3, shape=hf_models.shape_of(folder)))


@pytest.mark.slow
def test_large_weights_of_transformers_models_are_sharded_when_they_are_loaded(
    tmp_path: Path,
) -> None:
    hf_models.save("cohere", tmp_path)
    (record,) = run_ranks(play_large_model_of_transformers, 1, tmp_path)
    assert record.error == ""
    assert "build" in record.phases and "load" not in record.phases, "loading takes no more memory"


SEVERAL = {
    "one process": row({}, 0),
    "dp 2, stage 0": row({"dp": 2}, 0, precision="fp32"),
    "dp 2, stage 1": row({"dp": 2}, 1),
    "dp 2, stage 2": row({"dp": 2}, 2, precision="fp16"),
    "dp 2, stage 3, full": row({"dp": 2} | recomputed("full"), 3),
    "dp 2, stage 3, offloaded": row({"dp": 2, "offload_activations": True}, 3),
    "tp 2": row({"tp": 2}, 0),
    "cp 2": row({"cp": 2}, 3),
    "experts, ep 2": row({"dp": 2, "ep": 2}, 3, shape=EXPERTS),
}
USUAL = ("experts, ep 2",)


@pytest.mark.slow
@pytest.mark.parametrize("config", usual_rows(SEVERAL, USUAL))
def test_equal_micro_batches_played_once_count_as_all_of_them(config: ResolvedConfig) -> None:
    assert config.accumulation == 6
    (once,), (every,) = run_ranks(play, 1, config), run_ranks(play_all, 1, config)
    assert once.error == every.error == ""
    assert {call.repeat for call in every.calls} <= {1}
    assert once.phases == every.phases
    assert sequence_of(once) == sequence_of(every)
    assert sorted(once.waits) == sorted(every.waits)
    for field in (
        "reserved",
        "host_peak",
        "after",
        "checkpoint",
        "findings",
        "notes",
        "operations",
    ):
        assert getattr(once, field) == getattr(every, field)


PIPELINES = {
    "1f1b, dp 2, stage 3": row(scheduled("1f1b") | {"dp": 2, "virtual_stages": 1}, 3),
    "gpipe, tp 2, full": row(
        scheduled("gpipe") | {"tp": 2, "virtual_stages": 1} | recomputed("full"), 0
    ),
    "interleaved, experts, ep 2": row(
        scheduled("interleaved-1f1b") | {"dp": 2, "ep": 2}, 2, shape=replace(MIXTURE, layers=4)
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("compiled", ["off", "on"])
@pytest.mark.parametrize("config", usual_rows(PIPELINES, ("interleaved, experts, ep 2",)))
def test_repeated_passes_of_a_pipeline_are_as_played_ones(
    config: ResolvedConfig, compiled: str
) -> None:
    config = replace(config, backend=replace(config.backend, compile=compiled))
    last = config.world_size - 1
    (repeated,), (every,) = run_ranks(play, 1, config, last), run_ranks(play_all, 1, config, last)
    is_played_whole = bool(config.model.experts) and compiled == "on"
    assert repeated.error == every.error == ""
    assert (repeated.repeated, every.repeated) == (0 if is_played_whole else 4, 0)
    if is_played_whole:  # two rehearsals of all micro batches free memory in different orders, too
        return
    assert works(repeated) == works(every)
    for field in (
        *("phases", "reserved", "host_peak", "after", "calls", "groups", "operations", "waits"),
        *("checkpoint", "findings", "notes"),
    ):
        assert getattr(repeated, field) == getattr(every, field)
    assert compiled == "on" or repeated.timeline == every.timeline


def works(record: RankRecord) -> Counter[str]:
    """Return the works of the last step, and how often each is computed."""
    events = record.events[slice(*record.step_events)]
    segments = [record.segments[event.of] for event in events if event.what == "work"]
    return Counter(str(record.works[each]) for segment in segments for each in segment)


@pytest.mark.slow
def test_a_whole_life() -> None:
    config = row({"dp": 2}, 3)
    config = replace(
        config,
        train=replace(config.train, eval_every=100),
        checkpoint=Checkpoint(every=50, asynchronous=True),
    )
    (record,) = run_ranks(play, 1, config)
    assert record.error == "" and record.findings == []
    assert {"build", "forward", "backward", "update", "evaluation", "resume"} < {*record.phases}
    assert record.host_peak > record.checkpoint["bytes"]  # the copy that is written
    calls = {(call.kind, call.phase) for call in record.calls}
    assert {("_allgather_base_", "evaluation"), ("allgather_", "log")} < calls


@pytest.mark.slow
def test_the_reference_of_pairs_is_played() -> None:
    config = row({"dp": 2}, 3)
    (record,) = run_ranks(
        play, 1, replace(config, train=replace(config.train, objective="dpo", micro_batch=2))
    )
    assert record.error == ""
    kinds = [call.kind for call in record.calls if call.phase == "reference"]
    assert kinds == ["_allgather_base_"] * 4 + ["allreduce_"]


@pytest.mark.slow
def test_the_loss_of_a_distillation_is_played() -> None:
    config = row({"dp": 2}, 3)
    train = replace(config.train, objective="distill", distill_top_k=64)
    (usual,) = run_ranks(play, 1, config)
    (record,) = run_ranks(play, 1, replace(config, train=train))
    assert record.error == "" and record.operations > usual.operations


def test_what_is_not_played_is_listed_where_the_job_has_it() -> None:
    config = replace(row({}, 0), checkpoint=Checkpoint(every=0, every_minutes=None, at_end=False))
    assert document(config, [RankRecord(0, repeated=3)], {0: 1}, 2, None, 0)["not_played"] == [
        "3 of 6 micro batches of a step, in its middle (--micro-batches all plays them)"
    ]
    config = row({"pp": 2}, 0)
    train = replace(
        config.train, objective="distill", eval_tasks=["a"], eval_every=1, on_spike="rollback",
        statistics_every=3, phases={"a": PhaseSettings(until=1), "b": PhaseSettings()},
    )  # fmt: skip
    config = replace(config, train=train, checkpoint=Checkpoint(every_minutes=1.0))
    assert document(config, [RankRecord(0, repeated=4)], {0: 1}, 2, None, 0)["not_played"] == [
        "the passes of the teacher",
        "evaluation tasks",
        "the writing of checkpoints by torch.distributed.checkpoint",
        "the rollback after a jump of the loss",
        "the statistics of layers",
        "the phases after the first one",
        "4 of 6 micro batches of a step, at its end (--micro-batches all plays them)",
        "1 of 2 ranks, which are of played kinds",
    ]


def play_in(_: int, config: ResolvedConfig, folder: Path) -> RankRecord:
    os.chdir(folder)
    return life.play(config, 0, 2, H200)


@pytest.mark.slow
def test_a_rehearsal_among_checkpoints_deletes_none_and_plays_the_collectives_of_one(
    tmp_path: Path,
) -> None:
    for step in (10, 20, 30):
        (tmp_path / f"step-{step:08d}").mkdir()
    uploads = f"file://{tmp_path}/uploads"
    saving = Checkpoint(every=50, keep_last=1, asynchronous=True, upload=uploads)
    (record,) = run_ranks(play_in, 1, replace(row({"dp": 2}, 3), checkpoint=saving), tmp_path)
    assert record.error == ""
    assert len(list(tmp_path.iterdir())) == 3
    kinds = [call.kind for call in record.calls if call.phase == "checkpoint thread"]
    assert kinds == ["broadcast_", *["allgather_"] * 4]


@pytest.mark.slow
def test_moments_in_8_bits_are_resumed_on_a_gpu() -> None:
    config = row({}, 0, optimizer="adamw8bit")
    (record,) = run_ranks(play, 1, replace(config, checkpoint=Checkpoint(every=50)))
    assert record.error == "" and record.findings == []
    assert "resume" in record.phases


def test_a_checkpoint_that_lacks_a_tensor() -> None:
    whole = {
        name: {"shape": [2], "dtype": "float32"} for name in ("model.a", "optimizer.a.exp_avg")
    }
    other = whole | {"model.a": {"shape": [3], "dtype": "float32"}}
    assert of_resuming(whole, whole) == []
    assert of_resuming({"model.a": whole["model.a"]}, whole) == [
        "a checkpoint cannot be resumed from: optimizer.a.exp_avg"
    ]
    assert of_resuming(whole, other) == ["a checkpoint cannot be resumed from: model.a"]


@pytest.mark.slow
def test_the_history_of_memory_is_one_that_torch_shows(tmp_path: Path) -> None:
    file = tmp_path / "rank-0.pickle"
    (record,) = run_ranks(play, 1, row({"dp": 2}, 2), 0, file)
    assert record.error == ""
    snapshot = pickle.loads(file.read_bytes())
    assert sum(segment["total_size"] for segment in snapshot["segments"]) == record.reserved
    held = peak = 0
    (events,) = snapshot["device_traces"]
    for event in events:
        held += {"alloc": event["size"], "free_completed": -event["size"]}.get(event["action"], 0)
        peak = max(peak, held)
    assert peak == record.peak
    assert held == sum(segment["allocated_size"] for segment in snapshot["segments"])
    lines = [frame for event in events for frame in event["frames"]]
    assert any(frame["filename"].endswith("native.py") for frame in lines)
    assert "total_reserved" in _memory_viz.segsum(snapshot)
    assert "cudaMalloc" in _memory_viz.trace(snapshot)
    assert "Active Memory Timeline" in _memory_viz.trace_plot(snapshot)

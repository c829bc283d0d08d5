"""When checkpoints come, how large they are, and whether the disk holds them."""

from __future__ import annotations

import math
import shutil
from collections import namedtuple
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from nanoscale.checkpoint.store import list_checkpoints
from nanoscale.common.errors import UserError
from nanoscale.common.units import byte_size
from nanoscale.config.composing.compose import compose
from nanoscale.config.composing.frozen import dump, load
from nanoscale.config.rules import Devices, Host, check
from nanoscale.config.schema import Checkpoint, Config, Lora, Optimizer, Zero
from nanoscale.launch.request import check_request
from nanoscale.plan.memory.states import checkpoint_bytes
from nanoscale.plan.predict import predicted_step
from nanoscale.plan.saving import SavingPlan, memory_save_s, plan_saving, with_memory_interval
from nanoscale.plan.search.choice import SOURCE
from nanoscale.view.plan.saving_text import sentences, warnings
from tests.plan import machines
from tests.support.jobs import make_config, make_run, train, write_tokens

MIB = 2**20
HOSTS = (Host("one", 1), Host("two", 1))
Usage = namedtuple("Usage", "total used free")


def job(*words: str) -> Config:
    return check(compose(["recipe=debug", *words]), Devices("cpu", 1))


@pytest.fixture
def full(monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk with 5 MiB free; a checkpoint of the recipe `debug` takes almost 4."""
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(10 * MIB, 5 * MIB, 5 * MIB))


ALWAYS = "at the end and when it is stopped"


@pytest.mark.parametrize(
    ("words", "step_s", "expected"),
    [
        ((), 0.1, f"every 15 min (the plan expects the training to take less), {ALWAYS}"),
        (("train.steps=1e6",), 0.1, f"every 15 min (about every 9,000 steps), {ALWAYS}"),
        (("train.steps=1e6",), None, f"every 15 min, {ALWAYS}"),
        (("train.steps=1e6",), 3600.0, f"every 15 min (about every step), {ALWAYS}"),
        (
            ("checkpoint=periodic", "checkpoint.every_minutes=0"),
            1.0,
            f"every 1,000 steps, {ALWAYS}",
        ),
        (("checkpoint=none",), 1.0, "none is saved"),
        (
            ("checkpoint.every_minutes=0", "checkpoint.keep_best=3", "train.eval_every=4"),
            1.0,
            "after the best evaluations, at the end and when it is stopped",
        ),
    ],
)
def test_when_they_come(words: tuple[str, ...], step_s: float | None, expected: str) -> None:
    first = sentences(plan_saving(job(*words), step_s))["checkpoints"]
    assert first.partition(";")[0] == expected


@pytest.mark.parametrize(
    ("words", "step_s", "most"),
    [
        ((), 1.0, 1),  # the training takes 20 s: the last one alone
        ((), None, 3),
        (("checkpoint.every=10",), 1.0, 3),
        (("checkpoint.every=1",), 1.0, 3),
        (("checkpoint.every=1", "checkpoint.keep_every=5"), 1.0, 7),
    ],
)
def test_how_many_lie_on_the_disk(words: tuple[str, ...], step_s: float | None, most: int) -> None:
    saving = plan_saving(job(*words), step_s)
    assert saving.most == most and saving.needed == most * saving.bytes
    assert plan_saving(job(*words), step_s, present=1).needed == max(1, most - 1) * saving.bytes


def test_the_last_the_regular_and_the_best_are_one_policy() -> None:
    words = ["train.steps=100", "train.eval_every=10", "checkpoint.keep_best=3"]
    words += ["checkpoint.every=5", "checkpoint.keep_every=50", "checkpoint.keep_last=2"]
    saving = plan_saving(job(*words), 1e-3)
    assert sentences(saving)["checkpoints"].endswith(
        "the newest 2 are kept, every 50th step, and the best 3 by evaluation loss"
    )
    by_margin = replace(saving, config=replace(saving.config, best_metric="eval_margin"))
    assert sentences(by_margin)["checkpoints"].endswith("and the best 3 by eval_margin")
    assert saving.most == 2 + 100 // 50 + 3 + 1
    everything = plan_saving(job(*words[:3], "checkpoint.keep_last=null"), 1e-3)
    assert everything.most == 100 // 10 + 1


def test_all_are_kept_but_of_those_saved_by_time_only_the_newest() -> None:
    words = ("checkpoint.keep_last=null", "train.steps=1000")
    assert plan_saving(job(*words), 60.0).most == 2
    saving = plan_saving(job(*words, "checkpoint.every=100"), 60.0, present=3)
    assert saving.most == 3 + 10 + 1 + 1 and saving.needed == 12 * saving.bytes


def test_a_disk_that_will_be_full_is_warned_of(full: None) -> None:
    (warning,) = warnings(plan_saving(job("train.steps=1000"), 60.0))
    assert "up to 3 are kept or being written" in warning and "checkpoint.keep_last=1" in warning
    assert warnings(plan_saving(job(), 0.1)) == []


def test_a_disk_without_room_for_one_is_refused(full: None) -> None:
    saving = plan_saving(job("model.hidden=128"), 0.1)
    with pytest.raises(UserError, match="a checkpoint takes .* 5 MiB are free") as caught:
        saving.require_disk()
    assert caught.value.kind == "plan"
    assert caught.value.violations[0].suggestions == ("run.root=FOLDER", "checkpoint=none")
    plan_saving(job(), 0.1).require_disk()
    plan_saving(job("model.hidden=128", "checkpoint=none"), 0.1).require_disk()


def test_restarts_that_would_begin_anew_are_warned_of() -> None:
    words = ("launcher.max_restarts=3", "checkpoint.every_minutes=0")
    (warning,) = warnings(plan_saving(job(*words), 0.1))
    assert "restart from step 1" in warning and "checkpoint.every_minutes=15" in warning
    for more in ("checkpoint.every=5", "checkpoint.every_minutes=1", "launcher.max_restarts=0"):
        assert warnings(plan_saving(job(*words, more), 0.1)) == []


def test_the_time_of_a_save_into_memory() -> None:
    """GPT-2's 124.44 M parameters have 12 bytes each, and each of two hosts with 8 ranks has half of them."""
    config = machines.job("gpt2", dp=16, zero=Zero(stage=3))
    host = 12 * 124.44e6 / 2
    hardware = machines.changed(machines.machine(), host_bandwidth=2e9, inter_host=0.5)
    slow = replace(hardware, inter_bandwidth=1e8)
    assert memory_save_s(config, hardware) == pytest.approx(host / 16e9 + host / 3e9, rel=1e-3)
    assert memory_save_s(config, slow) == pytest.approx(host / 16e9 + host / 0.4e9, rel=1e-3)
    on_one = replace(config, parallel=replace(config.parallel, dp=8))
    assert memory_save_s(on_one, slow) == pytest.approx(2 * host / 16e9, rel=1e-3)


def test_an_interval_in_memory_loses_least_time() -> None:
    """Saves cost stall / interval, and failures half an interval each."""
    config = machines.job("gpt2", dp=16, zero=Zero(stage=3), checkpoint=Checkpoint(memory_every=1))
    config = replace(config, launcher=replace(config.launcher, mtbf_hours=2.0))
    hardware = machines.changed(machines.machine(), host_bandwidth=2e8)
    step_s = predicted_step(config, hardware)
    stall_s = memory_save_s(config, hardware) - step_s
    lost = {
        every: stall_s / (every * step_s) + 2 / 7200 * every * step_s / 2  # two hosts
        for every in range(1, 10_000)
    }
    chosen = with_memory_interval(config, hardware).checkpoint.memory_every
    assert 100 < chosen == pytest.approx(min(lost, key=lost.__getitem__), abs=1)
    for on_disk, expected in [(2 * chosen - 9, 0), (2 * chosen + 9, chosen)]:  # steps
        for intervals in ({"every": on_disk}, {"every_minutes": on_disk * step_s / 60}):
            saving = replace(config.checkpoint, **intervals)
            found = with_memory_interval(replace(config, checkpoint=saving), hardware)
            assert found.checkpoint.memory_every == expected
    unstalled = replace(config, parallel=replace(config.parallel, dp=8))
    fast = replace(hardware, host_bandwidth=1e12)
    assert with_memory_interval(unstalled, fast).checkpoint.memory_every == 1


@pytest.mark.parametrize(("device", "source"), [("h100-sxm", SOURCE), ("strange", "command line")])
def test_an_open_interval_is_frozen_as_a_number(device: str, source: str, tmp_path: Path) -> None:
    words = ["recipe=debug", "parallel.dp=2", "launcher.devices=1", f"cluster.device={device}"]
    words += ["launcher.max_restarts=1", "checkpoint.memory_every=auto", "launcher.device=cuda"]
    request = check_request(compose(words), devices=Devices("cuda", 1), hosts=HOSTS)
    assert request.composed.source("checkpoint.memory_every") == source
    assert request.config.checkpoint.memory_every == 1
    file = tmp_path / "config.yaml"
    file.write_text(dump(request.config, request.composed.requested))
    assert load(file).checkpoint.memory_every == 1
    assert "checkpoint.memory_every: auto" in file.read_text()


@pytest.mark.parametrize(
    ("words", "step_s", "save_s", "expected"),
    [
        ((), 0.1, None, "a restart from disk loses 1 s on average"),  # half of the training
        (("train.steps=1e5",), 0.1, None, "a restart from disk loses 7.5 min on average"),
        (("checkpoint.every=100", "train.steps=1e5"), 0.1, None, "from disk loses 5 s on average"),
        (("checkpoint.every_minutes=0",), 0.1, None, ""),
        (
            ("checkpoint.memory_every=2", "checkpoint=none"),
            1.0,
            1.5,  # 0.5 s in 2.5 s
            "a restart from memory loses at most 2 steps, 2 s "
            "(saved every 2 steps, which stalls 20.0% of the time), unless two hosts are lost within them",
        ),
        (
            ("checkpoint.memory_every=1",),
            None,
            None,
            "a restart from memory loses at most 1 step (saved every step), "
            "unless two hosts are lost within them; "
            "a restart from disk loses 7.5 min on average",
        ),
    ],
)
def test_what_a_failure_costs(
    words: tuple[str, ...], step_s: float | None, save_s: float | None, expected: str
) -> None:
    config = job("launcher.max_restarts=1", *words)
    saving = plan_saving(config, step_s, save_s=save_s)
    assert sentences(saving).get("failure", "").endswith(expected)
    assert "failure" in sentences(saving) or not expected
    assert "failure" not in sentences(replace(saving, restarts=0))


def test_the_expected_loss_counts_saves_and_repeated_steps() -> None:
    """A save of 1.5 s stalls each second step of 1 s for 0.5 s; a failure every 100 s repeats one step."""
    words = ("launcher.max_restarts=1", "checkpoint.memory_every=2", "checkpoint=none")
    saving = plan_saving(job(*words), 1.0, save_s=1.5, failures_s=100.0)
    assert saving.lost_share == pytest.approx(0.2 + 0.01)
    assert replace(saving, restarts=0).lost_share is None
    assert (
        "every 100 s (launcher.mtbf_hours), saves in memory and repeated steps take 21.00%"
        in (sentences(saving)["failure"])
    )
    alone = plan_saving(job(*words), 1.0, save_s=1.5, failures_s=3600 * 5700.0)
    assert "unless the host is lost; with a failure" in sentences(alone)["failure"]
    often = job("launcher.max_restarts=1", "checkpoint.memory_every=2", "checkpoint.every=1")
    saving = plan_saving(often, 1.0, save_s=1.5, failures_s=100.0)
    assert saving.lost_share == pytest.approx(0.2 + 0.005)  # the disk has the newer state


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"precision": "bf16", "optimizer": Optimizer(name="sgd")},
        {"precision": "fp32", "optimizer": Optimizer(name="adamw8bit")},
    ],
    ids=str,
)
def test_the_size_is_that_of_a_real_one(tmp_path: Path, changes: dict[str, Any]) -> None:
    write_tokens(tmp_path)
    config = make_config(tmp_path, checkpoint=Checkpoint(), **changes)
    config = replace(config, train=replace(config.train, steps=1))
    run = make_run(config)
    train(run, config)
    (stored,) = list_checkpoints(run.checkpoints)
    tensors = stored.manifest["tensors"].values()
    width = {"float64": 8, "float32": 4}
    numbers = [(math.prod(it["shape"]), width[it["dtype"]]) for it in tensors if it["shape"]]
    assert checkpoint_bytes(config) == sum(count * each for count, each in numbers)


def test_adapters_are_all_that_is_saved_of_a_frozen_model() -> None:
    whole = job()
    assert checkpoint_bytes(replace(whole, lora=Lora(rank=2))) < checkpoint_bytes(whole) / 5


def test_the_plan_says_if_a_save_fits_into_a_notice() -> None:
    """GCP leaves 30 s; the training stops after at most two steps."""
    words = ("launcher.notice=gcp",)
    assert (
        "one fits into the notice (10 s after two steps) at"
        in sentences(plan_saving(job(*words), 10.0))["checkpoints"]
    )
    assert "two steps take longer" in warnings(plan_saving(job(*words), 15.0))[0]
    assert (
        "checkpoint.at_stop=false"
        in warnings(plan_saving(job(*words, "checkpoint.at_stop=false"), 1.0))[0]
    )
    assert "notice" not in str(sentences(plan_saving(job("launcher.notice=/leave"), 1.0)))


def test_what_the_disk_and_the_uploads_must_reach() -> None:
    """No rate of a disk is known. A stall of 9.09 s and 900 s of training are 1 % and 99 % of the time."""
    words = ("train.steps=1e5", "checkpoint.every_minutes=15")
    saving = plan_saving(job(*words), 0.1)
    assert f"take 1% of the time at {byte_size(saving.bytes / (900 / 99))}/s" in text(saving)
    assert "upload" not in text(saving)
    uploaded = plan_saving(job(*words, "checkpoint.upload=file:///tmp/x"), 0.1)
    assert text(uploaded).endswith(f"uploads by one host need {byte_size(saving.bytes / 900)}/s")
    copied = plan_saving(job(*words, "checkpoint.asynchronous=true"), 0.1)
    assert "of the time" not in text(copied)
    assert "of the time" not in text(plan_saving(job("checkpoint.every_minutes=0"), 0.1))


def text(saving: SavingPlan) -> str:
    return sentences(saving)["disk"]


def test_a_failure_ends_a_run_without_restarts() -> None:
    """10,000 steps of 1 s and a failure every 100,000 s: 1 - exp(-0.1)."""
    ends = plan_saving(job("train.steps=1e4"), 1.0, failures_s=1e5)
    assert ends.failure_probability == pytest.approx(1 - math.exp(-0.1))
    assert "ends the run early with a probability of 10%" in sentences(ends)["failure"]
    assert "failure" not in sentences(replace(ends, steps=100))  # 0.1 %
    assert replace(ends, restarts=1).failure_probability is None
    assert replace(ends, step_s=None).failure_probability is None
    alone = plan_saving(job("train.steps=1e4", "launcher.max_restarts=1"), 1.0, failures_s=1e5)
    assert ", repeated steps take 0.45% of the time" in sentences(alone)["failure"]

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, SequentialLR

from nanoscale.common.devices import Devices
from nanoscale.common.errors import UserError
from nanoscale.config.composing.compose import compose
from nanoscale.config.composing.library import Library
from nanoscale.config.rules import check
from nanoscale.config.schema import Scheduler, Train
from nanoscale.config.training_phases import SCHEDULERS, lr_factor


def factors(scheduler: Scheduler, steps: int) -> list[float]:
    return [lr_factor(scheduler, step, Train(steps=steps)) for step in range(1, steps + 1)]


def test_every_schedule_is_an_option_of_its_group() -> None:
    assert {*Library().options("scheduler")} == {*SCHEDULERS}


def test_cosine_equals_torch() -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    warmup = LinearLR(optimizer, start_factor=0.1, total_iters=9)
    cosine = CosineAnnealingLR(optimizer, T_max=40, eta_min=0.1)
    both = SequentialLR(optimizer, [warmup, cosine], milestones=[9])
    expected = []
    for _ in range(50):
        expected.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        both.step()
    ours = factors(Scheduler("cosine", warmup_steps=10, min_ratio=0.1), 50)
    assert ours == pytest.approx(expected, abs=1e-12)


def test_linear_and_constant() -> None:
    linear = factors(Scheduler("linear", warmup_steps=2, min_ratio=0.0), 6)
    assert linear == pytest.approx([0.5, 1.0, 0.75, 0.5, 0.25, 0.0])
    assert factors(Scheduler("constant", warmup_steps=2), 4) == [0.5, 1.0, 1.0, 1.0]


def test_wsd_is_flat_and_then_falls() -> None:
    wsd = factors(Scheduler("wsd", warmup_steps=2, decay_steps=4, min_ratio=0.2), 10)
    assert wsd == pytest.approx([0.5, 1, 1, 1, 1, 1, 0.8, 0.6, 0.4, 0.2])


def test_inverse_square_root_is_the_papers_formula() -> None:
    """Vaswani et al. 2017, eq. 3, as a multiple of its peak."""
    ours = factors(Scheduler("inverse-sqrt", warmup_steps=4, min_ratio=0.0), 30)
    paper = [min(step**-0.5, step * 4**-1.5) for step in range(1, 31)]
    assert ours == pytest.approx([rate / max(paper) for rate in paper])


@pytest.mark.parametrize("name", ["cosine", "linear", "wsd"])
def test_ends_at_the_minimum_and_never_leaves_the_range(name: str) -> None:
    for steps, warmup in ((1, 0), (1, 1), (5, 5), (7, 0), (100, 10)):
        scheduler = Scheduler(name, warmup, decay_steps=min(steps, 3), min_ratio=0.1)  # type: ignore[arg-type]
        curve = factors(scheduler, steps)
        assert all(0.1 / max(1, warmup) - 1e-12 <= factor <= 1 for factor in curve)
        if steps > warmup:
            assert math.isclose(curve[-1], 0.1)


@pytest.mark.parametrize(
    ("words", "steps"),
    [
        (["scheduler.warmup=0.03", "train.steps=500"], 15),
        (["scheduler.warmup=0.03", "train.steps=10"], 0),
        (["scheduler.warmup=3"], 3),
        (["scheduler.warmup=21"], 2),
        (["scheduler.warmup_steps=4"], 4),
        (["recipe=tiny", "train.steps=10"], 1),  # the recipe's 20 steps are for its own length
        (["recipe=tiny", "train.steps=30"], 20),
        (["recipe=./mine.yaml"], 5),
        (["recipe=./mine.yaml", "scheduler.warmup_steps=2"], 2),
    ],
)
def test_the_warm_up_is_steps_or_a_share_of_them(words, steps, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("mine.yaml").write_text(
        "defaults: [debug, _self_]\nscheduler: {warmup: 0.25}\ntrain: {steps: 20}\n"
    )
    recipe = [] if words[0].startswith("recipe") else ["recipe=debug"]
    scheduler = check(compose([*recipe, *words]), Devices("cpu", 1)).scheduler
    assert (scheduler.warmup, scheduler.warmup_steps) == (None, steps)


def test_two_warm_ups_are_refused():
    words = ["recipe=debug", "scheduler.warmup=0.1", "scheduler.warmup_steps=2"]
    with pytest.raises(UserError) as caught:
        check(compose(words), Devices("cpu", 1))
    (violation,) = caught.value.violations
    assert violation.key == "scheduler.warmup"
    for advice in violation.suggestions:
        others = [word for word in words if word.split("=")[0] != advice.split("=")[0]]
        check(compose([*others, advice]), Devices("cpu", 1))

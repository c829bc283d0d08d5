"""The values of a sweep's overrides, in Hydra's grammar."""

from __future__ import annotations

import pytest

from nanoscale.common.errors import UserError
from nanoscale.sweep.space import Interval, read_space


def test_a_grid_varies_the_last_key_fastest_and_names_what_differs() -> None:
    words = ["recipe=debug", "optimizer.lr=1e-3,3e-4", "train.seed=range(1,3)", "train.steps=4"]
    space = read_space(words)
    assert space.shared == ("recipe=debug", "train.steps=4")
    grid = space.grid()
    assert [space.name(values) for values in grid] == [
        "lr=1e-3,seed=1",
        "lr=1e-3,seed=2",
        "lr=3e-4,seed=1",
        "lr=3e-4,seed=2",
    ]
    assert space.overrides(grid[2])[-2:] == ("optimizer.lr=3e-4", "train.seed=1")


@pytest.mark.parametrize(
    ("word", "values"),
    [
        ("train.seed=choice(1,2,3)", ("1", "2", "3")),
        ("train.seed=range(1,10,4)", ("1", "5", "9")),
        ("optimizer.lr=range(0.1,0.5,0.1)", ("0.1", "0.2", "0.3", "0.4")),
        ("zero=glob(stage*,exclude=[*3*,*offload,stage0])", ("stage1", "stage2")),
        ("data.mixture=[a],[b]", ("[a]", "[b]")),
    ],
)
def test_every_form_of_a_list(word: str, values: tuple[str, ...]) -> None:
    (one,) = read_space([word]).dimensions
    assert one.values == values


def test_intervals_are_for_samplers() -> None:
    words = ["optimizer.lr=tag(log,interval(1e-5,1e-3))", "train.seed=interval(1,8)"]
    space = read_space(words)
    assert [one.interval for one in space.dimensions] == [
        Interval(1e-5, 1e-3, True, False),
        Interval(1.0, 8.0, False, True),
    ]
    with pytest.raises(UserError) as raised:
        space.grid()
    assert raised.value.violations[0].suggestions == ("--sampler tpe --trials 20",)


def test_keys_of_one_name_are_told_apart_by_more_of_them() -> None:
    space = read_space(["optimizer.name=adamw,sgd", "scheduler.name=cosine,linear"])
    assert space.name(space.grid()[0]) == "optimizer.name=adamw,scheduler.name=cosine"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["train.steps=4"], "no key has several values"),
        (["train.seed=1,1"], "has one value twice"),
        (["train.seed=1,2", "train.seed=3,4"], "several values twice"),
        (["run.name=a,b"], "set by the sweep"),
        (["run.root=x", "train.seed=1,2"], "set by the sweep"),
        (["zero=glob(nothing*)"], "matches no option"),
        (["optimizer.lr=tag(log,interval(0,1))"], "begins above 0"),
        (["optimizer.lr=interval(2,1)"], "not below the second"),
        (["profile.ranks=0,1"], "takes a list in brackets"),
    ],
)
def test_what_no_sweep_can_do_is_refused(words: list[str], said: str) -> None:
    with pytest.raises(UserError) as raised:
        read_space(words)
    assert said in str(raised.value)

"""Words with several values: one run for each combination, and nothing that lists no values."""

from __future__ import annotations

import shlex

import pytest

from nanoscale.common.errors import UserError, Violation
from nanoscale.config.composing.variants import expand


def violation(*words: str) -> Violation:
    with pytest.raises(UserError) as caught:
        expand(words)
    (found,) = caught.value.violations
    return found


def test_one_value_each_is_one_run_with_the_words_as_they_are() -> None:
    words = ("recipe=debug", "train.steps=3", "'not a word'", "parallel.layers_per_stage=[3,5]")
    (variant,) = expand(words)
    assert (variant.words, variant.chosen) == (words, {})


def test_every_combination_is_a_run_and_the_last_word_varies_fastest() -> None:
    runs = expand(["optimizer.lr=1e-3,3e-4", "recipe=debug", "train.seed=1,2,3"])
    assert len(runs) == 6
    assert [run.chosen["train.seed"] for run in runs] == ["1", "2", "3"] * 2
    assert runs[3].words == ("optimizer.lr=0.0003", "recipe=debug", "train.seed=1")
    assert runs[3].chosen == {"optimizer.lr": "0.0003", "train.seed": "1"}


def test_groups_lists_quotes_and_prefixes() -> None:
    runs = expand(
        ["model=tiny,debug", "++data.path='a,b',\"c d\"", "parallel.layers_per_stage=[1,3],null"]
    )
    assert runs[0].words == ("model=tiny", "++data.path='a,b'", "parallel.layers_per_stage=[1,3]")
    assert runs[-1].words == ("model=debug", '++data.path="c d"', "parallel.layers_per_stage=null")
    assert set(runs[0].chosen) == {"model", "data.path", "parallel.layers_per_stage"}
    assert expand(["train.seed=choice(4,5)"])[1].words == ("train.seed=5",)


@pytest.mark.parametrize(
    "word",
    ["train.seed=range(1,4)", "model=glob(gpt*)", "optimizer.lr=interval(0,1)",
     "train.seed=shuffle(1,2)", "train.seed=tag(a,choice(1,2))"],
)  # fmt: skip
def test_values_must_be_listed(word: str) -> None:
    assert "list them" in violation(word).message


def test_what_all_runs_share_is_refused_with_the_one_value_that_may_be_meant() -> None:
    found = violation("launcher.slurm.partition=a,b")
    assert found.suggestions == ("'launcher.slurm.partition=\"a,b\"'",)
    assert "numbered" in violation("run.name=a,b").message


def test_plans_may_differ_in_what_an_array_shares() -> None:
    runs = expand(["launcher.devices=1,8", "run.name=a,b"], is_array=False)
    assert [run.chosen["launcher.devices"] for run in runs] == ["1", "1", "8", "8"]


def test_commas_of_a_filter_of_hosts_are_left_to_compose() -> None:
    assert len(expand(["launcher.include=h1@h2:0,2"])) == 1


def test_runs_that_would_be_the_same_are_refused() -> None:
    assert violation("train.seed=1,2,1").suggestions == ("train.seed=1,2",)
    assert "twice" in violation("train.seed=1,2", "train.seed=3,4").message


@pytest.mark.parametrize("values", ["3,5", "4,4"])
def test_a_list_without_brackets_is_no_sweep(values: str) -> None:
    found = violation(f"parallel.layers_per_stage={values}")
    assert found.suggestions == (f"'parallel.layers_per_stage=[{values}]'",)


def test_values_that_no_run_of_an_array_could_have_are_not_advised() -> None:
    assert violation("run.root=[a],[b]").suggestions == ()
    (word,) = violation("data.tokenizer='a b','a b'").suggestions
    assert expand(shlex.split(word)) == expand(["data.tokenizer='a b'"])
    assert violation("launcher=slurm,ssh").suggestions == ("launcher=slurm",)

"""A layout that is `auto` is chosen by the search of the plan, and all that the user set is held."""

from __future__ import annotations

import shlex
from dataclasses import replace
from typing import Literal, get_args, get_origin

import pytest

from nanoscale.common.errors import UserError
from nanoscale.config.composing.compose import compose
from nanoscale.config.composing.frozen import dump
from nanoscale.config.reference import alternatives, declared, value_of
from nanoscale.config.rules import Devices, Host
from nanoscale.config.violations import override
from nanoscale.launch.request import check_request
from nanoscale.plan.hardware.hardware import hardware_of
from nanoscale.plan.predict import SURE, filled_share, predict
from nanoscale.plan.search.choice import SEARCHED, SOURCE, search_space, to_type
from nanoscale.plan.search.search import search
from nanoscale.view.plan.choice_text import choice_line
from nanoscale.view.plan.verdict import remedy

CPU = Devices("cpu", 2, cores=2)
UNKNOWN = Devices("cuda", 8, ("some GPU",) * 8)


def h100(count: int) -> Devices:
    return Devices("cuda", count, ("NVIDIA H100 80GB HBM3",) * count)


def request_of(devices, *words, recipe="llama-8b", **options):
    line = [f"recipe={recipe}", "parallel=auto", "zero.stage=auto", "train.micro_batch=auto"]
    composed = compose([*line, "cluster=h100-sxm", *words], **options)
    return check_request(composed, devices=devices, hosts=())


@pytest.mark.parametrize("count", [1, 2, 4, 8])
def test_the_chosen_layout_surely_fits_all_devices(count):
    chosen = request_of(h100(count), recipe="llama-1b")
    assert chosen.config.world_size == count
    assert predict(chosen.config).fits_probability >= SURE
    assert chosen.choice is not None
    assert chosen.composed.source("parallel.tp") == SOURCE
    assert chosen.composed.source("train.micro_batch") == SOURCE
    considered = f"{chosen.choice.result.considered:,} layouts considered that fits"
    assert f": the fastest of {considered}" in choice_line(chosen.choice)
    time = chosen.choice.plan.time
    simpler = replace(chosen.choice.plan, time=replace(time, seconds=1.005 * time.seconds))
    line = choice_line(replace(chosen.choice, plan=simpler))
    assert f": within 1% of the fastest of {considered}" in line


UNCHOSEN = ("parallel.layers_per_stage", "zero.nvme_path")
HELD = ("parallel.dp", *(it for it in SEARCHED if it not in UNCHOSEN))


@pytest.mark.parametrize("key", HELD)
def test_a_key_that_the_user_sets_is_held_or_refused(key):
    """A choice of the plan beside it never replaces it without a word."""
    accepted = 0
    for value in values_of(key):
        try:
            config = request_of(h100(4), override(key, value), recipe="debug").config
        except UserError as error:
            assert any(it.key.split(".")[0] == key.split(".")[0] for it in error.violations)
            continue
        accepted += 1
        assert (value_of(config, key), config.world_size) == (value, 4)
    assert accepted


def values_of(key):
    """List values of each kind that a key admits."""
    values: list[object] = []
    for kind in alternatives(declared()[key].annotation):
        values += {bool: [True, False], int: [1, 2, 4]}.get(kind, [])
        values += (
            [it for it in get_args(kind) if it != "auto"] if get_origin(kind) is Literal else []
        )
    return values


def test_virtual_stages_need_no_schedule():
    """The schedule and the degree follow from them."""
    layout = request_of(h100(8), "parallel.virtual_stages=2", recipe="llama-1b").config.parallel
    assert (layout.schedule, layout.virtual_stages, layout.pp > 1) == ("interleaved-1f1b", 2, True)


def test_a_zero_stage_of_the_user_is_held_when_the_layout_is_chosen_again(tmp_path):
    words = ["recipe=debug", "parallel=auto", "zero=stage3", "cluster=h100-sxm"]
    first = check_request(compose(words), devices=h100(4), hosts=())
    assert first.config.zero.stage == 3
    file = tmp_path / "config.yaml"
    file.write_text(dump(first.config, first.composed.requested))
    composed = compose(["train.global_batch=64"], config_file=file)
    again = check_request(composed, devices=h100(8), hosts=())
    assert again.choice is not None
    assert again.config.zero.stage == 3


def test_the_zero_stage_and_the_micro_batch_of_the_user_are_held():
    config = request_of(h100(8), "zero.stage=3", "train.micro_batch=2").config
    assert (config.zero.stage, config.train.micro_batch) == (3, 2)


@pytest.mark.parametrize("degrees", [[], ["parallel.tp=2", "parallel.pp=2", "parallel.cp=1"]])
def test_a_recipe_without_a_zero_stage_leaves_it_to_the_plan(degrees):
    composed = compose(["recipe=debug", "parallel=auto", "cluster=h100-sxm", *degrees])
    chosen = check_request(composed, devices=h100(8), hosts=())
    assert chosen.composed.source("zero.stage") == SOURCE


def test_one_rank_on_a_cpu_and_unknown_devices_have_no_choice():
    alone = request_of(CPU, "cluster=local", recipe="debug")
    assert alone.choice is None
    assert (alone.config.world_size, alone.config.zero.stage) == (1, 0)
    unknown = request_of(UNKNOWN, "cluster=local")
    assert unknown.choice is None
    assert (unknown.config.parallel.dp, unknown.config.zero.stage) == (8, 3)


@pytest.mark.slow
def test_a_request_chooses_again_for_other_devices():
    first = request_of(h100(8))
    again = check_request(first.composed, devices=h100(4), hosts=())
    assert again.choice is not None
    assert again.config.world_size == 4
    assert again.config.parallel == request_of(h100(4)).config.parallel
    assert again.composed.requested.train.micro_batch == "auto"


def test_hosts_whose_devices_nobody_named_have_those_of_the_reference():
    hosts = tuple(Host(f"n{number}", 8, "hosts:1") for number in range(4))
    chosen = check_request(compose(["recipe=llama-70b"]), devices=CPU, hosts=hosts)
    assert chosen.choice is not None
    assert chosen.choice.is_assumed
    assert "on 32 × h100-sxm (the recipe's reference" in choice_line(chosen.choice)


def test_a_job_that_fits_nowhere_gets_the_layout_that_comes_closest():
    chosen = request_of(h100(8), recipe="llama-405b")
    assert chosen.choice is not None
    assert not chosen.choice.plan.fits
    assert "comes closest" in choice_line(chosen.choice)


@pytest.mark.slow
def test_keys_of_the_user_that_keep_a_job_from_fitting_are_named():
    words = ("parallel.tp=1", "parallel.pp=1", "parallel.cp=1", "zero.stage=0")
    held = request_of(h100(8), *words)
    assert held.choice is not None
    assert not held.choice.plan.fits
    said = remedy(held.composed, predict(held.config), held.devices)
    assert said.startswith("type zero.stage=")
    nowhere = request_of(h100(8), recipe="llama-405b")
    said = remedy(nowhere.composed, predict(nowhere.config), nowhere.devices)
    assert said.startswith("no layout of these devices fits; it would take")


def test_a_job_that_no_number_of_these_devices_fits_would_take_larger_ones():
    words = ("cluster.memory_gib=8", "cluster.devices_per_host=1")
    small = request_of(h100(1), *words, recipe="gpt3-175b")
    said = remedy(small.composed, predict(small.config), small.devices)
    none = "no layout of these devices fits, nor of 2,048"
    assert said == f"{none}; it would take larger devices or hosts"


@pytest.mark.slow
def test_a_batch_that_the_devices_do_not_divide_is_named_as_the_cause():
    batch, small = "train.global_batch=1032", "cluster.memory_gib=60"
    odd = request_of(h100(24), small, recipe="llama-70b")
    said = remedy(odd.composed, predict(odd.config), odd.devices)
    assert f"would take {batch} (1,024 is not divisible by 24 devices) or 48 devices" in said
    whole = request_of(h100(24), small, batch, recipe="llama-70b")
    assert whole.choice is not None and whole.choice.plan.fits


def test_a_frozen_choice_is_kept_and_made_again_on_other_ranks(tmp_path):
    line = ("launcher.devices=2", "train.global_batch=1", "cluster=local")
    first = request_of(CPU, *line, recipe="debug")
    assert first.config.parallel.dp == 1
    file = tmp_path / "config.yaml"
    file.write_text(dump(first.config, first.composed.requested))
    kept = check_request(compose([], config_file=file), devices=CPU, hosts=())
    assert kept.choice is None
    assert kept.config.parallel == first.config.parallel
    again = compose(["launcher.devices=4"], config_file=file)
    chosen = check_request(again, devices=CPU, hosts=())
    assert chosen.choice is not None
    assert chosen.config.world_size == 4
    held = check_request(
        compose(["launcher.devices=4", "parallel.cp=2"], config_file=file), devices=CPU, hosts=()
    )
    assert (held.config.parallel.cp, held.config.world_size) == (2, 4)


def bounded_request(share, *words, devices=None, **options):
    """Return a request with a fixed layout that may store activations in a share of the memory."""
    line = [
        "recipe=llama-8b",
        "parallel=dp",
        "zero=stage2",
        "train.micro_batch=2",
        "cluster=h100-sxm",
    ]
    composed = compose([*line, f"parallel.activation_memory={share}", *words], **options)
    return check_request(composed, devices=devices or h100(8), hosts=())


def test_a_larger_share_of_memory_never_makes_a_slower_plan_and_is_respected():
    requests = {share: bounded_request(share) for share in (0.2, 0.3, 0.5, 0.7, 0.8, 0.9, 1)}
    for share, request in requests.items():
        plan = request.choice.plan
        assert request.config.parallel == replace(plan.config.parallel, activation_memory=None)
        assert filled_share(predict(request.config).memory, plan.capacity) <= share
        assert f"in at most {share:.0%} of the memory" in choice_line(request.choice)
    times = [request.choice.plan.time.seconds for request in requests.values()]
    assert times == sorted(times, reverse=True)
    assert len(set(times)) >= 4
    assert any(request.config.parallel.checkpoint_every > 1 for request in requests.values())


def test_a_share_of_memory_that_is_too_small_is_named():
    request = bounded_request(0.01)
    assert choice_line(request.choice).startswith("no layout stores activations in at most 1% of")


def test_a_choice_by_memory_is_frozen_and_made_again_with_another_share(tmp_path):
    first = bounded_request(0.9)
    assert first.composed.source("parallel.checkpoint_every") == SOURCE
    file = tmp_path / "config.yaml"
    file.write_text(dump(first.config, first.composed.requested))

    def again(*words):
        return check_request(compose(words, config_file=file), devices=h100(8), hosts=())

    kept = again()
    assert (kept.choice, kept.config.parallel) == (None, first.config.parallel)
    assert check_request(compose([f"recipe={file}"]), devices=h100(8), hosts=()).choice is None
    for word in ("parallel.tp=2", "parallel.activation_memory=0.3"):
        other = again(word)
        assert other.choice is not None
        assert other.config.parallel != first.config.parallel
    elsewhere = check_request(first.composed, devices=h100(4), hosts=())
    assert elsewhere.choice.plan.config.parallel.activation_memory == 0.9


def test_a_mode_and_a_share_of_memory_exclude_each_other():
    mode = "parallel.activation_checkpointing=full"
    with pytest.raises(UserError) as refused:
        bounded_request(0.5, mode)
    (violation,) = refused.value.violations
    assert violation.key == "parallel.activation_memory" and mode in violation.message
    for advice in violation.suggestions:
        assert bounded_request(0.5, mode, advice).config
    assert bounded_request(0.5, "parallel.selective_keep=attention").config


def test_layouts_found_with_a_share_of_memory_can_be_typed():
    words = ["recipe=llama-8b", "cluster=h100-sxm", "parallel.activation_memory=0.5"]
    composed, devices = compose(words), h100(8)
    space = search_space(composed, devices, hardware_of(composed.config))
    best = search(space, hardware_of(composed.config)).best
    typed = check_request(
        compose([*words, *shlex.split(" ".join(to_type(composed, best.config)))]),
        devices=devices,
        hosts=(),
    )
    assert typed.config.parallel == replace(best.config.parallel, activation_memory=None)

"""The search finds legal layouts only, all of them, and the fastest first."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise, product
from pathlib import Path

import pytest

from nanoscale.common.errors import UserError
from nanoscale.common.units import GIB
from nanoscale.config.composing.compose import compose
from nanoscale.config.rules import check
from nanoscale.config.schema import Backend, Config, Zero
from nanoscale.config.values.provenance import Composed
from nanoscale.plan.hardware.hardware import hardware_of
from nanoscale.plan.hardware.planned_devices import planned_devices
from nanoscale.plan.predict import SURE, Prediction, fits_probability, predict, spread
from nanoscale.plan.search.candidates import SHORTEST_PIECE, SearchSpace, expert_degrees, shapes
from nanoscale.plan.search.choice import recipe_of, search_space, to_type
from nanoscale.plan.search.search import SearchResult, search, search_other_backend
from nanoscale.view.plan.search_text import advice, reasons
from tests.plan.machines import job

MIDDLE = ("recipe=llama-8b", "cluster=h100-sxm", "cluster.hosts=1", "train.seq_len=2048")
SMALL = ("recipe=llama-1b", "cluster=h100-sxm", "cluster.hosts=1", "train.seq_len=2048")


def looked_in(*words: str) -> tuple[Composed, SearchSpace]:
    composed = compose(list(words))
    hardware = hardware_of(composed.config)
    return composed, search_space(composed, planned_devices(composed), hardware)


def found(*words: str) -> tuple[Composed, SearchResult]:
    composed, where = looked_in(*words)
    return composed, search(where, hardware_of(composed.config))


def typed(words: tuple[str, ...], more: list[str]) -> Config:
    """Resolve the words with the overrides that the search proposes."""
    composed = compose([*words, *(word.strip("'") for word in more)])
    return check(composed, planned_devices(composed))


def degrees(config: Config) -> tuple[object, ...]:
    layout = config.parallel
    method = layout.cp_method if layout.cp > 1 else ""
    return layout.tp, layout.pp, layout.cp, method, config.zero.stage, layout.dp_replicate


@pytest.mark.parametrize("more", [(), ("backend=deepspeed",), ("model=gpt2", "train.seq_len=1024")])
def test_shapes_are_those_that_the_rules_let_pass(more: tuple[str, ...]) -> None:
    """All combinations of degrees, each put to the rules."""
    words = (*SMALL, *more, "backend.compile=off")
    composed, where = looked_in(*words)
    ours = {degrees(config) for config in shapes(where)}
    legal = set()
    for tp, pp, cp in product((1, 2, 3, 4, 8), (1, 2, 4, 8), (1, 2, 4)):
        if 8 % (tp * pp * cp) or composed.config.train.seq_len // cp < SHORTEST_PIECE:
            continue
        for method, stage in product(("ring", "ulysses"), range(4)):
            if (cp == 1 and method == "ulysses") or (stage and tp * pp == 8):
                continue
            if stage == 3 and pp > 1:
                continue  # as with stage 2
            layout = replace(
                composed.config.parallel,
                tp=tp, pp=pp, cp=cp, cp_method=method,
                sequence_parallel=composed.config.backend.name == "native" or tp == 1,
            )  # fmt: skip
            asked = replace(
                composed.config,
                parallel=layout,
                zero=replace(composed.config.zero, stage=stage),
                train=replace(composed.config.train, micro_batch=1),
            )
            try:
                check(replace(composed, config=asked), planned_devices(composed))
            except UserError:
                continue
            legal.add((tp, pp, cp, method if cp > 1 else "", stage, 1))
    assert len(legal) > 5
    assert {shape for shape in ours if shape[-1] == 1} == legal


def test_experts_are_shared_out_as_the_rules_let_pass() -> None:
    words = ("recipe=mixtral-8x7b", "cluster=h100-sxm", "cluster.hosts=2", "train.global_batch=64")
    words += ("parallel.pp=1", "parallel.cp=1", "zero.stage=3")
    composed, where = looked_in(*words)
    looked = [shared for shape in shapes(where) for shared in expert_degrees(where, shape)]
    assert {config.parallel.ep for config in looked} == {1, 2, 4, 8}
    assert all(shape.parallel.ep == 8 for shape in shapes(where) if shape.parallel.dp == 16)
    for config in looked:
        check(replace(composed, config=config), planned_devices(composed))
    best = search(where, hardware_of(composed.config)).best
    assert best is not None and best.config.parallel.ep > 1
    assert typed(words, to_type(composed, best.config)).parallel == best.config.parallel
    _, held = looked_in(*words, "parallel.ep=2")
    assert {shape.parallel.ep for shape in shapes(held)} == {2}


@pytest.mark.slow
def test_what_is_proposed_can_be_typed_and_is_what_was_meant() -> None:
    words = (*MIDDLE, "parallel.pp=2")
    composed, result = found(*words)
    assert result.considered > 100
    seen = set()
    of_each = {plan.config.parallel.schedule: plan for plan in result.ranked}.values()
    every = result.ranked[:: max(1, len(result.ranked) // 25)]
    for plan in (*every, *of_each, *result.front()[-3:]):
        meant = typed(words, to_type(composed, plan.config))
        assert meant.parallel == plan.config.parallel
        assert (meant.zero, meant.train.micro_batch) == (
            plan.config.zero,
            plan.config.train.micro_batch,
        )
        assert meant.backend.compile == plan.config.backend.compile
        seen.add(meant.parallel.schedule)
    assert len(seen) > 3


def test_the_fastest_comes_first_and_nothing_that_fits_is_faster() -> None:
    _, result = found(*SMALL)
    times = [plan.time.seconds for plan in result.ranked]
    assert result.best is not None
    assert times[0] <= 1.01 * min(times)
    assert all(plan.fits for plan in result.ranked)
    front = result.front()
    assert front[-1].time.seconds == min(times)

    def shown(plan: Prediction) -> float:
        return float(f"{plan.worst.total / GIB:.3g}")

    for earlier, later in pairwise(front):
        assert shown(earlier) < shown(later) and earlier.time.seconds > later.time.seconds
    for plan in result.ranked:
        assert any(
            shown(other) <= shown(plan) and other.time.seconds <= plan.time.seconds
            for other in front
        )


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["1f1b", "interleaved-1f1b", "zbv"])
def test_stages_1_and_2_need_the_same_memory_in_a_pipeline(schedule: str) -> None:
    """The search computes it once."""
    for pp, alike in ((2, True), (1, False)):
        words = [f"parallel.pp={pp}", *[f"parallel.schedule={schedule}"] * (pp > 1)]
        sizes = []
        for stage in (1, 2):
            plan = predict(typed(MIDDLE, [*words, f"zero.stage={stage}", "train.micro_batch=1"]))
            sizes.append([rank.total for rank in plan.memory])
        assert (sizes[0] == sizes[1]) is alike


def test_what_surely_fits_comes_first_and_what_is_left_out_is_named() -> None:
    _, result = found(*SMALL)
    assert result.best is not None
    tight = result.best.worst.total * 1.02  # 69 % with the spread of dp alone
    hardware = replace(result.best.hardware, memory_gib=tight / 2**30)
    _, space = looked_in(*SMALL)
    again = search(space, hardware)
    assert again.best is not None and again.best.fits_probability >= SURE
    sure = [plan.fits_probability >= SURE for plan in again.ranked]
    assert sure == sorted(sure, reverse=True) and not all(sure)
    assert again.left_out and all(
        plan.fits_probability < SURE and plan.time.seconds < again.best.time.seconds
        for plan in again.left_out
    )
    times = [plan.time.seconds for plan in again.ranked if plan.fits_probability >= SURE]
    assert times[0] <= 1.01 * min(times)


def test_less_is_known_of_divided_models_and_of_experts() -> None:
    alone, divided, experts = (
        job(name, **layout)
        for name, layout in (("llama-8b", {}), ("llama-8b", {"tp": 2}), ("mixtral-8x7b", {}))
    )
    assert spread(alone) < spread(divided) < spread(experts)
    assert fits_probability(100, 106, spread(alone)) > SURE
    assert fits_probability(100, 106, spread(divided)) < SURE
    assert fits_probability(100, 100, spread(experts)) == 0.5


def test_keys_of_the_command_line_keep_their_values() -> None:
    _, result = found(
        *SMALL, "parallel.tp=4", "zero.stage=1", "parallel.activation_checkpointing=full"
    )
    for plan in result.ranked:
        layout = plan.config.parallel
        assert (layout.tp, plan.config.zero.stage) == (4, 1)
        assert layout.activation_checkpointing == "full"


@pytest.mark.parametrize(
    "more", [("parallel.tp=2",), ("parallel.pp=2",), ("parallel.tp=2", "zero.stage=3")]
)
def test_keys_are_held_with_deepspeed_too(more: tuple[str, ...]) -> None:
    """Its stage 0 takes neither with bf16."""
    words = (*MIDDLE, "backend=deepspeed", *more)
    composed, result = found(*words)
    assert result.best is not None
    assert (
        typed(words, to_type(composed, result.best.config)).parallel == result.best.config.parallel
    )


@pytest.mark.slow
def test_host_memory_is_used_where_nothing_else_fits() -> None:
    """States of 16 bytes a parameter, 8 B of them, and eight devices of 16 GiB."""
    words = ("recipe=llama-8b", "cluster=v100", "cluster.hosts=1", "cluster.memory_gib=16")
    words += (
        "precision=fp16",
        "train.seq_len=1024",
        "parallel.tp=1",
        "parallel.cp=1",
        "parallel.pp=1",
    )
    composed, result = found(*words, "backend=deepspeed")
    assert result.best is not None
    for plan in result.ranked:
        meant = typed((*words, "backend=deepspeed"), to_type(composed, plan.config))
        zero = plan.config.zero
        assert meant.zero == zero and zero.offload_optimizer == "cpu"
        without = replace(zero, offload_optimizer="none", offload_param="none")
        assert not predict(replace(plan.config, zero=without)).fits
    native = found(*words)[1].best
    assert native is not None and native.config.offloads
    held = found(*words, "backend=deepspeed", "zero.offload_optimizer=none")[1]
    assert held.best is None


def test_what_does_not_fit_anywhere_is_said_with_what_comes_nearest() -> None:
    _, result = found(
        "recipe=llama-70b",
        "cluster=v100",
        "cluster.hosts=1",
        "precision=fp16",
        "train.seq_len=2048",
        "zero.offload_param=none",
    )
    assert result.best is None and result.nearest is not None
    assert result.nearest.worst.total > result.nearest.capacity
    assert reasons(result) == []


@pytest.mark.slow
def test_a_recipe_of_what_was_found_is_that_layout(tmp_path: Path) -> None:
    composed, result = found(*MIDDLE, "parallel.pp=2", "optimizer.lr=1e-4")
    assert result.best is not None
    best = result.best.config
    file = tmp_path / "found.yaml"
    file.write_text(recipe_of(composed, best))
    again = typed((f"recipe={file}",), [])
    assert replace(again, run=best.run) == replace(best, run=best.run)


@pytest.mark.slow
def test_reasons_are_the_differences_of_two_predictions() -> None:
    _, result = found(*SMALL)
    lines = reasons(result)
    assert any(line.startswith("tp 2 → 1 saves") for line in lines), lines


@pytest.mark.parametrize(
    ("words", "advised"),
    [
        # small is up to 128 devices and 1 B parameters
        ("recipe=llama-1b model.layers=8 cluster.hosts=16 parallel.tp=2", "parallelism alone"),
        (
            "recipe=llama-1b model.layers=8 cluster.hosts=17 train.global_batch=272 parallel.tp=2",
            "recomputed",
        ),
        ("recipe=llama-1b cluster.hosts=16 parallel.tp=2", "recomputed"),
        ("recipe=llama-1b cluster.hosts=2 zero=stage0", "usually sharded"),
        ("recipe=llama-1b model.layers=8 cluster.hosts=2 zero=stage0", None),
        ("recipe=llama-1b cluster.hosts=2", None),
        (
            "recipe=llama-1b cluster.hosts=16 parallel.tp=2 parallel.activation_checkpointing=full",
            None,
        ),
        ("recipe=llama-8b cluster.hosts=32 train.global_batch=1024", "replicas"),
        ("recipe=llama-8b cluster.hosts=64 train.global_batch=1024", "replicas"),
        ("recipe=llama-8b cluster.hosts=31 train.global_batch=992", None),
        ("recipe=llama-8b cluster.hosts=65 train.global_batch=1040", None),
        ("recipe=llama-70b cluster.hosts=125 train.global_batch=1000", "tp and pp"),
        ("recipe=llama-70b cluster.hosts=124 train.global_batch=992", None),
        ("recipe=llama-8b cluster.hosts=125 train.global_batch=1000", None),
        ("recipe=llama-8b cluster.hosts=1 train.seq_len=10016", "divided by cp"),
        ("recipe=llama-8b cluster.hosts=1 train.seq_len=10016 parallel.cp=2", None),
        ("recipe=llama-8b cluster.hosts=1 train.seq_len=9984", None),
        ("recipe=llama-8b cluster.hosts=1", None),
    ],
)
def test_the_ladder_is_told_where_it_applies(words: str, advised: str | None) -> None:
    stage = () if "zero=" in words else ("zero=stage3",)
    layout = ("parallel=dp", *stage, "train.micro_batch=1")
    typed_words = (*words.split(), "cluster=h100-sxm", *layout)
    lines = advice(predict(typed(typed_words, [])))
    assert [advised in line for line in lines] == [True] if advised else lines == []


@pytest.mark.parametrize("used", ["native", "deepspeed"])
def test_the_other_backend_is_searched_with_its_own_costs(used: str) -> None:
    words = (*SMALL, f"backend={used}", "parallel=dp", "train.global_batch=16")
    composed, where = looked_in(*words)
    other = search_other_backend(where, hardware_of(where.base))
    assert other is not None and other.best is not None
    assert other.best.config.backend.name != used
    again = typed(words, to_type(composed, other.best.config))
    assert predict(again).time == other.best.time


def test_deepspeed_calls_python_around_every_module_in_stage_3() -> None:
    waits = {
        (name, stage): predict(
            job("gpt2", seq_len=1024, zero=Zero(stage=stage), backend=Backend(name=name))
        ).time.parts.launch
        for name in ("native", "deepspeed")
        for stage in (1, 3)
    }
    assert waits["deepspeed", 3] > 2 * waits["native", 3] > 0
    assert waits["deepspeed", 1] == waits["native", 1]


def test_a_backend_that_cannot_train_the_job_is_not_searched() -> None:
    _, where = looked_in(*SMALL, "optimizer=adamw8bit")
    adapters = replace(where.base, lora=replace(where.base.lora, rank=8))
    for space in (where, replace(where, base=adapters)):
        assert search_other_backend(space, hardware_of(where.base)) is None


@pytest.mark.slow
def test_what_a_search_found_is_typed_in_place_of_the_open_layout() -> None:
    words = ("recipe=llama-8b", "cluster=h100-sxm")
    composed, where = looked_in(*words)
    assert composed.left_to_plan
    for plan in search(where, hardware_of(where.base)).ranked[:20:4]:
        proposed = to_type(composed, plan.config)
        assert proposed[0] == "parallel=dp"
        again = typed(words, proposed)
        assert (again.parallel, again.zero) == (plan.config.parallel, plan.config.zero)
        assert not compose([*words, *proposed]).left_to_plan
    one = compose([*words, "parallel=dp", "parallel.tp=auto"])
    space = search_space(one, planned_devices(one), hardware_of(where.base))
    best = search(space, hardware_of(where.base)).best
    assert best is not None
    assert f"parallel.tp={best.config.parallel.tp}" in to_type(one, best.config)


@pytest.mark.slow
def test_selective_recomputation_may_keep_fewer_products() -> None:
    words = (*MIDDLE[:3], "train.seq_len=32k", "model.max_seq_len=32k")
    composed, result = found(*words)
    kept = [
        plan
        for plan in result.ranked
        if plan.config.parallel.activation_checkpointing == "selective"
        and plan.config.parallel.selective_keep != "matmuls"
    ]
    assert {plan.config.parallel.selective_keep for plan in kept} == {
        "core-attention",
        "attention",
        "every-2nd-matmul",
    }
    for plan in kept[:3]:
        again = typed(words, to_type(composed, plan.config)).parallel
        assert again.selective_keep == plan.config.parallel.selective_keep
    held = (*words, "parallel.activation_checkpointing=full")
    modes = {plan.config.parallel.activation_checkpointing for plan in found(*held)[1].ranked}
    assert modes == {"full"}

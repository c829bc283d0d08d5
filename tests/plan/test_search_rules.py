"""The search and `check` obey one table of rules: candidates are legal, and no legal layout is left out."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import is_dataclass, replace
from functools import partial
from inspect import isfunction
from itertools import product
from typing import Any

import pytest

from nanoscale.common.devices import Devices
from nanoscale.common.errors import UserError
from nanoscale.config import rules
from nanoscale.config.composing.compose import compose
from nanoscale.config.rules import check
from nanoscale.config.rules.rule import Rule
from nanoscale.config.schema import Config
from nanoscale.config.values.provenance import Composed
from nanoscale.plan.hardware.hardware import hardware_of
from nanoscale.plan.hardware.planned_devices import planned_devices
from nanoscale.plan.search.candidates import (
    SHORTEST_PIECE,
    SearchSpace,
    expert_degrees,
    last_resorts,
    micro_batches,
    recomputations,
    schedules,
    shapes,
)
from nanoscale.plan.search.choice import search_space, to_type
from tests.support.rows import exhaustive

GPUS = "cluster=h100-sxm"
JOBS = {
    "8b": "recipe=llama-8b cluster.hosts=2 train.global_batch=48",
    "tied": "recipe=llama-1b cluster.hosts=1 train.seq_len=4096 train.global_batch=24",
    "learned": "recipe=gpt2 cluster.hosts=1 train.global_batch=16",
    "deepspeed": "recipe=llama-8b cluster.hosts=1 backend=deepspeed backend.compile=auto train.global_batch=16",
    "hpz": "recipe=llama-8b cluster.hosts=1 backend=deepspeed zero=stage3 zero.hpz=4 train.global_batch=16",
    "experts": "recipe=mixtral-8x7b cluster.hosts=1 train.global_batch=16",
    "fp8": "recipe=llama-8b cluster.hosts=1 precision=fp8 train.global_batch=16",
    "documents": "recipe=llama-8b cluster.hosts=1 data.document_mask=true train.global_batch=16",
    "kernel": "recipe=llama-8b cluster.hosts=1 backend.attention=flash train.global_batch=16",
    "offload": "recipe=llama-8b cluster.hosts=1 parallel.offload_activations=true train.global_batch=16",
    "odd": "recipe=llama-8b cluster.hosts=1 model.layers=6 model.heads=12 model.kv_heads=6 "
    "model.hidden=1536 train.seq_len=6144 train.global_batch=12",
    "held": "recipe=llama-8b cluster.hosts=2 parallel.pp=4 parallel.schedule=zbv train.global_batch=32",
}


@pytest.fixture(autouse=True)
def _every_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nanoscale.common.versions.find_spec", lambda name: name)


def space_of(job: str) -> tuple[Composed, SearchSpace, Devices]:
    composed = compose([GPUS, *JOBS[job].split()])
    devices = planned_devices(composed)
    return composed, search_space(composed, devices, hardware_of(composed.config)), devices


def candidates(space: SearchSpace) -> Iterator[Config]:
    """Yield every layout that a search may look at."""
    for shape in shapes(space):
        for degree in expert_degrees(space, shape):
            for layout in (degree, *schedules(space, degree)):
                for recomputed in (*recomputations(space, layout), *last_resorts(space, layout)):
                    yield from micro_batches(space, recomputed)


def is_legal(composed: Composed, config: Config, devices: Devices) -> bool:
    try:
        check(replace(composed, config=config), devices)
    except UserError:
        return False
    return True


@pytest.mark.slow
@pytest.mark.parametrize("job", JOBS)
def test_candidates_pass_check_as_they_are_typed(job: str) -> None:
    composed, space, devices = space_of(job)
    every = list(candidates(space))
    assert every
    for config in every[:: max(1, len(every) // 150)]:
        layout = replace(
            composed.config,
            parallel=config.parallel,
            zero=config.zero,
            train=replace(composed.config.train, micro_batch=config.train.micro_batch),
            backend=config.backend,
        )
        try:
            check(replace(composed, config=layout), devices)
        except UserError as error:
            pytest.fail(f"{to_type(composed, config)}: {error.violations}")


@pytest.mark.slow
@pytest.mark.parametrize(
    "job", ["8b", "deepspeed", "experts", "fp8", "documents", "kernel", exhaustive("odd")]
)
def test_every_legal_combination_of_degrees_is_enumerated(job: str) -> None:
    composed, space, devices = space_of(job)
    base = space.base
    enumerated = {
        _degrees(config)
        for shape in shapes(space)
        for config in (shape, *schedules(space, shape))
        if shape.parallel.dp_replicate == 1 and any(micro_batches(space, config))
    }
    powers = [n for n in range(1, space.world + 1) if space.world % n == 0]
    legal = set()
    for tp, pp, cp, method, stage, (schedule, virtual) in product(
        [n for n in powers if n <= space.island],
        powers,
        [n for n in powers if base.train.seq_len // n >= SHORTEST_PIECE],
        ("ring", "ulysses"),
        range(4),
        (("1f1b", 1), ("gpipe", 1), ("interleaved-1f1b", 3), ("zbv", 2)),
    ):
        if space.world % (tp * pp * cp) or (stage == 3 and pp > 1):
            continue
        if stage and tp * pp == space.world:
            continue  # nothing is left to shard
        layout = replace(
            base.parallel, tp=tp, pp=pp, cp=cp, cp_method=method, dp="auto", schedule=schedule,
            sequence_parallel=base.backend.name == "native" or tp == 1, virtual_stages=virtual,
            layers_per_stage=None, ep=1,
        )  # fmt: skip
        config = replace(
            composed.config,
            parallel=layout,
            zero=replace(base.zero, stage=stage),
            train=replace(composed.config.train, micro_batch="auto"),
        )
        if is_legal(composed, config, devices):
            legal.add(_degrees(config))
    assert len(legal) > 4
    tried = {("1f1b", 1), ("gpipe", 1), ("interleaved-1f1b", 3), ("zbv", 2)}
    assert {degrees for degrees in enumerated if degrees[-2:] in tried} == legal


def _degrees(config: Config) -> tuple[object, ...]:
    layout = config.parallel
    return (
        *(layout.tp, layout.pp, layout.cp, layout.cp_method, config.zero.stage),
        *(layout.schedule, layout.virtual_stages),
    )


def test_a_new_rule_is_obeyed_by_both(monkeypatch: pytest.MonkeyPatch) -> None:
    planted = Rule(
        "parallel.tp",
        ("parallel.tp", "zero.stage"),
        lambda config: config.parallel.tp != 4 or config.zero.stage == 1,
        lambda _: "must not be 4",
        lambda _: ["parallel.tp=2"],
    )
    _, space, _ = space_of("8b")
    assert {shape.zero.stage for shape in shapes(space) if shape.parallel.tp == 4} == {0, 1, 2, 3}
    monkeypatch.setattr(rules, "RULES", (*rules.RULES, planted))
    assert {shape.zero.stage for shape in shapes(space) if shape.parallel.tp == 4} == {1}
    composed = compose([GPUS, *JOBS["8b"].split(), "parallel.tp=4", "zero.stage=2"])
    with pytest.raises(UserError) as caught:
        check(composed, planned_devices(composed))
    (violation,) = caught.value.violations
    assert (violation.key, violation.suggestions) == ("parallel.tp", ("parallel.tp=2",))


class _Reading:
    """A view of a configuration that records the keys that are read."""

    def __init__(self, section: Any, keys: set[str], prefix: str = "") -> None:
        self._section, self._keys, self._prefix = section, keys, prefix

    def __getattr__(self, name: str) -> Any:
        size = getattr(type(self._section), name, None)
        if isinstance(size, property):  # it reads keys in its turn
            return size.fget(self)  # type: ignore[misc]
        if isfunction(size):
            return partial(size, self)
        value, key = getattr(self._section, name), f"{self._prefix}{name}"
        if is_dataclass(value):
            return _Reading(value, self._keys, f"{key}.")
        self._keys.add(key)
        return value


@pytest.mark.slow
def test_rules_name_every_key_that_they_read() -> None:
    """The search tests a rule when these keys are set."""
    for job in JOBS:
        _, space, _ = space_of(job)
        for config in list(candidates(space))[::97]:
            for rule in rules.RULES:
                keys: set[str] = set()
                rule.holds(_Reading(config, keys))  # type: ignore[arg-type]
                assert keys <= {*rule.reads}, rule.key

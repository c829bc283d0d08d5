"""The table of optimizers says what the schema offers and what the backends build."""

from __future__ import annotations

from functools import partial
from typing import Any, get_args, get_type_hints
from unittest.mock import Mock, patch

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters

from nanoscale.backends import one_pass
from nanoscale.backends.optimizer import BUILDERS, fill_state, is_quantized, make_optimizer, set_lr
from nanoscale.common.errors import UserError
from nanoscale.config.composing.compose import compose
from nanoscale.config.optimizers import KEYS, OPTIMIZERS, by_other_name, keeps_average, moments_of
from nanoscale.config.rules import Devices, check
from nanoscale.config.schema import Optimizer, ParameterGroup

FACTORS = {"exp_avg_sq_row": (64,), "exp_avg_sq_col": (64,)}
"""Adafactor's state of a matrix of 64 rows and columns."""


def test_every_choice_has_a_row_and_is_built() -> None:
    names = set(get_args(get_type_hints(Optimizer)["name"]))
    assert names == set(OPTIMIZERS) == {*BUILDERS, "hooks"}  # which the user builds
    for rule in OPTIMIZERS.values():
        assert set(rule.keys) <= set(KEYS)


@pytest.mark.parametrize("name", BUILDERS)
@pytest.mark.parametrize("momentum", [0.9, 0.0])
def test_the_moments_are_those_of_the_built_optimizer(name: str, momentum: float) -> None:
    config = Optimizer(name=name, momentum=momentum)  # type: ignore[arg-type]
    rule = OPTIMIZERS[name]
    if rule.package:
        pytest.importorskip(rule.package)
    parameter = nn.Parameter(torch.ones(64, 64))
    optimizer = make_optimizer([("weight", parameter)], config)
    fill_state(optimizer)
    moments = {key: value for key, value in optimizer.state[parameter].items() if value.ndim}
    if name == "adafactor":  # has vectors of rows and columns in place of moments
        assert {key: tuple(value.shape) for key, value in moments.items()} == FACTORS
        return
    assert tuple(moments) == (*moments_of(config), *(["average"] if keeps_average(config) else []))
    assert all(value.shape == parameter.shape for value in moments.values())
    assert all(is_quantized(value) == rule.quantized for value in moments.values())


def test_muon_has_one_moment_of_a_matrix_in_a_block_and_two_of_others() -> None:
    config = Optimizer(name="muon")
    parameters = [(name, nn.Parameter(torch.ones(8, 4))) for name in ("embed", "layers.0.mlp.up")]
    optimizer = make_optimizer(parameters, config)
    fill_state(optimizer)
    moments = [tuple(optimizer.state[parameter]) for _, parameter in parameters]
    assert moments == [("step", *moments_of(config)), moments_of(config, in_blocks=True)]


def test_groups_have_values_of_their_own() -> None:
    groups = {
        "norms": ParameterGroup("*norm*", weight_decay=0.3),
        "embedding": ParameterGroup("embed.weight", lr_factor=0.5),
        "late": ParameterGroup("*", lr_factor=2.0),
    }
    config = Optimizer(lr=1e-2, weight_decay=0.1, groups=groups)
    names = ("embed.weight", "norm.weight", "layers.0.mlp.up.weight", "layers.0.mlp.up.bias")
    shapes = ((4, 4), (4,), (4, 4), (4,))
    parameters = [
        (name, nn.Parameter(torch.ones(shape))) for name, shape in zip(names, shapes, strict=True)
    ]
    optimizer = make_optimizer(parameters, config)
    set_lr(optimizer, 1e-3)
    found = {
        id(p): (group["lr"], group["weight_decay"])
        for group in optimizer.param_groups
        for p in group["params"]
    }
    assert [found[id(p)] for _, p in parameters] == [
        (5e-4, 0.1),
        (1e-3, 0.3),
        (2e-3, 0.1),
        (2e-3, 0.0),
    ]


@pytest.mark.parametrize(
    ("words", "text", "advice"),
    [
        ("3", "is a section", "optimizer.groups.n.lr_factor=3"),
        ("{lr_factor: 2}", "is needed", "optimizer.groups.n.match='*norm*'"),
        ("{match: '*nrm*'}", "matches no parameter", "'optimizer.groups.n.match=\"*norm*\"'"),
        ("{match: '*', decay: 2}", "unknown key", "optimizer.groups.n.weight_decay=2"),
        ("{match: '*', lr_factor: -1}", "at least 0", "optimizer.groups.n.lr_factor=0"),
    ],
)
def test_a_wrong_group_is_refused(words: str, text: str, advice: str) -> None:
    with pytest.raises(UserError) as caught:
        check(compose(["recipe=debug", f"optimizer.groups.n={words}"]), Devices("cpu", 1))
    (violation,) = caught.value.violations
    assert text in violation.message and advice in violation.suggestions


def test_names_of_other_software() -> None:
    assert by_other_name("FusedAdam") == "adamw" and by_other_name("Lion") == "lion"
    assert by_other_name("lamb") is None


@pytest.mark.parametrize("name", ["lion", "sgd", "schedule-free", "adamw"])
def test_a_compiled_update_is_one_graph_for_all_shapes(name: str) -> None:
    """It equals the eager one, also in a step that is skipped; adamw with bf16 weights."""
    rounded, shapes = name == "adamw", ((64, 64), (128, 32), (7,), (2, 8, 4))
    weights = []
    for compiled in (False, True):
        torch.manual_seed(0)
        dtype = torch.bfloat16 if rounded else torch.float64
        parameters = [(f"p{s}", nn.Parameter(torch.randn(s).to(dtype))) for s in shapes]
        config = Optimizer(name, lr=1e-2, momentum=0.9)  # type: ignore[arg-type]
        optimizer: Any = make_optimizer(parameters, config, rounded=rounded)
        compiler = partial(torch.compile, backend="aot_eager", fullgraph=True)
        before = counters["stats"]["unique_graphs"]
        for step in range(3):
            optimizer.found_inf = torch.tensor(float(step == 1))
            set_lr(optimizer, 1e-2 * step)  # in the first step as much as the decay of vectors
            for _, parameter in parameters:
                parameter.grad = parameter.detach().sin()
            with (
                patch.object(one_pass, "_is_compiled", return_value=compiled),
                patch.object(torch, "compile", compiler),
            ):
                optimizer.step()
        assert counters["stats"]["unique_graphs"] - before == compiled
        weights.append([parameter.detach() for _, parameter in parameters])
    for eager, of_graph in zip(*weights, strict=True):
        torch.testing.assert_close(of_graph, eager, rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("name", ["lion", "sgd", "schedule-free", "adamw"])
def test_a_step_makes_a_scalar_once_for_equal_numbers(name: str) -> None:
    parameters = [(f"layers.{n}.weight", nn.Parameter(torch.randn(4, 4))) for n in range(9)]
    config = Optimizer(name, lr=1e-2, momentum=0.9)  # type: ignore[arg-type]
    optimizer = make_optimizer(parameters, config, rounded=name == "adamw")
    made = [0]
    scalar = Mock(wraps=one_pass._scalar)
    for rate in (1e-2, 1e-2, 2e-2):
        set_lr(optimizer, rate)
        for _, parameter in parameters:
            parameter.grad = parameter.detach().sin()
        with patch.object(one_pass, "_scalar", scalar):
            optimizer.step()
        made.append(scalar.call_count)
    seeds = len(parameters) if name == "adamw" else 0
    assert 0 < made[1] <= 5 + seeds and made[2:] == [made[1], made[1] + 1]

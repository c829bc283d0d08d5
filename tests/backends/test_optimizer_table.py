"""The table of optimizers says what the schema offers and what the backends build."""

from __future__ import annotations

from typing import get_args, get_type_hints

import pytest
import torch
from torch import nn

from nanoscale.backends.optimizer import BUILDERS, fill_state, is_quantized, make_optimizer
from nanoscale.config.optimizers import KEYS, OPTIMIZERS, by_other_name, moments_of
from nanoscale.config.schema import Optimizer


def test_every_choice_has_a_row_and_is_built() -> None:
    names = set(get_args(get_type_hints(Optimizer)["name"]))
    assert names == set(OPTIMIZERS) == set(BUILDERS)
    for rule in OPTIMIZERS.values():
        assert set(rule.keys) <= set(KEYS)


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("momentum", [0.9, 0.0])
def test_the_moments_are_those_of_the_built_optimizer(name: str, momentum: float) -> None:
    config = Optimizer(name=name, momentum=momentum)  # type: ignore[arg-type]
    rule = OPTIMIZERS[name]
    if rule.package:
        pytest.importorskip(rule.package)
    parameter = nn.Parameter(torch.ones(64, 64))
    optimizer = make_optimizer([("weight", parameter)], config)
    fill_state(optimizer)
    moments = {key: value for key, value in optimizer.state[parameter].items() if key != "step"}
    assert tuple(moments) == moments_of(config)
    assert all(value.shape == parameter.shape for value in moments.values())
    assert all(is_quantized(value) == rule.quantized for value in moments.values())


def test_muon_has_one_moment_of_a_matrix_in_a_block_and_two_of_others() -> None:
    config = Optimizer(name="muon")
    parameters = [(name, nn.Parameter(torch.ones(8, 4))) for name in ("embed", "layers.0.mlp.up")]
    optimizer = make_optimizer(parameters, config)
    fill_state(optimizer)
    moments = [tuple(optimizer.state[parameter]) for _, parameter in parameters]
    assert moments == [("step", *moments_of(config)), moments_of(config, in_blocks=True)]


def test_names_of_other_software() -> None:
    assert by_other_name("FusedAdam") == "adamw" and by_other_name("Lion") == "lion"
    assert by_other_name("lamb") is None

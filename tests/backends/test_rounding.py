"""Moments and weights in bf16 are rounded stochastically, and move on average as in fp32."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from nanoscale.backends.adamw import round_stochastically
from nanoscale.backends.optimizer import make_optimizer
from nanoscale.config.schema import Optimizer


def test_a_number_becomes_one_of_its_neighbors_with_itself_as_the_mean() -> None:
    torch.manual_seed(0)
    noise = torch.randint(0, 1 << 16, (200_000,), dtype=torch.int32)
    for value, below, above in ((1.001, 1.0, 1.0078125), (-3.0e-5, -3.004074e-05, -2.992153e-05)):
        rounded = round_stochastically(torch.full((200_000,), value), noise).double()
        assert sorted(rounded.unique().tolist()) == pytest.approx([below, above], rel=1e-5)
        assert rounded.mean().item() == pytest.approx(value, rel=3e-5)
    exact = torch.tensor([0.0, 1.5, -2.0, float("inf"), -float("inf")])
    assert round_stochastically(exact, noise[:5]).float().equal(exact)
    assert round_stochastically(torch.tensor([float("nan")]), noise[:1]).isnan().all()


def trained(
    weights: Tensor, gradient: Tensor, steps: int, name: str = "w", *, rounded: bool = True
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return weights and moments in fp32 after steps that all have the same gradient."""
    parameter = nn.Parameter(weights.clone())
    config = Optimizer(lr=1e-4, weight_decay=0.0, beta2=0.999)
    optimizer = make_optimizer([(name, parameter)], config, rounded=rounded)
    for _ in range(steps):
        parameter.grad = gradient.to(parameter.dtype)
        optimizer.step()
    moments = {key: value.float() for key, value in optimizer.state[parameter].items()}
    return parameter.detach().float(), moments


def test_weights_and_moments_move_on_average_as_in_fp32() -> None:
    """Rounded to the nearest number, neither would move: 1e-4 is below 1/512 of a weight of 1."""
    weights, gradient = torch.ones(100, 100), torch.full((100, 100), 0.5)
    exact, exact_moments = trained(weights, gradient, steps=100, rounded=False)
    assert exact[0, 0].item() == pytest.approx(0.99, abs=1e-4)
    narrow, moments = trained(weights.bfloat16(), gradient, steps=100)
    assert narrow.mean().item() == pytest.approx(exact[0, 0].item(), abs=3e-4)
    only_moments, kept = trained(weights, gradient, steps=100)
    assert only_moments.mean().item() == pytest.approx(exact[0, 0].item(), abs=3e-5)
    for found in (moments, kept):
        for name in ("exp_avg", "exp_avg_sq"):
            assert found[name].mean().item() == pytest.approx(
                exact_moments[name].mean().item(), rel=2e-3
            )


def test_random_numbers_depend_on_the_name_and_the_step_alone() -> None:
    weights, gradient = torch.ones(64, 64).bfloat16(), torch.full((64, 64), 0.5)
    torch.manual_seed(1)
    once, _ = trained(weights, gradient, steps=3)
    torch.manual_seed(2)
    assert trained(weights, gradient, steps=3)[0].equal(once)
    assert not trained(weights, gradient, steps=3, name="v")[0].equal(once)
    first, second = (trained(weights, gradient, steps=steps)[0] for steps in (1, 2))
    assert not (first - 1).equal(second - first)

"""MoE on one device; `test_equivalence` tests the computation."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from transformers import MixtralConfig
from transformers.models.mixtral.modeling_mixtral import MixtralExperts

from nanoscale.models import moe
from nanoscale.models.initialization import initialize
from nanoscale.models.moe import ExpertPairs, MixtureOfExperts, spread, sum_rows
from nanoscale.parallel import expert
from nanoscale.parallel.activation import device_contexts
from tests.support.jobs import SHAPE

GROUPED_MM = F.grouped_mm
LARGE = round(4.5 / moe.BIAS_UNIT)
"""A bias above every difference of scores."""
MOE = replace(SHAPE, experts=4, experts_per_token=2, ffn=24, balance="bias", balance_rate=0.5)


def mixture(**changes: object) -> MixtureOfExperts:
    shape = replace(MOE, **changes)
    made = MixtureOfExperts(shape)
    initialize(made, shape, seed=3)
    return made


def tokens(rows: int = 12) -> Tensor:
    return torch.randn(1, rows, SHAPE.hidden, generator=torch.Generator().manual_seed(5))


@pytest.mark.parametrize("changes", [{}, {"bias": True, "mlp": "swiglu-clamped"}])
@pytest.mark.parametrize("load", [[3, 0, 4, 5], [0, 0, 12, 0], [0, 0, 0, 0]])
def test_the_grouped_kernel_computes_what_the_loop_does(
    load: list[int], changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel is a GPU's; PyTorch has a slow one for the CPU."""
    rows, experts = tokens(sum(load))[0], mixture(**changes).experts
    for parameter in experts.parameters():
        parameter.data += 0.1 * torch.randn_like(parameter)
    results = []
    for grouped in (True, False):
        monkeypatch.setattr(moe, "_supports_grouped_mm", lambda *_, grouped=grouped: grouped)
        x = rows.clone().requires_grad_()
        scales = torch.linspace(0.5, 1, sum(load)).requires_grad_()
        found = moe.run_experts(
            experts.activations, (x, x), scales, torch.tensor(load), *experts.parameters()
        )
        gradients = torch.autograd.grad((found**2).sum(), [x, scales, *experts.parameters()])
        results.append((found, *gradients))
    for grouped_result, looped in zip(*results, strict=True):
        torch.testing.assert_close(grouped_result, looped)


class UnwrittenGradients(torch.autograd.Function):
    """A grouped product whose backward pass leaves what it does not compute as it finds it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight, ends)
        return GROUPED_MM(x, weight, offs=ends)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight, ends = ctx.saved_tensors
        with torch.enable_grad():
            inputs = [it.detach().requires_grad_() for it in (x, weight)]
            out = GROUPED_MM(*inputs, offs=ends)
        grad_x, grad_weight = torch.autograd.grad(out, inputs, grad)
        grad_weight[ends.diff(prepend=ends.new_zeros(1)) == 0] = torch.nan
        return grad_x, grad_weight, None


def test_a_kernel_that_leaves_gradients_unwritten(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blackwell and AMD GPUs have such kernels."""
    x, experts = tokens(12)[0], mixture().experts
    choices = torch.tensor([[0], [2], [3]]).repeat(4, 1), torch.ones(12, 1)
    (experts(x, choices[1], choices[0]) ** 2).sum().backward()
    expected = [parameter.grad for parameter in experts.parameters()]
    experts.zero_grad()
    monkeypatch.setattr(F, "grouped_mm", lambda x, w, offs: UnwrittenGradients.apply(x, w, offs))
    monkeypatch.setattr(moe, "_leaves_unused_unwritten", lambda _: True)
    monkeypatch.setattr(moe, "_supports_grouped_mm", lambda *_: True)
    (experts(x, choices[1], choices[0]) ** 2).sum().backward()
    for parameter, gradient in zip(experts.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, gradient)


def test_every_expert_has_a_gradient_also_one_without_tokens() -> None:
    made = mixture()
    made.router.choice_bias += torch.tensor([LARGE, LARGE, 0, 0])
    made(tokens()).sum().backward()
    assert made.router.load.tolist() == [12, 12, 0, 0]
    for parameter in made.experts.parameters():
        assert parameter.grad is not None
        assert parameter.grad[:2].any() and not parameter.grad[2:].any()


def test_experts_of_transformers_without_tokens_take_part_in_the_backward_pass() -> None:
    """A rank of ep whose experts no token chose must send gradients back, for which the others wait."""
    config = MixtralConfig(hidden_size=8, intermediate_size=4, num_local_experts=2)
    config._experts_implementation = "eager"
    experts = MixtralExperts(config)
    for parameter in experts.parameters():  # transformers leaves them unwritten: 0 · NaN is not 0
        nn.init.ones_(parameter)
    rows = torch.zeros(0, 8, requires_grad=True)
    weights, chosen = torch.zeros(0, 2, requires_grad=True), torch.zeros(0, 2, dtype=torch.long)
    expert._run_foreign(experts.forward, 2, rows, weights, chosen, 0).sum().backward()
    assert rows.grad is not None and weights.grad is not None
    assert all(it.grad is not None and not it.grad.any() for it in experts.parameters())


def test_a_preference_changes_the_choice_and_not_the_weights() -> None:
    made, x = mixture(experts_per_token=1), tokens()
    usual, chosen = made.router(x)
    made.router.choice_bias[2] += LARGE
    weights, preferred = made.router(x)
    assert (chosen != 2).any() and (preferred == 2).all()
    assert torch.equal(weights, usual) and (weights == 1).all()


def test_recomputation_and_evaluation_are_not_counted() -> None:
    made, x = mixture(), tokens()
    with torch.no_grad():
        made(x)
    assert not made.router.load.any()
    contexts = partial(device_contexts, "nothing")
    out: Tensor = checkpoint(made, x, use_reentrant=False, context_fn=contexts)  # type: ignore[assignment]
    out.sum().backward()
    assert made.router.load.sum() == 12 * 2


def test_the_router_computes_in_fp32_in_a_narrow_model() -> None:
    made, x = mixture(), tokens()
    with torch.autocast("cpu", torch.bfloat16):
        weights, _ = made.router(x)
        assert made(x).dtype == torch.bfloat16
    assert torch.equal(weights, made.router(x)[0])


def test_pairs_of_tokens_and_experts() -> None:
    """Expert 3 is another rank's: two tokens have one pair here, and one has none."""
    chosen = torch.tensor([[2, 0], [1, 3], [3, 3], [0, 3]])
    pairs = ExpertPairs.of_choices(chosen, 3, 4)
    assert pairs.load.tolist() == [2, 1, 1]
    assert pairs.tokens.tolist() == [0, 3, 1, 0]
    assert pairs.slots.tolist() == [1, 6, 2, 0]
    x = torch.randn(4, 3, dtype=torch.float64, requires_grad=True)
    rows = spread(x, pairs)
    assert torch.equal(rows, x[[0, 3, 1, 0]])
    assert torch.equal(sum_rows(rows, pairs), x * torch.tensor([2, 1, 0, 1]).double().unsqueeze(1))
    assert torch.autograd.gradcheck(lambda x: spread(x, pairs), x)
    assert torch.autograd.gradcheck(lambda x: sum_rows(x, pairs), x)


def test_rows_without_a_pair_fill_tiles() -> None:
    """The last expert has the rows that other choices would need elsewhere: two tiles for three experts."""
    chosen = torch.tensor([[2, 0], [1, 3], [3, 3], [0, 3]])
    pairs = ExpertPairs.of_choices(chosen, 3, 4, tile=4)
    assert pairs.load.tolist() == [4, 4, 4]
    assert pairs.tokens.tolist() == [0, 3, 4, 4, 1, 4, 4, 4, 0, 4, 4, 4]
    assert pairs.slots.tolist() == [1, 6, 8, 8, 2, 8, 8, 8, 0, 8, 8, 8]
    assert ExpertPairs.of_choices(chosen[:, :1], 3, 3, tile=4).load.tolist() == [4, 4, 4]
    assert ExpertPairs.of_choices(torch.zeros(6, 1).long(), 3, 6, tile=4).load.tolist() == [8, 0, 4]
    x = F.pad(torch.randn(4, 3).double(), (0, 0, 0, 1)).requires_grad_()
    rows = spread(x, pairs)
    twice = torch.tensor([2, 1, 0, 1, 0]).double().unsqueeze(1)
    assert torch.equal(sum_rows(rows, pairs), x * twice)
    assert torch.autograd.gradcheck(lambda x: sum_rows(x, pairs)[:-1], rows)


def test_operations_return_what_the_compiler_expects() -> None:
    """Shapes and strides."""
    load, rows = torch.tensor([3, 0, 5]), torch.randn(8, 4)
    scores, weight = torch.randn(8, 3), torch.randn(3, 6, 4)
    for operation, arguments in (
        (moe.multiply_router, (rows, scores[:3, :1].expand(3, 4))),
        (moe.choose_experts, (scores, 2, load)),
        (moe.sort_choices, (scores.topk(2).indices, 3, 16, 1)),
        (moe.sort_choices, (scores.topk(2).indices, 3, 16, 8)),
        (moe.multiply_by_expert, (load, rows, weight)),
        (moe.multiply_by_expert, (load, torch.randn(8, 6), weight.mT)),
        (moe.gradient_by_expert, (load, rows, torch.randn(8, 6))),
    ):
        torch.library.opcheck(operation, arguments, test_utils="test_faketensor")


def test_a_compiled_block_with_experts_compiles_once() -> None:
    """Other loads need no other code. Compiled, recomputed and eager blocks compute the same."""
    torch._dynamo.reset()
    made = mixture().double()
    run = partial(
        checkpoint, made, use_reentrant=False, context_fn=partial(device_contexts, "matmuls")
    )
    compiled = torch.compile(run, fullgraph=True)
    with torch._dynamo.config.patch(error_on_recompile=True, capture_scalar_outputs=True):
        for scale in (1.0, -3.0):
            x = (scale * tokens()).double().requires_grad_()
            results = []
            for forward in (made, compiled):
                out = forward(x)
                results.append((out, *torch.autograd.grad((out**2).sum(), [x, *made.parameters()])))
            for eager, other in zip(*results, strict=True):
                # The processor's vectors decide the order of a sum: n terms round by at most n · eps.
                # A gradient passes four products of at most `hidden` terms.
                terms = 4 * SHAPE.hidden
                rounding = terms * torch.finfo(torch.float64).eps * eager.abs().max().item()
                torch.testing.assert_close(other, eager, rtol=1e-12, atol=rounding)
    assert made.router.load.sum() == 4 * 12 * 2

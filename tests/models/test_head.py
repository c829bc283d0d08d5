"""The loss in chunks, compared with PyTorch's own, which has all logits."""

from __future__ import annotations

import shutil
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch._dynamo.utils import counters
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from nanoscale.data.batch import IGNORED
from nanoscale.models import head
from nanoscale.parallel import process_group
from nanoscale.plan.memory import loss as planned
from nanoscale.rehearse.played.live_memory import LiveMemory
from tests.support.ranks import run_ranks

TOKENS, HIDDEN, VOCAB = 60, 16, 320
FACTOR = 0.3
"""The factor on a loss before its backward pass."""
BOUNDS = {
    # A sum of n terms rounds by at most n · eps, in whichever order the processor adds.
    torch.float64: (HIDDEN + VOCAB) * torch.finfo(torch.float64).eps,
    torch.float32: 1e-6,
    torch.bfloat16: 1e-2,
    torch.float16: 2e-3,
}
Found = tuple[Tensor, Tensor, Tensor]
"""The loss, and the gradients of hidden states and weights."""


def example(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    dice = torch.Generator().manual_seed(5)
    hidden = torch.randn(2, TOKENS // 2, HIDDEN, generator=dice, dtype=torch.float64).to(dtype)
    weight = torch.randn(VOCAB, HIDDEN, generator=dice, dtype=torch.float64).to(dtype)
    targets = torch.randint(VOCAB, (2, TOKENS // 2), generator=dice)
    targets[0, 3:9] = IGNORED
    return hidden.requires_grad_(), weight.requires_grad_(), targets


def in_one(dtype: torch.dtype, z_loss: float = 0.0) -> Found:
    """Return the exact result: in fp64, of the same rounded numbers. The loss is without the z-loss."""
    hidden, weight, targets = example(dtype)
    logits = hidden.double() @ weight.double().t()
    loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
    z = logits.flatten(0, 1)[targets.flatten() != IGNORED].logsumexp(-1).square().sum()
    ((loss + z_loss * z) * FACTOR).backward()
    return loss, hidden.grad, weight.grad  # type: ignore[return-value]


def in_pieces(dtype: torch.dtype, *, fused: bool = False, z_loss: float = 0.0) -> Found:
    hidden, weight, targets = example(dtype)
    loss = head.linear_cross_entropy(hidden, weight, targets, fused=fused, z_loss=z_loss)
    (loss * FACTOR).backward()
    return loss, hidden.grad, weight.grad  # type: ignore[return-value]


def deviations(found: Found, wanted: Found) -> list[float]:
    pairs = zip(found, wanted, strict=True)
    return [((a.double() - b).norm() / b.double().norm()).item() for a, b in pairs]


@pytest.mark.parametrize("pieces", [1, 7])
@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
def test_loss_and_gradients(
    dtype: torch.dtype, pieces: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(head, "LOGITS_AT_ONCE", TOKENS * VOCAB // pieces)
    found = in_pieces(dtype)
    assert found[0].dtype == torch.promote_types(dtype, torch.float32)
    assert max(deviations(found, in_one(dtype))) < BOUNDS[dtype]


@pytest.mark.parametrize("fused", [False, True])
def test_the_z_loss_is_in_the_gradients(fused: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(head, "_compiled", lambda function: function)
    found = in_pieces(torch.float64, fused=fused, z_loss=0.2)
    assert max(deviations(found, in_one(torch.float64, 0.2))) < BOUNDS[torch.float64]
    assert max(deviations(found, in_one(torch.float64))) > 0.1


@pytest.mark.parametrize("pieces", [1, 7])
@pytest.mark.parametrize("fused", [False, True])
def test_tokens_may_have_weights_in_the_gradients(
    pieces: int, fused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(head, "LOGITS_AT_ONCE", TOKENS * VOCAB // pieces)
    monkeypatch.setattr(head, "_compiled", lambda function: function)
    hidden, weight, targets = example(torch.float64)
    weights = torch.linspace(-1, 2, targets.numel(), dtype=torch.float64).view_as(targets)
    loss = head.linear_cross_entropy(hidden, weight, targets, fused=fused, token_weights=weights)
    loss.backward()
    found = hidden.grad, weight.grad
    assert torch.equal(loss, head.linear_cross_entropy(hidden, weight, targets, fused=fused))
    hidden, weight, _ = example(torch.float64)
    losses = F.cross_entropy((hidden @ weight.t()).mT, targets, reduction="none")
    (losses * weights).sum().backward()
    torch.testing.assert_close(found, (hidden.grad, weight.grad))


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler")
def test_what_is_between_the_products_can_be_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(head, "LOGITS_AT_ONCE", TOKENS * VOCAB // 3)
    counters.clear()
    found = in_pieces(torch.bfloat16, fused=True)
    assert max(deviations(found, in_one(torch.bfloat16))) < BOUNDS[torch.bfloat16]
    assert counters["stats"]["unique_graphs"] == 2
    assert not counters["graph_break"]


def test_a_gradient_can_be_asked_for_twice() -> None:
    """Pipelines that split the backward pass request the gradients of inputs first."""
    hidden, weight, targets = example(torch.float64)
    loss = head.linear_cross_entropy(hidden, weight, targets) * FACTOR
    (first,) = torch.autograd.grad(loss, hidden, retain_graph=True)
    (second,) = torch.autograd.grad(loss, weight)
    _, of_hidden, of_weight = in_one(torch.float64)
    torch.testing.assert_close(first, of_hidden)
    torch.testing.assert_close(second, of_weight)


def test_gradients_in_fp16_may_be_sums_of_many_tokens() -> None:
    """65,504 is the largest number of fp16, and 1,024 tokens of size 100 want the same word."""
    hidden = torch.full((1, 1024, 4), 100.0, dtype=torch.float16)
    weight = torch.zeros(8, 4, dtype=torch.float16, requires_grad=True)
    loss = head.linear_cross_entropy(hidden, weight, torch.full((1, 1024), 3))
    (loss / 1024).backward()
    assert weight.grad is not None
    assert weight.grad[3].tolist() == pytest.approx([-100 * 7 / 8] * 4, rel=1e-3)


def test_where_nothing_is_learned_the_loss_is_zero() -> None:
    hidden, weight, targets = example(torch.float32)
    loss = head.linear_cross_entropy(hidden, weight, torch.full_like(targets, IGNORED))
    loss.backward()
    assert loss.item() == 0
    assert not weight.grad.any()
    assert not hidden.grad.any()


@pytest.mark.parametrize("training", [True, False])
def test_there_are_never_all_logits(training: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(head, "LOGITS_AT_ONCE", TOKENS * VOCAB // 6)
    with LiveMemory() as memory, torch.set_grad_enabled(training):
        hidden, weight, targets = example(torch.float32)
        memory.reset_peak()
        before = memory.live
        loss = head.linear_cross_entropy(hidden, weight, targets)
        held = memory.live - before - loss.nbytes
    kept = hidden.nbytes + weight.nbytes if training else 0
    assert held == kept
    # The logits of a piece and their softmax, or their gradient and one product as large as the weights: a
    # second product, or the last one beside the next piece, would be more.
    piece, small = 4 * TOKENS * VOCAB / 6, 4 * TOKENS * 8
    most = max(2 * piece, piece + weight.nbytes) if training else 2 * piece
    assert kept < memory.peak - before <= kept + most + small


@pytest.mark.parametrize("fused", [True, False])
def test_an_evaluation_computes_no_gradient(fused: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(head, "_compiled", lambda function: function)
    hidden, weight, targets = example(torch.float32)
    losses, products = [], []
    for training in (True, False):
        with Products() as counter, torch.set_grad_enabled(training):
            losses.append(head.linear_cross_entropy(hidden, weight, targets, fused=fused).item())
        products.append(counter.elements)
    assert losses[0] == losses[1]
    assert products[0] >= TOKENS * VOCAB > products[1]


class Products(TorchDispatchMode):
    """A count of the elements of all element-wise products."""

    elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func.overloadpacket is torch.ops.aten.mul:
            self.elements += result.numel()
        return result


def test_the_plan_knows_the_size_of_a_piece() -> None:
    assert planned.LOGITS_AT_ONCE == head.LOGITS_AT_ONCE


def divided(rank: int, dtype: torch.dtype) -> list[list[float]]:
    process_group.join(2, torch.device("cpu"), 120.0)
    head.LOGITS_AT_ONCE = TOKENS * VOCAB // 2 // 5
    hidden, weight, targets = example(dtype)
    mine = weight.detach().chunk(2)[rank].clone().requires_grad_()
    vocabulary = head.VocabularyShard(rank * len(mine), dist.group.WORLD)
    loss = head.linear_cross_entropy(hidden, mine, targets, vocabulary)
    (loss * FACTOR).backward()
    return [part.double().tolist() for part in (loss, hidden.grad, mine.grad)]


@pytest.mark.slow
def test_a_divided_vocabulary_has_the_same_loss() -> None:
    for dtype in (torch.float64, torch.bfloat16):
        first, second = (
            [torch.tensor(part, dtype=torch.float64) for part in found]
            for found in run_ranks(divided, 2, dtype)
        )
        assert first[0] == second[0]
        together = (first[0], first[1] + second[1], torch.cat((first[2], second[2])))
        assert max(deviations(together, in_one(dtype))) < BOUNDS[dtype]

from __future__ import annotations

import io

import pytest
import torch

from nanoscale.backends.scaling import LossScale
from nanoscale.config.schema import Precision


def make(scale: float, window: int) -> LossScale:
    return LossScale(Precision(compute="fp16", loss_scale=scale, loss_scale_window=window))


def run(scale: LossScale, verdicts: str) -> list[float]:
    """Return the scale after each step; `.` is a finite one, `x` an overflow."""
    return [(scale.update(verdict == "."), scale.scale)[1] for verdict in verdicts]


def test_halves_and_doubles() -> None:
    scale = make(1024.0, window=3)
    assert run(scale, "..x...x.....") == [
        *(1024, 1024, 512),  # the two good steps before an overflow no longer count
        *(512, 512, 1024, 512),
        *(512, 512, 1024, 1024, 1024),
    ]
    assert scale.skipped_steps == 2


def test_only_an_overflow_skips() -> None:
    scale = make(8.0, window=1)
    assert [scale.update(finite) for finite in (True, False, True)] == [True, False, True]


def test_exhausted_below_fp16() -> None:
    scale = make(1.0, window=10)
    run(scale, "x" * 14)
    assert scale.scale == torch.finfo(torch.float16).tiny and not scale.exhausted
    run(scale, "x")
    assert scale.exhausted


def test_never_becomes_infinite() -> None:
    scale = make(2.0**1022, window=1)
    assert run(scale, "....")[-1] == 2.0**1023


@pytest.mark.parametrize("stop", range(9))
def test_resumed_scale_goes_on_exactly(stop: int) -> None:
    verdicts = "..x......x"
    whole, first = make(64.0, window=3), make(64.0, window=3)
    expected = run(whole, verdicts)
    run(first, verdicts[:stop])
    file = io.BytesIO()
    torch.save(first.state(), file)
    file.seek(0)
    resumed = make(64.0, window=3)
    for name, value in torch.load(file).items():
        resumed.state()[name].copy_(value)
    assert run(resumed, verdicts[stop:]) == expected[stop:]
    assert resumed.skipped_steps == whole.skipped_steps


def test_scaled_gradients_survive_fp16() -> None:
    """A gradient that is zero in fp16 without a scale and right, once divided again, with it."""
    weight = torch.ones((), dtype=torch.float16, requires_grad=True)
    tiny = torch.tensor(2.0**-24, dtype=torch.float16)
    scale = make(65536.0, window=2000)

    def gradient(factor: float) -> float:
        weight.grad = None
        loss = (weight * tiny).float() / 8
        (loss * factor).backward()
        assert weight.grad is not None
        return weight.grad.double().item() / factor

    assert gradient(1.0) == 0
    assert gradient(scale.scale) == 2.0**-27

"""What training should give: a loop in plain PyTorch, on one device, with no code of ours but the model."""

from __future__ import annotations

import math
from functools import cache

import numpy as np
import torch
from torch.nn import functional as F

from nanoscale.config.schema import Model
from nanoscale.models.initialization import initialise
from nanoscale.models.transformer import Transformer
from tests.jobs import SAMPLES, SEQ_LEN, SHAPE, STEPS

BOUNDS = {"fp64": (1e-9, 1e-9), "fp32": (1e-5, 1e-3)}  # loss, gradient norm: law 1
CURVE = list[tuple[float, float, float, int]]
"""loss, gradient norm, learning rate and tokens so far, by step"""


@cache
def plain_loop(precision: str, optimizer: str = "adamw", shape: Model = SHAPE) -> CURVE:
    """What each step logs.

    The corpus holds as many samples as a global batch, so that every order of samples gives the same batches.
    """
    dtype = {"fp64": torch.float64, "fp32": torch.float32}[precision]
    tokens = np.random.default_rng(7).integers(0, shape.vocab, SAMPLES * SEQ_LEN + 1)
    windows = [tokens[i * SEQ_LEN : (i + 1) * SEQ_LEN + 1] for i in range(SAMPLES)]
    batch = torch.tensor(np.stack(windows))
    model = Transformer(shape).to(dtype)
    initialise(model, shape, seed=3)
    matrices = [p for p in model.parameters() if p.ndim > 1]
    vectors = [p for p in model.parameters() if p.ndim == 1]
    groups = [{"params": matrices}, {"params": vectors, "weight_decay": 0.0}]
    if optimizer == "adamw":
        update = torch.optim.AdamW(groups, lr=1e-2, betas=(0.9, 0.95), weight_decay=0.1)
    else:
        update = torch.optim.SGD(groups, lr=1e-2, momentum=0.9, weight_decay=0.1)
    curve = []
    for step in range(1, STEPS + 1):
        falling = 0.1 + 0.9 * (1 + math.cos(math.pi * (step - 3) / (STEPS - 3))) / 2
        for group in update.param_groups:
            group["lr"] = 1e-2 * (step / 3 if step < 3 else falling)
        logits = model(batch[:, :-1])
        loss = F.cross_entropy(logits.reshape(-1, shape.vocab), batch[:, 1:].reshape(-1))
        update.zero_grad()
        loss.backward()
        norm = torch.sqrt(sum((p.grad**2).sum() for p in model.parameters()))
        for parameter in model.parameters():
            parameter.grad *= min(1.0, 0.5 / (norm.item() + 1e-6))  # as torch does
        update.step()
        lr = update.param_groups[0]["lr"]
        curve.append((loss.item(), norm.item(), lr, step * SAMPLES * SEQ_LEN))
    return curve


def worst(ours: CURVE, reference: CURVE) -> tuple[float, float]:
    """The largest relative difference in loss and in gradient norm."""
    difference = np.abs(np.array(ours) - np.array(reference)) / np.abs(np.array(reference))
    return tuple(difference.max(axis=0)[:2])


def assert_equal_curves(ours: CURVE, reference: CURVE, precision: str) -> None:
    assert len(ours) == len(reference) == STEPS
    np.testing.assert_allclose([row[2:] for row in ours], [row[2:] for row in reference], 1e-12)
    loss, norm = worst(ours, reference)
    loss_bound, norm_bound = BOUNDS[precision]
    assert loss <= loss_bound, f"loss differs by {loss:.1e}"
    assert norm <= norm_bound, f"gradient norm differs by {norm:.1e}"

"""The reference training: a loop in plain PyTorch, on one device, with no code of ours but the model."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

from nanoscale.config.schema import Lora, Model
from nanoscale.models.initialization import draw, initialize
from nanoscale.models.moe import MixtureOfExperts
from nanoscale.models.transformer import Transformer
from tests.support.jobs import SAMPLES, SEQ_LEN, SHAPE, STEPS

BOUNDS = {"fp64": (1e-9, 1e-9), "fp32": (1e-5, 1e-3)}  # loss, gradient norm: law 1
EVERYTHING = Lora()
"""Is trained, and not adapters alone."""
CURVE = list[tuple[float, float, float, int]]
"""Loss, gradient norm, learning rate and tokens so far, by step."""


@cache
def plain_loop(
    precision: str,
    optimizer: str = "adamw",
    shape: Model = SHAPE,
    lora: Lora = EVERYTHING,
    steps: int = STEPS,
    z_loss: float = 0.0,
    label_smoothing: float = 0.0,
    qk_clip: float | None = None,
) -> CURVE:
    """Return the log of each step. `lora`: with targets that can be hashed; `z_loss` is not in the losses.

    The corpus holds as many samples as a global batch, so every order of samples gives the same batches.
    """
    tokens = np.random.default_rng(7).integers(0, shape.vocab, SAMPLES * SEQ_LEN + 1)
    windows = [tokens[i * SEQ_LEN : (i + 1) * SEQ_LEN + 1] for i in range(SAMPLES)]
    batch = torch.tensor(np.stack(windows))

    def loss_of(model: nn.Module) -> torch.Tensor:
        logits = model(batch[:, :-1])
        z = z_loss * logits.logsumexp(-1).square().mean()
        logits, targets = logits.reshape(-1, shape.vocab), batch[:, 1:].reshape(-1)
        loss = F.cross_entropy(logits, targets, label_smoothing=label_smoothing)
        return loss + z - z.detach()

    return _train(loss_of, precision, optimizer, shape, lora, steps, qk_clip)


def documents_alone(
    precision: str,
    shape: Model,
    documents: list[np.ndarray],
    answers: list[np.ndarray],
    steps: int = STEPS,
) -> CURVE:
    """Train on documents that go through the model alone; longer ones are cut at the sequence length.

    The loss is the mean over their answers.
    """
    pieces = [
        (torch.tensor(document[at : at + SEQ_LEN + 1]), torch.tensor(marks[at : at + SEQ_LEN + 1]))
        for document, marks in zip(documents, answers, strict=True)
        for at in range(0, len(document) - 1, SEQ_LEN)
    ]

    def loss_of(model: nn.Module) -> torch.Tensor:
        losses = []
        for tokens, counted in pieces:
            found = F.cross_entropy(model(tokens[None, :-1])[0], tokens[1:], reduction="none")
            losses.append(found[counted[1:]])
        return torch.cat(losses).mean()

    return _train(loss_of, precision, "adamw", shape, EVERYTHING, steps)


def _train(
    loss_of: Callable[[nn.Module], torch.Tensor],
    precision: str,
    optimizer: str,
    shape: Model,
    lora: Lora,
    steps: int,
    qk_clip: float | None = None,
) -> CURVE:
    dtype = {"fp64": torch.float64, "fp32": torch.float32}[precision]
    model = Transformer(shape).to(dtype)
    initialize(model, shape, seed=3)
    mixtures = [layer.mlp for layer in model.layers.values()] if shape.experts else []
    mixtures = [EveryExpert(mixture, shape) for mixture in mixtures[shape.dense_layers :]]
    with_experts = list(model.layers.values())[shape.dense_layers :]
    for layer, mixture in zip(with_experts, mixtures, strict=False):
        layer.mlp = mixture
    scores: dict[nn.Module, torch.Tensor] = {}
    for layer in model.layers.values() if qk_clip is not None else ():
        layer.attention.core.register_forward_pre_hook(partial(_note_scores, scores, layer))
    trained: nn.Module = Merged(model, lora) if lora.rank else model
    parameters = [p for p in trained.parameters() if p.requires_grad]
    in_blocks = {id(p) for layer in model.layers.values() for p in layer.parameters() if p.ndim > 1}
    of_experts = {id(p) for mixture in mixtures for p in mixture.biases}
    matrices = [p for p in parameters if p.ndim > 1 and id(p) not in of_experts]
    vectors = [p for p in parameters if p.ndim == 1 or id(p) in of_experts]
    groups = [{"params": matrices}, {"params": vectors, "weight_decay": 0.0}]
    groups = [group for group in groups if group["params"]]
    update: torch.optim.Optimizer | Both
    if optimizer == "adamw":
        update = torch.optim.AdamW(groups, lr=1e-2, betas=(0.9, 0.95), weight_decay=0.1)
    elif optimizer == "lion":
        update = PaperLion(groups, lr=1e-2, beta1=0.9, beta2=0.95, weight_decay=0.1)
    elif optimizer == "schedule-free":
        update = PaperScheduleFree(groups, lr=1e-2, beta1=0.9, beta2=0.95, weight_decay=0.1)
    elif optimizer == "adafactor":
        update = PaperAdafactor(groups, lr=1e-2, weight_decay=0.1)
    elif optimizer == "muon":
        muon = [p for p in matrices if id(p) in in_blocks]
        groups[0]["params"] = [p for p in matrices if id(p) not in in_blocks]
        update = torch.optim.AdamW(groups, lr=1e-2, betas=(0.9, 0.95), weight_decay=0.1)
        update = Both(update, PaperMuon(muon, lr=1e-2, momentum=0.9, weight_decay=0.1))
    else:
        update = torch.optim.SGD(groups, lr=1e-2, momentum=0.9, weight_decay=0.1)
    curve = []
    for step in range(1, steps + 1):
        falling = 0.1 + 0.9 * (1 + math.cos(math.pi * (step - 3) / (steps - 3))) / 2
        for group in update.param_groups:
            group["lr"] = 1e-2 * (step / 3 if step < 3 else falling)
        loss = loss_of(trained)
        update.zero_grad()
        (loss + sum(mixture.penalty for mixture in mixtures)).backward()
        norm = torch.sqrt(sum((p.grad**2).sum() for p in parameters))
        for parameter in parameters:
            parameter.grad *= min(1.0, 0.5 / (norm.item() + 1e-6))  # as torch does
        update.step()
        for layer in model.layers.values() if qk_clip is not None else ():
            _clip_heads(layer.attention, scores[layer], qk_clip)
        for mixture in mixtures:
            mixture.rebalance()
        lr = update.param_groups[0]["lr"]
        curve.append((loss.item(), norm.item(), lr, step * SAMPLES * SEQ_LEN))
    return curve


@torch.no_grad()
def _note_scores(
    scores: dict[nn.Module, torch.Tensor], layer: nn.Module, _: nn.Module, inputs: tuple[Any, ...]
) -> None:
    """Note the scores of all queries with all keys, `[batch, heads, seq, seq]`."""
    q, k = inputs[0], inputs[1].repeat_interleave(inputs[0].shape[1] // inputs[1].shape[1], dim=1)
    scores[layer] = (q @ k.mT / math.sqrt(q.shape[-1])).tril()


@torch.no_grad()
def _clip_heads(attention: Any, scores: torch.Tensor, limit: float) -> None:
    """Scale the rows of one head after another, if the largest score with its keys is too large."""
    width, latent = attention.head_dim, hasattr(attention, "wkv_b")
    kv_heads = scores.shape[1] if latent else len(attention.wk.weight) // width
    each = scores.shape[1] // kv_heads
    for head in range(kv_heads):
        factor = limit / max(limit, scores[:, head * each : (head + 1) * each].max().item())
        rows = slice(head * each * width, (head + 1) * each * width)
        attention.wq.weight[rows] *= math.sqrt(factor)
        if not latent:
            attention.wk.weight[head * width : (head + 1) * width] *= math.sqrt(factor)
            continue
        plain, both = attention.plain_dim, attention.plain_dim + attention.v_dim
        attention.wq.weight[head * width + plain : (head + 1) * width] *= math.sqrt(factor)
        attention.wkv_b.weight[head * both : head * both + plain] *= math.sqrt(factor)


class PaperLion(torch.optim.Optimizer):
    """The formulas of arXiv:2302.06675, algorithm 2, one after another."""

    def __init__(self, groups: list[dict[str, Any]], **defaults: float) -> None:
        super().__init__(groups, defaults)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            lr, beta1, beta2 = (group[name] for name in ("lr", "beta1", "beta2"))
            for theta in group["params"]:
                m = self.state[theta].get("m", torch.zeros_like(theta))
                update = torch.sign(beta1 * m + (1 - beta1) * theta.grad)
                theta.copy_(theta - lr * (update + group["weight_decay"] * theta))
                self.state[theta]["m"] = beta2 * m + (1 - beta2) * theta.grad


class PaperAdafactor(torch.optim.Optimizer):
    """The formulas of arXiv:1804.04235, algorithms 4 and 5, with whole outer products."""

    def __init__(self, groups: list[dict[str, Any]], **defaults: float) -> None:
        super().__init__(groups, defaults)
        self.t = 0

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        self.t += 1
        beta = 1 - self.t**-0.8
        for group in self.param_groups:
            for theta in group["params"]:
                squares = theta.grad**2 + 1e-30
                if theta.ndim == 1:
                    v = self.state[theta].get("v", 0) * beta + (1 - beta) * squares
                    self.state[theta]["v"] = v
                else:
                    r, c = self.state[theta].get("rc", (0, 0))
                    r = beta * r + (1 - beta) * squares.sum(-1)
                    c = beta * c + (1 - beta) * squares.sum(-2)
                    self.state[theta]["rc"] = r, c
                    v = torch.einsum("...i,...j->...ij", r, c) / r.sum(-1)[..., None, None]
                update = theta.grad / v.sqrt()
                update = update / max(1.0, (update**2).mean().sqrt().item())
                theta.copy_(theta - group["lr"] * (update + group["weight_decay"] * theta))


class PaperScheduleFree(torch.optim.Optimizer):
    """The formulas of arXiv:2405.15682 with all three sequences; the model has y."""

    def __init__(self, groups: list[dict[str, Any]], **defaults: float) -> None:
        super().__init__(groups, defaults)
        self.rates: list[float] = []

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        self.rates.append(self.param_groups[0]["lr"])
        share = self.rates[-1] ** 2 / sum(rate**2 for rate in self.rates)
        for group in self.param_groups:
            lr, beta1, beta2 = (group[name] for name in ("lr", "beta1", "beta2"))
            for y in group["params"]:
                x, z, v = self.state[y].get("xzv", (y.clone(), y.clone(), torch.zeros_like(y)))
                v = beta2 * v + (1 - beta2) * y.grad**2
                root = torch.sqrt(v / (1 - beta2 ** len(self.rates))) + 1e-8
                z = z - lr * (y.grad / root + group["weight_decay"] * y)
                x = (1 - share) * x + share * z
                self.state[y]["xzv"] = (x, z, v)
                y.copy_((1 - beta1) * z + beta1 * x)


class PaperMuon(torch.optim.Optimizer):
    """Muon with the singular values of arXiv:2502.16982: the polynomial acts on them alone."""

    def __init__(self, parameters: list[nn.Parameter], **defaults: float) -> None:
        super().__init__(parameters, defaults)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        (group,) = self.param_groups
        lr, mu = group["lr"], group["momentum"]
        for theta in group["params"]:
            m = mu * self.state[theta].get("m", torch.zeros_like(theta)) + (1 - mu) * theta.grad
            self.state[theta]["m"] = m
            left, values, right = torch.linalg.svd(
                mu * m + (1 - mu) * theta.grad, full_matrices=False
            )
            values = values / values.square().sum(-1, keepdim=True).sqrt()
            for _ in range(5):
                values = 3.4445 * values - 4.7750 * values**3 + 2.0315 * values**5
            update = left @ torch.diag_embed(values) @ right
            scale = 0.2 * math.sqrt(max(theta.shape[-2:]))
            theta.copy_(theta - lr * (scale * update + group["weight_decay"] * theta))


class Both:
    """Two optimizers that update different parameters."""

    def __init__(self, *parts: torch.optim.Optimizer) -> None:
        self.parts = parts
        self.param_groups = [group for part in parts for group in part.param_groups]

    def zero_grad(self) -> None:
        for part in self.parts:
            part.zero_grad()

    def step(self) -> None:
        for part in self.parts:
            part.step()


class Merged(nn.Module):
    """A frozen model. Some of its weights W are computed as W + alpha/rank · B·A in every forward pass."""

    def __init__(self, model: Transformer, lora: Lora, seed: int = 3) -> None:
        super().__init__()
        self.frozen, self.scale = [model.requires_grad_(False)], lora.alpha / lora.rank
        self.names = [
            name
            for name, _ in model.named_parameters()
            if name.split(".")[-2:] in [[target, "weight"] for target in lora.targets]
        ]
        self.a, self.b = nn.ParameterList(), nn.ParameterList()
        for name in self.names:
            weight = model.get_parameter(name)
            size, cpu = torch.Size((lora.rank, weight.shape[1])), torch.device("cpu")
            drawn = draw(name.removesuffix("weight") + "adapter.a", size, model.shape, seed, cpu)
            self.a.append(nn.Parameter(drawn.to(weight.dtype)))
            self.b.append(nn.Parameter(weight.new_zeros(weight.shape[0], lora.rank)))
        weights = [model.get_parameter(name) for name in self.names if lora.dora]
        self.magnitudes = nn.ParameterList(weight.norm(dim=1) for weight in weights)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        (model,) = self.frozen
        changes = zip(self.names, self.a, self.b, strict=True)
        merged = {n: model.get_parameter(n) + self.scale * (b @ a) for n, a, b in changes}
        for name, m in zip(self.names, self.magnitudes, strict=False):  # none without DoRA
            directions = merged[name] / merged[name].detach().norm(dim=1, keepdim=True)
            merged[name] = m[:, None] * directions
        return torch.func.functional_call(model, merged, (tokens,))


class EveryExpert(nn.Module):
    """An MoE in which every token passes through all experts, most of them with weight 0."""

    def __init__(self, mixture: MixtureOfExperts, shape: Model) -> None:
        super().__init__()
        self.router = mixture.router.weight
        self.gate, self.up, self.down, *biases = mixture.experts.parameters()
        self.biases = nn.ParameterList(biases)
        self.router_bias = mixture.router.bias
        self.shared = mixture.shared
        self.shared_gate = mixture.shared_gate
        self.shape = shape
        self.taken, self.biased, self.rate = (
            shape.experts_per_token,
            shape.balance == "bias",
            shape.balance_rate,
        )
        self.penalized = shape.balance == "aux"
        self.penalty: torch.Tensor | float = 0.0
        self.preference = [0.0] * shape.experts
        self.load = [0] * shape.experts

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        shape, products = self.shape, hidden @ self.router.T
        if self.router_bias is not None:
            products = products + self.router_bias
        is_sigmoid = shape.router == "sigmoid"
        scores = 1 / (1 + torch.exp(-products)) if is_sigmoid else torch.softmax(products, dim=-1)
        preferred = scores.detach() + torch.tensor(self.preference, dtype=scores.dtype)
        if shape.expert_groups > 1:
            groups = preferred.chunk(shape.expert_groups, dim=-1)
            sums = torch.stack(
                [group.sort(dim=-1).values[..., -2:].sum(-1) for group in groups], -1
            )
            worse = (sums.unsqueeze(-2) > sums.unsqueeze(-1)).sum(
                -1
            ) >= shape.expert_groups_per_token
            worse = worse.repeat_interleave(shape.experts // shape.expert_groups, dim=-1)
            preferred = torch.where(worse, -torch.inf, preferred)
        rank = (preferred.unsqueeze(-2) > preferred.unsqueeze(-1)).sum(-1)  # how many are better
        kept = torch.where(rank < self.taken, scores, 0)
        self.load = [a + b for a, b in zip(self.load, (kept > 0).sum((0, 1)).tolist(), strict=True)]
        if self.penalized:
            often = (kept > 0).to(scores.dtype).mean(1) * (len(self.load) / self.taken)
            shares = scores / scores.sum(-1, keepdim=True)
            self.penalty = self.rate * (often * shares.mean(1)).sum(-1).mean()
        of_gate, of_up, of_down = self.biases if shape.bias else (0, 0, 0)
        up = torch.einsum("bsh,efh->bsef", hidden, self.up) + of_up
        gate = torch.einsum("bsh,efh->bsef", hidden, self.gate) + of_gate
        if shape.mlp == "swiglu-clamped":
            gate, up = torch.minimum(gate, gate.new_tensor(7)), up.clamp(-7, 7) + 1
            inner = up * gate / (1 + torch.exp(-1.702 * gate))
        else:
            inner = up * F.silu(gate)
        found = torch.einsum("bsef,ehf->bseh", inner, self.down) + of_down
        kept = kept / kept.sum(-1, keepdim=True) if shape.normalize_experts else kept
        kept = kept * shape.expert_scale
        result = torch.einsum("bse,bseh->bsh", kept, found)
        if self.shared is not None:
            gate, up, down = (each.weight.T for each in self.shared.children())
            shared = (F.silu(hidden @ gate) * (hidden @ up)) @ down
            if self.shared_gate is not None:
                shared = shared / (1 + torch.exp(-hidden @ self.shared_gate.weight.T))
            result = result + shared
        return result

    def rebalance(self) -> None:
        mean = sum(self.load) / len(self.load)
        for expert, load in enumerate(self.load):
            if self.biased and load != mean:
                self.preference[expert] += self.rate if load < mean else -self.rate
        self.load = [0] * len(self.load)


def worst(ours: CURVE, reference: CURVE) -> tuple[float, float]:
    """Return the largest relative difference in loss and in gradient norm."""
    difference = np.abs(np.array(ours) - np.array(reference)) / np.abs(np.array(reference))
    return tuple(difference.max(axis=0)[:2])


def assert_equal_curves(ours: CURVE, reference: CURVE, precision: str) -> None:
    assert len(ours) == len(reference) > 0
    np.testing.assert_allclose([row[2:] for row in ours], [row[2:] for row in reference], 1e-12)
    loss, norm = worst(ours, reference)
    loss_bound, norm_bound = BOUNDS[precision]
    assert loss <= loss_bound, f"loss differs by {loss:.1e}"
    assert norm <= norm_bound, f"gradient norm differs by {norm:.1e}"

"""QK-clip: after a step, the weights of queries and keys whose attention scores are too large are scaled down.

Source: Kimi Team 2025, arXiv:2507.20534, section 2.1, head by head. Query heads that share keys share a factor.
"""

import math
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from nanoscale.backends.gradients import local_tensor
from nanoscale.config.resolved import ResolvedConfig
from nanoscale.models.attention import AttentionSpan, Mask
from nanoscale.models.initialization import local_region
from nanoscale.models.moe import is_recomputed
from nanoscale.models.transformer import Transformer

_QUERIES = 256
"""The queries whose scores are in memory at a time."""


class QKClip:
    """The largest attention score of each head in a step, and the scaling that follows from it."""

    def __init__(
        self, config: ResolvedConfig, tp_rank: int, stages: list[Transformer], device: torch.device
    ) -> None:
        model, limit = config.model, config.optimizer.qk_clip
        assert limit is not None
        self._limit = limit
        self._exponents = {
            module: torch.tensor(exponents, dtype=torch.float64, device=device)
            for module, exponents in _exponents(config).items()
        }
        size = (model.layers, model.kv_head_count)
        self._largest = torch.zeros(size, dtype=torch.float64, device=device)
        self._last = self._largest.max()
        own = model.kv_head_count // config.parallel.tp
        self._heads = slice(tp_rank * own, (tp_rank + 1) * own)
        for stage in stages:
            for number, layer in stage.layers.items():
                core = layer.get_submodule("attention.core")
                core.register_forward_pre_hook(partial(self._read, int(number)))

    @torch.no_grad()
    def end_step(self, weights: list[tuple[str, Tensor]], found_inf: Tensor | None = None) -> None:
        """Scale the weights after an update, unless it was skipped by `found_inf`. Every rank calls it."""
        if dist.is_initialized():
            dist.all_reduce(self._largest, dist.ReduceOp.MAX)
        self._last = self._largest.max()
        factors = torch.where(self._largest > self._limit, self._limit / self._largest, 1.0)
        if found_inf is not None:  # a skipped step has scores that are not finite
            factors = torch.where(found_inf > 0, 1.0, factors)
        self._largest.zero_()
        for name, parameter in weights:
            *_, layer, block, module, _kind = ("", "", "", *name.split("."))
            if block == "attention" and module in self._exponents:
                rows = (factors[int(layer)].unsqueeze(1) ** self._exponents[module]).flatten()
                if isinstance(parameter, DTensor):
                    (first, *_), (count, *_) = local_region(parameter)
                    rows = rows[first : first + count]
                local = local_tensor(parameter)
                local.mul_(rows.to(local).view(-1, *[1] * (local.ndim - 1)))

    def figures(self) -> dict[str, float]:
        """Return the logged metric: the largest score of the last step."""
        return {"attention_score": self._last.item()}

    def _read(self, layer: int, _: nn.Module, inputs: tuple[Any, ...]) -> None:
        if torch.is_grad_enabled() and not is_recomputed():
            q, k, _v, mask = inputs
            with torch.no_grad():
                own = self._largest[layer, self._heads]
                torch.maximum(own, largest_scores(q, k, mask), out=own)


def largest_scores(q: Tensor, k: Tensor, mask: Mask) -> Tensor:
    """Return the largest score of attention's queries with keys that they see, fp64 `[kv_heads]`."""
    grouped = q.unflatten(1, (k.shape[1], -1))  # [batch, kv_heads, heads / kv_heads, seq, head_dim]
    lowest = mask.first_seen(len(q), q.shape[2]) if isinstance(mask, AttentionSpan) else None
    largest = q.new_full((k.shape[1],), -math.inf, dtype=torch.float64)
    for first in range(0, q.shape[2], _QUERIES):
        scores = grouped[..., first : first + _QUERIES, :] @ k.unsqueeze(2).mT
        sees = scores.new_ones(scores.shape[-2:], dtype=torch.bool).tril(first)
        if isinstance(mask, Tensor):
            sees = mask[..., first : first + _QUERIES, :].unsqueeze(2)
        if lowest is not None:
            keys = torch.arange(k.shape[2], device=k.device)
            sees = sees & (keys >= lowest[:, None, None, first : first + _QUERIES, None])
        found = scores.masked_fill(~sees, -math.inf).amax((0, 2, 3, 4)).double()
        largest = torch.maximum(largest, found * q.shape[-1] ** -0.5)
    return largest


def _exponents(config: ResolvedConfig) -> dict[str, list[float]]:
    """Return the exponent of the factor for each row of a layer that belongs to one head of keys.

    A score is a product of two of them; the rotated part of MLA's keys belongs to all heads and stays.
    """
    model = config.model
    if model.kv_rank:
        plain, turned = model.head_width - model.rope_head_dim, model.rope_head_dim
        return {
            "wq": [0.5] * plain + [1.0] * turned,
            "wkv_b": [0.5] * plain + [0.0] * model.value_width,
        }
    heads = model.heads // model.kv_head_count
    return {"wq": [0.5] * heads * model.head_width, "wk": [0.5] * model.head_width}

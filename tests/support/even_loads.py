"""Equal loads of experts, which plans and rehearsals assume and which a router of new weights does not make."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import _disable_current_modes

from nanoscale.config.model_math import routed_share
from nanoscale.rehearse.played.patches import Patches


@contextmanager
def even_loads() -> Iterator[Patches]:
    """Let every router give every expert as many tokens, and two ranks as many copies as they expect: rank 0
    sends the other one a token of its own."""
    with Patches() as patches:
        patches.wrap(torch.Tensor, "topk", _evenly)
        yield patches


def _evenly(plain: Callable[..., Any]) -> Callable[..., Any]:
    def topk(scores: torch.Tensor, taken: int) -> Any:
        best = plain(scores, taken)
        with _disable_current_modes():
            tokens, experts = len(scores), scores.shape[-1]
            half = experts // 2
            on_both = 2 * round(tokens * routed_share(experts, taken, 2)) - tokens
            pairs = [(i % half, i % half + half) for i in range(on_both)]
            for i in range(tokens - on_both):
                moves = i == 0 and dist.is_initialized() and dist.get_rank() == 0
                first = 2 * (i // 2) % half + half * (i % 2 or moves)
                pairs.append((first, first + 1))
            numbers = torch.tensor(pairs) if taken == 2 else torch.arange(best.indices.numel())
            best.indices.copy_((numbers % experts).view_as(best.indices))
        return best

    return topk

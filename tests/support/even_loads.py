"""Equal loads of experts, which plans and rehearsals assume and which a router of new weights does not make."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from nanoscale.config.model_math import routed_share
from nanoscale.rehearse.played.patches import Patches


@contextmanager
def even_loads(*, moves: bool = False) -> Iterator[Patches]:
    """Let every router give every expert as many tokens, and two ranks as many copies as they expect.

    Args:
        moves: send a token of this rank's experts to the other rank's, as rehearsals assume of rank 0.
    """
    with Patches() as patches:
        patches.wrap(torch.Tensor, "topk", partial(_evenly, moves))
        yield patches


def _evenly(moves: bool, plain: Callable[..., Any]) -> Callable[..., Any]:
    def topk(scores: torch.Tensor, taken: int) -> Any:
        best = plain(scores, taken)
        with _disable_current_modes():
            tokens, experts = len(scores), scores.shape[-1]
            half = experts // 2
            on_both = 2 * round(tokens * routed_share(experts, taken, 2)) - tokens
            pairs = [(i % half, i % half + half) for i in range(on_both)]
            for i in range(tokens - on_both):
                first = 2 * (i // 2) % half + half * (i % 2 or (moves and i == 0))
                pairs.append((first, first + 1))
            numbers = torch.tensor(pairs) if taken == 2 else torch.arange(best.indices.numel())
            best.indices.copy_((numbers % experts).view_as(best.indices))
        return best

    return topk

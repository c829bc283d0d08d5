"""The loads of the experts, over the whole global batch, and the balancing that follows from them.

A loss of each sequence (`aux`) is the routers' own; they are told its weight here. The bias is that of
Wang et al. 2024, arXiv:2408.15664, algorithm 1: after every step an expert with less than the mean load
is preferred by `balance_rate` more, one with more than that by as much less. Counts of a whole global batch
do not depend on the layout, and being whole numbers they are the same on every rank to the last bit.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from nanoscale.config.schema import Model
from nanoscale.models.moe import MixtureOfExperts, Router
from nanoscale.models.transformer import Transformer


class Balance:
    """Of all routers of this rank; every rank settles every step."""

    def __init__(self, shape: Model, parts: list[Transformer], device: torch.device) -> None:
        self.biased = shape.balance == "bias"
        self.loss_rate = shape.balance_rate if shape.balance == "aux" else 0.0
        self.routers: dict[int, Router] = {
            int(number): layer.mlp.router
            for part in parts
            for number, layer in part.layers.items()
            if isinstance(layer.mlp, MixtureOfExperts)
        }
        self._loads = torch.zeros(shape.layers, shape.experts, dtype=torch.int64, device=device)

    def begin(self, weight: float) -> None:
        """Begin a step. `weight`: of a sequence's loss in what this rank's backward passes begin with."""
        for router in self.routers.values():
            router.penalty = weight * self.loss_rate

    @torch.no_grad()
    def settle(self, counts: bool, skipped: bool) -> None:
        """End a step. `counts`: no other rank counts the same tokens; `skipped`: the step was not taken."""
        self._loads.zero_()
        for number, router in self.routers.items():
            if counts:
                self._loads[number] = router.load
            router.load.zero_()
        if dist.is_initialized():
            dist.all_reduce(self._loads)
        if self.biased and not skipped:
            for number, router in self.routers.items():
                load = self._loads[number]
                router.lean += (load.sum() - load * len(load)).sign()

    def figures(self) -> dict[str, float]:
        """What a logged step shows: the largest load over the mean one, in the layer where that is most."""
        loads = self._loads.double()
        return {"moe_imbalance": (loads.amax(1) / loads.mean(1)).max().item()}

    def state(self) -> dict[str, Tensor]:
        """What a checkpoint holds, to be filled in place when one is loaded."""
        if not self.biased:
            return {}
        return {f"layers.{number}": router.lean for number, router in self.routers.items()}

"""The loads of the experts, over the whole global batch, and the balancing that follows from them.

The loss of each sequence (`aux`) is the routers' own; this module sets its weight. The bias is from Wang et
al. 2024, arXiv:2408.15664, algorithm 1: after every step an expert with less than the mean load is preferred
by `balance_rate` more, one with more than that by as much less. Counts of a whole global batch do not depend
on the layout, and as integers they are the same on every rank to the last bit.
"""

import torch
import torch.distributed as dist
from torch import Tensor

from nanoscale.config.schema import Model
from nanoscale.models.moe import BIAS_UNIT, MixtureOfExperts, Router
from nanoscale.models.transformer import Transformer


class Balance:
    """The balancing of all routers of this rank; every rank calls `end_step` after every step."""

    def __init__(self, shape: Model, stages: list[Transformer], device: torch.device) -> None:
        self.shape = shape
        self.bias_rate = round(shape.balance_rate / BIAS_UNIT) if shape.balance == "bias" else 0
        self.loss_rate = shape.balance_rate if shape.balance == "aux" else 0.0
        self.routers: dict[int, Router] = {
            int(number): layer.mlp.router
            for stage in stages
            for number, layer in stage.layers.items()
            if isinstance(layer.mlp, MixtureOfExperts)
        }
        self._loads = torch.zeros(shape.layers, shape.experts, dtype=torch.int64, device=device)

    def begin_step(self, sequence_weight: float) -> None:
        """Begin a step. `sequence_weight` is the weight of a sequence's loss in this rank's backward passes."""
        for router in self.routers.values():
            router.penalty = sequence_weight * self.loss_rate

    @torch.no_grad()
    def end_step(self, counts_tokens: bool, taken: Tensor | bool) -> None:
        """End a step.

        Args:
            counts_tokens: no other rank counts the same tokens.
            taken: True or 1 unless the step was skipped, in which the bias stays.
        """
        self._loads.zero_()
        for number, router in self.routers.items():
            if counts_tokens:
                self._loads[number] = router.load
            router.load.zero_()
        if dist.is_initialized():
            dist.all_reduce(self._loads)
        if self.bias_rate:
            for number, router in self.routers.items():
                load = self._loads[number]
                change = self.bias_rate * (load.sum() - load * len(load)).sign()
                router.choice_bias += change * taken

    def figures(self) -> dict[str, float]:
        """Return the logged metric: the largest load over the mean load, in the layer with the largest
        ratio."""
        loads = self._loads[self.shape.dense_layers :].double()
        return {"moe_imbalance": (loads.amax(1) / loads.mean(1)).max().item()}

    def state(self) -> dict[str, Tensor]:
        """Return the tensors that a checkpoint holds; loading fills them in place."""
        if not self.shape.has_choice_bias:
            return {}
        return {f"bias.layers.{number}": it.choice_bias for number, it in self.routers.items()}

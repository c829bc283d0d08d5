"""AdamW on the local shards of parameters."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.optim import AdamW

from nanoscale.backends.gradients import local_tensor


class LocalAdamW(AdamW):
    """AdamW on the local shard of every parameter, which suffices for an element-wise update.

    Updated as DTensors, 288 parameters took 11 to 14 ms of the host's time a step, and 0.7 to 0.9 s in the
    first one, in which PyTorch determines the sharding of each; local shards take 5 ms, and 23 ms in the
    first.
    """

    def _init_group(self, group: dict[str, Any], *tensor_lists: list[Tensor]) -> bool:
        """Let PyTorch fill the lists of the update, and replace their entries by local tensors."""
        has_complex: bool = super()._init_group(group, *tensor_lists)
        for tensors in tensor_lists:
            tensors[:] = [local_tensor(tensor) for tensor in tensors]
        return has_complex

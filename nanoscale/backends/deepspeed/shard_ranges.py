"""The location of each parameter's fp32 weights and moments on this rank, in DeepSpeed.

| stage | updated by the optimizer |
|---|---|
| 0 | the parameters themselves |
| 1, 2 | one flat tensor per parameter group: this rank's shards of its parameters, one after another |
| 3 | one flat tensor per sub-group: this rank's shard of each of its parameters |

From stage 1 on these are fp32 master weights, and the model computes with copies in another dtype.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

Named = list[tuple[str, nn.Parameter]]


@dataclass(frozen=True)
class ShardRange:
    """The range of one parameter's elements, in row-major order, that this rank updates."""

    name: str
    start: int
    """Its first element in the parameter."""
    numel: int
    home: Tensor
    """The tensor that the optimizer updates, which is the key of its state."""
    offset: int
    """Its first element in the flattened home."""
    group: int | None = None
    """Stage 3: the sub-group whose shards make the home."""

    @property
    def master(self) -> Tensor:
        """A view of the elements, `[numel]`."""
        return self._of(self.home)

    def moments(self, state: dict[Tensor, Any]) -> Iterator[tuple[str, Tensor]]:
        """Yield the optimizer's tensors by name: `[numel]` views, and scalars that the whole home shares."""
        for name, value in state.get(self.home, {}).items():
            if isinstance(value, Tensor):
                yield name, self._of(value) if value.numel() == self.home.numel() else value

    def _of(self, tensor: Tensor) -> Tensor:
        return tensor.detach().view(-1).narrow(0, self.offset, self.numel)


def find(parameters: Named, optimizer: Any, stage: int) -> list[ShardRange]:
    """List the pieces of this rank. `optimizer` is DeepSpeed's, which wraps ours from stage 1 on."""
    if stage == 0:
        return [ShardRange(name, 0, p.numel(), p, 0) for name, p in parameters]
    if stage == 3:
        return list(_sharded_parameters(parameters, optimizer))
    return list(_sharded_masters(parameters, optimizer))


def _sharded_masters(parameters: Named, optimizer: Any) -> Iterator[ShardRange]:
    homes = [group["params"][0] for group in optimizer.param_groups]
    for name, parameter in parameters:
        mapping: Any = parameter._hp_mapping  # type: ignore[attr-defined]
        if mapping is None:  # all of it belongs to other ranks
            continue
        here, there = mapping.hp_fragment_address, mapping.lp_fragment_address
        home = homes[mapping.param_group_index]
        yield ShardRange(name, there.start, here.numel, home, here.start)


def _sharded_parameters(parameters: Named, optimizer: Any) -> Iterator[ShardRange]:
    for name, parameter in parameters:
        zero: Any = parameter
        group, offset, size = optimizer.grad_position[optimizer.get_param_id(parameter)]
        start = optimizer._get_param_partition_rank(parameter) * size
        numel = min(size, max(0, zero.ds_numel - start))  # the last shards are padded
        if numel:
            home = optimizer.fp32_partitioned_groups_flat[group]
            yield ShardRange(name, start, numel, home, offset, group)


def own_part(frozen: nn.Parameter, optimizer: Any) -> tuple[int, Tensor]:
    """Return this rank's shard of a frozen parameter in stage 3: its first element's number, its elements."""
    zero: Any = frozen
    size = zero.ds_tensor.ds_numel
    start = optimizer._get_param_partition_rank(frozen) * size
    numel = min(size, max(0, zero.ds_numel - start))
    return start, zero.ds_tensor.narrow(0, 0, numel)


@contextmanager
def in_memory(pieces: list[ShardRange], optimizer: Any) -> Iterator[bool]:
    """Bring the tensors of one home into memory if they are on a disk, and put them back afterwards.

    Yields True if they were on a disk.
    """
    group = pieces[0].group
    swapped = group is not None and optimizer._swappable_optimizer_subgroup(group)
    if swapped:
        optimizer._optimizer_states_and_gradient_swap_in(group)
    yield swapped
    if swapped:
        optimizer._optimizer_states_and_gradient_swap_out(group)


def by_home(pieces: list[ShardRange]) -> list[list[ShardRange]]:
    """Group pieces by the tensor that the optimizer updates."""
    homes: dict[int, list[ShardRange]] = {}
    for piece in pieces:
        homes.setdefault(id(piece.home), []).append(piece)
    return list(homes.values())


@torch.no_grad()
def refresh_weights(optimizer: Any, stage: int, pieces: list[ShardRange]) -> None:
    """Copy the fp32 master weights to the compute copies. All ranks call it."""
    if stage in (1, 2):
        optimizer.update_lp_params()
    if stage == 3:
        kept = optimizer.persistent_parameters
        if kept:  # small parameters that are always gathered
            kept[0].partition(kept)
        for mine in by_home(pieces):
            with in_memory(mine, optimizer):
                optimizer._reassign_or_swap_out_partitioned_parameters(mine[0].group)
        if kept:
            kept[0].all_gather(kept)
        optimizer.invalidate_secondary_tensor()

"""The location of each parameter's fp32 weights and moments on this rank, in DeepSpeed.

| stage | updated by the optimizer |
|---|---|
| 0 | the parameters themselves |
| 1, 2 | one flat tensor per parameter group: this rank's shards of its parameters, one after another |
| 3 | one flat tensor per sub-group: this rank's shard of each of its parameters |

From stage 1 on these are fp32 master weights, and the model computes with copies in another dtype.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from nanoscale.backends.optimizer import NamedParameters


@dataclass(frozen=True)
class ShardRange:
    """The range of one parameter's elements, in row-major order, that this rank updates."""

    name: str
    start: int
    """Its first element in the parameter."""
    numel: int
    flat: Tensor
    """The tensor that the optimizer updates, which is the key of its state."""
    offset: int
    """Its first element in `flat`, flattened."""
    group: int | None = None
    """Stage 3: the sub-group whose shards make up `flat`."""

    @property
    def master(self) -> Tensor:
        """A view of the elements, `[numel]`."""
        return self._view(self.flat)

    def moments(self, state: dict[Tensor, Any]) -> Iterator[tuple[str, Tensor]]:
        """Yield the optimizer's tensors by name: `[numel]` views, and scalars that all of `flat` shares."""
        for name, value in state.get(self.flat, {}).items():
            if isinstance(value, Tensor):
                yield name, self._view(value) if value.numel() == self.flat.numel() else value

    def _view(self, tensor: Tensor) -> Tensor:
        return tensor.detach().view(-1).narrow(0, self.offset, self.numel)


def find_shards(parameters: NamedParameters, optimizer: Any, stage: int) -> list[ShardRange]:
    """List the shards of this rank. `optimizer` is DeepSpeed's, which wraps ours from stage 1 on."""
    if stage == 0:
        return [ShardRange(name, 0, p.numel(), p, 0) for name, p in parameters]
    if stage == 3:
        return list(_sharded_parameters(parameters, optimizer))
    return list(_sharded_masters(parameters, optimizer))


def _sharded_masters(parameters: NamedParameters, optimizer: Any) -> Iterator[ShardRange]:
    flat_tensors = [group["params"][0] for group in optimizer.param_groups]
    for name, parameter in parameters:
        mapping: Any = parameter._hp_mapping  # type: ignore[attr-defined]
        if mapping is None:  # all of it belongs to other ranks
            continue
        hp_address, lp_address = mapping.hp_fragment_address, mapping.lp_fragment_address
        flat = flat_tensors[mapping.param_group_index]
        yield ShardRange(name, lp_address.start, hp_address.numel, flat, hp_address.start)


def _sharded_parameters(parameters: NamedParameters, optimizer: Any) -> Iterator[ShardRange]:
    for name, parameter in parameters:
        ds_parameter: Any = parameter
        group, offset, size = optimizer.grad_position[optimizer.get_param_id(parameter)]
        start = optimizer._get_param_partition_rank(parameter) * size
        numel = min(size, max(0, ds_parameter.ds_numel - start))  # the last shards are padded
        if numel:
            flat = optimizer.fp32_partitioned_groups_flat[group]
            yield ShardRange(name, start, numel, flat, offset, group)


def local_shard(frozen: nn.Parameter, optimizer: Any) -> tuple[int, Tensor]:
    """Return this rank's shard of a frozen parameter in stage 3: its first element's number, its elements."""
    ds_parameter: Any = frozen
    size = ds_parameter.ds_tensor.ds_numel
    start = optimizer._get_param_partition_rank(frozen) * size
    numel = min(size, max(0, ds_parameter.ds_numel - start))
    return start, ds_parameter.ds_tensor.narrow(0, 0, numel)


@contextmanager
def swapped_in(shards: list[ShardRange], optimizer: Any) -> Iterator[bool]:
    """Bring the shards of one flat tensor into memory if they are on a disk, and put them back afterwards.

    Yields True if they were on a disk.
    """
    group = shards[0].group
    was_swapped = group is not None and optimizer._swappable_optimizer_subgroup(group)
    if was_swapped:
        optimizer._optimizer_states_and_gradient_swap_in(group)
    yield was_swapped
    if was_swapped:
        optimizer._optimizer_states_and_gradient_swap_out(group)


def group_by_tensor(shards: list[ShardRange]) -> list[list[ShardRange]]:
    """Group shards by the tensor that the optimizer updates."""
    shards_by_tensor: dict[int, list[ShardRange]] = {}
    for shard in shards:
        shards_by_tensor.setdefault(id(shard.flat), []).append(shard)
    return list(shards_by_tensor.values())


@torch.no_grad()
def refresh_weights(optimizer: Any, stage: int, shards: list[ShardRange]) -> None:
    """Copy the fp32 master weights to the compute copies. All ranks call it."""
    if stage in (1, 2):
        optimizer.update_lp_params()
    if stage == 3:
        persistent = optimizer.persistent_parameters
        if persistent:  # small parameters that are always gathered
            persistent[0].partition(persistent)
        for group in group_by_tensor(shards):
            with swapped_in(group, optimizer):
                optimizer._reassign_or_swap_out_partitioned_parameters(group[0].group)
        if persistent:
            persistent[0].all_gather(persistent)
        optimizer.invalidate_secondary_tensor()

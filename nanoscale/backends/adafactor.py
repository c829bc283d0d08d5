"""Adafactor: the second moment of a matrix is the product of a vector of its rows and one of its columns.

Source: Shazeer & Stern 2018, arXiv:1804.04235, algorithms 4 and 5, with the learning rate of the schedule in
place of their relative one. Every rank has the whole vectors; ranks that share a parameter sum the squares of
their shards, for all parameters at once.
"""

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from nanoscale.backends import one_pass
from nanoscale.backends.adamw import Moments, OwnOptimizer, ParamGroups
from nanoscale.backends.gradients import local_tensor
from nanoscale.backends.muon import group_of, ranks_of
from nanoscale.models.initialization import local_region

_SMALLEST_SQUARE = 1e-30
_DECAY = -0.8
"""The second moment forgets with 1 - step^-0.8 (section 7.2)."""


class Adafactor(OwnOptimizer):
    """Adafactor without momentum; the root mean square of an update is at most 1 (section 6)."""

    def __init__(self, groups: ParamGroups, lr: float) -> None:
        super().__init__(groups, lr=lr)
        self._process_groups: dict[tuple[int, ...], dist.ProcessGroup | None] = {}

    def initial_state(self, parameter: Tensor) -> Moments:
        """Return the state of a parameter before its first update."""
        size, step = parameter.shape, torch.zeros((), device=parameter.device)
        if len(size) < 2:
            return {"step": step, "exp_avg_sq": torch.zeros_like(parameter)}
        shapes = {"exp_avg_sq_row": size[:-1], "exp_avg_sq_col": (*size[:-2], size[-1])}
        like = local_tensor(parameter)
        return {"step": step} | {name: like.new_zeros(shape) for name, shape in shapes.items()}

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        group_of_parameter = {
            parameter: group
            for group in self.param_groups
            for parameter in group["params"]
            if parameter.grad is not None
        }
        parameters = list(group_of_parameter)
        for parameter in parameters:
            step = self.filled(parameter)["step"]
            one_pass.keep(self, step, step + 1)
        for parameter, sums in zip(parameters, self._summed(parameters, _sums), strict=True):
            self._forget(parameter, sums)
        squares = self._summed(
            parameters, lambda parameter: [self._update(parameter).square().sum()]
        )
        for parameter, (square,) in zip(parameters, squares, strict=True):
            group = group_of_parameter[parameter]
            too_large = (square / parameter.numel()).sqrt().clamp(min=1)
            weights = local_tensor(parameter)
            update = self._update(parameter).mul_(group["lr"] / too_large)
            kept = weights * (1 - group["lr"] * group["weight_decay"])
            one_pass.keep(self, weights, kept.sub_(update))

    def _forget(self, parameter: Tensor, sums: list[Tensor]) -> None:
        """Update the moments with the sums of squares over rows and over columns."""
        state = self.state[parameter]
        share = state["step"].double() ** _DECAY
        if parameter.ndim < 2:
            square = _gradient(parameter).square().add_(_SMALLEST_SQUARE)
            moment = local_tensor(state["exp_avg_sq"])
            value = moment.lerp(square, share.to(square.dtype))
            one_pass.keep(self, moment, value)
            return
        for name, total, count in zip(
            ("exp_avg_sq_row", "exp_avg_sq_col"), sums, parameter.shape[:-3:-1], strict=True
        ):
            value = state[name].lerp(total / count + _SMALLEST_SQUARE, share.to(total.dtype))
            one_pass.keep(self, state[name], value)

    def _update(self, parameter: Tensor) -> Tensor:
        """Return this rank's shard of the update before it is limited."""
        state, gradient = self.state[parameter], _gradient(parameter)
        if parameter.ndim < 2:
            return gradient * local_tensor(state["exp_avg_sq"]).rsqrt()
        *others, rows, columns = _region(parameter)
        row, column = state["exp_avg_sq_row"], state["exp_avg_sq_col"]
        row = (row / row.mean(-1, keepdim=True)).rsqrt()[(*others, rows)].unsqueeze(-1)
        return gradient * row * column.rsqrt()[(*others, columns)].unsqueeze(-2)

    def _summed(
        self, parameters: list[Tensor], terms: Callable[[Tensor], list[Tensor]]
    ) -> list[list[Tensor]]:
        """Return the terms of each parameter, summed over the ranks that have different shards of it."""
        found = [terms(parameter) for parameter in parameters]
        by_ranks: dict[tuple[int, ...], list[Tensor]] = {}
        for parameter, several in zip(parameters, found, strict=True):
            if isinstance(parameter, DTensor):
                for term in several if _is_first(parameter) else [it.zero_() for it in several]:
                    by_ranks.setdefault(ranks_of(parameter), []).append(term)
        for ranks, several in by_ranks.items():
            if ranks not in self._process_groups:
                self._process_groups[ranks] = group_of(ranks)
            if (group := self._process_groups[ranks]) is not None:
                flat = torch.cat([term.reshape(-1) for term in several])
                dist.all_reduce(flat, group=group)
                for term, total in zip(
                    several, flat.split([it.numel() for it in several]), strict=True
                ):
                    term.copy_(total.view(term.shape))
        return found


def _sums(parameter: Tensor) -> list[Tensor]:
    """Return the sums of squares of this rank's shard in whole vectors of rows and of columns."""
    if parameter.ndim < 2:
        return []
    square = _gradient(parameter).square()
    size, (*others, rows, columns) = parameter.shape, _region(parameter)
    row, column = square.new_zeros(size[:-1]), square.new_zeros(*size[:-2], size[-1])
    row[(*others, rows)] = square.sum(-1)
    column[(*others, columns)] = square.sum(-2)
    return [row, column]


def _gradient(parameter: Tensor) -> Tensor:
    assert parameter.grad is not None
    return local_tensor(parameter.grad)


def _region(parameter: Tensor) -> list[slice]:
    """Return the slices of the whole parameter that this rank has."""
    if not isinstance(parameter, DTensor):
        return [slice(None)] * parameter.ndim
    offsets, sizes = local_region(parameter)
    return [slice(first, first + size) for first, size in zip(offsets, sizes, strict=True)]


def _is_first(parameter: DTensor) -> bool:
    """True for one of the ranks that have the same shard."""
    coordinate = parameter.device_mesh.get_coordinate()
    assert coordinate is not None, "this rank is in the mesh"
    axes = zip(coordinate, parameter.placements, strict=True)
    return not any(at for at, placement in axes if placement.is_replicate())

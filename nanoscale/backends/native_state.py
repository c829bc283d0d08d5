"""The tensors of the native engine between two steps: for checkpoints, for their comparison, for evaluation."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement

from nanoscale.backends.base import Engine
from nanoscale.backends.construction import MasterWeights, fill_initial
from nanoscale.backends.gradients import local_tensor
from nanoscale.backends.optimizer import (
    NamedParameters,
    fill_own_state,
    fill_state,
    load_state,
    named_state,
    plain_tensors,
)
from nanoscale.checkpoint.staging import State
from nanoscale.config.layout import tied_ranks
from nanoscale.config.optimizers import AVERAGE, keeps_average
from nanoscale.models import lora
from nanoscale.parallel.mesh import Layout


class NativeState(Engine):
    """The weights of a rank's stages, and its optimizer's tensors."""

    layout: Layout
    named: NamedParameters
    """All parameters, by names in the whole model; master weights if there are any."""
    trained: NamedParameters
    masters: MasterWeights | None
    optimizer: torch.optim.Optimizer
    _hooks: list[Callable[[], None]]
    """The functions that are called before an update."""

    def parameters(self) -> NamedParameters:
        """List the parameters that this rank trains, by names in the whole model."""
        return self.trained

    def _fill_state(self) -> None:
        """Give every parameter that has no state the one of its first update."""
        if self.config.optimizer.name != "hooks":  # no step is skipped before its first one
            fill_state(self.optimizer, averages=self.config.optimizer.ema_decay is not None)

    def state(self, *, to_load: bool = False) -> State:
        """Return the tensors as in `Engine.state`; `to_load` as in `named_state`."""
        model: State = {f"model.{name}": value for name, value in self.trained}
        moments = named_state(self.trained, self.optimizer, to_load=to_load)
        state = model | {f"optimizer.{name}": value for name, value in moments.items()}
        return state | self._small_state()

    def frozen_state(self) -> State:
        return {f"model.{name}": p for name, p in self.named if not p.requires_grad}

    def empty_state(self) -> State:
        self._fill_state()
        if self.config.optimizer.name == "hooks":
            fill_own_state(self.optimizer)
        return self.state(to_load=True)

    def load_state(self, state: State) -> None:
        moments = {
            name.removeprefix("optimizer."): value
            for name, value in state.items()
            if name.startswith("optimizer.")
        }
        load_state(self.trained, self.optimizer, moments)
        if any(name.endswith(f".{AVERAGE}") for name in moments):
            device = local_tensor(self.trained[0][1]).device
            vars(self.optimizer)["average_has_begun"] = torch.ones(1, device=device)
        self._update_compute_copy()

    @contextmanager
    def averaged(self) -> Iterator[None]:
        if not keeps_average(self.config.optimizer):
            yield
            return
        for hook in self._hooks:  # after a skipped step the last checkpoint may not be copied yet
            hook()
        states = self.optimizer.state
        trained = {parameter: parameter.detach().clone() for parameter in states}
        self._set_weights({parameter: state[AVERAGE] for parameter, state in states.items()})
        try:
            yield
        finally:
            self._set_weights(trained)

    @torch.no_grad()
    def _set_weights(self, values: dict[Tensor, Tensor]) -> None:
        for parameter, value in values.items():
            local_tensor(parameter).copy_(local_tensor(value))
        self._update_compute_copy()

    def _update_compute_copy(self) -> None:
        if self.masters is not None:
            self.masters.update_compute_copy()

    def replicated(self) -> Iterator[tuple[str, tuple[int, ...], list[Tensor]]]:
        tied = next(iter(self.stages.values())).tied_name
        # Both ends of a pipeline begin with a tied embedding, whatever their stages.
        for name, parameter in sorted(self.named, key=lambda named: named[0] != tied):
            if isinstance(parameter, DTensor):
                ranks = _replica_ranks(parameter.device_mesh, tuple(parameter.placements))
            elif self.layout.data is not None:  # whole, or in 4 bits, on each rank of dp and cp
                ranks = tuple(self.layout.data.mesh.flatten().tolist())
            else:
                ranks = (0,)
            if name == tied and self.config.ties_ends:
                ranks = tied_ranks(self.config, ranks)
            # The counts of steps are scalars: a wrong one changes the next update, and so the weights.
            local: list[Tensor] = [parameter]
            for key, value in self.optimizer.state.get(parameter, {}).items():
                if isinstance(value, Tensor) and value.ndim:
                    if isinstance(parameter, DTensor) and not isinstance(value, DTensor):
                        # every rank has the whole of it, such as Adafactor's rows
                        sharing = tuple(parameter.device_mesh.mesh.flatten().tolist())
                        yield f"{name}.{key}", sharing, plain_tensors(value)
                    else:
                        local.append(value)
            yield name, ranks, [plain for it in local for plain in plain_tensors(local_tensor(it))]

    @torch.no_grad()
    def reinitialize(self, device: torch.device) -> None:
        """Return to the initial weights, unless they come from files, and to an unused optimizer."""
        self.optimizer.state.clear()
        for stage in self.stages.values():
            stage.reset_buffers(device)
            fill_initial(stage, self.config, device)
            if self.masters is not None:
                draw = stage.initializer(self.config.train.seed, device)
                for name, master in self.masters.parameters:
                    master.copy_(draw(name, master.shape))
                lora.fill_magnitudes(dict(self.masters.parameters))
                self.masters.update_compute_copy()


@cache
def _replica_ranks(mesh: DeviceMesh, placements: tuple[Placement, ...]) -> tuple[int, ...]:
    """Return the ranks that hold the same shard as this one of a tensor with these placements."""
    coordinates = mesh.get_coordinate()
    assert coordinates is not None
    axes = zip(coordinates, placements, strict=True)
    index = tuple(slice(None) if placement.is_replicate() else at for at, placement in axes)
    return tuple(mesh.mesh[index].flatten().tolist())

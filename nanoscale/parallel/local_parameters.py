"""Modules whose parameters are sharded over ranks, and which compute with their local shards as plain tensors.

A parameter is a DTensor for its owners: FSDP2, the optimizer, checkpoints. A module's own code sees the rank's
shard in its place, so that no operation on activations goes through DTensor.
"""

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, distribute_tensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec

Placements = Mapping[str, Placement | Sequence[Placement]]
"""Placements of parameters, by their names in a module, on each axis of a mesh."""
Read = Callable[[Tensor], Tensor]
"""A function from a parameter to this rank's shard, whose backward maps the shard's gradient to the
parameter's."""


def distribute(module: nn.Module, mesh: DeviceMesh, placements: Placements) -> None:
    """Make a module's own parameters DTensors, in place, on any device."""
    for name, parameter in list(module.named_parameters(recurse=False)):
        placement = placements[name]
        axes = [placement] if isinstance(placement, Placement) else placement
        value = distribute_tensor(parameter, mesh, axes)
        module.register_parameter(name, nn.Parameter(value, requires_grad=parameter.requires_grad))


def divide(
    module: nn.Module, unit: nn.Module, mesh: DeviceMesh, placements: Placements, read: Read
) -> None:
    """Distribute, and let the module's `forward` compute with the results of `read` for its parameters.

    They are read when `unit` is called, which contains the module or is the module: after FSDP2 has gathered
    them, and outside of the regions that activation checkpointing repeats and torch.compile traces.
    """
    distribute(module, mesh, placements)
    local_parameters, forward = _LocalView(module), type(module).forward
    unit.register_forward_pre_hook(lambda *_: local_parameters.read_all(read))
    # No `partial`: torch.compile would treat each as a new function, and compile every block again.
    module.forward = lambda *inputs, **options: forward(local_parameters, *inputs, **options)


class _LocalView:
    """The object that a module's own code gets as `self`."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module

    def read_all(self, read: Read) -> None:
        for name, parameter in self.module._parameters.items():
            if parameter is not None:
                setattr(self, name, read(parameter))

    @property  # type: ignore[misc]
    def __class__(self) -> Any:  # which `super()` in the module's code asks for
        return type(self.module)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.module, name)


def divide_tree(
    unit: nn.Module, mesh: DeviceMesh, divisions: Mapping[str, tuple[Placements, Read]]
) -> nn.Module:
    """Divide a unit with all modules inside as `divide` does, and return the copy that computes for it.

    The copy has local shards in place of all parameters, so that a module's code may read the parameters
    of another module. It shares the unit's buffers and configurations. `divisions` has the modules' names.
    """
    configs = [it.config for it in unit.modules() if hasattr(it, "config")]
    twin = copy.deepcopy(unit, {id(config): config for config in configs})
    pairs = [(it, twin.get_submodule(name), *divisions[name]) for name, it in unit.named_modules()]
    for module, copied, placements, _ in pairs:
        distribute(module, mesh, placements)
        copied._buffers, copied._parameters = module._buffers, {}

    def read_all(*_: Any) -> None:
        for module, copied, _placements, read in pairs:
            for leaf, value in module._parameters.items():
                copied.__dict__[leaf] = None if value is None else read(value)

    object.__setattr__(unit, "copied_modules", list(twin.modules()))
    unit.register_forward_pre_hook(read_all)
    unit.forward = lambda *inputs, **options: twin.forward(*inputs, **options)
    return twin


def replicated_grad(parameter: Tensor) -> Tensor:
    """Return the local shard; its gradient is its own, or equal on all ranks that share it."""
    return _to_local(parameter, _placements(parameter))


def partial_grad(parameter: Tensor) -> Tensor:
    """Return the local shard; its gradient is the sum over all ranks that share it."""
    gradient_placements = (
        Partial() if placement.is_replicate() else placement for placement in _placements(parameter)
    )
    return _to_local(parameter, tuple(gradient_placements))


def rank0_only(parameter: Tensor) -> Tensor:
    """Return a replicated parameter on the first rank, which adds it to a sum, and 0 on the others."""
    local = replicated_grad(parameter)
    assert isinstance(parameter, DTensor)
    if parameter.placements[0].is_replicate() and parameter.device_mesh.get_local_rank():
        return local - local.detach()  # every summand has the gradient of the sum
    return local


def _placements(parameter: Tensor) -> tuple[Placement, ...]:
    assert isinstance(parameter, DTensor)
    return parameter.placements


def _to_local(parameter: Tensor, gradient: tuple[Placement, ...]) -> Tensor:
    if not parameter.requires_grad:
        assert isinstance(parameter, DTensor)
        # Still a parameter, so that activations that are offloaded to the host do not include it.
        return nn.Parameter(parameter._local_tensor, requires_grad=False)
    return _ToLocal.apply(parameter, gradient)


class _ToLocal(torch.autograd.Function):
    """A `DTensor.to_local` that keeps the placements, which PyTorch would recompute for every gradient."""

    @staticmethod
    def forward(ctx: Any, parameter: DTensor, gradient: tuple[Placement, ...]) -> Tensor:
        ctx.spec, ctx.gradient = parameter._spec, gradient
        return parameter._local_tensor.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[DTensor, None]:
        spec = ctx.spec
        if ctx.gradient != spec.placements:
            spec = DTensorSpec(spec.mesh, ctx.gradient, tensor_meta=spec.tensor_meta)
        return DTensor(grad.contiguous(), spec, requires_grad=False), None

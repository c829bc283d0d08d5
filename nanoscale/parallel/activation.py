"""Activation checkpointing: the activations that are kept for the backward pass or recomputed.

| mode | kept until the backward pass | recomputed |
|---|---|---|
| none | all that autograd saves | nothing |
| full | the input of each block (or of every k-th, and all of the others) | these blocks |
| selective | as full, and the results of some products | all other operations of these blocks |

Only the `forward` of a block, as an attribute of the instance, is replaced: names of parameters and modules
stay, and the hooks of FSDP2 and tensor parallelism stay outside. Nothing in a block draws random numbers, so no
generator's state is kept. Every mode keeps the experts that each token chose.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache, partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only
from torch.utils.checkpoint import (
    CheckpointPolicy,
    SelectiveCheckpointContext,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from nanoscale.config.schema import Parallel
from nanoscale.models.hf_model import expert_modules
from nanoscale.models.moe import choose_experts, multiply_by_expert, multiply_router
from nanoscale.models.narrow_experts import multiply_narrow
from nanoscale.models.transformer import Masks, Rotations, RunLayers
from nanoscale.parallel.expert import exchange_counts, experts_of, parts_of

_recompute = partial(checkpoint, use_reentrant=False, preserve_rng_state=False)


def apply(layers: nn.ModuleDict, parallel: Parallel) -> None:
    """Let the blocks of a model, in place, recompute activations that the mode does not keep."""
    blocks: list[nn.Module] = list(layers.values())[:: parallel.checkpoint_every]
    if parallel.activation_checkpointing != "none":
        for experts in chain.from_iterable(map(expert_modules, blocks)):
            experts.register_forward_pre_hook(_keep_choices)
    if parallel.activation_checkpointing == "full":
        for block in blocks:
            if (parts := getattr(block, "parts", None)) is not None:
                parts.repeats_results = not isinstance(block.mlp_post_norm, nn.Identity)
            block.forward = partial(_recompute_all, block, block.forward)
    if parallel.activation_checkpointing == "selective":
        make_contexts = host_contexts if parallel.offload_activations else device_contexts
        contexts = partial(make_contexts, parallel.selective_keep)
        for owner, name in (it for block in blocks for it in parts_of(block, "recomputed")):
            setattr(owner, name, partial(_recompute, getattr(owner, name), context_fn=contexts))


@torch.library.custom_op("nanoscale::keep_choices", mutates_args=())
def keep_choices(chosen: Tensor) -> Tensor:
    """Return the choices of experts of a router of transformers, which recomputation must not make again."""
    return chosen.clone()


keep_choices.register_fake(torch.empty_like)


def _keep_choices(_: nn.Module, inputs: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, ...]:
    tokens, chosen, weights = inputs
    return tokens, keep_choices(chosen), weights


def _recompute_all(
    block: nn.Module, run: Callable[..., Tensor], *inputs: Any, **options: Any
) -> Tensor:
    """Recompute a block, except the choices of experts."""
    if experts_of(block):
        compiles = torch.compiler.is_compiling()
        options["context_fn"] = (
            partial(device_contexts, "nothing") if compiles else _routing_contexts
        )
    return _recompute(run, *inputs, **options)


def make_run_layers(parallel: Parallel, run: RunLayers) -> RunLayers:
    """Return the loop over blocks, whose saved tensors are on the host if the layout says so."""
    return partial(run_with_host_memory, run) if parallel.offload_activations else run


def describe(parallel: Parallel) -> str:
    """Describe the mode in one line."""
    every = parallel.checkpoint_every
    some = "every block" if every == 1 else f"one block in {every}"
    text = {
        "none": "everything kept for the backward pass",
        "full": f"{some} recomputed",
        "selective": f"{some} recomputed except {_SELECTION_NAMES[parallel.selective_keep]}",
    }[parallel.activation_checkpointing]
    return (
        f"{text}, saved activations wait in host memory" if parallel.offload_activations else text
    )


# Selective, by operation

aten = torch.ops.aten
MATMULS = {
    getattr(aten, name).default
    for name in ("mm", "bmm", "addmm", "baddbmm", "linear", "_scaled_mm")
}
EXPERT_MATMULS = {
    aten._grouped_mm.default,
    multiply_narrow._opoverload,
    multiply_by_expert._opoverload,
}
# Reduced results are as small as the residual stream, and recomputing them would communicate again. A gathered
# sequence is tp times as large as its shards: keeping it would undo sequence parallelism's saving, so it is
# gathered again (Korthikanti et al. 2022, arXiv:2205.05198, section 4.2.2).
COLLECTIVES = {
    getattr(torch.ops._c10d_functional, name).default
    for name in ("reduce_scatter_tensor", "all_reduce", "all_to_all_single")
}
# Recomputed scores of experts differ in their last bits, which could decide a near tie differently.
ROUTING = {
    it._opoverload for it in (multiply_router, choose_experts, keep_choices, exchange_counts)
}
_EXCHANGE = torch.ops._c10d_functional.all_to_all_single.default
_SELECTION_NAMES = {
    "core-attention": "attention alone",
    "attention": "attention",
    "matmuls": "attention and matrix products",
    "every-2nd-matmul": "attention and every 2nd matrix product",
}


class SavePolicy:
    """A decision about keeping each operation's result, asked in order during one pass through a block."""

    def __init__(self, selection: str) -> None:
        self.matmul_interval = {"matmuls": 1, "every-2nd-matmul": 2}.get(selection)
        self.keeps_nothing = selection == "nothing"
        self.keeps_sums = selection != "core-attention"
        self.matmuls = self.expert_matmuls = 0
        self.exchanges = math.inf  # to keep: tokens and routing, and not what comes back

    def __call__(self, operation: Any) -> bool:
        if operation is exchange_counts._opoverload:
            self.exchanges = 2
        if operation in ROUTING or self.keeps_nothing:
            return operation in ROUTING
        if operation in EXPERT_MATMULS:
            # gate, up, and down, whose result the backward pass does not read
            self.expert_matmuls += 1
            number = 2 if operation is multiply_narrow._opoverload else 3  # gate with up
            return self.matmul_interval == 1 and self.expert_matmuls % number > 0
        if operation in MATMULS:
            self.matmuls += 1
            return self.matmul_interval is not None and self.matmuls % self.matmul_interval == 0
        if operation is _EXCHANGE:
            self.exchanges -= 1
            return self.exchanges >= 0
        # All of PyTorch's fused kernels have it in their names; the unfused one consists of products.
        return (self.keeps_sums and operation in COLLECTIVES) or "attention" in operation.name()


def device_contexts(selection: str) -> tuple[Any, Any]:
    """Return the contexts of the forward pass and its recomputation, with kept results on the device."""
    passes = {False: SavePolicy(selection), True: SavePolicy(selection)}

    def policy(context: SelectiveCheckpointContext, operation: Any, *_: Any, **__: Any) -> Any:
        must_save = passes[context.is_recompute](operation)
        return CheckpointPolicy.MUST_SAVE if must_save else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


def host_contexts(selection: str) -> tuple[Any, Any]:
    """Return the same with kept results on the host, which PyTorch's own contexts do not support."""
    results = partial(_Results, selection, [])
    return results(HostMemory().pack), results(HostMemory.unpack, loads=True)


def _routing_contexts() -> tuple[Any, Any]:
    """Return the same for the choices of experts alone. If the backward pass is split, two recomputations load
    them, and PyTorch's own contexts give a result once."""
    results = partial(_Results, "nothing", [], Tensor.detach)  # the graph holds what is saved
    return results(), results(loads=True)


class _Results(TorchDispatchMode):
    """Saves the results of selected operations, or loads them in place of the operations."""

    def __init__(
        self, selection: str, saved: list[Any], convert: Callable[..., Any], *, loads: bool = False
    ) -> None:
        super().__init__()
        self.selection, self.saved, self.convert, self.loads = selection, saved, convert, loads

    ignore_compile_internals = classmethod(lambda _: True)  # compiled parts choose no experts

    def __enter__(self) -> Any:
        self.policy, self.left = SavePolicy(self.selection), iter(self.saved)
        return super().__enter__()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        is_saved = self.policy(func)
        if is_saved and self.loads:
            return tree_map_only((Tensor, HostTensor), self.convert, next(self.left))
        result = func(*args, **(kwargs or {}))
        if is_saved:
            if func in COLLECTIVES:  # they return before their result is ready
                torch.ops._c10d_functional.wait_tensor(result)
            self.saved.append(tree_map_only(Tensor, self.convert, result))
        return result


# Offload to host memory


def run_with_host_memory(
    run: RunLayers, layers: nn.ModuleDict, hidden: Tensor, rotations: Rotations, masks: Masks
) -> Tensor:
    """Run the blocks; tensors that autograd saves, except parameters, wait on the host."""
    memory = HostMemory()
    with saved_tensors_hooks(memory.pack, memory.unpack):
        return run(layers, hidden, rotations, masks)


class HostMemory:
    """A store of saved tensors on the host, once per shared memory, such as one input of three products."""

    def __init__(self) -> None:
        # The weak reference keeps the storage's identity, not its bytes: no later storage can be mistaken for
        # it.
        self.moved: dict[tuple[StorageWeakRef, int], HostStorage] = {}

    def pack(self, tensor: Tensor) -> Tensor | HostTensor:
        if _is_weight(tensor):
            return tensor
        return self._move(tensor.detach())

    @staticmethod
    def unpack(saved: Tensor | HostTensor) -> Tensor:
        return saved.to_device() if isinstance(saved, HostTensor) else saved

    def _move(self, tensor: Tensor) -> HostTensor:
        if isinstance(tensor, AsyncCollectiveTensor):
            return self._move(tensor.wait())
        storage = tensor.untyped_storage()
        key = (StorageWeakRef(storage), tensor._version)
        if key not in self.moved:
            self.moved[key] = HostStorage(storage)
        return HostTensor(self.moved[key], tensor)


class HostStorage:
    """The bytes of one storage in host memory."""

    def __init__(self, storage: torch.UntypedStorage) -> None:
        self.device = storage.device
        self.remaining_views = 0
        self.device_copy: Tensor | None = None
        device_bytes = torch.empty(0, dtype=torch.uint8, device=self.device).set_(storage)
        on_gpu = self.device.type == "cuda"
        self.host_bytes = torch.empty(device_bytes.numel(), dtype=torch.uint8, pin_memory=on_gpu)
        if not on_gpu:
            self.host_bytes.copy_(device_bytes)
            return
        stream = _copy_stream(self.device)
        stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(stream):
            self.host_bytes.copy_(device_bytes, non_blocking=True)
        device_bytes.record_stream(stream)  # otherwise its memory could be reused during the copy
        self.copied = stream.record_event()

    def to_device(self) -> torch.UntypedStorage:
        """Copy the storage back to the device, once for all tensors that view it."""
        if self.device_copy is None:
            if self.device.type == "cuda":
                torch.cuda.current_stream(self.device).wait_event(self.copied)
            self.device_copy = self.host_bytes.to(self.device, non_blocking=True)
        storage = self.device_copy.untyped_storage()
        self.remaining_views -= 1
        if self.remaining_views <= 0:
            self.device_copy = None
        return storage


class HostTensor:
    """A saved tensor: a view of memory that has moved."""

    def __init__(self, moved: HostStorage, tensor: Tensor) -> None:
        self.moved, self.dtype = moved, tensor.dtype
        self.view = (tensor.storage_offset(), tensor.size(), tensor.stride())
        moved.remaining_views += 1

    def to_device(self) -> Tensor:
        return torch.empty(0, dtype=self.dtype, device=self.moved.device).set_(
            self.moved.to_device(), *self.view
        )


def _is_weight(tensor: Tensor) -> bool:
    """True for a parameter, a rank's shard or a view of one, or autocast's copy, which autocast keeps
    anyway."""
    base = tensor if tensor._base is None else tensor._base
    node = base.grad_fn
    while node is not None and node.name() in _WEIGHT_VIEWS:
        node = node.next_functions[0][0]
    return isinstance(getattr(node, "variable", base), nn.Parameter)


_WEIGHT_VIEWS = ("ToCopyBackward0", "_ToLocalBackward")
"""Names of the operations of autocast, and of `parallel.local_parameters`."""


@cache
def _copy_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)

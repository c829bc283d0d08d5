"""Collectives as PyTorch dispatches them: what they communicate, and their results without any other rank."""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d
from torch.distributed.distributed_c10d import _resolve_process_group
from torch.utils._mode_utils import no_dispatch
from torch.utils._pytree import tree_iter

from nanoscale.config.resolved import ResolvedConfig
from nanoscale.rehearse.played.patches import Operation, Patches

_REDUCTIONS = {"sum", "avg", "max", "min", "product"}
_MESSAGES = {"send", "recv_", "recv_any_source_"}
_ROOTED = {"broadcast_", "reduce_", "gather_", "scatter_"}
_OWN_PART = {"gather_": 1, "scatter_": 0}
"""The argument of a collective's own part, which all ranks have; the root has the parts of all ranks."""
_NO_COLLECTIVES = {"wait_tensor", "_wrap_tensor_autograd"}
NAMESPACES = ("c10d", "_c10d_functional")


@contextmanager
def identity(rank: int, config: ResolvedConfig, devices: int) -> Iterator[None]:
    """Run as one rank of a job whose other ranks do not exist, until the `with` block ends.

    Args:
        devices: the number of devices of a host.
    """
    from torch.testing._internal.distributed.fake_pg import FakeStore

    world_size = config.world_size
    env = {
        "RANK": rank,
        "LOCAL_RANK": rank % devices,
        "WORLD_SIZE": world_size,
        "LOCAL_WORLD_SIZE": min(devices, world_size),
    }
    with Patches() as patches:
        for name, value in env.items():
            patches.replace_item(os.environ, name, str(value))
        if world_size > 1 or config.offloads:
            dist.init_process_group("fake", rank=rank, world_size=world_size, store=FakeStore())
        patches.wrap(dist, "new_group", _of_fake_backend)
        # From torch 2.14 on, stages of a fake backend send fewer messages before the first step.
        patches.replace(dist, "get_backend", lambda *_: "played")
        try:
            yield
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()


def _of_fake_backend(new_group: Operation) -> Operation:
    return lambda *args, **options: new_group(*args, **options | {"backend": "fake"})


class Collective(NamedTuple):
    """One collective of one rank, or a message to one other rank."""

    kind: str
    group: dist.ProcessGroup | None
    bytes: int
    """Bytes of the larger of this rank's input and output."""
    dtype: str
    peer: int | None
    """The other rank of a message, or the root of a collective, numbered within the group."""
    reduction: str
    tensors: list[Tensor]
    sent: Sequence[int]
    """Bytes for each member of the group, of an all-to-all; empty for others."""
    received: Sequence[int]
    """Bytes from each member of the group, of an all-to-all; empty for others."""


def described(func: Any, args: Any) -> Collective | None:
    """Return what an operation of one of NAMESPACES communicates; None for an operation that only waits."""
    kind = func.__name__.partition(".")[0]
    if kind in _NO_COLLECTIVES:
        return None
    tensors = [leaf for leaf in tree_iter(args) if isinstance(leaf, Tensor)]
    group: dist.ProcessGroup | None
    reduction = next((arg for arg in args if isinstance(arg, str) and arg in _REDUCTIONS), "")
    if func.namespace == "_c10d_functional":
        name: Any = next(
            arg for arg in reversed(args) if isinstance(arg, str) and arg not in _REDUCTIONS
        )
        group, size = _resolve_process_group(name), _functional_bytes(kind, args)
    else:
        boxed: dict[str, Any] = {
            str(arg._type()): arg for arg in args if isinstance(arg, torch.ScriptObject)
        }
        group = next(
            (dist.ProcessGroup.unbox(boxed[name]) for name in boxed if "Group" in name), None
        )
        for name in boxed:
            if "ReduceOp" in name:
                reduction = dist.ReduceOp.RedOpType(boxed[name].op()).name.lower()
        own = args[_OWN_PART[kind]] if kind in _OWN_PART else args
        size = max((_bytes(arg) for arg in own), default=0)
    peer = None
    if kind in _MESSAGES or kind in _ROOTED:
        peer = next(arg for arg in args if type(arg) is int)
    dtype = str(tensors[0].dtype).removeprefix("torch.") if tensors else ""
    sent, received = _splits(kind, args, group.size()) if group is not None else ((), ())
    return Collective(kind, group, size, dtype, peer, reduction, tensors, sent, received)


def _splits(kind: str, args: Any, ranks: int) -> tuple[Sequence[int], Sequence[int]]:
    """Return the bytes that an all-to-all sends to each member, and receives from each; else nothing."""
    if kind == "alltoall_":
        outputs, inputs = args[:2]
        return [x.nbytes for x in inputs], [x.nbytes for x in outputs]
    if kind == "alltoall_base_":
        output, x, _, output_rows, input_rows, *_ = args
        return _split_bytes(x, input_rows, ranks), _split_bytes(output, output_rows, ranks)
    if kind == "all_to_all_single":
        x, output_rows, input_rows, *_ = args
        if input_rows and sum(input_rows) != len(x):
            raise ValueError(
                f"an all-to-all sends {sum(input_rows)} of the {len(x)} rows of a tensor"
            )
        return _split_bytes(x, input_rows, ranks), _split_bytes(x, output_rows, ranks)
    return (), ()


def _split_bytes(tensor: Tensor, rows: Sequence[int], ranks: int) -> list[int]:
    """Return the bytes of each part of a tensor, which has equal parts if no rows are given."""
    row = tensor.nbytes // max(1, tensor.shape[0])
    return [row * count for count in rows] if rows else [tensor.nbytes // ranks] * ranks


def _bytes(argument: Any) -> int:
    if not isinstance(argument, (Tensor, list, tuple)):
        return 0
    return sum(leaf.nbytes for leaf in tree_iter(argument) if isinstance(leaf, Tensor))


def _functional_bytes(kind: str, args: Any) -> int:
    x = args[0]
    if isinstance(x, (list, tuple)):
        return _bytes(x)
    if kind == "all_gather_into_tensor":
        return int(x.nbytes * args[1])
    if kind == "all_to_all_single":
        row = x.nbytes // max(1, x.shape[0])
        return int(row * max(sum(args[1]), sum(args[2])))
    return int(x.nbytes)


def answer(func: Any, args: Any, work: Any) -> Any:
    """Return the result of a collective as if all members of the group had the same values.

    Args:
        work: the `FakeWork` to return if the operation returns a work.
    """
    kind = func.__name__.partition(".")[0]
    if func.namespace == "_c10d_functional":
        return _functional_answer(kind, args)
    if kind == "allgather_":  # the callers read real tensors in host memory
        with no_dispatch():  # a group may have a thousand members
            for outputs, source in zip(args[0], args[1], strict=False):
                for output in outputs:
                    if type(source) is Tensor and type(output) is Tensor:
                        output.copy_(source)
    first = next((leaf for leaf in tree_iter(args) if isinstance(leaf, Tensor)), None)
    results: list[Any] = []
    for returned in func._schema.returns:
        type_name = str(returned.type)
        if "Work" in type_name:
            results.append(work.boxed())
        else:
            results.append(args[0] if "List" in type_name or "[]" in type_name else first)
    return results[0] if len(results) == 1 else tuple(results) or None


def _functional_answer(kind: str, args: Any) -> Any:
    x = args[0]
    if kind in _NO_COLLECTIVES or kind.endswith("_"):
        return x
    if kind in ("all_reduce", "broadcast"):
        return torch.empty_like(x)
    rows = {
        "all_gather_into_tensor": lambda: x.shape[0] * args[1],
        "reduce_scatter_tensor": lambda: x.shape[0] // args[2],
        "all_to_all_single": lambda: sum(args[1]),
    }[kind]()
    return x.new_empty((rows, *x.shape[1:]))


class _InTransit:
    """The work of a message or an exchange. It holds their tensors, as the works of NCCL and gloo do."""

    def __init__(self, work: Any, tensors: list[Tensor], *, until_wait: bool) -> None:
        self._work, self._tensors, self._until_wait = work, tensors, until_wait

    def wait(self, *timeout: Any) -> bool:
        """Wait. NCCL then releases the tensors; gloo releases them when the work itself is freed."""
        if self._until_wait:
            self._tensors = []
        self._work.wait(*timeout)
        return True

    def is_completed(self) -> bool:
        return True


def hold_tensors(patches: Patches, *, on_gpu: bool) -> None:
    """Let the work of a message or of an exchange hold its tensors."""

    def single(plain: Operation) -> Operation:
        def message(tensor: Tensor, *args: Any, **options: Any) -> Any:
            work = plain(tensor, *args, **options)
            tensors = [tensor, *(arg for arg in args if isinstance(arg, Tensor))]
            return work and _InTransit(work, tensors, until_wait=on_gpu)

        return message

    def several(plain: Operation) -> Operation:
        def batch_isend_irecv(operations: list[Any]) -> list[Any]:
            works = plain(operations)
            if all(isinstance(work, _InTransit) for work in works):
                return works
            tensors = [operation.tensor for operation in operations]
            return [_InTransit(work, tensors, until_wait=on_gpu) for work in works]

        return batch_isend_irecv

    singles = (("isend", single), ("irecv", single), ("all_to_all_single", single))
    for name, make in (*singles, ("batch_isend_irecv", several)):
        replacement = make(getattr(distributed_c10d, name))
        for module in (dist, distributed_c10d):  # PyTorch compares these functions by identity
            patches.replace(module, name, replacement)

"""Replacements that let a rank's code run on tensors without numbers, and keep tensors in host memory real."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch._subclasses.fake_tensor as fake
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.distributed.tensor import DTensor
from torch.utils._device import _device_constructors

from nanoscale.config.model_math import routed_share
from nanoscale.models import moe
from nanoscale.rehearse.played.live_memory import OPENED
from nanoscale.rehearse.played.patches import Operation, Patches

META = torch.device("meta")
DEVICE_OF = torch.ops.prim.device.default
_FACTORIES = ("zeros", "ones", "empty", "full", "arange", "rand", "randn")


def device_in_cpp(tensor: FakeTensor) -> torch.device:
    """Return the device of a tensor that C++ sees: `meta` in place of `cuda:N`."""
    device = tensor.fake_device
    return META if tensor.fake_mode.in_kernel_invocation or device.type == "cuda" else device


def report_devices(patches: Patches, mode: FakeTensorMode, simulated: torch.device) -> None:
    """Report the simulated device to Python and `meta` to C++, for fake tensors and tensors that wrap them.

    Args:
        mode: the mode of the played tensors; other ones are the compiler's.
    """
    dispatch_fake = FakeTensor.__torch_dispatch__.__func__  # type: ignore[attr-defined]

    def dispatch(cls: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is DEVICE_OF:
            return device_in_cpp(args[0])
        return dispatch_fake(cls, func, types, args, kwargs or {})

    dispatch_mode = FakeTensorMode.dispatch

    def traced(self: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self is not mode and kwargs.get("device") == META:
            kwargs = {**kwargs, "device": simulated}  # the compiler passes on what C++ reported
        return dispatch_mode(self, func, types, args, kwargs)

    patches.replace(FakeTensorMode, "dispatch", traced)
    patches.replace(fake, "init_gpu_context", lambda *_: None)
    handlers = fake._DISPATCH_META_HANDLERS
    patches.replace_item(handlers, DEVICE_OF, lambda args: device_in_cpp(args[0]))
    patches.replace(FakeTensor, "__torch_dispatch__", classmethod(dispatch))
    patches.replace(FakeTensor, "is_cuda", property(lambda self: self.device.type == "cuda"))
    patches.replace(FakeTensor, "is_meta", property(lambda self: self.device.type == "meta"))
    patches.replace(FakeTensor, "data_ptr", lambda _: 0)
    for name in ("device", "is_cuda", "is_meta"):  # C++ would report these of a DTensor
        local = property(lambda self, name=name: getattr(self._local_tensor, name))  # type: ignore[misc]
        patches.replace(DTensor, name, local)
        traced_device = property(lambda self, name=name: getattr(_within(self), name))  # type: ignore[misc]
        patches.replace(FunctionalTensor, name, traced_device)
    make = Tensor._make_wrapper_subclass

    def make_wrapper(cls: Any, *args: Any, **kwargs: Any) -> Any:
        """Make a tensor of a class such as FlatShard or torchao's 8-bit moments."""
        if cls is FunctionalTensor:
            return make(cls, *args, **kwargs)
        device = torch.device(kwargs.get("device") or "cpu")
        if device.type != "cuda":
            return make(cls, *args, **kwargs | {"device": device})
        if "device" not in vars(cls):
            patches.replace(cls, "device", property(_device_within))
            patches.replace(
                cls, "is_cuda", property(lambda self: _device_within(self).type == "cuda")
            )
        return make(cls, *args, **kwargs | {"device": META})

    patches.replace(Tensor, "_make_wrapper_subclass", make_wrapper)


def _within(tensor: Any) -> Any:
    """Return the tensor within a FunctionalTensor of the compiler."""
    return torch._from_functional_tensor(tensor.elem)


def _device_within(tensor: Any) -> torch.device:
    """Return the device of the first tensor that a wrapper holds."""
    parts = getattr(tensor, "parts", None)
    if parts is None:
        parts = [getattr(tensor, name) for name in tensor.__tensor_flatten__()[0]]
    return torch.device(parts[0].device)


def make_host_tensors_real(
    patches: Patches, in_host: Callable[[], AbstractContextManager[None]], gpu: torch.device | None
) -> None:
    """Replace the factories of tensors such that tensors in host memory have numbers.

    Args:
        in_host: a context in which new tensors are real.
        gpu: the simulated device; None for a CPU.
    """
    plain, plain_as_tensor, move = torch.tensor, torch.as_tensor, Tensor.to

    def tensor(data: Any, **options: Any) -> Any:
        options.pop("pin_memory", None)
        device = options.pop("device", None)
        with in_host():
            host = plain(data, **options)
        return host if device is None else host.to(device)

    def as_tensor(data: Any, dtype: Any = None, device: Any = None) -> Any:
        if isinstance(data, Tensor):
            return data.to(device=device, dtype=dtype)
        with in_host():
            host = plain_as_tensor(data, dtype=dtype)
        return host if device is None else host.to(device)

    def new_tensor(self: Any, data: Any, dtype: Any = None, device: Any = None) -> Any:
        return tensor(data, dtype=dtype or self.dtype, device=device or self.device)

    def numbered(value: Any) -> Any:
        return gpu if isinstance(value, (str, torch.device)) and str(value) == "cuda" else value

    def to(self: Any, *args: Any, **options: Any) -> Any:
        """Move a tensor. To the present GPU by its number, for which C++ would ask CUDA."""
        args = tuple(numbered(arg) for arg in args)
        return move(self, *args, **{name: numbered(value) for name, value in options.items()})

    for name, function in {"tensor": tensor, "as_tensor": as_tensor}.items():
        patches.replace(torch, name, function)
    patches.replace(Tensor, "new_tensor", new_tensor)
    if gpu is not None:
        patches.replace(Tensor, "to", to)
        patches.replace(Tensor, "cuda", lambda self, device=None, **_: self.to(device or gpu))
        return

    def host_factory(make: Operation) -> Operation:
        def factory(*args: Any, **options: Any) -> Any:
            if options.get("device") is not None:
                return make(*args, **options)
            with in_host():
                return make(*args, **options)

        return factory

    _device_constructors()  # PyTorch caches these functions for `with torch.device(…)` at the first call
    for name in _FACTORIES:
        patches.wrap(torch, name, host_factory)


def read_on_host(
    patches: Patches,
    wait: Callable[[str], None],
    in_host: Callable[[], AbstractContextManager[None]],
) -> None:
    """Let the host print tensors and use them as arrays of NumPy, whose numbers are all 1.

    Args:
        wait: called when the host reads a tensor of the device.
        in_host: a context in which new tensors are real.
    """

    def written(tensor: Any, spec: str = "") -> str:
        if tensor.is_cuda:
            wait("print")
        return format(1.0, spec) if tensor.ndim == 0 else f"tensor({list(tensor.shape)})"

    def numpy(tensor: Any, **_: Any) -> Any:
        if tensor.is_cuda:
            raise TypeError(
                "a tensor of a GPU must be copied to the host before it can be an array of NumPy"
            )
        with in_host():
            return torch.ones(tensor.shape, dtype=tensor.dtype).numpy()

    def tolist(tensor: Any) -> Any:
        if tensor.is_cuda:
            wait("tolist")
        with in_host():
            return torch.ones(tensor.shape, dtype=tensor.dtype).tolist()

    for name in ("__repr__", "__format__"):
        patches.replace(FakeTensor, name, written)
    patches.replace(FakeTensor, "numpy", numpy)
    patches.replace(FakeTensor, "tolist", tolist)


def balance_experts(patches: Patches, rank: int, ranks: int, wait: Callable[[str], None]) -> None:
    """Make up the loads of experts, since fake tensors cannot be routed: nearly equal, so that memory is usual,
    and uneven, so that splits of an all-to-all that are swapped or not exchanged differ between ranks.

    The host reads the numbers of the last routing with `tolist`: the copies of tokens to send and to receive,
    and the rows of each expert.

    Args:
        rank: this rank's number in the expert-parallel group.
        ranks: the size of this group.
        wait: called when the host reads loads from the device.
    """
    loads: list[int] = []
    """The tokens of one rank that choose each expert."""
    copies = 0
    """The tokens of a rank that choose any expert of another rank, on average."""

    def sent(sender: int, receiver: int) -> int:
        # Rank 0 keeps one less, and sends it to the last rank.
        more = (receiver == ranks - 1) - (receiver == 0) if sender == 0 else 0
        return max(0, copies + more)

    def choosing(choose: Operation) -> Operation:
        def chosen(scores: Any, top_k: int, load: Any) -> Any:
            tokens, experts = scores.shape
            least, remainder = divmod(tokens * top_k, experts)
            shift = int(
                least > 0 and experts // ranks % 2 == 0
            )  # between pairs of a rank's experts
            loads[:] = [least + (it < remainder) + shift * (-1) ** it for it in range(experts)]
            nonlocal copies
            copies = round(tokens * routed_share(experts, top_k, ranks))
            return choose(scores, top_k, load)

        return chosen

    def answering(plain: Operation) -> Operation:
        def tolist(tensor: Any) -> Any:
            share = len(loads) // ranks
            of_this_rank = loads[rank * share : (rank + 1) * share]
            if tuple(tensor.shape) == (
                3,
                ranks,
            ):  # of `expert.exchange_counts`, on the host already
                sending = [sent(rank, other) for other in range(ranks)]
                receiving = [sent(other, rank) for other in range(ranks)]
                return [sending, receiving, [sum(of_this_rank)] * ranks]
            if tensor.ndim == 1 and len(tensor) == share:
                wait("tolist")
                return [load * ranks for load in of_this_rank]
            return plain(tensor)

        return tolist

    choose_experts = moe.choose_experts._opoverload
    patches.replace_item(OPENED, choose_experts, choosing(OPENED[choose_experts]))
    patches.wrap(FakeTensor, "tolist", answering)

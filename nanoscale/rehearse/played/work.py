"""The work of an operation: what decides its time on any device, without the device's speed."""

from collections.abc import Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor

from nanoscale.config.model_math import window_keys

_DTYPES = {
    torch.float64: "fp64", torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16",
    **dict.fromkeys((it for name, it in vars(torch).items() if name.startswith("float8_e")), "fp8"),
}  # fmt: skip
_PRODUCTS = {"mm", "addmm", "bmm", "baddbmm", "_scaled_mm", "_grouped_mm", "_scaled_grouped_mm"}
EMPTY = {
    "empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "set_", "resize_",
    "_local_scalar_dense", "_unsafe_view",
}  # fmt: skip
"""Operations without a kernel, as views are."""
_ROWS = {"embedding", "index_select", "gather", "index", "take"}
"""Operations that read as much of their first input as they write."""
_SCATTERS = {
    "scatter_", "scatter_add_", "index_add_", "index_copy_", "index_put_", "_index_put_impl_",
}  # fmt: skip
"""Operations that change as much of their first input as they read of the others."""
_OVERWRITES = {"copy_", "fill_", "zero_"}
"""Operations that do not read their first input."""

Work = tuple[Any, ...]
"""One of
    ("product", name, dtype, m, n, k, groups, whether all rows in memory are multiples of 16 bytes)
    ("attention", name, dtype, batch, queries, keys, heads, head size, causal, backward)
    ("bytes", name, number) that the device reads and writes
    ("copy", name, number) that the link to the host carries."""


def work_of(
    func: Any, tensors: Sequence[Tensor], args: Any, kwargs: Any, result: Any
) -> Work | None:
    """Return the work of an operation on tensors without numbers; None if it starts no kernel."""
    name = func.__name__.partition(".")[0]
    if func.is_view or name in EMPTY:
        return None
    outputs = tensors_of(result)
    if not (tensors or outputs):  # an event of the profiler
        return None
    if name in _PRODUCTS:
        return _product(name, tensors)
    if "attention" in name:
        return _attention(name, func, args, kwargs)
    every = [*tensors, *outputs]
    if name in ("_to_copy", "copy_") and len({it.device.type for it in every} - {"meta"}) > 1:
        return "copy", name, max(map(bytes_of, outputs), default=0)
    given, unread, changed = _given(func, args, kwargs), set[int](), list[Tensor]()
    for argument in func._schema.arguments:
        of_argument = tensors_of(given.get(argument.name))
        if argument.is_out:
            unread |= {id(tensor) for tensor in of_argument}
        # The update of an optimizer only changes gradients that it scales.
        if argument.alias_info and argument.alias_info.is_write and argument.name != "grads":
            changed += of_argument
    if name in _OVERWRITES or name in _SCATTERS:
        unread.add(id(tensors[0]))
    read = [it for it in tensors if id(it) not in unread]
    written = read if name in _SCATTERS else changed or outputs
    if name in _ROWS:
        read = written
    return "bytes", name, sum(map(bytes_of, read)) + sum(map(bytes_of, written))


def _product(name: str, tensors: Sequence[Tensor]) -> Work:
    left, right = tensors[1:3] if name in ("addmm", "baddbmm") else tensors[:2]
    groups = left.shape[0] if left.dim() == 3 else right.shape[0] if right.dim() == 3 else 1
    (m, k), n = left.shape[-2:], right.shape[-1]
    if "grouped" in name and left.dim() == right.dim() == 2:  # the gradients of weights
        groups = tensors[-1].shape[0]
        k = k // groups
    elif "grouped" in name and left.dim() == 2:
        m = m // groups
    rows = max(left.stride()[-2:]), max(right.stride()[-2:]), n
    aligned = not any(length * left.element_size() % 16 for length in rows)
    return "product", name, _DTYPES.get(left.dtype, "fp32"), m, n, k, groups, aligned


def _attention(name: str, func: Any, args: Any, kwargs: Any) -> Work:
    """Return the work of attention. Documents divide a row equally, and each is a batch of its own."""
    given = _given(func, args, kwargs)
    names = ("q", "k", "v") if "q" in given else ("query", "key", "value")
    query, key, value = (given[it] for it in names)
    causal = bool(given.get("is_causal", given.get("causal", False)))
    *batch, heads, queries, size = query.shape
    keys, starts = key.shape[-2], given.get("starts", given.get("cum_seq_q"))
    if starts is not None:
        if not batch:  # [tokens, heads, head size]
            queries, heads, keys = query.shape[0], query.shape[1], key.shape[0]
        rows, documents = prod(batch), len(starts) - 1
        batch, queries, keys = [documents], rows * queries // documents, rows * keys // documents
        window = given.get("window") or given.get("window_size_left", -1) + 1
        causal = window >= keys == queries if window else causal or "starts" in given
        if window and not causal:
            keys = window_keys(queries, min(window, keys), keys - queries)
    sizes = batch[0], queries, keys, heads, (size + value.shape[-1]) // 2
    return "attention", name, _DTYPES.get(query.dtype, "fp32"), *sizes, causal, "backward" in name


def _given(func: Any, args: Any, kwargs: Any) -> dict[str, Any]:
    """Return the arguments of an operation by name."""
    names = (argument.name for argument in func._schema.arguments)
    return dict(zip(names, args, strict=False)) | (kwargs or {})


def flat(value: Any) -> list[Any]:
    """Return the leaves of nested lists and tuples."""
    if isinstance(value, (list, tuple)):
        return [leaf for each in value for leaf in flat(each)]
    return [value]


def tensors_of(value: Any) -> list[Tensor]:
    """Return the tensors of nested lists and tuples."""
    return [each for each in flat(value) if isinstance(each, Tensor)]


def bytes_of(tensor: Tensor) -> int:
    """Return the bytes of a tensor's numbers; numbers that an expanded tensor repeats count once."""
    count = 1
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        count *= int(size) if stride else 1
    return count * tensor.element_size()

"""The work of an operation: what decides its time on any device, without the device's speed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

_DTYPES = {
    torch.float64: "fp64", torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16",
    torch.float8_e4m3fn: "fp8", torch.float8_e5m2: "fp8",
}  # fmt: skip
_PRODUCTS = {"mm", "addmm", "bmm", "baddbmm", "_scaled_mm", "_grouped_mm", "_scaled_grouped_mm"}
EMPTY = {
    "empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "set_", "resize_",
    "_local_scalar_dense", "_unsafe_view",
}  # fmt: skip
"""Operations without a kernel, as views are."""
_ROWS = {"embedding", "index_select", "gather", "index", "take"}
"""Operations that read as much of their first input as they write."""

Work = tuple[Any, ...]
"""One of
    ("product", name, dtype, m, n, k, groups)
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
    outputs = [each for each in flat(result) if isinstance(each, Tensor)]
    if name in _PRODUCTS:
        return _product(name, tensors, outputs)
    if "attention" in name:
        return _attention(name, func, args, kwargs)
    devices = {each.device.type for each in (*tensors, *outputs)}
    if name in ("_to_copy", "copy_") and len(devices - {"meta"}) > 1:
        return "copy", name, max(map(bytes_of, outputs), default=0)
    read = outputs if name in _ROWS else tensors
    written: Sequence[Any] = outputs or (flat(args[0]) if name.startswith("_foreach") else [])
    return "bytes", name, sum(map(bytes_of, read)) + sum(map(bytes_of, written))


def _product(name: str, tensors: Sequence[Tensor], outputs: Sequence[Tensor]) -> Work:
    left, right = [each for each in tensors if each.dim() >= 2][-2:]
    if name.startswith("_scaled"):
        left, right = tensors[:2]
    if name in ("addmm", "baddbmm"):
        left, right = tensors[1:3]
    groups = left.shape[0] if left.dim() == 3 else right.shape[0] if right.dim() == 3 else 1
    (m, k), n = left.shape[-2:], right.shape[-1]
    if "grouped" in name and left.dim() == 2:
        m = m // groups
    return "product", name, _DTYPES.get(left.dtype, "fp32"), m, n, k, groups


def _attention(name: str, func: Any, args: Any, kwargs: Any) -> Work:
    given = dict(zip((it.name for it in func._schema.arguments), args, strict=False)) | (
        kwargs or {}
    )
    query, key = given["query"], given["key"]
    causal = bool(given.get("is_causal", given.get("causal", False)))
    batch, heads, queries, size = query.shape
    return (
        "attention", name, _DTYPES.get(query.dtype, "fp32"), batch, queries, key.shape[2], heads, size, causal,
        "backward" in name,
    )  # fmt: skip


def flat(value: Any) -> list[Any]:
    """Return the leaves of nested lists and tuples."""
    if isinstance(value, (list, tuple)):
        return [leaf for each in value for leaf in flat(each)]
    return [value]


def bytes_of(tensor: Tensor) -> int:
    """Return the bytes of a tensor's numbers; those that an expanded tensor repeats count once."""
    count = 1
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        count *= int(size) if stride else 1
    return count * tensor.element_size()

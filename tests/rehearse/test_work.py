"""The work that is recorded of an operation, counted by hand."""

from __future__ import annotations

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from nanoscale.rehearse.played.work import Work, work_of

A, B = torch.empty(6, 4), torch.empty(4, 5)
WIDE, NARROW = torch.empty(1000), torch.empty(1000, dtype=torch.bfloat16)
TABLE, ROWS = torch.empty(100, 8), torch.zeros(3, dtype=torch.int64)
ODD = torch.empty(8, 7)
QUERY = torch.empty(2, 3, 16, 8)


class Recorded(TorchDispatchMode):
    """The works of the operations in the `with` block."""

    def __init__(self) -> None:
        super().__init__()
        self.works: list[Work] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        tensors = [
            leaf
            for each in (*args, *(kwargs or {}).values())
            for leaf in (each if isinstance(each, (list, tuple)) else [each])
            if isinstance(leaf, torch.Tensor)
        ]
        work = work_of(func, tensors, args, kwargs, result)
        self.works += [] if work is None else [work]
        return result


def update():
    parameter = torch.nn.Parameter(torch.empty(1000))
    parameter.grad = torch.ones(1000)
    torch.optim.AdamW([parameter], fused=True).step()


@pytest.mark.parametrize(
    ("operation", "work"),
    [
        (lambda: torch.mm(A, B), ("product", "mm", "fp32", 6, 5, 4, 1, False)),
        (lambda: torch.mm(A, B, out=torch.empty(6, 5)), ("product", "mm", "fp32", 6, 5, 4, 1, False)),
        (lambda: torch.addmm(torch.empty(5), A, B), ("product", "addmm", "fp32", 6, 5, 4, 1, False)),
        (lambda: torch.bmm(A.expand(7, 6, 4), B.expand(7, 4, 5)),
         ("product", "bmm", "fp32", 6, 5, 4, 7, False)),
        (lambda: torch.mm(TABLE, ODD), ("product", "mm", "fp32", 100, 7, 8, 1, False)),
        (lambda: torch.mm(TABLE.t(), TABLE),
         ("product", "mm", "fp32", 8, 8, 100, 1, True)),
        (lambda: WIDE + 1, ("bytes", "add", 8000)),
        (lambda: WIDE.add_(NARROW), ("bytes", "add_", 10000)),
        (lambda: WIDE.copy_(NARROW), ("bytes", "copy_", 6000)),
        (lambda: torch.mul(WIDE, 2.0, out=torch.empty(1000)), ("bytes", "mul", 8000)),
        (lambda: WIDE.zero_(), ("bytes", "zero_", 4000)),
        (lambda: torch._foreach_mul_([WIDE, NARROW], 2.0), ("bytes", "_foreach_mul_", 12000)),
        (lambda: TABLE[ROWS], ("bytes", "index", 2 * 3 * 8 * 4)),
        (lambda: TABLE.index_add_(0, ROWS, torch.empty(3, 8)),
         ("bytes", "index_add_", 2 * (3 * 8 * 4 + 3 * 8))),
        (update, ("bytes", "_fused_adamw_", 7 * 4000 + 4)),
        (lambda: torch.nn.functional.scaled_dot_product_attention(QUERY, QUERY, QUERY, is_causal=True),
         ("attention", "_scaled_dot_product_flash_attention_for_cpu", "fp32", 2, 16, 16, 3, 8, True, False)),
        (lambda: WIDE.view(10, 100).t(), None),
    ],
)  # fmt: skip
def test_the_work_of_an_operation(operation, work):
    with Recorded() as recorded:
        operation()
    assert recorded.works[-1:] == ([] if work is None else [work])

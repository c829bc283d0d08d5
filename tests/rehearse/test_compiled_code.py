"""Findings of the compiler in planted blocks, without a device and without generated code."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from nanoscale.models import transformer as module
from nanoscale.models.transformer import Block
from nanoscale.rehearse.compiled_code import compiler_findings
from tests.support.measured_memory import SHAPE, Row, config_of, recomputed
from tests.support.ranks import run_ranks

plain = Block.forward
Forward = Callable[..., Any]


def prints(block: Any, hidden: Any, *args: Any) -> Any:
    print("a block")
    return plain(block, hidden, *args)


def branches(block: Any, hidden: Any, *args: Any) -> Any:
    if hidden.sum() > 0:
        hidden = hidden * 2
    return plain(block, hidden, *args)


def counts(block: Any, hidden: Any, *args: Any) -> Any:
    block.count += 1
    for _ in range(block.count):  # else the compiler lets the number vary
        hidden = hidden * 0.5
    return plain(block, hidden, *args)


def grows(block: Any, hidden: Any, *args: Any) -> Any:
    block.kept.append(hidden.detach())
    return plain(block, hidden, *args) + torch.stack(block.kept).mean(0)


def found(_rank: int, forward: Forward) -> list[str]:
    degrees = {"dp": 2, "tp": 2} | ({} if forward in (counts, grows) else recomputed("selective"))
    row = Row("", degrees, 3, shape=SHAPE)
    config = config_of(row)
    train = replace(config.train, eval_every=5)
    config = replace(config, train=train, backend=replace(config.backend, compile="on"))
    vars(module)["Block"].count, vars(module)["Block"].kept = 0, []
    Block.forward = forward  # type: ignore[method-assign]
    try:
        return compiler_findings(config)
    finally:
        Block.forward = plain  # type: ignore[method-assign]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("forward", "said"),
    [
        (plain, None),
        (prints, "breaks a block in two at"),
        (branches, "breaks a block in two at"),
        (counts, "compiles blocks again in every step: "),
        (grows, "compiles blocks again in every step: "),
    ],
)
def test_what_the_compiler_cannot_do_is_named(forward: Forward, said: str | None) -> None:
    (findings,) = run_ranks(found, 1, forward)
    if said is None:
        assert findings == []
    else:
        assert said in findings[0]
        assert "test_compiled_code.py:" in findings[0] or "breaks" not in said

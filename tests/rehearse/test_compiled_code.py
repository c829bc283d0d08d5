"""Findings of the compiler in planted blocks, without a device and without generated code."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from nanoscale.models import transformer as module
from nanoscale.models.transformer import Block
from nanoscale.rehearse import __main__ as process
from nanoscale.rehearse.__main__ import compiler_findings
from nanoscale.rehearse.played.record import RankRecord
from nanoscale.rehearse.rehearsals import Task, record_file
from nanoscale.runs.directory import read_json
from tests.support.measured_memory import SHAPE, Row, config_of, recomputed
from tests.support.ranks import run_ranks
from tests.support.rows import exhaustive

plain = Block.forward
Forward = Callable[..., Any]
DP_TP = {"dp": 2, "tp": 2}


def branches(block: Any, hidden: Any, *args: Any) -> Any:
    if hidden.sum() > 0:
        hidden = hidden * 2
    return plain(block, hidden, *args)


def counts(block: Any, hidden: Any, *args: Any) -> Any:
    block.count += 1
    for _ in range(block.count):  # else the compiler lets the number vary
        hidden = hidden * 0.5
    return plain(block, hidden, *args)


def found(_rank: int, forward: Forward, layout: dict[str, int]) -> list[str]:
    degrees = layout | ({} if forward is counts else recomputed("selective"))
    row = Row("", degrees, 3, shape=replace(SHAPE, layers=2))
    config = config_of(row)
    train = replace(config.train, eval_every=5)
    config = replace(config, train=train, backend=replace(config.backend, compile="on"))
    vars(module)["Block"].count = 0
    torch._dynamo.config.recompile_limit = 4  # eight take half a minute
    Block.forward = forward  # type: ignore[method-assign]
    try:
        return compiler_findings(config)
    finally:
        Block.forward = plain  # type: ignore[method-assign]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("forward", "said", "layout"),
    [
        (plain, None, {"dp": 2}),
        exhaustive(plain, None, DP_TP),
        (branches, "breaks a block in two at", DP_TP),
        (counts, "compiles blocks again in every step: ", {"pp": 2, "dp": 2}),
    ],
)
def test_what_the_compiler_cannot_do_is_named(
    forward: Forward, said: str | None, layout: dict[str, int]
) -> None:
    (findings,) = run_ranks(found, 1, forward, layout)
    if said is None:
        assert findings == []
    else:
        assert said in findings[0]
        assert "test_compiled_code.py:" in findings[0] or "breaks" not in said


def test_an_error_of_the_tracing_is_shown_and_the_finished_record_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(_: object) -> list[str]:
        raise ValueError("a planted error")

    monkeypatch.setattr(process, "play", lambda *_, **__: RankRecord(0, reserved=5))
    monkeypatch.setattr(process, "compiler_findings", fails)
    monkeypatch.setattr(process, "die_with", lambda *_, **__: None)
    task: Any = Task([0], 2, None, 1, 1 << 40)
    if (pid := os.fork()) == 0:
        process._play(0, tmp_path, task, task)
    assert os.waitpid(pid, 0)[1] == 0
    record = RankRecord.of_json(read_json(record_file(tmp_path, 0)))
    assert record.reserved == 5
    assert record.error is not None and "ValueError: a planted error" in record.error

"""Peak memory of real steps against the plan: some rows of `tests.support.measured_memory`."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.support.measured_memory import ROWS, Row, config_of, measure, show
from tests.support.ranks import run_ranks

BY_NAME = {row.name: replace(row, global_batch=8) for row in ROWS}
LOGITS = replace(BY_NAME["one process"].shape, vocab=4096, hidden=32, ffn=64, layers=2)
"""a model whose logits are most of its memory"""
CHOSEN = [
    BY_NAME["one process, selective"],
    BY_NAME["one process, none, offloaded"],
    BY_NAME["dp 2, stage 3, bf16, full"],
    BY_NAME["pp 2, interleaved-1f1b, selective"],
    BY_NAME["pp 2, zero-bubble, full"],
    BY_NAME["matrix: pp 2 · tp 2, zero-bubble"],
    BY_NAME["experts, full"],
    replace(BY_NAME["experts, ep 2 · dp 2"], global_batch=16),
    BY_NAME["experts, ep 2 · tp 2"],
    BY_NAME["experts, ep 2, stage 3, bf16"],
    Row("logits", shape=LOGITS, micro_batch=4, global_batch=8),
    Row(
        "logits in a pipeline",
        {"pp": 2, "schedule": "gpipe"},
        shape=LOGITS,
        micro_batch=4,
        global_batch=16,
    ),
]


@pytest.mark.slow
@pytest.mark.parametrize("row", CHOSEN, ids=lambda row: row.name)
def test_the_plan_is_within_five_percent(row: Row) -> None:
    config = config_of(row)
    errors = show(row, config, run_ranks(measure, config.world_size, config))
    assert max(map(abs, errors)) < 0.05

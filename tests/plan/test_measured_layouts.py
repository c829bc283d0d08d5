"""Peak memory of real steps against the plan: the rows of `tests.support.measured_memory`."""

from __future__ import annotations

from dataclasses import replace
from statistics import mean

import pytest

from tests.support.measured_memory import ROWS, Row, config_of, measure, show, vocabulary
from tests.support.ranks import run_ranks
from tests.support.rows import usual_rows

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
    BY_NAME["shared experts, tp 2"],
    BY_NAME["shared experts, selective"],
    BY_NAME["LoRA, selective, bf16"],
    BY_NAME["LoRA, dp 2, stage 3, bf16"],
    BY_NAME["LoRA, pp 2"],
    BY_NAME["packed documents, bf16, long"],
    BY_NAME["packed documents, full, long"],
    Row(
        "adamw8bit, update highest",
        optimizer="adamw8bit",
        micro_batch=1,
        global_batch=2,
        shape=vocabulary(16 * 2**10, hidden=32, head_dim=4, ffn=64),
        seq=32,
    ),
    Row("logits", shape=LOGITS, micro_batch=4, global_batch=8),
    Row(
        "logits in a pipeline",
        {"pp": 2, "schedule": "gpipe"},
        shape=LOGITS,
        micro_batch=4,
        global_batch=16,
    ),
    Row("vocab 16k, dp 2, stage 1", {"dp": 2}, 1, shape=vocabulary(16 * 2**10)),
    Row("vocab 16k, tied", {"dp": 2}, 3, shape=vocabulary(16 * 2**10, tie_embeddings=True)),
    *(
        Row(
            f"vocab 16k, few tokens, {'tied' if tied else 'untied'}",
            {"dp": 2},
            2,
            1,
            shape=vocabulary(16 * 2**10, tie_embeddings=tied),
            seq=32,
        )
        for tied in (False, True)
    ),
]


USUAL = (
    "one process, none, offloaded",
    "dp 2, stage 3, bf16, full",
    "pp 2, zero-bubble, full",
    "experts, ep 2 · tp 2",
    "LoRA, dp 2, stage 3, bf16",
    "adamw8bit, update highest",
    "vocab 16k, few tokens, tied",
    "packed documents, bf16, long",
)
"""Rehearsals, which the plan is compared with in tests/rehearse, are compared with real ranks in more rows."""


@pytest.mark.slow
@pytest.mark.parametrize("row", usual_rows({row.name: row for row in CHOSEN}, USUAL))
def test_the_plan_is_within_five_percent(row: Row) -> None:
    assert max(map(abs, errors(row))) < 0.05


@pytest.mark.timeout(1800)  # all rows, one after another
@pytest.mark.exhaustive
def test_all_layouts_are_within_two_percent_on_average_and_five_at_most() -> None:
    by_row = {row.name: errors(row) for row in ROWS}
    assert len(by_row) >= 60
    far = {name: found for name, found in by_row.items() if max(map(abs, found)) > 0.05}
    assert not far
    assert mean(abs(error) for found in by_row.values() for error in found) < 0.02


def errors(row: Row) -> list[float]:
    config = config_of(row)
    return show(row, config, run_ranks(measure, config.world_size, config))

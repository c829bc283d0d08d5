"""Law 1: the equivalence matrix. Every layout trains the same model as a plain loop on one device.

Each row trains in real processes, with clipping active and with accumulation, in fp64, where rounding hides
no wrong collective. Most rows train STEPS steps in `make test`. All rows train LONG_STEPS steps in
`make test-exhaustive`, and rows of the usual shapes do so in fp32 too. Replicas are compared bit by bit after
each step. The summary at the end of the tests prints how far each row went from the loop.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.conftest import Deviations
from tests.support.jobs import LONG_STEPS, STEPS, write_documents, write_tokens
from tests.support.layouts import ROWS, Row, row_config, train_all
from tests.support.ranks import run_ranks
from tests.support.reference import assert_equal_curves, documents_alone, plain_loop, worst

QUICK = ("one process", "dp 2", "tp 2", "pp 2", "cp 2")
"""One row for each way of dividing a model; `make test` trains these for LONG_STEPS steps, in fp32 too."""
REPEATED = (
    "dp 4",
    "tp 4",
    "dp 2 · tp 2, stage 0",
    "dp 2 · cp 2, stage 0",
    "dp 2 · pp 2, stage 3",
    "tp 2 · pp 2 · cp 2, stage 1",
    "dp 2 · tp 2 · pp 2 · cp 2, stage 3",
    "HSDP 2 × 2 · tp 2, stage 3",
    "pp 2 · tp 2, zero-bubble",
    "pp 2, 7 blocks, dualpipev",
    "ulysses cp 2 · tp 2 · dp 2",
    "Qwen2, dp 2 · tp 2, stage 3",
    "Qwen3, dp 2 · tp 2, stage 3",
    "Qwen3, pp 2 · cp 2",
    "OLMo-2, dp 2 · tp 2, stage 3",
    "MLA, tp 2 · cp 2 without sequence parallel",
    "activations full, stage 0, tp=2, checkpoint_every=2",
    "MoE aux, dp 2, ep 4, tp 2, cp 2, ep_over_tp True, activation_checkpointing full, stage 2",
    "MoE bias, dp 2, ep 2, tp 2, activation_checkpointing selective, stage 3",
    "MoE bias, dp 2, cp 2, ep 4, stage 2",
    "packed documents, pp 2, zbv",
    "packed documents, GPT-2, tp 2",
    "offloaded, MoE bias, dp 2, ep 2, tp 2, stage 3",
    "DoRA, tp 2, pp 2, schedule zero-bubble, virtual_stages 2, stage 0",
    "DoRA, dp 2, cp 2, stage 0",
    "dp 2 · pp 2 · cp 2, stage 2",
    "tp 2 · cp 2, stage 3",
    "HSDP 2 × 2 · cp 2, stage 2",
    "pp 2 · dp 2, zbv, stage 0",
    "pp 2, zbv, full",
    "pp 2 · tp 2, 0 + 4 blocks",
    "ulysses cp 4",
    "Qwen3, tp 2 · cp 2 without sequence parallel",
    "MoE aux, dp 2, tp 2, activation_checkpointing selective, stage 1",
    "MoE aux, dp 2, pp 2, stage 0",
    "MoE bias, dp 2, tp 2, ep 2, stage 3",
    "MoE none, dp 4, ep 4, stage 3",
    "LoRA, dp 2, tp 2, activation_checkpointing full, stage 3",
    "LoRA, dp 2, pp 2, schedule zbv, virtual_stages 2, stage 1",
    "DoRA, dp 2, tp 2, activation_checkpointing selective, stage 2",
    "MoE bias, cp 2, ep 2, pp 2, schedule zbv, virtual_stages 2, activation_checkpointing full, stage 1",
    "MoE none, dp 2, cp 2, ep 2, stage 0",
    "MoE bias, tp 2, pp 2, stage 0",
    "LoRA, dp 2, tp 2, pp 2, stage 0",
    "LoRA, dp 2, ep 2, stage 3",
    "DoRA, dp 2, pp 2, schedule zbv, virtual_stages 2, stage 1",
    "dp 2 · tp 2 · pp 2, stage 1",
    "tp 2 · pp 2",
    "pp 2 · cp 2",
    "tied, pp 4 · dp 2, stage 2",
    "GPT-2, dp 2 · tp 2, stage 3",
    "activations selective, stage 1, tp=2, cp=2, selective_keep=attention",
    "packed documents, tp 2 · ring cp 2, selective",
    "packed documents, tp 2 · ulysses cp 2",
    "packed documents, pp 2 · ring cp 2",
    "packed documents, Gemma, tp 2",
    "packed documents, gpt-oss, dp 2 · ep 2",
    "offloaded, HSDP 2 × 2, full",
)
"""Rows whose pairs of parts other rows have too; only `make test-exhaustive` trains them."""


def cases(row: Row) -> list[Any]:
    """Return the precisions and numbers of steps in which a row trains, with their marks."""
    usual = (
        [("fp64", LONG_STEPS if row.name in QUICK else STEPS)] if row.name not in REPEATED else []
    )
    usual += [("fp32", LONG_STEPS)] if row.name in QUICK else []
    rest = [
        (precision, LONG_STEPS)
        for precision in row.precisions
        if (precision, LONG_STEPS) not in usual
    ]
    return [
        pytest.param(
            row, *case, marks=marks(row, case in rest), id=f"{row.name}-{case[0]}-{case[1]}"
        )
        for case in usual + rest
    ]


def marks(row: Row, is_repeated: bool) -> list[pytest.MarkDecorator]:
    if is_repeated:
        return [pytest.mark.exhaustive]
    return [] if row.name in QUICK else [pytest.mark.slow]


@pytest.mark.parametrize(
    ("row", "precision", "steps"), [case for row in ROWS for case in cases(row)]
)
def test_layout_equals_plain_loop(
    tmp_path: Path, row: Row, precision: str, steps: int, deviations: Deviations
) -> None:
    documents = write_documents(tmp_path) if row.packed else write_tokens(tmp_path)
    config = row_config(tmp_path, row, precision, steps)
    (ours,) = run_ranks(train_all, config.world_size, [config])[0]
    if row.packed:
        reference = documents_alone(precision, row.shape, *documents, steps=steps)
    else:
        reference = plain_loop(precision, shape=row.shape, lora=row.lora, steps=steps)
    deviations(row.name, precision, worst(ours, reference))
    assert any(norm > 0.5 for _, norm, *_ in reference), "clipping must be active"
    assert_equal_curves(ours, reference, precision)


def test_named_rows_exist() -> None:
    assert {*QUICK, *REPEATED} <= {row.name for row in ROWS}

"""Law 1: the equivalence matrix. Every layout trains the same model as a plain loop on one device.

Each row trains 20 steps in real processes, with clipping active and with accumulation: in fp64, where rounding
hides no wrong collective. Rows of the usual shapes train in fp32 too, most of them in `make test-exhaustive`.
The summary at the end of the tests prints how far each row went from the loop.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.conftest import Deviations
from tests.support.jobs import write_documents, write_tokens
from tests.support.layouts import ROWS, Row, row_config, train_all
from tests.support.ranks import run_ranks
from tests.support.reference import assert_equal_curves, documents_alone, plain_loop, worst

QUICK = ("one process", "dp 2", "tp 2", "pp 2", "cp 2")
"""one row for each way of dividing a model; `make test` trains these in fp32 too"""


def marked(row: Row, precision: str) -> Any:
    marks = [] if row.name in QUICK and precision == "fp64" else [pytest.mark.slow]
    if precision == "fp32" and row.name not in QUICK:
        marks = [pytest.mark.exhaustive]
    return pytest.param(row, precision, marks=marks, id=f"{row.name}-{precision}")


@pytest.mark.parametrize(
    ("row", "precision"), [marked(row, each) for row in ROWS for each in row.precisions]
)
def test_layout_equals_plain_loop(
    tmp_path: Path, row: Row, precision: str, deviations: Deviations
) -> None:
    documents = write_documents(tmp_path) if row.packed else write_tokens(tmp_path)
    config = row_config(tmp_path, row, precision)
    (ours,) = run_ranks(train_all, config.world_size, [config])[0]
    if row.packed:
        reference = documents_alone(precision, row.shape, *documents)
    else:
        reference = plain_loop(precision, shape=row.shape, lora=row.lora)
    deviations(row.name, precision, worst(ours, reference))
    assert any(norm > 0.5 for _, norm, *_ in reference), "clipping must be active"
    assert_equal_curves(ours, reference, precision)

"""Law 1: the equivalence matrix. Every layout trains the same model as a plain loop on one device.

Each row trains 20 steps in fp64 and in fp32 in real processes, with clipping active and with accumulation, and
the summary at the end of the tests prints how far it went from the loop.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from nanoscale.config.derive import derive
from tests.conftest import Deviations
from tests.support.jobs import write_documents, write_tokens
from tests.support.layouts import ROWS, Row, row_config, train_all
from tests.support.ranks import run_ranks
from tests.support.reference import assert_equal_curves, documents_alone, plain_loop, worst


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_layout_equals_plain_loop(tmp_path: Path, row: Row, deviations: Deviations) -> None:
    documents = write_documents(tmp_path) if row.packed else write_tokens(tmp_path)
    configs = [row_config(tmp_path, row, precision) for precision in row.precisions]
    results = run_ranks(train_all, derive(configs[0]).world_size, configs)
    precisions = [config.precision.params for config in configs]
    if row.packed:
        references = [documents_alone(each, row.shape, *documents) for each in precisions]
    else:
        references = [plain_loop(each, shape=row.shape, lora=row.lora) for each in precisions]
    found = [worst(*pair) for pair in zip(results[0], references, strict=True)]
    deviations(row.name, [figure for figures in found for figure in figures])
    for precision, ours, reference in zip(precisions, results[0], references, strict=True):
        assert any(norm > 0.5 for _, norm, *_ in reference), "clipping must be active"
        assert_equal_curves(ours, reference, precision)

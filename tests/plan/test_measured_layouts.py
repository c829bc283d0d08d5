"""Peak memory of real steps against the plan: the rows of `tests.support.measured_memory`.

The plan is compared with rehearsals (`tests/rehearse/test_closed_form.py`), and these with real ranks
(`tests/rehearse/test_real_ranks.py`), so two rows show here that both agree.
"""

from __future__ import annotations

from dataclasses import replace
from statistics import mean

import pytest

from tests.support.measured_memory import ROWS, errors_of

BY_NAME = {row.name: replace(row, global_batch=8) for row in ROWS}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["pp 2, zero-bubble, full", "experts, ep 2 · tp 2"])
def test_the_plan_is_within_five_percent(name: str) -> None:
    assert max(map(abs, errors_of(BY_NAME[name]))) < 0.05


@pytest.mark.timeout(1800)  # all rows, one after another
@pytest.mark.exhaustive
def test_all_layouts_are_within_two_percent_on_average_and_five_at_most() -> None:
    by_row = {row.name: errors_of(row) for row in ROWS}
    assert len(by_row) >= 60
    far = {name: errors for name, errors in by_row.items() if max(map(abs, errors)) > 0.05}
    assert not far
    assert mean(abs(error) for errors in by_row.values() for error in errors) < 0.02

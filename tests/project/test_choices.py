"""Every closed choice of the schema has a row in each table that branches on it."""

from __future__ import annotations

from collections.abc import Collection
from typing import get_args, get_type_hints

import pytest

from nanoscale.cli.common.options import DtypeName
from nanoscale.config import schema
from nanoscale.config.dtypes import DTYPES
from nanoscale.config.layout import SCHEDULES
from nanoscale.config.optimizers import OPTIMIZERS
from nanoscale.config.training_phases import SCHEDULERS
from nanoscale.launch.transport.transport import _BY_LAUNCHER
from nanoscale.plan.pipeline.closed_forms import _FORMS


@pytest.mark.parametrize(
    ("section", "key", "tables"),
    [
        (schema.Optimizer, "name", [OPTIMIZERS]),
        (schema.Scheduler, "name", [SCHEDULERS]),
        (schema.Launcher, "name", [_BY_LAUNCHER]),
        (schema.Parallel, "schedule", [SCHEDULES, _FORMS]),
        (schema.Precision, "reduce", [DTYPES, get_args(DtypeName)]),
    ],
)
def test_tables_have_every_choice(section: type, key: str, tables: list[Collection[str]]) -> None:
    choices = {*get_args(get_type_hints(section)[key])}
    for table in tables:
        assert {*table} == choices


def test_torch_has_every_schedule() -> None:
    from nanoscale.parallel.pipeline import MULTI, SINGLE

    assert {*SINGLE, *MULTI} == {*SCHEDULES}

"""The tests that the workers of pytest-xdist distribute as one unit."""

from __future__ import annotations

from typing import Any

import pytest
from xdist.scheduler import LoadScopeScheduling

QUEUES = {
    "tests/cluster/test_slurm.py": "SLURM",
    "tests/cluster/test_submit.py": "SLURM",
    "tests/cluster/test_doctor.py": "SLURM",
}
"""Tests of clusters mostly wait: they go to two workers, beside others that fill the cores."""
APART = (
    "tests/train/test_equivalence.py",
    "tests/backends/test_deepspeed.py",
    "tests/project/test_cpu_benchmark.py",
)
"""Files of many long rows that share nothing: any worker takes the next one."""


class Schedule(LoadScopeScheduling):
    """Files stay whole, and are begun in the order of collection."""

    def __init__(self, config: pytest.Config, log: Any = None) -> None:
        config.option.loadscopereorder = False
        super().__init__(config, log)

    def _split_scope(self, nodeid: str) -> str:
        file = nodeid.split("::")[0]
        if file.startswith("tests/cluster/"):
            return QUEUES.get(file, "nodes")
        return nodeid if file in APART else file

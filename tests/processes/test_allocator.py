"""Memory that a process frees and allocates again."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.jobs import make_config, make_run

pytestmark = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library")
PAGES = 40_000_000 / os.sysconf("SC_PAGE_SIZE")
"""Pages of the largest tensor of a step."""
FAULTS = """
import resource, sys

def step():
    held = [bytearray(size) for size in (1_000_000, 40_000_000, 3_000_000)]

def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

def measure(_=None):
    for _ in range(3):
        step()
    before = faults()
    for _ in range(5):
        step()
    print((faults() - before) / 5)
    return "completed"

if len(sys.argv) > 1:
    from nanoscale.worker import main
    main(sys.argv[1], measure)
else:
    measure()
"""


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return make_run(make_config(tmp_path)).path


def faults_of_a_step(*arguments: str | Path, **environment: str) -> float:
    """Return the page faults of each round of the same allocations."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith("MALLOC_") and name != "GLIBC_TUNABLES"
    }
    rank = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
    done = subprocess.run(
        [sys.executable, "-c", FAULTS, *arguments],
        env=kept | rank | environment,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return float(done.stdout)


@pytest.mark.slow
def test_what_a_step_frees_stays_with_a_rank(run):
    assert faults_of_a_step() > PAGES / 2
    assert faults_of_a_step(run) < PAGES / 100


@pytest.mark.slow
@pytest.mark.parametrize(
    "setting",
    [
        {"MALLOC_MMAP_THRESHOLD_": "1000000"},
        {"GLIBC_TUNABLES": "glibc.malloc.mmap_threshold=1000000"},
    ],
)
def test_a_users_own_setting_stays(run, setting):
    assert faults_of_a_step(run, **setting) > PAGES / 2

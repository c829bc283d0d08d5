"""Memory that a process frees and allocates again."""

from __future__ import annotations

import os
import platform
import subprocess
import sys

import pytest

FAULTS = """
import resource, sys
if "keep" in sys.argv:
    from nanoscale.allocator import keep_freed_memory
    keep_freed_memory()

def step():
    held = [bytearray(size) for size in (1_000_000, 40_000_000, 3_000_000)]

def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

for _ in range(3):
    step()
before = faults()
for _ in range(5):
    step()
print((faults() - before) / 5)
"""


def faults_of_a_step(*arguments: str, **environment: str) -> float:
    """Pages that the system had to find for each round of the same allocations."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("MALLOC_")}
    command = [sys.executable, "-c", FAULTS, *arguments]
    done = subprocess.run(
        command, env=kept | environment, stdout=subprocess.PIPE, text=True, check=True
    )
    return float(done.stdout)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library")
def test_freed_memory_is_there_for_the_next_step():
    pages = 40_000_000 / os.sysconf("SC_PAGE_SIZE")
    assert faults_of_a_step() > pages / 2
    assert faults_of_a_step("keep") < pages / 100


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library")
def test_a_users_own_setting_stays():
    pages = 40_000_000 / os.sysconf("SC_PAGE_SIZE")
    assert faults_of_a_step("keep", MALLOC_MMAP_THRESHOLD_="1000000") > pages / 2

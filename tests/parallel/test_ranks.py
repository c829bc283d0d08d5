"""The ranks' rendezvous."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._C import _distributed_c10d

from nanoscale.parallel import process_group
from tests.support.ranks import run_ranks


def recorded(rank: int, entries: str | None) -> dict[str, Any]:
    """Return the content of PyTorch's flight recorder after a collective."""
    if entries is not None:
        os.environ["TORCH_FR_BUFFER_SIZE"] = entries
    process_group.join(2, torch.device("cpu"), 120.0)
    dist.all_reduce(torch.ones(1))
    process_group.leave()
    found: dict[str, Any] = json.loads(_distributed_c10d._dump_fr_trace_json())  # type: ignore[attr-defined]
    return found


def policies(rank: int, chosen: int) -> set[int]:
    """Return the scheduling policies of the threads of a rank that has met another, by number."""
    os.sched_setscheduler(0, chosen, os.sched_param(0))
    process_group.join(2, torch.device("cpu"), 120.0)
    dist.all_reduce(torch.ones(1))
    return {os.sched_getscheduler(thread) for thread in threads_of_gloo()} | {
        os.sched_getscheduler(0)
    }


def threads_of_gloo() -> list[int]:
    tasks = [
        task for task in Path("/proc/self/task").iterdir() if "gloo" in (task / "comm").read_text()
    ]
    assert tasks
    return [int(task.name) for task in tasks]


@pytest.mark.skipif(sys.platform != "linux", reason="no other system has these policies")
@pytest.mark.parametrize("chosen", ["SCHED_OTHER", "SCHED_IDLE"])
def test_no_thread_takes_a_core_on_waking_unless_somebody_chose_otherwise(chosen: str) -> None:
    expected = os.SCHED_BATCH if chosen == "SCHED_OTHER" else os.SCHED_IDLE
    assert run_ranks(policies, 2, getattr(os, chosen)) == [{expected}] * 2


@pytest.mark.parametrize(("asked", "there"), [(None, False), ("100", True)])
def test_collectives_on_a_cpu_are_recorded_where_asked_for(asked: str | None, there: bool) -> None:
    for found in run_ranks(recorded, 2, asked):
        assert ("entries" in found) == there

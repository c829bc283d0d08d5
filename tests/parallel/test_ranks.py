"""How ranks meet."""

from __future__ import annotations

import json
import os
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._C import _distributed_c10d

from nanoscale.parallel import ranks
from tests.ranks import run_ranks


def recorded(rank: int, entries: str | None) -> dict[str, Any]:
    """What PyTorch's flight recorder holds after a collective."""
    if entries is not None:
        os.environ["TORCH_FR_BUFFER_SIZE"] = entries
    ranks.join(2, torch.device("cpu"), 120.0)
    dist.all_reduce(torch.ones(1))
    ranks.leave()
    found: dict[str, Any] = json.loads(_distributed_c10d._dump_fr_trace_json())
    return found


@pytest.mark.parametrize(("asked", "there"), [(None, False), ("100", True)])
def test_collectives_on_a_cpu_are_recorded_where_asked_for(asked: str | None, there: bool) -> None:
    for found in run_ranks(recorded, 2, asked):
        assert ("entries" in found) == there

"""A write that fails on one rank fails the checkpoint on all, in words, and leaves the one before."""

from __future__ import annotations

import errno
import resource
import signal
from pathlib import Path

import torch

from nanoscale.checkpoint import sharded, store
from nanoscale.parallel import ranks
from tests.checkpoint.test_sharded import WHOLE, state_of
from tests.support.ranks import run_ranks


def save_twice(rank: int, workspace: Path, world: int) -> tuple[int | None, str]:
    ranks.join(world, torch.device("cpu"), 120.0)
    sharded.save(workspace, state_of(WHOLE), {"step": 1})
    if rank == 1:  # its files may grow no longer: what a full disk or a quota does to one host
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (100, resource.RLIM_INFINITY))
    try:
        sharded.save(workspace, state_of(WHOLE), {"step": 2})
    except OSError as error:
        return error.errno, str(error)
    return None, "no error"


def test_a_failing_write_is_an_error_of_its_rank_on_all(tmp_path: Path) -> None:
    workspace = tmp_path / ".attempt-1"
    workspace.mkdir()
    said = run_ranks(save_twice, 2, workspace, 2)
    for number, text in said:
        assert number == errno.EFBIG, text
        assert "rank 1" in text and "step-00000002" in text
    assert ["a peer was lost" in text for _, text in said] == [True, False]
    assert [stored.step for stored in store.list_checkpoints(tmp_path)] == [1]
    assert store.find_damage(store.checkpoint_path(tmp_path, 1)) == []

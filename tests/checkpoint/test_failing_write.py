"""A write that fails on one rank fails the checkpoint on all, in words, and leaves the one before."""

from __future__ import annotations

import errno
import os
import resource
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from io import BufferedWriter, FileIO
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.filesystem import FileSystem

from nanoscale.checkpoint import sharded, store
from nanoscale.parallel import process_group
from nanoscale.runs.directory import checkpoint_path
from tests.checkpoint.test_sharded import WHOLE, state_of
from tests.support.ranks import run_ranks


def save_twice(rank: int, workspace: Path, world: int) -> tuple[int | None, str]:
    process_group.join(world, torch.device("cpu"), 120.0)
    sharded.save(workspace, state_of(WHOLE), {"step": 1})
    if rank == 1:  # its files cannot grow: the effect of a full disk or a quota on one host
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
    assert store.find_damage(checkpoint_path(tmp_path, 1)) == []


class Failing(FileIO):
    """A file whose writes fail as on a full disk, or on one that became read-only."""

    number = 0
    left = 0
    """Writes that succeed."""

    def write(self, data: Any) -> int:
        Failing.left -= 1
        if Failing.left < 0:
            raise OSError(Failing.number, os.strerror(Failing.number))
        return super().write(data) or 0


@contextmanager
def failing_stream(_: Any, path: Path, mode: str) -> Iterator[Any]:
    with BufferedWriter(Failing(path, mode)) as stream:
        yield stream


@pytest.mark.parametrize("number", [errno.EROFS, errno.EDQUOT, errno.ENOSPC])
@pytest.mark.parametrize("before", [0, 1, 3])
def test_what_fails_in_a_write_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, before: int
) -> None:
    """For some writes torch's archive reports only a short write."""
    monkeypatch.setattr(FileSystem, "create_stream", failing_stream)
    Failing.number, Failing.left = number, before
    (tmp_path / ".attempt-1").mkdir()
    state = {"a": torch.ones(1 << 16), "b": torch.ones(5000)}
    with pytest.raises(OSError, match=os.strerror(number)) as caught:
        sharded.save(tmp_path / ".attempt-1", state, {"step": 1})
    assert caught.value.errno == number
    assert store.list_checkpoints(tmp_path) == []

"""Law 3 with real ranks: whatever happens while a checkpoint is written, existing checkpoints are complete."""

from __future__ import annotations

import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from nanoscale.checkpoint import sharded, store
from nanoscale.checkpoint.differences import differing
from nanoscale.checkpoint.staging import Staging
from nanoscale.common.errors import UserError
from nanoscale.parallel import process_group
from tests.support.ranks import run_ranks

WHOLE = torch.arange(70.0).reshape(10, 7)


@pytest.fixture
def workspace(tmp_path: Path) -> Path:
    """The workspace of an attempt that has begun."""
    (tmp_path / ".attempt-1").mkdir()
    return tmp_path / ".attempt-1"


def state_of(value: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return one sharded, one replicated and one plain tensor."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return {
        "sharded": distribute_tensor(value, mesh, [Shard(0)]),
        "replicated": distribute_tensor(value, mesh, [Replicate()]),
        "plain": value.clone(),
    }


def save_rank(rank: int, workspace: Path, world: int, step: int, kill: int | None) -> str:
    process_group.join(world, torch.device("cpu"), 120.0)
    if kill == rank:
        # Die in the middle of the write: after this rank's file, before the manifest.
        store.sum_files = lambda _: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[return-value]
    return sharded.save(workspace, state_of(WHOLE * step), {"step": step}).name


def load_rank(rank: int, workspace: Path, world: int) -> Any:
    process_group.join(world, torch.device("cpu"), 120.0)
    state: dict[str, Any] = state_of(torch.zeros(10, 7))
    loaded = sharded.load_newest(workspace, state)
    assert loaded is not None
    values = [state["sharded"].full_tensor(), state["replicated"].full_tensor(), state["plain"]]
    return loaded["step"], [value.tolist() for value in values]


def test_saved_by_three_loaded_by_two(workspace: Path) -> None:
    assert run_ranks(save_rank, 3, workspace, 3, 5, None) == ["step-00000005"] * 3
    (path,) = [c.path for c in store.list_checkpoints(workspace.parent)]
    assert store.find_damage(path) == []
    tensors = store.read_manifest(path)["tensors"]
    assert tensors["sharded"] == {"shape": [10, 7], "dtype": "float32"}
    for step, values in run_ranks(load_rank, 2, workspace, 2):
        assert step == 5
        assert values == [(WHOLE * 5).tolist()] * 3


DIVIDED_TWICE = {
    "model.columns": [Shard(0), Shard(1)],
    "model.rows": [Shard(0), Shard(0)],
    "optimizer.replicas": [Replicate(), Shard(0)],
}
"""Placements of FSDP2 with tensor parallelism, and of HSDP."""


def save_copy(rank: int, workspace: Path) -> None:
    """Save a copy of a state that changes before it is written."""
    process_group.join(4, torch.device("cpu"), 120.0)
    mesh, staging = init_device_mesh("cpu", (2, 2)), Staging()
    state = {
        name: distribute_tensor(WHOLE.clone(), mesh, placements)
        for name, placements in DIVIDED_TWICE.items()
    }
    copied = staging.copy(state)
    staging.fill()
    for value in state.values():
        value.to_local().zero_()
    sharded.save(workspace, copied, {"step": 1})


def test_a_copy_of_tensors_that_are_divided_twice_is_of_its_step(workspace: Path) -> None:
    run_ranks(save_copy, 4, workspace)
    state = {name: torch.zeros_like(WHOLE) for name in DIVIDED_TWICE}
    assert sharded.load_newest(workspace, state) is not None
    assert all(torch.equal(value, WHOLE) for value in state.values())


@pytest.mark.parametrize("kill", [0, 1])
def test_a_rank_killed_while_writing_leaves_the_one_before(workspace: Path, kill: int) -> None:
    run_ranks(save_rank, 2, workspace, 2, 1, None)
    with pytest.raises(RuntimeError, match="died|failed"):
        run_ranks(save_rank, 2, workspace, 2, 2, kill)
    assert [c.step for c in store.list_checkpoints(workspace.parent)] == [1]
    assert (workspace.parent / "latest").resolve().name == "step-00000001"
    assert run_ranks(load_rank, 2, workspace, 2)[0][0] == 1
    assert run_ranks(save_rank, 2, workspace, 2, 2, None) == ["step-00000002"] * 2
    assert run_ranks(load_rank, 2, workspace, 2)[1] == (2, [(WHOLE * 2).tolist()] * 3)


def full_disk_rank(rank: int, workspace: Path, world: int) -> str:
    process_group.join(world, torch.device("cpu"), 120.0)
    shutil.disk_usage = lambda _: shutil._ntuple_diskusage(10, 10, 0)
    with pytest.raises(OSError, match="nothing was written") as caught:
        sharded.save(workspace, state_of(WHOLE), {"step": 1})
    return str(caught.value.errno)


def test_every_rank_learns_that_the_disk_is_full(workspace: Path) -> None:
    assert run_ranks(full_disk_rank, 2, workspace, 2) == ["28"] * 2
    assert list(workspace.iterdir()) == []


def test_loading_from_nothing(workspace: Path) -> None:
    assert sharded.load_newest(workspace, {}) is None


def damage(path: Path) -> None:
    file = path / "__0_0.distcp"
    file.write_bytes(file.read_bytes()[:-1])


def test_a_damaged_checkpoint_is_reported_with_the_way_back(workspace: Path) -> None:
    paths = [
        sharded.save(workspace, {"a": torch.ones(3) * step}, {"step": step}) for step in (1, 2, 3)
    ]
    for path in paths[1:]:
        damage(path)
    state, said = {"a": torch.zeros(3)}, list[str]()
    loaded = sharded.load_newest(workspace, state, said.append)
    assert loaded is not None and loaded["step"] == 1 and state["a"].tolist() == [1.0] * 3
    assert [it.path.name for it in store.list_set_aside(workspace.parent)] == [
        "damaged-step-00000002",
        "damaged-step-00000003",
    ]
    for path, sentence in zip(reversed(paths[1:]), said, strict=True):
        assert f"{path.name} is damaged (__0_0.distcp: " in sentence
        assert sentence.endswith(f"type: mv {path.with_name(f'damaged-{path.name}')} {path}")


def test_nothing_is_renamed_where_nothing_is_whole(workspace: Path) -> None:
    paths = [sharded.save(workspace, {"a": torch.ones(3)}, {"step": step}) for step in (1, 2)]
    for path in paths:
        damage(path)
    said: list[str] = []
    with pytest.raises(UserError, match="no checkpoint in .* is complete") as caught:
        sharded.load_newest(workspace, {"a": torch.zeros(3)}, said.append)
    assert all(f"{path.name}: __0_0.distcp: " in str(caught.value) for path in paths)
    assert ". To start again: nanoscale train --config /" in str(caught.value)
    assert [it.path for it in store.list_checkpoints(workspace.parent)] == paths
    assert (workspace.parent / "latest").resolve() == paths[-1] and said == []


def save_noisy(rank: int, workspace: Path, world: int, step: int, noise: float) -> None:
    process_group.join(world, torch.device("cpu"), 120.0)
    value = WHOLE.clone()
    value[-1] += noise  # the last row is the last rank's
    sharded.save(workspace, {"model.b": state_of(value)["sharded"], "a": WHOLE}, {"step": step})


def test_a_difference_is_traced_to_the_rank_that_wrote_it(workspace: Path) -> None:
    for step, noise in ((1, 0.0), (2, 0.69)):
        run_ranks(save_noisy, 3, workspace, 3, step, noise)
    first, second = (store.find_checkpoint(workspace.parent, step) for step in (1, 2))
    (found,) = differing(first, second, tolerance=0.0)
    assert (found.name, found.ranks) == ("model.b", [2])
    assert found.relative == pytest.approx(0.01, rel=1e-5)
    assert list(differing(first, second, tolerance=0.011)) == []
    assert list(differing(first, first, tolerance=0.0)) == []

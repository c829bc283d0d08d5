"""Law 3: a checkpoint is whole or absent."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from nanoscale.checkpoint import sharded, store
from nanoscale.common.errors import UserError
from nanoscale.runs import fence
from nanoscale.runs.directory import RunDirectory, checkpoint_path


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The checkpoints of a run whose first attempt has begun."""
    (tmp_path / "checkpoints").mkdir()
    fence.begin(RunDirectory(tmp_path), 1)
    return tmp_path / "checkpoints"


def workspace(folder: Path) -> Path:
    """The workspace of the running attempt."""
    (found,) = folder.glob(".attempt-*")
    return found


def publish(folder: Path, step: int) -> Path:
    staging = store.staging_path(workspace(folder), step)
    staging.mkdir()
    for number in range(3):
        (staging / f"__{number}_0.distcp").write_bytes(bytes(range(256)) * (number + step))
    return store.publish(staging, {"step": step}, store.sum_files(sorted(staging.iterdir())))


def test_published_is_whole_and_latest(folder: Path) -> None:
    for step in (3, 6):
        path = publish(folder, step)
        assert store.find_damage(path) == []
        assert (folder / "latest").resolve() == path
    assert [c.step for c in store.list_checkpoints(folder)] == [3, 6]


def test_unpublished_is_no_checkpoint(folder: Path) -> None:
    publish(folder, 3)
    staging = store.staging_path(workspace(folder), 6)
    staging.mkdir()
    (staging / "__0_0.distcp").write_bytes(b"half")
    assert [c.step for c in store.list_checkpoints(folder)] == [3]
    assert (folder / "latest").resolve().name == "step-00000003"
    fence.begin(RunDirectory(folder.parent), 2)
    assert not staging.exists()


def test_every_flipped_byte_is_found_with_the_name_of_its_file(folder: Path) -> None:
    path = publish(folder, 1)
    for file in sorted(path.iterdir()):
        whole = file.read_bytes()
        for place in range(0, len(whole), 7):
            flipped = bytearray(whole)
            flipped[place] ^= 1
            file.write_bytes(flipped)
            damage = store.find_damage(path)
            assert len(damage) == 1 and damage[0].startswith(file.name), (file.name, place)
        file.write_bytes(whole)
    assert store.find_damage(path) == []


def test_truncated_missing_and_foreign_files_are_found(folder: Path) -> None:
    path = publish(folder, 1)
    (path / "__0_0.distcp").write_bytes((path / "__0_0.distcp").read_bytes()[:-1])
    (path / "__1_0.distcp").unlink()
    (path / "__9_0.distcp").write_bytes(b"")
    damage = store.find_damage(path)
    assert damage == [
        "__9_0.distcp: not in the manifest",
        "__0_0.distcp: 255 bytes instead of the written 256",
        "__1_0.distcp: missing",
    ]


def test_the_shares_of_several_readers_cover_every_file(folder: Path) -> None:
    path = publish(folder, 1)
    for file in path.glob("*.distcp"):
        file.write_bytes(b"x" * file.stat().st_size)
    found = [sentence for share in range(4) for sentence in store.find_damage(path, share, 4)]
    assert sorted(found) == sorted(store.find_damage(path)) and len(found) == 3


def test_a_renamed_checkpoint_is_found(folder: Path) -> None:
    path = publish(folder, 1)
    renamed = path.rename(checkpoint_path(folder, 2))
    assert store.find_damage(renamed) == ["manifest.json: belongs to step 1"]


def test_prune_keeps_the_last_and_every_mth(folder: Path) -> None:
    for step in range(1, 11):
        publish(folder, step)
    assert store.prune(workspace(folder), None, None).deleted == []
    assert store.prune(workspace(folder), 2, 4).deleted == [1, 2, 3, 5, 6, 7]
    assert [c.step for c in store.list_checkpoints(folder)] == [4, 8, 9, 10]
    assert sorted(p.name for p in folder.iterdir() if p.name.startswith(".")) == [".attempt-1"]
    assert list(workspace(folder).iterdir()) == []


def test_set_aside_moves_latest_back(folder: Path) -> None:
    publish(folder, 1)
    publish(folder, 2)
    aside = store.set_aside(workspace(folder), store.list_checkpoints(folder)[-1])
    assert aside.name == "damaged-step-00000002" and aside.is_dir()
    assert (folder / "latest").resolve().name == "step-00000001"


def test_space_is_checked_before_writing(folder: Path) -> None:
    with pytest.raises(OSError, match="no space left for a checkpoint of .* nothing was written"):
        store.require_space(folder, 1 << 60)
    store.require_space(folder, 1)


def test_find_checkpoint_names_the_steps_that_are_there(folder: Path) -> None:
    publish(folder, 4)
    assert store.find_checkpoint(folder, None).step == store.find_checkpoint(folder, 4).step
    with pytest.raises(UserError) as caught:
        store.find_checkpoint(folder, 5)
    assert caught.value.violations[0].suggestions == ("--step 4",)


class Disk:
    """A recorder of disk operations, in order, which checks after each that all listed checkpoints are
    complete."""

    ACTS = ("fsync", "rename", "replace", "symlink", "unlink", "rmdir")

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder = folder
        self.acts: list[tuple[str, ...]] = []
        self.steps: list[list[int]] = []
        """The listed steps, before the first operation and after each."""
        self.fails: tuple[str, ...] | None = None
        self.look()
        for act in self.ACTS:
            monkeypatch.setattr(os, act, self.recorded(act, getattr(os, act)))

    def recorded(self, act: str, original: Any) -> Any:
        def recording(*arguments: Any, **options: Any) -> Any:
            names = tuple(self.name(each) for each in arguments[:2])
            if (act, *names) == self.fails:
                raise OSError(5, "Input/output error")
            try:
                result = original(*arguments, **options)
            except FileNotFoundError:
                raise  # changed nothing
            self.acts.append((act, *names))
            self.look()
            return result

        return recording

    def name(self, of: Any) -> str:
        path = Path(f"/proc/self/fd/{of}").readlink() if isinstance(of, int) else Path(of)
        return str(path.relative_to(self.folder)) if path.is_absolute() else str(path)

    def look(self) -> None:
        listed = store.list_checkpoints(self.folder)
        self.steps.append([checkpoint.step for checkpoint in listed])
        assert all(store.find_damage(checkpoint.path) == [] for checkpoint in listed)
        latest = self.folder / "latest"
        if listed:
            assert latest.resolve() in [checkpoint.path for checkpoint in listed] or (
                self.steps[0] == [] and not latest.is_symlink()
            )


def test_the_order_in_which_a_checkpoint_reaches_the_disk(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish(folder, 1)
    disk = Disk(folder, monkeypatch)
    publish(folder, 2)
    writing, final = ".attempt-1/writing-step-00000002", "step-00000002"
    assert disk.acts == [
        ("fsync", f"{writing}/manifest.json"),
        ("fsync", writing),
        ("rename", writing, final),
        ("fsync", "."),
        ("symlink", final, ".attempt-1/latest"),
        ("rename", ".attempt-1/latest", "latest"),
        ("fsync", "."),
    ]
    assert disk.steps == [[1]] * 3 + [[1, 2]] * 5


@pytest.mark.parametrize(
    ("fails", "left"),
    [
        (("fsync", ".attempt-1/writing-step-00000002/manifest.json"), [1]),
        (("fsync", ".attempt-1/writing-step-00000002"), [1]),
        (("rename", ".attempt-1/writing-step-00000002", "step-00000002"), [1]),
        (("symlink", "step-00000002", ".attempt-1/latest"), [1, 2]),
        (("rename", ".attempt-1/latest", "latest"), [1, 2]),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else None,
)
def test_latest_names_the_old_one_where_publishing_fails(
    folder: Path, monkeypatch: pytest.MonkeyPatch, fails: tuple[str, ...], left: list[int]
) -> None:
    publish(folder, 1)
    disk = Disk(folder, monkeypatch)
    disk.fails = fails
    with pytest.raises(OSError, match="Input/output"):
        publish(folder, 2)
    assert disk.steps[-1] == left
    assert (folder / "latest").resolve().name == "step-00000001"
    disk.fails = None
    fence.begin(RunDirectory(folder.parent), 2)
    publish(folder, 3)  # remaining files are not obstacle
    assert (folder / "latest").resolve().name == "step-00000003"


def test_nothing_half_deleted_is_ever_listed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for step in range(1, 6):
        publish(folder, step)
    disk = Disk(folder, monkeypatch)
    assert store.prune(workspace(folder), 1, 2).deleted == [1, 3]
    assert store.prune(workspace(folder), 1, None).deleted == [2, 4]
    assert len(disk.acts) > 20  # each file of four checkpoints was watched as it went
    assert disk.steps[-1] == [5]


def test_a_prune_that_fails_lists_nothing_half_deleted(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for step in (1, 2, 3):
        publish(folder, step)

    def fail_halfway(path: Path) -> None:
        next(Path(path).glob("*.distcp")).unlink()
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as broken:
        broken.setattr(shutil, "rmtree", fail_halfway)
        pruned = store.prune(workspace(folder), 1, None)
    assert pruned == store.Pruned([], dict.fromkeys((1, 2), "Input/output error"))
    stored = store.list_checkpoints(folder)
    assert [c.step for c in stored] == [3]
    assert all(store.find_damage(c.path) == [] for c in stored)
    fence.begin(RunDirectory(folder.parent), 2)
    assert sorted(p.name for p in folder.iterdir()) == [".attempt-2", "latest", "step-00000003"]


def test_one_step_can_be_set_aside_twice(folder: Path) -> None:
    publish(folder, 1)
    names = []
    for _ in range(3):
        publish(folder, 2)
        names.append(store.set_aside(workspace(folder), store.list_checkpoints(folder)[-1]).name)
    assert names == [f"damaged-step-00000002{number}" for number in ("", "-2", "-3")]
    assert all((folder / name / "manifest.json").is_file() for name in names)
    assert [c.step for c in store.list_checkpoints(folder)] == [1]
    store.set_aside(workspace(folder), store.list_checkpoints(folder)[0])
    assert not (folder / "latest").is_symlink()


STATE = {
    "wide": torch.arange(1e5, dtype=torch.float64),
    "narrow": torch.ones(300, 7, dtype=torch.bfloat16),
    **{f"optimizer.layers.{i}.a.long.name.step": torch.zeros(()) for i in range(200)},
}


def test_a_checkpoint_needs_the_space_that_it_takes(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The estimate decides to the byte, and the written files fit in it."""
    asked: list[int] = []
    require = store.require_space
    monkeypatch.setattr(store, "require_space", lambda folder, size: asked.append(size))
    path = sharded.save(workspace(folder), STATE, {"step": 1})
    (size,) = asked
    written = sum(file.stat().st_size for file in path.iterdir())
    tensors = sum(value.nbytes for value in STATE.values())
    assert tensors < written <= size < 2 * written
    monkeypatch.setattr(store, "require_space", require)

    def leave_free(free: int) -> None:
        usage = shutil._ntuple_diskusage(free, 0, free)
        monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)

    leave_free(size - 1)
    with pytest.raises(OSError, match="nothing was written") as caught:
        sharded.save(workspace(folder), STATE, {"step": 2})
    assert caught.value.errno == errno.ENOSPC and not list(workspace(folder).iterdir())
    leave_free(size)
    assert store.find_damage(sharded.save(workspace(folder), STATE, {"step": 2})) == []


def test_every_file_is_on_disk_before_the_checkpoint_is_visible(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = Disk(folder, monkeypatch)
    path = sharded.save(workspace(folder), STATE, {"step": 1})
    visible = disk.acts.index(("rename", ".attempt-1/writing-step-00000001", path.name))
    synced = {Path(act[1]).name for act in disk.acts[:visible] if act[0] == "fsync"}
    files = {file.name for file in path.iterdir()}
    assert "__0_0.distcp" in files
    assert files <= {name.removesuffix(".tmp") for name in synced}  # torch renames .metadata


class Passing:
    """A file whose first reads fail, as on a network disk that recovers."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, name: str, number: int, times: int) -> None:
        self.left, self.waited = times, list[float]()
        opened = Path.open

        def fail(path: Path, *args: Any, **options: Any) -> Any:
            if path.name == name and self.left > 0:
                self.left -= 1
                raise OSError(number, os.strerror(number))
            return opened(path, *args, **options)

        monkeypatch.setattr(Path, "open", fail)
        monkeypatch.setattr(time, "sleep", self.waited.append)


@pytest.mark.parametrize("number", [errno.EIO, errno.ESTALE, errno.ETIMEDOUT])
@pytest.mark.parametrize("name", ["__1_0.distcp", store.MANIFEST])
def test_a_read_error_that_passes_is_no_damage(
    folder: Path, monkeypatch: pytest.MonkeyPatch, number: int, name: str
) -> None:
    path = publish(folder, 1)
    disk = Passing(monkeypatch, name, number, times=3)
    assert store.find_damage(path) == [] and disk.waited == list(store.RETRY_AFTER_S)


def test_a_read_error_that_stays_is_met_again_for_one_file(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = publish(folder, 1)
    for name in ("__1_0.distcp", store.MANIFEST):
        with monkeypatch.context() as broken:
            disk = Passing(broken, name, errno.EIO, times=10**6)
            assert store.find_damage(path) == [f"{name}: cannot be read: Input/output error"]
            assert disk.waited == list(store.RETRY_AFTER_S)


def test_what_is_set_aside_is_named_where_nothing_is_left(folder: Path) -> None:
    publish(folder, 7)
    aside = store.set_aside(workspace(folder), store.list_checkpoints(folder)[0])
    assert store.find_damage(aside) == []
    command = f"mv {aside} {folder / 'step-00000007'}"
    assert [store.undo(it.path) for it in store.list_set_aside(folder)] == [command]
    with pytest.raises(
        UserError, match=r"damaged-step-00000007 was set aside .* to undo that: mv "
    ):
        store.find_checkpoint(folder, None)
    subprocess.run(command, shell=True, check=True)
    assert store.find_damage(store.find_checkpoint(folder, 7).path) == []


@pytest.mark.parametrize("kind", ["fifo", "device", "outside"])
def test_no_file_is_waited_for_for_ever(folder: Path, kind: str) -> None:
    """A checkpoint may be another user's: reading a pipe or a device might never end."""
    path = publish(folder, 1)
    file = path / "__1_0.distcp"
    file.unlink()
    about = store.read_manifest(path)
    about["files"][file.name]["bytes"] = 0
    if kind == "fifo":
        os.mkfifo(file)
    elif kind == "device":
        file.symlink_to("/dev/zero")
    else:
        about["files"]["../../../../../../../../dev/zero"] = about["files"].pop(file.name)
    (path / store.MANIFEST).write_text(store.render_manifest(about))
    (damage,) = store.find_damage(path)
    assert "is not a regular file" in damage or "not in the checkpoint's folder" in damage


def test_a_manifest_without_its_fields_is_damaged(folder: Path) -> None:
    path = publish(folder, 1)
    for about in ({}, {"step": "1", "files": {}}, {"step": 1, "files": []}, {"step": 1}):
        (path / store.MANIFEST).write_text(store.render_manifest(about))
        assert len(store.find_damage(path)) == 1

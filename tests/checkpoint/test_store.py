"""Law 3: a checkpoint is whole or absent."""

from __future__ import annotations

from pathlib import Path

import pytest

from nanoscale.checkpoint import store
from nanoscale.errors import UserError


def publish(folder: Path, step: int) -> Path:
    staging = store.staging_path(folder, step)
    staging.mkdir(parents=True)
    for number in range(3):
        (staging / f"__{number}_0.distcp").write_bytes(bytes(range(256)) * (number + step))
    return store.publish(staging, {"step": step}, store.sum_files(sorted(staging.iterdir())))


def test_published_is_whole_and_latest(tmp_path: Path) -> None:
    for step in (3, 6):
        path = publish(tmp_path, step)
        assert store.find_damage(path) == []
        assert (tmp_path / "latest").resolve() == path
    assert [c.step for c in store.list_checkpoints(tmp_path)] == [3, 6]


def test_unpublished_is_no_checkpoint(tmp_path: Path) -> None:
    publish(tmp_path, 3)
    staging = store.staging_path(tmp_path, 6)
    staging.mkdir()
    (staging / "__0_0.distcp").write_bytes(b"half")
    assert [c.step for c in store.list_checkpoints(tmp_path)] == [3]
    assert (tmp_path / "latest").resolve().name == "step-00000003"
    store.clean_up(tmp_path)
    assert not staging.exists()


def test_every_flipped_byte_is_found_with_the_name_of_its_file(tmp_path: Path) -> None:
    path = publish(tmp_path, 1)
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


def test_truncated_missing_and_foreign_files_are_found(tmp_path: Path) -> None:
    path = publish(tmp_path, 1)
    (path / "__0_0.distcp").write_bytes((path / "__0_0.distcp").read_bytes()[:-1])
    (path / "__1_0.distcp").unlink()
    (path / "__9_0.distcp").write_bytes(b"")
    damage = store.find_damage(path)
    assert damage == [
        "__9_0.distcp: not in the manifest",
        "__0_0.distcp: 255 bytes, written were 256",
        "__1_0.distcp: missing",
    ]


def test_the_shares_of_several_readers_cover_every_file(tmp_path: Path) -> None:
    path = publish(tmp_path, 1)
    for file in path.glob("*.distcp"):
        file.write_bytes(b"x" * file.stat().st_size)
    found = [sentence for share in range(4) for sentence in store.find_damage(path, share, 4)]
    assert sorted(found) == sorted(store.find_damage(path)) and len(found) == 3


def test_a_renamed_checkpoint_is_found(tmp_path: Path) -> None:
    path = publish(tmp_path, 1)
    renamed = path.rename(store.checkpoint_path(tmp_path, 2))
    assert store.find_damage(renamed) == ["manifest.json: belongs to step 1"]


def test_prune_keeps_the_last_and_every_mth(tmp_path: Path) -> None:
    for step in range(1, 11):
        publish(tmp_path, step)
    assert store.prune(tmp_path, None, None) == []
    assert store.prune(tmp_path, 2, 4) == [1, 2, 3, 5, 6, 7]
    assert [c.step for c in store.list_checkpoints(tmp_path)] == [4, 8, 9, 10]
    assert sorted(p.name for p in tmp_path.iterdir() if p.name.startswith(".")) == []


def test_set_aside_moves_latest_back(tmp_path: Path) -> None:
    publish(tmp_path, 1)
    publish(tmp_path, 2)
    aside = store.set_aside(store.list_checkpoints(tmp_path)[-1])
    assert aside.name == "damaged-step-00000002" and aside.is_dir()
    assert (tmp_path / "latest").resolve().name == "step-00000001"


def test_space_is_checked_before_writing(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="no space left for a checkpoint of .* nothing was written"):
        store.require_space(tmp_path, 1 << 60)
    store.require_space(tmp_path, 1)


def test_find_checkpoint_names_the_steps_that_are_there(tmp_path: Path) -> None:
    publish(tmp_path, 4)
    assert store.find_checkpoint(tmp_path, None).step == store.find_checkpoint(tmp_path, 4).step
    with pytest.raises(UserError) as caught:
        store.find_checkpoint(tmp_path, 5)
    assert caught.value.violations[0].suggestions == ("--step 4",)

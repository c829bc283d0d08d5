"""Checkpoints in object storage: a real S3 server, behind a proxy that refuses, delays and cuts connections."""

from __future__ import annotations

import itertools
import random
import shutil
from collections.abc import Iterator
from pathlib import Path
from threading import Event, Thread

import pytest

from nanoscale.checkpoint import store, uploader
from nanoscale.checkpoint.remote import RemoteCheckpoints
from nanoscale.checkpoint.store import DamagedCheckpointError
from nanoscale.checkpoint.uploader import Uploader
from nanoscale.common import object_storage
from nanoscale.common.errors import UserError
from nanoscale.launch.lifecycle.continuation import fetch_missing, upload_missing
from nanoscale.runs import events, fence
from nanoscale.runs.directory import RunDirectory
from tests.support.runs import create_run
from tests.support.s3_server import BUCKET, FaultyProxy, s3_environment, s3_server
from tests.support.waiting import wait_until

ADDRESS = f"s3://{BUCKET}/models"
FILES = {"rank-0.bin": 40_000, "rank-1.bin": 9_000, "small": 3}


@pytest.fixture(scope="module")
def server() -> Iterator[int]:
    with s3_server() as port:
        yield port


@pytest.fixture
def proxy(server: int, monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultyProxy]:
    proxy = FaultyProxy(server)
    monkeypatch.setattr(object_storage, "_PAUSES_S", (0.05, 0.1, 0.2))
    monkeypatch.setattr(uploader, "_LONGEST_PAUSE_S", 0.1)
    with s3_environment(server):
        storage, _ = object_storage.open_storage(ADDRESS)
        if storage.exists(BUCKET):
            storage.rm(BUCKET, recursive=True)
        storage.mkdir(BUCKET)
    with s3_environment(proxy.port):
        yield proxy
    proxy.close()


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    run = create_run(tmp_path, "run")
    fence.begin(run, 1)
    return run


def publish(run: RunDirectory, step: int, seed: int = 0) -> Path:
    staging = store.staging_path(run.workspace(1), step)
    staging.mkdir()
    for name, size in FILES.items():
        (staging / name).write_bytes(random.Random(f"{seed} {step} {name}").randbytes(size))
    return store.publish(staging, {"step": step}, store.sum_files(sorted(staging.iterdir())))


def contents(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir()}


def messages(run: RunDirectory) -> list[str]:
    return [event["message"] for event in events.read(run) if event["kind"] == "upload"]


class Watch:
    """A thread that looks at the storage without the proxy, and verifies every checkpoint that is visible."""

    def __init__(self, server: int, folder: Path) -> None:
        import s3fs

        self.storage = s3fs.S3FileSystem(
            endpoint_url=f"http://127.0.0.1:{server}", use_listings_cache=False,
            skip_instance_cache=True, key="key", secret="secret",
        )  # fmt: skip
        self.folder, self.looks = folder, 0
        self.damaged: list[str] = []
        self._ends = Event()
        self._thread = Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        while not self._ends.is_set():
            for name in self.storage.find(f"{BUCKET}/models/run"):
                if name.endswith(f"/{store.MANIFEST}"):
                    target = self.folder / str(self.looks) / Path(name).parent.name
                    self.storage.get(str(Path(name).parent) + "/", f"{target}/", recursive=True)
                    self.damaged += store.find_damage(target)
            self.looks += 1

    def end(self) -> None:
        self._ends.set()
        self._thread.join()


@pytest.mark.slow
def test_uploads_survive_twenty_faults_and_nothing_half_is_ever_visible(
    server: int, proxy: FaultyProxy, run: RunDirectory, tmp_path: Path
) -> None:
    watch = Watch(server, tmp_path / "seen")
    kinds = itertools.cycle(["refuse", "cut", "slow", "lost", "cut"])
    uploads = Uploader(run.workspace(1), ADDRESS)
    try:
        for step in (1, 2, 3):
            proxy.faults += [next(kinds) for _ in range(7)]
            publish(run, step)
            uploads.wake()
            wait_until(lambda step=step: RemoteCheckpointsOf(server).has(step), 120)
        uploads.close("completed")
    finally:
        watch.end()
    assert len(proxy.suffered) >= 20
    assert {"refuse", "cut", "slow", "lost"} == set(proxy.suffered)
    assert watch.damaged == []
    assert watch.looks > 5
    written = {step: contents(run.checkpoint(step)) for step in (1, 2, 3)}
    shutil.rmtree(run.checkpoints)
    run.checkpoints.mkdir()
    proxy.faults += ["refuse", "cut", "slow", "cut"]
    for step, files in written.items():
        path = RemoteCheckpoints(ADDRESS, "run").fetch(step, run.checkpoints)
        assert contents(path) == files


class RemoteCheckpointsOf:
    """The storage without the proxy."""

    def __init__(self, server: int) -> None:
        import s3fs

        self.storage = s3fs.S3FileSystem(
            endpoint_url=f"http://127.0.0.1:{server}", use_listings_cache=False, key="key",
            secret="secret",
        )  # fmt: skip

    def has(self, step: int) -> bool:
        return bool(self.storage.exists(f"{BUCKET}/models/run/step-{step:08d}/{store.MANIFEST}"))


@pytest.mark.parametrize("address", [ADDRESS, "file"])
def test_a_checkpoint_returns_bit_for_bit(proxy, run, tmp_path, address):
    address = address if "://" in address else f"file://{tmp_path}/elsewhere"
    path = publish(run, 7)
    written = contents(path)
    remote = RemoteCheckpoints(address, "run")
    assert remote.steps() == []
    assert remote.upload(path)
    assert not remote.upload(path)
    assert remote.steps() == [7]
    shutil.rmtree(path)
    assert fetch_missing(run, address)
    assert contents(path) == written
    assert run.latest.resolve() == path
    assert [entry.name for entry in run.checkpoints.glob(".*")] == [".attempt-1"]
    assert not fetch_missing(run, address)


def test_an_upload_whose_files_are_short_is_not_published(proxy, run, monkeypatch):
    remote = RemoteCheckpoints(ADDRESS, "run")
    put = remote._storage.put_file

    def short(source, target):
        put(source, target)
        if target.endswith("rank-1.bin"):
            remote._storage.pipe_file(target, b"short")

    monkeypatch.setattr(remote._storage, "put_file", short)
    with pytest.raises(OSError, match=r"rank-1.bin has 5 bytes there instead of 9000"):
        remote.upload(publish(run, 1))
    assert remote.steps() == []


def test_a_checkpoint_that_is_damaged_on_disk_is_not_uploaded(proxy, run):
    path = publish(run, 1)
    (path / "small").write_bytes(b"xyz")
    uploads = Uploader(run.workspace(1), ADDRESS)
    uploads.close("completed")
    assert RemoteCheckpoints(ADDRESS, "run").steps() == []
    assert "checksum" in messages(run)[0]


def test_a_damaged_upload_is_not_fetched_and_the_one_before_is(proxy, run, capsys):
    for step in (1, 2):
        publish(run, step)
    upload_missing(run, ADDRESS)
    remote = RemoteCheckpoints(ADDRESS, "run")
    remote._storage.pipe_file(f"{BUCKET}/models/run/step-00000002/small", b"xyz")
    shutil.rmtree(run.checkpoints)
    run.checkpoints.mkdir()
    with pytest.raises(DamagedCheckpointError, match="small"):
        remote.fetch(2, run.checkpoints)
    assert list(run.checkpoints.iterdir()) == []
    assert fetch_missing(run, ADDRESS)
    assert run.checkpoint_steps() == [1]
    assert "step 2" in capsys.readouterr().err
    remote._storage.pipe_file(f"{BUCKET}/models/run/step-00000001/small", b"xyz")
    shutil.rmtree(run.checkpoints)
    run.checkpoints.mkdir()
    with pytest.raises(UserError, match="no complete checkpoint is left"):  # as on a disk
        fetch_missing(run, ADDRESS)


def test_a_file_name_of_the_storage_cannot_leave_the_checkpoint(proxy, run, tmp_path):
    path = publish(run, 1)
    manifest = store.read_manifest(path)
    manifest["files"]["../../../../escaped"] = manifest["files"]["small"]
    (path / store.MANIFEST).write_text(store.render_manifest(manifest))
    remote = RemoteCheckpoints(ADDRESS, "run")
    folder = f"{BUCKET}/models/run/step-00000001"
    for name in (*FILES, store.MANIFEST):
        remote._storage.put_file(str(path / name), f"{folder}/{name}")
    shutil.rmtree(path)
    with pytest.raises(DamagedCheckpointError, match="not in the checkpoint's folder"):
        remote.fetch(1, run.checkpoints)
    assert not (tmp_path / "escaped").exists()


def test_a_damaged_newest_checkpoint_is_replaced_and_kept(proxy, run):
    for step in (1, 2):
        publish(run, step)
    upload_missing(run, ADDRESS)
    written = contents(run.checkpoint(2))
    (run.checkpoint(2) / "rank-0.bin").unlink()
    assert fetch_missing(run, ADDRESS)
    assert contents(run.checkpoint(2)) == written
    assert (run.checkpoints / "damaged-step-00000002").is_dir()


def test_a_run_that_went_back_withdraws_the_later_steps(proxy, run):
    for step in (1, 2, 3):
        publish(run, step)
    upload_missing(run, ADDRESS)
    for step in (2, 3):
        shutil.rmtree(run.checkpoint(step))
    publish(run, 2, seed=1)
    uploads = Uploader(run.workspace(1), ADDRESS)
    uploads.close("completed")
    remote = RemoteCheckpoints(ADDRESS, "run")
    assert remote.steps() == [1, 2]
    written = contents(run.checkpoint(2))
    shutil.rmtree(run.checkpoint(2))
    remote.fetch(2, run.checkpoints)
    assert contents(run.checkpoint(2)) == written


def test_the_end_says_what_is_missing_and_a_later_command_uploads_it(
    proxy: FaultyProxy, server: int, run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(uploader, "CLOSE_S", {"completed": 1.0})
    publish(run, 1)
    closed = FaultyProxy(server)
    closed.close()
    with s3_environment(closed.port):
        uploads = Uploader(run.workspace(1), ADDRESS)
        wait_until(lambda: run.events.exists() and messages(run))
        uploads.close("completed")
        assert "step-00000001 was not uploaded" in messages(run)[0]
        assert f"nanoscale resume {run.path}" in messages(run)[-1]
        with pytest.raises(UserError, match=r"checkpoint.upload=s3://bucket/models"):
            upload_missing(run, ADDRESS)
    fence.end(run)  # so that the thread ends
    with s3_environment(server):
        upload_missing(run, ADDRESS)
        assert RemoteCheckpoints(ADDRESS, "run").steps() == [1]


def test_an_attempt_that_was_taken_over_publishes_nothing(proxy, run, monkeypatch):
    publish(run, 1)
    find_damage = store.find_damage

    def and_taken_over(path):
        fence.begin(run, 2)
        return find_damage(path)

    monkeypatch.setattr(store, "find_damage", and_taken_over)
    Uploader(run.workspace(1), ADDRESS).close("completed")
    assert RemoteCheckpoints(ADDRESS, "run").steps() == []

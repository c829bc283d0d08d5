"""A run's checkpoints in object storage: complete or absent, as on disk. Imports no torch.

A checkpoint has the same files there. Its manifest is written last and in one request, after the sizes of all
other files were compared with it, so a folder without a manifest does not count.
"""

import re
import shutil
import uuid
from collections.abc import Callable
from pathlib import Path

from nanoscale.checkpoint import store
from nanoscale.checkpoint.store import MANIFEST, DamagedCheckpointError, StoredCheckpoint
from nanoscale.common.json_text import Json, parse
from nanoscale.common.object_storage import open_storage, retried
from nanoscale.runs.directory import checkpoint_path, sync_folder

_COMPLETE = re.compile(rf"/step-(\d{{8,}})/{re.escape(MANIFEST)}$")


class RemoteCheckpoints:
    """The checkpoints of a run below `checkpoint.upload`. Methods raise errors of the storage's library."""

    def __init__(self, address: str, run_name: str) -> None:
        self._storage, path = open_storage(address)
        self._folder = f"{path}/{run_name}"

    def steps(self) -> list[int]:
        """List the steps of the complete checkpoints, in order."""
        matches = map(_COMPLETE.search, retried(lambda: self._storage.find(self._folder)))
        return sorted(int(match[1]) for match in matches if match)

    def manifest(self, step: int) -> Json:
        """Return the manifest of a complete checkpoint, which `fetch` verifies."""
        name = checkpoint_path(Path(), step).name
        return dict(parse(self._storage.cat_file(f"{self._folder}/{name}/{MANIFEST}")))

    def upload(self, path: Path, require_current: Callable[[], None] = lambda: None) -> bool:
        """Upload a checkpoint; return False if it is there. Raises DamagedCheckpointError if it is damaged.

        `require_current` raises an error if it may not be published any more.
        """
        target, content = f"{self._folder}/{path.name}", (path / MANIFEST).read_bytes()
        if self._storage.exists(f"{target}/{MANIFEST}"):
            if self._storage.cat_file(f"{target}/{MANIFEST}") == content:
                return False
            self._withdraw(path.name)  # the run went back and saved this step again
        if damage := store.find_damage(path):
            raise DamagedCheckpointError("; ".join(damage))
        files = store.read_manifest(path)["files"]
        for name in files:
            self._storage.put_file(str(path / name), f"{target}/{name}")
        remote = self._storage.find(target, detail=True)
        for name, recorded in files.items():
            if (size := remote.get(f"{target}/{name}", {}).get("size")) != recorded["bytes"]:
                raise OSError(f"{name} has {size} bytes there instead of {recorded['bytes']}")
        require_current()
        with self._storage.transaction:  # with file://, a rename
            self._storage.pipe_file(f"{target}/{MANIFEST}", content)
        return True

    def withdraw_after(self, step: int) -> None:
        """Rename the manifests of later steps: the run has gone back, and trains them again."""
        for later in self.steps():
            if later > step:
                self._withdraw(checkpoint_path(Path(), later).name)

    def _withdraw(self, name: str) -> None:
        self._storage.mv(
            f"{self._folder}/{name}/{MANIFEST}", f"{self._folder}/{name}/withdrawn.json"
        )

    def fetch(self, step: int, checkpoints: Path) -> Path:
        """Fetch a checkpoint, and publish it on disk by one rename after its sums are verified.

        Raises:
            DamagedCheckpointError: it is damaged in the storage.
        """
        final, workspace = checkpoint_path(checkpoints, step), checkpoints / f".{uuid.uuid4().hex}"
        temporary = workspace / final.name
        temporary.mkdir(parents=True)
        try:
            self._get(temporary / MANIFEST)
            files = store.read_manifest(temporary)["files"]
            store.require_space(workspace, sum(recorded["bytes"] for recorded in files.values()))
            for name in files:
                if Path(name).name == name:  # find_damage reports the others
                    self._get(temporary / name)
            if damage := store.find_damage(temporary):
                raise DamagedCheckpointError("; ".join(damage))
            if final.exists():
                store.set_aside(workspace, StoredCheckpoint(final, step))
            temporary.rename(final)
            sync_folder(checkpoints)
            store.point_latest(workspace, final)
        finally:
            shutil.rmtree(workspace)
        return final

    def _get(self, file: Path) -> None:
        source = f"{self._folder}/{file.parent.name}/{file.name}"
        retried(lambda: self._storage.get_file(source, str(file)))

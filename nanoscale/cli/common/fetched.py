"""Data in object storage: files that data.path and others name are fetched once into the cache folder."""

import hashlib
import shutil
import uuid
from contextlib import suppress
from pathlib import Path
from typing import Any

from nanoscale.common import display
from nanoscale.common.cache_folder import cache_path
from nanoscale.common.object_storage import explained, is_address, open_storage, retried, version_of
from nanoscale.common.units import byte_size
from nanoscale.config.token_files import MANIFEST, TOKENS, VALID
from nanoscale.config.values.provenance import Composed, Setting


def fetched_data(composed: Composed) -> dict[str, Setting]:
    """Fetch the data that has an address; return the keys of their local paths. Raises UserError.

    A folder of texts stays where it is: its files are fetched one by one when they are prepared.
    """
    data = composed.config.data
    named = {"path": data.path, "valid_path": data.valid_path}
    for source, entry in data.mixture.items():
        named[f"mixture.{source}.path"] = entry.path
        named[f"mixture.{source}.valid_path"] = entry.valid_path
    settings = {}
    for name, address in named.items():
        if address is not None and is_address(address):
            with explained(f"data.{name}", address, "data"):
                if name == "path" and _is_folder_of_texts(address):
                    continue
                local = _fetch(address, cache_path(data.cache_dir) / "fetched")
            settings[f"data.{name}"] = Setting(str(local), f"fetched from {address}")
    return settings


def _is_folder_of_texts(address: str) -> bool:
    from nanoscale.data.prepare.sources import objects_below

    storage, path = open_storage(address)
    if not any(source.name != address for source in objects_below(address)):
        return False
    return not retried(lambda: storage.exists(f"{path}/{MANIFEST}"))


def _fetch(address: str, cache: Path) -> Path:
    """Return the local path of an address: a folder, a file, or the prefix of several files."""
    storage, path = open_storage(address)
    parent, _, name = path.rpartition("/")
    if name in (TOKENS, VALID) and retried(lambda: storage.exists(f"{parent}/{MANIFEST}")):
        return _fetch(address.rstrip("/").rpartition("/")[0], cache) / name  # a prepared folder
    objects = retried(lambda: storage.find(path, detail=True))
    if not objects or path in objects:
        objects = retried(lambda: storage.find(parent, detail=True, maxdepth=1))
        objects = {key: it for key, it in objects.items() if f"{key}.".startswith(f"{path}.")}
    if not objects:
        raise FileNotFoundError("there is no such object")
    versions = [(key, it["size"], version_of(it)) for key, it in sorted(objects.items())]
    digest = hashlib.sha256(repr((address, versions)).encode()).hexdigest()[:16]
    folder, temporary = cache / digest, cache / f".{uuid.uuid4().hex}"
    if not folder.is_dir():
        display.note(f"fetching {byte_size(sum(size for _, size, _ in versions))} of {address}")
        try:
            for key, size, _ in versions:
                _get(storage, key, size, temporary / key.removeprefix(f"{parent}/"))
            with suppress(FileExistsError):  # another process was faster
                temporary.rename(folder)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
    display.note(f"{address} is read from {folder / name}")
    return folder / name


def _get(storage: Any, key: str, size: int, file: Path) -> None:
    if ".." in file.parts:
        raise ValueError(f"{key} would be written outside the cache folder")
    file.parent.mkdir(parents=True, exist_ok=True)
    retried(lambda: storage.get_file(key, str(file)))
    if file.stat().st_size != size:
        raise OSError(f"{key} has {size} bytes, and {file.stat().st_size} were received")

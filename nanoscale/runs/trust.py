"""Signatures of the folders of runs and sweeps, which distinguish this user's own runs from other people's.

Some keys of a configuration name code or programs (`executes` in the schema). A launch signs their values with
a secret in the user's own settings. Without the secret nobody can sign a folder, and a value that is changed
in config.yaml later does not match the signature. A folder may be moved, and is recognized on every machine
that shares the user's home.
"""

import hashlib
import hmac
import json
import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from nanoscale.common.cache_folder import user_settings
from nanoscale.common.errors import UserError
from nanoscale.config.composing.frozen import load
from nanoscale.config.reference import declared, value_of
from nanoscale.config.schema import Config
from nanoscale.runs.directory import SIGNATURE, RunDirectory, write_atomically

_BYTES = 32


_PLANNED = ("hooks.", "model.", "train.")
"""Sections whose code runs before anything is launched, to count parameters, to check tasks or to rehearse."""


def executed(config: Config, *, launched: bool = True) -> dict[str, Any]:
    """Return the keys that name code or programs and differ from their defaults, with the values.

    Args:
        launched: False for the keys whose code also a plan or a rehearsal runs.
    """
    found = {}
    for name, key in declared().items():
        if key.executes and (key.executes is True or value_of(config, key.executes)):
            found[name] = value_of(config, name)
    return {
        name: value
        for name, value in found.items()
        if value != declared()[name].default and (launched or name.startswith(_PLANNED))
    }


def sign(folder: Path, values: Mapping[str, Any]) -> None:
    """Write a signature of values into the folder; none if this user has no place for a secret.

    Args:
        folder: of a run, with the values that are `executed`, or of a sweep, with its overrides.

    Raises:
        OSError: the folder cannot be written to.
    """
    secret = _read_secret() or _make_secret()
    if secret is not None:
        write_atomically(folder / SIGNATURE, _signature(secret, values) + "\n")


def is_signed(folder: Path, values: Mapping[str, Any]) -> bool:
    """True if a run or sweep of this user made the folder, with the same values."""
    secret = _read_secret()
    try:
        signature = (folder / SIGNATURE).read_text("ascii").strip()
    except (OSError, ValueError):
        return False
    return secret is not None and hmac.compare_digest(signature, _signature(secret, values))


def is_own(run: RunDirectory) -> bool:
    """True if a run of this user made the run folder."""
    try:
        return is_signed(run.path, executed(load(run.config)))
    except UserError:
        return False


def _signature(secret: bytes, values: Mapping[str, Any]) -> str:
    text = json.dumps(values, sort_keys=True)
    return hmac.new(secret, text.encode(), hashlib.sha256).hexdigest()


def _secret_file() -> Path | None:
    with suppress(RuntimeError):  # the user has no home
        return user_settings() / "nanoscale" / "secret"
    return None


def _read_secret() -> bytes | None:
    file = _secret_file()
    with suppress(OSError):
        secret = file.read_bytes() if file is not None else b""
        return secret if len(secret) == _BYTES else None
    return None


def _make_secret() -> bytes | None:
    """Return a new secret, or a faster process's; None if none can be stored."""
    file = _secret_file()
    if file is None:
        return None
    temporary = file.with_name(f".secret.{os.getpid()}")
    with suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with os.fdopen(
            os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb"
        ) as stream:
            stream.write(os.urandom(_BYTES))
            stream.flush()
            os.fsync(stream.fileno())
        with suppress(FileExistsError):
            _publish_secret(temporary, file)
    with suppress(OSError):
        temporary.unlink()
    return _read_secret()


def _publish_secret(temporary: Path, file: Path) -> None:
    try:
        os.link(temporary, file)  # unlike a rename, it never replaces a file
    except FileExistsError:
        raise
    except OSError:  # a file system without links
        temporary.rename(file)

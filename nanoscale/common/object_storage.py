"""Object storage by address, such as s3://bucket/prefix, through fsspec, which is imported when it is used."""

import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from nanoscale.common.credentials import without_credentials
from nanoscale.common.errors import UserError, Violation
from nanoscale.common.versions import install_command

PACKAGES = {"s3": "s3fs", "gs": "gcsfs", "file": "fsspec"}
"""The package that reads each kind of address; fsspec comes with torch."""
_OPTIONS: dict[str, dict[str, Any]] = {
    "s3": {"config_kwargs": {"connect_timeout": 10, "read_timeout": 30}},
    "file": {"auto_mkdir": True},
}
_ADDRESS = re.compile(r"(\w+)://(.*@)?")
_PAUSES_S = (1.0, 3.0, 10.0)
T = TypeVar("T")


def is_address(path: str | None) -> bool:
    return _ADDRESS.match(path or "") is not None


def problem(address: str | None) -> str | None:
    """Return why an address cannot be used, as a sentence without its key; None if it can, or is not set."""
    match = _ADDRESS.match(address or "")
    if address is not None and (match is None or match[1] not in PACKAGES):
        return "must begin with s3://, gs:// or file://"
    if match is not None and (match[2] or without_credentials(str(address)) != address):
        return "holds a credential, which everybody could read in the run: set it in the environment instead"
    return None


def open_storage(address: str) -> tuple[Any, str]:
    """Return fsspec's file system of an address, and the path in it."""
    from fsspec.core import url_to_fs

    options = _OPTIONS.get(address.partition(":")[0], {})
    storage, path = url_to_fs(address, use_listings_cache=False, **options)
    return storage, str(path).rstrip("/")


@contextmanager
def explained(key: str, address: str, kind: str) -> Iterator[None]:
    """Turn the errors of storage libraries, which have classes of their own, into a UserError."""
    try:
        if wrong := problem(address):
            raise ValueError(wrong)
        yield
    except UserError:
        raise
    except Exception as error:
        package = PACKAGES.get(address.partition(":")[0], "")
        text, remedy = first_line(error), "check the address and the credentials (docs/storage.md)"
        if isinstance(error, ImportError):
            text, remedy = f"needs {package}, which is not installed", install_command(package)
        shown = _ADDRESS.sub(r"\1://", address)
        violations = [Violation(key, shown, "", text, remedy=remedy)]
        raise UserError(kind, f"{key}={shown}: {text}", violations) from error


def retried(action: Callable[[], T]) -> T:
    """Return the result of a request, which is repeated unless the object is missing or access is refused."""
    for pause_s in _PAUSES_S:
        try:
            return action()
        except (FileNotFoundError, PermissionError, ImportError):
            raise
        except Exception:
            time.sleep(pause_s)
    return action()


def version_of(properties: dict[str, Any]) -> str:
    """Return what changes with an object's content, as far as its storage tells it."""
    known = (properties.get(name) for name in ("ETag", "etag", "mtime", "LastModified"))
    return str(next((value for value in known if value is not None), ""))


def first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]

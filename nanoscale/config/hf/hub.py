"""The Hugging Face hub: names that it may know, and waiting for it. Imports none of its libraries."""

import logging
import os
import re
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

from nanoscale.common import display
from nanoscale.config.violations import nearest

_NAME = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?")
_OFFLINE = "HF_HUB_OFFLINE"
_PATIENCE_S = 1.0
"""Seconds before a wait is reported."""


def is_name(asked: str) -> bool:
    """True if a model or dataset of the hub can have this name."""
    return _NAME.fullmatch(asked) is not None


def missing_path(asked: str) -> str | None:
    """Return why `asked`, which does not exist here, means a path; None if it may be a name at the hub.

    `models/smal` is a path if there is a folder `models`: a typo must not be looked up on the network.
    """
    if not is_name(asked):
        return "is neither a folder nor a possible name of a model"
    first, slash, _ = asked.partition("/")
    if slash and Path(first).is_dir():
        return (
            f"does not exist, and {first}/ does: a name at the hub cannot start like a local folder"
        )
    return None


def similar_paths(asked: str) -> list[str]:
    """List folders next to a missing path whose names are similar to its own."""
    path = Path(asked)
    try:
        names = [entry.name for entry in path.expanduser().parent.iterdir() if entry.is_dir()]
    except OSError:
        return []
    return [str(path.with_name(name)) for name in nearest(path.name, names)]


@contextmanager
def asking(name: str) -> Iterator[bool]:
    """Write one line on standard error if the hub takes time to answer, and keep its library silent.

    Yields:
        True if the hub cannot be reached, so that only its cache may be used: the library would retry for half
            a minute.
    """
    library = logging.getLogger("huggingface_hub")
    level, host = library.level, hub_host()
    line = f"waiting for {host} to answer for {name} ({_OFFLINE}=1 uses only the cache)"
    timer = threading.Timer(_PATIENCE_S, lambda: display.note(line))
    timer.daemon = True
    timer.start()
    library.setLevel(logging.CRITICAL)
    try:
        cache_only = is_offline() or unreachable() is not None
        if cache_only:
            timer.cancel()
        yield cache_only
    finally:
        timer.cancel()
        library.setLevel(level)


def why_not(error: Exception) -> str:
    """Return in one clause why a request to the hub within `asking` failed."""
    not_there = isinstance(error, OSError)  # the libraries' errors of networks and caches are
    if not_there and is_offline():
        return f"it is not in the cache; {_OFFLINE}=1 is set, and the hub was not asked"
    if not_there and (problem := unreachable()) is not None:
        return f"it is not in the cache, and {hub_host()} cannot be reached: {problem}"
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def is_offline() -> bool:
    """True if the user allows only the hub's cache."""
    setting = os.environ.get(_OFFLINE) or os.environ.get("TRANSFORMERS_OFFLINE") or ""
    return setting.upper() in ("1", "ON", "YES", "TRUE")


def hub_host() -> str:
    return urlsplit(os.environ.get("HF_ENDPOINT") or "https://huggingface.co").hostname or "the hub"


def unreachable() -> str | None:
    """Return why the hub's host has no address here; None if it has one, or a proxy resolves it."""
    from urllib.request import getproxies

    if getproxies().keys() & {"https", "http", "all"}:
        return None
    try:
        socket.getaddrinfo(hub_host(), 443)
    except OSError as error:
        return error.strerror or str(error)
    return None

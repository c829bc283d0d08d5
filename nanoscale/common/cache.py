"""The folder of what can be made again: prepared corpora."""

from __future__ import annotations

import os
from pathlib import Path


def cache_path(named: str | None) -> Path:
    """`named` (data.cache_dir), $NANOSCALE_CACHE or nanoscale/ in the user's cache folder.

    Raises:
        RuntimeError: the user has no home.
    """
    named = named or os.environ.get("NANOSCALE_CACHE")
    if named:
        return Path(named).expanduser().absolute()
    return user_cache() / "nanoscale"


def user_settings() -> Path:
    """Return the folder of the settings of the user's programs. Raises as `cache_path` does."""
    base = Path(os.environ.get("XDG_CONFIG_HOME", ""))
    return base if base.is_absolute() else Path.home() / ".config"


def user_cache() -> Path:
    """Where the user's programs keep what they can make again."""
    base = Path(os.environ.get("XDG_CACHE_HOME", ""))
    # The specification has relative ones ignored.
    return base if base.is_absolute() else Path.home() / ".cache"

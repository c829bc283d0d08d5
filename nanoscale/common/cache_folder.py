"""The folder of reproducible files: prepared corpora."""

import os
from pathlib import Path


def cache_path(configured: str | None) -> Path:
    """Return `configured` (data.cache_dir), $NANOSCALE_CACHE or nanoscale/ in the user's cache folder.

    Raises:
        RuntimeError: the user has no home.
    """
    configured = configured or os.environ.get("NANOSCALE_CACHE")
    if configured:
        return Path(configured).expanduser().absolute()
    return user_cache() / "nanoscale"


def user_settings() -> Path:
    """Return the folder of the settings of the user's programs. Raises like `cache_path`."""
    base = Path(os.environ.get("XDG_CONFIG_HOME", ""))
    return base if base.is_absolute() else Path.home() / ".config"


def user_cache() -> Path:
    """Return the folder for files that the user's programs can make again."""
    base = Path(os.environ.get("XDG_CACHE_HOME", ""))
    # The specification says that relative paths are ignored.
    return base if base.is_absolute() else Path.home() / ".cache"

"""Hydra's search for our files: a config source of our own, and the plugin that installs it.

Hydra's own file source takes the first match with the user's folder last, parses YAML that we refuse, and
records no lines. This one serves the lists of defaults of the active Library's files.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache

from hydra.conf import HydraConf
from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.config_store import ConfigStore
from hydra.core.object_type import ObjectType
from hydra.core.plugins import Plugins
from hydra.plugins.config_source import ConfigResult, ConfigSource
from hydra.plugins.search_path_plugin import SearchPathPlugin
from omegaconf import OmegaConf

from nanoscale.config.composing.library import RECIPE, ROOT, SCHEMA, Library

_library: ContextVar[Library | None] = ContextVar("library", default=None)


@contextmanager
def searching(library: Library) -> Iterator[None]:
    """Restrict Hydra to the library's files within the body."""
    _introduce()
    token = _library.set(library)
    try:
        yield
    finally:
        _library.reset(token)


@cache
def _introduce() -> None:
    """Register our sources with Hydra, and drop the files of its own settings, which a composition does not
    use."""
    for plugin in (LibrarySource, LibrarySearchPath):
        Plugins.instance().register(plugin)
    ConfigStore.instance().store("config", HydraConf(defaults=[]), group="hydra")


class LibrarySearchPath(SearchPathPlugin):
    """A plugin that puts the library in the place of the application's folder."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        if _library.get() is None:
            return
        for element in search_path.get_path():
            if element.provider == "main":
                element.path = f"{LibrarySource.scheme()}://"


class LibrarySource(ConfigSource):
    """A source of the files of the active library."""

    @staticmethod
    def scheme() -> str:
        return "nanoscale"

    @property
    def library(self) -> Library:
        library = _library.get()
        assert library is not None, "compose within searching()"
        return library

    def available(self) -> bool:
        return True

    def is_group(self, config_path: str) -> bool:
        return config_path in self.library.groups()

    def is_config(self, config_path: str) -> bool:
        if config_path == SCHEMA or config_path.startswith(f"{SCHEMA}/"):
            return True
        return self.library.find(config_path) is not None

    def load_config(self, config_path: str) -> ConfigResult:
        """Return the file's list of defaults, which decides the order of merging; its values stay here."""
        defaults = self.library.serve(config_path).content.get("defaults", [])
        group = config_path.partition("/")[0]
        return ConfigResult(
            provider=self.provider,
            path=self.full_path(),
            config=OmegaConf.create({"defaults": defaults}),
            header={"package": "_global_" if group in (ROOT, SCHEMA, RECIPE) else None},
        )

    def list(self, config_path: str, results_filter: ObjectType | None) -> list[str]:
        if results_filter == ObjectType.GROUP:
            return list(self.library.groups()) if config_path == "" else []
        return list(self.library.options(config_path)) if self.is_group(config_path) else []

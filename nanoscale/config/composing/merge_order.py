"""Hydra's order of merging for the files of a library.

Hydra's own file source takes the first match with the user's folder last, parses YAML that we refuse, and
records no lines. This one serves the lists of defaults of the library's files; their values stay there.
"""

from __future__ import annotations

from hydra import version
from hydra._internal.config_repository import ConfigRepository
from hydra._internal.defaults_list import create_defaults_list
from hydra.core.object_type import ObjectType
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from hydra.plugins.config_source import ConfigResult, ConfigSource
from omegaconf import OmegaConf

from nanoscale.common.errors import Violation
from nanoscale.config.composing.library import RECIPE, ROOT, SCHEMA, Library
from nanoscale.config.violations import quoted, refuse


def merge_order(library: Library) -> list[tuple[str, str]]:
    """Return the files of the library's choices in the order of merging, each with the section of its keys.

    Raises:
        UserError: a file is based on itself, or Hydra refuses the lists of defaults.
    """
    version.setbase("1.3")
    words = [
        f"~{group}" if option is None else f"{group}={quoted(option)}"
        for group, option in library.choices.items()
        if option is not None or group != RECIPE
    ]
    try:
        overrides = OverridesParser.create().parse_overrides(words)
        order = create_defaults_list(
            _Repository(library), ROOT, overrides, prepend_hydra=False, skip_missing=False
        )
    except RecursionError:
        name = library.circle()
        refuse([Violation("defaults", None, name, "lead back to the file itself")])
    except (HydraException, ValueError) as error:
        refuse([Violation("", " ".join(words), "", f"cannot be composed: {error}")])
    return [
        (entry.config_path, entry.package or "") for entry in order.defaults if entry.config_path
    ]


class _Repository(ConfigRepository):
    def __init__(self, library: Library) -> None:
        self.sources = [_Source(library)]


class _Source(ConfigSource):
    def __init__(self, library: Library) -> None:
        super().__init__("nanoscale", "nanoscale://")
        self.library = library

    @staticmethod
    def scheme() -> str:
        return "nanoscale"

    def available(self) -> bool:
        return True

    def is_group(self, config_path: str) -> bool:
        return config_path in self.library.groups()

    def is_config(self, config_path: str) -> bool:
        is_schema = config_path.partition("/")[0] == SCHEMA
        return is_schema or self.library.find(config_path) is not None

    def load_config(self, config_path: str) -> ConfigResult:
        """Return the file's list of defaults, which decides the order of merging."""
        defaults = self.library.serve(config_path).content.get("defaults", [])
        package = "_global_" if config_path.partition("/")[0] in (ROOT, SCHEMA, RECIPE) else None
        config = OmegaConf.create({"defaults": defaults})
        return ConfigResult(self.provider, self.full_path(), config, {"package": package})

    def list(self, config_path: str, results_filter: ObjectType | None) -> list[str]:
        return list(self.library.options(config_path)) if self.is_group(config_path) else []

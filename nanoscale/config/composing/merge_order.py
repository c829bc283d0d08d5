"""Hydra's order of merging for the files of a library: later files win.

A file that includes others in its list of defaults stands where its `_self_` is, otherwise after them.
"""

from __future__ import annotations

from collections.abc import Iterator

from nanoscale.common.errors import Violation
from nanoscale.config.composing.library import RECIPE, ROOT, SCHEMA, Library
from nanoscale.config.violations import refuse


def merge_order(library: Library) -> list[tuple[str, str]]:
    """Return the files of the library's choices in the order of merging, each with the section of its keys.

    Raises:
        UserError: a file is based on itself.
    """
    return [*_last_first(library, ROOT, dict(library.choices), ())][::-1]


def _last_first(
    library: Library, config: str, chosen: dict[str, str | None], parents: tuple[str, ...]
) -> Iterator[tuple[str, str]]:
    """Yield a file and the files that its list of defaults includes, the last one first.

    Args:
        chosen: group → option, of the command line and of the recipes so far. The first choice wins.
        parents: the files that include this one.
    """
    document = library.serve(config)
    if config in parents:
        refuse([Violation("defaults", None, document.name, "lead back to the file itself")])
    group, _, name = config.partition("/")
    entries = document.content.get("defaults", [])
    for entry in entries:
        if isinstance(entry, dict):
            ((key, option),) = entry.items()
            if key.startswith("override /"):
                chosen.setdefault(key.removeprefix("override /"), option)
    for entry in reversed(entries if "_self_" in entries else [*entries, "_self_"]):
        if entry == "_self_":
            section = name if group == SCHEMA else "" if group in (ROOT, RECIPE) else group
            yield config, section
            continue
        if isinstance(entry, str):
            included = entry if config == ROOT else f"{group}/{entry}"
        else:
            ((key, option),) = entry.items()
            option = chosen.get(key, option)
            if option is None or key.startswith("override /"):
                continue
            included = f"{key}/{option}"
        yield from _last_first(library, included, chosen, (*parents, config))

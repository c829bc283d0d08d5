"""The configuration in the run directory: complete, resolved, and read without Hydra.

Every rank reads it; `nanoscale train --config FILE` repeats the run that wrote it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from nanoscale.common.errors import UserError, Violation
from nanoscale.config import reference
from nanoscale.config.composing.interpolation import escape, escaped, unescape, unescaped
from nanoscale.config.composing.reopen import requested_values, unknown_names
from nanoscale.config.resolved import ResolvedConfig, resolved
from nanoscale.config.schema import Config
from nanoscale.config.values.convert import to_config, unknown_key
from nanoscale.config.values.yaml_file import parse, read, read_text, to_yaml
from nanoscale.config.violations import refuse

HEADER = """\
# A resolved configuration of nanoscale, complete. It repeats the run with
#   nanoscale train --config FILE
"""
_SECTION = re.compile(r"^(\w+):", re.M)
RESOLVED = """\
# The values before they were resolved: resolved again if an override changes what they follow from.
"""


def dump(config: Config, requested: Config | None = None) -> str:
    """Return the configuration as YAML, in the schema's order.

    Args:
        config: the result of `rules.check`.
        requested: the result of `compose` before it was checked, so that keys that were left open can be
            resolved again if the file is used with other devices or degrees.
    """
    final = asdict(config)
    text = HEADER + to_yaml(escaped(final))
    opened = requested_values(asdict(requested), final) if requested is not None else {}
    opened = {key: escape(key, value) for key, value in opened.items()}
    return text + (RESOLVED + to_yaml({"resolved": opened}) if opened else "")


def load(path: Path) -> ResolvedConfig:
    """Read a frozen configuration.

    Raises:
        UserError: the file is damaged or was not written by this version; the line is named.
    """
    document = read(path)
    sections = [name for name in reference.sections() if name and "." not in name]
    missing = [name for name in sections if not isinstance(document.content.get(name), dict)]
    if missing:
        message = f"is not a complete configuration: it has no {', '.join(missing)}"
        refuse([Violation("", str(path), document.name, message)], kind="run")
    if unknown := unknown_names(document.content):
        sources = {name: document.source(f"resolved.{name}") for name in unknown}
        refuse([unknown_key(name, value, sources[name]) for name, value in unknown.items()])
    content = {name: value for name, value in document.content.items() if name != "resolved"}
    return resolved(to_config(unescaped(content), document.source))


def read_values(path: Path, names: Iterable[str]) -> dict[str, Any]:
    """Return the values of a few keys, unchecked: only their sections are parsed, which is faster than `load`.

    Raises:
        UserError: one of these sections is missing or damaged.
    """
    names = list(names)
    if not names:
        return {}
    sections = {name.partition(".")[0] for name in names}
    text = read_text(path, str(path))
    _, *parts = _SECTION.split(text)
    chosen = [f"{name}:{rest}" for name, rest in zip(parts[::2], parts[1::2], strict=True)]
    chosen = [part for part in chosen if part.partition(":")[0] in sections]
    try:
        content = parse("".join(chosen), str(path)).content
    except UserError:
        content = {}
    if not all(isinstance(content.get(section), dict) for section in sections):
        content = asdict(load(path))  # which names the damage and its line
    return {name: unescape(name, _value(content, name)) for name in names}


def _value(content: Any, name: str) -> Any:
    """Return the value of a dotted name; the key's default if the file lacks it."""
    for part in name.split("."):
        if not isinstance(content, dict):
            return None  # a section that is null
        if part not in content:
            return reference.declared()[name].default
        content = content[part]
    return content

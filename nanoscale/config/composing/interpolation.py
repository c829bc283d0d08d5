r"""References in values, by one rule for every key: a text may hold `${section.key}`, another key's value, and
a key that names paths also `${oc.env:VAR}` or `${oc.env:VAR,default}`, an environment variable.

`\${` is an escaped `${`. Lists of texts for other programs, as in `launcher.slurm.setup`, are not resolved
unless their key names paths. The run directory holds the resolved values, and provenance.json the reference,
with the name of the variable. Names that look like secrets are refused.
"""

import os
import re
from collections.abc import Callable, Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

from nanoscale.common.errors import Violation
from nanoscale.config import reference
from nanoscale.config.values.convert import fits
from nanoscale.config.violations import nearest_key, shown

SECRET = re.compile(r"TOKEN(?!IZ)|SECRET|PASSWORD|PASSWD|CREDENTIAL|KEY", re.IGNORECASE)
"""A pattern for names of environment variables whose values are never written."""

_START = re.compile(r"(\\*)\$\{")
_KEY = re.compile(r"[A-Za-z_][A-Za-z0-9_.]*")
_VARIABLE = re.compile(r"oc\.env:([A-Za-z_][A-Za-z0-9_]*)(?:,(.*))?", re.DOTALL)


@dataclass(frozen=True)
class _Reference:
    """One `${…}` of a text."""

    key: str | None
    """The key that it refers to; None: an environment variable, or nothing readable."""
    variable: str | None = None
    default: str | None = None


def problem(key: str, value: object) -> str:
    """Return a problem of the references in a key's value; empty if there is none."""
    one = "may refer to one other key, as in ${train.seq_len}"
    for text in _texts(key, value):
        references = _references(text)
        for it in references:
            if it.variable is None and it.key is None:
                return f"{one}; other resolvers are not supported. Write \\${{ for ${{ itself"
            if it.variable is not None and not reference.declared()[key].path:
                return (
                    f"{one}; environment variables are supported only in keys that are paths, and "
                    "other resolvers are not supported"
                )
            if it.variable is not None and SECRET.search(it.variable):
                return (
                    f"refers to the environment variable {it.variable}, which looks like a secret, "
                    "and its value would be written to the run directory"
                )
        if sum(it.key is not None for it in references) > 1:
            return one
    return ""


def variables(key: str, value: object) -> list[str]:
    """Return the names of the environment variables that a key's value refers to."""
    named = (it.variable for text in _texts(key, value) for it in _references(text))
    return list(dict.fromkeys(name for name in named if name is not None))


def resolve(
    raw: Mapping[str, Any], source: Callable[[str], str]
) -> tuple[dict[str, Any], list[Violation]]:
    """Return the configuration with every reference replaced, and the references that lead to no value.

    Args:
        raw: sections and their keys as plain data, without a `problem`.
        source: who set a key.
    """
    resolved, violations = deepcopy(dict(raw)), []
    for name in reference.declared():
        *sections, leaf = name.split(".")
        values: Any = resolved
        for section in sections:
            values = values.get(section) if isinstance(values, dict) else None
        if not isinstance(values, dict) or leaf not in values:
            continue
        try:
            values[leaf] = _resolved(name, values[leaf], raw, (name,))
        except _BrokenError as broken:
            text = values.pop(leaf)
            violations.append(broken.violation(name, text, source(name)))
    return resolved, violations


def escape(key: str, value: Any) -> Any:
    r"""Return the value of a key, or with "" a configuration, as `unescape` and `resolve` read it back: with
    `\${` for `${`."""
    return _map_texts(key, value, lambda text: _START.sub(r"\1\1\\${", text))


def unescape(key: str, value: Any) -> Any:
    r"""Return the same of a frozen file, which holds no references: with `${` for `\${`."""

    def literal(match: re.Match[str]) -> str:
        return "\\" * (len(match[1]) // 2) + "${"

    return _map_texts(key, value, lambda text: _START.sub(literal, text))


class _BrokenError(Exception):
    """A reference that leads to no value."""

    def __init__(self, message: str, *, near: str | None = None, remedy: str = "") -> None:
        super().__init__(message)
        self.near, self.remedy = near, remedy

    def violation(self, key: str, text: object, source: str) -> Violation:
        instead: tuple[str, ...] = ()
        if self.near is not None and isinstance(text, str):
            near = (other for other in nearest_key(self.near, reference.declared()) if other != key)
            usable = (other for other in near if fits(key, reference.example(other)))
            instead = tuple(f"'{key}=${{{other}}}'" for other in usable)
        return Violation(key, text, source, str(self), instead, remedy=self.remedy)


def _resolved(key: str, value: Any, raw: Mapping[str, Any], trail: tuple[str, ...]) -> Any:
    """Return the value of `key` with its references replaced; `trail` lists the keys that refer to each other
    so far."""

    def replaced(text: str) -> Any:
        parts = list(_parts(text))
        if len(parts) == 1 and isinstance(parts[0], _Reference):
            return _target(parts[0], raw, trail)
        texts = (p if isinstance(p, str) else _in_text(p, _target(p, raw, trail)) for p in parts)
        return "".join(texts)

    return _map_texts(key, value, replaced)


def _in_text(it: _Reference, value: object) -> str:
    if value is None or isinstance(value, (dict, list)):
        what = "null" if value is None else "no single value"
        message = f"refers to {it.key} within a text, which is {what}"
        raise _BrokenError(message, remedy=f"set {it.key}, or write the whole text")
    return value if isinstance(value, str) else shown(value)


def _target(it: _Reference, raw: Mapping[str, Any], trail: tuple[str, ...]) -> Any:
    if it.variable is not None:
        text = os.environ.get(it.variable) or it.default
        if text is None:
            message = f"refers to the environment variable {it.variable}, which is not set"
            remedy = f"export {it.variable}=… first, or ${{oc.env:{it.variable},/default/path}}"
            raise _BrokenError(message, remedy=remedy)
        return text
    assert it.key is not None, "checked by problem()"
    value: Any = raw
    for name in it.key.split("."):
        if not isinstance(value, Mapping) or name not in value:
            remedy = f"an environment variable is ${{oc.env:{it.key}}}" if it.key.isupper() else ""
            message = f"refers to {it.key}, which is an unknown key"
            raise _BrokenError(message, near=it.key, remedy=remedy)
        value = value[name]
    if it.key in trail:
        through = trail[1] if len(trail) > 1 else it.key
        remedy = f"give {through} a value of its own"
        raise _BrokenError(f"refers to itself, through {through}", remedy=remedy)
    declared = reference.mapping_around(it.key) or it.key
    return _resolved(declared, value, raw, (*trail, it.key))


def _references(text: str) -> list[_Reference]:
    return [part for part in _parts(text) if isinstance(part, _Reference)]


def _parts(text: str) -> Iterator[str | _Reference]:
    """Yield the parts of a text: literal texts and references."""
    start, plain = 0, ""
    while match := _START.search(text, start):
        plain += text[start : match.start()] + "\\" * (len(match[1]) // 2)
        start = match.end()
        if len(match[1]) % 2:
            plain += "${"
            continue
        if plain:
            yield plain
            plain = ""
        body, closed, _ = text[start:].partition("}")
        start += len(body) + len(closed)
        if closed and (variable := _VARIABLE.fullmatch(body)):
            default = variable[2] and variable[2].strip().strip("'\"")
            yield _Reference(None, variable[1], default or None)
        else:
            yield _Reference(body if closed and _KEY.fullmatch(body) else None)
    if rest := plain + text[start:]:
        yield rest


# --- texts within values --------------------------------------------------------------------------


def _texts(key: str, value: object) -> list[str]:
    texts: list[str] = []
    _map_texts(key, value, texts.append)
    return texts


def _map_texts(key: str, value: Any, change: Callable[[str], Any]) -> Any:
    """Return the value of a key or section with its texts that may hold references changed.

    Lists hold texts for other programs, unless their key names paths.
    """
    if isinstance(value, str):
        return change(value) if "${" in value else value
    if isinstance(value, dict):
        inner = f"{key}." if key else ""
        return {name: _map_texts(f"{inner}{name}", it, change) for name, it in value.items()}
    declared = reference.declared().get(key)
    is_literal = declared is not None and declared.takes_list and not declared.path
    if isinstance(value, list) and not is_literal:
        return [_map_texts(key, entry, change) for entry in value]
    return value

"""The combination of all violations into the one error that a user sees."""

import json
import re
import shlex
from collections.abc import Collection, Iterable, Mapping, Sequence
from difflib import SequenceMatcher
from typing import Any, NoReturn

from nanoscale.common.credentials import without_credentials
from nanoscale.common.errors import UserError, Violation

CUTOFF, SHORT_CUTOFF = 0.65, 0.75
"""The least likeness of names, and of names of at most four letters."""
_BEGINNING = 0.9
"""The likeness of the first word of a longer name, as `h100` of `h100-sxm`; more for a shorter name."""


def nearest(word: str, candidates: Iterable[str], count: int = 3) -> tuple[str, ...]:
    """Return the candidates that `word` may have meant, best first; none if nothing is near."""
    ordered = sorted(candidates, key=lambda name: (_difference(word, name), name))
    return _best(((_likeness(word, name), name) for name in ordered), count)


def _difference(a: str, b: str) -> int:
    """Return the difference of two names that end with a digit; 0 for others."""
    ends = [int(name[-1]) for name in (a, b) if name[-1:].isdecimal()]
    return abs(ends[0] - ends[1]) if len(ends) == 2 else 0


def nearest_key(
    word: str, candidates: Collection[str], count: int = 3, cutoff: float = CUTOFF
) -> tuple[str, ...]:
    """Return the same for dotted names: `trian.steps` means `train.steps`; equal ones keep their order."""
    section, _, leaf = word.rpartition(".")
    scored = []
    for name in candidates:
        its_section, _, its_leaf = name.rpartition(".")
        elsewhere = 0.2 * (1 - _likeness(section, its_section)) if section else 0.0
        scored.append((_likeness(leaf, its_leaf) - elsewhere, name))
    return _best(scored, count, cutoff)


def _best(
    scored: Iterable[tuple[float, str]], count: int, cutoff: float = CUTOFF
) -> tuple[str, ...]:
    """Return the likeliest names, and names that are hardly less likely."""
    near = sorted((pair for pair in scored if pair[0] >= cutoff), key=lambda pair: -pair[0])
    return tuple(name for score, name in near[:count] if score >= near[0][0] - 0.15)


def _likeness(a: str, b: str) -> float:
    """Return the likeness of two words: 1 if equal, less if one is a part of the other.

    One or two letters are a part of every word, but `3` of `stage3` and of little else; and half of a short
    word is often part of another.
    """
    a, b = a.lower(), b.lower()
    if (len(a) > 2 and re.match(rf"{re.escape(a)}[-_.]", b)) or (len(a) > 3 and b.startswith(a)):
        return _BEGINNING + 0.05 * len(a) / len(b)
    part = CUTOFF if (len(a) > 2 or a.isdigit()) and a in b else 0.0
    matcher = SequenceMatcher(None, a, b)
    ratio = matcher.ratio() if matcher.quick_ratio() >= 0.6 else 0.0
    return max(part, ratio if len(a) > 4 or ratio >= SHORT_CUTOFF else 0.0)


_PLAIN = re.compile(r"[\w./:+-]+", re.ASCII)
"""Texts without special meaning in a shell or in Hydra's grammar."""
_SPECIAL = re.compile(r"[\\()\[\]{}:=, \t]")
"""Characters that Hydra's grammar admits in the key of a mapping only after a backslash."""
_OTHER_TYPE = re.compile(
    r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?|~|(?i:null|true|false|\.?inf|\.?nan)|"
)
"""Texts that YAML and Hydra read as another type unless they are quoted."""


def refuse(violations: Sequence[Violation], kind: str = "config") -> NoReturn:
    """Raise the UserError that carries all violations."""
    if len(violations) == 1:
        only = f"{subject(violations[0])}: {violations[0].message}"
        raise UserError(kind, only, list(violations)) from None
    raise UserError(kind, f"{len(violations)} things are wrong", list(violations)) from None


def subject(violation: Violation) -> str:
    """Return the subject of a violation: `key=value`, or the file."""
    if not violation.key:
        return violation.source
    value = violation.value
    nested = isinstance(value, list) and any(isinstance(entry, (dict, list)) for entry in value)
    if (value is None and not violation.typed) or isinstance(value, dict) or nested:
        return violation.key
    return without_credentials(f"{violation.key}={violation.typed or shown(value)}")


def shown(value: object) -> str:
    """Return a value in the form of YAML or of an override."""
    if isinstance(value, str) and _OTHER_TYPE.fullmatch(value):
        return f"'{value}'"
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, list):
        return f"[{','.join(shown(entry) for entry in value)}]"
    return str(value)


def override(key: str, value: object) -> str:
    """Return the override that sets a key, ready to paste into a shell."""
    if isinstance(value, dict):
        return shlex.quote(f"{key}={_mapping(value)}")
    entries = value if isinstance(value, list) else [value]
    if any(map(_needs_quotes, entries)):
        if isinstance(value, str) and not any(character in value for character in "\"'\\"):
            return f"'{key}=\"{value}\"'"
        return shlex.quote(f"{key}={quoted(value)}")
    word = f"{key}={shown(value)}"
    # some shells treat brackets as a pattern
    return f"'{word}'" if isinstance(value, list) else word


def _mapping(value: Mapping[str, Any]) -> str:
    """Return a mapping in Hydra's grammar, with quotes only for texts that need them."""
    entries = (
        f"{_escaped_key(name)}: "
        + (_mapping(it) if isinstance(it, dict) else quoted(it) if _needs_quotes(it) else shown(it))
        for name, it in value.items()
    )
    return f"{{{', '.join(entries)}}}"


def _needs_quotes(value: object) -> bool:
    if not isinstance(value, str):
        return False
    return not _PLAIN.fullmatch(value) or _OTHER_TYPE.fullmatch(value) is not None


def quoted(value: object) -> str:
    """Return a plain value in Hydra's grammar."""
    if isinstance(value, str):
        return f"'{_escaped(value)}'"
    if isinstance(value, float):
        return repr(value)
    if isinstance(value, dict):
        entries = (f"{_escaped_key(name)}:{quoted(inner)}" for name, inner in value.items())
        return f"{{{','.join(entries)}}}"
    if isinstance(value, list):
        return f"[{','.join(map(quoted, value))}]"
    return json.dumps(value)


def _escaped_key(name: str) -> str:
    """Return the key of a mapping in Hydra's grammar, which has no quotes for it."""
    return _SPECIAL.sub(r"\\\g<0>", name)


def _escaped(text: str) -> str:
    """Escape a text within single quotes: backslashes count only before a quote."""
    escaped = ""
    for part in text.split("'"):
        trailing = len(part) - len(part.rstrip("\\"))
        escaped += part + "\\" * trailing + "\\'"
    return escaped.removesuffix("\\'")

"""Suggestions: the names nearest to an unknown one."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from difflib import SequenceMatcher

CUTOFF, SHORT_CUTOFF = 0.65, 0.75
"""The least likeness, for names and for those of at most three letters."""
_BEGINNING = 0.9
"""The likeness of the first word of a longer name, as `h100` of `h100-sxm`; a little more for a shorter
name."""


def nearest(word: str, candidates: Iterable[str], count: int = 3) -> tuple[str, ...]:
    """Return the candidates that `word` may have meant, best first; none if nothing is near."""
    return _best(((_likeness(word, name), name) for name in sorted(candidates)), count)


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
    """Return the likeliest names, and those that are hardly less likely."""
    near = sorted((pair for pair in scored if pair[0] >= cutoff), key=lambda pair: -pair[0])
    return tuple(name for score, name in near[:count] if score >= near[0][0] - 0.15)


def _likeness(a: str, b: str) -> float:
    """Return the likeness of two words: 1 if equal, less if one is a part of the other.

    One or two letters are a part of every word, but `3` of `stage3` and of little else; and half of a short
    word is often part of another.
    """
    a, b = a.lower(), b.lower()
    if len(a) > 2 and re.match(rf"{re.escape(a)}[-_.]", b):
        return _BEGINNING + 0.05 * len(a) / len(b)
    part = CUTOFF if (len(a) > 2 or a.isdigit()) and a in b else 0.0
    matcher = SequenceMatcher(None, a, b)
    ratio = matcher.ratio() if matcher.quick_ratio() >= 0.6 else 0.0
    return max(part, ratio if len(a) > 3 or ratio >= SHORT_CUTOFF else 0.0)

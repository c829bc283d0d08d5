"""Did you mean: the names nearest to one that does not exist."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from difflib import SequenceMatcher

CUTOFF = 0.65


def nearest(word: str, candidates: Iterable[str], count: int = 3) -> tuple[str, ...]:
    """The candidates that `word` may have meant, best first; none if nothing is near."""
    return _best(((_likeness(word, name), name) for name in candidates), count)


def nearest_key(
    word: str, candidates: Collection[str], count: int = 3, cutoff: float = CUTOFF
) -> tuple[str, ...]:
    """The same for dotted names, where `steps` or `trian.steps` mean `train.steps`."""
    section, _, leaf = word.rpartition(".")
    scored = []
    for name in candidates:
        its_section, _, its_leaf = name.rpartition(".")
        elsewhere = 0.1 if section and section != its_section else 0.0
        scored.append((_likeness(leaf, its_leaf) - elsewhere, name))
    return _best(scored, count, cutoff)


def _best(
    scored: Iterable[tuple[float, str]], count: int, cutoff: float = CUTOFF
) -> tuple[str, ...]:
    """The likeliest names, and those that are hardly less likely."""
    near = sorted((-score, name) for score, name in scored if score >= cutoff)
    return tuple(name for score, name in near[:count] if -score >= -near[0][0] - 0.15)


def _likeness(a: str, b: str) -> float:
    """1 for the same word; a part of a longer word counts as rather like it."""
    a, b = a.lower(), b.lower()
    part = 0.65 if a and a in b else 0.0
    matcher = SequenceMatcher(None, a, b)
    return max(part, matcher.ratio()) if matcher.quick_ratio() >= 0.6 else part

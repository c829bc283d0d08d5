"""Overrides that give a key several values, `optimizer.lr=1e-3,3e-4`: one run for each of their
combinations."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from typing import TYPE_CHECKING

from nanoscale.common.errors import Violation
from nanoscale.config import reference
from nanoscale.config.composing.overrides import FILTERS, parsed
from nanoscale.config.values.provenance import COMMAND_LINE
from nanoscale.config.violations import override, refuse

if TYPE_CHECKING:
    from hydra.core.override_parser.types import Override

_WITHOUT_COMMAS = {"launcher.nodes", "launcher.slurm.time", "launcher.batch.time"}
"""keys whose texts hold no comma"""


@dataclass(frozen=True)
class Variant:
    """One of the runs of the overrides."""

    words: tuple[str, ...]
    """The overrides, each with one value."""
    chosen: dict[str, str]
    """This run's value of every key or group with several values."""


def expand(words: Sequence[str], *, is_array: bool = True) -> list[Variant]:
    """Return the runs of the overrides, the last override varying fastest; one if none has several values.

    Unreadable overrides are passed on, for `compose` to refuse.

    Args:
        is_array: the runs are tasks of one batch script, so some keys must be the same for all.

    Raises:
        UserError: an override gives several values other than by a list, or a list in which runs cannot
            differ.
    """
    violations: list[Violation] = []
    choices = [_read(word, violations, is_array) for word in words]
    violations += given_twice([key for key, each in choices if len(each) > 1])
    if violations:
        refuse(violations)
    variants = []
    for picked in product(*(each for _, each in choices)):
        chosen = {
            key: word.partition("=")[2]
            for (key, each), word in zip(choices, picked, strict=True)
            if len(each) > 1
        }
        variants.append(Variant(picked, chosen))
    return variants


def given_twice(keys: Sequence[str]) -> list[Violation]:
    """Return the violations of keys that several overrides give several values."""
    message = "is given several values twice"
    repeated = dict.fromkeys(key for key in keys if keys.count(key) > 1)
    return [Violation(key, None, COMMAND_LINE, message) for key in repeated]


def values_problem(key: str, raw: str, values: Sequence[str]) -> Violation | None:
    """Return the problem of a key's values: a list without brackets, or a value that is there twice.

    Args:
        raw: the override after its `=`.
        values: the text of each value.
    """
    declared = reference.declared().get(key)
    takes_list = declared is not None and declared.takes_list
    if takes_list and not all(text.startswith("[") or text == "null" for text in values):
        message = "takes a list in brackets"
        return Violation(key, raw, COMMAND_LINE, message, (shlex.quote(f"{key}=[{raw}]"),))
    if len(set(values)) < len(values):
        message = "has one value twice, and its runs would be identical"
        once = ",".join(dict.fromkeys(values))
        return Violation(key, raw, COMMAND_LINE, message, (shlex.quote(f"{key}={once}"),))
    return None


def _read(word: str, violations: list[Violation], is_array: bool) -> tuple[str, tuple[str, ...]]:
    """Return the key or group of an override, and an override for each of its values."""
    alone, override = (word, (word,)), parsed(word)
    if override is None or not override.is_sweep_override():
        return alone
    if override.key_or_group in FILTERS:  # one value with commas, for `compose` to refuse
        return alone
    problem = _problem(override, word, is_array)
    if problem is not None:
        violations.append(problem)
        return alone
    key = override.get_key_element()
    return key.lstrip("+"), tuple(f"{key}={it}" for it in override.sweep_string_iterator())


def _problem(asked: Override, word: str, is_array: bool) -> Violation | None:
    from hydra.core.override_parser.types import ChoiceSweep

    key, raw = asked.key_or_group, word.partition("=")[2]
    value = asked.value()
    if not isinstance(value, ChoiceSweep) or value.shuffle or value.tags:
        message = "must have several values: list them, with commas between them"
        return Violation(key, raw, COMMAND_LINE, message, (f"{key}=A,B,C",))
    values = list(asked.sweep_string_iterator())
    if problem := values_problem(key, raw, values):
        return problem
    why = {"run": ", which are numbered", "launcher": ": one script requests their resources"}
    if not is_array or (reason := why.get(key.partition(".")[0])) is None:
        return None
    message = f"is the same for all runs of an array{reason}"
    return Violation(key, raw, COMMAND_LINE, message, _single(key, raw, values))


def _single(key: str, raw: str, values: Sequence[str]) -> tuple[str, ...]:
    """Return the override with one value: the whole as a text if the key takes one, else the first."""
    declared = reference.declared().get(key)
    is_text = declared is not None and str in reference.alternatives(declared.annotation)
    if is_text and key not in _WITHOUT_COMMAS and not re.search("[\"'()\\[\\]]", raw):
        return (override(key, raw),)
    if values[0].startswith(("[", "{")):
        return ()  # neither takes a list or a mapping for each run
    return (shlex.quote(f"{key}={values[0]}"),)

"""Composed configurations without asking Hydra hundreds of times."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, replace
from functools import cache
from typing import Any

from nanoscale.config import reference
from nanoscale.config.composing.compose import Setting, compose
from nanoscale.config.composing.library import Library
from nanoscale.config.composing.overrides import read_words
from nanoscale.config.resolved import ResolvedConfig, resolved
from nanoscale.config.schema import Config
from nanoscale.config.values.convert import to_config
from nanoscale.config.values.provenance import Composed


@cache
def debug_recipe() -> Composed:
    return compose(["recipe=debug"])


def changed(*words: str, options: Mapping[str, Setting] | None = None) -> Composed:
    """Return the result of `compose(["recipe=debug", *words], options=options)`."""
    library, base = Library(), debug_recipe()
    asked = read_words(words, library)
    assert not asked.violations
    raw, history = asdict(base.config), dict(base.history)
    for group, option in asked.choices.items():
        section = reference.defaults(reference.sections()[group])
        content = library.serve(f"{group}/{option}").content
        raw[group] = reference.merged(section, content)
        for name, value in content.items():
            file = f"nanoscale/conf/{group}/{option}.yaml"
            history[f"{group}.{name}"] = [Setting(value, file)]
    said = [(key, Setting(value, "command line")) for key, value in asked.settings]
    for key, setting in [*said, *(options or {}).items()]:
        _set(raw, key, setting.value)
        history[reference.mapping_around(key) or key] = [setting]
    around = reference.mapping_around
    config = to_config(raw, lambda key: history[around(key) or key][-1].source)
    chosen = tuple(f"nanoscale/conf/{group}/" for group in asked.choices)
    unasked = frozenset(name for name in base.unasked if not name.startswith(chosen))
    return Composed(config, history, "debug", words, unasked)


def complete(**sections: Any) -> ResolvedConfig:
    """Return a resolved configuration with these sections; what they leave open is 1."""
    config = Config(**sections)
    layout, train = config.parallel, config.train
    degrees = {key: value for key, value in asdict(layout).items() if value == "auto"}
    layout = replace(layout, **dict.fromkeys(degrees, 1))
    micro_batch = 1 if train.micro_batch == "auto" else train.micro_batch
    train = replace(train, micro_batch=micro_batch, steps=train.steps or 1)
    return resolved(replace(config, parallel=layout, train=train))


def _set(raw: dict[str, Any], key: str, value: object) -> None:
    *sections, name = key.split(".")
    values = raw
    for section in sections:
        values[section] = dict(values[section] or {})
        values = values[section]
    values[name] = value

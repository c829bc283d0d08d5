"""Composition: from the overrides of a command line to a typed configuration that records the source of each
value.

Files are merged in Hydra's order: the schema's defaults, the chosen option of every group, the recipe, the
groups chosen on the command line once more (so that they win over the recipe). The keys set on the command line
come last.
`rules.check` then checks the result against the rules across keys.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nanoscale.common.errors import Violation
from nanoscale.config.composing.interpolation import escape, resolve
from nanoscale.config.composing.library import RECIPE, ROOT, Library, is_path, misplaced
from nanoscale.config.hf import any_model, pretrained
from nanoscale.config.schema import Config, RopeScaling
from nanoscale.config.values.convert import convert
from nanoscale.config.values.provenance import (
    COMMAND_LINE,
    DEFAULT,
    Layer,
    Setting,
    record,
    trace,
)
from nanoscale.config.violations import refuse, shown

if TYPE_CHECKING:
    from nanoscale.config.composing.overrides import Words
from nanoscale.config.values.provenance import Composed

__all__ = ["Composed", "Setting", "compose"]


def compose(
    words: Sequence[str],
    *,
    config_dir: Path | None = None,
    config_file: Path | None = None,
    options: Mapping[str, Setting] | None = None,
) -> Composed:
    """Compose the configuration for these overrides.

    Args:
        words: overrides in Hydra's grammar, as in ``["recipe=llama-8b", "train.steps=10"]``.
        config_dir: a user's folder with groups and recipes that take precedence over ours.
        config_file: a frozen configuration in place of a recipe.
        options: dotted key → the value set by a command-line option; no grammar applies.

    Raises:
        UserError: with all problems of the overrides and the files.
    """
    from hydra import initialize_config_dir

    from nanoscale.config.composing.hydra_search import searching
    from nanoscale.config.composing.overrides import read_words, with_good_advice

    library = Library(config_dir, config_file)
    with searching(library), initialize_config_dir(str(Path.cwd()), version_base="1.3"):
        asked = read_words(words, library)
        settings = [(key, Setting(value, COMMAND_LINE)) for key, value in asked.settings]
        settings += _take_options(options or {}, asked)
        if config_file is not None:
            asked.violations += _take_file(library, asked.choices)
        library.choices, library.touched = asked.choices, asked.touched()
        merged, layers = _merge(library, asked)
    history = trace(layers, settings)
    for key, setting in settings:
        _set(merged, key, setting.value)
    unasked = library.unasked() | {DEFAULT}
    composed = Composed(
        Config(), history, _recipe_name(library), tuple(words), unasked, asked.typed
    )
    raw, broken = resolve(merged, composed.source)
    config, mistyped = convert(raw, composed.source)
    if violations := [*asked.violations, *library.violations, *broken, *mistyped]:
        refuse([with_good_advice(violation, asked, library) for violation in violations])
    composed = replace(composed, config=config)
    if config.model.source == "hf":
        frozen = config_file is not None and not composed.by_hand(any_model.KEY)
        return _with_shape(composed, merged, *any_model.take(composed, frozen=frozen))
    frozen = config_file is not None and not composed.by_hand(pretrained.KEY)
    if config.model.init_from is None or frozen:  # a frozen file has the complete shape
        return composed
    found = pretrained.read(composed)
    values = pretrained.take_shape(composed, found)
    return _with_shape(composed, merged, str(found.folder / "config.json"), values)


def _with_shape(
    composed: Composed, merged: dict[str, Any], source: str, values: dict[str, Any]
) -> Composed:
    """Return the configuration with a model's shape, which the values of other keys may refer to."""
    for name, value in values.items():
        plain = asdict(value) if isinstance(value, RopeScaling) else value
        if value != getattr(composed.config.model, name):
            leaves = {f".{k}": v for k, v in plain.items()} if plain is not value else {"": value}
            for path, leaf in leaves.items():
                record(composed.history, f"model.{name}{path}", Setting(leaf, source))
        merged["model"][name] = escape(f"model.{name}", plain)
    raw, _ = resolve(merged, composed.source)
    config, violations = convert(raw, composed.source)
    if violations:
        refuse(violations)
    return replace(composed, config=config)


def _take_options(options: Mapping[str, Setting], asked: Words) -> Iterator[tuple[str, Setting]]:
    """Yield the settings of options, as if they were the last overrides of the command line."""
    given = dict(asked.settings)
    for key, setting in options.items():
        value, problem = setting.value, misplaced(key, setting.value)
        if key in given and given[key] != value:
            problem = f"and {key}={shown(given[key])} are both given; remove one of them"
        if problem:
            asked.violations.append(Violation(key, value, setting.source, problem))
        else:
            asked.settings.append((key, value))
            yield key, setting


def _take_file(library: Library, choices: dict[str, str | None]) -> list[Violation]:
    """Check that the file can replace the recipe."""
    violations = []
    if library.config_file is not None and not library.config_file.exists():
        path, library.config_file = str(library.config_file), None
        message = "is a file that does not exist"
        violations.append(Violation("--config", path, "option --config", message))
    if RECIPE in choices:
        message = "cannot be given together with --config, which replaces the recipe"
        violations.append(Violation(RECIPE, choices.pop(RECIPE), COMMAND_LINE, message))
    return violations


def _merge(library: Library, asked: Words) -> tuple[dict[str, Any], list[Layer]]:
    """Merge the files of the chosen options; also return them, in the order in which they were merged."""
    from hydra.core.global_hydra import GlobalHydra
    from hydra.errors import HydraException
    from hydra.types import RunMode

    words = asked.for_hydra()
    try:
        loader = GlobalHydra.instance().config_loader()
        order = loader.compute_defaults_list(ROOT, words, RunMode.RUN)
    except RecursionError:
        name = library.circle()
        refuse([Violation("defaults", None, name, "lead back to the file itself")])
    except (HydraException, ValueError) as error:
        refuse([Violation("", " ".join(words), "", f"cannot be composed: {error}")])
    layers = [
        Layer(library.serve(entry.config_path), entry.package or "")
        for entry in order.defaults
        if entry.config_path is not None and not entry.config_path.startswith("hydra/")
    ]
    merged: dict[str, Any] = {}
    for layer in layers:
        content = {n: value for n, value in layer.document.content.items() if n != "defaults"}
        for section in reversed(layer.section.split(".") if layer.section else []):
            content = {section: content}
        _overlay(merged, content)
    return merged, layers


def _overlay(values: dict[str, Any], content: dict[str, Any]) -> None:
    """Merge a file into the values of the files before: mappings by key; any other value replaces the old."""
    for name, value in content.items():
        old = values.get(name)
        if isinstance(old, dict) and isinstance(value, dict):
            _overlay(old, value)
        else:
            values[name] = deepcopy(value)


def _set(raw: dict[str, Any], key: str, value: Any) -> None:
    """Set a key as the command line does: a mapping is merged into the existing one, {} empties it."""
    *sections, leaf = key.split(".")
    values = raw
    for section in sections:
        if not isinstance(values.get(section), dict):
            values[section] = {}
        values = values[section]
    values[leaf] = _merged(values.get(leaf), value)


def _merged(old: Any, new: Any) -> Any:
    if not isinstance(old, dict) or not isinstance(new, dict) or not new:
        return deepcopy(new)
    return old | {name: _merged(old.get(name), entry) for name, entry in new.items()}


def _recipe_name(library: Library) -> str | None:
    if library.config_file is not None:
        path = library.config_file.resolve()
        return path.parent.name if path.stem == ROOT else path.stem
    name = library.choices.get(RECIPE)
    return Path(name).stem if name and is_path(name) else name and name.replace("/", "-")

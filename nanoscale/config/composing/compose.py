"""Composition: from the overrides of a command line to a typed configuration that records the source of each
value.

Files are merged in Hydra's order: the schema's defaults, the chosen option of every group, the recipe, the
groups chosen on the command line once more (so that they win over the recipe). The keys set on the command line
come last.
A file that includes others in its list of defaults stands where its `_self_` is, otherwise after them.
`rules.check` then checks the result against the rules across keys.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nanoscale.common.errors import Violation
from nanoscale.config import reference
from nanoscale.config.composing import frozen
from nanoscale.config.composing.interpolation import escape, resolve
from nanoscale.config.composing.library import RECIPE, ROOT, SCHEMA, Library, is_path, misplaced
from nanoscale.config.hf import any_model, peft, pretrained
from nanoscale.config.hf.families import UnsupportedError
from nanoscale.config.layout import ACTIVATION_MEMORY, RECOMPUTATION_KEYS
from nanoscale.config.reference import Values
from nanoscale.config.schema import Config, RopeScaling
from nanoscale.config.values import hooks
from nanoscale.config.values.convert import convert, is_left_to_plan
from nanoscale.config.values.provenance import (
    COMMAND_LINE,
    DEFAULT,
    Composed,
    Layer,
    Setting,
    record,
    trace,
)  # fmt: skip
from nanoscale.config.violations import override, refuse, shown

if TYPE_CHECKING:
    from nanoscale.config.composing.overrides import Words


RUN_CONFIG = "config.yaml"
"""The name of a run's frozen configuration in its directory."""

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
    from nanoscale.config.composing.overrides import read_words, with_good_advice

    library = Library(config_dir, config_file)
    asked = read_words(words, library)
    settings = [(key, Setting(value, COMMAND_LINE)) for key, value in asked.settings]
    settings += _take_options(options or {}, asked)
    if config_file is not None:
        if not config_file.exists():
            library.config_file = None
            message = "is a file that does not exist"
            missing = Violation("--config", str(config_file), "option --config", message)
            asked.violations.append(missing)
        elif config_file.is_file() and config_file.stat().st_size == 0:
            message = "is empty, and a frozen configuration has every key"
            asked.violations.append(
                Violation("--config", str(config_file), "option --config", message)
            )
        if RECIPE in asked.choices:
            message = (
                "is of a new run: the configuration of a run, or of --config, has every key already"
            )
            both = Violation(RECIPE, asked.choices.pop(RECIPE), COMMAND_LINE, message)
            asked.violations.append(both)
    library.choices, library.touched = asked.choices, asked.touched()
    layers = [Layer(library.serve(file), section) for file, section in merge_order(library)]
    merged = _merged(layers, settings)
    composed = Composed(
        Config(), trace(layers, settings), _recipe_name(library), tuple(words),
        library.unasked() | {DEFAULT}, asked.typed, library.opened,
    )  # fmt: skip
    composed, wrong = _converted(composed, merged)
    if violations := [*asked.violations, *library.violations, *wrong]:
        refuse([with_good_advice(violation, asked, library) for violation in violations])
    if composed.config.hooks.path is not None:
        composed, merged = _with_hooks(composed, merged, config_file)
    config = composed.config
    if config.model.source == "hf":
        is_frozen = config_file is not None and not composed.by_hand(any_model.KEY)
        return _with_shape(composed, merged, *any_model.take(composed, frozen=is_frozen))
    is_frozen = config_file is not None and not composed.by_hand(pretrained.KEY)
    if config.model.init_from is None or is_frozen:  # a frozen file has the complete shape
        return composed
    if (folder := _run_folder(config)) is not None:
        return _begun_from_run(composed, merged, folder)
    if (folder := peft.adapter_folder(config.model.init_from)) is not None:
        composed, merged = _begun_from_adapters(composed, merged, folder)
    model = pretrained.read(composed)
    values = pretrained.take_shape(composed, model)
    return _with_shape(composed, merged, str(model.folder / "config.json"), values)


def _converted(composed: Composed, merged: Values) -> tuple[Composed, list[Violation]]:
    """Return the request with its values, references resolved and types checked, and what is wrong."""
    raw, broken = resolve(merged, composed.source)
    config, mistyped = convert(raw, composed.source)
    left = {key for key, value in reference.flat(raw).items() if is_left_to_plan(key, value)}
    composed = replace(composed, config=config, left_to_plan=frozenset(left))
    if config.parallel.activation_memory is not None:
        left |= {key for key in RECOMPUTATION_KEYS if not composed.asked_for(key)}
        composed = replace(composed, left_to_plan=frozenset(left))
        if (mode := RECOMPUTATION_KEYS[0]) not in left:
            set_too = override(mode, reference.value_of(config, mode))
            message = f"lets the plan choose what is recomputed, and {set_too} is set too"
            ways = override(mode, reference.AUTO), override(ACTIVATION_MEMORY, None)
            mistyped = [*mistyped, composed.violation(ACTIVATION_MEMORY, message, *ways)]
    return composed, [*broken, *mistyped]


def _with_hooks(
    composed: Composed, merged: Values, config_file: Path | None
) -> tuple[Composed, Values]:
    """Return the configuration with the absolute path and the digest of the file of hooks, and what it was made
    of; the copy of a run lies beside its configuration."""
    key, asked, pinned = "hooks.path", composed.config.hooks.path, composed.config.hooks.sha256
    assert asked is not None
    of_run = config_file is not None and not composed.by_hand(key)
    file = Path(asked).expanduser().absolute()
    if of_run and config_file is not None:
        file = config_file.absolute().parent / hooks.file_name(pinned or "")
    elif composed.by_hand(key) and not composed.by_hand("hooks.sha256"):
        pinned = None
    try:
        found = hooks.read(file)
    except hooks.HookError as error:
        message = f"{file}: {error}" if str(file) != asked else str(error)
        refuse([Violation(key, asked, composed.source(key), message)])
    if found.sha256 != pinned and (of_run or pinned is not None):
        message = f"{file} has another digest than hooks.sha256={pinned}: it was changed since"
        ways = (override(key, str(file)),) if of_run else ("hooks.sha256=null",)
        refuse([Violation(key, asked, composed.source(key), message, ways)])
    if found.sha256 != composed.config.hooks.sha256:
        record(composed.history, "hooks.sha256", Setting(found.sha256, str(file)))
    section = {"path": escape(key, str(file)), "sha256": found.sha256}
    merged = {**merged, "hooks": {**merged["hooks"], **section}}
    changed, _ = _converted(composed, merged)
    return changed, merged


def _with_shape(composed: Composed, merged: Values, source: str, values: Values) -> Composed:
    """Return the configuration with a model's shape, which the values of other keys may refer to."""
    model = dict(merged["model"])
    for name, value in values.items():
        plain = asdict(value) if isinstance(value, RopeScaling) else value
        if value != getattr(composed.config.model, name):
            leaves = {f".{k}": v for k, v in plain.items()} if plain is not value else {"": value}
            for path, leaf in leaves.items():
                record(composed.history, f"model.{name}{path}", Setting(leaf, source))
        model[name] = escape(f"model.{name}", plain)
    shaped, violations = _converted(composed, {**merged, "model": model})
    if violations:
        refuse(violations)
    return shaped


def _begun_from_run(composed: Composed, merged: Values, folder: Path) -> Composed:
    """Return the configuration of a job that begins with the shape and the weights of a run."""
    key, asked = pretrained.KEY, composed.config.model.init_from
    other = composed.config.run.from_run
    if other is not None:
        message = f"and run.from_run={shown(other)} both name what to begin from"
        source, remove = composed.source(key), (f"{key}=null",)
        refuse([Violation(key, asked, source, message, remove)], kind="run")
    shape = frozen.load(folder / RUN_CONFIG).model
    found = pretrained.Pretrained(folder, shape, RUN_CONFIG)
    values = pretrained.take_shape(composed, found) | {"init_from": None}
    run = {**merged["run"], "from_run": escape("run.from_run", str(folder))}
    record(composed.history, "run.from_run", Setting(str(folder), f"{key}={asked}"))
    return _with_shape(composed, {**merged, "run": run}, str(folder / RUN_CONFIG), values)


def _begun_from_adapters(
    composed: Composed, merged: Values, folder: Path
) -> tuple[Composed, Values]:
    """Return the configuration of a job that continues with adapters of PEFT, and what it was made of."""
    try:
        base, values = peft.read_settings(folder)
    except UnsupportedError as error:
        pretrained.refuse_model(composed, pretrained.KEY, composed.config.model.init_from, error)
    source, wrong = str(folder / peft.SETTINGS), []
    for name, value in values.items():
        key, asked = f"lora.{name}", getattr(composed.config.lora, name)
        if composed.by_hand(key) and asked != value:
            message, advice = f"is {shown(value)} in {source}", (override(key, value),)
            wrong.append(Violation(key, asked, composed.source(key), message, advice))
    if wrong:
        refuse(wrong, kind="model")
    lora = {**merged["lora"], **values, "init_from": escape("lora.init_from", str(folder))}
    model = {**merged["model"], "init_from": escape(pretrained.KEY, base)}
    for name, value in [*values.items(), ("init_from", str(folder))]:
        record(composed.history, f"lora.{name}", Setting(value, source))
    record(composed.history, pretrained.KEY, Setting(base, source))
    changed = {**merged, "lora": lora, "model": model}
    converted, violations = _converted(composed, changed)
    if violations:
        refuse(violations)
    return converted, changed


def _run_folder(config: Config) -> Path | None:
    """Return the run directory that `model.init_from` names, by its path or in `run.root`, or None."""
    asked = Path(str(config.model.init_from)).expanduser()
    for folder in (asked, Path(config.run.root).expanduser() / asked):
        if (folder / RUN_CONFIG).is_file() and (folder / "checkpoints").is_dir():
            return folder.absolute()
    return None


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


def _merged(layers: list[Layer], settings: list[tuple[str, Setting]]) -> Values:
    values: Values = {}
    for layer in layers:
        values = reference.merged(values, layer.content)
    for key, setting in settings:
        values = _with(values, key.split("."), setting.value)
    return values


def _with(values: Any, path: list[str], new: Any) -> Values:
    """Set a key as the command line does: a mapping is merged into the existing one, {} empties it."""
    old, (name, *inner) = values if isinstance(values, dict) else {}, path
    if inner:
        return {**old, name: _with(old.get(name), inner, new)}
    if not isinstance(new, dict) or not new or not isinstance(old.get(name), dict):
        return {**old, name: new}
    merged = old[name]
    for key, entry in new.items():
        merged = _with(merged, [key], entry)
    return {**old, name: merged}


def _recipe_name(library: Library) -> str | None:
    if library.config_file is not None:
        path = library.config_file.resolve()
        return path.parent.name if path.stem == ROOT else path.stem
    name = library.choices.get(RECIPE)
    return Path(name).stem if name and is_path(name) else name and name.replace("/", "-")


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

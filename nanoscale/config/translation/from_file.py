"""Recipes of configurations of other trainers, and what `train` says of them."""

from __future__ import annotations

import shlex
import tempfile
from pathlib import Path
from typing import Any

from nanoscale.common.devices import Devices, cores
from nanoscale.common.errors import UserError
from nanoscale.config import reference
from nanoscale.config.composing.compose import compose
from nanoscale.config.hf.pretrained import NoSuchModelError, locate
from nanoscale.config.rules import backends, check, data, layout, numbers, only_with, pipeline
from nanoscale.config.translation.conversion import Conversion, Translation
from nanoscale.config.translation.deepspeed_json import translate
from nanoscale.config.values import yaml_file
from nanoscale.config.values.convert import convert
from nanoscale.config.values.other_trainers import (
    Kind,
    kind_of,
    read_json,
    read_settings,
    refuse_unread,
)
from nanoscale.config.violations import override, shown


def convert_file(file: Path, dp: int | None = None) -> tuple[Kind, Translation]:
    """Translate a file into a recipe, with this data-parallel degree. Raises a UserError for unknown files."""
    settings = read_settings(file)
    kind = kind_of(settings)
    if kind is None or kind.unread:
        refuse_unread(file, settings, kind)
    if kind.name == "deepspeed":
        result = translate(settings, dp, strict=False)
        if result.values.get("parallel.tp", 1) != 1:
            result.values["parallel.sequence_parallel"] = False
    else:
        result = Conversion(kind, settings, file.parent).run(dp, _deepspeed_values)
    _drop_refused(result)
    if not result.values.keys() & {"model.init_from", "model.layers", "model.name"}:
        which = "set model.init_from=NAME or model=NAME; otherwise model=debug trains"
        result.became.insert(0, ("(model)", f"the file names no model that is known here: {which}"))
    return kind, result


def _deepspeed_values(file: Path) -> dict[str, Any]:
    return translate(read_json(file), strict=False).values


def verdict(result: Translation, file: Path, out: Path | None) -> list[str]:
    """Return what the rules of `train` say of a recipe, and the next command.

    The rules see GPUs as many as the layout needs. The data, the loggers' packages and the weights may be
    elsewhere: a model that is not here has the shape of a packaged one.
    """
    values = {it: value for it, value in result.values.items() if not it.startswith("logger.")}
    if values.pop("train.epochs", None):  # the data say how many steps these are
        values["train.steps"] = 1_000_000
    words, name = [], values.get("model.init_from")
    lines = []
    try:
        if name:
            locate(name, weights=False)
    except NoSuchModelError:
        shape = "qwen3-30b-a3b" if values.get("parallel.ep", 1) > 1 else "llama-8b"
        words = [f"model={shape}", "model.init_from=null"]
        lines = [f"{name} is not here: the rules see the shape of model={shape}"]
    gpus = Devices("cuda", result.ranks, ("NVIDIA H100 80GB HBM3",) * result.ranks, cores())
    with tempfile.TemporaryDirectory() as folder:
        recipe = Path(folder) / "translated.yaml"
        recipe.write_text(yaml_file.to_yaml(reference.nested(values)), encoding="utf-8")
        try:
            check(compose([override("recipe", str(recipe)), *words]), gpus)
        except UserError as error:
            elsewhere = ("data.path", *(["model.init_from"] if words else []))
            for it in error.violations:
                text = f"{it.key}={shown(it.value)} {it.message}"
                if not any(key in text for key in elsewhere):
                    advice = f"; set {it.suggestions[0]}" if it.suggestions else ""
                    lines.append(f"error: `train` refuses this recipe: {text}{advice}")
    path = out or Path("mine.yaml")
    train = (
        f"nanoscale train {override('recipe', str(path) if path.is_absolute() else f'./{path}')}"
    )
    if out is None:
        train = f"nanoscale config from {shlex.quote(str(file))} --out {path} && {train}"
    if not lines or not lines[-1].startswith("error"):
        lines.append("this recipe trains: the rules of `train` accept it")
    return [*lines, f"next: {train}"]


_RULES = (
    *(*only_with.OF_LAYOUT, *only_with.OF_JOB, *only_with.OF_TEXT, *layout.RULES, *pipeline.RULES),
    *(*layout.EXECUTION, *numbers.RULES, *numbers.PRECISION, *numbers.ATTENTION),
    *(
        *backends.RULES,
        *backends.JOB,
        *(it for it in data.OF_ANSWERS if it.key.startswith("data.")),
    ),
)


def _drop_refused(result: Translation) -> None:
    """Drop keys that rules refuse beside the others, whatever the machine and the data."""
    for rule in _RULES * 2:  # a key that was dropped may have been needed by another
        dp = {"parallel.dp": result.least_dp}
        config, _ = convert(reference.nested(dp | result.values), str)
        reads_shape = any(it.startswith("model.") for it in rule.reads)
        if (
            rule.key not in result.values
            or rule.holds(config)
            or (reads_shape and "model.layers" not in result.values)
        ):
            continue
        text = rule.message if isinstance(rule.message, str) else rule.message(config)
        name = f"({rule.key}={shown(result.values.pop(rule.key))})"
        result.became.append((name, f"left out: {text.format(c=config)}"))

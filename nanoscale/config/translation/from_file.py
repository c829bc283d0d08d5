"""Recipes of configurations of other trainers, and what `train` says of them.

DeepSpeed's settings are from its documentation (docs/_pages/config-json.md). A value of "auto", as in files
for transformers' Trainer, leaves the key to nanoscale.
"""

import shlex
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nanoscale.common.devices import Devices, cores
from nanoscale.common.errors import UserError, Violation
from nanoscale.common.units import listed
from nanoscale.config import reference
from nanoscale.config.composing.compose import compose
from nanoscale.config.deepspeed import OWNED, SAME
from nanoscale.config.hf.pretrained import NoSuchModelError, locate
from nanoscale.config.optimizers import OPTIMIZERS, by_other_name
from nanoscale.config.rules import backends, check, data, layout, numbers, only_with, pipeline
from nanoscale.config.translation.conversion import Conversion, Translation
from nanoscale.config.values import other_trainers, yaml_file
from nanoscale.config.values.convert import convert
from nanoscale.config.values.equivalents import Equivalent, equivalent
from nanoscale.config.violations import override, refuse, shown

_OBJECTS = (
    *("bf16", "fp16", "data_types", "optimizer", "optimizer.params", "scheduler"),
    *("scheduler.params", "zero_optimization", "activation_checkpointing"),
)
"""Settings whose value is an object."""
_BATCH, _MICRO = "train_batch_size", "train_micro_batch_size_per_gpu"
_ACCUMULATION = "gradient_accumulation_steps"
_UNKNOWN_OPTIMIZER = (
    f"is not an optimizer here; there are {listed([*OPTIMIZERS])}. "
    "Unless optimizer=NAME is chosen, AdamW trains"
)


def translate(
    settings: Mapping[str, Any], dp: int | None = None, *, strict: bool = True
) -> Translation:
    """Translate DeepSpeed's settings.

    Args:
        settings: the content of the JSON.
        dp: the data-parallel degree of the job, if the JSON has a global batch only by accumulation.
        strict: refuse settings that cannot be honored; otherwise they are listed as without a counterpart.

    Raises:
        UserError: with every setting that cannot be honored, or has a value of a wrong type.
    """
    result = _DeepSpeed(settings).translate(dp)
    if result.violations and strict:
        refuse(result.violations)
    return result


def _row(path: str) -> Equivalent | None:
    """Return the row of the table for the path of a setting, not for its last name alone."""
    if path in SAME:
        return Equivalent(keys=(SAME[path],))
    return equivalent(f"deepspeed.{path}", path.count(".") + 2)


class _DeepSpeed(Conversion):
    """The settings of a JSON; those without a key are for `backend.extra`."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        super().__init__(next(it for it in other_trainers.kinds() if it.name == "deepspeed"), {})
        self.violations: list[Violation] = []
        self.extra: dict[str, Any] = {}
        flat = reference.flat(settings, stop=lambda path: bool((row := _row(path)) and row.keys))
        self.settings = dict(sorted(flat.items(), key=lambda it: it[0].startswith("scheduler")))

    def translate(self, dp: int | None) -> Translation:
        self.values["backend.name"] = "deepspeed"
        self._precision()
        self._accumulation(dp)
        for path, value in self.settings.items():
            if not self.became.get(path):
                self.became[path] = self._take(path, value)
        values = self.values
        if values.get("scheduler.name", "cosine") != "cosine":
            values["scheduler.min_ratio"] = 0.0
            if "scheduler.params.warmup_type" not in self.settings:
                self.became["scheduler"] = "a linear warm-up; DeepSpeed's default is logarithmic"
        if self.settings.get("sequence_parallel_size", 1) not in (1, "auto"):
            values["parallel.cp_method"] = "ulysses"
        if self.settings.get("wandb.enabled") is False:
            values.pop("logger.project", None)
        if self.extra:
            values["backend.extra"] = reference.nested(self.extra)
        return Translation(values, [*self.became.items()], self.violations, dp)

    def _refuse(self, path: str, value: Any, message: str) -> str:
        self.violations.append(Violation(path, value, "the JSON", message))
        return f"no counterpart: {message}"

    def _take(self, path: str, value: Any) -> str:
        row, text = _row(path), shown(value).lower()
        if path in _OBJECTS:
            return self._refuse(path, value, "must be an object: {…}; remove it")
        if isinstance(value, Mapping):
            return self._refuse(path, value, "must be one value, not an object; remove it")
        if value == "":
            return "not set"
        if path == "optimizer.type":
            name = by_other_name(str(value))
            row, value = Equivalent(keys=("optimizer.name",)), name or value
        if path == "optimizer.params.betas" and value != "auto":
            if not isinstance(value, list) or len(value) != 2:
                return self._refuse(path, value, "must be a list of two numbers")
            self.values |= {"optimizer.beta1": value[0], "optimizer.beta2": value[1]}
            return f"optimizer.beta1={value[0]} optimizer.beta2={value[1]}"
        if path == "fp16.initial_scale_power" and type(value) is int and 0 <= value < 128:
            self.values["precision.loss_scale"] = 2.0**value
            return f"precision.loss_scale={2.0**value:g}"
        if row is not None and row.keys:
            if value == "auto":
                return f"left to nanoscale ({row.keys[0]})"
            became = self._as_key(row, value)
            message = became.removeprefix("no counterpart: ")
            if message == became:
                return became
            unknown = path == "optimizer.type"
            return self._refuse(path, value, _UNKNOWN_OPTIMIZER if unknown else message)
        if row is not None and text in row.overrides:
            for word in row.overrides[text].split():
                self._set(word)
            return row.overrides[text] or "as here"
        return self._without_key(path, value)

    def _without_key(self, path: str, value: Any) -> str:
        """Take a setting that has no key, by the row of the nearest object that contains it."""
        around = path
        while around:
            row = _row(around)
            if row is not None and not row.keys and (around == path or not row.overrides):
                if row.fault:
                    return self._refuse(path, value, row.fault)
                return row.note.removeprefix("is ")
            if value != "auto" and around in OWNED:
                return self._refuse(path, value, "has no key of nanoscale")
            around = around.rpartition(".")[0]
        if value == "auto":
            return 'not needed: it is "auto"'
        self.extra[path] = value
        return "backend.extra, as it is"

    def _precision(self) -> None:
        """Take the dtype; settings of the other dtype are not needed."""
        enabled = {it: self.settings.get(f"{it}.enabled", False) for it in ("bf16", "fp16")}
        on = [name for name, value in enabled.items() if value is True]
        compute = on[0] if on else "auto" if "auto" in enabled.values() else "fp32"
        self.values["precision.compute"] = compute
        for path, value in self.settings.items():
            name, _, leaf = path.partition(".")
            if name in enabled and leaf == "enabled":
                is_known = isinstance(value, bool) or value == "auto"
                wrong = 'must be true, false or "auto"'
                became = f"precision.compute={compute}"
                self.became[path] = became if is_known else self._refuse(path, value, wrong)
            elif leaf and (name == "fp16" != compute or (name == "bf16" and not enabled["bf16"])):
                self.became[path] = f"not needed: precision.compute is {compute}"

    def _accumulation(self, dp: int | None) -> None:
        """Take the accumulation, which follows here from the batches and the data-parallel degree."""
        names = (_ACCUMULATION, _BATCH, _MICRO)
        for path in names:
            value = self.settings.get(path, "auto")
            if value != "auto" and (type(value) is not int or value < 1):
                self.became[path] = self._refuse(
                    path, value, 'must be an integer, at least 1, or "auto"'
                )
                return
        steps, batch, micro = (self.settings.get(it) for it in names)
        batch, micro = (None if it == "auto" else it for it in (batch, micro))
        became, wrong = "not needed: it follows from the batches", ""
        if steps in (None, "auto"):
            pass
        elif batch and micro:
            product = micro * steps * (dp or 1)
            if batch % product or (dp and batch != product):
                what = f"{micro}·{steps}" + (f"·{dp} = {product}" if dp else " does not divide it")
                wrong = f"contradicts the batches ({what}, {batch}); remove one of the three"
        elif dp is None:
            wrong = "gives a batch only with the data-parallel degree: give it with --dp N"
        elif batch and batch % (steps * dp):
            wrong = f"and dp {dp} do not divide {_BATCH}={batch}"
        elif batch or micro:
            key = "train.global_batch" if micro else "train.micro_batch"
            self.values[key] = micro * steps * dp if micro else batch // (steps * dp)
            became = f"{key}={self.values[key]} (with dp {dp})"
        if steps is not None:
            self.became[_ACCUMULATION] = (
                self._refuse(_ACCUMULATION, steps, wrong) if wrong else became
            )


def convert_file(file: Path, dp: int | None = None) -> tuple[other_trainers.Kind, Translation]:
    """Translate a file into a recipe, with this data-parallel degree. Raises a UserError for unknown files."""
    settings = other_trainers.read_settings(file)
    kind = other_trainers.kind_of(settings)
    if kind is None or kind.unread:
        other_trainers.refuse_unread(file, settings, kind)
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
    return translate(other_trainers.read_json(file), strict=False).values


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
        recipe.write_text(yaml_file.to_yaml(reference.nested(values)), "utf-8")
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

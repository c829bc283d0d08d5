"""Configurations of other trainers in nanoscale's keys, by `values/equivalents.yaml`.

A name is looked up with its kind first (`axolotl.rl`).
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from nanoscale.common.errors import UserError, Violation
from nanoscale.config import from_deepspeed, reference
from nanoscale.config.composing.library import ROOT, Library
from nanoscale.config.from_deepspeed import Translation
from nanoscale.config.objectives import PAIRED
from nanoscale.config.rules import backends, layout, numbers, only_with, pipeline
from nanoscale.config.values import yaml_file
from nanoscale.config.values.convert import convert, fits
from nanoscale.config.values.equivalents import Equivalent, equivalent, spelling
from nanoscale.config.values.other_trainers import (
    Kind,
    flat_settings,
    kind_of,
    read_settings,
    refuse_unknown,
    typed_value,
)
from nanoscale.config.violations import shown

_OFF = ("false", "0", "no", "none", "null", "")


def convert_file(file: Path, dp: int | None = None) -> tuple[Kind, Translation]:
    """Translate a file into a recipe, with this data-parallel degree. Raises a UserError for unknown files."""
    settings = read_settings(file)
    kind = kind_of(settings)
    if kind is None:
        refuse_unknown(file, settings)
    if kind.name == "deepspeed":
        result = from_deepspeed.translate(settings, dp, strict=False)
        if result.values.get("parallel.tp", 1) != 1:
            result.values["parallel.sequence_parallel"] = False
    else:
        result = _Conversion(kind, settings).run(dp)
    _drop_refused(result)
    return kind, result


def _in_batches(value: float, values: Mapping[str, int]) -> int:
    return math.ceil(value / values["train.global_batch"])


_DERIVED: dict[str, tuple[str, Callable[[Any, Mapping[str, Any]], Any]]] = {
    "min_lr": ("scheduler.min_ratio", lambda value, its: round(value / its["optimizer.lr"], 6)),
    "train_samples": ("train.steps", _in_batches),
    "lr_warmup_samples": ("scheduler.warmup_steps", _in_batches),
    "eval_iters": ("train.eval_samples", lambda value, its: value * its["train.global_batch"]),
    "distributed_timeout_minutes": ("launcher.collective_timeout_s", lambda value, _: value * 60),
}
"""Names whose values follow from other keys, in this order: the key, and a function of value and keys."""


def _said(note: str) -> str:
    """Return a note of the table as what became of a setting."""
    return note.removeprefix("is ").replace("does not exist here", "no counterpart")


def _refuse_other_task(path: str, value: Any, became: str, kind: Kind) -> None:
    """Refuse a way of training that is not here: the other keys would make a recipe for another one."""
    meant = equivalent(f"{kind.name}.{path}")
    if meant and "train.objective" in meant.about and became.startswith("no counterpart"):
        told = "there are supervised fine-tuning, dpo, orpo, distill, classify and masked"
        wrong = Violation(path, value, "", f"this way of training is not here: {told}")
        raise UserError("config", f"{path}={shown(value)}: {wrong.message}", [wrong])


class _Conversion:
    """The settings of one file on their way into keys."""

    def __init__(self, kind: Kind, settings: Mapping[str, Any]) -> None:
        self.kind = kind
        flat = flat_settings(settings)
        if "model.flavor" in flat:  # torchtitan's size of model.name
            flat["model.flavor"] = f"{flat.get('model.name')} {flat['model.flavor']}"
        self.settings = {path.removeprefix("MODEL_ARGS."): value for path, value in flat.items()}
        self.names = {spelling(path).rpartition(".")[2]: path for path in self.settings}
        self.became: dict[str, str] = {}
        self.off: dict[str, Any] = {}
        """Keys of flags that are off; flags that are on win over them, and keys win over flags."""
        self.flags: dict[str, Any] = {}
        self.keys: dict[str, Any] = {}

    def run(self, dp: int | None) -> Translation:
        for path, value in self.settings.items():
            self.became[path] = self._take(path, value)
            _refuse_other_task(path, value, self.became[path], self.kind)
        self._add_defaults()
        values = self.off | self.flags | self.keys
        if "train.preference_beta" in values and "train.objective" not in values:
            values["train.objective"] = "orpo" if "orpo" in str(self.settings).lower() else "dpo"
            self.became["(beta)"] = f"train.objective={values['train.objective']} is assumed"
        self._batches(values, dp)
        self._derive(values)
        self._finish(values)
        order = [key for key in reference.declared() if key in values]
        return Translation({key: values[key] for key in order}, [*self.became.items()])

    def _take(self, path: str, value: Any) -> str:
        """Take a setting as keys; return what it became."""
        if value in (None, "", [], {}) or (value == -1 and not isinstance(value, bool)):
            return "not set"
        meant = equivalent(f"{self.kind.name}.{path}")
        while meant is None and "." in path:  # a note on the whole section
            path = path.rpartition(".")[0]
            meant = equivalent(f"{self.kind.name}.{path}")
            meant = None if meant and (meant.keys or meant.overrides) else meant
        if meant is None:
            return "no counterpart"
        if isinstance(value, str) and "$" in value:
            which = f"; set {meant.keys[0]}=…" if meant.keys else ""
            return f"not known: {value} is a variable{which}"
        if meant.keys:
            return self._as_key(meant, value)
        if meant.overrides:
            return self._as_flag(meant, value)
        if shown(value).lower() in _OFF:
            return "off, as here"
        return _said(meant.note) if meant.note else f"see {meant.about[0]}"

    def _as_key(self, meant: Equivalent, value: Any) -> str:
        key = meant.keys[0]
        if key == "data.path":
            return self._as_data(value)
        if key == "recipe":
            return "no counterpart"
        if isinstance(value, str) and not fits(key, value):
            value = typed_value([value])
        if not fits(key, value):
            rule = reference.declared()[key]
            return f"no counterpart: {key} must be {rule.type} {rule.bounds}".strip()
        self.keys[key] = value
        if key in ("launcher.devices", "launcher.nodes"):
            return "for the global batch alone: a job takes the devices that there are"
        return f"{key}={shown(value)}"

    def _as_data(self, value: Any) -> str:
        first = str(value[0] if isinstance(value, list) else value)
        self.keys["data.source"] = "megatron"
        if isinstance(value, list) and len(value) > 1:
            return "several sources: data.mixture names several prepared folders"
        if first.startswith(("/", ".", "~")) or Path(first).suffix or Path(first).exists():
            self.keys["data.path"] = first
            return f"data.path={first}"
        prepare = f"nanoscale data prepare hf:{shlex.quote(first)} --out data"
        return f"a dataset of the hub: type `{prepare} --tokenizer …`, and set data.path=data"

    def _as_flag(self, meant: Equivalent, value: Any) -> str:
        texts = [shown(it).lower() for it in (value if isinstance(value, list) else [value])]
        result = []
        for text in filter(None, texts):
            first = meant.overrides.get(text.split()[0])
            words = meant.overrides.get(text, meant.overrides.get("") if first is None else first)
            for word in (words or "").split():
                self._set(self.off if text in _OFF else self.flags, word)
            known = ", ".join(filter(None, meant.overrides))
            why = _said(meant.note) or f"no counterpart: {text} is none of {known}"
            result.append(words or ("off, as here" if text in _OFF else why))
        return ", ".join(dict.fromkeys(result))

    def _set(self, values: dict[str, Any], word: str) -> None:
        """Set the key of an override, or the keys of an option of a group."""
        name, _, text = word.partition("=")
        if name in Library.groups():
            usual, chosen = _option(name, text)
            values |= usual | values | chosen
        else:
            value = yaml_file.parse(word.replace("=", ": ", 1), word).content[name]
            is_list = isinstance(value, list)
            values[name] = [*(values.get(name) or []), *value] if is_list else value

    def _add_defaults(self) -> None:
        known = {*self.off, *self.flags, *self.keys}
        for name, value in self.kind.defaults.items():
            new = _Conversion(self.kind, {})
            text = new._take(name, value)
            added = new.off | new.flags | new.keys
            derived = {key for it, (key, _) in _DERIVED.items() if spelling(it) in self.names}
            if missing := {key: it for key, it in added.items() if key not in known | derived}:
                self.off |= missing
                self.became[f"({name}={shown(value)}, not in the file)"] = text

    def _batches(self, values: dict[str, Any], dp: int | None) -> None:
        """Set the global batch: micro batch · accumulation · data-parallel degree."""
        devices, nodes = values.pop("launcher.devices", None), values.pop("launcher.nodes", 1)
        micro = values.get("train.micro_batch")
        if values.get("train.objective") in PAIRED and micro:
            micro = values["train.micro_batch"] = 2 * micro
            self.became["(pairs)"] = f"train.micro_batch={micro} (two sequences of each pair)"
        if micro is None or "train.global_batch" in values:
            return
        ranks = math.prod(values.get(f"parallel.{it}", 1) for it in ("tp", "pp", "cp"))
        shards = self._number("data_parallel_shard_degree") or -1
        if dp is None and shards > 0:
            dp = values["parallel.dp"] = shards * values.get("parallel.dp_replicate", 1)
        if dp is None and devices:
            dp = max(1, devices * (1 if self.kind.name == "accelerate" else nodes) // ranks)
        steps = self._number("gradient_accumulation_steps") or 1
        values["train.global_batch"] = batch = micro * steps * (dp or 1)
        why = f"{micro} · {steps} · {dp or 1}"
        if dp is None:
            why += "; assumes 1 data-parallel rank, and --dp N says another number"
        self.became["(global batch)"] = f"train.global_batch={batch} ({why})"

    def _number(self, name: str) -> Any:
        value = self.settings.get(self.names.get(spelling(name), ""))
        return value if isinstance(value, (int, float)) and not isinstance(value, bool) else None

    def _derive(self, values: dict[str, Any]) -> None:
        for name, (key, function) in _DERIVED.items():
            if (value := self._number(name)) is None or key in self.keys:
                continue
            with suppress(KeyError, ZeroDivisionError):
                result = function(value, values)
                if fits(key, result):
                    values[key] = result
                    self.became[self.names[spelling(name)]] = f"{key}={shown(result)}"

    def _finish(self, values: dict[str, Any]) -> None:
        """Resolve what two settings say together."""
        if "train.steps" in values and values.pop("train.epochs", None):
            self.became["(epochs)"] = "not needed: train.steps decides"
        if values.get("scheduler.warmup_steps"):
            values.pop("scheduler.warmup", None)
        if values.get("precision.compute") != "fp32":
            values.pop("precision.tf32", None)
        if values.get("logger.project"):
            values.setdefault("logger.wandb", "online")
        if self.kind.name != "accelerate" and "data.path" not in values:
            values["data.source"] = self.flags.get("data.source", "megatron")
            if values["data.source"] == "megatron":
                self.became["(data)"] = "set data.path=…, a file of texts or a prepared folder"
        if "model.layers" in values:  # keys of the default option return to the schema's
            for key, value in _option("model", "debug")[0].items():
                values.setdefault(key, value)
        if self.kind.name == "megatron" and (hidden := values.get("model.hidden")):
            gated = values.get("model.mlp") == "swiglu"
            values["model.ffn"] = self.keys.get("model.ffn") or (
                hidden * 8 // 3 // 64 * 64 if gated else 4 * hidden
            )


_RULES = (
    *(*only_with.OF_LAYOUT, *only_with.OF_JOB, *only_with.OF_TEXT, *layout.RULES, *pipeline.RULES),
    *(*layout.EXECUTION, *numbers.RULES, *numbers.PRECISION, *numbers.ATTENTION),
    *(*backends.RULES, *backends.JOB),
)


def _drop_refused(result: Translation) -> None:
    """Drop keys that rules refuse beside the others, whatever the machine and the data."""
    for rule in _RULES * 2:  # a key that was dropped may have been needed by another
        config, _ = convert(result.recipe, str)
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


def _option(group: str, name: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the schema's values of the keys that the default option of a group sets, and an option's keys."""
    library = Library()
    entries = library.serve(ROOT).content["defaults"]
    usual = next(it[group] for it in entries if isinstance(it, dict) and group in it)
    keys = {f"{group}.{key}" for key in library.serve(f"{group}/{usual}").content}
    content = library.serve(f"{group}/{name}").content
    before = {key: reference.declared()[key].default for key in keys if key in reference.declared()}
    key = f"{group}.name"
    named = {key: name} if key in reference.declared() and fits(key, name) else {}
    return before, named | {f"{group}.{key}": it for key, it in reference.flat(content).items()}

"""The settings of a file of another trainer on their way into keys, by `values/equivalents.yaml`.

A name is looked up with its kind first (`axolotl.rl`).
"""

import math
import os
import re
import shlex
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nanoscale.common.errors import UserError, Violation
from nanoscale.config import reference
from nanoscale.config.composing.library import ROOT, Library
from nanoscale.config.objectives import PAIRED
from nanoscale.config.reference import Values
from nanoscale.config.values import yaml_file
from nanoscale.config.values.convert import fits
from nanoscale.config.values.equivalents import Equivalent, equivalent, spelling
from nanoscale.config.values.other_trainers import Kind, flat_settings, typed_value
from nanoscale.config.violations import refuse, shown

_OFF = ("false", "0", "no", "none", "null", "disabled", "")


@dataclass
class Translation:
    """The settings of a file in nanoscale's terms."""

    values: Values = field(default_factory=dict)
    """Dotted key → value."""
    became: list[tuple[str, str]] = field(default_factory=list)
    """Each setting, by its path, and what it became."""
    violations: list[Violation] = field(default_factory=list)
    """The settings that cannot be honored."""
    dp: int | None = None
    """The data-parallel degree of the job; None if it is not known."""

    @property
    def recipe(self) -> Values:
        """The values as the content of a recipe."""
        return reference.nested(self.values)

    @property
    def least_dp(self) -> int:
        """The data-parallel degree, or the least one of the layout."""
        return self.dp or _least_dp(self.values)

    @property
    def ranks(self) -> int:
        """The least number of devices."""
        return self.least_dp * _copy(self.values)


def _copy(values: Values) -> int:
    return math.prod(values.get(f"parallel.{it}", 1) for it in ("tp", "pp", "cp"))


def _least_dp(values: Values) -> int:
    least = (values.get(f"parallel.{it}", 1) for it in ("ep", "dp_replicate"))
    return int(values.get("parallel.dp") or math.lcm(*least))


def _in_batches(value: float, values: Mapping[str, int]) -> int:
    return math.ceil(value / values["train.global_batch"])


_DERIVED: dict[str, tuple[str, Callable[[Any, Values], Any]]] = {
    "min_lr": ("scheduler.min_ratio", lambda value, its: round(value / its["optimizer.lr"], 6)),
    "train_samples": ("train.steps", _in_batches),
    "lr_warmup_samples": ("scheduler.warmup_steps", _in_batches),
    "eval_iters": ("train.eval_samples", lambda value, its: value * its["train.global_batch"]),
    "distributed_timeout_minutes": ("launcher.collective_timeout_s", lambda value, _: value * 60),
    "decay_ratio": ("scheduler.decay_steps", lambda value, its: round(value * its["train.steps"])),
}
"""Names whose values follow from other keys, in this order: the key, and a function of value and keys."""
_OF_PAIRS = re.compile("chosen|rejected|max_prompt_length")
"""Names and columns that files on pairs of answers have."""
_SHARDS = ("data_parallel_shard_degree", "dp_shard_size", "parallelism_config_dp_shard_size")


def _said(note: str) -> str:
    """Return a note of the table as what became of a setting."""
    return note.removeprefix("is ").replace("does not exist here", "no counterpart")


def _refuse_other_task(path: str, value: Any, became: str, kind: Kind) -> None:
    """Refuse a way of training that is not here: the other keys would make a recipe for another one."""
    meant = equivalent(f"{kind.name}.{path}")
    if meant and "train.objective" in meant.about and became.startswith("no counterpart"):
        told = "there are supervised fine-tuning, dpo, orpo, kto, distill, classify and masked"
        refuse([Violation(path, value, "", f"this way of training is not here: {told}")])


class Conversion:
    """The settings of one file on their way into keys."""

    def __init__(self, kind: Kind, settings: Values, folder: Path = Path()) -> None:
        self.kind, self.folder = kind, folder
        self.settings = flat = flat_settings(settings)
        if "model.flavor" in flat:  # torchtitan's size of model.name
            flat["model.flavor"] = f"{flat.get('model.name')} {flat['model.flavor']}"
        self.names = {spelling(path).rpartition(".")[2]: path for path in self.settings}
        self.became = dict.fromkeys(flat, "")
        self.values: Values = {}
        self.locked: set[str] = set()
        """Keys that others do not change: values win over flags, and both over flags that are off."""
        self.rows: set[int] = set()
        """Rows of the table that settings of the file have, by their identity."""
        self.sources = _sources(settings)

    def run(self, dp: int | None, read_deepspeed: Callable[[Path], Values]) -> Translation:
        for turn in sorted({*map(self._turn, self.settings)}):
            for path in (it for it in self.settings if self._turn(it) == turn):
                value = self.settings[path]
                self.became[path] = self._take(path, value)
                _refuse_other_task(path, value, self.became[path], self.kind)
            self.locked |= self.values.keys()
        self._add_defaults()
        values = self.values
        self._add_deepspeed(values, read_deepspeed)
        self._objective(values)
        degree = self._batches(values, dp)
        self._derive(values)
        self._finish(values)
        order = [key for key in reference.declared() if key in values]
        values = {key: values[key] for key in order}
        return Translation(values, [*self.became.items()], dp=degree)

    def _turn(self, path: str) -> int:
        """Return when a setting is taken: values first, then flags, then flags that are off."""
        meant = self._meaning(path)
        if meant is None or meant.keys or not meant.overrides:
            return 0
        return 2 if shown(self.settings[path]).lower() in _OFF else 1

    def _meaning(self, path: str) -> Equivalent | None:
        top = path.partition(".")[0]
        is_known = top == path or top in self.kind.sections.split()
        return equivalent(f"{self.kind.name}.{path}", 1 if is_known else 2)

    def _take(self, path: str, value: Any) -> str:
        """Take a setting as keys; return what it became."""
        if value in (None, "", [], {}) or (value == -1 and not isinstance(value, bool)):
            return "not set"
        meant = self._meaning(path)
        while meant is None and "." in path:  # a note on the whole section
            path = path.rpartition(".")[0]
            meant = equivalent(f"{self.kind.name}.{path}")
            meant = None if meant and (meant.keys or meant.overrides) else meant
        if meant is None:
            return "no counterpart"
        self.rows.add(id(meant))
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
        key = next((it for it in meant.keys if fits(it, value)), meant.keys[0])
        if key == "data.path":
            return self._as_data(value)
        if key == "recipe":
            return "no counterpart"
        if isinstance(value, str) and not fits(key, value):
            value = typed_value([value])
        is_whole = isinstance(value, float) and value.is_integer()
        if is_whole and reference.declared()[key].type != "a number" and fits(key, int(value)):
            value = int(value)
        if not fits(key, value):
            rule = reference.declared()[key]
            return f"no counterpart: {key} must be {rule.type} {rule.bounds}".strip()
        self.values[key] = value
        if key in ("launcher.devices", "launcher.nodes"):
            return "for the global batch alone: a job takes the devices that there are"
        return f"{key}={shown(value)}"

    def _as_data(self, value: Any) -> str:
        self.values["data.source"] = "megatron"
        if not self.sources:
            self.sources = [str(it) for it in (value if isinstance(value, list) else [value])]
        (first, *others) = self.sources
        # False, and no error, for a name that no file can have
        is_here = os.path.exists(first)  # noqa: PTH110
        if not others and (first.startswith(("/", ".", "~")) or is_here):
            self.values["data.path"] = first
            return f"data.path={first}"
        return (
            f"{len(self.sources)} sources, which are prepared first"
            if others
            else "is prepared first"
        )

    def _as_flag(self, meant: Equivalent, value: Any) -> str:
        texts = [shown(it).lower() for it in (value if isinstance(value, list) else [value])]
        result = []
        for text in filter(None, texts):
            first = meant.overrides.get(text.split()[0])
            words = meant.overrides.get(text, meant.overrides.get("") if first is None else first)
            known = ", ".join(filter(None, meant.overrides))
            why = _said(meant.note) or f"no counterpart: {text} is none of {known}"
            if words is not None:
                lost = "off" if text in _OFF else "set by another name" if words else "as here"
                result += [it for it in words.split() if self._set(it)] or [lost]
            else:
                result.append("off, as here" if text in _OFF else why)
        return " ".join(dict.fromkeys(result))

    def _set(self, word: str) -> bool:
        """Set the key of an override, or the keys of an option of a group, unless another setting wins."""
        name, _, text = word.partition("=")
        usual: Values = {}
        if name in Library.groups():
            usual, new = _option(name, text)
            new = {} if new.keys() <= self.locked or usual.keys() & self.locked else new
        else:
            value = yaml_file.parse(word.replace("=", ": ", 1), word).content[name]
            before = self.values.get(name) or [] if name not in self.locked else []
            new = {name: [*before, *value] if isinstance(value, list) else value}
        new = {key: it for key, it in new.items() if key not in self.locked}
        self.values |= ({**usual, **self.values} if new else {}) | new
        return bool(new)

    def _add_defaults(self) -> None:
        derived = {key for it, (key, _) in _DERIVED.items() if spelling(it) in self.names}
        for name, value in self.kind.defaults.items():
            new = Conversion(self.kind, {})
            text = new._take(name, value)
            missing = {it: new.values[it] for it in new.values if it not in self.locked | derived}
            if missing and not new.rows & self.rows:  # no name of the file has the same row
                self.values |= missing
                self.became[f"({name}={shown(value)}, not in the file)"] = text

    def _add_deepspeed(self, values: Values, read: Callable[[Path], Values]) -> None:
        """Add the keys of DeepSpeed's JSON beside the file that the file leaves open."""
        names = ("deepspeed", "deepspeedconfigfile")
        path = next((self.names[it] for it in names if it in self.names), "")
        name = self.settings.get(path)
        if not isinstance(name, str) or not name:
            return
        files = (Path(name), self.folder / name, self.folder / Path(name).name)
        file = next((it for it in files if os.path.isfile(it)), None)  # noqa: PTH113 - as above
        if file is not None:
            open_keys = {"precision.compute": ("auto", "fp32"), "scheduler.min_ratio": (0.0,)}
            added = read(file).items()
            values |= {
                it: value
                for it, value in added
                if it not in values and value not in open_keys.get(it, ())
            }
            self.became[path] = f"backend=deepspeed, with the settings of {file}"
        elif stage := re.search(r"z(?:ero)?[-_]?(?:stage)?[-_]?([0-3])", name):
            values.setdefault("zero.stage", int(stage[1]))
            self.became[path] = (
                f"backend=deepspeed zero.stage={stage[1]}, by its name: {name} is not here"
            )
        else:
            message = (
                f"is not beside the file, and the stage of ZeRO is in it. Copy it to {self.folder}"
            )
            raise UserError("usage", f"{path}={name}: {message}")

    def _objective(self, values: Values) -> None:
        is_paired = "train.preference_beta" in values or _OF_PAIRS.search(str(self.settings))
        if is_paired and "train.objective" not in values:
            named = str(self.settings).lower()
            values["train.objective"] = next((it for it in ("orpo", "kto") if it in named), "dpo")
            self.became["(pairs)"] = f"train.objective={values['train.objective']} is assumed"

    def _batches(self, values: Values, dp: int | None) -> int | None:
        """Set the global batch: micro batch · accumulation · data-parallel degree; return the degree."""
        devices, nodes = values.pop("launcher.devices", None), values.pop("launcher.nodes", 1)
        shards = next((it for name in _SHARDS if (it := self._number(name)) and it > 0), None)
        if dp is None and shards:
            dp = values["parallel.dp"] = shards * values.get("parallel.dp_replicate", 1)
        if dp is None and devices:
            is_total = "numprocesses" in self.names
            dp = max(1, devices * (1 if is_total else nodes) // _copy(values))
        micro = values.get("train.micro_batch")
        if values.get("train.objective") in PAIRED and micro:
            became = f"train.micro_batch={micro}"
            path = next((it for it in self.became if self.became[it] == became), "(pairs)")
            micro = values["train.micro_batch"] = 2 * micro
            self.became[path] = f"train.micro_batch={micro} (two sequences of each pair)"
        if micro is None or "train.global_batch" in values:
            return dp
        steps = self._number("gradient_accumulation_steps") or 1
        degree = dp or _least_dp(values)
        values["train.global_batch"] = batch = micro * steps * degree
        why = f"{micro} · {steps} · {degree}"
        if dp is None:
            ranks = "1 data-parallel rank" if degree == 1 else f"{degree} data-parallel ranks"
            why += f"; assumes {ranks}, and --dp N says another number"
        self.became["(global batch)"] = f"train.global_batch={batch} ({why})"
        return dp

    def _number(self, name: str) -> Any:
        value = self.settings.get(self.names.get(spelling(name), ""))
        return value if isinstance(value, (int, float)) and not isinstance(value, bool) else None

    def _derive(self, values: Values) -> None:
        for name, (key, function) in _DERIVED.items():
            if (value := self._number(name)) is None or key in self.locked:
                continue
            if name == "decay_ratio":
                if values.get("scheduler.name") != "linear":
                    continue
                values["scheduler.name"] = "wsd"  # which decays linearly, at the end
            with suppress(KeyError, ZeroDivisionError):
                result = function(value, values)
                if fits(key, result):
                    values[key] = result
                    decay = "scheduler=wsd " if name == "decay_ratio" else ""
                    self.became[self.names[spelling(name)]] = f"{decay}{key}={shown(result)}"

    def _finish(self, values: Values) -> None:
        """Resolve what two settings say together."""
        if "train.steps" in values and values.pop("train.epochs", None):
            self.became["(epochs)"] = "not needed: train.steps decides"
        for strategy, key in (
            ("savestrategy", "checkpoint.every"),
            ("evalstrategy", "train.eval_every"),
        ):
            if str(self.settings.get(self.names.get(strategy, ""))).lower() in ("no", "false"):
                values.pop(key, None)
        if values.get("scheduler.warmup_steps"):
            values.pop("scheduler.warmup", None)
        if values.get("precision.compute") != "fp32":
            values.pop("precision.tf32", None)
        if values.get("logger.project"):
            values.setdefault("logger.wandb", "online")
        if "model.layers" in values:  # keys of the default option return to the schema's
            for key, value in _option("model", "debug")[0].items():
                values.setdefault(key, value)
        if self.kind.name == "megatron" and (hidden := values.get("model.hidden")):
            gated = values.get("model.mlp") == "swiglu"
            values["model.ffn"] = (
                values.get("model.ffn")
                if "model.ffn" in self.locked
                else (hidden * 8 // 3 // 64 * 64 if gated else 4 * hidden)
            )
        if self.kind.name != "accelerate" and "data.path" not in values:
            values.setdefault("data.source", "megatron")
            if values["data.source"] == "megatron":
                values["data.path"] = "data"
                self.became["(data)"] = f"data.path=data: type `{self._preparation(values)}` first"
                values.pop("data.tokenizer", None)  # the folder has it

    def _preparation(self, values: Values) -> str:
        """Return the command that prepares the data."""
        sources = [it if Path(it).suffix else f"hf:{it}" for it in self.sources] or ["FILE"]
        is_paired = values.get("train.objective") in PAIRED
        is_text = self.kind.name in ("torchtitan", "megatron") or _is_pretraining(self.settings)
        form = "--pairs" if is_paired else "" if is_text else "--chat"
        form = "--rated" if values.get("train.objective") == "kto" else form
        tokenizer = values.get("data.tokenizer") or values.get("model.init_from") or "TOKENIZER"
        template = self.settings.get("chat_template") if self.kind.name == "hf" else None
        words = ["nanoscale data prepare", *map(shlex.quote, sources), "--out data", form]
        words += [
            "--chat-template FILE" if template else "",
            f"--tokenizer {shlex.quote(tokenizer)}",
        ]
        return " ".join(filter(None, words))


def _is_pretraining(settings: Values) -> bool:
    is_text = settings.get("stage") == "pt" or settings.get("datasets.type") == "completion"
    return is_text or any(it.startswith("pretraining_dataset") for it in settings)


_SOURCE = ("id path dataset_name", "config name dataset_config", "split dataset_train_split")
"""The names of a source's dataset, configuration and split."""


def _sources(settings: Values) -> list[str]:
    """Return the data sets that a list of the file names, as `data prepare` writes them after `hf:`."""
    mixture = settings.get("dataset_mixture")
    lists = mixture if isinstance(mixture, Mapping) else settings
    rows = (
        settings.get("dataset_mixer") or lists.get("datasets") or lists.get("pretraining_dataset")
    )
    if isinstance(shares := settings.get("dataset_mixer_list"), list):
        rows = shares[::2]
    rows = [settings] if not rows or isinstance(rows, str) else [*rows]  # of shares, the names
    result = []
    for row in rows:
        row = row if isinstance(row, Mapping) else {"id": row}
        name, config, split = (
            [row[it] for it in words.split() if row.get(it)] for words in _SOURCE
        )
        if name:
            parts = [*name, *config, *(split or (["train"] if config else []))]
            result.append(":".join(map(str, parts)))
    return list(dict.fromkeys(result))


def _option(group: str, name: str) -> tuple[Values, Values]:
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

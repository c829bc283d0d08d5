"""An existing DeepSpeed JSON in nanoscale's keys.

The settings are from DeepSpeed's documentation (docs/_pages/config-json.md). A value of "auto", as in files
for transformers' Trainer, leaves the key to nanoscale.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from nanoscale.common.errors import Violation
from nanoscale.common.units import listed
from nanoscale.config import reference
from nanoscale.config.deepspeed import OWNED, SAME
from nanoscale.config.optimizers import OPTIMIZERS, by_other_name
from nanoscale.config.translation.conversion import Conversion, Translation
from nanoscale.config.values.equivalents import Equivalent, equivalent
from nanoscale.config.values.other_trainers import kinds
from nanoscale.config.violations import refuse, shown

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
        super().__init__(next(it for it in kinds() if it.name == "deepspeed"), {})
        self.violations: list[Violation] = []
        self.extra: dict[str, Any] = {}
        flat = reference.flat(settings, stop=lambda path: bool((row := _row(path)) and row.keys))
        self.settings = dict(sorted(flat.items(), key=lambda it: it[0].startswith("scheduler")))

    def translate(self, dp: int | None) -> Translation:
        self.keys["backend.name"] = "deepspeed"
        self._precision()
        self._accumulation(dp)
        for path, value in self.settings.items():
            if path not in self.became:
                self.became[path] = self._take(path, value)
        values = self.keys
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
            return self._optimizer(str(value))
        if path == "optimizer.params.betas" and value != "auto":
            return self._betas(path, value)
        if path == "fp16.initial_scale_power" and type(value) is int and 0 <= value < 128:
            self.keys["precision.loss_scale"] = 2.0**value
            return f"precision.loss_scale={2.0**value:g}"
        if row is not None and row.keys:
            if value == "auto":
                return f"left to nanoscale ({row.keys[0]})"
            became = self._as_key(row, value)
            message = became.removeprefix("no counterpart: ")
            return became if message == became else self._refuse(path, value, message)
        if row is not None and text in row.overrides:
            for word in row.overrides[text].split():
                self._set(self.keys, word)
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

    def _optimizer(self, kind: str) -> str:
        if (name := by_other_name(kind)) is None:
            return self._refuse("optimizer.type", kind, _UNKNOWN_OPTIMIZER)
        self.keys["optimizer.name"] = name
        return f"optimizer.name={name}"

    def _betas(self, path: str, value: Any) -> str:
        if not isinstance(value, list) or len(value) != 2:
            return self._refuse(path, value, "must be a list of two numbers")
        self.keys |= {"optimizer.beta1": value[0], "optimizer.beta2": value[1]}
        return f"optimizer.beta1={value[0]} optimizer.beta2={value[1]}"

    def _precision(self) -> None:
        """Take the dtype; settings of the other dtype are not needed."""
        enabled = {it: self.settings.get(f"{it}.enabled", False) for it in ("bf16", "fp16")}
        on = [name for name, value in enabled.items() if value is True]
        compute = on[0] if on else "auto" if "auto" in enabled.values() else "fp32"
        self.keys["precision.compute"] = compute
        for path, value in self.settings.items():
            name, _, leaf = path.partition(".")
            if (
                leaf == "enabled"
                and name in enabled
                and not isinstance(value, bool)
                and value != "auto"
            ):
                self.became[path] = self._refuse(path, value, 'must be true, false or "auto"')
            elif leaf == "enabled" and name in enabled:
                self.became[path] = f"precision.compute={compute}"
            elif leaf and (name == "fp16" != compute or (name == "bf16" and not enabled["bf16"])):
                self.became[path] = f"not needed: precision.compute is {compute}"

    def _accumulation(self, dp: int | None) -> None:
        """Take the accumulation, which follows here from the batches and the data-parallel degree."""
        for path in (_BATCH, _MICRO, _ACCUMULATION):
            value = self.settings.get(path, "auto")
            if value != "auto" and (type(value) is not int or value < 1):
                message = 'must be an integer, at least 1, or "auto"'
                self.became[path] = self._refuse(path, value, message)
                self.became.setdefault(_ACCUMULATION, "not known")
        steps = self.settings.get(_ACCUMULATION)
        if steps is None or _ACCUMULATION in self.became:
            return
        batch, micro = (
            None if (it := self.settings.get(name)) == "auto" else it for name in (_BATCH, _MICRO)
        )
        became, wrong = "not needed: it follows from the batches", ""
        if steps == "auto":
            pass
        elif batch and micro:
            product = f"{micro}·{steps}" + (f"·{dp} = {micro * steps * dp}" if dp else "")
            if batch % (micro * steps) or dp not in (None, batch // (micro * steps)):
                which = "·dp is not" if dp else " does not divide"
                names = f"{_MICRO}·{_ACCUMULATION}{which} {_BATCH} ({product}, {batch})"
                wrong = f"contradicts the batches: {names}; remove one of the three"
        elif dp is None:
            wrong = "gives a batch only with the data-parallel degree, which a DeepSpeed JSON does not hold: "
            wrong += "give it with --dp N"
        elif micro:
            self.keys["train.global_batch"] = steps * dp * micro
            became = f"train.global_batch={steps * dp * micro} (with dp {dp})"
        elif batch and batch % (steps * dp):
            wrong = f"and dp {dp} do not divide {_BATCH}={batch}"
        elif batch:
            self.keys["train.micro_batch"] = batch // (steps * dp)
            became = f"train.micro_batch={batch // (steps * dp)} (with dp {dp})"
        self.became[_ACCUMULATION] = self._refuse(_ACCUMULATION, steps, wrong) if wrong else became

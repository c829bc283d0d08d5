"""An existing DeepSpeed JSON in nanoscale's keys.

The settings are from DeepSpeed's documentation (docs/_pages/config-json.md). A value of "auto", as in files
for transformers' Trainer, leaves the key to nanoscale.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from nanoscale.common.errors import UserError, Violation
from nanoscale.common.json_text import parse
from nanoscale.common.units import listed
from nanoscale.config.deepspeed import OWNED, SAME
from nanoscale.config.optimizers import OPTIMIZERS, by_other_name
from nanoscale.config.reference import flat, nested
from nanoscale.config.schedulers import SCHEDULERS
from nanoscale.config.violations import refuse

_Row = TypeVar("_Row")
_KEYS = SAME | {
    "steps_per_print": "train.log_every",
    "tensor_parallel.autotp_size": "parallel.tp",
    "communication_data_type": "precision.reduce",
    "data_types.grad_accum_dtype": "precision.reduce",
    "fp16.initial_scale_power": "precision.loss_scale",
    "fp16.loss_scale_window": "precision.loss_scale_window",
    "optimizer.params.lr": "optimizer.lr",
    "optimizer.params.weight_decay": "optimizer.weight_decay",
    "optimizer.params.eps": "optimizer.eps",
    "optimizer.params.momentum": "optimizer.momentum",
    "scheduler.params.warmup_num_steps": "scheduler.warmup_steps",
    "scheduler.params.warmup_max_lr": "optimizer.lr",
    "scheduler.params.total_num_steps": "train.steps",
    "scheduler.params.cos_min_ratio": "scheduler.min_ratio",
    "zero_optimization.overlap_comm": "backend.overlap_comm",
    "zero_optimization.cpu_offload": "zero.offload_optimizer",
    "activation_checkpointing.cpu_checkpointing": "parallel.offload_activations",
}
"""Settings and their keys, in the order in which later ones replace the values of earlier ones."""
_DTYPES = {f'"{name}"': name for name in ("fp32", "fp16", "bf16")}
_VALUES: dict[str, dict[str, Any]] = {
    "communication_data_type": _DTYPES,
    "data_types.grad_accum_dtype": _DTYPES,
    "fp16.initial_scale_power": {str(power): 2.0**power for power in range(128)},
    "zero_optimization.overlap_comm": {"true": "on", "false": "off"},
    "zero_optimization.cpu_offload": {"true": "cpu"},
}
"""Settings whose values, here as JSON, have other names or units as keys."""
_NO_KEY = "has no key of nanoscale"


class _Fixed(NamedTuple):
    """The accepted values of a setting (None: all) and the reason why they need no key. The fault of all other
    values (empty: they may have a key) and its remedy."""

    accepted: tuple[Any, ...] | None = ()
    reason: str = ""
    fault: str = ""
    remedy: str = ""


_PYTORCH = _Fixed(None, "the optimizer is PyTorch's")
_DEFAULT = "it is DeepSpeed's default"
_FROM_0 = _Fixed((0, "auto"), "the warm-up begins at 0",
    "is above 0, where the warm-up begins here", "set it to 0")  # fmt: skip
_UNKNOWN = _Fixed(None, "DeepSpeed does not read it")
_FIXED: dict[str, _Fixed] = {
    "_comment": _UNKNOWN,
    "comms_config": _UNKNOWN,
    "monitor_config": _UNKNOWN,
    "zero_allow_untested_optimizer": _PYTORCH,
    "zero_force_ds_cpu_optimizer": _PYTORCH,
    "zero_optimization.stage3_gather_16bit_weights_on_model_save": _Fixed(
        None, "see `nanoscale checkpoints export`"),
    "zero_optimization.cpu_offload": _Fixed((False,), "it is off"),
    "fp16.initial_scale_power": _Fixed(fault="must be an integer from 0 to 127"),
    "fp16.loss_scale": _Fixed((0, "auto"), "the loss scale adapts",
        "is a constant loss scale; here it adapts from precision.loss_scale on",
        "remove it, or set it to 0"),
    "fp16.hysteresis": _Fixed((2, "auto"), _DEFAULT, "has no key", "set it to 2"),
    "fp16.min_loss_scale": _Fixed((1, "auto"), _DEFAULT, "has no key", "set it to 1"),
    "optimizer.params": _Fixed(fault="has no key"),
    "optimizer.params.betas": _PYTORCH,
    "optimizer.params.adam_w_mode": _PYTORCH,
    "optimizer.params.torch_adam": _PYTORCH,
    "optimizer.params.bias_correction": _PYTORCH,
    "scheduler.params": _Fixed(fault="has no key"),
    "scheduler.params.warmup_min_lr": _FROM_0,
    "scheduler.params.warmup_min_ratio": _FROM_0,
    "scheduler.params.warmup_type": _Fixed(("linear",), "the warm-up is linear",
        "is not a warm-up here, which is linear", "set it to linear"),
    "activation_checkpointing": _Fixed((False, None, 0), "it is off",
        "has no key; recomputation is parallel.activation_checkpointing", "remove it"),
}  # fmt: skip
"""Settings without a key, by their path or by the path of the object that contains them."""
_MOST_BYTES = 16 << 20
_OBJECTS = (
    *("bf16", "fp16", "data_types", "optimizer", "optimizer.params", "scheduler"),
    *("scheduler.params", "zero_optimization", "activation_checkpointing"),
)
"""Settings whose value is an object."""
_BATCHES = ("train_batch_size", "train_micro_batch_size_per_gpu")
_ACCUMULATION = "gradient_accumulation_steps"
_FOLLOWS = "it follows from train.global_batch and train.micro_batch"
_SCHEDULERS = {
    rule.deepspeed_name: name for name, rule in SCHEDULERS.items() if rule.deepspeed_name
}
_MONITORS = {
    "tensorboard": ("logger.tensorboard", "on"),
    "csv_monitor": ("logger.csv", True),
    "wandb": ("logger.wandb", "online"),
}


@dataclass
class Translation:
    """A DeepSpeed JSON in nanoscale's terms."""

    values: dict[str, Any] = field(default_factory=dict)
    """Dotted key → value."""
    became: list[tuple[str, str]] = field(default_factory=list)
    """Each setting, by its path, and what it became."""
    violations: list[Violation] = field(default_factory=list)
    dp: int | None = None
    """The data-parallel degree of the job; None if it is not known."""
    handled: set[str] = field(default_factory=set)
    """The paths of the settings that are dealt with."""

    @property
    def recipe(self) -> dict[str, Any]:
        """The values as the content of a recipe."""
        return nested(self.values)

    def set(self, path: str, key: str, value: Any, note: str = "") -> None:
        """Take a setting as a key; "auto" leaves the key alone."""
        if path.endswith("bucket_size") and isinstance(value, float) and value.is_integer():
            value = int(value)
        self.handled.add(path)
        if value == "auto":
            self.became.append((path, f"left to nanoscale ({key})"))
            return
        self.values[key] = value
        text = f"{key}={json.dumps(value)}" if not isinstance(value, str) else f"{key}={value}"
        self.became.append((path, text + (f" ({note})" if note else "")))

    def leave(self, path: str, reason: str) -> None:
        """Note that a setting needs no key."""
        self.handled.add(path)
        self.became.append((path, f"not needed: {reason}"))

    def refuse(self, path: str, value: Any, message: str, remedy: str = "") -> None:
        self.handled.add(path)
        self.violations.append(Violation(path, value, "the JSON", message, remedy=remedy))


def read_text(path: Path) -> str:
    """Read a file of settings. Raises a UserError if it is not a text of at most 16 MiB."""
    if path.is_fifo() and path.parts[1:2] != ("dev",):  # the shell's <(…) is in /dev/fd
        raise UserError("usage", f"{path} is a pipe, and the settings are read from a file")
    try:
        with path.open("rb") as file:
            text = file.read(_MOST_BYTES + 1)
        if len(text) > _MOST_BYTES:
            what = f"has more than {_MOST_BYTES >> 20} MiB: too much for settings"
            raise UserError("usage", f"{path} {what}")
        return text.decode("utf-8-sig")
    except OSError as error:
        raise UserError("usage", f"{path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise UserError("usage", f"{path} is not UTF-8 text") from error


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object. Raises a UserError if the file holds none."""
    try:
        content = parse(read_text(path))
    except ValueError as error:
        raise UserError("usage", f"{path} is not JSON: {error}") from error
    if not isinstance(content, dict):
        raise UserError("usage", f"{path} holds no JSON object")
    return content


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
    result = Translation({"backend.name": "deepspeed"})
    _check_types(settings, result)
    _batches(settings, dp, result)
    _precision(settings, result)
    _types(settings, result)
    params = settings.get("optimizer", {}).get("params", {})
    is_adamw = result.values.get("optimizer.name") == "adamw"
    if is_adamw and params.get("adam_w_mode", True) is not True:
        message = "asks for Adam with L2 regularization; adamw here decouples the weight decay"
        result.refuse("optimizer.params.adam_w_mode", params["adam_w_mode"], message)
    betas = params.get("betas", "auto")
    if betas != "auto" and "optimizer.params.betas" not in result.handled:
        for key, beta in zip(("optimizer.beta1", "optimizer.beta2"), betas, strict=True):
            result.set("optimizer.params.betas", key, beta)
    if result.values.get("scheduler.name", "cosine") != "cosine":
        result.values["scheduler.min_ratio"] = 0.0
        if "warmup_type" not in settings.get("scheduler", {}).get("params", {}):
            note = "a linear warm-up; DeepSpeed's default is logarithmic"
            result.became.append(("scheduler", note))
    _loggers(settings, result)
    _keys(flat(settings), result)
    if settings.get("sequence_parallel_size", 1) not in (1, "auto"):
        result.set("sequence_parallel_size", "parallel.cp_method", "ulysses")
    extra = _rest(settings, result)
    if extra:
        result.values["backend.extra"] = extra
        result.became.append((", ".join(flat(extra)), "backend.extra, as it is"))
    if result.violations and strict:
        refuse(result.violations)
    result.became += [(it.key, f"no counterpart: {it.message}") for it in result.violations]
    return result


def _check_types(settings: Mapping[str, Any], result: Translation) -> None:
    """Refuse values that the translation cannot read."""
    for path in _OBJECTS:
        value = _value(settings, path, {})
        if not isinstance(value, Mapping):
            result.refuse(path, value, "must be an object: {…}", "remove it")
    for path in _KEYS:
        value = _value(settings, path, None)
        if isinstance(value, Mapping):
            result.refuse(path, value, "must be one value, not an object", "remove it")
    for path in (*_BATCHES, _ACCUMULATION):
        value = settings.get(path, "auto")
        if value != "auto" and (type(value) is not int or value < 1):
            result.refuse(path, value, 'must be an integer, at least 1, or "auto"')
    if result.violations:
        refuse(result.violations)
    for name in ("bf16", "fp16"):
        value = settings.get(name, {}).get("enabled", False)
        if value != "auto" and not isinstance(value, bool):
            result.refuse(f"{name}.enabled", value, 'must be true, false or "auto"')
    betas = settings.get("optimizer", {}).get("params", {}).get("betas", "auto")
    if betas != "auto" and not (isinstance(betas, list) and len(betas) == 2):
        result.refuse("optimizer.params.betas", betas, "must be a list of two numbers")
    if result.violations:
        refuse(result.violations)


def _value(settings: Mapping[str, Any], path: str, absent: Any) -> Any:
    value: Any = settings
    for name in path.split("."):
        value = value.get(name, absent) if isinstance(value, Mapping) else absent
    return value


def _batches(settings: Mapping[str, Any], dp: int | None, result: Translation) -> None:
    """Take the accumulation, which follows here from the batches and the data-parallel degree."""
    steps = settings.get(_ACCUMULATION)
    if steps is None:
        return
    batch, micro = (
        None if settings.get(name) == "auto" else settings.get(name) for name in _BATCHES
    )
    if steps == "auto":
        result.leave(_ACCUMULATION, _FOLLOWS)
    elif batch and micro:
        degree, rest = divmod(batch, micro * steps)
        if not rest and dp in (None, degree):
            result.leave(_ACCUMULATION, _FOLLOWS)
            return
        product = f"{micro}·{steps}" + ("" if dp is None else f"·{dp} = {micro * steps * dp}")
        names = "train_micro_batch_size_per_gpu·gradient_accumulation_steps" + (
            " does not divide" if dp is None else "·dp is not"
        )
        message = f"contradicts the batches: {names} train_batch_size ({product}, {batch})"
        result.refuse(_ACCUMULATION, steps, message, "remove one of the three")
    elif dp is None:
        why = (
            "gives a batch only with the data-parallel degree, which a DeepSpeed JSON does not hold"
        )
        result.refuse(_ACCUMULATION, steps, why, "give it with --dp N")
    elif micro:
        batch = steps * dp * micro
        result.set(_ACCUMULATION, "train.global_batch", batch, f"with dp {dp}")
    elif batch and batch % (steps * dp):
        message = f"and dp {dp} do not divide train_batch_size={batch}"
        result.refuse(_ACCUMULATION, steps, message)
    elif batch:
        micro = batch // (steps * dp)
        result.set(_ACCUMULATION, "train.micro_batch", micro, f"with dp {dp}")
    else:
        result.leave(_ACCUMULATION, "neither batch is given")


def _precision(settings: Mapping[str, Any], result: Translation) -> None:
    enabled = {name: settings.get(name, {}).get("enabled", False) for name in ("bf16", "fp16")}
    if True in enabled.values():
        kind = "bf16" if enabled["bf16"] is True else "fp16"
        result.set(f"{kind}.enabled", "precision.compute", kind)
    elif "auto" in enabled.values():
        result.values["precision.compute"] = "auto"
        result.became.append(("bf16.enabled, fp16.enabled", "precision.compute=auto"))
    else:
        result.set("neither bf16 nor fp16", "precision.compute", "fp32")
    compute = result.values["precision.compute"]
    if compute != "fp16":
        for path in flat(settings.get("fp16", {}), "fp16."):
            result.leave(path, f"it belongs to fp16, and precision.compute is {compute}")
    if not enabled["bf16"]:
        for path in flat(settings.get("bf16", {}), "bf16."):
            result.leave(path, "bf16 is off")


def _types(settings: Mapping[str, Any], result: Translation) -> None:
    """Take the types of the optimizer and the scheduler. Of an unknown type, refuse the parameters too."""
    unknown_optimizer = f"is not an optimizer here; there are {listed([*OPTIMIZERS])}. "
    unknown_optimizer += "Unless optimizer=NAME is chosen, AdamW trains"
    unknown_schedule = f"is not a schedule here; there are {', '.join(_SCHEDULERS)}"
    for section, own_name, message in (
        ("optimizer", by_other_name, unknown_optimizer),
        ("scheduler", _SCHEDULERS.get, unknown_schedule),
    ):
        values = settings.get(section)
        if not values:
            continue
        kind = str(values.get("type", ""))
        name = own_name(kind)
        if name is not None:
            result.set(f"{section}.type", f"{section}.name", name)
            continue
        result.refuse(f"{section}.type", kind, message)
        for path, value in flat(values.get("params", {}), f"{section}.params.").items():
            if path in _KEYS or path == "optimizer.params.betas":
                continue  # it has the same key with any optimizer or schedule
            result.handled.add(path)
            if value != "auto":
                result.refuse(path, value, _NO_KEY)


def _keys(leaves: Mapping[str, Any], result: Translation) -> None:
    for path, key in _KEYS.items():
        if path not in leaves or path in result.handled or _why_idle(path, leaves[path]):
            continue
        value = leaves[path]
        if path not in _VALUES:
            result.set(path, key, value)
        elif (text := json.dumps(value)) in _VALUES[path]:
            result.set(path, key, _VALUES[path][text])


def _loggers(settings: Mapping[str, Any], result: Translation) -> None:
    for name, (key, value) in _MONITORS.items():
        monitor = settings.get(name)
        if not isinstance(monitor, Mapping):
            continue
        result.handled.update(flat(monitor, f"{name}."))
        if not monitor.get("enabled"):
            result.leave(f"{name}.enabled", "it is off")
            continue
        result.set(f"{name}.enabled", key, value)
        for inner, own in (("project", "logger.project"), ("team", "logger.wandb_entity")):
            if name == "wandb" and monitor.get(inner):
                result.values[own] = monitor[inner]


def _rest(settings: Mapping[str, Any], result: Translation, prefix: str = "") -> dict[str, Any]:
    """Read all other settings by the tables. Return the settings that DeepSpeed receives unchanged."""
    rest: dict[str, Any] = {}
    for name, value in settings.items():
        path = f"{prefix}{name}"
        if isinstance(value, Mapping):
            if inner := _rest(value, result, f"{path}."):
                rest[name] = inner
            continue
        if path in result.handled:
            continue
        fixed = _nearest(path, _FIXED) or _Fixed()
        may_be_left = value == "auto" and path in _VALUES
        if (reason := _why_idle(path, value)) is not None:
            result.leave(path, reason)
        elif fixed.fault and not may_be_left:
            result.refuse(path, value, fixed.fault, fixed.remedy)
        elif value == "auto":
            result.leave(path, 'it is "auto"')
        elif _nearest(path, OWNED) is not None:
            result.refuse(path, value, _NO_KEY)
        else:
            rest[name] = value
    return rest


def _why_idle(path: str, value: Any) -> str | None:
    """Return why a value needs no key; None if it may need one."""
    fixed = _nearest(path, _FIXED) or _Fixed()
    return fixed.reason if fixed.accepted is None or value in fixed.accepted else None


def _nearest(path: str, table: Mapping[str, _Row]) -> _Row | None:
    """Return the row of a setting, or of the nearest object that contains it."""
    while path and path not in table:
        path = path.rpartition(".")[0]
    return table.get(path)

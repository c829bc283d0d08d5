"""An existing DeepSpeed JSON in nanoscale's keys.

The settings are those of DeepSpeed's documentation (docs/_pages/config-json.md). A value of "auto", as in files
for transformers' Trainer, leaves the key to nanoscale.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nanoscale.common.errors import UserError, Violation
from nanoscale.common.units import listed
from nanoscale.config.deepspeed import SAME, unowned
from nanoscale.config.optimizers import OPTIMIZERS, by_other_name
from nanoscale.config.reference import flat
from nanoscale.config.violations import refuse

_SAME = SAME | {
    "steps_per_print": "train.log_every",
    "tensor_parallel.autotp_size": "parallel.tp",
}
"""Settings with a key of the same meaning and unit."""
_OBJECTS = (
    *("bf16", "fp16", "data_types", "optimizer", "optimizer.params", "scheduler"),
    *("scheduler.params", "zero_optimization", "activation_checkpointing"),
)
"""Settings whose value is an object."""
_BATCHES = ("train_batch_size", "train_micro_batch_size_per_gpu")
_ACCUMULATION = "gradient_accumulation_steps"
_INTEGERS = ("reduce_bucket_size", "allgather_bucket_size", "stage3_prefetch_bucket_size")
_ADAM = {"lr": "optimizer.lr", "weight_decay": "optimizer.weight_decay", "eps": "optimizer.eps"}
_WARM_UP = {"warmup_num_steps": "scheduler.warmup_steps", "warmup_max_lr": "optimizer.lr"}
_SCHEDULERS = {"WarmupLR": "constant", "WarmupDecayLR": "linear", "WarmupCosineLR": "cosine"}
_COUNTED = {
    "zero_allow_untested_optimizer": "the optimizer is PyTorch's",
    "zero_force_ds_cpu_optimizer": "the optimizer is PyTorch's",
    "zero_optimization.stage3_gather_16bit_weights_on_model_save": "see `nanoscale checkpoints export`",
}
"""Settings that need no key, with the reason."""

_FOLLOWS = "it follows from train.global_batch and train.micro_batch"


@dataclass
class Translation:
    """A DeepSpeed JSON in nanoscale's terms."""

    values: dict[str, Any] = field(default_factory=dict)
    """Dotted key → value."""
    became: list[tuple[str, str]] = field(default_factory=list)
    """Each setting, by its path, and what it became."""
    violations: list[Violation] = field(default_factory=list)
    _taken: set[str] = field(default_factory=set)

    def set(self, path: str, key: str, value: Any, note: str = "") -> None:
        """Take a setting as a key; "auto" leaves the key alone."""
        self._taken.add(path)
        if value == "auto":
            self.became.append((path, f"left to nanoscale ({key})"))
            return
        self.values[key] = value
        text = f"{key}={json.dumps(value)}" if not isinstance(value, str) else f"{key}={value}"
        self.became.append((path, text + (f" ({note})" if note else "")))

    def leave(self, path: str, reason: str) -> None:
        """Note that a setting needs no key."""
        self._taken.add(path)
        self.became.append((path, f"not needed: {reason}"))

    def refuse(self, path: str, value: Any, message: str, remedy: str = "") -> None:
        self._taken.add(path)
        self.violations.append(Violation(path, value, "the JSON", message, remedy=remedy))

    def is_taken(self, path: str) -> bool:
        return path in self._taken


def read_deepspeed(path: Path) -> dict[str, Any]:
    """Read a DeepSpeed JSON.

    Raises:
        UserError: it is not a JSON object.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError("usage", f"{path}: {error.strerror}") from error
    except ValueError as error:
        raise UserError("usage", f"{path} is not JSON: {error}") from error
    if not isinstance(content, dict):
        raise UserError("usage", f"{path} holds no JSON object")
    return content


def translate(settings: Mapping[str, Any], dp: int | None = None) -> Translation:
    """Translate DeepSpeed's settings.

    Args:
        settings: the content of the JSON.
        dp: the data-parallel degree of the job, if the JSON has a global batch only by accumulation.

    Raises:
        UserError: with every setting that cannot be honored.
    """
    result = Translation({"backend.name": "deepspeed"})
    _check_types(settings, result)
    for path, value in flat(settings).items():
        if path in _SAME:
            key = _SAME[path]
            name = path.rpartition(".")[2]
            whole = name in _INTEGERS and isinstance(value, float) and value.is_integer()
            result.set(path, key, int(value) if whole else value)
    _batches(settings, dp, result)
    _precision(settings, result)
    _optimizer(settings.get("optimizer", {}), result)
    _scheduler(settings.get("scheduler", {}), result)
    _zero(settings.get("zero_optimization", {}), result)
    _loggers(settings, result)
    _recomputation(settings.get("activation_checkpointing", {}), result)
    if settings.get("sequence_parallel_size", 1) not in (1, "auto"):
        result.set("sequence_parallel_size", "parallel.cp_method", "ulysses")
    extra = _rest(settings, result)
    if extra:
        result.values["backend.extra"] = extra
        named = ", ".join(path for path in flat(extra))
        result.became.append((named, "backend.extra, as it is"))
    if result.violations:
        refuse(result.violations)
    return result


def _check_types(settings: Mapping[str, Any], result: Translation) -> None:
    """Refuse values that the translation cannot read.

    Raises:
        UserError: with all of them.
    """
    for path in _OBJECTS:
        section, _, name = path.rpartition(".")
        values = settings.get(section, {}) if section else settings
        if isinstance(values, Mapping) and not isinstance(values.get(name, {}), Mapping):
            result.refuse(path, values[name], "must be an object: {…}", "remove it")
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
        _compare_batches(batch, micro, steps, dp, result)
    elif dp is None:
        message = (
            "gives a batch only with the data-parallel degree, which a DeepSpeed JSON does not hold"
        )
        result.refuse(_ACCUMULATION, steps, message, "give it with --dp N")
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


def _compare_batches(
    batch: int, micro: int, steps: int, dp: int | None, result: Translation
) -> None:
    """Refuse an accumulation that contradicts the two batches."""
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


def _precision(settings: Mapping[str, Any], result: Translation) -> None:
    enabled = {name: settings.get(name, {}).get("enabled", False) for name in ("bf16", "fp16")}
    if True in enabled.values():
        kind = "bf16" if enabled["bf16"] is True else "fp16"
        result.set(f"{kind}.enabled", "precision.compute", kind)
    elif "auto" in enabled.values():
        result.values["precision.compute"] = "auto"
        result.became.append(("bf16.enabled, fp16.enabled", "precision.compute=auto"))
    else:
        result.values["precision.compute"] = "fp32"
        result.became.append(("neither bf16 nor fp16", "precision.compute=fp32"))
    compute = result.values["precision.compute"]
    if compute == "fp16":
        _loss_scale(settings["fp16"], result)
    else:
        for path in flat(settings.get("fp16", {}), "fp16."):
            result.leave(path, f"it belongs to fp16, and precision.compute is {compute}")
    for path, value in (
        ("communication_data_type", settings.get("communication_data_type")),
        ("data_types.grad_accum_dtype", settings.get("data_types", {}).get("grad_accum_dtype")),
    ):
        if value in ("fp32", "fp16", "bf16"):
            result.set(path, "precision.reduce", value)


def _loss_scale(fp16: Mapping[str, Any], result: Translation) -> None:
    power = fp16.get("initial_scale_power", "auto")
    if type(power) is int and 0 <= power < 128:
        result.set("fp16.initial_scale_power", "precision.loss_scale", 2.0**power)
    elif power != "auto":
        result.refuse("fp16.initial_scale_power", power, "must be an integer from 0 to 127")
    if "loss_scale_window" in fp16:
        window = fp16["loss_scale_window"]
        result.set("fp16.loss_scale_window", "precision.loss_scale_window", window)
    if fp16.get("loss_scale") in (0, 0.0, "auto"):
        result.leave("fp16.loss_scale", "the loss scale adapts")
    elif "loss_scale" in fp16:
        message = "is a constant loss scale; here it adapts from precision.loss_scale on"
        result.refuse("fp16.loss_scale", fp16["loss_scale"], message, "remove it, or set it to 0")
    for name, default in (("hysteresis", 2), ("min_loss_scale", 1)):
        if name in fp16 and fp16[name] in (default, "auto"):
            result.leave(f"fp16.{name}", "it is DeepSpeed's default")
        elif name in fp16:
            result.refuse(f"fp16.{name}", fp16[name], "has no key", f"set it to {default}")


def _optimizer(optimizer: Mapping[str, Any], result: Translation) -> None:
    if not optimizer:
        return
    kind, params = str(optimizer.get("type", "")), optimizer.get("params", {})
    name = by_other_name(kind)
    if name is None:
        message = f"is not an optimizer here; there are {listed([*OPTIMIZERS])}"
        result.refuse("optimizer.type", kind, message)
        return
    result.set("optimizer.type", "optimizer.name", name)
    if name == "adamw" and params.get("adam_w_mode", True) is not True:
        message = "asks for Adam with L2 regularization; adamw here decouples the weight decay"
        result.refuse("optimizer.params.adam_w_mode", params["adam_w_mode"], message)
    for param, value in params.items():
        path = f"optimizer.params.{param}"
        if param in _ADAM:
            result.set(path, _ADAM[param], value)
        elif param == "betas" and value != "auto":
            result.set(path, "optimizer.beta1", value[0])
            result.set(path, "optimizer.beta2", value[1])
        elif param == "momentum":
            result.set(path, "optimizer.momentum", value)
        elif param in ("adam_w_mode", "torch_adam", "bias_correction", "betas"):
            result.leave(path, "the optimizer is PyTorch's")
        else:
            result.refuse(path, value, "has no key")


def _scheduler(scheduler: Mapping[str, Any], result: Translation) -> None:
    if not scheduler:
        return
    kind, params = str(scheduler.get("type", "")), scheduler.get("params", {})
    if kind not in _SCHEDULERS:
        message = "is not a schedule here; there are " + ", ".join(_SCHEDULERS)
        result.refuse("scheduler.type", kind, message)
        return
    result.set("scheduler.type", "scheduler.name", _SCHEDULERS[kind])
    if kind != "WarmupCosineLR":
        result.values["scheduler.min_ratio"] = 0.0
    for param, value in params.items():
        path = f"scheduler.params.{param}"
        if param in _WARM_UP:
            result.set(path, _WARM_UP[param], value)
        elif param == "total_num_steps":
            result.set(path, "train.steps", value)
        elif param == "cos_min_ratio":
            result.set(path, "scheduler.min_ratio", value)
        elif param in ("warmup_min_lr", "warmup_min_ratio"):
            if value not in (0, 0.0, "auto"):
                result.refuse(
                    path, value, "is above 0, where the warm-up begins here", "set it to 0"
                )
            else:
                result.leave(path, "the warm-up begins at 0")
        elif param == "warmup_type" and value == "linear":
            result.leave(path, "the warm-up is linear")
        elif param == "warmup_type":
            result.refuse(path, value, "is not a warm-up here, which is linear", "set it to linear")
        else:
            result.refuse(path, value, "has no key")
    if kind != "WarmupCosineLR" and "warmup_type" not in params:
        result.became.append(("scheduler", "a linear warm-up; DeepSpeed's default is logarithmic"))


def _zero(zero: Mapping[str, Any], result: Translation) -> None:
    if isinstance(overlap := zero.get("overlap_comm"), bool):
        path = "zero_optimization.overlap_comm"
        result.set(path, "backend.overlap_comm", "on" if overlap else "off")
    if zero.get("cpu_offload") is True:
        result.set("zero_optimization.cpu_offload", "zero.offload_optimizer", "cpu")
    elif zero.get("cpu_offload") is False:
        result.leave("zero_optimization.cpu_offload", "it is off")


def _loggers(settings: Mapping[str, Any], result: Translation) -> None:
    monitors: dict[str, tuple[str, Any, Callable[[Mapping[str, Any]], dict[str, Any]]]] = {
        "tensorboard": ("logger.tensorboard", "on", lambda _: {}),
        "csv_monitor": ("logger.csv", True, lambda _: {}),
        "wandb": (
            "logger.wandb",
            "online",
            lambda it: {
                key: it[name]
                for name, key in (("project", "logger.project"), ("team", "logger.wandb_entity"))
                if it.get(name)
            },
        ),
    }
    for name, (key, value, more) in monitors.items():
        monitor = settings.get(name)
        if not isinstance(monitor, Mapping):
            continue
        for path in flat(monitor, f"{name}."):
            result._taken.add(path)
        if monitor.get("enabled"):
            result.set(f"{name}.enabled", key, value)
            result.values |= more(monitor)
        else:
            result.leave(f"{name}.enabled", "it is off")


def _recomputation(settings: Mapping[str, Any], result: Translation) -> None:
    for name, value in settings.items():
        path = f"activation_checkpointing.{name}"
        if value in (False, None, 0):
            result.leave(path, "it is off")
        elif name == "cpu_checkpointing":
            result.set(path, "parallel.offload_activations", True)
        else:
            message = "has no key; recomputation is parallel.activation_checkpointing"
            result.refuse(path, value, message, "remove it")


def _rest(settings: Mapping[str, Any], result: Translation) -> dict[str, Any]:
    """Return the settings that no key of ours decides: DeepSpeed receives them as they are."""
    for path, value in flat(settings).items():
        if path in _COUNTED and not result.is_taken(path):
            result.leave(path, _COUNTED[path])
        elif value == "auto" and not result.is_taken(path):
            result.leave(path, 'it is "auto"')
    left = _without(settings, result)
    kept = flat(unowned(left))
    for path in [path for path in flat(left) if path not in kept]:
        root = path.partition(".")[0]
        if root == "bf16" and not settings[root].get("enabled"):
            result.leave(path, "bf16 is off")
        else:
            result.refuse(path, flat(settings)[path], "has no key of nanoscale")
    return unowned(left)


def _without(settings: Mapping[str, Any], result: Translation, prefix: str = "") -> dict[str, Any]:
    """Return the settings that were neither taken nor left out."""
    rest: dict[str, Any] = {}
    for name, value in settings.items():
        path = f"{prefix}{name}"
        if isinstance(value, Mapping):
            if inner := _without(value, result, f"{path}."):
                rest[name] = inner
        elif not result.is_taken(path):
            rest[name] = value
    return rest


def recipe(result: Translation) -> dict[str, Any]:
    """Return the translation as a recipe's content."""
    content: dict[str, Any] = {}
    for key, value in result.values.items():
        *sections, leaf = key.split(".")
        inner = content
        for section in sections:
            inner = inner.setdefault(section, {})
        inner[leaf] = value
    return content

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
from nanoscale.config.deepspeed import SAME, unowned
from nanoscale.config.violations import refuse

_SAME = SAME | {
    "steps_per_print": "train.log_every",
    "tensor_parallel.autotp_size": "parallel.tp",
    "fp16.loss_scale_window": "precision.loss_scale_window",
}
"""Settings with a key of the same meaning and unit."""
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
        UserError: with every setting that cannot be honoured.
    """
    result = Translation({"backend.name": "deepspeed"})
    for path, value in _leaves(settings):
        if path in _SAME:
            key = _SAME[path]
            whole = path.rpartition(".")[2] in _INTEGERS and isinstance(value, float)
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
        named = ", ".join(path for path, _ in _leaves(extra))
        result.became.append((named, "backend.extra, as it is"))
    if result.violations:
        refuse(result.violations)
    return result


def _leaves(values: Mapping[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    found: list[tuple[str, Any]] = []
    for name, value in values.items():
        if isinstance(value, Mapping):
            found += _leaves(value, f"{prefix}{name}.")
        else:
            found.append((f"{prefix}{name}", value))
    return found


def _batches(settings: Mapping[str, Any], dp: int | None, result: Translation) -> None:
    """Take the accumulation, which follows here from the batches and the data-parallel degree."""
    path = "gradient_accumulation_steps"
    if path not in settings:
        return
    steps = settings[path]
    numbers = {
        name: settings.get(name)
        for name in ("train_batch_size", "train_micro_batch_size_per_gpu")
        if isinstance(settings.get(name), int)
    }
    if steps == "auto" or len(numbers) == 2:
        result.leave(path, "it follows from train.global_batch and train.micro_batch")
    elif dp is None:
        message = (
            "gives a batch only with the data-parallel degree, which a DeepSpeed JSON does not hold"
        )
        result.refuse(path, steps, message, "give it with --dp N")
    elif "train_micro_batch_size_per_gpu" in numbers:
        batch = steps * dp * settings["train_micro_batch_size_per_gpu"]
        result.set(path, "train.global_batch", batch, f"with dp {dp}")
    elif "train_batch_size" in numbers:
        batch = max(1, settings["train_batch_size"] // (steps * dp))
        result.set(path, "train.micro_batch", batch, f"with dp {dp}")
    else:
        result.leave(path, "neither batch is given")


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
    scale = settings.get("fp16", {})
    if isinstance(power := scale.get("initial_scale_power"), int):
        result.set("fp16.initial_scale_power", "precision.loss_scale", 2.0**power)
    if scale.get("loss_scale") in (0, 0.0, "auto"):
        result.leave("fp16.loss_scale", "the loss scale adapts")
    elif "loss_scale" in scale:
        message = "is a constant loss scale; here it adapts from precision.loss_scale on"
        result.refuse("fp16.loss_scale", scale["loss_scale"], message, "remove it, or set it to 0")
    for name, default in (("hysteresis", 2), ("min_loss_scale", 1)):
        if name in scale and scale[name] in (default, "auto"):
            result.leave(f"fp16.{name}", "it is DeepSpeed's default")
        elif name in scale:
            result.refuse(f"fp16.{name}", scale[name], "has no key", f"set it to {default}")
    kinds = {"fp32", "fp16", "bf16"}
    for path, value in (
        ("communication_data_type", settings.get("communication_data_type")),
        ("data_types.grad_accum_dtype", settings.get("data_types", {}).get("grad_accum_dtype")),
    ):
        if value in kinds:
            result.set(path, "precision.reduce", value)


def _optimizer(optimizer: Mapping[str, Any], result: Translation) -> None:
    if not optimizer:
        return
    kind, params = str(optimizer.get("type", "")), optimizer.get("params", {})
    name = {"adam": "adamw", "adamw": "adamw", "fusedadam": "adamw", "sgd": "sgd"}.get(kind.lower())
    if name is None:
        message = "is not an optimizer here; there are adamw, adamw8bit and sgd"
        result.refuse("optimizer.type", kind, message)
        return
    result.set("optimizer.type", "optimizer.name", name)
    if name == "adamw" and params.get("adam_w_mode", True) is not True:
        message = "asks for Adam with L2 regularisation; adamw here decouples the weight decay"
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
        for path, _ in _leaves(monitor, f"{name}."):
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
    for path, value in _leaves(settings):
        if path in _COUNTED and not result.is_taken(path):
            result.leave(path, _COUNTED[path])
        elif value == "auto" and not result.is_taken(path):
            result.leave(path, 'it is "auto"')
    left = _without(settings, result)
    owned = [path for path, _ in _leaves(left) if path not in dict(_leaves(unowned(left)))]
    for path in owned:
        root = path.partition(".")[0]
        if root in ("bf16", "fp16") and not settings[root].get("enabled"):
            result.leave(path, f"{root} is off")
        else:
            result.refuse(path, dict(_leaves(settings))[path], "has no key of nanoscale")
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

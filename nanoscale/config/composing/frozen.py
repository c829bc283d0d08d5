"""The configuration in the run directory: complete, resolved, and read without Hydra.

Every rank reads it; `nanoscale train --config FILE` repeats the run that wrote it.

`parallel.dp: auto` is frozen as the resolved number. Without overrides, the file must give the same run. But
with `parallel.tp=2` in addition, nobody asked for that number: it is open again. The file therefore lists,
under `resolved`, the open keys and their requested values.
"""

import re
from collections.abc import Iterable, Mapping
from copy import deepcopy
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from nanoscale.common.errors import UserError, Violation
from nanoscale.config import reference
from nanoscale.config.composing.interpolation import escape, unescape
from nanoscale.config.layout import ACTIVATION_MEMORY, RECOMPUTATION_KEYS
from nanoscale.config.reference import Values
from nanoscale.config.resolved import ResolvedConfig, resolved
from nanoscale.config.schema import Config
from nanoscale.config.values.convert import convert, unknown_key
from nanoscale.config.values.forms import elastic
from nanoscale.config.values.yaml_file import YamlDocument, parse, read, read_text, to_yaml
from nanoscale.config.violations import refuse

HEADER = """\
# A resolved configuration of nanoscale, complete. It repeats the run with
#   nanoscale train --config FILE
"""
_SECTION = re.compile(r"^(\w+):", re.M)
RESOLVED = """\
# The values before they were resolved: resolved again if an override changes what they follow from.
"""


def dump(config: Config, requested: Config | None = None) -> str:
    """Return the configuration as YAML, in the schema's order.

    Args:
        config: the result of `rules.check`.
        requested: the result of `compose` before it was checked, so that keys that were left open can be
            resolved again if the file is used with other devices or degrees.
    """
    final = asdict(config)
    text = HEADER + to_yaml(escape("", final))
    asked = asdict(requested) if requested is not None else final
    opened = {
        f"{section}.{name}": escape(f"{section}.{name}", asked[section][name])
        for section, values in final.items()
        for name in values
        if asked[section][name] != values[name]
    }
    return text + (RESOLVED + to_yaml({"resolved": opened}) if opened else "")


_LATER_SECTIONS = {"guard", "hooks"}
"""Sections that files of the first versions lack."""
_REMOVED = {
    "checkpoint.asynchronous": (("auto",), "`auto` was removed on 2026-11-22"),
    "cluster.pythons": (({},), "was removed on 2026-11-27: cluster.python serves all hosts"),
    "launcher.slurm.container": ((None,), "is launcher.container since 2026-11-26"),
    "launcher.slurm.container_runtime": (("pyxis",), "is now launcher.container_runtime"),
    "launcher.slurm.container_mounts": (([],), "is launcher.container_mounts since 2026-11-26"),
}
"""Keys and values of earlier versions: the values that a file may lose, and the sentence about other ones."""


def without_removed(document: YamlDocument) -> YamlDocument:
    """Return a document without the removed keys that have their former default.

    Raises:
        UserError: such a key has another value.
    """
    content, violations = deepcopy(dict(document.content)), []
    layout = content.get("parallel")
    if isinstance(layout, dict) and layout.get("activation_checkpointing") == "sqrt":
        layout["activation_checkpointing"] = (
            "full"  # the same numbers; sqrt was removed on 2026-11-30
        )
    for key, (lost, sentence) in _REMOVED.items():
        *sections, name = key.split(".")
        section: Any = content
        for part in sections:
            section = section.get(part) if isinstance(section, dict) else None
        if isinstance(content.get("resolved"), dict):
            content["resolved"].pop(key, None)
        if not isinstance(section, dict) or name not in section:
            continue
        if section[name] in lost:
            del section[name]
        elif key not in reference.declared():
            violations.append(Violation(key, section[name], document.source(key), sentence))
    if violations:
        refuse(violations)
    return replace(document, content=content)


def load(path: Path) -> ResolvedConfig:
    """Read a frozen configuration.

    Raises:
        UserError: the file is damaged, or a version wrote it whose keys this one lacks; the line is named.
    """
    document = without_removed(read(path))
    sections = {name for name in reference.sections() if name and "." not in name} - _LATER_SECTIONS
    missing = sorted(name for name in sections if not isinstance(document.content.get(name), dict))
    if missing:
        message = f"is not a complete configuration: it has no {', '.join(missing)}"
        refuse([Violation("", str(path), document.name, message)], kind="run")
    if unknown := unknown_names(document.content):
        sources = {name: document.source(f"resolved.{name}") for name in unknown}
        refuse([unknown_key(name, value, sources[name]) for name, value in unknown.items()])
    content = {name: value for name, value in document.content.items() if name != "resolved"}
    config, violations = convert(unescape("", content), document.source)
    if violations:
        newer = "; a newer version of nanoscale may have written the file"
        refuse([
            replace(it, message=it.message + newer * it.message.startswith("unknown key"))
            for it in violations
        ])  # fmt: skip
    return resolved(config)


def read_values(path: Path, names: Iterable[str]) -> Values:
    """Return the values of a few keys, unchecked: only their sections are parsed, which is faster than `load`.

    Raises:
        UserError: one of these sections is missing or damaged.
    """
    names = list(names)
    if not names:
        return {}
    sections = {name.partition(".")[0] for name in names}
    text = read_text(path, str(path))
    _, *parts = _SECTION.split(text)
    chosen = [f"{name}:{rest}" for name, rest in zip(parts[::2], parts[1::2], strict=True)]
    chosen = [part for part in chosen if part.partition(":")[0] in sections]
    try:
        content = parse("".join(chosen), str(path)).content
    except UserError:
        content = {}
    if not all(isinstance(content.get(section), dict) for section in sections):
        content = asdict(load(path))  # which names the damage and its line
    return {name: unescape(name, _value(content, name)) for name in names}


def _value(content: Any, name: str) -> Any:
    """Return the value of a dotted name; the key's default if the file lacks it."""
    for part in name.split("."):
        if not isinstance(content, dict):
            return None  # a section that is null
        if part not in content:
            return reference.declared()[name].default
        content = content[part]
    return content


# --- values that are open again -------------------------------------------------------------------

_HOSTS = (
    "launcher.hostfile", "launcher.include", "launcher.exclude", "launcher.exclude_file", "launcher.nodes",
)  # fmt: skip
_DEVICE = ("launcher.device", "launcher.name", *_HOSTS)
_LAYOUT = ("parallel.dp", "parallel.dp_replicate", "parallel.tp", "parallel.pp", "parallel.cp")
_CHOSEN = (*(key for key, about in reference.declared().items() if about.planned),)
_CHOSEN_BY = (
    *_CHOSEN, ACTIVATION_MEMORY, "parallel.dp", "train.micro_batch", "train.global_batch", "train.seq_len",
    "backend.name", "cluster.device", "launcher.devices", *_DEVICE,
)  # fmt: skip
"""The keys on which the layout depends that the plan chooses."""

FOLLOWS: dict[str, tuple[str, ...]] = {
    "model.kv_heads": ("model.heads",),
    "model.head_dim": ("model.heads", "model.hidden"),
    "launcher.name": _HOSTS,
    "launcher.device": ("launcher.name", *_HOSTS),
    **dict.fromkeys(_CHOSEN, _CHOSEN_BY),
    ACTIVATION_MEMORY: tuple(set(_CHOSEN_BY) - set(RECOMPUTATION_KEYS)),
    "launcher.devices": (*_LAYOUT, *_DEVICE),
    "parallel.dp": (*_LAYOUT, "launcher.devices", *_DEVICE),
    "launcher.threads": ("launcher.devices", *_DEVICE),
    "precision.compute": (*_DEVICE, "cluster.device"),
    "precision.tf32": ("precision.compute", *_DEVICE, "cluster.device"),
    "parallel.virtual_stages": ("parallel.pp", "parallel.schedule"),
    "backend.compile": (
        "launcher.device", "parallel.pp", "parallel.schedule", "parallel.offload_activations"),
    "train.micro_batch": (
        *_LAYOUT, "parallel.schedule", "parallel.activation_checkpointing", "train.global_batch"),
    "train.steps": (
        "train.tokens", "train.epochs", "train.global_batch", "train.seq_len", "data.path",
        "data.valid_path", "data.valid_fraction"),
    "scheduler.decay_steps": ("scheduler.name", "train.steps"),
    "checkpoint.memory_every": (
        *_CHOSEN_BY, *_LAYOUT, "launcher.mtbf_hours", "checkpoint.every", "checkpoint.every_minutes"),
}  # fmt: skip
"""The keys that check() resolves, each with the keys that it depends on, in the order of resolution."""


def unknown_names(content: Mapping[str, Any]) -> Values:
    """Return the entries of a frozen file's `resolved` that are not keys, with the values."""
    opened = content.get("resolved")
    listed = opened if isinstance(opened, dict) else {}
    return {name: value for name, value in listed.items() if name not in reference.declared()}


def reopen(content: Mapping[str, Any], touched: frozenset[str]) -> Values:
    """Return a frozen file's content, with the requested values of keys that depend on a touched key."""
    content = dict(content)
    asked = content.pop("resolved", None)
    if not isinstance(asked, dict):
        return content
    changed = set(touched)
    launcher = content.get("launcher")
    if isinstance(launcher, dict) and elastic(launcher.get("nodes")):
        changed.add("launcher.nodes")  # its layout follows the hosts in use this time
    for key in (*FOLLOWS, "run.name"):
        follows = key == "run.name" or changed.intersection(FOLLOWS[key])
        if key in asked and key not in touched and follows:
            section, _, name = key.partition(".")
            if isinstance(values := content.get(section), dict):
                content[section] = {**values, name: asked[key]}
            changed.add(key)
    return content

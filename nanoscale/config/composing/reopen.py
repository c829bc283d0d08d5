"""Values that a frozen configuration had left open, reopened when the request changes.

`parallel.dp: auto` is frozen as the resolved number. Without overrides, the file must give the same run. But
with `parallel.tp=2` in addition, nobody asked for that number: it is open again. The frozen file therefore
lists, under `resolved`, the open keys and their requested values.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from nanoscale.config import reference
from nanoscale.config.composing.nodes import elastic

_HOSTS = (
    "launcher.hostfile",
    "launcher.include",
    "launcher.exclude",
    "launcher.nodes",
)
_LAYOUT = ("parallel.dp", "parallel.dp_replicate", "parallel.tp", "parallel.pp", "parallel.cp")

FOLLOWS: dict[str, tuple[str, ...]] = {
    "model.kv_heads": ("model.heads",),
    "model.head_dim": ("model.heads", "model.hidden"),
    "launcher.name": _HOSTS,
    "launcher.device": ("launcher.name", *_HOSTS),
    "launcher.devices": (*_LAYOUT, "launcher.device", "launcher.name", *_HOSTS),
    "parallel.dp": (*_LAYOUT, "launcher.devices", "launcher.device", "launcher.name", *_HOSTS),
    "launcher.threads": ("launcher.devices", "launcher.device", "launcher.name", *_HOSTS),
    "precision.compute": ("launcher.device", "launcher.name", *_HOSTS, "cluster.device"),
    "precision.tf32": (
        "precision.compute",
        "launcher.device",
        "launcher.name",
        *_HOSTS,
        "cluster.device",
    ),
    "parallel.virtual_stages": ("parallel.pp", "parallel.schedule"),
    "backend.compile": (
        "launcher.device",
        "parallel.pp",
        "parallel.schedule",
        "parallel.offload_activations",
    ),
    "train.micro_batch": (
        "parallel.dp",
        "parallel.pp",
        "parallel.schedule",
        "train.global_batch",
    ),
    "train.steps": (
        "train.tokens",
        "train.epochs",
        "train.global_batch",
        "train.seq_len",
        "data.path",
        "data.valid_path",
        "data.valid_fraction",
    ),
    "scheduler.decay_steps": ("scheduler.name", "train.steps"),
}
"""The keys that check() resolves, each with the keys that it depends on, in the order of resolution."""


def requested_values(requested: Mapping[str, Any], final: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys that check() resolved, with their requested values."""
    return {
        f"{section}.{name}": requested[section][name]
        for section, values in final.items()
        for name in values
        if requested[section][name] != values[name]
    }


def unknown_names(content: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entries of a frozen file's `resolved` that are not keys, with the values."""
    opened = content.get("resolved")
    listed = opened if isinstance(opened, dict) else {}
    return {name: value for name, value in listed.items() if name not in reference.declared()}


def reopen(content: Mapping[str, Any], touched: frozenset[str]) -> dict[str, Any]:
    """Return a frozen file's content, with the requested values of keys that depend on a touched key."""
    content = dict(content)
    asked = content.pop("resolved", None)
    if not isinstance(asked, dict):
        return content
    changed = set(touched)
    if _is_elastic(content):
        changed.add("launcher.nodes")  # its layout is that of the hosts in use this time
    for key in FOLLOWS:
        if key in asked and key not in touched and changed.intersection(FOLLOWS[key]):
            content = _set(content, key, asked[key])
            changed.add(key)
    if "run.name" in asked and "run.name" not in touched:
        content = _set(content, "run.name", asked["run.name"])
    return content


def _is_elastic(content: Mapping[str, Any]) -> bool:
    launcher = content.get("launcher")
    return isinstance(launcher, dict) and elastic(launcher.get("nodes"))


def _set(content: dict[str, Any], key: str, value: object) -> dict[str, Any]:
    section, _, name = key.partition(".")
    values = content.get(section)
    return {**content, section: {**values, name: value}} if isinstance(values, dict) else content

"""The configuration that a checkpoint was saved with, compared with the run's config.yaml. Imports no torch.

A manifest records the value of every key. If config.yaml has another value now, either an override changed it,
which the run's events record, or the file is damaged or was edited.
"""

import json
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from nanoscale.checkpoint.store import DamagedCheckpointError, StoredCheckpoint, list_checkpoints
from nanoscale.common.errors import UserError, Violation
from nanoscale.common.json_text import Json
from nanoscale.config.composing.frozen import load
from nanoscale.config.reference import is_mapping
from nanoscale.config.schema import Config
from nanoscale.config.violations import shown
from nanoscale.runs import events
from nanoscale.runs.directory import RunDirectory

IN_MANIFEST = "config"
_EVENT = "configuration"
_FREE = ("run", "launcher", "logger", "cluster", "checkpoint", "profile", "guard")
"""Sections about a run's hosts, folders and outputs: a user may edit them in the file."""
_OF_THE_MODEL = ("model.", "lora.", "data.tokenizer")
"""Keys of config.yaml that matter to commands that only use a checkpoint's weights."""

Difference = tuple[Any, Any]
"""A key's value in the checkpoint and now; None also if there is none."""


def values(config: Config) -> Json:
    """Return the values that a checkpoint records, as JSON; a nested section is one key."""
    recorded = {
        f"{section}.{name}": value
        for section, members in asdict(config).items()
        for name, value in members.items()
        if section not in _FREE
    }
    return json.loads(json.dumps(recorded))


def newest(run: RunDirectory) -> StoredCheckpoint | None:
    """Return the newest checkpoint whose manifest can be read; None if there is none."""
    for stored in reversed(list_checkpoints(run.checkpoints)):
        try:
            stored.manifest  # noqa: B018
        except DamagedCheckpointError:
            continue  # ranks skip it
        return stored
    return None


def record_changes(run: RunDirectory, new: Config, is_overridden: Callable[[str], bool]) -> None:
    """Record in the run's events the values that are about to be written into its config.yaml.

    Args:
        is_overridden: True if an override set a key, even to its present value.
    """
    present = values(load(run.config))
    changes = {
        key: value
        for key, value in values(new).items()
        if present.get(key) != value or is_overridden(key)
    }
    if changes:
        text = ", ".join(f"{key}={shown(value)}" for key, value in changes.items())
        events.append(run, _EVENT, f"configuration changed: {text}", changes=changes)


def record_origin(run: RunDirectory, stored: StoredCheckpoint) -> None:
    """Record in a run that begins with another run's checkpoint what its config.yaml has changed since."""
    now, recorded = values(load(run.config)), stored.manifest.get(IN_MANIFEST, {})
    changes = {key: value for key, value in now.items() if recorded.get(key) != value}
    message = f"begins with {stored.path}"
    events.append(run, _EVENT, message, changes=changes)


def unexplained(run: RunDirectory, stored: StoredCheckpoint) -> dict[str, Difference] | None:
    """Return the keys whose values in config.yaml are neither the checkpoint's nor set by an override.

    None if the checkpoint was saved by a version that recorded no configuration.
    """
    recorded = stored.manifest.get(IN_MANIFEST)
    if recorded is None:
        return None
    now = values(load(run.config))
    differences = _differences(recorded, now)
    if not differences:
        return {}
    changes: Json = {}
    for event in events.read(run):
        if event.get("kind") == _EVENT and isinstance(event.get("changes"), dict):
            changes |= event["changes"]
    return {
        key: difference
        for key, difference in differences.items()
        if (recorded_key := manifest_key(key)) not in changes
        or changes[recorded_key] != now[recorded_key]
    }


def require_model(run: RunDirectory, stored: StoredCheckpoint) -> None:
    """Raise a UserError if config.yaml describes another model than the checkpoint was saved with."""
    try:
        differences = unexplained(run, stored) or {}
    except DamagedCheckpointError:
        return  # the reader of the checkpoint reports it
    violations = [
        Violation(
            key,
            now,
            str(run.config),
            f"was {shown(recorded)} when {stored.path.name} was saved; the file is damaged or was edited",
            remedy=f"correct it in {run.config}: {key.rpartition('.')[2]}: {shown(recorded)}",
        )
        for key, (recorded, now) in differences.items()
        if key.startswith(_OF_THE_MODEL)
    ]
    if violations:
        message = f"{run.config} describes another model than the one in {stored.path.name}"
        raise UserError("checkpoint", message, violations)


def manifest_key(key: str) -> str:
    """Return the key of a manifest that holds a dotted key; a nested section is one key."""
    return ".".join(key.split(".")[:2])


def _differences(recorded: Json, now: Json) -> dict[str, Difference]:
    """Compare the keys that were present when the checkpoint was saved and that this version has."""
    differences: dict[str, Difference] = {}
    for key, before in recorded.items():
        if key not in now:
            continue  # this version has no such key
        if isinstance(before, dict) and isinstance(now[key], dict):
            shared = [name for name in before if name in now[key]]
            names = before | now[key] if is_mapping(key) else shared
            differences |= {
                f"{key}.{name}": (before.get(name), now[key].get(name))
                for name in names
                if before.get(name) != now[key].get(name)
            }
        elif before != now[key]:
            differences[key] = before, now[key]
    return differences

"""The conditions under which a run continues: the same run, from a checkpoint, and not complete."""

import math
import shlex
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from nanoscale.checkpoint import store
from nanoscale.checkpoint.configuration import (
    IN_MANIFEST,
    manifest_key,
    newest,
    unexplained,
    values,
)
from nanoscale.checkpoint.remote import RemoteCheckpoints
from nanoscale.common import display
from nanoscale.common.errors import UserError, Violation
from nanoscale.common.object_storage import explained
from nanoscale.common.units import counted, listed
from nanoscale.config.composing.frozen import load
from nanoscale.config.reference import mapping_around
from nanoscale.config.resolved import ResolvedConfig, differences
from nanoscale.config.values.provenance import Composed
from nanoscale.config.violations import override, refuse, shown
from nanoscale.launch.batch.jobs import way_on
from nanoscale.launch.request import Request
from nanoscale.runs import events, metrics, status
from nanoscale.runs.directory import RunDirectory

IDENTITY = (
    "model.", "lora.", "optimizer.name", "data.source", "data.path", "data.valid_path", "data.mixture",
    "data.tokenizer", "data.bpe_vocab", "data.valid_fraction", "data.packing", "train.seq_len", "train.seed",
    "run.from_", "optimizer.ema_decay", "train.objective", "train.mask_", "train.labels",
    "train.teacher", "train.distill_top_k",
)  # fmt: skip
"""Keys that a checkpoint's tensors, or its number of consumed samples, depend on."""
_PATHS = ("data.path", "data.valid_path", "data.mixture", "data.tokenizer", "model.init_from")
"""Keys that may differ on another machine; ranks compare the tokens and the tensors."""
_UPLOAD = "checkpoint.upload"


def require_same_run(run: RunDirectory, request: Request, overrides: Sequence[str]) -> None:
    """Require that the changes leave it the run of its checkpoints.

    Args:
        overrides: the changes.

    Raises:
        UserError: they would make it another run.
    """
    old, new, composed = load(run.config), request.config, request.composed
    same = (new.run.name, new.run.root) == (old.run.name, old.run.root)
    moved = [key for key in ("run.name", "run.root") if not same and composed.by_hand(key)]
    stored = newest(run)
    recorded = stored.manifest.get(IN_MANIFEST, {}) if stored is not None else {}
    restored = {
        key for key, value in values(new).items() if key in recorded and recorded[key] == value
    }
    other = [key for key in differences(old, new) if key.startswith(IDENTITY)]
    other = [key for key in other if manifest_key(key) not in restored]
    if not run.checkpoint_steps() and not any(run.memory.glob("*")):
        other = []
    if new.lora.rank:  # the model may have moved, if it is unchanged
        other = [key for key in other if key not in ("model.init_from", "model.name")]
    another = shlex.join(["nanoscale", "train", "--config", str(run.config), *overrides])
    violations = [
        Violation(
            key,
            was_set[-1].value if (was_set := composed.history.get(declared)) else None,
            composed.source(declared),
            message,
        )
        for keys, message in (
            (moved, "cannot be changed by resume: a run stays where it is"),
            (other, "cannot be changed by resume: the checkpoints are of the run as it was"),
        )
        for key in keys
        for declared in [mapping_around(key) or key]
    ]
    if violations:
        keeping = f"{another} {override('run.from_run', run.reference)}"
        loses = moved or any(key.startswith(("model.", "lora.", "run.from_")) for key in other)
        advice = (another,) if loses else (keeping, another)
        violations[-1] = replace(violations[-1], suggestions=advice)
        raise UserError("run", "a changed value would make it another run", violations)


def require_recorded(run: RunDirectory, composed: Composed) -> str | None:
    """Compare config.yaml with the newest checkpoint's, in what no override has changed.

    Return a sentence if the checkpoint has none.

    Raises:
        UserError: they differ.
    """
    stored = newest(run)
    if stored is None:
        return None
    changed = unexplained(run, stored)
    if changed is None:
        return (
            f"{stored.path.name} was saved by an earlier version, which recorded no configuration: "
            "config.yaml cannot be compared with it"
        )
    violations = [
        Violation(
            key,
            now,
            composed.source(key),
            f"was {shown(was)} when {stored.path.name} was saved, and no override has changed it",
            (override(key, was), override(key, now)),
            "the first restores the checkpoint's value, the second accepts the value of config.yaml",
        )
        for key, (was, now) in changed.items()
        if not composed.by_hand_around(key)
    ]
    if violations:
        message = f"{run.config} is damaged or was edited since {stored.path.name} was saved"
        raise UserError("checkpoint", message, violations)
    return None


def starting_point(run: RunDirectory) -> Iterator[str]:
    """Yield the sentences about the checkpoint that the ranks will load, and about damaged ones.

    Raises:
        UserError: there are checkpoints, and all of them are damaged; or there were, and all of them are gone.
    """
    damaged = [
        f"{it.path.name} was set aside as damaged (to undo that: {store.undo(it.path)})"
        for it in store.list_set_aside(run.checkpoints)
    ]
    for stored in reversed(store.list_checkpoints(run.checkpoints)):
        damage = _damage(stored)
        if not damage:
            name = stored.path.name
            yield f"resuming from {name}; its checksums are verified when it is loaded"
            return
        damaged.append(f"{stored.path.name} is damaged ({damage[0]})")
        yield damaged[-1]
    if any(run.memory.glob("*")):
        yield f"the hosts have copied their memory to {run.memory}; it is used if it is complete"
        return
    lost = f"step-{saved['step']:08d} was saved and is gone" if (saved := _last_saved(run)) else ""
    if damaged or lost:
        raise UserError(
            "checkpoint",
            f"no complete checkpoint is left in {run.checkpoints}: {', '.join(damaged) or lost}{_again(run)}",
        )
    yield "there is no checkpoint yet: starting from the beginning"


def _damage(stored: store.StoredCheckpoint) -> list[str]:
    try:
        return store.find_damage(stored.path, sums=False)
    except OSError:  # it may be intact, and readable on the ranks' hosts
        return []


def check_uploaded(composed: Composed, config: ResolvedConfig) -> None:
    """Check the storage of a new run's uploads; checkpoints that it has by this name are to be continued.

    Raises:
        UserError: the storage cannot be used, or holds checkpoints of another run.
    """
    address, name = config.checkpoint.upload, str(config.run.name)
    if address is None:
        return
    with explained(_UPLOAD, address, "checkpoint"):
        remote = RemoteCheckpoints(address, name)
        steps = remote.steps()
        recorded = remote.manifest(steps[-1]).get(IN_MANIFEST, {}) if steps else {}
    different = [
        key
        for key, value in values(config).items()
        if key.startswith(IDENTITY) and key not in _PATHS and recorded.get(key, value) != value
    ]
    if different:
        message = f"is the name of another run in {address}: {listed(different)} differ"
        advice = (override("run.name", f"{name}-2"),)
        refuse([Violation("run.name", name, composed.source("run.name"), message, advice)], "run")
    if steps:
        display.note(f"the run continues after step {steps[-1]}, which was uploaded to {address}")


def fetch_missing(run: RunDirectory, address: str | None, *, dry_run: bool = False) -> bool:
    """Fetch the newest complete checkpoint of `checkpoint.upload` if the newest on disk is missing or damaged.

    Return True if one was fetched, or would be in a run that is not dry.

    Raises:
        UserError: there are some in the storage, all of them are damaged, and none is intact on disk.
    """
    local = store.list_checkpoints(run.checkpoints)
    if address is None or (local and not _damage(local[-1])):
        return False
    last = local[-1].step if local else math.inf
    intact = max((stored.step for stored in local if not _damage(stored)), default=-1)
    damaged: list[str] = []
    with explained(_UPLOAD, address, "checkpoint"):
        remote = RemoteCheckpoints(address, run.name)
        for step in reversed([step for step in remote.steps() if intact < step <= last]):
            display.note(f"fetching the checkpoint of step {step} from {address}")
            try:
                if not dry_run:
                    remote.fetch(step, run.checkpoints)
                return True
            except store.DamagedCheckpointError as error:
                damaged.append(f"the checkpoint of step {step} in {address} is damaged ({error})")
                display.note(damaged[-1])
    if damaged and intact < 0:
        raise UserError(
            "checkpoint", f"no complete checkpoint is left: {', '.join(damaged)}{_again(run)}"
        )
    return False


def _again(run: RunDirectory) -> str:
    command = f"nanoscale train --config {shlex.quote(str(run.config))}"
    return f"; to start again from step 1, in another run: {command}"


def upload_missing(run: RunDirectory, address: str | None) -> None:
    """Upload the checkpoints of a run that does not run."""
    for stored in store.list_checkpoints(run.checkpoints) if address else ():
        with explained(_UPLOAD, str(address), "checkpoint"):
            if RemoteCheckpoints(str(address), run.name).upload(stored.path):
                display.note(f"{stored.path.name} uploaded to {address}")


def _last_saved(run: RunDirectory) -> dict[str, Any] | None:
    """Return the newest event of a saved checkpoint; None if there is none, or it cannot be read."""
    with suppress(UserError):
        saved = events.last(run, "checkpoint")
        return saved if saved is not None and "step" in saved else None
    return None


def is_complete(run: RunDirectory, previous: ResolvedConfig, config: ResolvedConfig) -> bool:
    """True if a run is completed, and the configuration with the changes trains no further."""
    if status.read(run).state != "completed":
        return False
    if ended_early(run, previous) and config.train.stop_when != previous.train.stop_when:
        return False
    return config.train.steps <= previous.train.steps


def completion(run: RunDirectory) -> str:
    """Return the sentence about a complete run, and the command that trains longer."""
    config = load(run.config)
    steps = config.train.steps
    if step := ended_early(run, config):
        return (
            f"the run is complete: train.stop_when ended it at step {step} of {steps}; to continue, type\n"
            f"  {way_on(run)} "
            "train.stop_when.patience=0 train.stop_when.eval_loss=null train.stop_when.last_step=null"
        )
    return (
        f"the run is complete: it trained {counted(steps, 'step')}; to train longer, type\n"
        f"  {way_on(run)} train.steps={2 * steps}"
    )


def ended_early(run: RunDirectory, config: ResolvedConfig) -> int | None:
    """Return the last step of a completed run that `train.stop_when` ended; None if it trained all steps."""
    last = metrics.last(run)
    return last["step"] if last and last["step"] < config.train.steps else None

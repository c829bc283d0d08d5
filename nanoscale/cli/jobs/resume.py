"""`nanoscale resume`: continue a run that was stopped, failed, or is to train longer."""

from __future__ import annotations

import shlex
from dataclasses import replace
from typing import TYPE_CHECKING

from nanoscale.cli.common import options as opt
from nanoscale.cli.common.options import as_settings
from nanoscale.cli.common.output import DONE, print_json
from nanoscale.cli.common.request import CommandLine, Refusals, planned, request_job, require_disk
from nanoscale.common import display

if TYPE_CHECKING:
    from nanoscale.checkpoint.store import StoredCheckpoint
    from nanoscale.config.resolved import ResolvedConfig
    from nanoscale.config.values.composed import Composed
    from nanoscale.launch.request import Request
    from nanoscale.runs.directory import RunDirectory

IDENTITY = (
    "model.",
    "lora.",
    "optimizer.name",
    "data.source",
    "data.path",
    "data.valid_path",
    "data.mixture",
    "data.tokenizer",
    "data.bpe_vocab",
    "data.valid_fraction",
    "data.packing",
    "train.seq_len",
    "train.seed",
)
"""Keys that a checkpoint's tensors, or its number of consumed samples, depend on."""


def resume(
    run: opt.Run,
    overrides: opt.Overrides = None,
    hostfile: opt.Hostfile = None,
    include: opt.Include = None,
    exclude: opt.Exclude = None,
    num_nodes: opt.NumNodes = None,
    num_gpus: opt.NumGpus = None,
    no_preflight: opt.NoPreflight = False,
    dry_run: opt.DryRun = False,
    force: opt.Force = False,
    trust: opt.Trust = False,
    as_json: opt.AsJson = False,
) -> int:
    """Resume from the newest complete checkpoint, in any layout."""
    from nanoscale.cli.jobs.attempt import attempt, ready_fleet, show_plan
    from nanoscale.config.composing.frozen import load
    from nanoscale.config.resolved import differences
    from nanoscale.launch.fleet.signals import Signals
    from nanoscale.launch.lifecycle.prepare import replace_configuration
    from nanoscale.launch.slurm.allocation import require_one_launcher
    from nanoscale.runs.directory import RunDirectory
    from nanoscale.runs.lock import RunLock, refuse_if_held

    require_one_launcher()
    directory = RunDirectory.open(run)
    options = as_settings(hostfile, include, exclude, num_nodes, num_gpus, no_preflight)
    line = CommandLine(overrides, directory.config, options=options, trust=trust)
    line.require_startable()
    line = replace(line, trust=True)
    refusals = Refusals(postponed=dry_run)
    if dry_run:
        with refusals.gather():
            refuse_if_held(directory)
        request = _request(directory, line)
        previous = load(directory.config)
        complete = _is_complete(directory, previous, request.config)
        _say_what_differs(previous, request.config)
        require_disk(request, refusals, force=force or complete)
        force = force or complete or not differences(previous, request.config)
        request = planned(request, refusals, force=force)
        if complete:
            display.note(_complete(directory, request.config))
        else:
            with refusals.gather():
                _say_where_from(directory)
        return show_plan(directory, request, directory.last_attempt() + 1, refusals, as_json)
    with RunLock(directory) as lock, Signals() as signals:
        request = _request(directory, line)
        previous = load(directory.config)
        if _is_complete(directory, previous, request.config):
            _say_complete(directory, request.config, as_json)
            return DONE
        _say_what_differs(previous, request.config)
        # An unchanged run continues, whatever the prediction.
        require_disk(request, refusals, force=force)
        force = force or not differences(previous, request.config)
        request = planned(request, refusals, force=force)
        _say_where_from(directory)
        last = directory.last_attempt()
        with ready_fleet(request, signals) as fleet:
            lock.require()
            replace_configuration(directory, request, last)
            return attempt(lock, request, last + 1, fleet, signals, as_json)


def _request(run: RunDirectory, line: CommandLine) -> Request:
    """Return the request of the run's configuration with the changes.

    Raises:
        UserError: the changes are wrong, or would make it another run.
    """
    from nanoscale.checkpoint.configuration import manifest_key, newest
    from nanoscale.checkpoint.hf.adapters import require_base
    from nanoscale.common.errors import UserError, Violation
    from nanoscale.config.composing.frozen import load
    from nanoscale.config.reference import mapping_around
    from nanoscale.config.resolved import differences

    stored = newest(run)
    request = request_job(line, verify=lambda composed: _require_recorded(run, stored, composed))
    old, new, composed = load(run.config), request.config, request.composed
    moved = [key for key in ("run.name", "run.root") if composed.by_hand(key)]
    restored = _restored(stored, new)
    other = [key for key in differences(old, new) if key.startswith(IDENTITY)]
    other = [key for key in other if manifest_key(key) not in restored]
    if not run.checkpoint_steps():
        other = []
    if new.lora.rank:  # the model may have moved, if it is unchanged
        other = [key for key in other if key not in ("model.init_from", "model.name")]
    another = shlex.join(
        ["nanoscale", "train", "--config", str(run.config), *(line.overrides or ())]
    )
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
        violations[-1] = replace(violations[-1], suggestions=(another,))
        raise UserError("run", "a changed value would make it another run", violations)
    if new.lora.rank:
        require_base(new, run.checkpoints)
    return replace(request, config=replace(new, run=old.run))


def _require_recorded(
    run: RunDirectory, stored: StoredCheckpoint | None, composed: Composed
) -> None:
    """Raise a UserError if config.yaml differs from the checkpoint in what no override has changed."""
    from nanoscale.checkpoint.configuration import unexplained
    from nanoscale.common.errors import UserError, Violation
    from nanoscale.config.violations import override, shown

    if stored is None:
        return
    changed = unexplained(run, stored)
    if changed is None:
        display.note(
            f"{stored.path.name} was saved by an earlier version, which recorded no configuration: "
            "config.yaml cannot be compared with it"
        )
        return
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


def _restored(stored: StoredCheckpoint | None, new: ResolvedConfig) -> set[str]:
    """Return the keys that have the value of the checkpoint."""
    from nanoscale.checkpoint.configuration import IN_MANIFEST, values

    recorded = stored.manifest.get(IN_MANIFEST, {}) if stored is not None else {}
    return {key for key, value in values(new).items() if key in recorded and recorded[key] == value}


def _say_what_differs(old: ResolvedConfig, new: ResolvedConfig) -> None:
    from nanoscale.config.resolved import differences
    from nanoscale.config.violations import shown

    for key, (was, now) in differences(old, new).items():
        display.note(f"{key}: {shown(was)} → {shown(now)}")


def _say_where_from(run: RunDirectory) -> None:
    """Report the checkpoint that the ranks will load, after all checks that do not read it.

    Raises:
        UserError: there are checkpoints, and all of them are damaged.
    """
    from nanoscale.checkpoint.store import find_damage, list_checkpoints, list_set_aside, undo
    from nanoscale.common.errors import UserError

    damaged = [
        f"{it.path.name} was set aside as damaged (to undo that: {undo(it.path)})"
        for it in list_set_aside(run.checkpoints)
    ]
    for stored in reversed(list_checkpoints(run.checkpoints)):
        try:
            damage = find_damage(stored.path, sums=False)
        except OSError:  # it may be intact, and readable on the ranks' hosts
            damage = []
        if not damage:
            name = stored.path.name
            display.note(f"resuming from {name}; its checksums are verified when it is loaded")
            return
        damaged.append(f"{stored.path.name} is damaged ({damage[0]})")
        display.note(damaged[-1])
    if damaged:
        raise UserError(
            "checkpoint",
            f"no complete checkpoint is left in {run.checkpoints}: {', '.join(damaged)}; to start "
            f"again from step 1: nanoscale train --config {shlex.quote(str(run.config))}",
        )
    display.note("there is no checkpoint yet: starting from the beginning")


def _is_complete(run: RunDirectory, previous: ResolvedConfig, config: ResolvedConfig) -> bool:
    from nanoscale.runs import status

    if status.read(run).state != "completed":
        return False
    if _ended_early(run, previous) and config.train.stop_when != previous.train.stop_when:
        return False
    return config.train.steps <= previous.train.steps


def _ended_early(run: RunDirectory, config: ResolvedConfig) -> int | None:
    """Return the last step of a completed run that `train.stop_when` ended; None if it trained all steps."""
    from nanoscale.runs import metrics

    last = metrics.last(run)
    return last["step"] if last and last["step"] < config.train.steps else None


def _complete(run: RunDirectory, config: ResolvedConfig) -> str:
    steps = config.train.steps
    if step := _ended_early(run, config):
        return (
            f"the run is complete: train.stop_when ended it at step {step} of {steps}; to continue, type\n"
            f"  nanoscale resume {shlex.quote(run.reference)} "
            "train.stop_when.patience=0 train.stop_when.eval_loss=null"
        )
    return (
        f"the run is complete: it trained all {steps} steps; to train longer, type\n"
        f"  nanoscale resume {shlex.quote(run.reference)} train.steps={2 * steps}"
    )


def _say_complete(run: RunDirectory, config: ResolvedConfig, as_json: bool) -> None:
    from nanoscale.launch.lifecycle.attempt import Outcome
    from nanoscale.view.run.outcome_text import document

    (display.note if as_json else display.show)(_complete(run, config))
    if as_json:
        print_json(document(run, Outcome("completed", DONE)))

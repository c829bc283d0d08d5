"""Rules of a run: its folder, its loggers, its checkpoints, its profile."""

from __future__ import annotations

import netrc
import os
import re
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from urllib.parse import urlsplit

from nanoscale.common.units import counted
from nanoscale.config.profile_steps import series_of
from nanoscale.config.rules.resolution import Resolution, near_multiples
from nanoscale.config.run_name import RULE, legal_name
from nanoscale.config.schema import Run, Train
from nanoscale.config.violations import override


def check_loggers(resolution: Resolution) -> None:
    """Check that the programs that receive metrics are installed, and that wandb can log in."""
    logger = resolution.config.logger
    if logger.tensorboard == "on":
        resolution.require_for_ranks(
            "logger.tensorboard", "tensorboard", "TensorBoard", "logger=none"
        )
    if logger.mlflow == "on":
        resolution.require_for_ranks("logger.mlflow", "mlflow", "MLflow", "logger.mlflow=off")
    if logger.wandb != "off":
        resolution.require_for_ranks(
            "logger.wandb", "wandb", "Weights & Biases", "logger.wandb=off"
        )
    if logger.wandb == "online" and resolution.same_python and not _wandb_key_exists():
        message = "needs an API key: type `wandb login`, or set WANDB_API_KEY"
        resolution.refuse(
            "config", "logger.wandb", message, "logger.wandb=offline", "logger.wandb=off"
        )


def _wandb_key_exists() -> bool:
    """True if the environment or the user's netrc file has credentials for Weights & Biases."""
    if os.environ.get("WANDB_API_KEY") or os.environ.get("WANDB_IDENTITY_TOKEN_FILE"):
        return True
    server = urlsplit(os.environ.get("WANDB_BASE_URL") or "https://api.wandb.ai").hostname
    named = os.environ.get("NETRC")
    for path in [Path(named)] if named else [Path.home() / ".netrc", Path.home() / "_netrc"]:
        with suppress(OSError, netrc.NetrcParseError):
            if netrc.netrc(path).authenticators(str(server)):
                return True
    return False


def check_saving(resolution: Resolution) -> None:
    """Check that kept checkpoints are saved, and that what judges an evaluation has one."""
    saving = resolution.config.checkpoint
    _require_evaluations(resolution)
    if saving.keep_every is None or (saving.every and saving.keep_every % saving.every == 0):
        return
    if saving.every:
        message = (
            f"must be a multiple of checkpoint.every={saving.every}: only its multiples are saved"
        )
        multiples = near_multiples(saving.every, saving.keep_every)
        proposals = [f"checkpoint.keep_every={n}" for n in multiples]
    else:
        message = "needs checkpoint.every: checkpoints by time or at the end have no fixed step"
        proposals = [f"checkpoint.every={saving.keep_every}", "checkpoint.keep_every=null"]
    resolution.refuse("config", "checkpoint.keep_every", message, *proposals)


def _require_evaluations(resolution: Resolution) -> None:
    """Refuse keys that need evaluations of a training without any."""
    train, ends = resolution.config.train, resolution.config.train.stop_when
    if train.eval_every:
        return
    judges = {
        "checkpoint.keep_best": (resolution.config.checkpoint.keep_best, 0),
        "train.stop_when.patience": (ends.patience, 0),
        "train.stop_when.eval_loss": (ends.eval_loss, None),
    }
    every = f"train.eval_every={min(100, train.steps or 100)}"
    for key, (value, off) in judges.items():
        if value != off:
            message = "needs evaluations, and train.eval_every=0 has none"
            resolution.refuse("config", key, message, every, override(key, off))


def resolve_run(resolution: Resolution) -> Run:
    """Return the run with its folder."""
    run = resolution.config.run
    name = run.name
    legal = legal_name(name or "")
    if name is not None and (legal != name or not name):
        resolution.refuse("run", "run.name", RULE, override("run.name", legal) if legal else None)
    if not run.root:
        resolution.refuse("run", "run.root", "is empty", "run.root=runs")
    # `~` is expanded as the shell would: a folder of that name is a trap.
    root = str(Path(run.root).expanduser()) if run.root.startswith("~") else run.root
    return replace(run, root=root)


# --- profile --------------------------------------------------------------------------------------

_OFF = "profile.steps=null"


def check_profile(resolution: Resolution, ranks: int) -> None:
    """Check that the steps and ranks exist; the training's steps are resolved, `ranks` is the world size."""
    profile, train = resolution.config.profile, resolution.config.train
    if profile.steps is None:
        resolution.refuse_idle("config", "profile.ranks", _OFF, _example(train))
        return
    try:
        series = series_of(profile.steps)
    except ValueError:
        meant = _meant_steps(str(profile.steps), train)
        message = "must be a step, a series of steps as in 10-12, or a list as in [10,20]"
        resolution.refuse("config", "profile.steps", message, meant or _example(train), _OFF)
        return
    last, steps = series[-1][1], train.steps or 1
    if last > steps:
        longer = f"train.steps={last}" if train.tokens is None else None
        resolution.refuse(
            "config",
            "profile.steps",
            f"is beyond the {counted(steps, 'step')} of the training",
            _example(train),
            longer,
        )
    present = [rank for rank in profile.ranks if rank < ranks]
    if len(present) < len(profile.ranks) or not present:
        resolution.refuse(
            "config",
            "profile.ranks",
            f"must be some of the {counted(ranks, 'rank')}, which are numbered from 0",
            override("profile.ranks", present or [0]),
        )


def _example(train: Train) -> str:
    """Return valid steps: after the warm-up, if the training is long enough."""
    steps = train.steps or 1
    return "profile.steps=10-12" if steps >= 12 else f"profile.steps={steps}"


def _meant_steps(text: str, train: Train) -> str | None:
    """Return the likely meaning of `10:12`, `10..12`, `12-10`: two numbers are the ends."""
    ends = sorted(int(number) for number in re.findall(r"\d+", text))
    if len(ends) != 2 or ends[0] < 1 or ends[1] > (train.steps or 1):
        return None
    return f"profile.steps={ends[0]}-{ends[1]}"

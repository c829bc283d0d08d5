"""Rules of SLURM's settings: each value must fit in one line of a batch script."""

from __future__ import annotations

import re

from nanoscale.config.rules.resolution import Resolution

_TIME = re.compile(
    r"(?P<minutes>[0-9]+)"
    r"|(?P<h>[0-9]+):(?P<m>[0-5]?[0-9]):(?P<s>[0-5]?[0-9])"
    r"|(?P<days>[0-9]+)-(?P<dh>[01]?[0-9]|2[0-3])(:(?P<dm>[0-5]?[0-9])(:(?P<ds>[0-5]?[0-9]))?)?"
)
_SHORT_TIME = re.compile(r"([0-9]+):([0-9]+)")
_OPTION = re.compile(r"--([a-z-]+)")
_KEYS = {
    "account": "launcher.slurm.account",
    "constraint": "launcher.slurm.constraint",
    "exclusive": "launcher.slurm.exclusive",
    "gpus-per-node": "launcher.slurm.gpus",
    "job-name": "run.name",
    "nodes": "launcher.nodes",
    "ntasks": "launcher.nodes",
    "partition": "launcher.slurm.partition",
    "qos": "launcher.slurm.qos",
    "signal": "launcher.slurm.signal_before_s",
    "time": "launcher.slurm.time",
}
"""Options of sbatch that a key replaces."""
_OURS = (
    "array",
    "no-requeue",
    "ntasks-per-node",
    "open-mode",
    "output",
    "parsable",
    "requeue",
    "test-only",
    "wait",
    "wrap",
)
"""Options of sbatch by which a run is followed and resumed."""
_LINES = ("partition", "account", "qos", "constraint", "gpus")


def time_limit_s(text: str) -> int | None:
    """Return the seconds of a time limit: minutes, H:MM:SS or D-HH[:MM[:SS]]; None if it is invalid."""
    parts = _TIME.fullmatch(text)
    if parts is None:
        return None
    values = {name: int(part or 0) for name, part in parts.groupdict().items()}
    hours = values["days"] * 24 + values["dh"] + values["h"]
    minutes = hours * 60 + values["dm"] + values["m"] + values["minutes"]
    return minutes * 60 + values["ds"] + values["s"]


def check_slurm(resolution: Resolution) -> None:
    """Check the forms of its values."""
    slurm = resolution.config.launcher.slurm
    for name in _LINES:
        value = getattr(slurm, name)
        if value is not None and not is_line(value):
            key = f"launcher.slurm.{name}"
            resolution.refuse(key, "must be one line of printable characters", f"{key}=null")
    key, given = "launcher.slurm.directives", slurm.directives
    wrong = [text for text in given if not text.startswith("--") or not is_line(text)]
    if wrong:
        corrected = ",".join(f'"--{text.lstrip("- ")}"' for text in given if is_line(text))
        message = f"holds {wrong[0]!r}; each is one long option of sbatch, beginning with `--`"
        resolution.refuse(key, message, f"'{key}=[{corrected}]'" if corrected else None)
    for text in given:
        option = _OPTION.match(text)
        name, value = option[1] if option else "", text.partition("=")[2]
        if name in _KEYS:
            message = f"holds --{name}, for which nanoscale has a key"
            resolution.refuse(key, message, f"{_KEYS[name]}={value or '…'}")
        elif name in _OURS:
            resolution.refuse(key, f"holds --{name}, which nanoscale sets itself", None)
    if slurm.time is None:
        return
    key, text = "launcher.slurm.time", slurm.time
    limit, before = time_limit_s(text), slurm.signal_before_s
    if limit is None:
        message, meant = "must be minutes, H:MM:SS or D-HH:MM:SS", ["1:30:00", "2-00:00:00"]
        if short := _SHORT_TIME.fullmatch(text):
            # SLURM reads `1:30` as minutes and seconds, people as hours and minutes.
            first, second = int(short[1]), int(short[2])
            meant = [f"{first}:{second:02}:00", f"0:{first:02}:{second:02}"]
        resolution.refuse(key, message, *(f"{key}={time}" for time in meant))
    elif limit == 0:
        resolution.refuse(key, "must be above 0", f"{key}=null")
    elif before >= limit:
        message = f"is not shorter than the time limit, {limit} s ({key}={text})"
        shorter = f"launcher.slurm.signal_before_s={limit // 2}"
        resolution.refuse("launcher.slurm.signal_before_s", message, shorter)


def is_line(text: str) -> bool:
    return text.isprintable() and text.strip() != ""

"""Rules of the environment variables of ranks."""

from __future__ import annotations

import re
from collections.abc import Iterator

from nanoscale.common.errors import Violation
from nanoscale.config.composing.interpolation import SECRET
from nanoscale.config.rules.resolution import Resolution

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_PASSED = re.compile(r"[A-Za-z_][A-Za-z0-9_]*\*?")
_OURS = re.compile(
    r"(LOCAL_|GROUP_|ROLE_)?(RANK|WORLD_SIZE)|MASTER_(ADDR|PORT)|(TORCHELASTIC|NANOSCALE)_.*"
)
"""Variables that define a rank's identity."""


def check_environment(resolution: Resolution) -> None:
    """Check `launcher.env` and `launcher.pass_env`."""
    source = resolution.composed.source("launcher.env")
    for name, value in resolution.config.launcher.env.items():
        for message, suggestions in _wrong(name, value):
            # Not the value: it may be a secret.
            wrong = Violation(f"launcher.env.{name}", None, source, message, suggestions)
            resolution.add("config", wrong)
    for entry in resolution.config.launcher.pass_env:
        if not _PASSED.fullmatch(entry):
            message = (
                f"holds {entry!r}, which is neither a variable's name nor its beginning with `*`"
            )
            resolution.refuse(
                "config", "launcher.pass_env", message, "'launcher.pass_env=[WANDB_*]'"
            )


def _wrong(name: str, value: object) -> Iterator[tuple[str, tuple[str, ...]]]:
    if not _NAME.fullmatch(name):
        yield (
            "is not the name of a variable: letters, digits and underscores, not starting with a digit",
            (),
        )
    elif _OURS.fullmatch(name):
        yield "is set by the launcher for every rank", ()
    elif name == "OMP_NUM_THREADS":
        yield "is set by launcher.threads", (f"launcher.threads={value}",)
    elif SECRET.search(name):
        message = (
            "looks like a secret, and would be written to the run directory; set it in your shell "
            "and pass it on"
        )
        yield message, (f"'launcher.pass_env=[{name}]'",)
    if not isinstance(value, (str, int, float)):
        yield "must be a text, a number, true or false", ()
    elif isinstance(value, str) and "\0" in value:
        yield "holds a NUL character, which no variable can", ()

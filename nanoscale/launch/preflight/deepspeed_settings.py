"""What only another program can judge: settings handed through to DeepSpeed."""

from __future__ import annotations

import json
import subprocess
import sys

from nanoscale.common.errors import Violation
from nanoscale.config.deepspeed import deepspeed_settings
from nanoscale.config.schema import Config
from nanoscale.config.suggest import nearest
from nanoscale.config.values.composed import Composed
from nanoscale.config.violations import refuse, shown


def check_extra(composed: Composed, config: Config) -> None:
    """Let DeepSpeed's own class judge `backend.extra`; it takes seconds, and only where there is any.

    Raises:
        UserError: with everything that it finds wrong.
    """
    if config.backend.name != "deepspeed" or not config.backend.extra:
        return
    words = [sys.executable, "-m", "nanoscale.backends.deepspeed.validate"]
    settings = json.dumps(deepspeed_settings(config))
    done = subprocess.run(
        words, input=settings, capture_output=True, encoding="utf-8", errors="replace", check=False
    )
    if done.returncode:
        last = done.stderr.strip().splitlines()[-1:]
        message = f"cannot be judged: {''.join(last) or 'DeepSpeed does not start'}"
        refuse([Violation("backend.extra", None, composed.source("backend.extra"), message)])
    problems = json.loads(done.stdout.splitlines()[-1])
    violations = [
        Violation(
            f"backend.extra.{path}".rstrip("."),
            None,
            composed.source("backend.extra"),
            message,
            tuple(f"backend.extra.{name}={shown('…')}" for name in nearest(path, known)),
        )
        for path, message, known in problems
    ]
    if violations:
        refuse(violations)

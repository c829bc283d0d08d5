"""The check of settings for DeepSpeed by DeepSpeed itself."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator, Sequence

from nanoscale.common.errors import Violation
from nanoscale.config.deepspeed import OWNED, deepspeed_settings
from nanoscale.config.resolved import ResolvedConfig
from nanoscale.config.values.convert import fits
from nanoscale.config.values.provenance import Composed
from nanoscale.config.violations import nearest, override, refuse


def check_extra(composed: Composed, config: ResolvedConfig) -> None:
    """Check `backend.extra` with DeepSpeed's own class; it takes seconds, and runs only if the key is set.

    Raises:
        UserError: with all problems that it finds.
    """
    if config.backend.name != "deepspeed" or not config.backend.extra:
        return
    command = [sys.executable, "-m", "nanoscale.backends.deepspeed.validate"]
    settings = json.dumps(deepspeed_settings(config))
    result = subprocess.run(
        command,
        input=settings,
        capture_output=True,
        encoding="utf-8",
        errors="replace",
        check=False,
    )
    if result.returncode:
        last = result.stderr.strip().splitlines()[-1:]
        message = f"cannot be checked: {''.join(last) or 'DeepSpeed does not start'}"
        refuse([Violation("backend.extra", None, composed.source("backend.extra"), message)])
    problems = json.loads(result.stdout.splitlines()[-1])
    violations = [
        Violation(
            f"backend.extra.{path}".rstrip("."),
            None,
            composed.source("backend.extra"),
            message,
            tuple(_suggestions(nearest(path, known_names), config.backend.extra.get(path))),
        )
        for path, message, known_names in problems
    ]
    if violations:
        refuse(violations)


def _suggestions(names: Sequence[str], value: object) -> Iterator[str]:
    """Yield the override that sets each of DeepSpeed's settings, by our key if one decides it."""
    for name in names:
        key = OWNED.get(name)
        if key is None or fits(key, value):
            yield override(key or f"backend.extra.{name}", value)

"""`nanoscale plan --calibrate RUN…`: learn from runs what their machine reaches."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from nanoscale.cli.common.files import require_writable, write_file
from nanoscale.cli.common.output import DONE, console, print_json
from nanoscale.common.errors import UserError
from nanoscale.config.composing.compose import compose
from nanoscale.config.schema import Cluster
from nanoscale.plan.calibration import calibrate, observed_runs
from nanoscale.runs.directory import read_json
from nanoscale.view.plan.calibration_text import document, print_calibration


def calibrate_from(
    words: Sequence[str],
    file: Path | None,
    config_dir: Path | None,
    overwrite: bool,
    as_json: bool,
) -> int:
    """Fit the runs among the words on the hardware that the other words describe, and write the file.

    Raises:
        UserError: a run cannot be used, the words set more than the hardware, or the file exists and has other
            content.
    """
    names, overrides = _sorted(words)
    cluster = _described(overrides, config_dir)
    runs = observed_runs(names, cluster)
    file = (file or Path(f"efficiency-{runs[0].device}.json")).absolute()
    require_writable("--write", file, overwrite=overwrite, is_own=_is_calibration)
    found = calibrate([run.observation for run in runs])
    about = document(runs, found, file)
    text = json.dumps(about, indent=2, ensure_ascii=False) + "\n"
    write_file("--write", file, text, overwrite=overwrite or _is_calibration(file))
    if as_json:
        print_json(about)
    else:
        print_calibration(console(), about)
    return DONE


def _is_calibration(file: Path) -> bool:
    """True for a file that `--calibrate` wrote."""
    try:
        content = read_json(file)
    except (OSError, ValueError):
        return False
    return isinstance(content, dict) and {"efficiency", "learned", "runs"} <= content.keys()


def _sorted(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Separate runs and overrides. A run's path may contain any character, an override's key no slash."""
    names = [word for word in words if "/" in word.partition("=")[0] or "=" not in word]
    overrides = [word for word in words if word not in names]
    if not names:
        raise UserError("usage", "--calibrate needs runs: type nanoscale plan --calibrate RUN …")
    other = [word for word in overrides if not word.startswith(("cluster=", "cluster."))]
    if other:
        raise UserError(
            "usage",
            f"{', '.join(other)} cannot be given with --calibrate: the runs hold their "
            f"configuration; only the machine may be described, as in cluster=h100-sxm",
        )
    return names, overrides


def _described(overrides: list[str], config_dir: Path | None) -> Cluster | None:
    """Return the machine of the command line; None if each run uses its own."""
    return compose(overrides, config_dir=config_dir).config.cluster if overrides else None

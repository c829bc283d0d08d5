"""`nanoscale plan`: whether a layout fits and how fast it is, before anything is launched."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING

from nanoscale.cli.common import options as opt
from nanoscale.cli.common.output import (
    DOES_NOT_FIT,
    DONE,
    answer,
    console,
    require_writable,
    show_report,
    write_file,
    write_page,
)
from nanoscale.cli.common.rehearsal import with_memory
from nanoscale.cli.common.request import HOSTS, CommandLine, request_job, requesting
from nanoscale.common.display import note
from nanoscale.common.errors import UserError

if TYPE_CHECKING:
    from nanoscale.config.machines import Host
    from nanoscale.config.values.provenance import Composed
    from nanoscale.plan.hardware.software import Software


class SoftwareName(StrEnum):
    """The names of the records in `plan.hardware.software`."""

    NANOSCALE = "nanoscale"
    TORCH = "torch"
    TORCH_WHOLELOSS = "torch-wholeloss"
    MEGATRON = "megatron"


@requesting("config", "config_dir", *HOSTS)
def plan(
    line: CommandLine,
    explain: bool = opt.option(
        "Show the arithmetic behind every number", "--explain", default=False
    ),
    search: bool = opt.option(
        "Rank all legal layouts; keys set here keep their values", "--search", default=False
    ),
    software: SoftwareName = opt.option(
        "Predict what another engine reaches: its overlaps, kernels and memory",
        "--as",
        default=SoftwareName.NANOSCALE,
    ),
    calibrate: bool = opt.option(
        "Learn the efficiencies of the machine from these runs, for later plans",
        "--calibrate",
        default=False,
    ),
    write: Path | None = opt.option(
        "Write the recipe of --search, or the efficiencies of --calibrate, to FILE", metavar="FILE"
    ),
    html: opt.Html = None,
    overwrite: opt.Overwrite = False,
    as_json: opt.AsJson = False,
) -> int:
    """Predict a job's memory, speed and cost before it starts.

    The hardware is what `cluster` describes, or this machine.
    """
    from nanoscale.plan.hardware.software import RECORDS

    require_writable("--html", html, overwrite=overwrite)
    if calibrate:
        if line.options or line.config_file or html or search or explain:
            raise UserError(
                "usage", "--calibrate goes with RUN…, cluster=…, --write and --json alone"
            )
        return _calibrate(line.overrides or [], write, line.config_dir, overwrite, as_json)
    if write is not None:
        require_writable("--write", write, overwrite=overwrite)
        if html is not None and html.resolve() == write.resolve():
            raise UserError("usage", f"--write and --html both name {html}")
    line = _on_reference(line)
    if search:
        return _search(line.compose(), RECORDS[software.value], write, html, overwrite, as_json)
    opt.refuse_unused(
        (True, "needs --search or --calibrate: type --search --write FILE", {"--write": write})
    )
    return _one(line, RECORDS[software.value], explain, html, overwrite, as_json)


def _on_reference(line: CommandLine) -> CommandLine:
    """Return the line with the recipe's reference cluster, if there is no GPU and no cluster is named."""
    from nanoscale.common.devices import detect

    overrides = list(line.overrides or ())
    named = any(word.startswith("cluster") for word in overrides)
    if named or line.options or line.config_file is not None or detect().kind != "cpu":
        return line
    config = line.compose().config
    words = config.cluster.reference
    if not words or config.cluster.device is not None or config.launcher.device != "auto":
        return line
    if strange := [word for word in words if not word.startswith("cluster")]:
        raise UserError("config", f"cluster.reference has {strange[0]}, which is not of cluster")
    note(
        f"there is no GPU here: planned for the recipe's reference, {' '.join(words)}. Type cluster=local to "
        f"plan for this machine"
    )
    return replace(line, overrides=[*words, *overrides])


def _one(
    line: CommandLine,
    software: Software,
    explain: bool,
    html: Path | None,
    overwrite: bool,
    as_json: bool,
) -> int:
    from nanoscale.plan.hardware.planned_devices import planned_devices
    from nanoscale.plan.hardware.software import NANOSCALE
    from nanoscale.plan.predict import predict
    from nanoscale.rehearse.rehearsals import known_of
    from nanoscale.view.plan.choice_text import choice_line
    from nanoscale.view.plan.prediction import document, prediction_report
    from nanoscale.view.plan.verdict import remedy

    request = request_job(line, starts=False, devices=planned_devices, hosts=_planned_hosts)
    config, choice = request.config, request.choice
    prediction = predict(config, software=software)
    if software is NANOSCALE:
        prediction = with_memory(prediction, known_of(config))
    content, about = document(prediction), []
    if choice is not None:
        content["choice"] = choice_line(choice)
        about.append(f"layout chosen by the plan: {content['choice']}")
    if not prediction.fits and software is NANOSCALE:
        content["remedy"] = remedy(request.composed, prediction, request.devices)
        about.append(content["remedy"])
    if html is not None:
        write_page(
            html, prediction_report(prediction, explain=True, about=about), overwrite=overwrite
        )
    report = prediction_report(prediction, explain=explain, about=about)
    answer(as_json, content, show_report, report)
    return DONE if prediction.fits else DOES_NOT_FIT


def _search(
    composed: Composed,
    software: Software,
    write: Path | None,
    html: Path | None,
    overwrite: bool,
    as_json: bool,
) -> int:
    from nanoscale.plan.hardware.hardware import hardware_of
    from nanoscale.plan.hardware.planned_devices import planned_devices, planned_ranks
    from nanoscale.plan.search.search import search, search_other_backend
    from nanoscale.plan.search.search_space import recipe_of, search_space
    from nanoscale.view.plan.search_text import print_found, search_document, search_report

    devices = planned_devices(composed)
    ranks = planned_ranks(composed, devices, _planned_hosts(composed))
    space = search_space(composed, devices, hardware_of(composed.config), ranks)
    hardware = hardware_of(space.base)  # with the type that precision.compute=auto became
    result, other = search(space, hardware, software), None
    if not composed.by_hand("backend.name"):
        other = search_other_backend(space, hardware, software)
    if html is not None and result.best is not None:
        write_page(html, search_report(result), overwrite=overwrite)
    if write is not None and result.best is not None:
        recipe = recipe_of(composed, result.best.config)
        write_file("--write", write, recipe, overwrite=overwrite)
    found = search_document(composed, result, other)
    answer(as_json, found, print_found, console(), composed, space, result, other)
    return DONE if result.best is not None else DOES_NOT_FIT


def _planned_hosts(composed: Composed) -> tuple[Host, ...]:
    """Return the hosts of the hostfile, or the nodes that SLURM would be asked for."""
    from nanoscale.config.rules.launcher import requested_launcher
    from nanoscale.launch.slurm.allocation import requested_nodes
    from nanoscale.launch.transport.transport import read_hosts

    return (requested_nodes if requested_launcher(composed) == "slurm" else read_hosts)(composed)


# --- calibration ----------------------------------------------------------------------------------


def _calibrate(
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
    from nanoscale.config.composing.compose import compose
    from nanoscale.plan.calibration import calibrate, observed_runs
    from nanoscale.view.plan.calibration_text import calibration_report, document

    names, overrides = _sorted(words)
    # Without overrides, each run's own machine is used.
    cluster = compose(overrides, config_dir=config_dir).config.cluster if overrides else None
    runs = observed_runs(names, cluster)
    file = (file or Path(f"efficiency-{runs[0].device}.json")).absolute()
    require_writable("--write", file, overwrite=overwrite, is_own=_is_calibration)
    found = calibrate([run.observation for run in runs])
    about = document(runs, found, file)
    text = json.dumps(about, indent=2, ensure_ascii=False) + "\n"
    write_file("--write", file, text, overwrite=overwrite or _is_calibration(file))
    answer(as_json, about, show_report, calibration_report(about))
    return DONE


def _is_calibration(file: Path) -> bool:
    """True for a file that `--calibrate` wrote."""
    from nanoscale.runs.directory import read_json

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

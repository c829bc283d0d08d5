"""`nanoscale plan`: whether a layout fits and how fast it is, before anything is launched."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from nanoscale.cli.common import options as opt
from nanoscale.cli.common.described_machines import on_described_hosts, planned_hosts
from nanoscale.cli.common.output import (
    DOES_NOT_FIT,
    DONE,
    answer,
    error_document,
    require_writable,
    saying,
    show_report,
    write_file,
    write_page,
)
from nanoscale.cli.common.rehearsal import with_memory
from nanoscale.cli.common.request import HOSTS, CommandLine, request_job, requesting
from nanoscale.common import display
from nanoscale.common.devices import detect
from nanoscale.common.display import note
from nanoscale.common.errors import UserError
from nanoscale.common.json_text import Json
from nanoscale.config.violations import refuse
from nanoscale.runs.directory import read_json

if TYPE_CHECKING:
    from nanoscale.config.composing.variants import Variant
    from nanoscale.config.resolved import ResolvedConfig
    from nanoscale.config.values.provenance import Composed
    from nanoscale.launch.request import Request
    from nanoscale.plan.predict import Prediction
    from nanoscale.plan.search.candidates import SearchSpace


@requesting("config", "config_dir", *HOSTS, "trust")
def plan(
    line: CommandLine,
    explain: bool = opt.flag("Show the arithmetic behind every number", "--explain"),
    search: bool = opt.flag("Rank all legal layouts; keys set here keep their values", "--search"),
    calibrate: bool = opt.flag(
        "Learn the efficiencies of the machine from these runs, for later plans", "--calibrate"
    ),
    budget: str | None = opt.option(
        "Show the steps for an amount of money, of device hours or of days of the job",
        metavar="20000EUR|2000h|14d",
    ),
    inference: bool = opt.flag("Show the memory of generate and eval on one device", "--inference"),
    write: Path | None = opt.option(
        "Write the recipe of --search, or the efficiencies of --calibrate, to FILE", metavar="FILE"
    ),
    html: opt.Html = None,
    overwrite: opt.Overwrite = False,
    as_json: opt.AsJson = False,
) -> int:
    """Predict a job's memory, speed and cost before it starts.

    The hardware is what `cluster` describes, or this machine. Lists of values, as in
    cluster=h100-sxm,a100-80 cluster.hosts=1,2,4, show a table with a row for each combination.
    """
    from nanoscale.config.composing.variants import expand

    require_writable("--html", html, overwrite=overwrite)
    if calibrate:
        if any((line.options, line.config_file, html, search, explain, budget, inference)):
            what = "--calibrate goes with RUN…, cluster=…, --write and --json alone"
            raise UserError("usage", what)
        return _calibrate(line.overrides or [], write, line.config_dir, overwrite, as_json)
    if write is not None:
        require_writable("--write", write, overwrite=overwrite)
        if html is not None and html.resolve() == write.resolve():
            raise UserError("usage", f"--write and --html both name {html}")
    hosts = {name: line.options.get(key) for name, key in opt.KEYS.items()}
    engine = {"--explain": explain, "--html": html}
    opt.refuse_unused(
        (search, "is for one plan, not for --search", {"--budget": budget, "--inference": inference}),
        (inference, "is for a training, not for --inference", {"--budget": budget, **engine, **hosts}),
        (not search, "needs --search or --calibrate: type --search --write FILE", {"--write": write}),
    )  # fmt: skip
    variants = expand(line.overrides or [], is_array=False)
    if chosen := variants[0].chosen:
        sentence = f"is for one plan, without several values of {' and '.join(chosen)}"
        one_plan = {"--search": search, "--budget": budget, "--inference": inference, **engine}
        opt.refuse_unused((True, sentence, one_plan))
        return _combinations(line, variants, as_json)
    line = on_described_hosts(_on_reference(line, note))
    if search:
        return _search(line, write, html, overwrite, as_json)
    if inference:
        return _inference(_with_length(line), as_json)
    return _one(line, explain, budget, html, overwrite, as_json)


def _on_reference(line: CommandLine, say: Callable[[str], object]) -> CommandLine:
    """Return the line with the recipe's reference cluster, if there is no GPU and no cluster is named; `say`
    is called with a sentence about it."""
    overrides = list(line.overrides or ())
    named = any(word.startswith("cluster") for word in overrides)
    has_hosts = line.options.keys() - {"launcher.nodes", "launcher.devices"}
    if named or has_hosts or line.config_file is not None or detect().kind != "cpu":
        return line
    config = line.compose_settings().config
    words = config.cluster.reference
    if not words or config.cluster.device is not None or config.launcher.device != "auto":
        return line
    if strange := [word for word in words if not word.startswith("cluster")]:
        raise UserError("config", f"cluster.reference has {strange[0]}, which is not of cluster")
    say(
        f"there is no GPU here: planned for the recipe's reference, {' '.join(words)}. Type cluster=local to "
        f"plan for this machine"
    )
    return replace(line, overrides=[*words, *overrides])


def _with_length(line: CommandLine) -> CommandLine:
    """Return the line with a very long training, if nothing sets its length."""
    train = line.compose_settings().config.train
    if any(length is not None for length in (train.steps, train.tokens, train.epochs)):
        return line
    return replace(line, overrides=[*(line.overrides or ()), "train.steps=1000000000"])


def _one(
    line: CommandLine, explain: bool, budget: str | None, html: Path | None,
    overwrite: bool, as_json: bool,
) -> int:  # fmt: skip
    from nanoscale.plan.budget import within_budget
    from nanoscale.view.plan.prediction import bought_training, document, prediction_report
    from nanoscale.view.plan.verdict import remedy

    asked = line if budget is None else _with_length(line)
    request, prediction = _predicted(asked)
    bought = None if budget is None else within_budget(budget, prediction)
    if asked is not line and bought is not None:
        prediction = bought
    content, about = document(prediction, request.choice), []
    if bought is not None:
        override = _accepted(line, request, bought)
        content["budget"], sentence = bought_training(str(budget), bought, override)
        about.append(sentence)
    if "choice" in content:
        about.append(f"layout chosen by the plan: {content['choice']}")
    if not prediction.fits:
        content["remedy"] = remedy(request.composed, prediction, request.devices)
        about.append(content["remedy"])
    if html is not None:
        page = prediction_report(prediction, explain=True, about=about)
        write_page(html, page, overwrite=overwrite)
    report = prediction_report(prediction, explain=explain, about=about)
    answer(as_json, content, show_report, report)
    return DONE if prediction.fits else DOES_NOT_FIT


def _counted(composed: Composed, config: ResolvedConfig) -> ResolvedConfig:
    """Return the configuration with the parameters of a model of transformers counted, without its weights."""
    from nanoscale.launch.preflight.by_library import with_weights

    if config.model.source != "hf":
        return config
    shape = replace(config.model, init_from=None)
    found = with_weights(composed, replace(config, model=shape), fetch=False).model
    return replace(config, model=replace(found, init_from=config.model.init_from))


def _predicted(line: CommandLine) -> tuple[Request, Prediction]:
    from nanoscale.plan.hardware.planned_devices import planned_devices
    from nanoscale.plan.predict import predict
    from nanoscale.rehearse.rehearsals import known_of

    request = request_job(line, starts=False, devices=planned_devices, hosts=planned_hosts)
    request = replace(request, config=_counted(request.composed, request.config))
    return request, with_memory(predict(request.config), known_of(request.config))


def _combinations(line: CommandLine, variants: Sequence[Variant], as_json: bool) -> int:
    """Plan each combination of values, and show them as rows of one table.

    Raises:
        UserError: with what is wrong with the combinations, if none of them can be planned.
    """
    from nanoscale.view.plan.combinations_text import combination, combinations_report

    rows: list[Json] = []
    errors: list[UserError] = []
    notes: dict[str, None] = {}
    with saying() as say:
        for number, one in enumerate(variants, start=1):
            say(f"combination {number} of {len(variants)}")
            row: Json = {"overrides": list(one.words), "values": one.chosen}
            try:
                asked = _on_reference(replace(line, overrides=one.words), notes.setdefault)
                request, prediction = _predicted(on_described_hosts(asked))
                row |= combination(prediction, request.choice)
            except UserError as error:
                errors.append(error)
                row["error"] = error_document(error)
            rows.append(row)
    if len(errors) == len(rows):
        each = {repr(it): it for error in errors for it in error.violations}
        if each:
            refuse(list(each.values()), errors[0].kind)
        raise errors[0]
    for text in notes:
        note(text)
    answer(as_json, {"plans": rows}, show_report, combinations_report(rows))
    return DONE if any(row.get("fits") for row in rows) else DOES_NOT_FIT


def _accepted(line: CommandLine, request: Request, plan: Prediction) -> str:
    """Return the override of a plan's steps, together with the overrides that the rules then advise."""
    from nanoscale.plan.search.choice import search_space

    text = f"train.steps={plan.training.steps}"
    for _ in range(8):
        longer = replace(line, overrides=[*(line.overrides or ()), *shlex.split(text)])
        try:
            search_space(longer.compose(), request.devices, plan.hardware, plan.config.world_size)
            break
        except UserError as error:
            advised = [it.suggestions[0] for it in error.violations if it.suggestions]
            text = " ".join(dict.fromkeys([text, *advised]))
    return text


def _inference(line: CommandLine, as_json: bool) -> int:
    from nanoscale.plan.hardware.hardware import hardware_of
    from nanoscale.plan.hardware.planned_devices import planned_devices
    from nanoscale.view.plan.inference_text import inference_document, inference_report

    composed = line.compose(_space)
    model, hardware = _space(composed).base.model, hardware_of(composed.config)
    on_gpu = planned_devices(composed).kind == "cuda"
    content = inference_document(model, hardware, on_gpu=on_gpu)
    answer(as_json, content, show_report, inference_report(content))
    return DONE if content["fits"] else DOES_NOT_FIT


def _space(composed: Composed) -> SearchSpace:
    """Return the layouts of the planned devices; raise a UserError about what is not the layout."""
    from nanoscale.plan.hardware.hardware import hardware_of
    from nanoscale.plan.hardware.planned_devices import planned_devices, planned_ranks
    from nanoscale.plan.search.choice import search_space

    devices = planned_devices(composed)
    ranks = planned_ranks(composed, devices, planned_hosts(composed))
    return search_space(composed, devices, hardware_of(composed.config), ranks)


def _search(
    line: CommandLine, write: Path | None, html: Path | None,
    overwrite: bool, as_json: bool,
) -> int:  # fmt: skip
    from nanoscale.plan.hardware.hardware import hardware_of
    from nanoscale.plan.search.choice import recipe_of
    from nanoscale.plan.search.search import search, search_other_backend
    from nanoscale.view.plan.search_text import print_found, search_document, search_report

    composed = line.compose(_space)
    space = _space(composed)
    space = replace(space, base=_counted(composed, space.base))
    hardware = hardware_of(space.base)  # with the type that precision.compute=auto became
    result, other = search(space, hardware), None
    if not composed.by_hand("backend.name"):
        other = search_other_backend(space, hardware)
    if html is not None and result.best is not None:
        write_page(html, search_report(result), overwrite=overwrite)
    if write is not None and result.best is not None:
        recipe = recipe_of(composed, result.best.config)
        write_file("--write", write, recipe, overwrite=overwrite)
    search_json = search_document(composed, result, other)
    answer(as_json, search_json, print_found, display.console(), composed, space, result, other)
    return DONE if result.best is not None else DOES_NOT_FIT


# --- calibration ----------------------------------------------------------------------------------


def _calibrate(
    words: Sequence[str], file: Path | None, config_dir: Path | None, overwrite: bool, as_json: bool
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
    calibration = calibrate([run.observation for run in runs])
    about = document(runs, calibration, file)
    text = f"{json.dumps(about, indent=2, ensure_ascii=False)}\n"
    write_file("--write", file, text, overwrite=overwrite or _is_calibration(file))
    answer(as_json, about, show_report, calibration_report(about))
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

"""`nanoscale eval`: how good a checkpoint is, by the loss on validation data or by lm-eval's tasks."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nanoscale.cli.common import options as opt
from nanoscale.cli.common.output import DONE, FAILED, print_json, saying
from nanoscale.cli.common.request import LAUNCH, CommandLine, request_job, requesting
from nanoscale.cli.jobs.generate import calm_threads
from nanoscale.common import display
from nanoscale.common.errors import UserError

if TYPE_CHECKING:
    from nanoscale.checkpoint.store import StoredCheckpoint
    from nanoscale.config.resolved import ResolvedConfig
    from nanoscale.config.rules import Host


@requesting(*LAUNCH)
def eval(
    model: opt.Model,
    line: CommandLine,
    step: opt.Step = None,
    samples: int | None = opt.option(
        "Take only this number of samples", shown="all held-out samples"
    ),
    tasks: str | None = opt.option("Run these lm-eval tasks instead of the loss", metavar="A,B"),
    limit: int | None = opt.option("Take only this number of documents of each task", shown="all"),
    few_shot: int | None = opt.option(
        "Give this number of examples before each question of a task", shown="the task's"
    ),
    tasks_dir: Path | None = opt.option("Read more tasks from this folder", metavar="DIR"),
    device: opt.Device = None,
    dtype: opt.ComputeDtype = None,
    tokenizer: opt.Tokenizer = None,
    as_json: opt.AsJson = False,
) -> int:
    """Compute a checkpoint's validation loss, or run lm-eval tasks.

    The loss comes with its perplexity and bits per byte. The job's ranks compute it, in the run's layout or
    that of the overrides, on the run's data or on data.path=…. The run is not changed, and may be running. A
    Hugging Face folder needs overrides for its data. --device, --dtype and --tokenizer are for --tasks;
    launcher.device and precision set them for the loss. Tasks use all GPUs of this machine, or --num-gpus of
    them.
    """
    _check(samples, limit, few_shot, tasks, (tasks_dir, device, dtype, tokenizer))
    if tasks is not None:
        num_gpus = _gpus_of_tasks(line, device)
        names = [name for name in tasks.split(",") if name]
        opening = {"step": step, "dtype": dtype, "tokenizer": tokenizer}
        return _run_tasks(
            model, opening, names, limit, few_shot, tasks_dir, device, num_gpus, as_json
        )
    return _loss(model, line, step, samples, as_json)


def _check(
    samples: int | None,
    limit: int | None,
    few_shot: int | None,
    tasks: str | None,
    of_tasks: tuple[Any, ...],
) -> None:
    for option, value, least in (
        ("--samples", samples, 1),
        ("--limit", limit, 1),
        ("--few-shot", few_shot, 0),
    ):
        if value is not None and value < least:
            raise UserError("usage", f"{option} {value}: must be at least {least}")
    if tasks is not None and samples is not None:
        raise UserError("usage", "--samples is for the loss; with --tasks use --limit")
    if tasks is None and any(value is not None for value in (limit, few_shot, *of_tasks)):
        names = "--limit, --few-shot, --tasks-dir, --device, --dtype and --tokenizer"
        raise UserError("usage", f"{names} are for --tasks only")


def _gpus_of_tasks(line: CommandLine, device: str | None) -> int | None:
    """Return --num-gpus, and refuse what is for the loss alone."""
    if line.overrides:
        raise UserError("usage", f"{line.overrides[0]}: overrides cannot be used with --tasks")
    given = {option: line.options[key] for option, key in opt.KEYS.items() if key in line.options}
    devices = given.pop("--num-gpus", None)
    if unused := [*given, *(["--trust"] if line.trust else [])]:
        raise UserError("usage", f"{unused[0]} cannot be used with --tasks, which run here")
    num_gpus = devices.value if devices is not None else None
    assert num_gpus is None or isinstance(num_gpus, int)
    if num_gpus is not None and device is not None:
        raise UserError("usage", "--device and --num-gpus are both given; remove one of them")
    if num_gpus is not None and num_gpus < 1:
        raise UserError("usage", f"--num-gpus {num_gpus}: must be at least 1")
    return num_gpus


# --- the loss -------------------------------------------------------------------------------------


def _loss(
    name: str, line: CommandLine, step: int | None, samples: int | None, as_json: bool
) -> int:
    from nanoscale.launch.lifecycle.one_shot_job import OneShotJobError, run_one_shot_job
    from nanoscale.processes.messages import EVALUATION
    from nanoscale.view.measured_text import evaluation_document, print_loss

    folder = Path(name).expanduser()
    if (folder / "config.json").is_file():
        if step is not None:
            raise UserError("usage", f"--step {step}: {folder} is a Hugging Face model, not a run")
        config, hosts, stored = *_of_folder(folder.absolute(), line), None
    else:
        config, hosts, stored = _of_run(name, line, step)
    task = {
        "checkpoint": str(stored.path) if stored else None,
        "step": stored.step if stored else None,
        "samples": samples,
    }
    with saying() as say:
        say("starting the ranks …")
        try:
            figures = run_one_shot_job(EVALUATION, config, hosts, task, say)
        except OneShotJobError as error:
            display.note(f"error: {error}")
            return FAILED
    about = evaluation_document(config, task, figures)
    if as_json:
        print_json(about)
    else:
        print_loss(about)
    return DONE


def _of_run(
    name: str, line: CommandLine, step: int | None
) -> tuple[ResolvedConfig, tuple[Host, ...], StoredCheckpoint]:
    """Return the run's configuration with the changes, checked against the machines, and the checkpoint."""
    from nanoscale.checkpoint.configuration import require_model
    from nanoscale.checkpoint.store import find_checkpoint
    from nanoscale.config.composing.frozen import load
    from nanoscale.runs.directory import RunDirectory

    run = RunDirectory.open(name)
    checked = request_job(replace(line, config_file=run.config))
    stored, hosts = find_checkpoint(run.checkpoints, step), checked.hosts
    require_model(run, stored)
    config = replace(checked.config, run=load(run.config).run)
    # Its checkpoint has the weights; the initial folder may be missing.
    if config.lora.rank:  # the checkpoint has only the adapters
        from nanoscale.checkpoint.hf.adapters import require_base_of

        require_base_of(config, stored.manifest, "model.init_from=/where/it/is/now")
        return config, hosts, stored
    return replace(config, model=replace(config.model, init_from=None)), hosts, stored


def _of_folder(folder: Path, line: CommandLine) -> tuple[ResolvedConfig, tuple[Host, ...]]:
    """Return a configuration that starts from the weights of a Hugging Face folder."""
    from nanoscale.config.violations import override
    from nanoscale.launch.preflight.pretrained import with_weights

    overrides = [override("model.init_from", str(folder)), *(line.overrides or ())]
    train = replace(line, overrides=overrides).compose().config.train
    if train.steps is None and train.tokens is None:  # nothing is trained
        overrides.append("train.steps=1")
    checked = request_job(replace(line, overrides=overrides))
    return with_weights(checked.composed, checked.config, fetch=True), checked.hosts


# --- tasks ----------------------------------------------------------------------------------------


def _run_tasks(
    model: str,
    opening: dict[str, Any],
    names: list[str],
    limit: int | None,
    few_shot: int | None,
    tasks_dir: Path | None,
    device: str | None,
    num_gpus: int | None,
    as_json: bool,
) -> int:
    calm_threads()
    from nanoscale.launch.slurm.allocation import require_one_launcher

    require_one_launcher()
    from nanoscale.generate.harness import Answers, evaluate_tasks, require_library
    from nanoscale.generate.replicas import replicated
    from nanoscale.generate.weights import find_devices, open_model
    from nanoscale.view.measured_text import plain_numbers

    require_library()
    devices = find_devices(device, num_gpus, several=True)
    opened = open_model(model, **opening, device=devices[0], weights=len(devices) == 1)
    with saying() as say, replicated(model, opening, opened, devices) as run_all:
        answers = Answers(opened, lambda done, of: say(f"{done:,} of {of:,} requests"), run_all)
        found = evaluate_tasks(answers, names, limit, few_shot, tasks_dir)
    if as_json:
        tasks = plain_numbers(found["results"])
        print_json({"model": opened.source, "limit": limit, "tasks": tasks})
        return DONE
    from lm_eval.utils import make_table

    display.show(opened.source)
    display.show(make_table(found).rstrip())
    return DONE

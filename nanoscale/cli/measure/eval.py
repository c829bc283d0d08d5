"""`nanoscale eval`: how good a checkpoint is, by the loss on validation data or by lm-eval's tasks."""

from __future__ import annotations

import sys
from contextlib import nullcontext, redirect_stdout
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from nanoscale.checkpoint.store import StoredCheckpoint, find_checkpoint
from nanoscale.cli.common import options as opt
from nanoscale.cli.common.output import DONE, FAILED, answer, print_json, saying
from nanoscale.cli.common.request import LAUNCH, CommandLine, request_job, requesting
from nanoscale.cli.jobs.generate import calm_threads
from nanoscale.common import display
from nanoscale.common.errors import UserError
from nanoscale.config.violations import override
from nanoscale.runs.directory import RunDirectory

if TYPE_CHECKING:
    from nanoscale.config.resolved import ResolvedConfig
    from nanoscale.config.rules import Host


@requesting(*LAUNCH)
def eval(
    model: opt.Model,
    line: CommandLine,
    step: opt.Step = None,
    samples: int | None = opt.option(
        "Take only this number of samples", shown="all held-out samples", group="Loss"
    ),
    tasks: str | None = opt.of_tasks("Run these lm-eval tasks instead of the loss", metavar="A,B"),
    limit: int | None = opt.of_tasks(
        "Take only this number of documents of each task", shown="all"
    ),
    few_shot: int | None = opt.of_tasks(
        "Give this number of examples before each question of a task", shown="the task's"
    ),
    tasks_dir: Path | None = opt.of_tasks("Read more tasks from this folder", metavar="DIR"),
    apply_chat_template: bool = opt.flag(
        "Write questions in the model's chat template", "--apply-chat-template", group="Tasks"
    ),
    device: opt.Device = None,
    dtype: opt.ComputeDtype = None,
    tokenizer: opt.Tokenizer = None,
    as_json: opt.AsJson = False,
) -> int:
    """Compute a checkpoint's validation loss, or run lm-eval tasks.

    The loss comes with its perplexity and bits per byte. The job's ranks compute it, in the run's layout or
    the overrides' layout, on the run's data or on data.path=…. The run is not changed, and may be running. A
    Hugging Face folder needs overrides for its data. --device, --dtype and --tokenizer are for --tasks;
    launcher.device and precision set them for the loss. Tasks use all GPUs of this machine, or --num-gpus of
    them.
    """
    opt.require_at_least(1, {"--samples": samples, "--limit": limit})
    opt.require_at_least(0, {"--few-shot": few_shot})
    of_tasks = (limit, few_shot, tasks_dir, device, dtype, tokenizer)
    names = "--limit, --few-shot, --tasks-dir, --device, --dtype and --tokenizer"
    of_hosts = {name: line.options.get(key) for name, key in opt.KEYS.items()}
    devices = of_hosts.pop("--num-gpus")
    has_tasks = tasks is not None
    opt.refuse_unused(
        (not has_tasks, "is for --tasks only", {"--apply-chat-template": apply_chat_template}),
        (has_tasks, "is for the loss; with --tasks use --limit", {"--samples": samples}),
        (not has_tasks, "are for --tasks only", {names: any(it is not None for it in of_tasks)}),
        (has_tasks, "overrides cannot be used with --tasks", {f"{it}:": it for it in line.overrides or ()}),
        (has_tasks, "cannot be used with --tasks, which run here", {**of_hosts, "--trust": line.trust}),
    )  # fmt: skip
    if tasks is None:
        return _loss(model, line, step, samples, as_json)
    num_gpus = cast(int, devices.value) if devices is not None else None
    opt.refuse_several({"--device": device, "--num-gpus": num_gpus})
    opt.require_at_least(1, {"--num-gpus": num_gpus})
    chosen = [name for name in tasks.split(",") if name]
    opening = {"step": step, "dtype": dtype, "tokenizer": tokenizer}
    which = chosen, limit, few_shot, tasks_dir
    return _run_tasks(model, opening, (device, num_gpus), which, apply_chat_template, as_json)


# --- the loss -------------------------------------------------------------------------------------


def _loss(
    name: str, line: CommandLine, step: int | None, samples: int | None, as_json: bool
) -> int:
    from nanoscale.launch.lifecycle.job_execution import OneShotJobError, run_one_shot_job
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
    answer(as_json, about, print_loss)
    return DONE


def _of_run(
    name: str, line: CommandLine, step: int | None
) -> tuple[ResolvedConfig, tuple[Host, ...], StoredCheckpoint]:
    """Return the run's configuration with the changes, checked against the machines, and the checkpoint."""
    from nanoscale.checkpoint.configuration import require_model
    from nanoscale.config.composing.frozen import load

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
    from nanoscale.launch.preflight.by_library import with_weights

    overrides = [override("model.init_from", str(folder)), *(line.overrides or ())]
    train = replace(line, overrides=overrides).compose_settings().config.train
    if train.steps is None and train.tokens is None:  # nothing is trained
        overrides.append("train.steps=1")
    checked = request_job(replace(line, overrides=overrides))
    return with_weights(checked.composed, checked.config, fetch=True), checked.hosts


# --- tasks ----------------------------------------------------------------------------------------


def _run_tasks(
    model: str, opening: dict[str, Any], on: tuple[str | None, int | None],
    which: tuple[list[str], int | None, int | None, Path | None], in_template: bool, as_json: bool,
) -> int:  # fmt: skip
    """Run tasks of lm-eval on devices of this machine, and show their scores.

    Args:
        on: the device, or the number of GPUs.
        which: the tasks, and as of `evaluate_tasks` the limit, the examples and the folder with more tasks.
        in_template: True to ask in the model's chat template.
    """
    calm_threads()
    from nanoscale.launch.batch.allocation import require_one_launcher

    require_one_launcher()
    from nanoscale.generate.conversation import conversing
    from nanoscale.generate.harness import Answers, evaluate_tasks, require_library
    from nanoscale.generate.replicas import replicated
    from nanoscale.generate.weights import find_devices, open_model
    from nanoscale.view.measured_text import plain_numbers

    require_library()
    devices = find_devices(*on, several=True)
    opened = open_model(model, **opening, device=devices[0], weights=len(devices) == 1)
    # lm-eval prints lines of its own.
    with (
        saying() as say,
        conversing(opened, required=True) if in_template else nullcontext() as chat,
        replicated(model, opening, opened, devices) as run_all,
        redirect_stdout(sys.stderr),
    ):
        answers = Answers(opened, lambda done, of: say(f"{done:,} of {of:,} requests"), run_all)
        scores = evaluate_tasks(answers, *which, chat=chat)
    if as_json:
        tasks = plain_numbers(scores["results"])
        print_json({"model": opened.source, "limit": which[1], "tasks": tasks})
        return DONE
    from lm_eval.utils import make_table

    display.show(opened.source)
    display.show(make_table(scores).rstrip())
    return DONE

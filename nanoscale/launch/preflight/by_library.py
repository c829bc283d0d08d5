"""Checks before anything is written of initial weights, also of another run, and of settings, by libraries."""

import json
import math
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from importlib.util import find_spec
from itertools import chain
from pathlib import Path
from typing import Any

from nanoscale.checkpoint import store
from nanoscale.checkpoint.hf.adapters import find_adapters
from nanoscale.checkpoint.hf.load import count_kept, find
from nanoscale.common.errors import UserError, Violation
from nanoscale.common.json_text import Json
from nanoscale.config import parameters, token_files
from nanoscale.config.composing.frozen import dump, load
from nanoscale.config.deepspeed import OWNED, deepspeed_settings
from nanoscale.config.hf import any_model
from nanoscale.config.hf.families import UnsupportedError
from nanoscale.config.hf.pretrained import KEY, NoSuchModelError, is_folder, locate, refuse_model
from nanoscale.config.hf.safetensors_headers import BadFileError
from nanoscale.config.hf.shape import has_own_head, read_shape
from nanoscale.config.hf.text_part import HEAD
from nanoscale.config.optimizers import keeps_average
from nanoscale.config.resolved import ResolvedConfig
from nanoscale.config.values.convert import fits
from nanoscale.config.values.provenance import Composed
from nanoscale.config.violations import nearest, override, refuse
from nanoscale.runs.directory import RunDirectory

_FROM_RUN = "run.from_run"


def with_weights(composed: Composed, config: ResolvedConfig, *, fetch: bool) -> ResolvedConfig:
    """Return the configuration with the folder of `model.init_from`, whose files hold what the model needs, and
    with the checkpoint of `run.from_run` and the folder of `train.teacher`.

    Headers are read, not the weights. With `fetch`, a name's files are downloaded from the hub; else they are
    not checked.

    Raises:
        UserError: a file or tensor is missing, damaged or of another shape.
    """
    config = _with_teacher(composed, _with_source_run(composed, config), fetch=fetch)
    if config.model.source == "hf":
        return _with_hf_model(composed, config, fetch=fetch)
    if config.model.source == "hooks":
        return _with_own_model(composed, config) if fetch else config  # a dry run runs no code
    init_from = config.model.init_from
    if init_from is None or not (fetch or is_folder(init_from)):
        return config
    try:
        folder = locate(init_from, weights=True)
        pairs = chain.from_iterable(find(folder, config.model).values())
        kept = count_kept(folder, (tensor for _, tensor in pairs))
        loaded = replace(config.model, init_from=str(folder), kept_tensors=kept)
        found = replace(config, model=loaded)
        if config.lora.init_from is not None:
            find_adapters(Path(config.lora.init_from), found)
        if config.model.tie_embeddings and has_own_head(folder):  # fetched after its config.json
            key = "model.tie_embeddings"
            message = (
                f"must be false: {folder} has an embedding and a head ({HEAD}) with different values, and "
                f"transformers does not tie them either"
            )
            composed.refuse(key, message, f"{key}=false", kind="model")
    except (NoSuchModelError, BadFileError) as error:
        refuse_model(composed, KEY, init_from, error)
    return found


def _with_teacher(composed: Composed, config: ResolvedConfig, *, fetch: bool) -> ResolvedConfig:
    """Return the configuration with the folder of the teacher, which must have the model's vocabulary."""
    asked, key = config.train.teacher, "train.teacher"
    if asked is None:
        return config
    try:
        folder = locate(asked, weights=fetch or is_folder(asked))
        shape = read_shape(folder)
        if fetch or is_folder(asked):
            find(folder, shape)
    except (NoSuchModelError, UnsupportedError, BadFileError) as error:
        refuse_model(composed, key, asked, error)
    sizes = {"model.vocab": (config.model.vocab, shape.vocab)}
    longest = min(config.train.seq_len, shape.max_seq_len)
    sizes["train.seq_len"] = (config.train.seq_len, longest)
    for name, (value, fitting) in sizes.items():
        if value != fitting:
            message = f"does not fit the teacher in {folder}, whose limit is {fitting:,}"
            advice = (override(name, fitting),)
            refuse([Violation(name, value, composed.source(name), message, advice)], kind="model")
    own = folder / token_files.TOKENIZER
    for tokenizer in token_files.known_tokenizers(config.data) if own.is_file() else ():
        with suppress(OSError, ValueError):
            if not token_files.have_same_texts(own, tokenizer):
                made = "bytes" if tokenizer is None else f"tokens of {tokenizer}"
                message = (
                    f"reads other texts in the data, which are {made}: it needs the same tokenizer"
                )
                composed.refuse(key, message, kind="model")
    return replace(config, train=replace(config.train, teacher=str(folder)))


def _with_hf_model(composed: Composed, config: ResolvedConfig, *, fetch: bool) -> ResolvedConfig:
    """Return the configuration of a transformers model, with the number of its parameters.

    Only transformers can check it, in a process that takes seconds.
    """
    model, init_from = config.model, config.model.init_from
    folder = None
    try:
        if init_from is not None and (fetch or is_folder(init_from)):
            folder = str(locate(init_from, weights=True))
    except NoSuchModelError as error:
        refuse_model(composed, KEY, init_from, error)
    question = hf_question(config, folder)
    needs_ours = question["attention"]
    answer = _ask("nanoscale.checkpoint.hf.load_any_model", question, "transformers")
    if isinstance(answer, str):
        answer = {"problem": answer, "of": "model"}
    if answer["problem"] is not None:
        if answer["of"] in ("tp", "pp", "ep"):
            key = f"parallel.{answer['of']}"
            composed.refuse(key, answer["problem"], f"{key}=1")
        if answer["of"] == "lora":
            key = "lora.rank" if config.lora.targets is None else "lora.targets"
            advice = "lora.rank=0" if config.lora.targets is None else "lora.targets=null"
            composed.refuse(key, answer["problem"], advice)
        if answer["of"] == "attention":
            advice = "data.packing=stream data.document_mask=false"
            advice = "parallel.cp=1" if needs_ours == "parallel.cp" else advice
            composed.refuse(needs_ours, answer["problem"], advice, kind="model")
        has_code = "auto_map" in model.hf_config and not model.trust_remote_code
        code = "model.trust_remote_code=true runs the code that comes with it" if has_code else None
        key = KEY if answer["of"] == "files" else any_model.KEY
        composed.refuse(key, "; ".join(filter(None, (answer["problem"], code))), kind="model")
    found = {key: answer[key] for key in ("parameters", "tie_embeddings", "kept_tensors")}
    checked = replace(model, init_from=folder or init_from, **found)
    return replace(config, model=checked)


def hf_question(config: ResolvedConfig, folder: str | None) -> Json:
    """Return the request of `load_any_model.judge` about a job and the folder of its weights."""
    divided = {
        "parallel.cp": config.parallel.cp > 1,
        "data.packing": config.data.packing == "whole",
        "data.document_mask": config.data.document_mask,
    }
    needs_ours = next((key for key, is_set in divided.items() if is_set), "")
    question: Json = {"model": asdict(config.model), "folder": folder, "attention": needs_ours}
    question |= {axis: getattr(config.parallel, axis) for axis in ("tp", "pp", "ep")}
    return question | ({"targets": config.lora.targets} if config.lora.rank else {})


def save_small_model(family: str, document: Json | None, folder: Path) -> Json:
    """Save a small random model of a `model_type` of transformers, and return the answer of `small_model`."""
    question = {"type": family, "document": document, "folder": str(folder)}
    answer = _ask("nanoscale.measure.small_model", question, "transformers")
    return {"problem": answer} if isinstance(answer, str) else answer


def _with_own_model(composed: Composed, config: ResolvedConfig) -> ResolvedConfig:
    """Return the configuration of a model of the user, with the number of its parameters."""
    with tempfile.NamedTemporaryFile("w", suffix=".yaml", encoding="utf-8") as file:
        file.write(dump(config))
        file.flush()
        answer = _ask("nanoscale.backends.count_parameters", file.name, "the model of hooks.path")
    if not isinstance(answer, int):
        composed.refuse("hooks.path", answer, kind="model")
    return replace(config, model=replace(config.model, parameters=answer))


def _with_source_run(composed: Composed, config: ResolvedConfig) -> ResolvedConfig:
    """Return the configuration with the folder and the step of the run that it begins from, if it does.

    Raises:
        UserError: there is no such run, it has no complete checkpoint, or its tensors are of another model.
    """
    asked = config.run.from_run
    if asked is None:
        return config
    try:
        source = RunDirectory.open(Path(asked).expanduser(), Path(config.run.root))
        stored = store.find_checkpoint(source.checkpoints, config.run.from_step)
        damage = store.find_damage(stored.path, sums=False)
        violations = [] if damage else list(_misfits(source, stored, config))
    except store.DamagedCheckpointError as error:
        damage = [str(error)]
    except UserError as error:
        ways = [way for violation in error.violations for way in _ways(violation.suggestions)]
        composed.refuse(_FROM_RUN, str(error), *ways, kind="run")
    if damage:
        composed.refuse(_FROM_RUN, f"{stored.path} is damaged: {'; '.join(damage)}", kind="run")
    if violations:
        refuse([replace(it, source=composed.source(it.key)) for it in violations], kind="run")
    run = replace(config.run, from_run=str(source.path), from_step=stored.step)
    return replace(config, run=run)


def _ways(suggestions: tuple[str, ...]) -> Iterator[str]:
    """Yield the suggestions of a command that names a run, as overrides."""
    for text in suggestions:
        if text.startswith("--step "):
            yield override("run.from_step", int(text.removeprefix("--step ")))
        else:
            yield (
                text if text.startswith("nanoscale ") else override(_FROM_RUN, shlex.split(text)[0])
            )


def _misfits(
    source: RunDirectory, stored: store.StoredCheckpoint, config: ResolvedConfig
) -> Iterator[Violation]:
    """Yield the reasons for which a job cannot begin from a checkpoint."""
    tensors = stored.manifest["tensors"]
    trained = load(source.config)
    if bool(trained.lora.rank) != bool(config.lora.rank):
        export = f"nanoscale checkpoints export {shlex.quote(source.reference)} --format hf"
        what = "adapters" if trained.lora.rank else "a whole model and not the adapters of lora"
        message = f"holds {what}: export it and begin from the folder, with model.init_from=FOLDER"
        yield Violation(_FROM_RUN, str(source.path), "", message, (export,))
    elif config.model.source == trained.model.source == "own" and not config.lora.rank:
        yield from _other_shapes(stored, tensors, config)
    if not config.run.from_optimizer:
        return
    optimizer, before = config.optimizer, trained.optimizer
    has_other_average = keeps_average(optimizer) != keeps_average(before)
    for leaf, is_other in ("name", optimizer.name != before.name), ("ema_decay", has_other_average):
        if is_other:
            key, local, other = f"optimizer.{leaf}", getattr(optimizer, leaf), getattr(before, leaf)
            message = f"has no moments in {source.name}, which was trained with {other}"
            advice = (override(key, other), "run.from_optimizer=false")
            yield Violation(key, local, "", message, advice)


def _other_shapes(
    stored: store.StoredCheckpoint, tensors: Json, config: ResolvedConfig
) -> Iterator[Violation]:
    needed = {
        f"model.{name}": list(each.shape) for name, each in parameters.named(config.model).items()
    }
    shapes = {name: about["shape"] for name, about in tensors.items() if name.startswith("model.")}
    names = sorted(needed.keys() | shapes.keys(), key=lambda name: (name not in needed, name))
    other = [name for name in names if needed.get(name) != shapes.get(name)]
    if other:
        name = max(other, key=lambda name: math.prod(needed.get(name, [0])))
        expected, has = needed.get(name, "no such tensor"), shapes.get(name, "no such tensor")
        count = f" and {len(other) - 1} more differ" if len(other) > 1 else ""
        message = f"is of another model: for {name} it has {has}, and this job {expected}{count}"
        yield Violation(_FROM_RUN, str(stored.path), "", message)


def check_extra(composed: Composed, config: ResolvedConfig) -> None:
    """Check `backend.extra` with DeepSpeed's own class; it takes seconds, and runs only if the key is set.

    Raises:
        UserError: with all problems that it finds.
    """
    if config.backend.name != "deepspeed" or not config.backend.extra:
        return
    settings = deepspeed_settings(config)
    problems = _ask("nanoscale.backends.deepspeed.validate", settings, "DeepSpeed")
    if isinstance(problems, str):
        refuse([Violation("backend.extra", None, composed.source("backend.extra"), problems)])
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


def check_tasks(composed: Composed, config: ResolvedConfig) -> None:
    """Check `train.eval_tasks` with lm-eval, which loads them and their data; only if the key is set.

    Raises:
        UserError: a task is unknown, has no data or generates text; or no task has `checkpoint.best_metric`.
    """
    tasks, metric = config.train.eval_tasks, config.checkpoint.best_metric
    if not tasks or find_spec("lm_eval") is None:  # then the hosts' own Python has it
        return
    question = {"tasks": tasks, "folder": config.train.eval_tasks_dir}
    reply = _ask("nanoscale.generate.check_tasks", question, "lm-eval")
    reply = {"problem": reply} if isinstance(reply, str) else reply
    if reply["problem"] is not None:
        key, instead = "train.eval_tasks", override("train.eval_tasks", reply.get("instead", []))
        composed.refuse(key, reply["problem"], instead)
    if metric not in (*config.train.evaluated, *reply["metrics"]):
        key, names = "checkpoint.best_metric", nearest(metric, reply["metrics"])
        advice = (override(key, name) for name in names or reply["metrics"][:3])
        composed.refuse(key, "is not a metric of train.eval_tasks", *advice)


def _suggestions(names: Sequence[str], value: object) -> Iterator[str]:
    """Yield the override that sets each of DeepSpeed's settings, by our key if one decides it."""
    for name in names:
        key = OWNED.get(name)
        if key is None or fits(key, value):
            yield override(key or f"backend.extra.{name}", value)


def _ask(module: str, question: object, library: str) -> Any:
    """Return the answer of a module to a question, both JSON; a sentence if it cannot answer."""
    result = subprocess.run(
        [sys.executable, "-m", module],
        input=json.dumps(question),
        capture_output=True,
        encoding="utf-8",
        errors="replace",
        check=False,
    )
    if result.returncode:
        last = "".join(result.stderr.strip().splitlines()[-1:])
        return f"cannot be checked: {last or f'{library} does not start'}"
    return json.loads(result.stdout.splitlines()[-1])

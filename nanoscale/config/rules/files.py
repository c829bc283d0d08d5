"""Rules of files: data, checkpoints, logs and the run directory."""

from __future__ import annotations

import netrc
import os
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

from nanoscale.config.data.mixture import sources_of
from nanoscale.config.data.prepared_folder import answers_of
from nanoscale.config.rules.data_mixture import resolve_mixture
from nanoscale.config.rules.resolution import Resolution, near_multiples
from nanoscale.config.rules.token_files import look
from nanoscale.config.schema import Data, Run
from nanoscale.config.violations import override

BYTE_VOCAB = 257
"""256 bytes and the end of a document."""


def resolve_data(resolution: Resolution) -> Data:
    """Return the data with absolute paths; a prepared folder is replaced by its files."""
    data = resolution.config.data
    if data.source == "stdlib":
        for key in ("path", "valid_path", "mixture"):
            if getattr(data, key):
                message = "is read with data.source=megatron or datatrove only"
                resolution.refuse("data", f"data.{key}", message, "data=megatron")
        _tokenizer(resolution, data)
    elif data.mixture:
        data = resolve_mixture(resolution)
        if all(source.valid_path for source in sources_of(data)):
            data = _nothing_held_out(resolution, data, "valid_path of every source")
        _tokenizer(resolution, data)
    else:
        data = _one_source(resolution, data)
    return replace(
        data,
        document_mask=_document_mask(resolution, data),
        loss_on=_loss_on(resolution, data),
        path=absolute(data.path),
        valid_path=absolute(data.valid_path),
        tokenizer=data.tokenizer
        if data.tokenizer in ("byte", "bpe")
        else str(absolute(data.tokenizer)),
        cache_dir=absolute(data.cache_dir),
    )


def _one_source(resolution: Resolution, data: Data) -> Data:
    files = look(resolution, *sources_of(data))
    if files.tokenizer is not None and data.tokenizer == "byte":
        data = replace(data, tokenizer=str(files.tokenizer))
    data = replace(data, path=files.path, valid_path=files.valid_path)
    if data.valid_path is not None:
        data = _nothing_held_out(resolution, data, f"data.valid_path={data.valid_path}")
    if not files.prepared or data.tokenizer != "byte":
        _tokenizer(resolution, data)
    return data


def _nothing_held_out(resolution: Resolution, data: Data, instead: str) -> Data:
    if resolution.composed.by_hand("data.valid_fraction") and data.valid_fraction > 0:
        message = f"and {instead} both say what to validate on"
        resolution.refuse("data", "data.valid_fraction", message, "data.valid_fraction=0")
    return replace(data, valid_fraction=0.0)


def _document_mask(resolution: Resolution, data: Data) -> bool:
    whole = data.packing == "whole"
    if whole and not data.document_mask and resolution.composed.by_hand("data.document_mask"):
        message = "lets attention cross documents, and data.packing=whole packs unrelated documents together"
        resolution.refuse(
            "data", "data.document_mask", message, "data.document_mask=true", "data.packing=stream"
        )
    return data.document_mask or whole


def _loss_on(resolution: Resolution, data: Data) -> Literal["all", "answers"]:
    """Return `answers` if a source has marks of answers, unless all tokens are requested."""
    sources = sources_of(data) if data.source == "megatron" else []
    marks = [answers_of(Path(it.path).expanduser()) for it in sources if it.path is not None]
    marked = any(path.is_file() for path in marks)
    if data.loss_on == "answers" and not marked:
        where = " nor ".join(map(str, marks)) or f"data.source={data.source}"
        message = f"needs marked answers, and {where} has none: prepare the chats with --chat"
        resolution.refuse("data", "data.loss_on", message, "data.loss_on=all")
    return "answers" if marked and data.loss_on != "all" else "all"


def _tokenizer(resolution: Resolution, data: Data) -> None:
    vocab = resolution.config.model.vocab
    if data.tokenizer == "byte":
        if vocab < BYTE_VOCAB:
            _too_few_for_bytes(resolution, data)
    elif data.tokenizer == "bpe":
        if data.source != "stdlib":
            message = f"is trained on text, and data.source={data.source} has tokens already"
            example = "data.tokenizer=/path/to/tokenizer.json"
            resolution.refuse("data", "data.tokenizer", message, example, "data.tokenizer=byte")
        if vocab < data.bpe_vocab:
            resolution.refuse(
                "config",
                "data.bpe_vocab",
                f"is more than the rows of the embedding (model.vocab={vocab})",
                f"data.bpe_vocab={vocab}" if vocab >= BYTE_VOCAB else None,
                resolution.more_rows(data.bpe_vocab),
                "data.tokenizer=byte",
            )
    elif not Path(data.tokenizer).expanduser().is_file():
        message = "is neither byte nor bpe nor a file that exists"
        fits = data.source == "stdlib" and data.bpe_vocab <= vocab
        bpe = "data.tokenizer=bpe" if fits else None
        resolution.refuse("data", "data.tokenizer", message, "data.tokenizer=byte", bpe)


def _too_few_for_bytes(resolution: Resolution, data: Data) -> None:
    """Refuse a small vocabulary if bytes are needed; ids in a file may come from any tokenizer."""
    message = f"is less than the {BYTE_VOCAB} tokens of data.tokenizer=byte"
    rows = resolution.more_rows(BYTE_VOCAB)
    if data.source == "stdlib" or resolution.composed.by_hand("data.tokenizer"):
        resolution.refuse("config", "model.vocab", message, rows)
    elif resolution.config.train.sample_tokens > 0:
        named = f"{message}, which train.sample_tokens needs to write a text"
        instead = ("train.sample_tokens=0", "data.tokenizer=/path/to/tokenizer.json")
        resolution.refuse("config", "model.vocab", named, rows, *instead)


def check_loggers(resolution: Resolution) -> None:
    """Check that the programs that receive metrics are installed, and that wandb can log in."""
    logger = resolution.config.logger
    if logger.tensorboard == "on":
        resolution.require_for_ranks(
            "logger.tensorboard", "tensorboard", "TensorBoard", "logger=none"
        )
    if logger.mlflow == "on":
        resolution.require_for_ranks("logger.mlflow", "mlflow", "MLflow", "logger.mlflow=off")
    if logger.wandb != "off":
        resolution.require_for_ranks(
            "logger.wandb", "wandb", "Weights & Biases", "logger.wandb=off"
        )
    if logger.wandb == "online" and resolution.same_python and not _wandb_key_exists():
        message = "needs an API key: type `wandb login`, or set WANDB_API_KEY"
        resolution.refuse(
            "config", "logger.wandb", message, "logger.wandb=offline", "logger.wandb=off"
        )


def _wandb_key_exists() -> bool:
    """True if the environment or the user's netrc file has credentials for Weights & Biases."""
    if os.environ.get("WANDB_API_KEY") or os.environ.get("WANDB_IDENTITY_TOKEN_FILE"):
        return True
    server = urlsplit(os.environ.get("WANDB_BASE_URL") or "https://api.wandb.ai").hostname
    named = os.environ.get("NETRC")
    for path in [Path(named)] if named else [Path.home() / ".netrc", Path.home() / "_netrc"]:
        with suppress(OSError, netrc.NetrcParseError):
            if netrc.netrc(path).authenticators(str(server)):
                return True
    return False


def check_saving(resolution: Resolution) -> None:
    """Check that kept checkpoints are saved, and that what judges an evaluation has one."""
    saving = resolution.config.checkpoint
    _require_evaluations(resolution)
    if saving.keep_every is None or (saving.every and saving.keep_every % saving.every == 0):
        return
    if saving.every:
        message = (
            f"must be a multiple of checkpoint.every={saving.every}: only its multiples are saved"
        )
        multiples = near_multiples(saving.every, saving.keep_every)
        proposals = [f"checkpoint.keep_every={n}" for n in multiples]
    else:
        message = "needs checkpoint.every: checkpoints by time or at the end have no fixed step"
        proposals = [f"checkpoint.every={saving.keep_every}", "checkpoint.keep_every=null"]
    resolution.refuse("config", "checkpoint.keep_every", message, *proposals)


def _require_evaluations(resolution: Resolution) -> None:
    """Refuse keys that need evaluations of a training without any."""
    train, ends = resolution.config.train, resolution.config.train.stop_when
    if train.eval_every:
        return
    judges = {
        "checkpoint.keep_best": (resolution.config.checkpoint.keep_best, 0),
        "train.stop_when.patience": (ends.patience, 0),
        "train.stop_when.eval_loss": (ends.eval_loss, None),
    }
    every = f"train.eval_every={min(100, train.steps or 100)}"
    for key, (value, off) in judges.items():
        if value != off:
            message = "needs evaluations, and train.eval_every=0 has none"
            resolution.refuse("config", key, message, every, override(key, off))


def resolve_run(resolution: Resolution) -> Run:
    """Return the run with its folder."""
    run = resolution.config.run
    name = run.name
    if name is not None and (legal := _legal_name(name)) != name:
        message = (
            "names a folder: at most 200 characters, without slashes and control characters, not "
            "starting with a dot or dash"
        )
        resolution.refuse(
            "run", "run.name", message, override("run.name", legal) if legal else None
        )
    if not run.root:
        resolution.refuse("run", "run.root", "is empty", "run.root=runs")
    return replace(run, root=_expanded(run.root))


def _legal_name(name: str) -> str:
    kept = "".join("-" if char in "/\\" or not char.isprintable() else char for char in name)
    return kept.lstrip(".-").strip()[:200]


def _expanded(root: str) -> str:
    """Expand `~` as the shell would: a folder of that name is a trap."""
    try:
        return str(Path(root).expanduser()) if root.startswith("~") else root
    except RuntimeError:
        return root


def absolute(path: str | None) -> Any:
    """Return a path that is the same from every folder."""
    return str(Path(path).expanduser().absolute()) if path else path

"""Text files that data.path names: tokens are made of them before the request is checked."""

from __future__ import annotations

import shlex
from contextlib import suppress
from dataclasses import replace
from functools import lru_cache
from glob import has_magic
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nanoscale.common import display
from nanoscale.common.devices import cores
from nanoscale.common.errors import UserError, Violation
from nanoscale.common.object_storage import is_address
from nanoscale.common.units import byte_size
from nanoscale.config.hardware.data_sheets import UnknownHardwareError
from nanoscale.config.hf.hub import missing_path
from nanoscale.config.hf.pretrained import NoSuchModelError, refuse_model
from nanoscale.config.objectives import ANSWERS, PAIRED
from nanoscale.config.rules.data import FORMS
from nanoscale.config.token_files import TOKENIZER, TOKENS, folder_of, manifest
from nanoscale.config.token_formats import FORMATS, format_of, is_parts
from nanoscale.config.values.provenance import Setting
from nanoscale.config.violations import refuse

if TYPE_CHECKING:
    from collections.abc import Callable

    from nanoscale.config.values.provenance import Composed
    from nanoscale.data.prepare import PreparationRequest
    from nanoscale.data.prepare.sources import RecordKind

_MOST = 256 << 20
"""The most bytes of texts that are all prepared on the way to a launch, which takes up to some minutes."""
EARLY = (
    *("backend.name", "cluster.", "hooks.", "launcher.", "logger.", "lora.", "optimizer."),
    *("precision.", "train.teacher", "zero."),
)
"""Beginnings of keys whose errors do not depend on tokens."""


def tokens_of_texts(
    composed: Composed, check: Callable[[Composed], object] | None = None
) -> dict[str, Setting]:
    """Prepare the texts that data.path and data.valid_path name; return the keys that name their tokens.

    Of more than 256 MiB only the first part is prepared, and a launch prepares the rest beside the training.
    Chats and pairs of answers are recognised by their first record. The tokenizer is data.tokenizer if
    it is set, otherwise the tokenizer of model.init_from.

    Args:
        check: the check of a configuration: errors that need no tokens are raised before texts are prepared.

    Raises:
        UserError: texts are too large or cannot be prepared.
    """
    data = composed.config.data
    settings: dict[str, Setting] = {}
    if data.source not in ("stdlib", "megatron"):
        return {}
    for key in ("path", "valid_path"):
        named = getattr(data, key)
        if not named:
            continue
        if not _names_texts(named, data.source):
            settings |= _of_folder(composed, Path(named).expanduser())
            continue
        request, is_large = _request(composed, key, named)
        if check is not None:
            _refuse_early(composed, check)
        folder = _prepared(request, is_large)
        source = f"prepared from {named}"
        settings |= {
            f"data.{key}": Setting(str(folder if key == "path" else folder / TOKENS), source),
            "data.source": Setting("megatron", source),
        }
        if (folder / TOKENIZER).is_file():
            settings["data.tokenizer"] = Setting(str(folder / TOKENIZER), source)
        settings |= _of_folder(composed, folder)
    return settings


def _refuse_early(composed: Composed, check: Callable[[Composed], object]) -> None:
    """Raise the errors of a check, which the texts cannot pass, that are not about them."""
    teacher = composed.config.train.teacher
    if teacher and not Path(teacher).expanduser().is_dir() and (why := missing_path(teacher)):
        refuse_model(composed, "train.teacher", teacher, NoSuchModelError(why))
    try:
        check(composed)
    except UnknownHardwareError:
        raise
    except UserError as error:
        if early := [it for it in error.violations if it.key.startswith(EARLY)]:
            refuse(early, error.kind)


def _of_folder(composed: Composed, folder: Path) -> dict[str, Setting]:
    """Return keys that follow from a prepared folder: the labels and their names, the token that hides others,
    and the length of samples, if it is a packaged recipe's and longer than the model's or the file's."""
    train, model, data = composed.config.train, composed.config.model, composed.config.data
    if (document := manifest(folder)) is None:
        return {}
    values: dict[str, Any] = {}
    if train.objective == "classify" and "labels" in document:
        count, names = train.labels or document["labels"], document.get("label_names", [])
        values |= {"train.labels": count} if train.labels is None else {}
        if names:
            names += [f"LABEL_{it}" for it in range(len(names), count)]
            named = {str(number): name for number, name in enumerate(names)}
            values["model.hf_config"] = {"id2label": named}
    if train.objective == "masked" and train.mask_token is None:
        values["train.mask_token"] = _mask_token(folder)
    if model.init_from is not None and not composed.by_user("train.seq_len"):
        longest = min(train.seq_len, model.max_seq_len)
        if data.packing == "stream" and not train.has_whole_documents:
            tokens = int(document["train"]["tokens"] * (1 - 2 * data.valid_fraction)) - 1
            longest = min(longest, 1 << max(1, tokens.bit_length() - 1))
        values |= {"train.seq_len": longest} if longest < train.seq_len else {}
    return {key: Setting(value, f"prepared in {folder}") for key, value in values.items()}


def _mask_token(folder: Path) -> int | None:
    """Return the id of the token that hides others by a prepared folder's tokenizer; None if it has none."""
    from nanoscale.data.tokens.tokenizer import config_of, read_object, special_token

    file = folder / TOKENIZER
    names = {special_token(config_of(file), "mask_token"), "[MASK]", "<mask>"}
    added = read_object(file).get("added_tokens", [])
    return next((it["id"] for it in added if it["content"] in names), None)


def _names_texts(named: str, source: str) -> bool:
    """True if a path names texts: a file, a pattern, an address that was not fetched, or a folder of texts."""
    from nanoscale.data.prepare.sources import KINDS, ending, find_sources

    if is_address(named) or has_magic(named):
        return True
    if Path(named).expanduser().is_dir():
        if folder_of(named) is not None or is_parts(named):
            return False
        # a folder without texts is refused later, as one that is not prepared
        with suppress(UserError, OSError):
            return bool(find_sources([named]))
        return False
    if ending(Path(named))[0] in KINDS:
        return True
    tokens = FORMATS[format_of(named)]
    return source != "megatron" and bool(tokens.missing(tokens.stem(named)))


def _request(composed: Composed, key: str, file: str) -> tuple[PreparationRequest, bool]:
    """Return the request that prepares the texts, and True if that is done beside the training."""
    from nanoscale.data.corpus import cache_folder
    from nanoscale.data.prepare import PreparationRequest
    from nanoscale.data.prepare.by_parts import first_fields
    from nanoscale.data.prepare.records import LABEL
    from nanoscale.data.prepare.sources import CHATS, find_sources

    try:
        sources = find_sources([file])
    except UserError as error:
        first = next(iter(error.violations), error)
        composed.refuse(f"data.{key}", first.message, kind="data")
    source, size = sources[0], sum(source.bytes for source in sources)
    data, model, train = composed.config.data, composed.config.model, composed.config.train
    by_hand = composed.by_hand("data.tokenizer")
    named = data.tokenizer if by_hand or model.init_from is None else model.init_from
    names = first_fields(source)
    kind = _kind(names, train.objective)
    chat = kind in CHATS
    needed = "pairs" if train.objective in PAIRED else "rated" if train.objective == "kto" else kind
    if kind != needed:
        samples = "pairs" if needed == "pairs" else "good and bad answers"
        what = f"needs {samples}, and {file} has none: {FORMS[needed]}"
        composed.refuse("train.objective", what, kind="data")
    if names and LABEL in names and kind not in ("labels", "rated"):
        display.note(
            f"{file}: its field `label` is not used: train.objective=classify and kto learn it"
        )
    if chat and named == "bpe":
        what = "chats need the tokenizer of the model that is trained on them, not a new one"
        composed.refuse("data.tokenizer", what, "data.tokenizer=byte", kind="data")
    request = PreparationRequest(
        sources=(source.name if len(sources) == 1 else file,),
        out=cache_folder(data) / "texts",
        tokenizer=None if named == "bpe" else named,
        vocab_size=data.bpe_vocab,
        field="messages" if chat else "text",
        kind=kind,
        workers=cores(),
        labels=train.labels,
    )
    if size <= _MOST:
        return request, False
    if key != "path" or train.objective in (*ANSWERS, "distill", "classify"):
        what = f"has {byte_size(size)}, and texts of more than {byte_size(_MOST)} are "
        what += "prepared before the launch, once"
        composed.refuse(f"data.{key}", what, _command(request), kind="data")
    held_out = 0.0 if data.valid_path else data.valid_fraction
    return replace(request, validation=held_out), True


def _kind(names: list[str] | None, objective: str) -> RecordKind:
    """Return the kind of records with these fields, or of lists, that an objective learns from."""
    from nanoscale.data.prepare.by_parts import holds_chats
    from nanoscale.data.prepare.records import LABEL, holds_pair

    if objective == "classify":
        return "labels"
    if names is not None and holds_pair(names):
        return "pairs"
    if not holds_chats(names):
        return "text"
    return "rated" if objective == "kto" and LABEL in (names or ()) else "chat"


def _command(request: PreparationRequest) -> str:
    """Return the command that prepares the same texts by hand."""
    (file,) = request.sources
    words = ["--train-tokenizer", "--vocab-size", str(request.vocab_size)]
    if request.tokenizer:
        words = ["--tokenizer", request.tokenizer]
    words += [f"--{request.kind}"] if request.is_chat else []
    words += ["--labels", str(request.labels or "auto")] if request.kind == "labels" else []
    words += ["--out", f"{Path(file).stem}-tokens"]
    return shlex.join(["nanoscale", "data", "prepare", file, *words])


@lru_cache  # a command composes its configuration more than once
def _prepared(request: PreparationRequest, is_large: bool) -> Path:
    from nanoscale.data.prepare.by_parts import prepare_first, prepare_in_cache
    from nanoscale.data.prepare.records import SKIP
    from nanoscale.processes.pool import LostProcessError
    from nanoscale.view.data_text import PreparationScreen, prepared_line

    try:
        with PreparationScreen() as screen:
            folder = (prepare_first if is_large else prepare_in_cache)(request, screen)
    except LostProcessError as error:
        what = f"cannot be prepared with one worker a core: a worker ended by {error}"
        advice = f"{_command(request)} --workers 1"
        refuse([Violation("data.path", request.sources[0], "", what, (advice,))], "data")
    except UserError as error:
        command = _command(request)
        to_skip = f"skip them: `{command} --bad skip`, then data.path={command.split()[-1]}"
        told = [replace(it, remedy=it.remedy.replace(SKIP, to_skip)) for it in error.violations]
        if told == error.violations:
            display.note(f"to choose how the texts are read: {command}")
        raise UserError(error.kind, error.message, told) from error
    display.note(prepared_line(request, folder))
    return folder

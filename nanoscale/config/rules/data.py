"""Rules of the data: its source, its mixture, its token files, its tokenizer."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from nanoscale.common.units import counted
from nanoscale.config import reference, token_files, token_formats
from nanoscale.config.hf.pretrained import NoSuchModelError, locate
from nanoscale.config.objectives import ANSWERS, PAIRED, RECORDS
from nanoscale.config.rules.only_with import OF_TEXT
from nanoscale.config.rules.resolution import Resolution
from nanoscale.config.rules.rule import Rule, of_kind, only_with, other_than, refused
from nanoscale.config.schema import Config, Data, DataSource
from nanoscale.config.token_files import (
    MixtureSource,
    answers_of,
    named_sources,
    open_index,
    sources_of,
    split_sizes,
)
from nanoscale.config.token_formats import FORMATS, DamagedError
from nanoscale.config.violations import override

RANDOM = of_kind("data",
    *OF_TEXT,
    refused("train.sample_tokens", {"data.source": "random", "train.sample_tokens": bool},
        "needs a tokenizer to write a text, and data.source=random has none", "train.sample_tokens=0"),
)  # fmt: skip
_OF_TRANSFORMERS = "model=hf model.name=/path/to/model"
_ENCODER = {"train.objective": "masked", "model.source": other_than("own")}
MASKED = of_kind("data",
    refused("train.objective", {"train.objective": "masked", "model.source": "own"},
        "predicts from both sides, and nanoscale's own transformer only looks back: model=hf trains an encoder",
        _OF_TRANSFORMERS),
    refused("train.mask_token", {**_ENCODER, "train.mask_token": None},
        "is needed by train.objective=masked: 103 in most of BERT's vocabularies, 50264 in RoBERTa's, 50284 in "
        "ModernBERT's", "train.mask_token=103"),
    Rule("train.mask_token", ("train.mask_token", "model.vocab"),
        lambda config: (config.train.mask_token or 0) < config.model.vocab,
        "is not an id of the model: they are below {c.model.vocab}", ("train.mask_token=<",)),
    refused("data.loss_on", {**_ENCODER, "data.loss_on": "answers"},
        "counts answers, and train.objective=masked the tokens that it hides", "data.loss_on=all"),
    refused("train.sample_tokens",
        {**_ENCODER, "train.objective": ("masked", "classify"), "train.sample_tokens": bool,
         "data.source": other_than("random", "hooks")},
        "continues a text, which train.objective={c.train.objective} does not learn", "train.sample_tokens=0"),
)  # fmt: skip
FORMS = {
    "pairs": "each record needs an answer to prefer and one to avoid, as in "
        f"{RECORDS['pairs']}; `nanoscale data prepare --pairs` reads them",
    "rated": "each record needs a question, its answer and `label`, true for a good answer, as in "
        f"{RECORDS['rated']}; `nanoscale data prepare --rated` reads them",
    "labels": f"each record needs a text and its class, a number from 0, as in {RECORDS['labels']}; "
        "`nanoscale data prepare --labels N` reads them",
}  # fmt: skip
"""The form of the records of each kind of samples."""
_TEMPLATES = {kind: form.replace("{", "{{").replace("}", "}}") for kind, form in FORMS.items()}
_CLASSIFIED = {"train.objective": "classify"}
CLASSIFIED = of_kind("data",
    refused("train.objective", {**_CLASSIFIED, "model.source": other_than("hf")},
        "is of a model of transformers with a head for classes, which model=hf trains",
        _OF_TRANSFORMERS),
    refused("train.labels", {**_CLASSIFIED, "train.labels": None},
        "is needed by train.objective=classify: the number of classes", "train.labels=2"),
    refused("train.objective",
        {**_CLASSIFIED, "model.source": "hf", "data.source": other_than("megatron", "random", "hooks")},
        f"needs labels, and data.source={{c.data.source}} has none: {_TEMPLATES['labels']}",
        "data=megatron data.path=/path/to/records.jsonl", "data.source=random"),
    refused("data.loss_on", {**_CLASSIFIED, "data.loss_on": "all"},
        "is the loss of every token, and train.objective=classify has one of each text", "data.loss_on=auto"),
)  # fmt: skip
_DISTILLED = {"train.objective": "distill"}
DISTILLED = of_kind("config",
    refused("train.teacher", {**_DISTILLED, "train.teacher": None},
        "is needed by train.objective=distill: a Hugging Face model",
        "train.teacher=FOLDER"),
    refused("train.objective", {**_DISTILLED, "data.source": ("random", "hooks")},
        "stores the teacher's tokens by the sample's number in a file, and data.source={c.data.source} has no "
        "file", "data=stdlib", "data=megatron data.path=/path/to/corpus"),
    refused("train.on_spike", {**_DISTILLED, "train.on_spike": "rollback"},
        "takes further samples, and the teacher's tokens are stored for those of train.steps",
        "train.on_spike=stop"),
    refused("train.z_loss", {**_DISTILLED, "train.z_loss": other_than(0.0)},
        "is not a part of the loss with train.objective=distill", "train.z_loss=0"),
    Rule("train.distill_top_k", ("train.distill_top_k", "train.objective", "model.vocab"),
        lambda config: not config.train.is_distilled or config.train.distill_top_k <= config.model.vocab,
        "is more than the vocabulary has: {c.model.vocab}", ("train.distill_top_k={c.model.vocab}",)),
)  # fmt: skip
_OF_ANSWERS, _NO_ANSWERS = {"train.objective": ANSWERS}, {"data.source": ("stdlib", "random")}
OF_ANSWERS = of_kind("data",
    refused("train.objective", {"train.objective": PAIRED, **_NO_ANSWERS},
        f"needs pairs of answers, and data.source={{c.data.source}} has none: {_TEMPLATES['pairs']}",
        "data=megatron data.path=/path/to/pairs.jsonl"),
    refused("train.objective", {"train.objective": "kto", **_NO_ANSWERS},
        f"needs good and bad answers, and data.source={{c.data.source}} has none: {_TEMPLATES['rated']}",
        "data=megatron data.path=/path/to/answers.jsonl"),
    refused("data.loss_on", {"train.objective": "kto", "data.loss_on": "all"},
        "counts the question too, and train.objective=kto learns whether its answer is good",
        "data.loss_on=auto"),
    refused("data.packing", {**_OF_ANSWERS, "data.packing": "whole"},
        "packs documents, and train.objective={c.train.objective} has each answer in a row of its own",
        "data.packing=stream"),
    refused("data.document_mask", {**_OF_ANSWERS, "data.document_mask": True},
        "separates documents, and train.objective={c.train.objective} has each in a row of its own",
        "data.document_mask=false"),
    refused("train.z_loss", {**_OF_ANSWERS, "train.z_loss": other_than(0.0)},
        "is a part of the loss of single tokens, and train.objective={c.train.objective} is of answers",
        "train.z_loss=0"),
)  # fmt: skip

_BY_EOS = {"data.source": tuple(name for name, row in FORMATS.items() if row.reads_eos)}
ENDS = of_kind("data",
    refused("data.eos", {**_BY_EOS, "data.eos": None},
        "is needed by data.source={c.data.source}: the id of the tokenizer's end-of-text token", "data.eos=0"),
    only_with("data.eos", _BY_EOS),
)  # fmt: skip


def resolve_data(resolution: Resolution) -> Data:
    """Return the data with absolute paths; a prepared folder is replaced by its files."""
    data = resolution.config.data
    resolution.apply((*OF_ANSWERS, *MASKED, *CLASSIFIED, *DISTILLED, *ENDS))
    if data.source not in FORMATS:
        for key in ("path", "valid_path", "mixture"):
            if getattr(data, key):
                message = f"is read with data.source={' or '.join(FORMATS)} only"
                resolution.refuse(f"data.{key}", message, "data=megatron", kind="data")
    if data.source == "stdlib":
        _tokenizer(resolution, data)
        _require_tokenizer_of_model(resolution, data)
    elif data.source == "random":
        resolution.apply(RANDOM)
    elif data.source == "hooks":
        resolution.apply(OF_TEXT)
    elif data.mixture:
        data = resolve_mixture(resolution)
        if all(source.valid_path for source in sources_of(data)):
            data = _nothing_held_out(resolution, data, "valid_path of every source")
        _tokenizer(resolution, data)
    else:
        data = _one_source(resolution, data)
    if data.source in FORMATS and not resolution.violations:
        _require_samples(resolution, data)
    is_file = data.tokenizer not in ("byte", "bpe")
    return replace(
        data,
        document_mask=_document_mask(resolution, data),
        loss_on=_loss_on(resolution, data),
        path=absolute(data.path),
        valid_path=absolute(data.valid_path),
        tokenizer=str(absolute(data.tokenizer)) if is_file else data.tokenizer,
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
        resolution.refuse("data.valid_fraction", message, "data.valid_fraction=0", kind="data")
    return replace(data, valid_fraction=0.0)


def _document_mask(resolution: Resolution, data: Data) -> bool:
    whole = data.packing == "whole"
    if whole and not data.document_mask and resolution.composed.by_hand("data.document_mask"):
        message = "lets attention cross documents, and data.packing=whole packs unrelated documents together"
        advice = "data.document_mask=true", "data.packing=stream"
        resolution.refuse("data.document_mask", message, *advice, kind="data")
    return data.document_mask or whole


def _loss_on(resolution: Resolution, data: Data) -> Literal["all", "answers"]:
    """Return `answers` if a source has marks of answers, unless all tokens are requested."""
    sources = sources_of(data) if data.source == "megatron" else []
    marks = [answers_of(Path(it.path).expanduser()) for it in sources if it.path is not None]
    marked = any(path.is_file() for path in marks)
    if data.loss_on == "answers" and not marked:
        where = " nor ".join(map(str, marks)) or f"data.source={data.source}"
        message = f"needs marked answers, and {where} has none: prepare the chats with --chat"
        resolution.refuse("data.loss_on", message, "data.loss_on=all", kind="data")
    return "answers" if marked and data.loss_on != "all" else "all"


def _tokenizer(resolution: Resolution, data: Data) -> None:
    vocab = resolution.config.model.vocab
    if data.tokenizer == "byte":
        if vocab < token_files.BYTE_VOCAB:
            _too_few_for_bytes(resolution, data)
    elif data.tokenizer == "bpe":
        if data.source != "stdlib":
            message = f"is trained on text, and data.source={data.source} has tokens already"
            advice = "data.tokenizer=/path/to/tokenizer.json", "data.tokenizer=byte"
            resolution.refuse("data.tokenizer", message, *advice, kind="data")
        if vocab < data.bpe_vocab:
            message = f"is more than the rows of the embedding (model.vocab={vocab})"
            fewer = f"data.bpe_vocab={vocab}" if vocab >= token_files.BYTE_VOCAB else None
            rows = resolution.more_rows(data.bpe_vocab)
            resized = fewer, rows, "data.tokenizer=byte"
            resolution.refuse("data.bpe_vocab", message, *resized, kind="data")
    elif not Path(data.tokenizer).expanduser().is_file():
        message = "is neither byte nor bpe nor a file that exists"
        fits = data.source == "stdlib" and data.bpe_vocab <= vocab
        bpe = "data.tokenizer=bpe" if fits else None
        resolution.refuse("data.tokenizer", message, "data.tokenizer=byte", bpe, kind="data")
    elif data.tokenizer.endswith(".model"):
        resolution.require_for_ranks("data.tokenizer", "sentencepiece")


def _too_few_for_bytes(resolution: Resolution, data: Data) -> None:
    """Refuse a small vocabulary if bytes are needed; ids in a file may come from any tokenizer."""
    message = f"is less than the {token_files.BYTE_VOCAB} tokens of data.tokenizer=byte"
    rows = resolution.more_rows(token_files.BYTE_VOCAB)
    if data.source == "stdlib" or resolution.composed.by_hand("data.tokenizer"):
        resolution.refuse("model.vocab", message, rows, kind="data")
    elif resolution.config.train.sample_tokens > 0:
        named = f"{message}, which train.sample_tokens needs to write a text"
        instead = ("train.sample_tokens=0", "data.tokenizer=/path/to/tokenizer.json")
        resolution.refuse("model.vocab", named, rows, *instead, kind="data")


def absolute(path: str | None) -> Any:
    """Return a path that is the same from every folder."""
    return str(Path(path).expanduser().absolute()) if path else path


# --- mixture --------------------------------------------------------------------------------------

KEY = "data.mixture"


def resolve_mixture(resolution: Resolution) -> Data:
    """Return the data with each source's own files, and the tokenizer that made all of them."""
    data = resolution.config.data
    for name in ("path", "valid_path"):
        value = getattr(data, name)
        if value is not None:
            key, message = f"data.{name}", f"and {KEY} both name token files"
            resolution.refuse_value(key, value, message, f"{key}=null", kind="data")
    sources = named_sources(data)
    _weights(resolution, sources)
    folders: dict[str, TokenFiles] = {}
    resolved: dict[str, DataSource] = {}
    for source in sources:
        files = look(resolution, source)
        if files.prepared and source.weight != 0:
            folders[source.name] = files
        resolved[source.name] = DataSource(
            absolute(files.path), source.weight, absolute(files.valid_path)
        )
    _require_one_tokenizer(resolution, folders)
    tokenizer = data.tokenizer
    if tokenizer == "byte":
        named = [str(files.tokenizer) for files in folders.values() if files.tokenizer]
        tokenizer = named[0] if named else "byte"
    return replace(data, mixture=resolved, tokenizer=tokenizer)


def _weights(resolution: Resolution, sources: list[MixtureSource]) -> None:
    """Check that all weights are given, or none; 0 leaves a source out in either resolution."""
    given = [source.name for source in sources if source.weight]
    missing = [f"{source.key}.weight=1" for source in sources if source.weight is None]
    if given and missing:
        message = "has weights for some sources only; without weights, sources count by their sizes"
        resolution.refuse_value(KEY, given, message, " ".join(missing), kind="data")
    elif not given and not missing:
        names, first = [source.name for source in sources], f"{sources[0].key}.weight=1"
        resolution.refuse_value(KEY, names, "has no weight above 0", first, kind="data")


def _require_one_tokenizer(resolution: Resolution, folders: dict[str, TokenFiles]) -> None:
    """Refuse sources whose ids come from different tokenizers, bytes included: they mean different texts."""
    if not folders:
        return
    (first, files), *others = folders.items()
    for name, other in others:
        if _vocabulary(other) != _vocabulary(files):
            message = (
                f"holds {_tokens_of(other)}, and {KEY}.{first} holds {_tokens_of(files)}: "
                "a model is trained on the tokens of one tokenizer"
            )
            alone = f"{KEY}.{name}.weight=0"
            resolution.refuse_value(f"{KEY}.{name}", other.path, message, alone, kind="data")


def _vocabulary(files: TokenFiles) -> bytes | None:
    """Return the tokenizer's file, or None for bytes."""
    return files.tokenizer.read_bytes() if files.tokenizer else None


def _tokens_of(files: TokenFiles) -> str:
    return f"tokens of {files.tokenizer}" if files.tokenizer else "bytes (no tokenizer.json)"


# --- samples --------------------------------------------------------------------------------------


def _require_samples(resolution: Resolution, data: Data) -> None:
    """Refuse a source without a sample to train on, or to validate on if there are evaluations."""
    config = replace(resolution.config, data=data)
    train = config.train
    for source in sources_of(data):
        if _has_samples(source, config):
            continue
        tokens, held_out = split_sizes(data, source)
        evaluated = f" and {counted(held_out, 'token')} to validate on" if train.eval_every else ""
        message = (
            f"has {counted(tokens, 'token')} to train on{evaluated}, and a sample of train.seq_len="
            f"{train.seq_len} has {train.seq_len + 1} tokens"
        )
        remedies = map(resolution.completed, _samples_instead(source, config))
        resolution.refuse_value(f"{source.key}.path", source.path, message, *remedies, kind="data")


def _has_samples(source: MixtureSource, config: Config) -> bool:
    """True if the files of a source hold a sample of each split that is read, or cannot be read here."""
    is_cut = config.data.packing == "stream" and not config.train.has_whole_documents
    least = config.train.seq_len if is_cut else 1
    with suppress(DamagedError, OSError):
        tokens, held_out = split_sizes(config.data, source)
        return tokens > least and (config.train.eval_every == 0 or held_out > least)
    return True


def _samples_instead(source: MixtureSource, config: Config) -> Iterator[str]:
    """Yield overrides with which a source has samples: other shares, shorter samples, no evaluations."""
    shares = [0.1, 0.2, 0.5] if source.valid_path is None and config.train.eval_every else []
    lengths = [1 << power for power in range(20, 3, -1) if 1 << power < config.train.seq_len]
    attempts: list[list[dict[str, Any]]] = [
        [{"data.valid_fraction": share} for share in shares],
        [{"train.seq_len": length} for length in lengths],
        [{"train.seq_len": n, "data.valid_fraction": share} for n in lengths for share in shares],
        [{"train.eval_every": 0}, {"train.eval_every": 0, "data.valid_fraction": 0}],
    ]
    for kind in attempts:
        enough = (it for it in kind if _has_samples(source, reference.with_values(config, it)))
        if changes := next(enough, None):
            yield " ".join(override(key, value) for key, value in changes.items())


# --- token files ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class TokenFiles:
    """The files of a source."""

    path: str | None
    valid_path: str | None
    tokenizer: Path | None = None
    """The tokenizer of the prepared folder."""
    prepared: bool = False


def look(resolution: Resolution, source: MixtureSource) -> TokenFiles:
    """Return the files of a source, all of which must exist."""
    found = TokenFiles(source.path, source.valid_path)
    if source.path and token_formats.is_parts(source.path):
        _require_one_pass(resolution, source)
    if source.path and resolution.config.data.source == "megatron":
        folder = token_files.folder_of(source.path)
        if folder is not None:
            found = _taken_apart(resolution, source, folder)
            _require_tokens_of_model(resolution, source, folder, found.tokenizer)
    _present(resolution, source, "path", found.path)
    if found.valid_path is not None:
        _present(resolution, source, "valid_path", found.valid_path)
    return found


def _require_one_pass(resolution: Resolution, source: MixtureSource) -> None:
    """Refuse what needs all samples before the first step, of texts that are prepared beside the training."""
    objective = resolution.config.train.objective
    what = "is prepared beside the training, and "
    if source.name:
        message = f"{what}the sources of a data mixture are prepared before it"
    elif objective in (*ANSWERS, "distill"):
        message = f"{what}train.objective={objective} looks at all samples before the first step"
    else:
        return
    resolution.refuse_value(f"{source.key}.path", source.path, message, kind="data")


def _taken_apart(resolution: Resolution, source: MixtureSource, folder: Path) -> TokenFiles:
    """Return a prepared folder's own files in place of the folder, unless others are requested."""
    manifest = token_files.manifest(folder) or {}
    vocab, needed = resolution.config.model.vocab, manifest.get("vocabulary", 0)
    if needed > vocab:
        enough = resolution.more_rows(-(-needed // 64) * 64)
        message = f"is less than the {needed} tokens of the vocabulary that made {folder}"
        resolution.refuse("model.vocab", message, enough, kind="data")
    _require_kind_of_samples(resolution, source, folder, manifest)
    path, valid_path = source.path, source.valid_path
    if Path(path or "").expanduser().absolute() == folder.absolute():
        is_parts = token_formats.is_parts(folder)
        held_out = token_formats.part_of(folder, 0) if is_parts else folder
        path = str(folder if is_parts else folder / token_files.TOKENS)
        if valid_path is None and (held_out / f"{token_files.VALID}.idx").is_file():
            valid_path = str(held_out / token_files.VALID)
    tokenizer = folder / token_files.TOKENIZER
    return TokenFiles(path, valid_path, tokenizer if tokenizer.is_file() else None, prepared=True)


def _require_kind_of_samples(
    resolution: Resolution, source: MixtureSource, folder: Path, manifest: dict[str, Any]
) -> None:
    train = resolution.config.train
    for kind, objectives in (("pairs", PAIRED), ("rated", ("kto",)), ("labels", ("classify",))):
        is_needed, is_held = train.objective in objectives, bool(manifest.get(kind))
        if is_held and not is_needed:
            message = f"was prepared with --{kind}, and train.objective={train.objective} learns every token"
            labels = f" train.labels={manifest[kind]}" if kind == "labels" else ""
            advice = f"train.objective={objectives[0]}{labels}"
            resolution.refuse_value(f"{source.key}.path", str(folder), message, advice, kind="data")
        elif is_needed and not is_held:
            samples = "good and bad answers" if kind == "rated" else kind
            message = f"needs {samples}, and {folder} has none: {FORMS[kind]}"
            resolution.refuse("train.objective", message, kind="data")
    if (held := manifest.get("labels", 0)) > (train.labels or held):
        message = f"is less than the {held} labels of {folder}"
        resolution.refuse("train.labels", message, f"train.labels={held}", kind="data")


def _require_tokens_of_model(
    resolution: Resolution, source: MixtureSource, folder: Path, tokenizer: Path | None
) -> None:
    """Refuse a new training of a pretrained model on a folder whose ids mean other texts than the model's."""
    if _other_tokenizer(resolution, tokenizer) is not None:
        made = "bytes" if tokenizer is None else f"tokens of {tokenizer}"
        asked = shlex.quote(str(resolution.config.model.init_from))
        message = (
            f"holds {made}, whose ids mean other texts to the model of model.init_from: prepare them "
            f"again with --tokenizer {asked}"
        )
        resolution.refuse_value(f"{source.key}.path", str(folder), message, kind="data")


def _require_tokenizer_of_model(resolution: Resolution, data: Data) -> None:
    """Refuse texts whose tokenizer is not the tokenizer of `model.init_from`."""
    if data.tokenizer == "bpe":
        return  # a new vocabulary has a new embedding, so no ids of model.init_from are used
    path = None if data.tokenizer == "byte" else Path(data.tokenizer).expanduser()
    own = _other_tokenizer(resolution, path)
    if own is not None:
        message = "makes ids that mean other texts to the model of model.init_from"
        advice = override("data.tokenizer", str(own))
        resolution.refuse("data.tokenizer", message, advice, kind="data")


def _other_tokenizer(resolution: Resolution, tokenizer: Path | None) -> Path | None:
    """Return the tokenizer of a pretrained model that a job begins with, if this one, or bytes, is another."""
    asked = resolution.config.model.init_from
    if asked is None or resolution.composed.opened:
        return None
    try:
        own = locate(asked, weights=False) / token_files.TOKENIZER
        same = not own.is_file() or token_files.have_same_texts(own, tokenizer)
    except (NoSuchModelError, OSError, ValueError):  # what cannot be read is refused elsewhere
        return None
    return None if same else own


def _present(resolution: Resolution, source: MixtureSource, name: str, path: str | None) -> None:
    kind, key = resolution.config.data.source, f"{source.key}.{name}"
    form = FORMATS[kind]
    if path is None:
        message = f"is needed by data.source={kind}: {form.path}"
        resolution.refuse_value(key, None, message, f"{key}=/path/to/corpus", kind="data")
        return
    if missing := form.missing(path):
        stem = form.stem(path)
        advice = override(key, stem) if stem != path and not form.missing(stem) else None
        resolution.refuse_value(key, path, f"has no {' and '.join(missing)}", advice, kind="data")
        return
    _glance(resolution, key, str(Path(path).expanduser()))


def _glance(resolution: Resolution, key: str, path: str) -> None:
    """Check early for mismatched or truncated files and larger vocabularies, which fail a launch later."""
    try:
        largest = open_index(resolution.config.data, path).largest()
    except (DamagedError, OSError) as error:
        resolution.refuse_value(key, path, str(error), kind="data")
        return
    vocab = resolution.config.model.vocab
    if largest >= vocab and not any(it.key == "model.vocab" for it in resolution.violations):
        held = f"token {largest}" if largest < sys.maxsize else "a negative token"
        enough = resolution.more_rows(largest + 1) if largest < sys.maxsize else None
        message = f"has too few tokens for {path}, which holds {held}: ids are in [0, {vocab})"
        resolution.refuse("model.vocab", message, enough, kind="data")

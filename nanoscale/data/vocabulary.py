"""The tokenizer of a run as the files next to the weights of a Hugging Face model."""

import json
import shutil
from pathlib import Path

from nanoscale.common.json_text import Json
from nanoscale.config.schema import Config
from nanoscale.config.token_files import TEMPLATE, TOKENIZER, folder_of, sources_of
from nanoscale.data import corpus
from nanoscale.data.tokens import tokenizer as tokenizers

_GENERATION = "generation_config.json"
"""Transformers' settings of generation: tokens that end a text, and sampling."""
_FILES = (
    "tokenizer.json",
    tokenizers.CONFIG,
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
    "chat_template.jinja",
    _GENERATION,
)
_SPECIAL = ("bos_token_id", "eos_token_id", "pad_token_id")


def write(folder: Path, config: Config) -> Json:
    """Write the tokenizer's files, as far as it is known; return the special tokens' numbers for config.json.

    It is `data.tokenizer`. If only token files were named, it is the tokenizer of the run's initial model;
    otherwise none is known. The initial model's special tokens and its settings of generation are kept.
    """
    data, init_from = config.data, config.model.init_from
    initial = Path(init_from) if init_from is not None and Path(init_from).is_dir() else None
    if data.tokenizer not in ("byte", "bpe"):
        tokenizer = tokenizers.load(data.tokenizer)
        _copy(tokenizer.path.parent, folder)
        shutil.copyfile(tokenizer.path, folder / "tokenizer.json")
        _describe(folder, tokenizer.name_of(tokenizer.eos))
        if generation := initial and tokenizers.read_object(initial / _GENERATION):
            ends = _with_end(generation, tokenizer.eos)
            (folder / _GENERATION).write_text(f"{json.dumps(ends, indent=2)}\n", "utf-8")
        special = _special_entries(initial) | _special_entries(Path(data.tokenizer).parent)
        return _with_end(_eos_entry(None) | special, tokenizer.eos)
    if data.source != "stdlib":
        if initial is not None:
            _copy(initial, folder)
        return _eos_entry(None) | _special_entries(initial)
    prepared = corpus.prepare(data)
    if data.tokenizer == "bpe":
        shutil.copyfile(prepared.folder / "tokenizer.json", folder / "tokenizer.json")
    else:
        tokenizers.bytes_native().save(str(folder / "tokenizer.json"))
    _describe(folder, tokenizers.END)
    return _eos_entry(prepared.tokenizer().eos)


def tokenizer_of_run(config: Config) -> tokenizers.Tokenizer | None:
    """Return the tokenizer of a run's tokens, as `write` does, or a prepared folder's; None: not known.

    The token files themselves need not exist any more.
    """
    data, init_from = config.data, config.model.init_from
    if data.tokenizer not in ("byte", "bpe"):
        return tokenizers.load(data.tokenizer)
    if data.source == "stdlib":
        return (
            tokenizers.ByteTokenizer()
            if data.tokenizer == "byte"
            else corpus.prepare(data).tokenizer()
        )
    if init_from is not None and (file := tokenizers.in_folder(Path(init_from))) is not None:
        return tokenizers.load(file)
    if data.source in ("random", "hooks"):
        return None
    folders = [folder_of(source.path) for source in sources_of(data) if source.path]
    prepared = [folder for folder in folders if folder is not None]
    if not prepared or len(prepared) < len(folders):
        return None
    made_by = prepared[0] / TOKENIZER  # the rules require one tokenizer for several sources
    return tokenizers.load(made_by) if made_by.is_file() else tokenizers.ByteTokenizer()


def chat_template(config: Config) -> Path | None:
    """Return the template of the chats that a run was trained on; None: its tokenizer's own, or none.

    The prepared folder need not exist any more.
    """
    paths = [source.path for source in sources_of(config.data) if source.path]
    folders = [folder for folder in map(folder_of, paths) if folder is not None]
    templates = [folder / TEMPLATE for folder in folders if (folder / TEMPLATE).is_file()]
    return templates[0] if templates else None


def _describe(folder: Path, end: str) -> None:
    """Name the end-of-document token if no file does yet; otherwise transformers would not know it."""
    file = folder / tokenizers.CONFIG
    if not file.exists():
        settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": end}
        file.write_text(f"{json.dumps(settings, indent=2)}\n", "utf-8")


def _copy(source: Path, folder: Path) -> None:
    for name in _FILES:
        if (source / name).is_file():
            shutil.copyfile(source / name, folder / name)


def _special_entries(source: Path | None) -> Json:
    """Return the special tokens of a model's config.json; none without a folder."""
    document = tokenizers.read_object(source / "config.json") if source is not None else {}
    return {name: document[name] for name in _SPECIAL if name in document}


def _with_end(settings: Json, eos: int) -> Json:
    """Add the end of a document to the tokens that end a text, if it is not one of them."""
    named = settings.get("eos_token_id")
    ends = named if isinstance(named, list) else [] if named is None else [named]
    return settings if eos in ends else settings | {"eos_token_id": [*ends, eos] if ends else eos}


def _eos_entry(number: int | None) -> Json:
    return {"bos_token_id": None, "eos_token_id": number, "pad_token_id": None}

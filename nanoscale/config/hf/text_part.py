"""A model's folder as the folder of a language model.

Of a wrapper, whose config.json has a `text_config` (Gemma 3, Qwen3.5, Llama 4, Mistral 3), it is the part for
text: its configuration, and its tensors by the names that they have in a language model of its own.
"""

import re
from pathlib import Path

from nanoscale.common.errors import reason
from nanoscale.common.json_text import Json, parse
from nanoscale.config.hf.families import HFKey, UnsupportedError, families
from nanoscale.config.hf.quantized_files import joined
from nanoscale.config.hf.safetensors_headers import Stored, read_folder

HEAD = "lm_head.weight"
TEXT = "text_config"
OUTER = (
    "bos_token_id", "eos_token_id", "pad_token_id", "tie_word_embeddings", "is_encoder_decoder",
    "quantization_config",
)  # fmt: skip
"""Settings of a language model that a wrapper may have outside of `text_config`."""
_SIZES = ("layers", "hidden", "heads", "kv_heads", "head_dim", "ffn", "vocab", "max_seq_len")
_PREFIX = re.compile(r"(?:model\.)?(language_model|text_model)\.(?:model\.)*")
"""The begin of the names of a wrapper's tensors for text, in its files."""
_WITHOUT_PREFIX = re.compile(r"lm_head\.|model\.(?:layers|embed_tokens|norm)\.")
"""The begin of the names of the tensors for text in older files, as in Qwen2-VL's."""


def read_document(folder: Path) -> Json:
    """Return the config.json of a folder. Raises UnsupportedError if it is missing or no JSON object."""
    try:
        document = parse((folder / "config.json").read_text("utf-8"))
    except OSError as error:
        raise UnsupportedError(f"config.json cannot be read: {reason(error)}") from error
    except ValueError as error:
        raise UnsupportedError(f"config.json is not JSON: {error}") from error
    if not isinstance(document, dict):
        raise UnsupportedError("config.json holds no object")
    return document


def read_config(folder: Path) -> Json:
    """Return the config.json of a folder's language model. Raises UnsupportedError as `read_document` does."""
    return text_config(read_document(folder))


def text_config(document: Json) -> Json:
    """Return the config.json of the language model in a wrapper; other documents unchanged.

    Sizes that `text_config` leaves out are transformers' own for a family of ours (Gemma 3's files need that).
    """
    text = document.get(TEXT)
    if not isinstance(text, dict):
        return document
    family = families().get(str(text.get("model_type")))
    usual = {
        name: setting.usual
        for name, setting in (family.settings if family else {}).items()
        if isinstance(setting, HFKey) and setting.name in _SIZES and isinstance(setting.usual, int)
    }
    outer = {name: document[name] for name in OUTER if document.get(name) is not None}
    return usual | text | outer


def is_wrapper(folder: Path) -> bool:
    try:
        return isinstance(read_document(folder).get(TEXT), dict)
    except UnsupportedError:
        return False


def folder_tensors(folder: Path) -> dict[str, Stored]:
    """Return all tensors of a folder, of quantized matrices in place of their parts; headers are read.

    Raises:
        BadFileError: see `read_folder`.
    """
    try:
        settings = read_config(folder).get("quantization_config")
    except UnsupportedError:
        settings = None
    return joined(read_folder(folder), settings if isinstance(settings, dict) else {})


def read_tensors(folder: Path) -> dict[str, Stored]:
    """Return the tensors of a folder's language model, by their names in one; headers are read.

    Raises:
        BadFileError: see `read_folder`.
    """
    stored = folder_tensors(folder)
    if not is_wrapper(folder):
        return stored
    has_prefix = any(map(_PREFIX.match, stored))
    is_text = _PREFIX.match if has_prefix else _WITHOUT_PREFIX.match
    return {
        text_name(name): tensor for name, tensor in stored.items() if is_text(name) or name == HEAD
    }


def text_name(name: str) -> str:
    """Return the name in a language model of a wrapper's tensor for text."""
    rest = _PREFIX.sub("", name, count=1) if _PREFIX.match(name) else None
    return name if rest is None else rest if rest.startswith("lm_head.") else f"model.{rest}"


def module_prefix(folder: Path) -> str | None:
    """Return how transformers' names of a wrapper's modules for text begin; None: no wrapper."""
    wrapped = map(_PREFIX.match, read_folder(folder)) if is_wrapper(folder) else ()
    return next((f"model.{match[1]}." for match in wrapped if match), None)

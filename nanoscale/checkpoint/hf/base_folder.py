"""The folder that a run began from, of which an export gives back all that training did not change.

It is needed if it holds more than the trained model: the towers of a wrapper, layers that predict further
tokens, or anything else that is not trained (`model.kept_tensors`).
"""

import math
import shutil
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from nanoscale.checkpoint.hf.adapters import unusable_base
from nanoscale.checkpoint.hf.load import file_readers, find_tensor, read_part
from nanoscale.checkpoint.hf.safetensors_files import Entries, Entry, write_json
from nanoscale.common.json_text import Json
from nanoscale.config.dtypes import Dtype
from nanoscale.config.hf.safetensors_headers import BadFileError, Stored
from nanoscale.config.hf.shape import EMBEDDINGS, read_shape
from nanoscale.config.hf.text_part import (
    HEAD,
    TEXT,
    folder_tensors,
    read_document,
    read_tensors,
    text_config,
    text_name,
)
from nanoscale.config.resolved import ResolvedConfig
from nanoscale.data import vocabulary

_COPIED = ("*.json", "*.model", "*.txt", "*.jinja")
"""The files that are copied as they are, except for the index of the weights."""


@dataclass(frozen=True)
class Base:
    """The folder that a run began from, and its tensors."""

    config: ResolvedConfig
    folder: Path
    tensors: dict[str, Stored]
    """All tensors, by their names in the files."""
    text_tensors: dict[str, Stored]
    """The tensors of its language model, by their names in one."""

    def arrange(self, trained: Entries) -> tuple[Entries, dict[str, str]]:
        """Return all tensors in the order of the files, and the trained ones' names by their names there.

        Args:
            trained: tensors by their names in a language model.

        Raises:
            UserError: the folder's tensors have other names or shapes.
        """
        trained_names = {self._name(name, entry): name for name, entry in trained.items()}
        head = self.text_tensors.get(HEAD)
        embedding = next((name for name in trained if name.endswith(EMBEDDINGS)), None)
        if head is not None and embedding is not None:  # a tied head is in the files, too
            trained_names.setdefault(head.name, embedding)
        entries = {
            name: trained[trained_names[name]] if name in trained_names else _entry(tensor)
            for name, tensor in self.tensors.items()
        }
        return entries | {it: trained[name] for it, name in trained_names.items()}, trained_names

    def _name(self, name: str, entry: Entry) -> str:
        tensor = find_tensor(self.text_tensors, text_name(name))
        if tensor is None and name == HEAD:
            return HEAD
        if tensor is None or tensor.shape != entry.shape:
            size = " × ".join(map(str, entry.shape))
            raise _unusable(self.config, f"has no {name} of {size}")
        return tensor.name

    def content(
        self,
        names: Iterable[str],
        trained_names: dict[str, str],
        read: Callable[[list[str]], Iterator[memoryview]],
    ) -> Iterator[memoryview]:
        """Yield the bytes of tensors, of the trained ones as `read` returns them."""
        for name in names:
            if name in trained_names:
                yield from read([trained_names[name]])
            else:
                yield from _content(self.tensors[name])

    def write_settings(self, out: Path, kind: Dtype, *, has_new_head: bool) -> None:
        """Write config.json and the files of the tokenizer and the processors.

        A tokenizer of the data that is not in this folder replaces its files.
        """
        for file in (file for pattern in _COPIED for file in self.folder.glob(pattern)):
            if not file.name.endswith(".index.json"):
                shutil.copyfile(file, out / file.name)
        changes = self._changes(kind, has_new_head)
        if not self._has_tokenizer():
            special = vocabulary.write(out, self.config)
            changes |= {name: value for name, value in special.items() if value is not None}
        document = read_document(self.folder)
        if (changed := _changed(document, changes)) != document:
            write_json(out / "config.json", changed)

    def _has_tokenizer(self) -> bool:
        """True if the tokenizer of the data is the folder's, or not known."""
        path = Path(self.config.data.tokenizer)
        tokenizer_folder = path if path.is_dir() else path.parent
        is_file = self.config.data.tokenizer not in ("byte", "bpe") and path.exists()
        return not is_file or tokenizer_folder.samefile(self.folder)

    def _changes(self, kind: Dtype, has_new_head: bool) -> Json:
        """Return the settings of the language model that differ from the folder's."""
        model, document = self.config.model, read_document(self.folder)
        text = text_config(document)
        changes = {name: it for name, it in model.hf_config.items() if text.get(name) != it}
        if model.source == "own" and model.max_seq_len != read_shape(self.folder).max_seq_len:
            changes["max_position_embeddings"] = model.max_seq_len
        if has_new_head:
            changes["tie_word_embeddings"] = False
        dtypes = [name for name in ("dtype", "torch_dtype") if name in document | text]
        return changes | dict.fromkeys(dtypes, kind.torch_name)


def _entry(tensor: Stored) -> Entry:
    """Return a tensor as it is stored; a quantized matrix in bf16, as the trained ones are no longer
    quantized."""
    if tensor.scales is None:
        return Entry(tensor.dtype, tensor.shape, tensor.bytes)
    return Entry("BF16", tensor.shape, 2 * math.prod(tensor.shape))


def _content(tensor: Stored) -> Iterator[memoryview]:
    if tensor.scales is None:
        yield from tensor.content()
        return
    with file_readers() as opened:
        values = read_part(opened, tensor, tuple(slice(0, size, 1) for size in tensor.shape))
        numbers: Any = values.to(torch.bfloat16).contiguous().view(-1).view(torch.uint8).numpy()
        yield memoryview(numbers)


def _changed(document: Json, changes: Json) -> Json:
    """Return a config.json with changed settings of its language model, at the level that has them."""
    result = text = dict(document)
    if isinstance(document.get(TEXT), dict):
        text = result[TEXT] = dict(document[TEXT])
    for name, value in changes.items():
        for level in [it for it in (result, text) if name in it] or [text]:
            level[name] = value
    for level in (result, text):
        level.pop("quantization_config", None)
    return result


def open_base(config: ResolvedConfig) -> Base | None:
    """Return the folder that an export copies from; None if it needs none.

    Raises:
        UserError: it no longer exists, or is damaged.
    """
    if not config.model.kept_tensors:
        return None
    folder = Path(str(config.model.init_from))
    try:
        if not folder.is_dir():
            raise BadFileError("does not exist")
        return Base(config, folder, folder_tensors(folder), read_tensors(folder))
    except BadFileError as error:
        raise _unusable(config, str(error)) from error


def _unusable(config: ResolvedConfig, why: str) -> Exception:
    kept = config.model.kept_tensors
    what = f"{why}, and an export copies the {kept} tensors from there that were not trained"
    return unusable_base(config, what, "--base /where/it/is/now")

"""Tokenizers: text to token ids and back."""

import base64
import hashlib
import re
import shlex
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from nanoscale.common.errors import UserError, Violation
from nanoscale.common.json_text import Json, parse
from nanoscale.config.hf.hub import asking, missing_path, similar_paths, why_not
from nanoscale.config.token_files import TEMPLATE
from nanoscale.data.tokens.sentencepiece_model import SUFFIX, ConversionError, as_json

END = "<|endoftext|>"
CONFIG = "tokenizer_config.json"
"""The file next to a tokenizer.json that may name the end-of-document token."""
_FILES = ("tokenizer.json", "tokenizer.model")
"""The names of tokenizers in a model's folder, in the order of preference."""
# Names of the end-of-document token, in the order of preference.
_END_NAMES = (
    END,
    "<|end_of_text|>",
    "</s>",
    "<eos>",
    "<｜end▁of▁sentence｜>",
    "[EOS]",
    "<|im_end|>",
    "[SEP]",
)


class Tokenizer(Protocol):
    """The interface of tokenizers that the trainer uses."""

    @property
    def vocab_size(self) -> int:
        """The number of ids; ids lie in [0, vocab_size)."""

    @property
    def eos(self) -> int:
        """The id that ends a document."""

    def encode(self, text: str) -> list[int]:
        """Return the ids of a text, without `eos`."""

    def decode(self, ids: Sequence[int], *, keep_special: bool = False) -> str:
        """Return the text of ids, without special tokens unless `keep_special`; never fails."""

    def encode_documents(self, texts: Sequence[str], framed: bool = False) -> Iterable[np.ndarray]:
        """Return the ids of each document (1-D), with `eos` at its end, or with `framed` between the
        tokenizer's own special tokens, as [CLS] and [SEP]."""


class ByteTokenizer:
    """A tokenizer whose ids are the bytes of UTF-8; 256 ends a document."""

    vocab_size = 257
    eos = 256

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def decode(self, ids: Sequence[int], *, keep_special: bool = False) -> str:
        texts = [bytearray()]
        for token in ids:
            if token == self.eos:
                texts.append(bytearray())
            else:  # 255 never occurs in UTF-8, so an id beyond the vocabulary shows as a replacement character
                texts[-1].append(min(int(token), 255))
        if keep_special:
            return END.join(text.decode(errors="replace") for text in texts)
        return b"".join(texts).decode(errors="replace")

    def encode_documents(self, texts: Sequence[str], framed: bool = False) -> Iterable[np.ndarray]:
        for text in texts:
            raw = np.frombuffer(text.encode(), dtype=np.uint8).astype(np.uint16)
            yield raw if framed else np.append(raw, np.uint16(self.eos))


def bytes_native() -> Any:
    """Return `ByteTokenizer` in the tokenizers library: a BPE without merges, whose letters stand for bytes."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    vocab = {letter: byte for byte, letter in enumerate(_byte_letters())}
    native = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    native.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    native.decoder = decoders.ByteLevel()
    native.add_special_tokens([AddedToken(END, special=True)])
    assert native.token_to_id(END) == ByteTokenizer.eos
    return native


def _byte_letters() -> list[str]:
    """Return the letter of each byte in byte-level vocabularies.

    Printable bytes stand for themselves, the others for letters from U+0100 on (Radford et al. 2019, GPT-2).
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    return [chr(b) if b in printable else chr(0x100 + others.index(b)) for b in range(256)]


class FileTokenizer:
    """A tokenizer.json of Hugging Face's `tokenizers` library, or a sentencepiece model converted to one."""

    def __init__(self, tokenizer: Any, path: Path, eos: int, bos: int | None = None) -> None:
        """Wrap a tokenizer; `bos` begins a text, if the files next to the tokenizer.json name one."""
        self._tokenizer = tokenizer
        self.path = path
        """Its tokenizer.json."""
        self.eos = eos
        self.bos = bos
        self.vocab_size: int = 1 + max(tokenizer.get_vocab(with_added_tokens=True).values())

    def encode(self, text: str) -> list[int]:
        with _panics_explained():
            ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def decode(self, ids: Sequence[int], *, keep_special: bool = False) -> str:
        valid_ids = [int(token) for token in ids if token < self.vocab_size]
        return self._tokenizer.decode(valid_ids, skip_special_tokens=not keep_special)

    def encode_documents(self, texts: Sequence[str], framed: bool = False) -> Iterable[np.ndarray]:
        for start in range(0, len(texts), 64):
            batch = texts[start : start + 64]
            with _panics_explained():
                results = self._tokenizer.encode_batch_fast(batch, add_special_tokens=framed)
            for encoded in results:
                ids = encoded.ids if framed else [*encoded.ids, self.eos]
                yield np.array(ids, dtype=np.int64)

    def prefix_ids(self) -> tuple[int, ...]:
        """The tokens that the tokenizer itself puts before a text, such as `<s>`; may be empty."""
        encoded = self._tokenizer.encode("a", add_special_tokens=True)
        first = encoded.special_tokens_mask.index(0)
        return tuple(encoded.ids[:first])

    def name_of(self, token: int) -> str:
        """Return the token of an id, as the tokenizer.json has it."""
        return self._tokenizer.id_to_token(token)


@contextmanager
def _panics_explained() -> Iterator[None]:
    """Turn a panic of the tokenizers library, which Python does not count as an Exception, into a UserError."""
    try:
        yield
    except BaseException as error:
        if type(error).__name__ != "PanicException":
            raise
        raise UserError("data", f"the tokenizer cannot encode a text: {error}") from None


def in_folder(folder: Path) -> Path | None:
    """Return the tokenizer.json in a folder, otherwise its tokenizer.model; None if it has neither."""
    return next((folder / name for name in _FILES if (folder / name).is_file()), None)


def find(name: str, key: str) -> Path:
    """Return the tokenizer.json of a file, a folder, or a model on the hub; a sentencepiece model is converted.

    A model in the hub's cache needs no network. Raises UserError, naming `key`, if there is none.
    """
    path = Path(name).expanduser()
    if path.is_dir():
        path = in_folder(path) or path / "tokenizer.json"
    if path.is_file():
        return _converted(path, key)
    if missing_path(name) is not None or path.suffix in (".json", SUFFIX):
        suggestions = tuple(f"{key} {shlex.quote(similar)}" for similar in similar_paths(name))
        raise _tokenizer_error(path, "there is no such file", key, suggestions)
    with asking(name) as cache_only:
        from huggingface_hub import hf_hub_download
        from huggingface_hub.errors import EntryNotFoundError

        try:
            try:
                file = Path(hf_hub_download(name, _FILES[0], local_files_only=cache_only))
            except EntryNotFoundError:
                file = Path(hf_hub_download(name, _FILES[1], local_files_only=cache_only))
        except Exception as error:  # a hub, a network and a cache can raise anything
            what = f"is not a file, and the hub has no such tokenizer to load: {why_not(error)}"
            raise _tokenizer_error(Path(name), what, key) from error
        for name_beside in (CONFIG, TEMPLATE):
            with suppress(Exception):  # not every model has one
                hf_hub_download(name, name_beside, local_files_only=cache_only)
    return _converted(file, key)


def _converted(path: Path, key: str) -> Path:
    try:
        return as_json(path)
    except ConversionError as error:
        raise _tokenizer_error(path, str(error), key) from error


def load(path: str | Path, *, key: str = "data.tokenizer", eos: str | None = None) -> FileTokenizer:
    """Read a tokenizer.json or a sentencepiece model; a tokenizer_config.json next to it may name the end
    token, or `eos`.

    Raises UserError, naming `key`, if it is missing, unreadable or has no end-of-document token.
    """
    path = Path(path).expanduser()
    if not path.is_file():
        what = "there is no such file; give byte, bpe or the path of a tokenizer.json"
        raise _tokenizer_error(path, what, key)
    path = _converted(path, key)
    native = open_native(path, key)
    native.encode_special_tokens = True  # "<|endoftext|>" written in a text is text
    config = config_of(path)
    own, bos = special_token(config, "eos_token"), special_token(config, "bos_token")
    names = (eos,) if eos is not None else (*([own] if own is not None else []), *_END_NAMES)
    for name in names:
        number = native.token_to_id(name)
        if number is not None:
            bos_id = native.token_to_id(bos) if bos is not None else None
            return FileTokenizer(native, path, number, bos_id)
    what = f"it has none of the known end-of-document tokens: {', '.join(names)}"
    raise _tokenizer_error(path, what, key)


def open_native(path: Path, key: str = "data.tokenizer") -> Any:
    """Read a tokenizer.json with the tokenizers library, without truncation and padding.

    Raises UserError, naming `key`, if it is unreadable, or makes texts so long that the library could abort.
    """
    from tokenizers import Tokenizer as Native

    try:
        native = Native.from_file(str(path))
        longest = growth(native)
    except Exception as error:  # the library raises plain Exception
        what = f"it cannot be read as a tokenizer.json: {error}"
        raise _tokenizer_error(path, what, key) from error
    if longest > MOST:
        what = f"it makes up to {longest:,.0f} characters of one; at most {MOST} are allowed"
        raise _tokenizer_error(path, what, key)
    native.no_truncation()
    native.no_padding()
    return native


def train_bpe(texts: Iterable[str], vocab: int, path: Path) -> FileTokenizer:
    """Train a byte-level BPE of at most `vocab` tokens (END included) and write it to `path`.

    The same texts in the same order give the same file.
    """
    from tokenizers import Tokenizer as Native
    from tokenizers import decoders, models, pre_tokenizers, trainers

    native = Native(models.BPE())
    native.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    native.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab,
        min_frequency=2,
        special_tokens=[END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    native.train_from_iterator(texts, trainer)
    native.save(str(path))
    return load(path)


def digest(path: Path) -> str:
    """Return the SHA-256 of a tokenizer.json."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def config_of(path: Path) -> Json:
    """Return the tokenizer_config.json next to a tokenizer.json; {} if it is missing or unreadable."""
    return read_object(path.with_name(CONFIG))


def read_object(file: Path) -> Json:
    """Read a file with a JSON object; {} if it is missing or unreadable, or holds another value."""
    try:
        document = parse(file.read_text("utf-8"))
    except (OSError, ValueError):
        return {}
    return document if isinstance(document, dict) else {}


def special_token(config: Json, kind: str) -> str | None:
    """Return the special token of a kind (`eos_token`), which the file has as a text or as an object."""
    token = config.get(kind)
    if isinstance(token, dict):
        token = token.get("content")
    return token if isinstance(token, str) else None


def _tokenizer_error(
    path: Path, what: str, key: str, suggestions: tuple[str, ...] = ()
) -> UserError:
    violation = Violation(key, str(path), "", what, suggestions)
    return UserError("data", f"{key}: {path}: {what}", [violation])


MOST = 64
"""The most characters for each one of a text. Unicode's NFKC makes 18 of one, and a prefix doubles them."""


def growth(native: Any) -> float:
    """Return the most characters that a tokenizer of the library makes of one character.

    Raises:
        ValueError: a part of it cannot be read.
    """
    parts = (native.normalizer, native.decoder)
    return max(_growth(parse(part.__getstate__())) if part is not None else 1.0 for part in parts)


def _growth(part: Json) -> float:
    result = 1.0
    for inner in (*part.get("normalizers", ()), *part.get("decoders", ())):
        result *= _growth(inner)
    if part["type"] == "Replace":
        width, length = _width(part["pattern"]), len(part["content"])
        result *= max(1.0, length / width if width else 1 + length)
    elif part["type"] == "Prepend":
        result *= 1 + len(part["prepend"])
    elif part["type"] == "Precompiled":
        result *= _longest(base64.b64decode(part["precompiled_charsmap"]))
    return result


def _width(pattern: dict[str, str]) -> int:
    """Return the least characters that a pattern matches; 0 if it is not known."""
    if "String" in pattern:
        return len(pattern["String"])
    try:
        return int(re._parser.parse(pattern["Regex"]).getwidth()[0])  # type: ignore[attr-defined]
    except (re.error, RecursionError, OverflowError):
        return 0


def _longest(charsmap: bytes) -> int:
    """Return the characters of the longest text of a map of sentencepiece, which follow its trie."""
    texts = charsmap[4 + int.from_bytes(charsmap[:4], "little") :].split(b"\0")
    return max(1, *(len(text.decode(errors="replace")) for text in texts))

"""Sentencepiece's `.model` files, converted to a tokenizer.json.

The conversion is compared with sentencepiece's own ids of texts that differ in white space, scripts, digits and
symbols. A model that gives other ids is refused.

Source: Kudo and Richardson 2018, arXiv:1808.06226; the fields are from sentencepiece_model.proto.
"""

import hashlib
import json
import re
import shutil
import tempfile
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any

from nanoscale.common.cache_folder import cache_path
from nanoscale.common.json_text import parse
from nanoscale.common.versions import install_command
from nanoscale.config.token_files import TEMPLATE, TOKENIZER

SUFFIX = ".model"
FORMAT = 1
"""Raised whenever the same model would give another tokenizer.json."""
_CONFIG = "tokenizer_config.json"
_SPACE = "▁"
"""The letter that stands for a space within pieces."""
_UNIGRAM, _BPE = 1, 2
"""Kinds of models."""
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = range(1, 7)
"""Kinds of pieces."""
_TEXTS = (
    "The quick brown fox jumps over 13 lazy dogs, and 2026 more.",
    "  two spaces   before and  between  ",
    "def f(x):\n\treturn {'a': x ** 2}  # 0x7F\n\n\nf(3)\r\n",
    "naïve café ﬁne № ½ Å ＡＢＣ e\u0301 \u00a0 \u200b \u3000",
    "语言模型 言語モデル 언어 모델 языковая модель نموذج اللغة भाषा 🙂👩‍💻",
    "",
    " ",
    "\n",
    "aaaaaaaaaaaa --- ======== 1234567890 <b>&amp;</b>",
)


class ConversionError(Exception):
    """A file that cannot be converted; the text says why."""


def as_json(path: Path) -> Path:
    """Return the tokenizer.json of a tokenizer's file: itself, or for a `.model` its conversion in the cache.

    The files next to it that name special tokens and a chat template are copied.

    Raises:
        ConversionError: the file is not a sentencepiece model, or one that cannot be converted exactly.
    """
    if path.suffix != SUFFIX:
        return path
    companions = [file for name in (_CONFIG, TEMPLATE) if (file := path.with_name(name)).is_file()]
    digest = hashlib.sha256(str(FORMAT).encode())
    for file in (path, *companions):
        digest.update(hashlib.sha256(file.read_bytes()).digest())
    folder = cache_path(None) / f"sentencepiece-{digest.hexdigest()[:32]}"
    if not folder.exists():
        native, special = convert(path)
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f"{folder.name}.", dir=folder.parent) as name:
            temporary = Path(name)
            for file in companions:
                shutil.copyfile(file, temporary / file.name)
            config = temporary / _CONFIG
            settings = parse(config.read_bytes()) if config.exists() else {}
            named = {"tokenizer_class": "PreTrainedTokenizerFast"} | special | settings
            config.write_text(f"{json.dumps(named, indent=2)}\n", "utf-8")
            native.save(str(temporary / TOKENIZER))
            with suppress(OSError):  # another process was faster
                temporary.rename(folder)
    return folder / TOKENIZER


def convert(path: Path) -> tuple[Any, dict[str, str]]:
    """Return the tokenizer of a model in the tokenizers library, and its special tokens by kind.

    Raises:
        ConversionError: it is another file, or one that cannot be converted exactly.
    """
    try:
        proto = import_module("sentencepiece.sentencepiece_model_pb2").ModelProto()
        library = import_module("sentencepiece")
    except ImportError as error:
        raise ConversionError(f"needs sentencepiece: {install_command('sentencepiece')}") from error
    try:
        content = path.read_bytes()
        proto.ParseFromString(content)
        processor = library.SentencePieceProcessor(model_proto=content)
    except Exception as error:  # protobuf's own, and RuntimeError of the library
        raise ConversionError("it is not a sentencepiece model") from error
    try:
        native = _native(proto)
    except ConversionError:
        raise
    except Exception as error:  # the tokenizers library has no kind of its own
        raise ConversionError(f"it cannot be converted: {error}") from error
    symbols = [it.piece for it in proto.pieces if it.type == _USER_DEFINED]
    for text in (*_TEXTS, *(f"a {symbol} b{symbol}{symbol}" for symbol in symbols)):
        if native.encode(text, add_special_tokens=False).ids != processor.encode(text):
            raise ConversionError(
                f"its ids of {text!r} cannot be reproduced; give the tokenizer.json of the same model"
            )
    trainer = proto.trainer_spec
    ids = {"bos_token": trainer.bos_id, "eos_token": trainer.eos_id, "unk_token": trainer.unk_id}
    return native, {kind: proto.pieces[it].piece for kind, it in ids.items() if it >= 0}


def _native(proto: Any) -> Any:
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers

    kind, normalizer = proto.trainer_spec.model_type, proto.normalizer_spec
    if kind not in (_UNIGRAM, _BPE):
        raise ConversionError("it is neither a unigram model nor a BPE")
    native = Tokenizer(_unigram(proto) if kind == _UNIGRAM else _bpe(proto))
    steps: list[Any] = []
    if normalizer.precompiled_charsmap:
        steps.append(normalizers.Precompiled(normalizer.precompiled_charsmap))
    if normalizer.remove_extra_whitespaces:
        steps += [normalizers.Replace(Regex(" +"), " "), normalizers.Replace(Regex(r"\A | \z"), "")]
    symbols = [it.piece for it in proto.pieces if it.type == _USER_DEFINED]
    if normalizer.add_dummy_prefix:
        # Added tokens are normalized, too: a text that is nothing but one of them gets no prefix.
        alone = "|".join(map(re.escape, symbols))
        steps.append(normalizers.Replace(Regex(rf"\A(?!(?:{alone})?\z)"), " "))
    native.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", _SPACE)])
    decoding = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if normalizer.add_dummy_prefix:
        decoding.append(decoders.Strip(" ", 1, 0))
    native.decoder = decoders.Sequence(decoding)
    special = [it.piece for it in proto.pieces if it.type in (_UNKNOWN, _CONTROL)]
    native.add_special_tokens([AddedToken(piece, normalized=False) for piece in special])
    native.add_tokens([AddedToken(piece, normalized=True) for piece in symbols])
    native.encode_special_tokens = True
    return native


def _unigram(proto: Any) -> Any:
    from tokenizers import models

    least = min((it.score for it in proto.pieces if it.type == _NORMAL), default=0.0)
    scores = []
    for piece in proto.pieces:
        # The names of special tokens in a text are text: any other segmentation scores more.
        is_text = piece.type in (_NORMAL, _USER_DEFINED)
        scores.append((piece.piece, piece.score if is_text else least - 1000.0 * len(piece.piece)))
    return models.Unigram(
        scores, unk_id=proto.trainer_spec.unk_id, byte_fallback=proto.trainer_spec.byte_fallback
    )


def _bpe(proto: Any) -> Any:
    from tokenizers import models

    vocab = {it.piece: number for number, it in enumerate(proto.pieces)}
    scores = {it.piece: it.score for it in proto.pieces if it.type == _NORMAL}
    merges = [
        (piece[:cut], piece[cut:])
        for piece in sorted(scores, key=lambda it: -scores[it])
        for cut in range(1, len(piece))
        if piece[:cut] in scores and piece[cut:] in scores
    ]
    return models.BPE(
        vocab,
        merges,
        unk_token=proto.pieces[proto.trainer_spec.unk_id].piece,
        fuse_unk=True,
        byte_fallback=proto.trainer_spec.byte_fallback,
    )

"""Text as it comes, against all of it at once."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from nanoscale.data.tokens.tokenizer import ByteTokenizer, Tokenizer, load, train_bpe
from nanoscale.generate.writing import Characters, Ending

TEXT = "naïve 日本語 text, 🙂🙃 and “quotes” — done.\n\tüber 𝔘nicode  ok " * 3


def metaspace(folder: Path) -> Tokenizer:
    """Spaces as letters in front of words, unknown characters as bytes: as Llama 2 has it."""
    from tokenizers import Tokenizer as Native
    from tokenizers import decoders, models, normalizers

    letters = sorted(set("▁" + TEXT) - set("🙂🙃𝔘日"))
    names = ["<s>", "</s>", "<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), *letters]
    vocab: Any = [(name, 0.0 if name.startswith("<") else -1.0) for name in names]
    native = Native(models.Unigram(vocab, 2, byte_fallback=True))
    native.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    native.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    native.add_special_tokens(["<s>", "</s>"])
    native.save(str(folder / "tokenizer.json"))
    return load(folder / "tokenizer.json")


def make(kind: str, folder: Path) -> Tokenizer:
    if kind == "byte":
        return ByteTokenizer()
    if kind == "bpe":
        return train_bpe(["plain words only, no strange letters " * 9], 300, folder / "t.json")
    return metaspace(folder)


@pytest.mark.parametrize("kind", ["byte", "bpe", "metaspace"])
def test_pieces_are_whole_characters_and_all_of_the_text(kind: str, tmp_path: Path) -> None:
    tokenizer = make(kind, tmp_path)
    ids = tokenizer.encode(TEXT)
    assert len(ids) > 150, "more than one window"
    for cut in (0, 1, 5):
        prompt = tokenizer.encode(TEXT[:cut])
        assert ids[: len(prompt)] == prompt
        characters = Characters(tokenizer.decode, prompt)
        pieces = [characters.add(token) for token in ids[len(prompt) :]]
        assert not any("\ufffd" in piece for piece in pieces)
        assert "".join(pieces) + characters.rest() == TEXT[cut:]


def test_bytes_that_are_no_characters_are_not_lost() -> None:
    rng = random.Random(2)
    for _ in range(20):
        ids = [rng.choice([0xE6, 0x97, 0xA5, 0x41, 0xF0, 0x9F]) for _ in range(200)]
        characters = Characters(ByteTokenizer().decode, [0x41])
        found = "".join([characters.add(token) for token in ids]) + characters.rest()
        assert found == bytes(ids).decode(errors="replace")


@pytest.mark.parametrize(
    ("stops", "text", "shown"),
    [
        ([], "abc", "abc"),
        (["b"], "abc", "a"),
        (["\n\n"], "one\ntwo\n\nthree", "one\ntwo"),
        (["stop", "top"], "a stop", "a "),
        (["aab"], "aaaab", "aa"),
        (["END"], "no EN", "no EN"),
    ],
)
def test_an_end_is_found_however_the_text_is_cut(stops: list[str], text: str, shown: str) -> None:
    for size in range(1, len(text) + 1):
        ending, found = Ending(stops), ""
        for start in range(0, len(text), size):
            found += ending.add(text[start : start + size])
            if ending.reached:
                break
        assert found + ending.rest() == shown
        assert ending.reached == (shown != text)

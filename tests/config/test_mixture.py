"""The rules of data.mixture: mistyped, incomplete and contradictory sources are refused before the launch."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from nanoscale.common.errors import UserError
from nanoscale.config.composing.compose import compose
from nanoscale.config.rules import Devices, check
from nanoscale.config.schema import Data
from nanoscale.config.token_files import MixtureSource, sources_of
from tests.support.token_files import write_indexed


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two prepared folders with one tokenizer, one with another, and bare files."""
    for name, tokenizer in (("web", "one"), ("code", "one"), ("other", "two")):
        (tmp_path / name).mkdir()
        write_tokens(tmp_path / name / "tokens")
        (tmp_path / name / "tokenizer.json").write_text(tokenizer)
        (tmp_path / name / "manifest.json").write_text(json.dumps({"vocabulary": 257}))
    write_tokens(tmp_path / "bare")
    write_tokens(tmp_path / "web" / "valid")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def write_tokens(prefix: Path, count: int = 100) -> None:
    write_indexed(prefix, [[0] * count])


def data_of(*words: str) -> Data:
    return check(compose(["recipe=debug", "data=megatron", *words]), Devices("cpu", 1)).data


def refused(*words: str) -> str:
    """Return the error in one text."""
    with pytest.raises(UserError) as caught:
        data_of(*words)
    return " ".join(f"{it.key}={it.value}: {it.message}" for it in caught.value.violations)


def checked(*words: str) -> Data:
    return data_of(*(f"data.mixture.{word}" if word[0] != "+" else word[1:] for word in words))


def test_folders_are_taken_apart_and_share_their_tokenizer(folder: Path) -> None:
    data = checked("web.path=web", "web.weight=3", "other.path=other", "other.weight=0",
                   "bare.path=bare", "bare.weight=1")  # fmt: skip
    assert sources_of(data) == [
        MixtureSource(f"{folder}/web/tokens", 3.0, f"{folder}/web/valid", "web"),
        MixtureSource(f"{folder}/bare", 1.0, None, "bare"),
    ]
    assert data.tokenizer == f"{folder}/web/tokenizer.json"
    assert data.valid_fraction > 0  # for what has no files of its own to validate on
    alone = checked("web.path=web", "other.path=other", "other.weight=0")
    assert alone.valid_fraction == 0
    assert sources_of(alone)[0].weight is None


@pytest.mark.parametrize(
    ("words", "key", "proposals"),
    [
        (["web=web"], "data.mixture.web", ("data.mixture.web.path=web",)),
        (["web.path=web", "web.weigth=2"], "data.mixture.web.weigth", ("data.mixture.web.weight=2",)),
        (["web.weight=1"], "data.mixture.web.path", ("data.mixture.web.path=/path/to/corpus",)),
        (["web.path=wbe"], "data.mixture.web.path", ()),
        (["web.path=3"], "data.mixture.web.path", None),
        (["web.path=web", "web.weight=-1"], "data.mixture.web.weight", ("data.mixture.web.weight=0",)),
        (["web.path=web", "web.weight=much"], "data.mixture.web.weight", None),
        (["web.path=web", "web.weight=1", "code.path=code"], "data.mixture",
         ("data.mixture.code.weight=1",)),
        (["web.path=web", "web.weight=0"], "data.mixture", ("data.mixture.web.weight=1",)),
        (["web.path=web", "other.path=other"], "data.mixture.other",
         ("data.mixture.other.weight=0",)),
        (["web.path=web", "+data.path=web"], "data.path", ("data.path=null",)),
        (["web.path=web", "+data.valid_fraction=0.1"], "data.valid_fraction",
         ("data.valid_fraction=0",)),
        (["web.path=web", "+data=stdlib"], "data.mixture", ("data=megatron",)),
    ],
)  # fmt: skip
def test_what_is_wrong(
    folder: Path, words: list[str], key: str, proposals: tuple[str, ...] | None
) -> None:
    with pytest.raises(UserError) as caught:
        checked(*words)
    found = [it for it in caught.value.violations if it.key == key]
    assert found, caught.value.violations
    assert proposals is None or found[0].suggestions == proposals
    assert found[0].source == "command line"


@pytest.mark.parametrize("said", [[], ["+data.tokenizer=web/tokenizer.json"]])
def test_bytes_and_the_tokens_of_a_tokenizer_are_not_mixed(folder: Path, said: list[str]) -> None:
    """Also where data.tokenizer names one of the two."""
    for name in ("bytes", "more"):
        (folder / name).mkdir()
        write_tokens(folder / name / "tokens")
        about = {"vocabulary": 257, "tokenizer": "byte"}
        (folder / name / "manifest.json").write_text(json.dumps(about))
    for first, second in (("bytes", "web"), ("web", "bytes")):
        words = [f"{first}.path={first}", f"{second}.path={second}", *said]
        with pytest.raises(UserError) as caught:
            checked(*words)
        (found,) = caught.value.violations
        assert found.key == f"data.mixture.{second}" and "no tokenizer.json" in found.message
        assert "web/tokenizer.json" in found.message
        checked(*words, *(word.removeprefix("data.mixture.") for word in found.suggestions))
    assert checked("bytes.path=bytes", "more.path=more").tokenizer == "byte"


def test_a_named_tokenizer_does_not_unite_folders_of_two(folder: Path) -> None:
    with pytest.raises(UserError, match=r"data\.mixture\.other"):
        checked("web.path=web", "other.path=other", "+data.tokenizer=web/tokenizer.json")

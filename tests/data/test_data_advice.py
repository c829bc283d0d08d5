"""The advice of errors about a run's data, typed back as overrides: the same data can then be opened."""

from __future__ import annotations

import shlex
import sysconfig
from pathlib import Path

import numpy as np
import pytest

from nanoscale.common.errors import UserError
from nanoscale.data.dataset import Dataset, open_data
from tests.support.recipes import changed
from tests.support.token_files import write_indexed

FILES = "data.source=megatron data.path=tokens"


@pytest.fixture(autouse=True)
def _tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name, count in (("tokens", 2000), ("short", 40)):
        write_indexed(name, [np.arange(count) % 250])
    write_indexed("signed", [[-3, *range(100)]], np.int32)


def opened(line: str) -> Dataset:
    config = changed(*shlex.split(line)).config
    return open_data(config.data, config.train, config.model.vocab)


def advised(line: str) -> tuple[str, ...]:
    with pytest.raises(UserError) as caught:
        opened(line)
    (wrong,) = caught.value.violations
    return wrong.suggestions


@pytest.mark.parametrize(
    ("line", "advice"),
    [
        (f"{FILES} data.path=short", "train.seq_len=39"),
        (f"{FILES} model.vocab=200", "model.vocab=250"),
        ("model.vocab=200", "model.vocab=320"),
        (f"{FILES} data.valid_fraction=0.001 train.eval_every=5", "data.valid_fraction=0.1"),
    ],
)
def test_it_is_accepted_and_the_data_is_opened(line: str, advice: str) -> None:
    end = " data.valid_fraction=0" if "valid" not in line else ""
    found = advised(line + end)
    assert found[0] == advice
    for text in found:
        opened(f"{line}{end} {text}").train.batch([0])


def test_a_token_that_no_vocabulary_has_is_answered_with_none() -> None:
    assert advised(f"{FILES} data.path=signed") == ()


def test_a_python_without_sources_trains_on_a_file_of_tokens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sysconfig, "get_path", lambda _: str(tmp_path / "python.zip"))
    (advice,) = advised("")
    assert opened(advice.replace("PREFIX", "tokens")).train


def test_a_cache_that_cannot_be_written_is_another_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = tmp_path / "library"
    library.mkdir()
    (library / "os.py").write_text("a = 1\n" * 100)
    monkeypatch.setattr(sysconfig, "get_path", lambda _: str(library))
    Path("file").touch()
    (advice,) = advised("data.cache_dir=file/cache")
    assert opened(f"data.valid_fraction=0 {advice}").train
    assert list(Path("FOLDER").glob("stdlib-*"))

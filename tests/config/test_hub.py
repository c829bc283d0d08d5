"""Names at the Hugging Face hub: a typo in a path is not such a name, and a wait is explained."""

from __future__ import annotations

import logging
import socket
import time
from pathlib import Path

import pytest

from nanoscale.cli.main import run as nanoscale
from nanoscale.config.hf import hub, pretrained
from nanoscale.data.prepare import sources
from nanoscale.data.tokens import tokenizer


@pytest.fixture(autouse=True)
def _nowhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Set up a machine without a network, with a folder `models/small`."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models" / "small").mkdir(parents=True)
    (tmp_path / "a.txt").write_text("some text")
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)

    def unknown(*_: object, **__: object) -> None:
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)


PREPARE = ["data", "prepare", "--out", "out", "--tokenizer"]


@pytest.mark.parametrize(
    ("words", "instead"),
    [
        (["train", "recipe=debug", "model.init_from=models/smal"], "model.init_from=models/small"),
        (["train", "recipe=debug", "model=hf", "model.name=models/smal"], "model.name=models/small"),
        ([*PREPARE, "models/smal", "a.txt"], "--tokenizer models/small"),
        ([*PREPARE, "byte", "hf:models/smal:test"], "hf:models/small:test"),
    ],
)  # fmt: skip
def test_a_name_that_begins_as_a_folder_here_is_a_path(
    words: list[str], instead: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    def asked(_: str) -> None:
        raise AssertionError("the hub is not asked")

    for module in (pretrained, tokenizer, sources):
        monkeypatch.setattr(module, "asking", asked)
    assert nanoscale(words) == 2
    assert f"type instead: {instead}" in capsys.readouterr().err


@pytest.mark.parametrize(
    "words",
    [
        ["train", "recipe=debug", "model.init_from=our/small"],
        [*PREPARE, "our/small", "a.txt"],
        [*PREPARE, "byte", "hf:our/small"],
    ],
)
def test_a_hub_without_an_address_is_not_waited_for(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """Its library would try six times, in half a minute, and write a line each time."""
    assert nanoscale(words) == 2
    error = " ".join(capsys.readouterr().err.split())
    assert "huggingface.co cannot be reached: Name or service not known" in error
    assert "Retrying" not in error and "our/small" in error


def test_the_user_is_told_that_the_hub_was_not_asked(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert nanoscale(["train", "recipe=debug", "model.init_from=our/small"]) == 2
    assert "HF_HUB_OFFLINE=1 is set" in " ".join(capsys.readouterr().err.split())


def test_one_line_is_written_while_the_hub_is_waited_for(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hub, "_PATIENCE_S", 0.01)
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_: [])
    library = logging.getLogger("huggingface_hub.utils._http")
    said = ""
    with hub.asking("our/small") as cache_only:
        assert not cache_only
        for number in range(1000):
            library.warning("Retrying in %ds", number)
            said += capsys.readouterr().err
            if said:
                break
            time.sleep(0.01)
    assert said.splitlines() == [
        "waiting for huggingface.co to answer for our/small (HF_HUB_OFFLINE=1 uses only the cache)"
    ]
    monkeypatch.setattr(hub, "_PATIENCE_S", 60.0)
    with hub.asking("our/small"):
        pass
    assert not capsys.readouterr().err, "an answer that comes at once needs no line"

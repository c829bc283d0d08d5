"""Passwords in addresses are neither stored nor shown."""

import json

import pytest

from nanoscale.cli.main import run as nanoscale
from nanoscale.common.credentials import without_credentials
from nanoscale.config.schema import Launcher
from nanoscale.launch.lifecycle.notification import Notifier
from tests.support.runs import create_run


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("cannot reach http://me:pw5@host:80/x now", "cannot reach http://host:80/x now"),
        ("https://host/x?run=1&token=pw5&a=b", "https://host/x?run=1&token=…&a=b"),
        (
            "s3://b/x?X-Amz-Signature=pw5&X-Amz-Credential=pw5",
            "s3://b/x?X-Amz-Signature=…&X-Amz-Credential=…",
        ),
        ("https://host/x?step=3#part", "https://host/x?step=3#part"),
    ],
)
def test_an_address_is_shown_without_its_credentials(text, shown):
    assert without_credentials(text) == shown


@pytest.mark.parametrize("key", ["logger.mlflow_uri", "checkpoint.upload"])
@pytest.mark.parametrize("address", ["s3://me:pw5@host/x", "s3://host/x?token=pw5"])
@pytest.mark.parametrize("options", [[], ["--json"]])
def test_a_refused_address_shows_no_password(key, address, options, capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert nanoscale(["train", "recipe=debug", f"{key}='{address}'", "--dry-run", *options]) == 2
    shown = "".join(capsys.readouterr())
    assert key in shown and "pw5" not in shown


@pytest.mark.parametrize(
    "address",
    [
        "pw5",
        "http://pw5.invalid/",
        "http://127.0.0.1:9/pw5",
        "http://h/pw5 x",
        "http://[pw5",
        "http://h:pw5/",
    ],
)
def test_an_undelivered_message_ends_nothing_and_shows_no_address(address, monkeypatch, tmp_path):
    monkeypatch.setenv("HOOK", address)
    run = create_run(tmp_path, "r")
    notes: list[str] = []
    notifier = Notifier(Launcher(notify="HOOK"), run, notes.append)
    notifier.send("completed", "after 3 steps")
    notifier.finish()
    (note,) = notes
    assert "was not delivered" in note and "pw5" not in note, json.dumps(note)

"""Every document of `--json` has a schema in docs/schemas, which it fits."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
import typer
from jsonschema import Draft202012Validator, ValidationError

from nanoscale.cli.main import build, run
from tests.cli import Capsys
from tests.cli.test_help import commands

ROOT = Path(__file__).parents[2]
WITHOUT = {
    "runs watch": "prints the document of `train`",
    "runs explain": "needs a job that runs: tests/runs/test_position.py",
}
"""Commands whose documents have no schema of their own, and why."""


@pytest.fixture(scope="module")
def script() -> Any:
    spec = importlib.util.spec_from_file_location("schemas", ROOT / "dev" / "schemas.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def schemas() -> dict[str, Any]:
    files = (ROOT / "docs" / "schemas").glob("*.json")
    return {file.stem: json.loads(file.read_text()) for file in files}


@pytest.mark.slow
@pytest.mark.usefixtures("forked_ranks")
def test_documents_fit_their_schemas(script: Any) -> None:
    documents, stored = script.documents(), schemas()
    assert documents.keys() == stored.keys() == script.COMMANDS.keys(), "run `make schemas`"
    for name, found in documents.items():
        validator = Draft202012Validator(stored[name])
        problems = [
            f"{name}: {problem.json_path}: {problem.message}"
            for document in found
            for problem in validator.iter_errors(document)
        ]
        assert problems == [], "run `make schemas`"
        document = found[0]
        if isinstance(document, dict) and stored[name].get("required"):
            document.pop(stored[name]["required"][0])
            with pytest.raises(ValidationError):
                validator.validate(document)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("error", "train recipe=nope"),
        ("error", "train recipe=debug optimizer.lr=nan launcher.ssh_args=[-p,22]"),
        ("error", "train recipe=debug zero={stag:2}"),
        ("error", "train recipe=debug --hostfile nope"),
        ("error", "plan recipe=debug cluster.gpus=2"),
        ("error", "resume nope"),
        ("error", "runs rm nope"),
        ("runs-ls", "runs ls"),
        ("top", "top"),
        ("plan", "plan recipe=llama-70b cluster=h100-sxm launcher.devices=1"),
        ("config-explain", "config explain train.steps train.steps=3"),
    ],
)
def test_errors_and_empty_documents_fit_too(
    name: str, words: str, capsys: Capsys, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    run([*words.split(), "--json"])
    Draft202012Validator(schemas()[name]).validate(json.loads(capsys.readouterr().out))


def test_no_command_is_forgotten(script: Any) -> None:
    app = typer.main.get_command(build([]))
    in_json = {
        name
        for name, command in commands(app, "")
        if any("--json" in getattr(it, "opts", ()) for it in command.params)
    }
    shown = {" ".join(words[:2]) for words in script.COMMANDS.values()}
    covered = {name for name in in_json if name in shown or name in {it.split()[0] for it in shown}}
    assert in_json - covered == WITHOUT.keys()

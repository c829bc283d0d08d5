"""`run.from_run` is resolved and checked before anything is written."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from nanoscale.cli.main import run as nanoscale
from tests.support.jobs import BYTES, run_of_bytes

JOB = (
    "train", "recipe=debug", "parallel=dp", "parallel.dp=1", "launcher.device=cpu", "--dry-run",
)  # fmt: skip
KEYS = ("layers", "hidden", "heads", "kv_heads", "head_dim", "ffn", "vocab", "tie_embeddings")
SHAPE = [f"model.{name}={json.dumps(getattr(BYTES, name))}" for name in KEYS]


def refusal(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert nanoscale([*JOB, *words]) == 2
    return capsys.readouterr().err


def test_it_is_frozen_as_a_folder_and_a_step(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    source = run_of_bytes(tmp_path, name="first")
    monkeypatch.chdir(tmp_path)
    words = ["run.from_run=first", f"run.root={tmp_path}", *SHAPE]
    assert nanoscale([*JOB, *words]) == 0, capsys.readouterr().err
    shown = " ".join(capsys.readouterr().out.split())
    assert f"weights of {source.path}, step 7" in shown.replace("\n", " ")
    assert nanoscale([*JOB, *words, "run.from_step=7", "--json"]) == 0
    settings = json.loads(capsys.readouterr().out)["settings"]
    assert settings["begins with"] == f"weights of {source.path}, step 7"


def test_a_run_that_does_not_fit_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = run_of_bytes(tmp_path, name="first")
    root = f"run.root={tmp_path}"
    assert "run.from_run=first" in refusal(capsys, root, "run.from_run=frist")
    assert "run.from_step=7" in refusal(capsys, root, "run.from_run=first", "run.from_step=3")
    other = refusal(capsys, root, "run.from_run=first")
    assert "is of another model: for model.embed.weight it has" in " ".join(other.split())
    assert "run.from_run" in refusal(capsys, root, "run.from=first")
    whole = refusal(capsys, root, "run.from_run=first", *SHAPE, "run.from_optimizer=true",
                    "optimizer=lion")  # fmt: skip
    assert "optimizer.name=adamw" in whole and "run.from_optimizer=false" in whole
    (file,) = source.checkpoint(7).glob("*.distcp")
    file.write_bytes(file.read_bytes()[:-1])
    assert "is damaged" in refusal(capsys, root, "run.from_run=first", *SHAPE)
    assert "would be ignored" in refusal(capsys, "run.from_optimizer=true")
    assert [path.name for path in tmp_path.iterdir()] == ["first"]  # nothing was written

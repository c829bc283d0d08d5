"""The teacher of a distillation is found and compared with the job before anything is written."""

from __future__ import annotations

from pathlib import Path

import pytest

from nanoscale.cli.main import run as nanoscale
from tests.support import hf_models

JOB = (
    "train", "recipe=debug", "parallel=dp", "parallel.dp=1", "launcher.device=cpu", "--dry-run",
    "train.objective=distill", "train.distill_top_k=8",
)  # fmt: skip


def refusal(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert nanoscale([*JOB, *words]) == 2
    return " ".join(capsys.readouterr().err.split())


def test_a_teacher_that_does_not_fit_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    hf_models.save("gpt2", tmp_path / "teacher", vocab_size=320)
    hf_models.save("gpt_neox", tmp_path / "other")
    capsys.readouterr()
    assert "train.teacher=FOLDER" in refusal(capsys)
    assert "train.teacher=teacher" in refusal(capsys, "train.teacher=./techer")
    assert "train.teacher=other" in refusal(capsys, "train.teacher=other")
    words = ["train.teacher=teacher", "model.vocab=512"]
    assert "whose limit is 320" in (text := refusal(capsys, *words))
    assert "model.vocab=320" in text
    words[1] = "model.vocab=320"
    assert "train.seq_len=32" in refusal(capsys, *words, "train.seq_len=64")
    assert nanoscale([*JOB, *words, "train.seq_len=32"]) == 0, capsys.readouterr().err

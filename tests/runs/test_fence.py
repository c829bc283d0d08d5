"""The error for a rank whose workspace was removed."""

from __future__ import annotations

import shutil
import time
from pathlib import Path

import pytest

from nanoscale.runs import fence
from nanoscale.runs.failure import Evidence, RankFailure, diagnose
from nanoscale.runs.fence import FencedError, MissingFolderError
from tests.support.runs import create_run


def test_a_folder_that_is_gone_is_no_other_attempt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both were diagnosed as a run that has continued without the rank."""
    monkeypatch.setattr(fence, "MISSING_S", 0.0)
    run = create_run(tmp_path, "x")
    fence.begin(run, 1)
    fence.begin(run, 2)
    with pytest.raises(FencedError, match="attempt 2 is running") as fenced:
        fence.require(run.workspace(1))
    assert type(fenced.value) is FencedError
    for folder in (run.checkpoints, run.path):
        shutil.rmtree(folder)
        with pytest.raises(MissingFolderError) as missing:
            fence.require(run.workspace(2))
        one = RankFailure.of(missing.value, rank=0, local_rank=0, host="h")
        diagnosis, remedy = diagnose(one, Evidence())
        assert diagnosis.startswith(f"{folder} was deleted or renamed while the run was running")
        assert "rename it back" in remedy
    assert one.time <= time.time()


def test_a_folder_that_comes_back_ends_no_rank(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = create_run(tmp_path, "x")
    fence.begin(run, 1)
    run.path.rename(tmp_path / "elsewhere")
    looks = iter((False, False, True))

    def sleep(_: float) -> None:
        if next(looks):
            (tmp_path / "elsewhere").rename(run.path)

    monkeypatch.setattr(time, "sleep", sleep)
    fence.require(run.workspace(1))
    assert next(looks, None) is None

"""The division of a host's cores among the ranks."""

from __future__ import annotations

import os
import time
from types import SimpleNamespace

import pytest

from nanoscale.agent import main as agent


@pytest.mark.parametrize(
    ("cores", "ranks", "threads", "compiling"),
    [(128, 8, "16", "16"), (2, 8, "1", "1"), (96, 1, "96", "32"), (20, 8, "2", "2")],
)
def test_each_rank_gets_its_share_of_threads_and_of_compilations(cores, ranks, threads, compiling):
    assert agent.cores_per_rank(cores, ranks) == {
        "OMP_NUM_THREADS": threads,
        "TORCHINDUCTOR_COMPILE_THREADS": compiling,
    }


@pytest.mark.parametrize(
    ("asked", "compiling"), [({}, "2"), ({"TORCHINDUCTOR_COMPILE_THREADS": "9"}, "9")]
)
def test_ranks_inherit_the_shares_unless_somebody_chose(tmp_path, monkeypatch, asked, compiling):
    monkeypatch.setattr(agent, "cores", lambda: 8)
    monkeypatch.setattr(os, "environ", dict(os.environ))
    link = SimpleNamespace(send=lambda *_, **__: None)
    order = {
        "environment": asked, "slots": 4, "lost_after_s": 60.0, "will_launch": False,
        "root": str(tmp_path), "probe": "probe", "cache_dir": None, "master_addr": "localhost",
        "time": time.time(),
    }  # fmt: skip
    agent._prepare(link, order, None, "train")
    assert os.environ["OMP_NUM_THREADS"] == "2"
    assert os.environ["TORCHINDUCTOR_COMPILE_THREADS"] == compiling

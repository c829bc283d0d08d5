"""The products of a rank that trains in fp32."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.jobs import make_config, make_run

SAY = """
import sys, torch
from nanoscale.worker import main

def say(_):
    print(torch.get_float32_matmul_precision())
    return "completed"

main(sys.argv[1], say)
"""


@pytest.mark.parametrize(("tf32", "said"), [(True, "high"), (False, "highest")])
def test_a_rank_rounds_products_to_tf32_only_if_that_is_configured(
    tmp_path: Path, tf32: bool, said: str
) -> None:
    config = make_config(tmp_path, precision="fp32")
    run = make_run(replace(config, precision=replace(config.precision, tf32=tf32)))
    rank = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
    command = [sys.executable, "-c", SAY, str(run.path)]
    done = subprocess.run(
        command, env=os.environ | rank, capture_output=True, text=True, timeout=120
    )
    assert (done.returncode, done.stdout.strip()) == (0, said), done.stderr

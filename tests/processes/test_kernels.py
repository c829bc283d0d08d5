"""The kernels that a rank lets PyTorch choose among."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from nanoscale.config.schema import Backend, Config
from tests.support.jobs import make_config, make_run
from tests.support.rows import exhaustive

SAY = """
import os, sys, torch
from nanoscale.worker import main

def say(_):
    cuda = torch.backends.cuda
    print(torch.get_float32_matmul_precision())
    fused = cuda.cudnn_sdp_enabled(), cuda.flash_sdp_enabled(), cuda.mem_efficient_sdp_enabled()
    print(*fused, cuda.math_sdp_enabled())
    if torch.are_deterministic_algorithms_enabled():
        print(os.environ["CUBLAS_WORKSPACE_CONFIG"], os.environ["NCCL_NVLS_ENABLE"])
    if inductor := sys.modules.get("torch._inductor.config"):
        print(inductor.deterministic)
    return "completed"

main(sys.argv[1], say)
"""


def said(config: Config) -> list[str]:
    """Return the output of a rank with a configuration."""
    run = make_run(config)
    rank = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
    command = [sys.executable, "-c", SAY, str(run.path)]
    done = subprocess.run(
        command, env=os.environ | rank, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.mark.slow
@pytest.mark.parametrize(("tf32", "precision"), [(True, "high"), exhaustive(False, "highest")])
def test_a_rank_rounds_products_to_tf32_only_if_that_is_configured(
    tmp_path: Path, tf32: bool, precision: str
) -> None:
    config = make_config(tmp_path, precision="fp32")
    config = replace(config, precision=replace(config.precision, tf32=tf32))
    assert said(config)[:2] == [precision, "True True True True"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("attention", "enabled"),
    [
        ("cudnn", "True False False False"),
        exhaustive("flash", "False True False False"),
        exhaustive("math", "False False False True"),
    ],
)
def test_a_rank_computes_attention_with_the_kernel_that_is_configured(
    tmp_path: Path, attention: str, enabled: str
) -> None:
    config = make_config(tmp_path, backend=Backend(attention=attention))  # type: ignore[arg-type]
    assert said(config)[:2] == ["highest", enabled]


@pytest.mark.slow
def test_a_deterministic_rank_uses_only_what_repeats(tmp_path: Path) -> None:
    config = make_config(tmp_path)
    config = replace(config, precision=replace(config.precision, deterministic=True))
    kernels = "False True True True"
    assert said(config) == ["highest", kernels, ":4096:8 0", "True"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sequence_parallel", "stable"), [(False, "True"), exhaustive(True, "False")]
)
def test_the_compiler_chooses_equal_kernels_on_ranks_that_compute_replicas(
    tmp_path: Path, sequence_parallel: bool, stable: str
) -> None:
    layout = {"tp": 2, "sequence_parallel": sequence_parallel}
    config = make_config(tmp_path, backend=Backend(compile="on"), parallel=layout)
    assert said(config) == ["highest", "True True True True", stable]

"""The CPU cores of a rank with a GPU; a library in NVML's place has the GPUs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from nanoscale.config.composing.frozen import dump
from nanoscale.config.schema import Launcher
from nanoscale.processes.proc import near_cores, ranges
from nanoscale.runs import fence
from nanoscale.runs.directory import RunDirectory, write_json
from nanoscale.runs.rank_context import RankContext, StopFlag
from nanoscale.train import job
from tests.support.fake_nvml import build_fake_nvml, fake_environment
from tests.support.recipes import complete, debug_recipe
from tests.support.runs import create_run

ROOT = str(Path(__file__).parents[2])
SOCKETS = (frozenset(range(32)), frozenset(range(32, 64)))
DGX = [*[SOCKETS[0]] * 4, *[SOCKETS[1]] * 4]
"""8 GPUs, 4 at each of two sockets."""
ALL = frozenset(range(64))


@pytest.mark.parametrize(
    ("rank", "ranks", "allowed", "cores"),
    [
        (0, 8, ALL, SOCKETS[0]),
        (7, 8, ALL, SOCKETS[1]),
        (0, 4, ALL, None),  # 4 ranks would share half of the cores
        (0, 1, ALL, None),
        (0, 8, SOCKETS[0], None),  # nothing to choose
        (7, 8, SOCKETS[0], None),  # bound elsewhere by SLURM
        (7, 8, ALL - {32, 33}, SOCKETS[1] - {32, 33}),
        (7, 8, ALL - set(range(32, 40)), None),  # 24 are left there, and 4 × 7 are a fair share
        (8, 9, ALL, None),  # more ranks than GPUs
    ],
)
def test_a_rank_gets_the_cores_of_its_socket_where_no_rank_loses_by_it(rank, ranks, allowed, cores):
    assert near_cores(rank, ranks, DGX, allowed) == cores


def test_without_nvml_nothing_is_bound():
    assert near_cores(0, 2, [], ALL) is None


def test_cores_are_written_as_ranges():
    assert ranges({0, 1, 2, 3, 8, 10, 11}) == "0-3,8,10-11"
    assert ranges(()) == ""


BIND = """
import os, sys
from nanoscale.processes.proc import bind_to_gpu
allowed = os.sched_getaffinity(0)
for rank in (0, 1):
    bind_to_gpu(rank, 2)
    print(*sorted(os.sched_getaffinity(0)))
    os.sched_setaffinity(0, allowed)
"""


def bound(folder: Path, cores: str) -> list[list[int]]:
    environment = {
        **os.environ,
        **fake_environment(folder, gpus=2, cores=cores),
        "PYTHONPATH": ROOT,
    }
    command = [sys.executable, "-c", BIND]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    return [[int(core) for core in line.split()] for line in done.stdout.splitlines()]


def test_a_process_is_bound_to_what_nvml_says(tmp_path):
    allowed = sorted(os.sched_getaffinity(0))
    if len(allowed) < 2 or allowed[-1] > 63:
        pytest.skip("needs two cores of the first 64")
    half = len(allowed) // 2
    first, second = allowed[:half], allowed[half : 2 * half]
    masks = ",".join(f"{sum(1 << core for core in cores):x}" for cores in (first, second))
    folder = build_fake_nvml(tmp_path)
    assert bound(folder, masks) == [first, second]
    assert bound(folder, f"{1 << 63:x}") == [allowed, allowed]  # other cores than are allowed
    assert bound(tmp_path / "nothing", masks) == [allowed, allowed]


RANK = """
import json, os, sys
from nanoscale import worker
def job(context):
    names = ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE")
    chosen = {name: os.environ.get(name) for name in names}
    print(json.dumps({"cores": sorted(os.sched_getaffinity(0)), **chosen}))
    return "completed"
worker.main(sys.argv[1], job)
"""


def as_rank(run: RunDirectory, device: str, folder: Path, **variables: str) -> dict:
    """Return the affinity that a rank of a job has when its work begins."""
    config = complete(model=debug_recipe().config.model, launcher=Launcher(device=device))
    run.config.write_text(dump(config))
    rank = {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    core = max(os.sched_getaffinity(0))
    masks = f"{1:x},{1 << core:x}"
    done = subprocess.run(
        [sys.executable, "-c", RANK, str(run.path)],
        env={
            **os.environ, **fake_environment(folder, gpus=2, cores=masks), **rank, **variables,
            "PYTHONPATH": ROOT, "NANOSCALE_ATTEMPT": "3",
        },
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found: dict = json.loads(done.stdout)
    return found


@pytest.mark.slow
def test_a_rank_with_a_gpu_is_bound_and_its_flight_recorder_writes_beside_its_logs(tmp_path):
    run = create_run(tmp_path, "x")
    folder = build_fake_nvml(tmp_path)
    allowed = sorted(os.sched_getaffinity(0))
    nowhere = {"TORCH_FR_DUMP_TEMP_FILE": None, "TORCH_NCCL_DEBUG_INFO_TEMP_FILE": None}
    assert as_rank(run, "cpu", folder) == {"cores": allowed} | nowhere
    first = as_rank(run, "cuda", folder)
    assert first["TORCH_FR_DUMP_TEMP_FILE"] is None  # the folder does not exist
    if len(allowed) == 2:
        assert first["cores"] == allowed[-1:]
    run.attempt_logs(3).mkdir(parents=True)
    prefix = str(run.attempt_logs(3) / "flight-recorder.rank-")
    assert as_rank(run, "cuda", folder)["TORCH_FR_DUMP_TEMP_FILE"] == prefix
    found = as_rank(run, "cuda", folder, TORCH_NCCL_DEBUG_INFO_TEMP_FILE="/mine")
    chosen = nowhere | {"TORCH_NCCL_DEBUG_INFO_TEMP_FILE": "/mine"}
    assert {key: found[key] for key in nowhere} == chosen


def test_environment_json_tells_the_cores_of_ranks_with_gpus(tmp_path, monkeypatch):
    monkeypatch.setattr(fence, "require", lambda _: None)
    run = create_run(tmp_path, "x")
    write_json(run.environment, {"host": "h"})
    context = RankContext(
        run, complete(model=debug_recipe().config.model), 0, 0, 1, "h", 1, StopFlag()
    )
    monkeypatch.setattr(job, "kernels_in_use", lambda *_: {})
    job.record_environment(context, torch.device("cpu"))
    assert json.loads(run.environment.read_text()) == {"host": "h", "kernels": {}}
    job.record_environment(context, torch.device("cuda"))
    cores = ranges(os.sched_getaffinity(0))
    assert json.loads(run.environment.read_text()) == {
        "host": "h",
        "kernels": {},
        "rank_cores": [cores],
    }

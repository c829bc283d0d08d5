"""Verdicts of preflight on torch, the driver and the compiler; and `doctor` on GPUs that are not there."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from nanoscale.agent.facts import architectures, compiler, constants, fabric, infiniband
from nanoscale.config.schema import Backend, Optimizer
from nanoscale.launch.preflight.preflight import can_compute, judge
from nanoscale.launch.preflight.verdicts import has_kernels
from tests.launch.test_preflight import ON_CPU, SSH, change, members, refusal, the_wrong_one, wrong
from tests.support.fake_nvml import build_fake_nvml, fake_environment, write_torch_files

SOURCE = Path(__file__).parents[2]
LIMIT_S = 120
CU130 = ["sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120"]
COMPILED = replace(SSH, backend=Backend(compile="on"))
NO_CC = {"path": None, "problem": "no gcc or clang"}
NO_HEADERS = {
    "path": "/usr/bin/gcc",
    "problem": "<stdin>:2:10: fatal error: Python.h: No such file",
}
BROKEN = {"path": "/usr/bin/gcc", "problem": "gcc: fatal error: cannot execute 'cc1'"}


# --- torch and the driver ---------------------------------------------------------------------------


def test_a_torch_without_cuda_is_named_with_the_cuda_that_the_driver_supports():
    them = members()
    change(
        them[1], "gpu_software.torch", {"version": "2.13.0+cpu", "cuda": None, "architectures": []}
    )
    found = the_wrong_one(them)
    assert (found.host, found.check, can_compute(found)) == ("n2", "CUDA", False)
    assert "torch 2.13.0+cpu is built without CUDA" in found.finding
    assert "torch for CUDA 13" in found.remedy and "launcher.device=cpu" in found.remedy
    assert refusal(them) is not None
    assert refusal(them, replace(SSH, launcher=replace(SSH.launcher, device="cpu"))) is None


@pytest.mark.parametrize(
    ("driver", "cuda", "good"),
    [
        ([12, 4], "13.0", False),
        ([12, 9], "13.2", False),
        ([13, 0], "13.2", True),  # minor versions are compatible
        ([12, 2], "12.8", True),
        ([13, 1], "12.6", True),
        (None, "13.0", True),  # unknown facts are not fault
    ],
)
def test_a_driver_is_too_old_if_its_major_version_of_cuda_is_below_that_of_torch(
    driver, cuda, good
):
    them = members()
    change(them[2], "gpu_software.driver_cuda", driver)
    change(them[2], "gpu_software.torch.cuda", cuda)
    assert wrong(them) == ([] if good else [("n3", "CUDA")])
    if not good:
        found = the_wrong_one(them)
        assert f"driver 590.1 supports CUDA {driver[0]}.{driver[1]}, and torch" in found.finding
        assert f"built for CUDA {cuda}" in found.finding
        assert "update the driver" in found.remedy and "torch for CUDA 12" in found.remedy


def test_a_v100_has_no_kernels_in_the_builds_for_cuda_13():
    them = members()
    change(them[0], "devices.names", ["Tesla V100-SXM2-32GB"] * 8)
    change(them[0], "gpu_software.capabilities", [[7, 0]] * 8)
    (found,) = [verdict for verdict in refused(them) if verdict.host == "n1"]
    assert found.check == "CUDA"
    assert (
        "no kernels for Tesla V100-SXM2-32GB (sm_70): it has kernels for sm_75, " in found.finding
    )
    change(
        them[0], "gpu_software.torch.architectures", ["sm_50", "sm_60", "sm_70", "sm_75", "sm_80"]
    )
    assert refused(them) == []  # 2.13.0+cu126


def refused(them):
    return [verdict for verdict in judge(them, SSH) if not verdict.good and verdict.needed]


def test_an_old_gpu_beside_those_that_the_job_uses_is_no_fault():
    them = members()
    change(them[0], "gpu_software.capabilities", [[9, 0]] * 8 + [[6, 1]])
    change(them[0], "devices.names", ["H200"] * 8 + ["Quadro P400"])
    change(them[0], "devices.count", 9)
    assert refused(them) == []
    them[0].host = replace(them[0].host, slots=9)
    assert [verdict.check for verdict in refused(them)] == ["CUDA"]


@pytest.mark.parametrize(
    ("built", "capability", "runs"),
    [
        (CU130, (7, 0), False),
        (CU130, (7, 5), True),
        (CU130, (8, 9), True),
        (CU130, (10, 3), True),
        (CU130, (11, 0), False),
        (["sm_90"], (8, 0), False),
        (["sm_86"], (8, 0), False),
        (["sm_90a"], (9, 0), True),
        (["sm_100a"], (10, 3), False),
        (["sm_100f"], (10, 3), True),
        (["sm_80", "compute_80"], (12, 0), True),
        (["sm_80", "compute_90"], (8, 6), True),
        (["sm_75", "compute_90"], (8, 6), False),
        ([], (3, 5), True),
    ],
)
def test_which_code_runs_on_which_gpu(built, capability, runs):
    assert has_kernels(built, capability) == runs


# --- the links ---------------------------------------------------------------------------------------


def links_of(member) -> list[str]:
    return [it.finding for it in judge([member], SSH) if it.check == "links"]


def test_the_links_of_a_host():
    them = members()
    words = "18 NVLinks a GPU, PCIe 5 x16, 8 × 400 Gb/sec, GPUDirect RDMA"
    assert links_of(them[0]) == [words]
    change(them[0], "gpu_software.links", [[18, 16, 16, 5]] * 6 + [[17, 16, 16, 5], [18, 8, 16, 5]])
    found = "GPU 6 has 17 NVLinks, others 18; GPU 7 uses 8 of 16 lanes of PCIe"
    assert links_of(them[0]) == [found] and refused(them) == []


def write_port(root, device, state, layer="InfiniBand"):
    port = root / "sys" / "class" / "infiniband" / device / "ports" / "1"
    port.mkdir(parents=True)
    (port / "state").write_text(f"{state}\n")
    (port / "rate").write_text("400 Gb/sec (4X NDR)\n")
    (port / "link_layer").write_text(f"{layer}\n")


def test_the_fabric_of_a_host(tmp_path):
    write_port(tmp_path, "mlx5_0", "4: ACTIVE")
    write_port(tmp_path, "mlx5_1", "1: DOWN")
    assert fabric(tmp_path) == ["400 Gb/sec"]
    driver = tmp_path / "proc" / "driver" / "nvidia" / "version"
    driver.parent.mkdir(parents=True)
    driver.write_text("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  590.1\n")
    assert fabric(tmp_path) == ["400 Gb/sec", "GPUDirect RDMA"]
    driver.unlink()
    (tmp_path / "sys" / "module" / "nvidia_peermem").mkdir(parents=True)
    assert fabric(tmp_path) == ["400 Gb/sec", "GPUDirect RDMA"]


def test_what_nccl_lacks_for_infiniband(tmp_path, monkeypatch):
    """A host is repaired, one remedy after the other."""
    monkeypatch.setattr(resource, "getrlimit", lambda _: (8 << 20, 8 << 20))
    settings = {"NCCL_IB_DISABLE": "1", "NCCL_NET_GDR_LEVEL": "LOC", "NCCL_DEBUG": "INFO"}
    write_port(tmp_path, "mlx5_9", "4: ACTIVE", "Ethernet")
    assert infiniband(tmp_path, settings) == []
    write_port(tmp_path, "mlx5_0", "1: DOWN")
    problems = [
        "no port is active",
        "the user may not open its devices",
        "processes may lock only 8 MiB of memory",
        "no GPUDirect RDMA: messages pass through host memory",
        "NCCL_IB_DISABLE=1 and NCCL_NET_GDR_LEVEL=LOC turns it off",
    ]

    def lacks() -> list[str]:
        return [problem for problem, _ in infiniband(tmp_path, settings)]

    assert lacks() == problems
    write_port(tmp_path, "mlx5_1", "4: ACTIVE")
    assert lacks() == problems[1:]
    (tmp_path / "dev" / "infiniband").mkdir(parents=True)
    (tmp_path / "dev" / "infiniband" / "uverbs0").touch()
    assert lacks() == problems[2:]
    (tmp_path / "proc" / "self").mkdir(parents=True)
    (tmp_path / "proc" / "self" / "status").write_text("CapInh:\t0\nCapEff:\t0000000000004000\n")
    assert lacks() == problems[3:]
    (tmp_path / "sys" / "module" / "nvidia_peermem").mkdir(parents=True)
    assert lacks() == problems[4:]
    settings.clear()
    assert lacks() == []


def test_doctor_names_what_infiniband_lacks_and_no_launch_is_refused():
    them = members()
    change(them[1], "gpu_software.infiniband", [("no port is active", "look at `ibstat`")])
    verdict = the_wrong_one(them)
    assert (verdict.host, verdict.check, verdict.needed) == ("n2", "InfiniBand", False)
    assert (verdict.finding, verdict.remedy) == ("no port is active", "look at `ibstat`")
    assert refused(them) == [] and wrong(them, ON_CPU) == []


# --- the compiler -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("found", "text", "remedy"),
    [
        (NO_CC, "no C compiler (no gcc or clang)", "launcher.env.CC=/path/to/gcc"),
        (NO_HEADERS, "no Python.h for /usr/bin/gcc", "python3-dev"),
        (BROKEN, "cannot execute 'cc1'", "launcher.env.CC=/path/to/gcc"),
    ],
)
def test_a_compiler_is_needed_only_where_something_is_compiled(found, text, remedy):
    them = members()
    change(them[1], "gpu_software.compiler", found)
    assert wrong(them) == []
    verdict = the_wrong_one(them, COMPILED)
    assert (verdict.host, verdict.check, verdict.needed) == ("n2", "compiler", True)
    assert text in verdict.finding and verdict.finding.endswith("which backend.compile=on needs")
    assert remedy in verdict.remedy and verdict.remedy.endswith("; or backend.compile=off")
    adam = replace(SSH, optimizer=Optimizer(name="adamw8bit"))
    assert the_wrong_one(them, adam).remedy.endswith("; or optimizer=adamw")
    auto = replace(SSH, backend=Backend(compile="auto"))  # as doctor has it
    assert not the_wrong_one(them, auto).needed


def test_triton_has_to_be_there_too():
    them = members()
    change(them[1], "optional_packages", ["torchao"])
    assert wrong(them) == []
    assert the_wrong_one(them, COMPILED).finding == "no Triton, which backend.compile=on needs"


# --- the facts --------------------------------------------------------------------------------------


def test_the_build_is_read_from_torchs_own_files(tmp_path):
    source = (
        "import x\n__version__ = '2.11.0+cu130'\ncuda: Optional[str] = '13.0'\nhip: str = None\n"
    )
    assert constants(source) == {"__version__": "2.11.0+cu130", "cuda": "13.0", "hip": None}
    write_torch_files(tmp_path, "13.0", " ".join(CU130))
    assert architectures(tmp_path / "torch" / "lib" / "libtorch_python.so") == CU130
    empty = tmp_path / "empty.so"
    empty.touch()
    assert architectures(empty) == architectures(tmp_path / "none.so") == []


def test_the_compiler_is_tried_on_pythons_headers(tmp_path):
    if compiler({"PATH": os.environ["PATH"]})["path"] is None:
        pytest.skip("needs a C compiler: apt-get install gcc")
    assert compiler({})["problem"] == ""
    assert compiler({"CC": "no-such-compiler"}) == {
        "path": None,
        "problem": "CC=no-such-compiler is not a program",
    }
    broken = tmp_path / "cc"
    broken.write_text(
        "#!/bin/sh\ncat >&2 <<end\nIn file included:\n/x.h:1: fatal error: y\nend\nexit 1\n"
    )
    broken.chmod(0o755)
    assert compiler({"CC": str(broken)}) == {
        "path": str(broken),
        "problem": "/x.h:1: fatal error: y",
    }


def test_headers_that_are_missing_are_noticed(monkeypatch, tmp_path):
    if compiler({})["path"] is None:
        pytest.skip("needs a C compiler: apt-get install gcc")
    monkeypatch.setattr("sysconfig.get_paths", lambda: {"include": str(tmp_path)})
    for name in ("CPATH", "C_INCLUDE_PATH"):
        monkeypatch.delenv(name, raising=False)
    assert "Python.h" in (compiler({})["problem"] or "")


# --- doctor, whole ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def nvml(tmp_path_factory):
    return build_fake_nvml(tmp_path_factory.mktemp("nvml"))


def doctor(tmp_path: Path, variables: dict[str, str], *words: str) -> tuple[int, dict[str, dict]]:
    done = subprocess.run(
        [sys.executable, "-m", "nanoscale", "doctor", "--json", "--quick", *words],
        cwd=tmp_path,
        env=os.environ | {"HOME": str(tmp_path)} | variables,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    assert done.stderr == ""
    (host,) = json.loads(done.stdout)["hosts"]
    return done.returncode, {verdict["check"]: verdict for verdict in host["verdicts"]}


@pytest.mark.slow
def test_doctor_sees_that_the_ranks_torch_cannot_use_the_gpus_that_are_there(tmp_path, nvml):
    variables = fake_environment(nvml, gpus=2) | {"PYTHONPATH": str(SOURCE)}
    torch = write_torch_files(tmp_path / "cpu", None, version="2.13.0+cpu")
    code, found = doctor(tmp_path, variables | {"PYTHONPATH": f"{torch}:{SOURCE}"})
    assert (code, found["devices"]["finding"]) == (1, "2 GPUs for 2 slots")
    assert "built without CUDA" in found["CUDA"]["finding"]
    assert "launcher.device=cpu" in found["CUDA"]["remedy"]
    _, found = doctor(tmp_path, variables, "launcher.device=cpu")  # the remedy's advice
    assert "CUDA" not in found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({}, None),
        ({"cuda": 12040, "driver": "550.54.15"}, "driver 550.54.15 supports CUDA 12.4, and torch"),
        ({"capability": "7.0", "name": "Tesla V100"}, "no kernels for Tesla V100 (sm_70)"),
    ],
)
def test_doctor_compares_the_driver_and_the_gpus_with_the_build(tmp_path, nvml, settings, text):
    torch = write_torch_files(tmp_path / "cu130", "13.0", " ".join(CU130))
    variables = fake_environment(nvml, gpus=2, **settings)
    _, found = doctor(tmp_path, variables | {"PYTHONPATH": f"{torch}:{SOURCE}"})
    assert found["CUDA"]["good"] == (text is None)
    assert found["links"]["finding"].startswith("18 NVLinks a GPU, PCIe 5 x16")
    assert (text or "built for CUDA 13.0; the driver supports CUDA 13.0") in found["CUDA"][
        "finding"
    ]


@pytest.mark.slow
def test_train_refuses_before_anything_is_written(tmp_path, nvml):
    torch = write_torch_files(tmp_path / "cu130", "13.0", " ".join(CU130))
    variables = fake_environment(nvml, gpus=2, cuda=12040)
    words = ["recipe=debug", "run.name=x", "train.steps=1", "parallel.dp=2"]
    done = subprocess.run(
        [sys.executable, "-m", "nanoscale", "train", *words],
        cwd=tmp_path,
        env=os.environ | variables | {"PYTHONPATH": f"{torch}:{SOURCE}", "HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    assert done.returncode == 2, done.stderr
    assert "supports CUDA 12.4, and torch 2.11.0 is built for CUDA 13.0" in done.stderr
    assert "launcher.device=cpu" in done.stderr and not (tmp_path / "runs" / "x").exists()


@pytest.mark.slow
def test_where_nobody_looked_the_failure_of_the_ranks_names_the_same_cause(tmp_path, nvml):
    from torch.version import cuda

    if cuda is not None:
        pytest.skip("needs a torch that is built without CUDA")
    words = ["recipe=debug", "run.name=x", "train.steps=1", "parallel.dp=1", "--no-preflight"]
    done = subprocess.run(
        [sys.executable, "-m", "nanoscale", "train", *words],
        cwd=tmp_path,
        env=os.environ
        | fake_environment(nvml)
        | {"PYTHONPATH": str(SOURCE), "HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    failure = json.loads((tmp_path / "runs" / "x" / "failure.json").read_text())
    assert done.returncode == 1 and "_cuda_setDevice" in failure["message"]
    assert failure["diagnosis"] == "the ranks' torch is built without CUDA and cannot use the GPUs"
    assert "launcher.device=cpu" in failure["remedy"]

"""A host's facts about itself, available at once."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from unittest.mock import Mock

import pytest

from nanoscale.agent.facts import facts
from nanoscale.common.devices import gpu_memory, gpu_problem


def order(root: Path, **changes) -> dict:
    asked = {"root": str(root), "probe": "probe", "cache_dir": None, "master_addr": "localhost"}
    return {**asked, "time": time.time(), **changes}


@pytest.fixture(autouse=True)
def _home(tmp_path, monkeypatch):
    for name in ("XDG_CACHE_HOME", "NANOSCALE_CACHE", "TORCH_EXTENSIONS_DIR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    (tmp_path / "home").mkdir()


def test_they_are_json_and_true_of_this_machine(tmp_path):
    (tmp_path / "probe").touch()
    found = json.loads(json.dumps(facts(order(tmp_path), 1234)))
    assert found["root"]["visible"] and found["root"]["problem"] is None
    free = os.statvfs(tmp_path)
    assert found["root"]["free_gib"] == pytest.approx(
        free.f_bavail * free.f_frsize / 2**30, rel=0.1
    )
    assert found["versions"]["python"] == ".".join(map(str, sys.version_info[:3]))
    assert found["executable"] == sys.executable and found["port"] == 1234
    assert found["network"]["found"][0] in ("127.0.0.1", "::1")
    assert list(tmp_path.glob(".nanoscale*")) == []  # the trial of writing left nothing


def test_a_root_that_is_elsewhere_is_not_visible(tmp_path):
    found = facts(order(tmp_path / "elsewhere"), None)["root"]
    assert not found["visible"] and found["free_gib"] is None
    (tmp_path / "elsewhere").mkdir()
    assert not facts(order(tmp_path / "elsewhere"), None)["root"]["visible"]


def test_a_root_that_cannot_be_looked_at_is_not_visible(tmp_path):
    """A name that is too long raises in `Path.is_file`, like a parent folder of another user."""
    found = facts(order(tmp_path / ("a" * 300)), None)["root"]
    assert not found["visible"] and found["problem"] is None


def test_a_folder_that_takes_nothing_is_told(tmp_path):
    if not Path("/proc/sys").is_dir():
        pytest.skip("needs Linux")
    found = facts(order(Path("/proc/sys"), cache_dir="/proc/sys/cache"), None)
    assert found["root"]["problem"] and found["cache"]["problem"]


def test_the_cache_is_looked_at_where_it_will_be(tmp_path, monkeypatch):
    assert facts(order(tmp_path), None)["cache"]["path"] == str(tmp_path / "home/.cache/nanoscale")
    monkeypatch.setenv("NANOSCALE_CACHE", str(tmp_path / "c"))
    assert facts(order(tmp_path), None)["cache"]["path"] == str(tmp_path / "c")
    named = facts(order(tmp_path, cache_dir=str(tmp_path / "mine")), None)["cache"]
    assert named["path"] == str(tmp_path / "mine") and named["free_gib"] > 0


def test_the_folder_of_compiled_code_is_found_for_a_user_without_a_name(tmp_path, monkeypatch):
    """A container may run as any number, which has no name."""
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    for user, name in [(lambda: "a:b", "a_b"), (Mock(side_effect=KeyError), f"uid_{os.getuid()}")]:
        monkeypatch.setattr("getpass.getuser", user)
        path = Path(facts(order(tmp_path), None)["compile_cache"]["path"])
        assert path == Path(tempfile.gettempdir()) / f"torchinductor_{name}"


def test_old_locks_of_compilations_are_found_and_new_ones_are_not(tmp_path, monkeypatch):
    folder = tmp_path / "home/.cache/torch_extensions/py311_cpu"
    for name, age_s in (("cpu_adam", 7200), ("aio", 60)):
        (folder / name).mkdir(parents=True)
        lock = folder / name / "lock"
        lock.touch()
        os.utime(lock, (time.time() - age_s,) * 2)
    assert facts(order(tmp_path), None)["stale_locks"] == [str(folder / "cpu_adam" / "lock")]
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(folder))  # without a folder for the interpreter
    assert facts(order(tmp_path), None)["stale_locks"] == [str(folder / "cpu_adam" / "lock")]
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    assert facts(order(tmp_path), None)["stale_locks"] == []


def test_the_interfaces_that_were_chosen_are_told(tmp_path, monkeypatch):
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "^lo")
    assert facts(order(tmp_path), None)["network"]["chosen"] == {"NCCL_SOCKET_IFNAME": "^lo"}


def test_without_a_driver_gpus_are_no_problem():
    if Path("/proc/driver/nvidia").exists():
        pytest.skip("has a driver")
    assert gpu_memory() == [] and gpu_problem() is None


PROGRAM = """
import sys, time
from pathlib import Path
from nanoscale.agent.facts import facts
order = {"root": "/", "probe": "", "cache_dir": None, "master_addr": "localhost", "time": 0.0}
facts(order, None)
began = time.process_time()
facts(order, None)
print(time.process_time() - began, *{"torch", "numpy", "deepspeed"} & set(sys.modules))
"""


def test_they_cost_little_and_import_nothing_heavy():
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True)
    seconds, *heavy = done.stdout.split()
    assert not heavy, done.stderr
    assert float(seconds) < 0.05

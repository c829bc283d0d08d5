"""The folder of the fork server's sockets."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

_START = """
import os, tempfile, uuid
from multiprocessing import util
from nanoscale.processes import scratch
from nanoscale.agent.main import _start_fork_server
from nanoscale.processes.messages import BANDWIDTH, MARK
from nanoscale.processes.lifeline import end_group
os.setpgid(0, 0)
os.environ[MARK] = uuid.uuid4().hex
folder = scratch.make()
_start_fork_server(BANDWIDTH, folder)
print(util.get_temp_dir(), tempfile.gettempdir(), folder)
end_group(os.getpid())
scratch.remove_own()
"""

_FAIL = """
import os, pathlib, uuid
from multiprocessing import forkserver
from nanoscale.agent import main
from nanoscale.agent.rank import fork_server_failure
from nanoscale.processes import scratch
os.environ["NANOSCALE_JOB"] = uuid.uuid4().hex
os.environ["NANOSCALE_MEMORY"] = str(memory := scratch.make())
main._PRELOADED = ["nanoscale.agent.fork_server"]
folder = scratch.make()
pathlib.Path("broken.py").write_text("raise RuntimeError('libtorch')")
main._start_fork_server(type("Job", (), {"__module__": "broken"}), folder)
os.waitpid(forkserver._forkserver._forkserver_pid, 0)
print(fork_server_failure(folder, "n1").message, memory.is_dir())
scratch.remove_own()
"""


def test_an_import_that_fails_is_recorded_and_removes_nothing_of_the_agent(tmp_path):
    """States in memory outlive the attempt."""
    environment = os.environ | {"PYTHONPATH": f".:{Path(__file__).parents[2]}"}
    command = [sys.executable, "-c", _FAIL]
    done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True)
    assert done.stdout == "libtorch True\n", done.stderr


@pytest.mark.parametrize("length", [50, 70, 71, 200])
def test_any_length_of_tmpdir_will_do(length):
    """multiprocessing adds 18 bytes, and a socket's path has 107 at most. It removes nothing itself."""
    with tempfile.TemporaryDirectory(prefix="x" * (length - 13), dir="/tmp") as folder:
        assert len(folder) == length
        environment = os.environ | {"TMPDIR": folder}
        command = [sys.executable, "-c", _START]
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    sockets, files, scratch = done.stdout.split()
    assert files == folder and str(Path(scratch).parent) == folder
    assert sockets == scratch if length <= 70 else str(Path(sockets).parent) == "/tmp"

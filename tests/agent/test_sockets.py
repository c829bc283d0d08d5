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
"""


@pytest.mark.parametrize("length", [50, 56, 57, 200])
def test_any_length_of_tmpdir_will_do(length):
    """multiprocessing adds 32 bytes, and a socket's path has 107 at most."""
    with tempfile.TemporaryDirectory(prefix="x" * (length - 13), dir="/tmp") as folder:
        assert len(folder) == length
        environment = os.environ | {"TMPDIR": folder}
        command = [sys.executable, "-c", _START]
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    sockets, files, scratch = done.stdout.split()
    assert files == folder and str(Path(scratch).parent) == folder
    parent = Path(sockets).parent
    assert str(parent if length <= 56 else parent.parent) == (scratch if length <= 56 else "/tmp")

"""Where the fork server of the ranks listens."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

_START = """
import os, tempfile
from multiprocessing import util
from nanoscale.agent.main import _start_fork_server
from nanoscale.channel import BANDWIDTH
from nanoscale.lifeline import end_group
os.setpgid(0, 0)
_start_fork_server(BANDWIDTH)
print(util.get_temp_dir(), tempfile.gettempdir())
end_group(os.getpid())
"""


@pytest.mark.parametrize("length", [70, 75, 76, 200])
def test_any_length_of_tmpdir_will_do(length):
    """multiprocessing adds 32 bytes, and a socket's path has 107 at most."""
    with tempfile.TemporaryDirectory(prefix="x" * (length - 13), dir="/tmp") as folder:
        assert len(folder) == length
        environment = os.environ | {"TMPDIR": folder}
        command = [sys.executable, "-c", _START]
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    sockets, files = done.stdout.split()
    assert files == folder
    assert str(Path(sockets).parent) == (folder if length <= 75 else "/tmp")

"""Law 3 against every single error of the file system: `dev/failing_saves.py`, once."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_every_act_of_a_save_may_fail() -> None:
    command = [sys.executable, "dev/failing_saves.py", "ENOSPC"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
    acts = {name: int(count) for count, name in re.findall(r"^ +(\d+) (\w+)", result.stdout, re.M)}
    assert re.search(r"\d{2} acts of a save failed, one each time; wrong: 0", result.stdout)
    assert {"write", "fsync", "rename", "open", "mkdir", "symlink", "unlink"} <= acts.keys()

"""The installed versions, and the commands that install missing packages."""

from __future__ import annotations

import importlib.metadata
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from nanoscale.common.versions import install_command

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS: dict[str, list[str]] = PROJECT["optional-dependencies"]
TEXTS = [
    ROOT / "README.md",
    *(
        path
        for folder in ("docs", "conf", "recipes", "nanoscale")
        for path in sorted((ROOT / folder).rglob("*"))
        if path.suffix in (".md", ".yaml", ".py")
    ),
]


@pytest.mark.parametrize("extra", EXTRAS)
def test_what_an_extra_needs_is_installed_by_its_own_name(extra: str) -> None:
    command = shlex.split(install_command(extra))
    assert sorted(command[command.index("install") + 1 :]) == sorted(EXTRAS[extra])


def test_pip_reads_the_command() -> None:
    """It looks for nothing; `--dry-run` with what is installed here installs nothing."""
    command = shlex.split(install_command("tensorboard"))
    options = ["--dry-run", "--no-index", "--no-deps", "--disable-pip-version-check"]
    done = subprocess.run([*command, *options], capture_output=True, text=True, timeout=120)
    # Looking for pip with find_spec would make setuptools unusable in this process, and Inductor with it.
    if "No module named pip" in done.stderr:
        pytest.skip("this Python has no pip")
    assert done.returncode == 0, done.stderr


def test_nobody_is_sent_to_an_index_for_nanoscale_itself() -> None:
    """It is on none; what is named for pip instead is what the extras ask for."""
    known = {it for requirements in EXTRAS.values() for it in requirements}
    for path in TEXTS:
        text = path.read_text()
        assert not re.search(r"nanoscale\[[a-z-]+\]", text.replace("`nanoscale[extra]`", "")), path
        named = set(re.findall(r"pip install '([^'.{]+)'", text))
        assert named <= known, path


def test_the_pip_that_is_named_is_of_this_python(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = tmp_path / "pip"
    other.write_text("")
    other.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert install_command("torchao") == f"{sys.executable} -m pip install 'torchao>=0.15'"
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    assert install_command("torchao") == "pip install 'torchao>=0.15'"


def test_without_metadata_the_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(_name: str) -> None:
        raise importlib.metadata.PackageNotFoundError

    monkeypatch.setattr(importlib.metadata, "requires", missing)
    assert install_command("torchao").endswith("pip install torchao")

"""The wheel is the product: installed elsewhere, it composes, trains, and knows its conf/ and recipes/."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--disable-pip-version-check"]
    subprocess.run(
        [*pip, "--no-deps", "--no-build-isolation", "--wheel-dir", folder, ROOT], check=True
    )
    (path,) = folder.glob("*.whl")
    return path


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`bin/` of a new environment with the wheel in it; its dependencies are this environment's."""
    folder = tmp_path_factory.mktemp("elsewhere")
    venv.create(folder, with_pip=False)
    site = folder / "lib" / f"python{sys.version_info.major}.{sys.version_info.minor}/site-packages"
    pip: list[str | Path] = [sys.executable, "-m", "pip", "--python", folder / "bin" / "python"]
    options = ["--quiet", "--disable-pip-version-check", "--no-deps", "--no-index"]
    subprocess.run([*pip, "install", *options, wheel], check=True)
    # Such a line adds a folder but runs nothing in it, so that the checkout is not found through it.
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return folder / "bin"


def test_the_wheel_carries_every_configuration_file(wheel: Path) -> None:
    packed = set(zipfile.ZipFile(wheel).namelist())
    for folder in ("conf", "recipes"):
        files = list((ROOT / folder).rglob("*.yaml"))
        assert files
        for file in files:
            assert f"nanoscale/{file.relative_to(ROOT)}" in packed


def test_the_wheel_carries_the_files_beside_the_code(wheel: Path) -> None:
    endings = (".css", ".yaml", ".sh", ".txt")
    files = [it for it in (ROOT / "nanoscale").rglob("*.*") if it.suffix in endings]
    assert {it.suffix for it in files} == set(endings)
    packed = zipfile.ZipFile(wheel).namelist()
    assert all(it.relative_to(ROOT).as_posix() in packed for it in files)


def test_the_wheel_carries_the_licence(wheel: Path) -> None:
    (packed,) = (it for it in zipfile.ZipFile(wheel).namelist() if it.endswith("/LICENSE"))
    assert zipfile.ZipFile(wheel).read(packed) == (ROOT / "LICENSE").read_bytes()


@pytest.mark.slow
def test_trains_from_the_installed_wheel(installed: Path, tmp_path: Path) -> None:
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    where = [installed / "python", "-c", "import nanoscale; print(nanoscale.__file__)"]
    found = subprocess.run(where, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert Path(found.stdout.strip()).is_relative_to(installed.parent), found
    command: list[str | Path] = [
        installed / "nanoscale",
        "train",
        "recipe=debug",
        "train.steps=2",
        "parallel.dp=2",
    ]
    done = subprocess.run(
        [*command, "run.name=wheel", "--json"],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["status"] == "completed"
    launch = json.loads((tmp_path / "runs/wheel/launch.json").read_text())
    assert str(ROOT) not in json.dumps(launch), "the checkout was used"

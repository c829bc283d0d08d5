"""Commands that only read and plan answer at once: no heavy package is imported for them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

HEAVY = ("torch", "numpy", "transformers", "tokenizers", "deepspeed", "pyarrow", "datasets")

PROGRAM = f"""
import sys
from nanoscale.cli.main import run
for words in {{commands!r}}:
    assert run(words) == 0, words
print(*sorted(set({HEAVY!r}) & set(sys.modules)), file=sys.stderr)
"""


def imported(commands: list[list[str]], folder: Path) -> str:
    """Run the commands in a fresh interpreter; return the heavy packages that it has then."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM.format(commands=commands)],
        cwd=folder, capture_output=True, text=True, timeout=300,
        env={"PATH": "/usr/bin:/bin", "PYTHONPATH": str(Path(__file__).parents[2])},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stderr.splitlines()[-1]


@pytest.mark.slow
def test_no_launcher_command_imports_a_heavy_package(tmp_path):
    verbs = (
        "train resume submit data runs checkpoints config plan rehearse conform generate eval bench"
    )
    lines = [
        "--help",
        *(f"{verb} --help" for verb in verbs.split()),
        "config show recipe=llama-8b",
        "config explain model recipe=llama-8b",
        "config ls model",
        "recipes ls",
        "recipes show tiny",
        "recipes copy tiny",
        "runs ls",
        "train recipe=llama-8b --dry-run --force",
        "submit recipe=debug --num-gpus 8 train.seed=1,2 cluster=h200 --dry-run --json",
        "train recipe=llama-8b --dry-run --json --force",
        "plan recipe=llama-8b cluster=h200 --explain --html plan.html",
        "plan recipe=llama-1b cluster=h100-sxm --search --html search.html",
        "train recipe=debug --hostfile hosts --dry-run",
    ]
    (tmp_path / "hosts").write_text("localhost slots=2\n")
    assert imported([line.split() for line in lines], tmp_path) == ""


def test_the_test_would_notice(tmp_path):
    program = f"import numpy\n{PROGRAM}"
    done = subprocess.run(
        [sys.executable, "-c", program.format(commands=[])],
        cwd=tmp_path, capture_output=True, text=True, timeout=300,
        env={"PATH": "/usr/bin:/bin", "PYTHONPATH": str(Path(__file__).parents[2])},
    )  # fmt: skip
    assert done.stderr.strip() == "numpy"


def test_help_needs_neither_hydra_nor_rich(tmp_path):
    program = "import sys; from nanoscale.cli.main import run; run(['--help']);"
    program += "print(*{'hydra', 'omegaconf', 'rich', 'yaml'} & set(sys.modules), file=sys.stderr)"
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=tmp_path, capture_output=True, text=True, timeout=300,
        env={"PATH": "/usr/bin:/bin", "PYTHONPATH": str(Path(__file__).parents[2])},
    )  # fmt: skip
    assert done.stderr.strip() == ""


@pytest.mark.parametrize("words", [["config", "show", "recipe=llama-8b"], ["--version"]])
def test_the_module_is_a_program(tmp_path, words):
    done = subprocess.run(
        [sys.executable, "-m", "nanoscale", *words],
        cwd=tmp_path, capture_output=True, text=True, timeout=300,
        env={"PATH": "/usr/bin:/bin", "PYTHONPATH": str(Path(__file__).parents[2])},
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")


def test_ctrl_c_during_the_imports_prints_no_traceback(tmp_path):
    program = """
import sys
class Interrupt:
    def find_spec(self, name, *_):
        if name == "nanoscale.config.schema":
            raise KeyboardInterrupt
sys.meta_path.insert(0, Interrupt())
sys.argv[1:] = ["train", "recipe=debug"]
import runpy
runpy.run_module("nanoscale", run_name="__main__")
"""
    done = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True)
    assert (done.returncode, done.stdout, done.stderr) == (130, b"", b"")

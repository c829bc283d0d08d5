"""The benchmark of a GPU ends in time, keeps its measurements, and tells slowness from faults."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
import tomllib
import zipfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.gpu import correct, kernels, wheels
from benchmarks.gpu.items import read_items, run_items
from benchmarks.gpu.parts import PARTS, SMALL, Bench, Layout, first_that_fits
from benchmarks.gpu.peers import trained, write_tokens
from benchmarks.gpu.predictions import PREDICTED, newest, with_others
from benchmarks.gpu.session import Failed, Session, TooSlow
from nanoscale.backends import low_bits
from nanoscale.config.composing.compose import compose
from nanoscale.launch.fleet.processes import adopt_orphans
from nanoscale.metrics.step_parts import PARTS as STEP_PARTS
from nanoscale.models import moe

ROOT = Path(__file__).parents[2]
OUT_OF_MEMORY = "error: rank 0 on node1 failed: the GPU ran out of memory\n  remedy: …\n"
HEAD = """
import sys, time
from pathlib import Path
from benchmarks.gpu import session
from benchmarks.gpu.session import Session

folder = Path(sys.argv[1])
def python(code):
    return [sys.executable, "-c", code, str(folder)]
def fast():
    return {"tokens_per_s": float(bench.run(python("print(7)")))}
"""
STUBBORN = "trap '' TERM; echo step 1 of 4; setsid sleep 1000 & sleep 1000"
"""ignores SIGTERM, and leaves a process in a session of its own"""


def start(folder: Path, code: str) -> subprocess.Popen[str]:
    """Start a session in a process of its own, which ends all of its processes."""
    command = [sys.executable, "-c", HEAD + code, str(folder)]
    environment = os.environ | {"NANOSCALE_TEST_FOLDER": str(folder)}
    return subprocess.Popen(command, cwd=ROOT, text=True, stdout=subprocess.PIPE, env=environment)


def rows(folder: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads((folder / "figures.json").read_text())["rows"]
    return found


def wait_until(condition: Callable[[], Any], limit_s: float = 60) -> None:
    deadline = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def alive(folder: Path) -> list[int]:
    """Return the processes that a session of this folder has started, and itself."""
    mark = f"NANOSCALE_TEST_FOLDER={folder}".encode()
    marked = []
    for place in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if mark in (place / "environ").read_bytes().split(b"\0"):
                marked.append(int(place.name))
    return marked


@pytest.mark.slow
def test_a_row_is_cut_off_at_its_limit_and_the_next_goes_on(tmp_path: Path) -> None:
    with start(
        tmp_path,
        f"""
session.GRACE_S = 0.2
bench = Session(time.monotonic() + 60, folder / "figures")
def slow():
    bench.run(["sh", "-c", {STUBBORN!r}])
bench.measure("slow", slow, limit_s=3)
bench.measure("fast", fast, limit_s=30)
""",
    ) as process:
        assert process.wait(60) == 0
    slow, fast = rows(tmp_path)
    assert re.fullmatch(r"cut off after \d+ s", slow["why"])
    assert slow["log"] == ["step 1 of 4"]
    assert fast["tokens_per_s"] == 7
    assert alive(tmp_path) == []
    table = (tmp_path / "figures.txt").read_text()
    assert "cut off" in table and "7 tokens/s" in table


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_a_kill_loses_the_running_row_alone(tmp_path: Path, how: signal.Signals) -> None:
    process = start(
        tmp_path,
        """
bench = Session(time.monotonic() + 600, folder / "figures")
bench.measure("fast", fast, limit_s=30)
code = '''import pathlib, sys, time
(pathlib.Path(sys.argv[1]) / "began").touch()
time.sleep(1000)'''
bench.measure("long", lambda: bench.run(python(code)), limit_s=500)
""",
    )
    began = tmp_path / "began"
    wait_until(began.exists)
    process.send_signal(how)
    process.wait(60)
    document = json.loads((tmp_path / "figures.json").read_text())
    assert [row["what"] for row in document["rows"]] == ["fast"]
    assert document["running"] == "long"
    assert "7 tokens/s" in (tmp_path / "figures.txt").read_text()
    wait_until(lambda: not alive(tmp_path))


def layout(micro: int, gib: float) -> Layout:
    return Layout((f"train.micro_batch={micro}",), gib, gib, 140.0)


LAYOUTS = [layout(3, 120.0), layout(2, 115.0), layout(1, 90.0)]


def test_a_smaller_layout_is_tried_after_the_gpu_ran_out_of_memory() -> None:
    tried = []

    def train(one: Layout) -> dict[str, Any]:
        tried.append(one.gib)
        if one.gib > 100:
            raise Failed(OUT_OF_MEMORY)
        return {"mfu": 0.5}

    found = first_that_fits(LAYOUTS, train)
    assert found == {"mfu": 0.5, "ran_out_of_memory": [("train.micro_batch=3",)]}
    assert tried == [120, 90]  # not 115, which is nearly as large


PREDICTION = {
    "what": "nanoscale llama-1b 8k bf16",
    "tokens_per_s": 1000.0,
    "memory_gib": 50.0,
    "overrides": ["train.micro_batch=2"],
    "operations": [{"what": "triton_poi_fused_add_0", "seconds": 0.002}],
}


def predictions(folder: Path, day: str, tokens_per_s: float) -> None:
    """Write a prediction of one row, and a row that could not be rehearsed."""
    row = PREDICTION | {"tokens_per_s": tokens_per_s}
    rows = [row, {"what": "nanoscale NF4 llama-8b 4k bf16", "why": "failed: error"}]
    (folder / f"{day}-compiled-h200.json").write_text(json.dumps({"rows": rows}))


def test_predictions_of_some_parts_replace_only_their_rows(tmp_path: Path) -> None:
    predictions(tmp_path, "2026-11-29", 1.0)
    renewed, other = PREDICTION | {"tokens_per_s": 2.0}, PREDICTION | {"what": "nanoscale new"}
    rows = with_others([other, renewed], tmp_path / "2026-11-29-compiled-h200.json")
    assert [row["what"][:14] for row in rows] == [
        "nanoscale llam",
        "nanoscale NF4 ",
        "nanoscale new",
    ]
    assert rows[0] is renewed and with_others(rows, tmp_path / "absent.json") == rows


@pytest.fixture
def no_traces() -> Iterator[None]:
    """Undo what a session sets in its process, which is the one of the next tests too."""
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)
    adopt_orphans(False)


@pytest.mark.usefixtures("no_traces")
def test_a_measured_row_has_the_newest_prediction_for_its_device_beside_it(tmp_path: Path) -> None:
    predictions(tmp_path, "2026-11-28", 1.0)
    predictions(tmp_path, "2026-11-29", 1000.0)
    assert newest("NVIDIA L4", tmp_path) == newest("CPU", tmp_path) == {}
    session = Session(time.monotonic() + 60, tmp_path / "figures", used_gib=lambda: 0.0)
    session.predictions = newest("NVIDIA H200", tmp_path)
    assert [*session.predictions] == ["nanoscale llama-1b 8k bf16"]
    parts = {f"{name}_s": 1.0 for name in STEP_PARTS} | {"step_s": 9.0, "waits": {}}
    parts |= {"kernels": {"triton_poi_fused_add_0": 0.003, "nvjet": 0.1}}
    measured = {"tokens_per_s": 900.0, "memory_gib": 51.0, "overrides": ["train.micro_batch=4"]}
    session.measure("nanoscale llama-1b 8k bf16", lambda: measured | {"parts": parts}, limit_s=9)
    session.measure("loop llama-1b 8k bf16", lambda: measured, limit_s=9)
    ours, peer = rows(tmp_path)
    assert ours["compiled"] == PREDICTION and "compiled" not in peer
    table = (tmp_path / "figures.txt").read_text()
    assert "1,000 tokens/s, measured 0.900 of it · 50.0 GiB, measured 1.020 of it" in table
    assert "of another layout, 2" in table
    assert "triton_poi_fused_add_0: 3.0 ms, compiled code 2.0 ms" in table


@pytest.mark.parametrize(
    "device", ["NVIDIA H100 80GB HBM3", "NVIDIA H200", "AMD Instinct MI300X", "NVIDIA B200"]
)
def test_the_rows_that_matter_have_predictions(device: str) -> None:
    chosen = {it.what for part in PREDICTED for it in PARTS[part] if not it.peer}
    found = newest(device)
    assert chosen - set(found) <= {"nanoscale NF4 llama-8b 4k bf16"}  # torchao's tensors
    trained = [it for it in found.values() if "tokens_per_s" in it]
    assert trained and all(it["block"]["backward"] and it["kernels"]["count"] for it in trained)


def test_the_three_calls_leave_no_part_out() -> None:
    page = (ROOT / "docs" / "bench.md").read_text()
    calls = [
        call.split() for call in re.findall(r"-m benchmarks\.gpu ([\w -]+)$", page, re.MULTILINE)
    ]
    assert [part for call in calls for part in call] == [it for it in PARTS if it != "fp8-loop"]


def test_wheels_and_the_machine_have_all_that_nanoscale_needs() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    needed = {re.split(r"[<>=]", line)[0] for line in project["dependencies"]}
    assert needed <= {*wheels.BINARY, *wheels.SOURCE, *wheels.PRESENT}
    assert all("==" in wheels.locked(name) for name in (*wheels.BINARY, *wheels.SOURCE))


def test_only_what_is_missing_is_installed_and_without_a_network(tmp_path: Path) -> None:
    info = "Metadata-Version: 2.1\nName: {0}\nVersion: 1.0\n"
    for name in ("nano_missing", "rich"):
        with zipfile.ZipFile(tmp_path / f"{name}-1.0-py3-none-any.whl", "w") as wheel:
            wheel.writestr(f"{name}.py", "here = True")
            wheel.writestr(f"{name}-1.0.dist-info/METADATA", info.format(name))
            wheel.writestr(f"{name}-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
            wheel.writestr(f"{name}-1.0.dist-info/RECORD", "")
    code = """
import subprocess, sys
from pathlib import Path
from benchmarks.gpu import wheels
wheels.WHEELS = Path(sys.argv[1])
wheels.SITE = wheels.WHEELS / "site"
wheels.install_missing()
installed = list(wheels.SITE.iterdir())
subprocess.run([sys.executable, "-c", "import nano_missing, rich.table"], check=True)
wheels.pip = None
wheels.install_missing()
print(*sorted(it.name for it in installed))
"""
    environment = {key: it for key, it in os.environ.items() if not key.startswith("PIP_")}
    command = [sys.executable, "-c", code, str(tmp_path)]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, check=True, env=environment
    )
    assert done.stdout.split() == ["nano_missing-1.0.dist-info", "nano_missing.py"]


@pytest.mark.slow
@pytest.mark.exhaustive
def test_a_dry_run_writes_the_machine_and_its_figures(tmp_path: Path) -> None:
    out = ("--out", str(tmp_path))
    command = [sys.executable, "-m", "benchmarks.gpu", "--tiny", *out, "device", "1b"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    (file,) = tmp_path.glob("*-gpu-tiny-device-1b.json")
    document = json.loads(file.read_text())
    machine, device, ours, loop = document["rows"]
    assert set(machine["commands"]) == {"nvidia-smi", "gcc --version", "python3-config --includes"}
    assert document["versions"]["torch"] and machine["product_works"]
    assert device["bf16_tflops"] > 0
    assert ours["tokens_per_s"] > 0 and ours["predicted"]["tokens_per_s"] > 0
    assert loop["tokens_per_s"] > 0 and loop["parts"]["backward_s"] > 0
    assert file.with_suffix(".txt").exists()


CPU = torch.device("cpu")
QUICK = [
    "router product",
    "experts",
    "experts with biases",
    "portable documents",
    "attention sinks",
]
QUICK += [
    "portable keys of another rank",
    "staging beside a step",
    "clip in the update",
    "update lion",
]
QUICK += ["routed again with full", "update in bf16", "nf4", "fused loss"]


def test_checks_of_the_gpus_code_hold_on_a_cpu() -> None:
    checks = correct.checks(CPU)
    for name in QUICK:
        act, bound = checks[name]
        assert correct.judge(act, bound, CPU)["verdict"] == "ok", name


def test_a_wrong_operation_is_found_and_the_next_check_runs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    sums = moe.sum_rows
    wrong = {torch.bfloat16: 1.1}  # the expected result is in fp64
    monkeypatch.setattr(
        moe, "sum_rows", lambda rows, pairs: wrong.get(rows.dtype, 1) * sums(rows, pairs)
    )
    monkeypatch.setattr(low_bits, "to_nf4", None)
    acts = {name: correct.checks(CPU)[name] for name in ("experts", "nf4", "router product")}
    run_items({it: lambda it=it: correct.judge(*acts[it], CPU) for it in acts}, [])
    rows = read_items(capsys.readouterr().out)
    assert [row["verdict"][:10] for row in rows.values()] == ["WRONG", "WRONG: Typ", "ok"]


def test_every_kernel_is_timed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(kernels, "TIMES", 1)
    timed = kernels.kernels(CPU)
    run_items(timed, ["update adamw8bit"], "failed")
    rows = read_items(capsys.readouterr().out)
    assert len(rows) == len(timed) - 1
    assert all(re.match(r"[\d,.]+ (TFLOP/s|ms)|sort", row["verdict"]) for row in rows.values())


class Dying:
    """A session whose first process ends in the second item, and whose second is cut off in the fourth."""

    started = 0

    def run(self, command: list[str]) -> str:
        self.started += 1
        rows = [{"item": it, "verdict": "ok"} for it in "abc" if it not in command] + [
            {"item": "d"}
        ]
        if self.started == 1:
            assert command[3:] == ["cuda", "runs"] and len(rows) == 4
            rows = [rows[0], {"item": "b"}]
        lines = "\n".join(map(json.dumps, rows))
        raise (
            Failed(f"{lines}\nsegmentation fault")
            if self.started == 1
            else TooSlow("cut off", lines)
        )


def test_items_after_one_that_ends_the_process_are_measured() -> None:
    bench = Bench(Dying(), Path("runs"), tiny=False)  # type: ignore[arg-type]
    found = bench.several("correct")
    verdicts = {it["item"]: it["verdict"] for it in found["items"]}
    assert verdicts == {"a": "ok", "b": "WRONG: segmentation fault", "c": "ok", "d": "not finished"}
    assert found["ended"] == ", cut off"


class Composing(Bench):
    """A benchmark that composes the configuration of each command in place of running it."""

    def command(self, *words: str) -> dict[str, Any]:
        compose([word for word in words if not word.startswith("--") and "=" in word])
        memory = {"allocated_gib": 1.0, "capacity_gib": 80.0, "parts": {"activations": 0.5}}
        layout = {"overrides": ["train.micro_batch=1"], "memory": memory, "fits_probability": 1.0}
        return {"layouts": [layout]}

    def peer(self, kind: str, *overrides: str) -> dict[str, Any]:
        compose(overrides)
        return {}

    def several(self, module: str) -> dict[str, Any]:
        return {}


def test_every_row_of_every_part_is_a_configuration(tmp_path: Path) -> None:
    bench = Composing(None, tmp_path, tiny=False)  # a session is for running
    for one in (it for part in PARTS.values() for it in part):
        assert "why" not in one.act(bench)


@pytest.mark.slow
def test_trainer_trains_a_toy(tmp_path: Path) -> None:
    write_tokens(tmp_path, 16, 512)
    batch = ("train.micro_batch=1", "train.global_batch=2")
    overrides = Bench(None, tmp_path, tiny=True).overrides(*SMALL.overrides("bf16"), *batch)
    found = trained("Trainer", torch.device("cpu"), [*overrides])
    assert found["tokens_per_s"] > 0 and found["parts"]["backward_s"] > 0

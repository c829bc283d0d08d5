"""The rank that the others wait for, from positions; dev/first_causes.py finds it on real ranks."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path
from types import FrameType

import pytest

from nanoscale.runs import position
from nanoscale.runs.position import (
    Position,
    answered,
    different_collectives,
    explained,
    late_for,
    next_call,
    of_thread,
    suspects,
    where,
)
from tests.support.rows import exhaustive
from tests.support.waiting import wait_until

ROOT = Path(__file__).parents[2]


def at(waits=False, line="train/loop.py:1 in log", step=3, **issued):
    """Return the position of a rank in groups `tp01`, whose ranks are in the name."""
    groups = {
        name: {"axis": name[:2], "ranks": [int(rank) for rank in name[2:]], "issued": count}
        for name, count in issued.items()
    }
    return Position(step, groups, waits, line)


def test_the_rank_that_waits_for_nobody_is_suspected():
    known = {
        0: at(tp01=7, dp02=4),
        1: at(waits=True, tp01=7, dp13=3),
        2: at(tp23=5, dp02=3),
        3: at(tp23=6, dp13=3),
    }
    assert suspects(known, [0, 1, 2, 3]) == [
        2
    ]  # 0 waits for 2, 3 waits for 2, and 1 is in a collective
    assert late_for(2, known) == "collective 6 of group tp, where rank 3 waited"
    assert suspects(known, [0, 1, 3]) == []


def test_the_next_collective_in_the_words_of_a_rehearsal(tmp_path):
    names = ("kind", "group", "bytes", "phase", "block", "repeat")
    rows = [
        ("allreduce_", 1, 4, "log", "", 1),
        ("_allgather_base_", 0, 1 << 20, "step 2", "layers.0", 1),
        ("send", 1, 64, "step 2", "layers.0", 1),
        ("_allgather_base_", 0, 2 << 20, "step 2", "layers.1", 2),
        ("_reduce_scatter_base_", 0, 4 << 20, "step 2", "layers.1", 2),
        ("allreduce_", 1, 4, "step 2", "", 1),
    ]
    columns = dict(zip(names, map(list, zip(*rows, strict=True)), strict=True))
    program = {"groups": [[0, 2], [0, 1, 2, 3]], **columns}
    document = {"world_size": 4, "degrees": {"pp": 1}, "steps": 2, "program": {"0": program}}
    file = tmp_path / "program.json"
    file.write_text(json.dumps(document))
    said = [next_call(file, 1, [1, 3], number) for number in range(7)]
    assert said == [
        "",
        "allgather_base of layers.0, 1 MiB, 1 of 5 of the step",
        "allgather_base of layers.1, 2 MiB, 2 of 5 of the step",
        "reduce_scatter_base of layers.1, 4 MiB, 3 of 5 of the step",
        "allgather_base of layers.1, 2 MiB, 4 of 5 of the step",
        "reduce_scatter_base of layers.1, 4 MiB, 5 of 5 of the step",
        "",
    ]
    assert next_call(file, 1, [0, 1, 2, 3], 1) == "allreduce, 4 B, 1 of 1 of the step"
    assert next_call(tmp_path / "none.json", 1, [1, 3], 1) == ""
    known = {0: at(tp01=6), 1: at(waits=True, tp01=7)}
    known[0].groups["tp01"]["next"] = said[1]
    assert late_for(0, known) == f"collective 7 of group tp ({said[1]}), where rank 1 waited"


def test_a_rank_that_gives_no_answer_is_suspected():
    assert suspects({0: at(dp01=4)}, [0, 1]) == [0, 1]
    assert suspects({0: at(waits=True, dp01=4)}, [0, 1]) == [1]
    assert "none of its threads" in where(None)


def test_ranks_in_different_collectives_are_listed_with_their_lines():
    same = {rank: at(waits=True) for rank in range(3)}
    assert different_collectives(same) is None
    other = at(waits=True, line="parallel/ddp.py:37 in receive")
    rank, text = different_collectives({**same, 3: other})  # type: ignore[misc]
    assert rank == 3 and "majority" not in text
    two = {0: at(waits=True), 1: replace(other, step=4)}
    rank, tie = different_collectives(two)  # type: ignore[misc]
    assert rank == 1 and "without a majority" in tie
    assert text.index("rank 3 at parallel/ddp.py:37") < text.index(
        "ranks 0, 1 and 2 at train/loop.py:1"
    )


def test_the_line_of_the_users_own_file_is_shown(tmp_path):
    """Frames of libraries that it calls are not, nor code that torch.compile has generated."""
    hooks, compiled = tmp_path / "hooks-ab.py", tmp_path / "torchinductor_root" / "cx.py"
    names = {"take": lambda: position.of_frames(frames())}

    def frames():
        found: list[tuple[FrameType, int]] = []
        frame: FrameType | None = sys._getframe(2)
        while frame is not None:
            found.insert(0, (frame, frame.f_lineno))
            frame = frame.f_back
        return found

    for file, text in (
        (compiled, "def call():\n    return take()\n"),
        (hooks, "def on_step_end(moment):\n    return call()\n"),
        (
            ROOT / "nanoscale/train/checkpointing.py",
            "def call_hook():\n    return on_step_end(1)\n",
        ),
    ):
        exec(compile(text, str(file), "exec"), names)
    found = names["call_hook"]()  # type: ignore[call-arg]
    line = "hooks-ab.py:2 in on_step_end < train/checkpointing.py:2 in call_hook"
    assert (found.line, found.in_user_code) == (line, True)


def test_without_a_majority_the_rank_in_the_users_own_code_is_named():
    log = at(waits=True, step=4)
    hook = replace(at(waits=True, line="hooks-ab.py:3 in on_step_end"), in_user_code=True)
    rank, text = different_collectives({0: hook, 1: log})  # type: ignore[misc]
    assert rank == 0 and text.endswith("rank 0 called it in the user's own code")
    rank, text = different_collectives({0: hook}, [1])  # type: ignore[misc]
    assert rank == 0 and "rank 1 got data of another size" in text
    assert different_collectives({0: log}, [1])[0] == 1  # type: ignore[index]
    assert different_collectives({0: hook, 1: hook, 2: log})[0] == 2  # type: ignore[index]


def _hang(file, ready):
    """Hang on a disk that never syncs a file, neither this thread's nor another one's."""
    os.fsync = lambda _: threading.Event().wait()  # type: ignore[assignment,return-value]
    position.answer_questions(file)
    position.NOW.step = 5
    ready.set()
    threading.Event().wait()


def test_a_rank_that_hangs_answers_with_its_stack(tmp_path):
    context = get_context("spawn")
    ready = context.Event()
    file = tmp_path / "rank.json"
    process = context.Process(target=_hang, args=(file, ready), daemon=True)
    process.start()
    try:
        assert ready.wait(60)
        position.ask(file)
        wait_until(lambda: answered(file), 60)
        found = answered(file)
        assert found is not None and found.step == 5 and found.groups == {}
    finally:
        process.kill()
    position.ask(file)  # nobody reads any more
    assert answered(file) is None


def test_a_file_that_is_being_written_is_named(tmp_path):
    path = tmp_path / "state.bin"
    frame_of = compile(
        "def write(path):\n    return take()\n", f"{ROOT}/nanoscale/checkpoint/x.py", "exec"
    )
    names = {"take": lambda: of_thread(threading.get_ident())}
    exec(frame_of, names)
    assert names["write"](path).path == str(path)  # type: ignore[call-arg]


@pytest.mark.slow
@pytest.mark.parametrize(
    "fault",
    [
        exhaustive("tp 2 · dp 2: hang forward"),
        "tp 2 · pp 2: kill forward",
        "dp 4: shape collective",
        exhaustive("dp 2: hang join"),
        "dp 2: hang disk",
    ],
)
def test_the_first_cause_of_a_planted_fault_is_named(fault):
    command = [sys.executable, ROOT / "dev" / "first_causes.py", "1", f"^{fault}"]
    done = subprocess.run(
        command, capture_output=True, text=True, env={**os.environ, "COLUMNS": "80"}
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_ranks_of_a_running_job_are_explained():
    hosts = dict.fromkeys(range(4), "h")
    known = {rank: at(waits=rank != 2, tp23=4 + (rank == 3)) for rank in range(4)}
    text = explained(known, hosts)
    assert text.startswith("rank 2 on h: in step 3, at train/loop.py:1 in log\n")
    assert "it is before collective 5 of group tp, where rank 3 waited" in text
    assert "ranks 0, 1 and 3: wait in step 3" in text
    assert "no rank waits" in explained({rank: at() for rank in range(4)}, hosts)
    assert "every rank waits" in explained({rank: at(waits=True) for rank in range(4)}, hosts)


@pytest.mark.slow
def test_runs_explain_names_the_rank_that_hangs_while_it_does(tmp_path):
    words = ["recipe=debug", "train.steps=9", "launcher.device=cpu", "parallel.dp=2", "run.name=r"]
    environment = {
        **os.environ,
        "PLANTED_FAULT": "hang forward 1 3",
        "PYTHONPATH": f"{ROOT / 'dev' / 'planted'}:{ROOT}",
    }
    nanoscale = [sys.executable, "-m", "nanoscale"]
    output = tmp_path / "output"
    with output.open("w") as out:
        training = subprocess.Popen(
            [*nanoscale, "train", *words], cwd=tmp_path, env=environment, stdout=out, stderr=out
        )
    try:
        log = tmp_path / "runs" / "r" / "logs" / "attempt-1"
        wait_until(lambda: any("PLANTED" in file.read_text() for file in log.glob("*.rank-1.err")))
        wait_until(lambda: "rank 1 on" in explain(nanoscale, tmp_path).partition("\n")[0])
        assert "models/transformer.py" in explain(nanoscale, tmp_path)
    finally:
        training.send_signal(signal.SIGINT)
        wait_until(lambda: "Ctrl-C again" in output.read_text())
        training.send_signal(signal.SIGINT)
        training.wait(60)
    done = subprocess.run(
        [*nanoscale, "runs", "explain", "r"], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 2 and "is not running" in done.stderr


def explain(nanoscale, folder):
    done = subprocess.run(
        [*nanoscale, "runs", "explain", "r"], cwd=folder, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return done.stdout

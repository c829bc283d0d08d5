"""`nanoscale rehearse`, `train --rehearse`, and what is wrong with a request."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from nanoscale.cli.common import rehearsal
from nanoscale.cli.main import run as nanoscale
from nanoscale.common import versions
from nanoscale.common.errors import UserError
from nanoscale.config.composing.compose import compose
from nanoscale.config.rules import Devices, check
from nanoscale.launch.request import Request
from nanoscale.plan.predict import RehearsedMemory, predict
from nanoscale.rehearse import rehearsals
from nanoscale.runs.directory import read_json
from nanoscale.view.plan.prediction import verdict
from nanoscale.view.run.launch_text import rehearsal_lines
from tests.plan.machines import job
from tests.support import hf_models
from tests.support.recipes import changed
from tests.support.rows import exhaustive
from tests.support.waiting import wait_until

LAYOUT = ("recipe=debug", "model.layers=2", "launcher.device=cpu", "parallel.dp=2", "zero=stage3")
ON_GPUS = ("launcher.device=cuda", "cluster=h100-sxm", "cluster.hosts=1", "launcher.devices=2")
OPEN = (
    *LAYOUT[:2], *ON_GPUS, "cluster.memory_gib=1.39", "data=random", "train.micro_batch=256",
    "train.global_batch=512",
)  # fmt: skip
"""A job that fits with a probability of 41 % by the plan, and not by a rehearsal."""
LIMIT_S = 240.0


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("NANOSCALE_CACHE", str(tmp_path / "cache"))


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (("--ranks", "2"), "the job has the ranks 0 to 1"),
        (("--ranks", "first"), "is neither distinct nor all nor numbers"),
        (("--steps", "0"), "--steps 0: must be at least 1"),
        (("--micro-batches", "7"), "is not one of"),
        (("parallel.tp=3",), "parallel.tp"),
        (("--html", "nowhere/page.html"), "cannot be written"),
        (("--snapshots", "memory"), "this job runs on CPUs"),
        ((*ON_GPUS, "--snapshots", "nowhere/memory"), "cannot be written"),
        ((*ON_GPUS, "--snapshots", "/etc"), "the folder is not empty"),
        ((*ON_GPUS, "--snapshots", "/etc/hosts"), "is a file"),
        (("--against", "nowhere.json"), "--against nowhere.json: No such file"),
        (("--against", "/etc/hosts"), "hosts"),
    ],
)
def test_a_wrong_request_is_refused_before_anything_starts(
    words: tuple[str, ...], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert nanoscale(["rehearse", *LAYOUT, *words]) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and text in captured.err and "Traceback" not in captured.err
    assert not Path("cache").exists()


def advice(words: list[str], capsys: pytest.CaptureFixture[str]) -> list[str]:
    """Return what a refused request advises to type, as words."""
    assert nanoscale([*words, "--json"]) == 2
    (violation,) = json.loads(capsys.readouterr().out)["error"]["violations"]
    return [word for text in violation["suggestions"] for word in text.split()]


@pytest.mark.exhaustive
def test_deepspeed_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    if find_spec("deepspeed") is None:  # an import would print
        pytest.skip("deepspeed is not installed")
    words = ["rehearse", "recipe=debug", "model.layers=2", "launcher.device=cpu"]
    native = advice([*words, "backend=deepspeed"], capsys)
    assert native == ["backend=native"]
    assert nanoscale([*words, *native]) == 0


@pytest.mark.slow
def test_own_code_is_rehearsed_on_cpus_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "mine.py"
    file.write_text("""
import torch.distributed as dist
from torch.nn import functional as F

def loss(logits, targets, config):
    return F.cross_entropy(logits, targets, reduction="none")

def on_step_end(moment):
    (moment.run / "note").write_text("")
    if 2 > moment.rank:
        dist.barrier()
""")
    words = ["rehearse", *LAYOUT[:2], f"hooks.path={file}", "train.objective=hooks"]
    assert nanoscale([*words, "parallel.tp=2", "launcher.devices=2", "launcher.device=cpu"]) == 0
    shown = capsys.readouterr().out
    assert "all members of every group agree" in shown
    assert "not played: on_checkpoint() of hooks.path" in shown
    file.write_text(file.read_text().replace("2 > moment.rank", "1 > moment.rank"))
    assert nanoscale([*words, "parallel.tp=2", "launcher.devices=2", "launcher.device=cpu"]) == 1
    assert "rank 0 asks for barrier" in capsys.readouterr().out
    assert nanoscale([*words, "launcher.devices=1", "cluster=h100-sxm"]) == 2
    assert "is not nanoscale's own, which alone is rehearsed" in capsys.readouterr().err


@pytest.mark.parametrize("words", [{"source": "hooks"}, {}])
def test_a_rehearsal_is_advised_only_if_it_is_possible(
    words: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    composed = compose(["recipe=debug", "parallel.dp=2"])
    config = check(composed, Devices("cuda", 2))
    config = replace(config, model=replace(config.model, **words))
    lines = rehearsal_lines(Request(composed, config, Devices("cuda", 2)))
    assert lines == (
        [] if words else ["not rehearsed: --rehearse plays every kind of rank before the launch"]
    )
    if words:
        with pytest.raises(
            UserError, match="model=hooks: is not nanoscale's own, which alone is rehearsed"
        ):
            rehearsal.rehearsed(config, "distinct", 2)


@pytest.mark.slow
@pytest.mark.parametrize("compiled", ["off", exhaustive("on")])
def test_what_does_not_fit_is_told_with_overrides_that_do(
    compiled: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["rehearse", *OPEN, "cluster.memory_gib=1.37", f"backend.compile={compiled}"]
    assert nanoscale([*words, "--html", "page.html"]) == 3
    out = capsys.readouterr().out
    assert nanoscale([*words, "--json"]) == 3
    change = json.loads(capsys.readouterr().out)["changes"][0]["overrides"]
    assert "does not fit: " in out and change in out and change in Path("page.html").read_text()
    assert nanoscale([*words, *shlex.split(change)]) == 0


@pytest.mark.slow
def test_every_micro_batch_is_played_by_the_option_that_the_line_not_played_names(
    capsys: pytest.CaptureFixture[str],
) -> None:
    job = ["rehearse", "recipe=debug", "model.layers=2", "launcher.device=cpu", "parallel.dp=1"]
    job += ["checkpoint=none", "train.global_batch=6", "train.micro_batch=1"]
    assert nanoscale([*job, "--json"]) == 0
    Path("some.json").write_text(text := capsys.readouterr().out)
    (left_out,) = json.loads(text)["not_played"]
    option = left_out.partition("(")[2].partition(" plays them)")[0]
    assert nanoscale([*job, *option.split(), "--against", "some.json", "--json"]) == 0
    every = json.loads(capsys.readouterr().out)
    assert (every["not_played"], every["against"]) == ([], [])


@pytest.mark.slow
def test_a_rehearsal_is_compared_with_a_former_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert nanoscale(["rehearse", *LAYOUT, "--json"]) == 0
    former = json.loads(capsys.readouterr().out)
    Path("former.json").write_text(json.dumps(former))
    Path("other.json").write_text(json.dumps(former | {"zero": 2}))
    against = ["rehearse", *LAYOUT, "--against", "former.json"]
    assert nanoscale([*against, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["against"] == []
    assert nanoscale([*against[:-1], "other.json"]) == 2
    assert "is of another job: zero 2 in place of 3" in capsys.readouterr().err
    assert nanoscale([*against, "parallel.activation_checkpointing=full"]) == 4
    out = capsys.readouterr().out.split("changed:\n")[1]
    assert "the peak of tensors is" in out and "operations of a step:" in out


@pytest.mark.slow
def test_a_rehearsal_is_shown_kept_and_copied_into_the_run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    job = (*LAYOUT, "train.steps=1", "train.eval_every=0")
    words = ["rehearse", *job, *advice(["rehearse", *job, "--ranks", "2"], capsys)]
    assert nanoscale([*words, "--json", "--html", "page.html"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["world_size"] == 2 and result["mismatches"] == []
    assert [rank["rank"] for rank in result["ranks"]] == [0, 1]
    assert {row["axis"] for row in result["collectives"]} == {"dp"}
    assert "<svg" in Path("page.html").read_text()

    monkeypatch.setattr(rehearsals, "rehearse", None)  # it is not played again
    assert nanoscale(words) == 0
    assert "all members of every group agree" in capsys.readouterr().out
    assert nanoscale(["plan", *job, "--json"]) == 0
    planned = json.loads(capsys.readouterr().out)
    assert planned["rehearsed"]["rank"] == 0 and planned["rehearsed"]["decides"]
    assert planned["rehearsed"]["allocated_gib"] == result["ranks"][0]["allocated"] / 2**30
    assert nanoscale(["plan", *job]) == 0
    assert "(rehearsed: rank 0, " in capsys.readouterr().out
    assert nanoscale(["plan", *job, "train.micro_batch=1", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["rehearsed"] is None
    assert nanoscale(["train", *job, "--dry-run", "--json"]) == 0
    dry_run = json.loads(capsys.readouterr().out)
    assert dry_run["rehearsed"] is True
    assert dry_run["plan"]["rehearsed"] == planned["rehearsed"]
    assert nanoscale(["train", *job, "train.micro_batch=1", "--dry-run"]) == 0
    assert "not rehearsed: --rehearse" in capsys.readouterr().out
    assert nanoscale(["train", *job, "run.name=a", "--rehearse"]) == 0
    program = read_json(Path("runs/a/program.json"))["program"]["0"]
    assert "_reduce_scatter_base_" in program["kind"]


def test_a_rehearsal_decides_whether_a_job_fits() -> None:
    words = ["recipe=debug", "cluster=h200", "cluster.hosts=1"]
    plan = predict(check(compose(words), Devices("cuda", 8)))
    over = RehearsedMemory(0, "backward", 0, 0, plan.capacity + 2**30, upper_bound=False)
    assert plan.fits and not replace(plan, rehearsed=over).fits
    bound = replace(plan, rehearsed=replace(over, upper_bound=True))
    assert bound.fits_probability == plan.fits_probability
    assert "an upper bound, counted" in verdict(bound)


@pytest.mark.slow
def test_a_model_of_transformers_is_rehearsed_where_its_plan_cannot_decide(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    hf_models.save("gpt_neox", tmp_path / "small")
    words = (
        "model=hf", f"model.name={tmp_path / 'small'}", "data=random", "train.steps=3", "train.seq_len=32",
        "train.micro_batch=4", "train.global_batch=8", *ON_GPUS, "precision=bf16",
    )  # fmt: skip
    assert nanoscale(["submit", "recipe=debug", *words, "cluster.memory_gib=1.3"]) == 3
    shown = capsys.readouterr().err
    assert "a rehearsal decides" in shown and "(rehearsed: rank 0, " in shown


@pytest.mark.slow
def test_a_rehearsal_decides_where_the_plan_cannot(capsys: pytest.CaptureFixture[str]) -> None:
    assert nanoscale(["plan", *OPEN]) == 3
    assert "`nanoscale rehearse` with the same overrides decides" in capsys.readouterr().out
    assert nanoscale(["submit", *OPEN, "--json"]) == 3
    shown = capsys.readouterr()
    assert "the plan cannot decide whether the job fits" in shown.err
    assert "(rehearsed: rank 0, " in json.loads(shown.out)["error"]["message"]


@pytest.mark.parametrize(
    ("option", "patience", "note"),
    [("--dry-run", 0.1, ": --rehearse would decide, in about "), ("--force", 1e9, "")],
)
def test_a_long_rehearsal_and_a_forced_launch_are_left_to_the_user(
    option: str,
    patience: float,
    note: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(rehearsal, "PATIENCE_S", patience)
    monkeypatch.setattr(rehearsals, "rehearse", None)
    assert nanoscale(["submit", *OPEN, "--dry-run", option]) == (0 if option == "--force" else 3)
    shown = capsys.readouterr().err
    assert note in shown and ("cannot decide" in shown) == bool(note)


@pytest.mark.slow
def test_snapshots_of_every_rank(tmp_path: Path) -> None:
    words = [
        "rehearse",
        *LAYOUT,
        *ON_GPUS,
        "parallel.pp=2",
        "parallel.dp=1",
        "--snapshots",
        "memory",
        "--overwrite",
    ]
    Path("memory").mkdir()
    Path("memory/rank-0.pickle").write_text("older", encoding="utf-8")
    assert nanoscale(words[:-1]) == 2
    assert nanoscale(words) == 0
    assert Path("memory/rank-0.pickle").read_bytes() != b"older"
    assert sorted(file.name for file in Path("memory").iterdir()) == [
        "rank-0.pickle",
        "rank-1.pickle",
    ]


def test_a_job_that_fails_in_the_rehearsal_is_not_launched(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    result = {"mismatches": ["ranks 0 and 1 differ"], "ranks": [], "fits": None}
    monkeypatch.setattr(rehearsal, "rehearsed", lambda *_: result)
    assert nanoscale(["train", *LAYOUT, "--rehearse"]) == 1
    assert "ranks 0 and 1 differ" in capsys.readouterr().err
    assert not Path("runs").exists()


@pytest.mark.slow
def test_an_interrupt_leaves_nothing(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "nanoscale", "rehearse", *LAYOUT, "train.global_batch=4096"]
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    environment = os.environ | {"TMPDIR": str(scratch)}
    process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL)
    started: list[psutil.Process] = []

    def plays() -> bool:
        started[:] = psutil.Process(process.pid).children(recursive=True)
        return len(started) > 0

    wait_until(plays, LIMIT_S)
    process.send_signal(signal.SIGINT)
    assert process.wait(LIMIT_S) == 130
    wait_until(lambda: not any(map(_lives, started)), LIMIT_S)
    assert list(scratch.iterdir()) == []


def _lives(process: psutil.Process) -> bool:
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.mark.parametrize(
    ("override", "is_the_same"),
    [
        ("optimizer.lr=1", True),
        ("optimizer.weight_decay=0", False),
        ("checkpoint.keep_best=2", False),
        ("optimizer.weight_decay=0.2", True),
        ("data.tokenizer=byte", True),
        ("run.name=other", True),
        ("data.source=random", False),
    ],
)
def test_a_kept_rehearsal_is_that_of_what_ranks_do(override: str, is_the_same: bool) -> None:
    usual, other = (
        rehearsals.digest(changed(*words).config, None, [0], 2) for words in ([], [override])
    )
    assert (usual == other) == is_the_same


@pytest.mark.parametrize("file", ["model.py", "families.yaml"])
def test_changed_code_and_tables_rename_a_rehearsal_in_the_cache(
    file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / file).write_text("a: 1")
    package = SimpleNamespace(__file__=str(tmp_path / "__init__.py"), __version__="1")
    monkeypatch.setattr(versions, "nanoscale", package)
    monkeypatch.setattr(versions, "_source_sum", versions._source_sum.__wrapped__)
    names = [rehearsals.digest(job(), None, [0], 2) for _ in range(2)]
    (tmp_path / file).write_text("a: 2")
    assert names[0] == names[1] != rehearsals.digest(job(), None, [0], 2)


@pytest.mark.parametrize("recipe", ["mxfp8", "nvfp4"])
@pytest.mark.parametrize("mixture", [(), ("model.experts=8", "model.ffn=128")])
def test_advice_on_a_job_in_mxfp8_makes_it_playable(recipe: str, mixture: tuple[str, ...]) -> None:
    on = Devices("cuda", 2, ("NVIDIA B200",) * 2)
    sizes = (
        "model.hidden=128",
        "model.heads=2",
        "model.head_dim=64",
        "model.kv_heads=2",
        "train.seq_len=128",
    )
    words = (f"precision={recipe}", *sizes, "model.ffn=256", *mixture)
    violation = rehearsals.why_unplayable(check(changed(*words), on))
    assert violation is not None and violation.key == "precision.fp8_recipe"
    for advice in violation.suggestions:
        assert not rehearsals.why_unplayable(check(changed(*words, *shlex.split(advice)), on))


def test_a_played_gpu_has_the_name_of_its_maker() -> None:
    names = [rehearsals.device_of(job(device=name))[0] for name in ("h100-sxm", "mi300x")]
    assert [gpu and gpu["name"] for gpu in names] == [
        "NVIDIA H100 80GB HBM3",
        "AMD Instinct MI300X",
    ]


@pytest.mark.parametrize("content", ["", "no sum", "{}", '["a list"]', "sum\n{}"])
def test_a_damaged_or_foreign_rehearsal_in_the_cache_is_played_again(
    content: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NANOSCALE_CACHE", str(tmp_path))
    rehearsals.keep("name", {"ranks": [1]})
    assert rehearsals.known("name") == {"ranks": [1]}
    file = rehearsals.cached("name")
    file.chmod(0o666)  # others may have written it
    assert rehearsals.known("name") is None
    file.chmod(0o644)
    file.write_text(content)
    assert rehearsals.known("name") is None
    monkeypatch.setattr(os, "getuid", lambda: -1)
    rehearsals.keep("name", {"ranks": [1]})
    assert rehearsals.known("name") is None  # another user wrote it

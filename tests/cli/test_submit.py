"""The result of `nanoscale submit` for a request, without SLURM; tests/cluster/test_submit.py has one."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from nanoscale.cli.main import run as nanoscale
from nanoscale.config.composing.frozen import load
from nanoscale.runs.directory import RunDirectory

CPU = ("recipe=debug", "launcher.device=cpu")
Typed = Callable[..., tuple[int, str, str]]


@pytest.fixture
def types(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> Typed:
    """Type `nanoscale submit …`: exit code, standard output and standard error."""
    monkeypatch.chdir(tmp_path)

    def submit(*words: str) -> tuple[int, str, str]:
        code = nanoscale(["submit", *words])
        printed = capsys.readouterr()
        return code, printed.out, printed.err

    return submit


@pytest.fixture
def taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An sbatch that accepts everything as job 12, and keeps its arguments."""
    folder = tmp_path / "bin"
    folder.mkdir()
    sbatch = folder / "sbatch"
    sbatch.write_text(f'#!/bin/bash\n/bin/cat "$2" > {folder}/script\necho 12\n')
    sbatch.chmod(0o755)
    monkeypatch.setenv("PATH", str(folder))
    return folder


def test_a_dry_run_prints_the_script_alone_and_writes_nothing(types: Typed, tmp_path: Path) -> None:
    code, out, err = types(*CPU, "run.name=x", "--dry-run", "--num-nodes", "2")
    assert code == 0
    assert out.startswith("#!/bin/bash\n#SBATCH --job-name=x\n") and out.endswith('exit "$code"\n')
    assert "#SBATCH --nodes=2\n" in out
    assert f"resume --trust {tmp_path}/runs/x &" in out
    assert "2 ranks on 2 nodes" in err and "nothing was written" in err
    assert list(tmp_path.iterdir()) == []


def test_a_dry_run_as_a_document(types: Typed, tmp_path: Path) -> None:
    words = ("recipe=debug", "--num-nodes", "2", "--num-gpus", "4", "run.name=x", "train.seed=1,2")
    code, out, _ = types(*words, "--dry-run", "--json")
    document = json.loads(out)
    assert (code, document["world_size"], document["devices"]) == (0, 8, 4)
    assert "#SBATCH --gpus-per-node=4\n" in document["text"]
    assert document["script"] == f"{tmp_path}/runs/x.array/submit.sbatch"
    assert document["runs"][1] == {
        "name": "x-1", "run_dir": f"{tmp_path}/runs/x-1", "values": {"train.seed": "2"}
    }  # fmt: skip


def test_a_run_is_prepared_and_handed_over(types: Typed, taken: Path, tmp_path: Path) -> None:
    code, out, _ = types(*CPU, "run.name=x", "launcher.nodes=2", "parallel.tp=2")
    run = RunDirectory(tmp_path / "runs" / "x")
    assert code == 0 and "x is queued as job 12" in out and "nanoscale runs watch x" in out
    assert (taken / "script").read_text() == run.script.read_text()
    assert json.loads(run.submission.read_text())["job"] == "12"
    assert json.loads(run.status.read_text())["state"] == "prepared"
    config = load(run.config)
    assert (config.launcher.name, config.launcher.device, config.launcher.devices) == (
        "slurm",
        "cpu",
        1,
    )
    assert (config.parallel.dp, config.run.root) == (1, str(tmp_path / "runs"))
    assert config.launcher.threads == "auto"  # the nodes know their cores


def test_runs_of_an_array_are_numbered_and_listed(
    types: Typed, taken: Path, tmp_path: Path
) -> None:
    words = ("run.name=x", "train.seed=4,5", "model=debug,tiny", "--at-once", "3", "--json")
    code, out, _ = types(*CPU, *words)
    document, root = json.loads(out), tmp_path / "runs"
    assert code == 0 and document["job"] == "12"
    assert [run["job"] for run in document["runs"]] == ["12_0", "12_1", "12_2", "12_3"]
    assert "#SBATCH --array=0-3%3\n" in (taken / "script").read_text()
    listed = (root / "x.array" / "runs").read_text().splitlines()
    assert listed == [f"{root}/x-{number}" for number in range(4)]
    configs = [load(RunDirectory(Path(path)).config) for path in listed]
    found = [(config.train.seed, config.model.name) for config in configs]
    assert found == [(4, "debug"), (4, "tiny"), (5, "debug"), (5, "tiny")]
    code, _, err = types(*CPU, "run.name=x", "train.seed=4,5")
    assert code == 2 and "run.name=x-2" in err


@pytest.mark.parametrize("more", [(), ("train.seed=1,2",)])
def test_nothing_is_left_where_sbatch_is_missing(
    types: Typed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, more: tuple[str, ...]
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    code, _, err = types(*CPU, "run.root=new/place", *more)
    assert code == 2 and "sbatch is not installed" in err
    assert list(tmp_path.iterdir()) == []


def test_an_older_run_in_the_folder_outlives_a_refusal(
    types: Typed, taken: Path, tmp_path: Path
) -> None:
    assert types(*CPU, "run.name=old")[0] == 0
    (taken / "sbatch").write_text(
        "#!/bin/bash\necho 'sbatch: error: no, Invalid account' >&2\nexit 1\n"
    )
    code, _, err = types(*CPU, "run.name=new")
    assert code == 2 and "launcher.slurm.account" in err and "no, Invalid account" in err
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["old"]
    assert types(*CPU, "run.name=old")[0] == 2
    assert RunDirectory(tmp_path / "runs" / "old").config.exists()


@pytest.mark.parametrize(
    ("words", "said", "instead"),
    [
        (("recipe=debug",), "launcher.devices=auto: must be set here", "launcher.devices=8"),
        ((*CPU, "launcher=ssh"), "launcher.name=ssh: is chosen", "launcher=slurm"),
        ((*CPU, "launcher=local"), "launcher.name=local: is chosen", "launcher=slurm"),
        ((*CPU, "launcher.name=pdsh"), "launcher.name=pdsh: is chosen", "launcher=slurm"),
        ((*CPU, "launcher.nodes=3", "parallel.dp=4"), "must be the same number", None),
        ((*CPU, "launcher.nodes=0"), "launcher.nodes=0", None),
        ((*CPU, "train.seed=range(1,5)"), "list them", "train.seed=A,B,C"),
        ((*CPU, "--at-once", "2"), "--at-once", None),
        ((*CPU, "train.stepz=4"), "train.stepz=4: unknown key", "train.steps=4"),
        ((*CPU, "--nodes", "4"), "--nodes", "launcher.nodes=4"),
        ((*CPU, 'launcher.slurm.directives=["--nodes=3"]'), "nanoscale has a key", "launcher.nodes=3"),
        ((*CPU, 'launcher.slurm.directives=["--wrap=x"]'), "sets itself", None),
        ((*CPU, "parallel.tp=1,2", "launcher.slurm.exclusive=false", "launcher.threads=1"),
         "differs between the runs (1 and 2)", None),
    ],
)  # fmt: skip
def test_what_is_refused(
    types: Typed, tmp_path: Path, words: tuple[str, ...], said: str, instead: str | None
) -> None:
    code, out, err = types(*words)
    assert (code, out) == (2, "")
    assert said in err and (instead is None or instead in err)
    assert list(tmp_path.iterdir()) == []


def test_gpus_may_be_counted_from_what_slurm_is_asked_for(types: Typed) -> None:
    code, out, err = types("recipe=debug", "launcher.slurm.gpus='h100:4'", "--dry-run")
    assert code == 0 and "#SBATCH --gpus-per-node=h100:4\n" in out and "4 ranks on 1 node" in err


# --- the launcher that the composed configuration has ------------------------------------------------


def forms(name: str) -> list[tuple[str, ...]]:
    """Return the ways to choose a launcher: as an option, as a key, and in a recipe."""
    return [(f"launcher={name}",), (f"launcher.name={name}",), (f"recipe=./{name}.yaml",)]


@pytest.mark.parametrize("name", ["slurm", "pbs", "lsf", "kubernetes"])
@pytest.mark.parametrize("form", range(3))
def test_a_launcher_is_chosen_in_any_form(
    types: Typed, tmp_path: Path, name: str, form: int
) -> None:
    text = f"defaults:\n  - debug\n  - override /launcher: {name}\n"
    (tmp_path / f"{name}.yaml").write_text(text)
    words = [*forms(name)[form], "launcher.device=cpu", "run.name=x", "--dry-run"]
    if form < 2:
        words.insert(0, "recipe=debug")
    if name == "kubernetes":
        mounts = "launcher.container_mounts=[runs:/runs]"
        words += ["launcher.container=image", mounts, "run.root=/runs", "launcher.devices=1"]
    code, out, err = types(*words)
    lines = {"slurm": "#SBATCH --nodes=1", "pbs": "#PBS -l select=1", "lsf": "#BSUB -n 1"}
    assert code == 0 and lines.get(name, "kind: JobSet") in out, err
    if name == "kubernetes":
        assert "- launcher=env\n" in out


@pytest.mark.parametrize("form", range(3))
def test_train_follows_the_launcher_in_any_form(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any, form: int
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("env", "kubernetes"):
        text = f"defaults:\n  - debug\n  - override /launcher: {name}\n"
        (tmp_path / f"{name}.yaml").write_text(text)
    words = ["launcher.device=cpu", "run.name=x", "--dry-run"]
    others = ["recipe=debug"] if form < 2 else []
    for variable, value in (("RANK", "0"), ("WORLD_SIZE", "1"), ("MASTER_ADDR", "localhost")):
        monkeypatch.setenv(variable, value)
    assert nanoscale(["train", *others, *forms("env")[form], *words]) == 0, capsys.readouterr().err
    assert nanoscale(["bench", *others, *forms("env")[form]]) == 2
    assert "launcher=env is for `nanoscale train` alone" in capsys.readouterr().err
    assert nanoscale(["train", *others, *forms("kubernetes")[form], *words]) == 2
    assert "is for `nanoscale submit --dry-run`" in capsys.readouterr().err


@pytest.mark.parametrize(("name", "program"), [("pbs", "qsub"), ("lsf", "bsub")])
def test_a_batch_system_takes_a_run_and_is_asked_about_it(
    types: Typed,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: Any,
    name: str,
    program: str,
) -> None:
    programs = tmp_path / "bin"
    programs.mkdir()
    monkeypatch.setenv("PATH", str(programs))
    words = (*CPU, f"launcher={name}", "run.name=x")
    code, _, err = types(*words)
    assert code == 2 and f"{program} is not installed here" in err
    assert [path.name for path in tmp_path.iterdir()] == ["bin"]
    assert types(*words, "train.seed=1,2")[0] == 2
    accepts = {
        "qsub": f'/bin/cat "$1" > {programs}/script; echo 12.host',
        "bsub": f"/bin/cat > {programs}/script; echo 'Job <12> is submitted to queue <normal>.'",
        "qstat": "printf 'Job Id: 12.host\n    job_state = Q\n    comment = no\n\troom\n'",
        "bjobs": "echo '12|RUN|8*h1:8*h2|Nov 27 13:00'",
        "qdel": f'echo "qdel $*" > {programs}/called',
        "bkill": f'echo "bkill $*" > {programs}/called',
    }
    for each, answer in accepts.items():
        (programs / each).write_text(f"#!/bin/bash\n{answer}\n")
        (programs / each).chmod(0o755)
    assert types(*words)[0] == 0
    script = tmp_path / "runs" / "x" / f"submit.{program}"
    assert (programs / "script").read_text() == script.read_text()
    assert nanoscale(["runs", "show", "x"]) == 0
    shown = capsys.readouterr().out
    expected = {
        "pbs": "job 12.host: PENDING (noroom), queued since",
        "lsf": "job 12: RUNNING, on h1,h2 since Nov 27 13:00",
    }
    assert expected[name] in shown
    nanoscale(["runs", "stop", "x", "--timeout", "0.1"])
    called = {"pbs": "qdel 12.host\n", "lsf": "bkill -s TERM 12\n"}
    assert (programs / "called").read_text() == called[name]
    (programs / {"pbs": "qstat", "lsf": "bjobs"}[name]).write_text("#!/bin/bash\n")  # it has ended
    capsys.readouterr()
    assert nanoscale(["resume", "x", "--num-nodes", "2"]) == 2
    advice = capsys.readouterr().err.partition("type instead: nanoscale submit ")[2].split()
    assert advice == ["--resume", "x", "launcher.nodes=2"]
    assert types(*advice)[0] == 0
    assert (
        f"resume --trust {tmp_path}/runs/x launcher.nodes=2 &" in (programs / "script").read_text()
    )
    assert nanoscale(["runs", "show", "x"]) == 0
    assert "continue     nanoscale submit --resume x" in capsys.readouterr().out


def test_a_stopped_run_is_queued_again_or_left_as_it_was(
    types: Typed, taken: Path, tmp_path: Path, capsys: Any
) -> None:
    assert types(*CPU, "run.name=x", "train.steps=4")[0] == 0
    (taken / "squeue").write_text(
        "#!/bin/bash\n[ ! -e $0.waits ] || echo '12|PENDING|None||N/A|0|'\n"
    )
    (taken / "scancel").write_text(
        "#!/bin/bash\n/bin/rm $0/../squeue.waits\n".replace("$0/..", str(taken))
    )
    for program in ("squeue", "scancel"):
        (taken / program).chmod(0o755)
    (taken / "squeue.waits").touch()
    code, _, err = types("--resume", "x")
    assert code == 2 and "waits in SLURM's queue" in err and "nanoscale runs stop x" in err
    assert nanoscale(["runs", "stop", "x"]) == 0
    assert "to continue: nanoscale submit --resume x\n" in capsys.readouterr().out
    code, out, err = types("--resume", "x", "train.steps=8", "parallel.tp=1")
    assert code == 0 and "x is queued as job 12" in out and "train.steps: 4 → 8" in err
    script = RunDirectory(tmp_path / "runs" / "x").script
    assert f"resume --trust {tmp_path}/runs/x train.steps=8 parallel.tp=1 &" in script.read_text()
    assert (
        "\nsteps: 4" not in script.read_text()
        and load(script.parent / "config.yaml").train.steps == 4
    )
    before = {path: path.read_bytes() for path in script.parent.rglob("*") if path.is_file()}
    (taken / "sbatch").write_text("#!/bin/bash\necho 'Invalid account' >&2\nexit 1\n")
    assert types("--resume", "x", "train.steps=9")[0] == 2
    assert types("--resume", "x", "train.seed=1,2")[0] == 2
    assert types("--resume", "x", "--at-once", "2")[0] == 2
    code, _, err = types(*CPU, "run.name=x")
    assert code == 2 and f"nanoscale submit --resume {tmp_path}/runs/x" in err
    assert before == {
        path: path.read_bytes() for path in script.parent.rglob("*") if path.is_file()
    }

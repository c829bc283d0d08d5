"""The rules of launches on several hosts: each refuses, and its suggestions are accepted."""

from __future__ import annotations

import shlex
import socket
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import pytest

from nanoscale.cli.common.options import as_settings
from nanoscale.common.errors import UserError, Violation
from nanoscale.config.composing import frozen
from nanoscale.config.composing.compose import compose
from nanoscale.config.rules import Devices, Host, check
from nanoscale.config.rules.launcher import time_limit_s
from nanoscale.config.schema import Config
from nanoscale.config.values.provenance import Composed
from nanoscale.launch.transport.transport import read_hosts
from tests.support.recipes import changed

CPU = Devices("cpu", 2, cores=6)


def gpus(count: int, name: str = "NVIDIA H100") -> Devices:
    return Devices("cuda", count, (name,) * count, cores=16)


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("two", "hosts"):
        Path(name).write_text("h1 slots=4\nh2 slots=4\n")
    Path("odd").write_text("h1 slots=2\nh2 slots=4\nh3 slots=6\n")
    Path("here").write_text("localhost slots=2\n")
    Path("three").write_text("h1 slots=4\nh2 slots=4\nh3 slots=2\n")
    Path("six").write_text("me@fe80::1 slots=4\nh2 slots=4\n")
    Path("mixed").write_text("localhost slots=2\nh2 slots=2\n")
    Path("later").write_text("h2 slots=2\nlocalhost slots=2\n")


@pytest.fixture(autouse=True)
def _allocation(monkeypatch):
    """Set the environment of a SLURM job."""
    monkeypatch.setenv("SLURM_JOB_NODELIST", "s1,s2")
    monkeypatch.setenv("SLURM_GPUS_ON_NODE", "2")


def asked(line: str, config_file: Path | None = None) -> Composed:
    """Compose a command line of overrides and options."""
    words, options = [], {}
    rest = iter(shlex.split(line))
    for word in rest:
        if word.startswith("--"):
            options[word[2:].replace("-", "_")] = next(rest)
        else:
            words.append(word)
    if "num_gpus" in options:
        options["num_gpus"] = int(options["num_gpus"])
    settings = as_settings(**options)
    if config_file is None and not any(word.startswith("recipe=") for word in words):
        return changed(*words, options=settings)
    return compose(words, config_file=config_file, options=settings)


def checked(line: str, on: Devices = CPU, config_file: Path | None = None) -> Config:
    composed = asked(line, config_file)
    return check(composed, on, read_hosts(composed))


def violations(line: str, on: Devices = CPU, kind: str | None = None) -> list[Violation]:
    with pytest.raises(UserError) as caught:
        checked(line, on)
    assert kind is None or caught.value.kind == kind
    return caught.value.violations


def refusal(line: str, key: str, on: Devices = CPU, kind: str | None = None) -> Violation:
    """Return the only violation; each of its suggestions is accepted in place of the mistake."""
    (wrong,) = violations(line, on, kind)
    assert wrong.key == key
    for suggestion in wrong.suggestions:
        checked(instead(line, suggestion), on)
    return wrong


def instead(line: str, suggestion: str) -> str:
    """Return the line with a suggestion, without the part that it replaces."""
    options = ("hostfile", "include", "exclude")
    known = {"--num-nodes": "launcher.nodes", **{f"--{o}": f"launcher.{o}" for o in options}}
    said = shlex.split(suggestion)
    replaced = {known.get(word, word.partition("=")[0]) for word in said}
    kept: list[str] = []
    words: Iterator[str] = iter(shlex.split(line))
    for word in words:
        pair = [word, next(words)] if word.startswith("--") else [word]
        if known.get(word, word.partition("=")[0]) not in replaced:
            kept += pair
    return shlex.join([*kept, *said])


# --- refused --------------------------------------------------------------------------------------

ODD, SIX = (
    "--hostfile odd train.global_batch=24",
    "--hostfile six parallel.dp=3 train.global_batch=24",
)
SLOW = "launcher.exclude_stragglers"
THREE = "--hostfile three parallel.tp=4 train.global_batch=40"
SLURM = "launcher=slurm launcher.slurm.signal_before_s=1"
MOUNTS = "'launcher.container_mounts=[{}]'"
PDSH = "--hostfile two launcher=pdsh"
TIMES = [f"launcher.slurm.time={time}" for time in ("1:30:00", "2-00:00:00")]
REFUSED = [
    # line, the key that is named, words of its message, suggestions
    ("--hostfile two parallel.dp=4", "parallel.dp", "4·1·1·1 = 4 ranks, and the slots of 2 hosts = 8",
     ["parallel.dp=8", "--num-nodes 1"]),
    ("--hostfile two parallel.dp=8 --include h1@h2:1,3 train.global_batch=24", "parallel.dp", "",
     ["parallel.dp=6"]),
    (f"{ODD} parallel.dp=4", "parallel.dp", "", ["parallel.dp=12", "--include h1@h2:0,1"]),
    (f"{ODD} parallel.dp=24", "parallel.dp", "", ["parallel.dp=12"]),
    (SIX, "parallel.dp", "", ["parallel.dp=8", "--include '[fe80::1]:0,1,2'"]),
    (f"{SIX} --include h2:3,1@[fe80::1]", "parallel.dp", "",
     ["parallel.dp=6", "--include '[fe80::1]:0,1,2'"]),
    (f"{SIX} --exclude h2:0,1", "parallel.dp", "", ["parallel.dp=6"]),
    (f"{SIX} --num-gpus 4", "parallel.dp", "", ["parallel.dp=8"]),
    ("--hostfile odd train.global_batch=12 parallel.tp=4 --num-nodes 2", "parallel.tp",
     "the slots of 2 hosts = 6 is not a multiple", ["parallel.tp=2"]),
    (THREE, "parallel.tp", "", ["parallel.tp=2", "--num-nodes 2"]),
    ("--hostfile two --num-nodes 1:2 parallel.dp=8", "parallel.dp", "",
     ["parallel.dp=auto", "launcher.nodes=2"]),
    (f"--hostfile two launcher.device=cpu {SLOW}=2", SLOW, "launcher.nodes=null",
     [f"{SLOW}=null", "launcher.nodes=1:2"]),
    (f"--hostfile three --num-nodes 2 parallel.dp=8 launcher.device=cpu {SLOW}=2", SLOW, "launcher.nodes=2",
     [f"{SLOW}=null", "launcher.nodes=1:2 parallel.dp=auto"]),
    ("--hostfile two --num-nodes 2:1", "launcher.nodes", "", None),
    ("launcher=slurm --num-nodes 2:1", "launcher.nodes", "", None),
    ("--hostfile here launcher.device=cuda", "launcher.device", "", None),
    ("--hostfile mixed", "launcher.master_addr", "", [f"launcher.master_addr={socket.gethostname()}"]),
    ("--hostfile two launcher.master_addr=me@h1", "launcher.master_addr", "", ["launcher.master_addr=h1"]),
    *((f'--hostfile two "launcher.master_addr={address}"', "launcher.master_addr", "",
       ["launcher.master_addr=null"]) for address in ("-x", "'h1;id'", "a b")),
    (f"{PDSH} 'launcher.ssh_args=[-o, \"SetEnv=A=b c\"]'", "launcher.ssh_args", "", ["launcher.name=ssh"]),
    *((f'--hostfile two "cluster.python={value}"', "cluster.python", "", None)
      for value in ("''", "-")),
    *((f"launcher={name}", "launcher.hostfile", "", ["--hostfile hosts", "launcher.name=local"])
      for name in ("ssh", "pdsh")),
    *((f'"launcher.env={{{name}: \'s3cret\'}}"', f"launcher.env.{name}", "looks like a secret",
       [f"'launcher.pass_env=[{name}]'"])
      for name in ("HF_TOKEN", "aws_secret_access", "DB_PASSWORD", "WANDB_API_KEY")),
    *((f"launcher.env.{name}=1", f"launcher.env.{name}", "set by the launcher for every rank", [])
      for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "NANOSCALE_X")),
    ("launcher.env.OMP_NUM_THREADS=3", "launcher.env.OMP_NUM_THREADS", "", ["launcher.threads=3"]),
    *((f"'launcher.pass_env=[\"{entry}\"]'", "launcher.pass_env", f"holds {entry!r}", None)
      for entry in ("*", "1A", "A B", "A=1", "A**", "-A", "")),
    (f"{SLURM} 'launcher.slurm.time=\"1:30\"'", "launcher.slurm.time", "",
     ["launcher.slurm.time=1:30:00", "launcher.slurm.time=0:01:30"]),
    *((f"{SLURM} 'launcher.slurm.time=\"{text}\"'", "launcher.slurm.time", "", TIMES)
      for text in ("1:60:00", "1-24:00", "", "d")),
    *((f"{SLURM} 'launcher.slurm.time=\"{text}\"'", "launcher.slurm.time", "", [f"launcher.slurm.time={limit}"])
      for text, limit in (("8h", "8:00:00"), ("90 min", "1:30:00"), ("1d12h5m", "36:05:00"))),
    ("launcher=slurm 'launcher.slurm.time=\"0\"'", "launcher.slurm.time", "above 0", None),
    ("launcher=slurm 'launcher.slurm.time=\"2\"'", "launcher.slurm.signal_before_s", "120 s", None),
    (f"launcher=slurm {MOUNTS.format('/data:/data')}", "launcher.container_mounts", "", None),
    (f"launcher=slurm launcher.container=x.sqsh {MOUNTS.format('/data')}",
     "launcher.container_mounts", "", None),
    ("launcher=ssh --hostfile two launcher.container=i launcher.container_runtime=pyxis",
     "launcher.container_runtime", "is a part of SLURM", ["launcher.container_runtime=auto"]),
]  # fmt: skip


@pytest.mark.parametrize(
    ("line", "key", "words", "suggestions"), REFUSED, ids=[row[0] for row in REFUSED]
)
def test_a_refusal_names_the_key_and_its_advice_is_accepted(line, key, words, suggestions):
    if key.startswith("launcher.env."):
        (wrong,) = violations(line)
        assert wrong.key == key and all(map(checked, wrong.suggestions))
    else:
        wrong = refusal(line, key)
    assert words in wrong.message
    assert suggestions is None or wrong.suggestions == tuple(suggestions)
    assert "s3cret" not in repr(wrong)


def test_what_is_next_to_a_refusal_is_accepted():
    assert checked("--hostfile later").launcher.master_addr is None
    checked(f"{PDSH} 'launcher.ssh_args=[-o, \"SetEnv=A=b\"]'")
    checked(f"launcher=slurm launcher.container=x.sqsh {MOUNTS.format('/data:/data')}")
    two = "--hostfile three parallel.tp=4 parallel.dp=2"
    assert checked(f"{two} {violations(two)[0].suggestions[1]}")
    assert violations("--hostfile two parallel.dp=4", kind="layout")


# --- launchers ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "name"),
    [
        ("", "local"),
        ("--hostfile two", "ssh"),
        ("--hostfile here", "local"),
        ("--hostfile two launcher=pdsh", "pdsh"),
        ("--hostfile here launcher=pdsh", "pdsh"),
        ("--hostfile here launcher=ssh", "ssh"),
        ("--hostfile here launcher.name=ssh", "ssh"),
        ("launcher.hostfile=two", "ssh"),
    ],
)
def test_the_launcher_follows_from_the_hostfile(line, name):
    assert checked(line).launcher.name == name


@pytest.mark.parametrize("word", ["launcher=local", "launcher.name=local", "recipe=./mine.yaml"])
def test_a_hostfile_beside_a_launcher_that_was_chosen_is_refused(word):
    Path("mine.yaml").write_text("defaults: [debug, override /launcher: local]\n")
    line = f"{word} --hostfile two"
    wrong = refusal(line, "launcher.hostfile", kind="config")
    assert wrong.source == "command line: --hostfile"
    assert wrong.suggestions == ("launcher.hostfile=null", "launcher.name=ssh")


def test_a_recipe_decides_by_its_own_keys_too():
    Path("mine.yaml").write_text("defaults: [debug]\nlauncher: {name: local, hostfile: two}\n")
    assert violations("recipe=./mine.yaml")[0].source == "mine.yaml:2"
    Path("mine.yaml").write_text("defaults: [debug]\nlauncher: {hostfile: two}\n")
    assert checked("recipe=./mine.yaml").launcher.name == "ssh"
    assert checked("recipe=./mine.yaml launcher=local").launcher.hostfile is None


def test_this_machine_may_have_any_of_its_names():
    for name in ("127.0.0.1", "[::1]", socket.gethostname()):
        Path("own").write_text(f"{name} slots=3\n")
        config = checked("--hostfile own train.global_batch=9")
        assert (config.launcher.name, config.launcher.devices) == ("local", 3)
    Path("own").write_text("somebody-else@localhost slots=2\n")
    assert checked("--hostfile own").launcher.name == "ssh"


def test_this_machine_stands_in_one_line():
    Path("twice").write_text("localhost slots=2\n127.0.0.1 slots=2\n")
    (wrong,) = violations("--hostfile twice")
    assert "localhost (twice:1) and 127.0.0.1 (twice:2)" in wrong.message
    assert wrong.suggestions[0] == "localhost slots=4"
    assert checked("--hostfile twice launcher.name=ssh").parallel.dp == 4


def test_the_hostfile_is_found_from_every_folder(tmp_path):
    assert checked("--hostfile two").launcher.hostfile == str(tmp_path / "two")


# --- keys of launchers ----------------------------------------------------------------------------

IDLE = [
    ("--include h1", "launcher.include"),
    ("--exclude h1", "launcher.exclude"),
    ("--num-nodes 2", "launcher.nodes"),
    ("launcher.master_addr=h1", "launcher.master_addr"),
    ("'launcher.ssh_args=[-v]'", "launcher.ssh_args"),
    ("cluster.python=/usr/bin/python3", "cluster.python"),
    ("launcher.slurm.partition=gpu", "launcher.slurm.partition"),
    ("launcher.slurm.exclusive=false", "launcher.slurm.exclusive"),
    ("'launcher.slurm.setup=[date]'", "launcher.slurm.setup"),
]
SLURMS = ("launcher.nodes", "launcher.master_addr", "cluster.python")


@pytest.mark.parametrize(("said", "key"), IDLE)
def test_a_key_that_means_nothing_to_the_launcher_is_refused(said, key):
    (wrong,) = violations(said, kind="config")
    assert wrong.key == key
    assert "launcher.name=local" in wrong.message
    assert wrong.suggestions[0].strip("'").startswith(f"{key}=")
    checked(instead(said, wrong.suggestions[0]))
    for name in ("ssh", "pdsh"):
        line = f"launcher={name} --hostfile two {said}"
        if "slurm" in key:
            (wrong,) = violations(line)
            assert (wrong.key, wrong.suggestions[-1]) == (key, "launcher.name=slurm")
        else:
            checked(f"{line} parallel.dp=auto")
    if "slurm" in key or key in SLURMS:
        checked(f"launcher=slurm {said}")
    else:
        assert violations(f"launcher=slurm {said}")[0].key == key


def test_a_hostfile_of_this_machine_leaves_the_keys_of_other_hosts_alone():
    config = checked("--hostfile here 'launcher.ssh_args=[-v]' cluster.python=/opt/python")
    assert config.launcher.name == "local"


# --- numbers of ranks -----------------------------------------------------------------------------


def test_dp_takes_what_the_slots_leave():
    assert checked("--hostfile two").parallel.dp == 8
    assert checked("--hostfile two parallel.tp=2").parallel.dp == 4
    assert checked("--hostfile odd train.global_batch=12").parallel.dp == 12
    assert checked("--hostfile odd --exclude h3:5,4,3,2").parallel.dp == 8
    assert checked("--hostfile odd --num-gpus 2 train.global_batch=6").parallel.dp == 6


def test_hosts_keep_what_each_decides_for_itself():
    launcher = checked("--hostfile two", gpus(1)).launcher
    assert (launcher.device, launcher.devices, launcher.threads) == ("cuda", "auto", "auto")
    launcher = checked("--hostfile two launcher.threads=3 --num-gpus 2").launcher
    assert (launcher.devices, launcher.threads) == (2, 3)


def test_this_machine_by_a_hostfile_is_resolved_as_without():
    by_file = checked("--hostfile here").launcher
    assert (by_file.device, by_file.devices, by_file.threads) == ("cpu", 2, 3)
    assert asdict(by_file) == {
        **asdict(checked("launcher.devices=2").launcher),
        "hostfile": by_file.hostfile,
    }


def test_hosts_of_slurm_have_no_names():
    hosts = tuple(Host(f"node{n}", 4) for n in range(2))
    composed = asked("launcher=slurm launcher.nodes=2 launcher.devices=4")
    config = check(composed, CPU, hosts)
    assert (config.parallel.dp, config.launcher.name, config.launcher.device) == (
        8,
        "slurm",
        "cuda",
    )
    own = (Host(socket.gethostname(), 8),)
    assert check(composed, CPU, own).launcher.device == "cuda"
    composed = asked("launcher=slurm parallel.dp=4")
    with pytest.raises(UserError) as caught:
        check(composed, CPU, hosts)
    assert caught.value.violations[0].suggestions == ("parallel.dp=8", "--num-nodes 1")


# --- elastic --------------------------------------------------------------------------------------


def test_the_degree_of_an_elastic_job_is_open():
    config = checked("--hostfile two --num-nodes 1:2")
    assert (config.parallel.dp, config.launcher.nodes) == (8, "1:2")
    assert checked("--hostfile two --num-nodes 2:2 parallel.dp=8").parallel.dp == 8


def test_the_layout_of_an_elastic_job_is_that_of_the_hosts_that_are_left():
    composed = asked("--hostfile two --num-nodes 1:2 parallel.tp=2")
    hosts = read_hosts(composed)
    assert check(composed, CPU, hosts).parallel.dp == 4
    assert check(composed, CPU, hosts[1:]).parallel.dp == 2


# --- devices --------------------------------------------------------------------------------------


def test_gpus_of_other_hosts_are_not_looked_for_here():
    assert checked("--hostfile two launcher.device=cuda").launcher.device == "cuda"
    assert checked("--hostfile two launcher.device=cpu", gpus(8)).launcher.device == "cpu"
    assert checked("--hostfile here", gpus(2)).launcher.device == "cuda"


def test_names_of_gpus_here_say_nothing_of_those_elsewhere(monkeypatch):
    monkeypatch.setattr("nanoscale.common.versions.find_spec", lambda name: name)
    line = "precision=fp8 --hostfile"
    weak = gpus(2, "NVIDIA A100")
    assert checked(f"{line} two", weak).precision.fp8
    assert violations(f"{line} here", weak)[0].key == "precision.fp8"


def test_packages_here_say_nothing_of_those_elsewhere(monkeypatch):
    monkeypatch.setattr("nanoscale.common.versions.find_spec", lambda _: None)
    for line in ("logger=tensorboard", "optimizer=adamw8bit"):
        assert checked(f"{line} --hostfile two")
        assert checked(f"{line} --hostfile here cluster.python=/other/python launcher=ssh")
        assert len(violations(f"{line} --hostfile here")) == 1


def test_a_folder_of_each_host_is_not_looked_for_here(monkeypatch):
    monkeypatch.setattr("nanoscale.common.versions.find_spec", lambda name: name)
    words = "backend=deepspeed zero=stage3-offload zero.offload_optimizer=nvme zero.nvme_path=/no"
    assert checked(f"{words} --hostfile two").zero.nvme_path == "/no"
    assert violations(f"{words} --hostfile here")[0].key == "zero.nvme_path"


def test_more_slots_than_this_machine_has_gpus_are_refused_with_their_line():
    (wrong,) = violations("--hostfile here", gpus(1), kind="layout")
    assert (wrong.source, wrong.suggestions) == ("here:1", ("localhost slots=1",))
    Path("here").write_text("localhost slots=8\n")
    assert checked("--hostfile here --include localhost:1,0", gpus(2)).parallel.dp == 2
    (wrong,) = violations("--hostfile here --include localhost:7", gpus(2))
    assert "8 slots" in wrong.message


# --- variables ------------------------------------------------------------------------------------


def test_variables_of_every_plain_kind_are_taken():
    said = (
        "'launcher.env={NCCL_DEBUG: INFO, _x: 1, Y: 2.5, Z: true, TOKENIZERS_PARALLELISM: false}'"
    )
    assert len(checked(said).launcher.env) == 5
    assert checked("'launcher.pass_env=[WANDB_*, HF_TOKEN, _x]'").launcher.pass_env


def test_what_is_no_variable_is_refused():
    Path("mine.yaml").write_text(
        'defaults: [debug]\nlauncher:\n  env: {1A: 1, "A-B": 1, "A=B": 1, C: [1], D: null, E: {x: 1},'
        ' F: "a\\0b"}\n'
    )
    wrong = violations("recipe=./mine.yaml")
    assert [each.key.rpartition(".")[2] for each in wrong] == ["1A", "A-B", "A=B", *"CDEF"]
    assert {each.source for each in wrong} == {"mine.yaml:3"}


# --- slurm ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("90", 5400), ("1:30:00", 5400), ("0:00:59", 59), ("100:00:00", 360000), ("2-00", 172800),
        ("1-12:30", 131400), ("1-12:30:15", 131415),
    ],
)  # fmt: skip
def test_time_limits(text, seconds):
    assert time_limit_s(text) == seconds
    checked(f"launcher=slurm launcher.slurm.signal_before_s=1 'launcher.slurm.time=\"{text}\"'")


def test_directives_are_long_options_in_one_line():
    line = 'launcher=slurm \'launcher.slurm.directives=["-N 2", "--x=y", "mail-type=END"]\''
    wrong = refusal(line, "launcher.slurm.directives")
    assert wrong.suggestions == (
        '\'launcher.slurm.directives=["--N 2","--x=y","--mail-type=END"]\'',
    )
    Path("mine.yaml").write_text(
        "defaults: [debug, override /launcher: slurm]\nlauncher:\n  slurm:\n"
        '    directives: ["--a\\nrm -rf x"]\n    partition: "gpu\\nx"\n    qos: ""\n'
    )
    found = violations("recipe=./mine.yaml")
    assert sorted(each.key.rpartition(".")[2] for each in found) == [
        "directives",
        "partition",
        "qos",
    ]


# --- taken up again -------------------------------------------------------------------------------


def freeze(line: str, on: Devices = CPU) -> tuple[Config, Path]:
    composed = asked(line)
    config = check(composed, on, read_hosts(composed))
    path = Path("config.yaml")
    path.write_text(frozen.dump(config, composed.config))
    return config, path


@pytest.mark.parametrize(
    "line", ["--hostfile two", "--hostfile here", "--hostfile odd --num-gpus 2"]
)
def test_a_frozen_launch_repeats_itself(line, tmp_path, monkeypatch):
    config, path = freeze(f"{line} train.global_batch=24")
    (tmp_path / "sub").mkdir()
    monkeypatch.chdir(tmp_path / "sub")
    again = asked("", tmp_path / path)
    assert check(again, CPU, read_hosts(again)) == config


def test_a_local_run_goes_on_on_hosts():
    _, path = freeze("")
    config = checked("--hostfile two", config_file=path)
    assert (config.launcher.name, config.parallel.dp) == ("ssh", 8)
    assert (config.launcher.device, config.launcher.devices) == ("cuda", "auto")
    assert config.launcher.threads == "auto"


def test_a_run_on_hosts_goes_on_elsewhere():
    _, path = freeze("--hostfile two")
    config = checked("--hostfile odd train.global_batch=12", config_file=path)
    assert (config.launcher.name, config.parallel.dp) == ("ssh", 12)
    here = checked("--hostfile here", config_file=path).launcher
    assert (here.name, here.devices, here.device) == ("local", 2, "cpu")
    for word in ("launcher=local", "launcher.hostfile=null"):
        alone = checked(word, config_file=path)
        assert (alone.launcher.name, alone.launcher.hostfile, alone.parallel.dp) == (
            "local",
            None,
            1,
        )


def test_what_was_asked_for_stays_on_other_hosts():
    _, path = freeze("launcher.device=cpu launcher.threads=2 parallel.dp=8")
    config = checked("--hostfile two", config_file=path)
    assert (config.launcher.device, config.launcher.threads) == ("cpu", 2)


def test_a_fixed_layout_meets_changed_hosts_with_an_error_an_elastic_one_follows():
    for option, dp in (("", 8), ("--num-nodes 1:2", 8)):
        config, path = freeze(f"--hostfile two {option}")
        assert config.parallel.dp == dp
        Path("two").write_text("h1 slots=4\n")
        if option:
            assert checked("", config_file=path).parallel.dp == 4
        else:
            with pytest.raises(UserError, match="the slots of 1 host = 4"):
                checked("", config_file=path)
        Path("two").write_text("h1 slots=4\nh2 slots=4\n")

from __future__ import annotations

import os
import shlex
import site
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

import nanoscale
from nanoscale.common.errors import UserError
from nanoscale.config.resolved import resolved
from nanoscale.config.rules import Host
from nanoscale.config.schema import Cluster, Config, Launcher, Parallel, Train
from nanoscale.launch.lifecycle.command import agent_environment, plan_launch, read_plan
from nanoscale.launch.transport.transport import transport_of
from nanoscale.processes.session import Session
from nanoscale.runs.directory import RunDirectory, write_json
from tests.support.runs import create_run

RUN = RunDirectory(Path("/runs/x"))
CONFIG = resolved(
    Config(
        launcher=Launcher(device="cpu", devices=4, threads=3),
        parallel=Parallel(dp=2, tp=2, virtual_stages=1),
        train=Train(micro_batch=1, steps=1),
    )
)
HOSTS = (Host("me@n1", 3, source="hosts:1"), Host("n2", 1, devices=(5,)))
SSH = replace(CONFIG, launcher=Launcher(name="ssh", ssh_args=["-p", "2222"]))
NASTY = "a b$(touch x)`y`'\";&|\n!%h"


def plan(config=CONFIG, hosts=()):
    return plan_launch(config, RUN, attempt=2, hosts=hosts, master_port=1234)


def test_all_ranks_are_on_this_host():
    (host,) = plan().hosts
    assert (host.host, host.slots, host.ranks) == (socket.gethostname(), 4, (0, 1, 2, 3))
    assert host.command == (sys.executable, "-P", "-m", "nanoscale.agent")
    assert (plan().master_addr, plan().master_port) == ("127.0.0.1", 1234)


def test_hosts_take_ranks_in_their_order():
    made = plan(SSH, HOSTS)
    assert [(host.host, host.slots, host.ranks) for host in made.hosts] == [
        ("n1", 3, (0, 1, 2)),
        ("n2", 1, (3,)),
    ]
    assert made.hosts[1].devices == (5,)
    assert made.master_addr == "n1"
    other = replace(SSH, launcher=replace(SSH.launcher, master_addr="10.0.0.1"))
    assert plan(other, HOSTS).master_addr == "10.0.0.1"


def test_the_document_says_where_every_rank_is():
    mesh = plan().document()["mesh"]
    assert mesh["axes"] == {"pp": 1, "dp": 2, "cp": 1, "tp": 2}
    host = socket.gethostname()
    assert mesh["ranks"][2] == {
        "rank": 2, "host": host, "local_rank": 2, "pp": 0, "dp": 1, "cp": 0, "tp": 0
    }  # fmt: skip


def test_a_plan_is_read_as_it_was_written(tmp_path):
    run = create_run(tmp_path, "x")
    assert read_plan(run) is None
    made = plan(SSH, HOSTS)
    write_json(run.launch, made.document())
    assert read_plan(run) == made
    run.launch.write_text('{"hosts": []}')
    with pytest.raises(UserError, match=r"launch.json is not an attempt plan"):
        read_plan(run)


def test_the_port_is_the_runs_own_until_the_first_host_has_reserved_one():
    def port(name, config=CONFIG):
        return plan_launch(config, RunDirectory(Path(f"/runs/{name}")), 1).master_port

    assert port("x") == port("x") != port("y")
    fixed = replace(CONFIG, launcher=replace(CONFIG.launcher, master_port=7777))
    assert port("x", fixed) == 7777


def test_threads_reach_the_ranks():
    assert plan().environment["OMP_NUM_THREADS"] == "3"
    assert "OMP_NUM_THREADS" not in plan(SSH, HOSTS).environment


def test_the_allocator_of_gpus_is_as_somebody_chose(monkeypatch):
    monkeypatch.delenv("PYTORCH_CUDA_ALLOC_CONF", raising=False)
    gpus = replace(SSH, launcher=replace(SSH.launcher, device="cuda"))
    assert plan(gpus, HOSTS).environment["PYTORCH_ALLOC_CONF"] == "expandable_segments:True"
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "backend:cudaMallocAsync")
    assert "PYTORCH_ALLOC_CONF" not in plan(gpus, HOSTS).environment


def test_gloo_connects_ranks_of_large_jobs_only_when_they_talk(monkeypatch):
    monkeypatch.delenv("TORCH_GLOO_LAZY_INIT", raising=False)

    def environment(world):
        return plan_launch(replace(SSH, parallel=Parallel(dp=world)), RUN, 1, HOSTS).environment

    assert "TORCH_GLOO_LAZY_INIT" not in environment(256)
    assert environment(257)["TORCH_GLOO_LAZY_INIT"] == "1"
    monkeypatch.setenv("TORCH_GLOO_LAZY_INIT", "0")
    assert "TORCH_GLOO_LAZY_INIT" not in environment(1024)


def test_values_of_inherited_variables_are_nobodys_business(monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    monkeypatch.setenv("UNRELATED", "x")
    document = plan().document()
    assert "hf_secret" not in str(document)
    assert "HF_TOKEN" in document["inherited"] and "UNRELATED" not in document["inherited"]


def test_other_hosts_get_what_concerns_them_and_what_was_asked_for(monkeypatch):
    chosen = {"NCCL_DEBUG": "INFO", "WANDB_API_KEY": "k", "MY_A": "1", "MY_B": "2", "NOT": "3"}
    elsewhere = {"CUDA_VISIBLE_DEVICES": "3", "PYTHONPATH": "/here", "LD_LIBRARY_PATH": "/here"}
    for name, value in (chosen | elsewhere).items():
        monkeypatch.setenv(name, value)
    launcher = replace(SSH.launcher, pass_env=["WANDB_API_KEY", "MY_*"], env={"X": 1, "MY_B": "b"})
    config = replace(SSH, launcher=launcher)
    made = plan(config, HOSTS)
    got = agent_environment(config, made.world_size, os.environ)
    assert {
        "NCCL_DEBUG": "INFO",
        "WANDB_API_KEY": "k",
        "MY_A": "1",
        "MY_B": "b",
        "X": "1",
    }.items() <= (got.items())
    assert not {"NOT", *elsewhere} & set(got)


def test_ssh_asks_nothing_and_gives_up_in_time():
    command = plan(SSH, HOSTS).hosts[0].command
    words = list(command)
    assert words[0] == "ssh" and words[1:3] == ["-p", "2222"] and words[-2] == "me@n1"
    options = [words[i + 1] for i, word in enumerate(words) if word == "-o"]
    assert {"BatchMode=yes", "ConnectTimeout=20"} < set(options)
    assert not any("StrictHostKeyChecking" in option for option in options)


def test_nothing_is_interpreted_by_the_other_hosts_shell(monkeypatch):
    config = replace(SSH, cluster=Cluster(python=f"/opt/{NASTY}/python"))
    remote = plan(config, HOSTS).hosts[0].command[-1]
    seen = subprocess.run(
        ["sh", "-c", remote.replace("exec ", "printf '%s\\0' ", 1)], capture_output=True, check=True
    ).stdout.decode()
    words = seen.split("\0")[:-1]
    assert words == [f"/opt/{NASTY}/python", "-P", "-m", "nanoscale.agent"]


def test_an_interpreter_of_another_path_has_its_own_nanoscale(monkeypatch):
    monkeypatch.setattr(site, "getsitepackages", list)
    here = plan(SSH, HOSTS).hosts[0].command[-1]
    assert "PYTHONPATH=" in here and sys.executable in here
    there = replace(SSH, cluster=Cluster(python="/opt/python"))
    assert shlex.split(plan(there, HOSTS).hosts[0].command[-1]) == [
        "exec", "/opt/python", "-P", "-m", "nanoscale.agent"
    ]  # fmt: skip


def test_agents_of_hosts_run_in_an_image():
    launcher = replace(SSH.launcher, container="my/image", container_runtime="apptainer")
    config = replace(SSH, launcher=launcher, cluster=Cluster(python="python3"))
    remote = shlex.split(plan(config, HOSTS).hosts[0].command[-1])
    assert remote[:3] == ["exec", "apptainer", "exec"]
    assert remote[-5:] == ["my/image", "python3", "-P", "-m", "nanoscale.agent"]


@pytest.mark.parametrize("installed", [True, False])
def test_ranks_import_the_nanoscale_that_launched_them(monkeypatch, installed):
    root = str(Path(nanoscale.__file__).parent.parent)
    monkeypatch.setattr(site, "getsitepackages", lambda: [root] if installed else [])
    environment = transport_of(CONFIG).environment({"PYTHONPATH": "/mine"})
    assert environment.get("PYTHONPATH") == (None if installed else f"{root}:/mine")


def test_pdsh_and_srun_start_all_with_one_command():
    for name, program in (("pdsh", "pdsh"), ("slurm", "srun")):
        config = replace(SSH, launcher=replace(SSH.launcher, name=name))
        first, second = plan(config, HOSTS).hosts
        assert first.command == second.command and first.command[0] == program
        assert "--connect" in " ".join(first.command)


PDSH = replace(SSH, launcher=Launcher(name="pdsh"))


def test_pdsh_starts_the_chosen_interpreter_on_all_hosts():
    first, other = plan(replace(PDSH, cluster=Cluster(python="/opt/python")), HOSTS).hosts
    assert first.command == other.command
    assert first.command[first.command.index("-w") + 1] == "me@n1,n2"
    assert "/opt/python" in first.command[-1]


def test_launch_json_has_a_command_for_all_hosts_once():
    commands = [host["command"] for host in plan(PDSH, HOSTS).document()["hosts"]]
    assert commands == [plan(PDSH, HOSTS).hosts[0].command, ()]


def test_pdsh_fills_in_nothing():
    path = f"/runs {NASTY}"
    (command,) = transport_of(PDSH).commands(HOSTS[:1], Session("here:1", path))
    filled = command[-1].replace("%%", "\0").replace("%h", "n1").replace("\0", "%")  # as pdsh does
    assert shlex.split(filled)[-3:] == ["--connect", "here:1", path]


@pytest.mark.parametrize("config", [SSH, PDSH], ids=["ssh", "pdsh"])
def test_an_ipv6_address_loses_its_brackets(config):
    host = Host("me@[fd77::1]", 1)
    command = plan(config, (host,)).hosts[0].command
    assert "me@fd77::1" in command


def test_pdsh_hands_on_what_a_user_said_before_what_we_say():
    environment = transport_of(PDSH).environment({"PDSH_SSH_ARGS_APPEND": "-F mine"})
    words = environment["PDSH_SSH_ARGS_APPEND"].split()
    assert words[:2] == ["-F", "mine"] and "BatchMode=yes" in words
    assert environment["PDSH_RCMD_TYPE"] == "ssh"


def test_an_orphan_cleanup_takes_the_transport_of_the_agent():
    assert transport_of(CONFIG).cleanup_command(HOSTS[0], "m") is None
    for config, program in ((SSH, "ssh"), (PDSH, "pdsh")):
        command = transport_of(config).cleanup_command(HOSTS[0], "m")
        assert command[0] == program
        assert shlex.split(command[-1])[-4:] == ["-m", "nanoscale.agent", "--end-orphans", "m"]

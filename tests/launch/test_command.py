from __future__ import annotations

import socket
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from nanoscale.config.schema import Config, Launcher, Parallel
from nanoscale.launch import command
from nanoscale.launch.command import plan_local
from nanoscale.runs.directory import RunDirectory

RUN = RunDirectory(Path("/runs/x"))
CONFIG = Config(
    launcher=Launcher(device="cpu", devices=4, threads=3), parallel=Parallel(dp=2, tp=2)
)


def plan(config=CONFIG):
    return plan_local(config, RUN, attempt=2, world_size=4, master_port=1234)


def test_all_ranks_are_on_this_host():
    (host,) = plan().hosts
    assert (host.host, host.slots, host.ranks) == (socket.gethostname(), 4, (0, 1, 2, 3))
    assert host.command == (sys.executable, "-P", "-m", "nanoscale.agent", "/runs/x")
    assert (plan().master_addr, plan().master_port) == ("127.0.0.1", 1234)


def test_the_document_says_where_every_rank_is():
    mesh = plan().document()["mesh"]
    assert mesh["axes"] == {"pp": 1, "dp": 2, "cp": 1, "tp": 2}
    host = socket.gethostname()
    assert mesh["ranks"][2] == {
        "rank": 2, "host": host, "local_rank": 2, "pp": 0, "dp": 1, "cp": 0, "tp": 0
    }  # fmt: skip


def test_threads_and_attempt_reach_the_ranks():
    environment = plan().environment
    assert environment["OMP_NUM_THREADS"] == "3"
    assert environment["NANOSCALE_ATTEMPT"] == "2"
    assert environment["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] == "1"


def test_a_users_interface_for_gloo_is_left_alone(monkeypatch):
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    assert plan().environment["GLOO_SOCKET_IFNAME"] in ("lo", "lo0")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth7")
    assert "GLOO_SOCKET_IFNAME" not in plan().environment
    assert "GLOO_SOCKET_IFNAME" in plan().inherited


def test_values_of_inherited_variables_are_nobodys_business(monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    monkeypatch.setenv("UNRELATED", "x")
    document = plan().document()
    assert "hf_secret" not in str(document)
    assert "HF_TOKEN" in document["inherited"] and "UNRELATED" not in document["inherited"]


@pytest.mark.parametrize("installed", [True, False])
def test_ranks_import_the_nanoscale_that_launched_them(monkeypatch, installed):
    root = str(Path(command.nanoscale.__file__).parent.parent)
    monkeypatch.setenv("PYTHONPATH", "/mine")
    monkeypatch.setattr(command.site, "getsitepackages", lambda: [root] if installed else [])
    path = plan(replace(CONFIG)).environment.get("PYTHONPATH")
    assert path == (None if installed else f"{root}:/mine")

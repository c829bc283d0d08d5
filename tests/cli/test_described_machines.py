"""Words for a number of machines mean the same to every command."""

from __future__ import annotations

import json

import pytest

from nanoscale.cli.main import run as nanoscale
from tests.support.rows import exhaustive

JOB = ("recipe=gpt2", "parallel=dp", "run.name=x", "cluster=h100-sxm")
TWO_HOSTS = [
    ("--num-nodes", "2", "--num-gpus", "4"),
    ("launcher.nodes=2", "launcher.devices=4"),
    ("cluster.hosts=2", "launcher.devices=4"),
    ("cluster.hosts=2", "--num-gpus", "4"),
    ("cluster.hosts=2", "cluster.devices_per_host=4"),
]


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def shown(capsys, *words):
    assert nanoscale([*words, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


@pytest.mark.parametrize("words", TWO_HOSTS)
def test_two_hosts_of_four_devices(words, capsys):
    plan = shown(capsys, "plan", *JOB, *words)
    assert plan["layout"]["dp"] == 8
    same = shown(capsys, "plan", *JOB, *TWO_HOSTS[-1])
    assert plan["step_time_s"] == same["step_time_s"]
    whole_host = shown(capsys, "plan", *JOB, "cluster.hosts=1")
    assert plan["step_time_s"] > whole_host["step_time_s"], "the network is between the hosts"
    search = shown(capsys, "plan", *JOB, *words, "--search")
    assert search["layouts"][0]["layout"]["dp"] == 8
    assert nanoscale(["submit", *JOB, *words, "--dry-run"]) == 0
    script = capsys.readouterr().out
    assert "--nodes=2\n" in script and "--gpus-per-node=4\n" in script


@pytest.mark.slow
@pytest.mark.parametrize("words", [exhaustive(TWO_HOSTS[0]), TWO_HOSTS[2]])
def test_two_hosts_are_rehearsed(words, capsys):
    assert shown(capsys, "rehearse", *JOB, *words)["world_size"] == 8


def test_nodes_need_hosts_where_a_job_starts(capsys):
    assert nanoscale(["train", "recipe=debug", "--num-nodes", "2"]) == 2
    assert "--hostfile hosts" in capsys.readouterr().err


def test_a_job_on_another_machine_than_the_described_one_is_told(capsys):
    said = "is not the one that cluster.device=h100-sxm names"
    nanoscale(["train", "recipe=debug", "cluster=h100-sxm", "launcher.device=cpu", "--dry-run"])
    assert said in capsys.readouterr().err
    nanoscale(["train", "recipe=debug", "cluster=cpu", "launcher.device=cpu", "--dry-run"])
    assert "is not the one" not in capsys.readouterr().err


def test_the_reference_is_planned_with_other_hosts(capsys):
    plan = shown(capsys, "plan", "recipe=llama-1b", "parallel=dp", "--num-nodes", "2")
    assert plan["layout"]["dp"] == 16


def test_an_elastic_job_is_planned_for_all_of_its_hosts(capsys):
    assert shown(capsys, "plan", *JOB, "--num-nodes", "1:2")["layout"]["dp"] == 16

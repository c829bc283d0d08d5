"""The options of hosts: each is a key, and errors name both."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from nanoscale.cli.common.options import as_settings
from nanoscale.cli.common.request import CommandLine, request_new_run
from nanoscale.cli.jobs.resume import next_request
from nanoscale.cli.main import run as nanoscale
from nanoscale.config.composing.compose import compose
from nanoscale.config.composing.frozen import dump, load
from nanoscale.config.rules import Devices, check
from nanoscale.launch.lifecycle.prepare import new_run, provenance
from tests.support.runs import create_run

CPU = Devices("cpu", 2, cores=2)


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("nanoscale.launch.request.detect", lambda: CPU)
    Path("hosts").write_text("h1 slots=4\nme@h2 slots=8\n[fe80::1] slots=4\n")


def error(capsys, *arguments: str) -> dict:
    assert nanoscale([*arguments, "--json"]) == 2
    printed = capsys.readouterr()
    assert "error:" in printed.err
    return json.loads(printed.out)["error"]


def request(**options):
    settings = as_settings(hostfile="hosts", **options)
    return request_new_run(CommandLine(["recipe=debug"], options=settings), force=True)


def test_the_options_are_the_keys():
    said = as_settings("hosts", "a@b:0,2", None, "2:4", 3, True)
    by_option = compose(["recipe=debug"], options=said)
    by_key = compose(
        [
            "recipe=debug", "launcher.hostfile=hosts", 'launcher.include="a@b:0,2"',
            "launcher.nodes=2:4", "launcher.devices=3", "launcher.preflight=false",
        ]
    )  # fmt: skip
    assert by_option.config == by_key.config
    assert by_option.source("launcher.include") == "command line: --include"
    assert as_settings(num_nodes="4")["launcher.nodes"].value == 4
    assert as_settings() == {}


@pytest.mark.parametrize(
    "text", ["a b", "it's", 'say "x"', "back\\", "[::1]:0,2", "a=b", "~/x", "1"]
)
def test_no_value_of_an_option_needs_quotes(text):
    composed = compose(["recipe=debug"], options=as_settings(hostfile=f"/{text}", exclude=text))
    assert composed.config.launcher.hostfile == f"/{text}"
    assert composed.config.launcher.exclude == text


def test_a_request_has_its_hosts():
    asked = request(include="h2:1,3,5,7@h1")
    assert [(host.name, host.slots, host.devices) for host in asked.hosts] == [
        ("h1", 4, None),
        ("me@h2", 4, (1, 3, 5, 7)),
    ]
    assert asked.config.parallel.dp == 8
    assert request_new_run(CommandLine(["recipe=debug"])).hosts == ()


def test_a_request_is_for_the_hosts_and_slots_that_were_counted_out():
    asked = request(num_nodes="2", num_gpus=4)
    assert [(host.address, host.slots) for host in asked.hosts] == [("h1", 4), ("h2", 4)]
    assert (asked.config.launcher.name, asked.config.parallel.dp) == ("ssh", 8)
    assert asked.config.launcher.preflight
    assert not request(num_nodes="2", num_gpus=4, no_preflight=True).config.launcher.preflight


def test_who_set_a_key_is_written_down():
    written = provenance(request(num_nodes="1").composed)
    assert written["launcher.nodes"]["source"] == "command line: --num-nodes"
    assert written["launcher.nodes"]["overrode"][0]["source"] == "default"


def test_what_an_option_sets_stays_set_in_the_frozen_file():
    with new_run(request_new_run(CommandLine(["recipe=debug", "parallel.dp=auto"]))) as held:
        resumed = next_request(
            held.run, CommandLine([], held.run.config, options=as_settings(num_gpus=2))
        )
        assert (resumed.composed.requested.launcher.devices, resumed.config.parallel.dp) == (2, 2)
        assert resumed.composed.requested.parallel.dp == "auto"


@pytest.mark.parametrize("verb", ["train", "resume"])
def test_errors_name_the_option_the_key_and_the_line(capsys, verb):
    run = create_run(Path("runs").absolute(), "x")
    composed = compose(["recipe=debug", "run.name=x"])
    run.config.write_text(dump(check(composed, CPU), composed.config))
    first = ["train", "recipe=debug"] if verb == "train" else ["resume", "x", "--dry-run"]
    wrong = error(capsys, *first, "--hostfile", "hosts", "--include", "h1:9")["violations"]
    assert [(each["key"], each["source"]) for each in wrong] == [
        ("launcher.include", "command line: --include")
    ]
    assert wrong[0]["suggestions"] == ["launcher.include=null"]
    assert "hosts:1" in wrong[0]["message"]
    (wrong,) = error(capsys, *first, "--num-nodes", "0", "--hostfile", "hosts")["violations"]
    assert (wrong["key"], wrong["value"]) == ("launcher.nodes", 0)
    (wrong,) = error(capsys, *first, "--num-gpus", "0")["violations"]
    assert (wrong["key"], wrong["source"]) == ("launcher.devices", "command line: --num-gpus")
    Path("hosts").write_text("h1 slots=0\n")
    (wrong,) = error(capsys, *first, "--hostfile", "hosts")["violations"]
    assert wrong["source"] == "hosts:1"


def test_an_option_and_another_value_of_its_key_are_refused(capsys):
    words = ["train", "recipe=debug", "launcher.hostfile=other", "--hostfile", "hosts"]
    (wrong,) = error(capsys, *words)["violations"]
    assert (wrong["key"], wrong["source"]) == ("launcher.hostfile", "command line: --hostfile")
    assert "launcher.hostfile=other" in wrong["message"]


def test_an_option_that_names_a_path_reads_environment_variables(capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("CLUSTER", str(tmp_path / "cluster"))
    words = ["train", "recipe=debug", "--hostfile", "${oc.env:CLUSTER}/hosts"]
    (wrong,) = error(capsys, *words)["violations"]
    assert wrong["value"] == str(tmp_path / "cluster" / "hosts")
    (wrong,) = error(capsys, *words[:2], "--include", "${oc.env:CLUSTER}")["violations"]
    assert "only in keys that are paths" in wrong["message"]


def test_deepspeeds_spelling_is_understood_as_a_slip(capsys):
    for option in ("--num_nodes", "--num_gpus"):
        (wrong,) = error(capsys, "train", "recipe=debug", option, "2")["violations"]
        assert wrong["suggestions"] == [f"{option.replace('_', '-')} 2"]


def test_a_hostfile_of_this_machine_alone_is_a_local_launch(capsys):
    Path("hosts").write_text("localhost slots=2\n")
    assert nanoscale(["train", "recipe=debug", "--hostfile", "hosts", "--dry-run", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert (shown["world_size"], shown["hosts"][0]["slots"]) == (2, 2)
    assert shown["settings"]["device"] == "cpu, 1 thread a rank"


def test_a_dry_run_names_the_devices_of_each_host(capsys):
    Path("hosts").write_text("worker-0 slots=4\nworker-1 slots=4\n")
    words = ["train", "recipe=debug", "--hostfile", "hosts", "launcher.device=cuda", "--dry-run"]
    assert nanoscale([*words, "--include", "worker-1:0,3@worker-0:1@worker-0:1,0", "--json"]) == 0
    hosts = json.loads(capsys.readouterr().out)["hosts"]
    assert [(host["host"], host["devices"]) for host in hosts] == [
        ("worker-0", [0, 1]),
        ("worker-1", [0, 3]),
    ]
    assert nanoscale([*words, "--include", "worker-1:0,3@worker-0:2", "--json"]) == 2
    capsys.readouterr()
    assert nanoscale([*words, "--include", "worker-1", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["hosts"][0]["devices"] == [0, 1, 2, 3]
    assert nanoscale([*words, "--include", "worker-1:0,3"]) == 0
    rows = [line.split()[:4] for line in capsys.readouterr().out.splitlines()]
    assert [row for row in rows if row[1:2] == ["worker-1"]] == [
        ["0", "worker-1", "0", "0"],
        ["1", "worker-1", "1", "3"],
    ]


def test_a_run_goes_on_on_hosts():
    run = create_run(Path("runs").absolute(), "x")
    composed = compose(["recipe=debug", "run.name=x"])
    run.config.write_text(dump(check(composed, CPU), composed.config))
    resumed = next_request(
        run, CommandLine([], run.config, options=as_settings("hosts", num_nodes="1"), trust=True)
    )
    assert [host.name for host in resumed.hosts] == ["h1"]
    assert (resumed.config.launcher.name, resumed.config.parallel.dp) == ("ssh", 4)
    assert load(run.config).launcher.name == "local"


def test_deepspeeds_json_is_that_of_the_hosts(capsys):
    words = ["recipe=debug", "backend=deepspeed", "launcher.hostfile=hosts", "launcher.nodes=1"]
    assert nanoscale(["config", "show", "--deepspeed", *words]) == 0
    by_hosts = json.loads(capsys.readouterr().out)["train_micro_batch_size_per_gpu"]
    assert nanoscale(["config", "show", "--deepspeed", *words[:2], "--json"]) == 0
    alone = json.loads(capsys.readouterr().out)["train_micro_batch_size_per_gpu"]
    assert (by_hosts, alone) == (2, 8)

"""Conclusions from the facts of hosts; the facts are made up, no host is contacted."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from dataclasses import replace

import pytest

from nanoscale.cli.jobs import launching as cli
from nanoscale.common.devices import visible
from nanoscale.common.errors import UserError
from nanoscale.common.versions import versions
from nanoscale.config.resolved import resolved
from nanoscale.config.rules import Devices, Host
from nanoscale.config.schema import (
    Backend,
    Checkpoint,
    Cluster,
    Config,
    Data,
    Launcher,
    Logger,
    Model,
    Optimizer,
    Parallel,
    Precision,
    Run,
    Train,
    Zero,
)
from nanoscale.config.values.provenance import Composed
from nanoscale.launch.fleet.connections import Member
from nanoscale.launch.fleet.signals import Signals
from nanoscale.launch.preflight.preflight import (
    can_compute,
    judge,
    mixed_versions,
    require_ready,
    skew_s,
)
from nanoscale.launch.request import Request
from nanoscale.launch.transport.connection_errors import explain
from nanoscale.launch.transport.transport import transport_of
from nanoscale.runs.failure import agent_failure

SSH = Config(launcher=Launcher(name="ssh", device="cuda"))
ON_CPU = replace(SSH, launcher=replace(SSH.launcher, device="cpu"))
NOW = 1_000_000.0


def facts(number: int) -> dict:
    """Return the facts of a healthy host with 8 GPUs."""
    return {
        "hostname": f"n{number}",
        "machine": f"machine {number}",
        "executable": "/usr/bin/python",
        "versions": {
            "nanoscale": versions()["nanoscale"],
            "python": "3.12.1",
            "torch": "2.13.0",
            "deepspeed": "0.19.8",
            "driver": "590.1",
        },
        "devices": {"kind": "cuda", "count": 8, "names": ["H200"] * 8, "cores": 64},
        "gpu_memory_gib": [[140.0, 141.0]] * 8,
        "gpu_problem": None,
        "gpu_software": {
            "driver_cuda": [13, 1],
            "capabilities": [[9, 0]] * 8,
            "links": [[18, 16, 16, 5]] * 8,
            "fabric": ["400 Gb/sec"] * 8 + ["GPUDirect RDMA"],
            "infiniband": [],
            "torch": {
                "version": "2.13.0+cu130",
                "cuda": "13.0",
                "architectures": ["sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120"],
            },
            "compiler": {"path": "/usr/bin/gcc", "problem": ""},
        },
        "memory_gib": 900.0,
        "shared_memory_gib": 500.0,
        "root": {"path": "/runs", "visible": True, "problem": None, "free_gib": 100.0},
        "cache": {"path": "/cache", "problem": None, "free_gib": 100.0},
        "compile_cache": {"path": "/code", "problem": None, "free_gib": 100.0},
        "network": {
            "addresses": {"127.0.0.1": "lo", f"10.0.0.{number}": "eth0"},
            "asked_for": "n1",
            "found": ["10.0.0.1"],
            "interface": "eth0",
            "chosen": {},
        },
        "optional_packages": ["tensorboard", "torchao", "transformers", "triton"],
        "stale_locks": [],
        "port": 23456,
        "asked_at": NOW - 0.5,
        "time": NOW,
        "heard_at": NOW + 0.01,
    }


def members(count: int = 3) -> list[Member]:
    found = []
    for number in range(1, count + 1):
        member = Member(Host(f"n{number}", 8, source=f"hosts:{number}"))
        member.facts = facts(number)
        found.append(member)
    return found


def change(member: Member, path: str, value: object) -> None:
    """Set a fact by its dotted path."""
    place = member.facts
    *way, last = path.split(".")
    for name in way:
        place = place[name]
    place[last] = value


def lose(member: Member, words: str, code: int | None = 255) -> None:
    member.facts = None
    diagnosis, remedy = explain(member.host, transport_of(SSH), code, words, 20)
    member.lost = agent_failure(member.name, diagnosis, remedy)


def wrong(them: list[Member], config: Config = SSH) -> list[tuple[str, str]]:
    return [(v.host, v.check) for v in judge(them, config) if not v.good]


def the_wrong_one(them: list[Member], config: Config = SSH):
    (verdict,) = [verdict for verdict in judge(them, config) if not verdict.good]
    assert verdict.remedy
    return verdict


class Fleet:
    def __init__(self, them: list[Member]) -> None:
        self.members = them


def refusal(them: list[Member], config: Config = SSH) -> UserError | None:
    try:
        require_ready(Fleet(them), config)
    except UserError as error:
        return error
    return None


def test_healthy_hosts_are_good_in_every_respect():
    verdicts = judge(members(), SSH)
    assert all(verdict.good for verdict in verdicts)
    checks = {verdict.check for verdict in verdicts if verdict.host == "n2"}
    assert checks == {
        "ssh", "interpreter", "nanoscale", "python", "torch", "deepspeed", "driver", "devices",
        "GPUs", "GPU memory", "CUDA", "links", "memory", "run.root", "cache", "compile cache", "/dev/shm",
        "network", "clock",
    }  # fmt: skip
    assert [verdict.host for verdict in verdicts if verdict.check == "port"] == ["n1"]
    assert len({(v.host, v.check) for v in verdicts}) == len(verdicts)
    assert refusal(members()) is None


def test_mixed_versions_are_one_line_where_nothing_is_refused(capsys, monkeypatch):
    them = members(4)
    assert mixed_versions(them, SSH) is None
    change(them[1], "versions.torch", "2.9.0")
    change(them[2], "versions.torch", "2.9.0")
    change(them[2], "versions.nanoscale", "0.0.1 (abc)")
    change(them[3], "versions.driver", "470.1")
    change(them[3], "memory_gib", 0.1)
    launcher = replace(SSH.launcher, preflight=False, devices=8)
    run = Run(name="x", root="/tmp")
    layout, train = Parallel(dp=32, virtual_stages=1), Train(micro_batch=1, steps=1)
    config = resolved(replace(SSH, run=run, launcher=launcher, parallel=layout, train=train))
    request = Request(Composed(config, {}, None, ()), config, Devices("cpu", 1))
    monkeypatch.setattr(cli, "Fleet", lambda *_: nullcontext(Fleet(them)))
    monkeypatch.setattr(cli, "prepare", lambda *_: None)
    with cli.ready_fleet(request, Signals()):
        (line,) = capsys.readouterr().err.splitlines()
    assert "versions differ" in line and "launcher.preflight=false" in line
    assert "n3 has nanoscale 0.0.1 (abc), and" in line
    assert "n2 and n3 have torch 2.9.0, and 2.13.0 on n1 and n4" in line
    assert "driver" not in line and "memory" not in line


# --- versions -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["torch", "deepspeed", "driver"])
def test_the_host_that_differs_from_most_is_named(name):
    them = members(4)
    change(them[2], f"versions.{name}", "0.1")
    found = the_wrong_one(them)
    usual = facts(1)["versions"][name]
    assert (found.host, found.check) == ("n3", name)
    assert f"0.1, and {usual} on n1, n2 and n4" in found.finding
    assert usual in found.remedy


def test_of_two_versions_that_are_as_frequent_the_first_hosts_holds():
    them = members(2)
    change(them[1], "versions.torch", "2.12.0")
    found = the_wrong_one(them)
    assert (found.host, found.finding) == ("n2", "torch 2.12.0, and 2.13.0 on n1")


@pytest.mark.parametrize(
    ("package", "config", "hosts"),
    [
        ("tensorboard", replace(SSH, logger=Logger(tensorboard="on")), ["n1"]),
        ("torchao", replace(SSH, precision=Precision(fp8=True)), ["n1", "n2", "n3"]),
        ("torchao", replace(SSH, optimizer=Optimizer(name="adamw8bit")), ["n1", "n2", "n3"]),
        ("transformers", replace(SSH, model=Model(source="hf")), ["n1", "n2", "n3"]),
    ],
)
def test_a_package_that_the_configuration_needs_is_looked_for_where_the_ranks_run(
    package, config, hosts
):
    them = members()
    assert wrong(them, config) == []
    for member in them:
        change(member, "optional_packages", ["triton"])
    assert wrong(them, config) == [(host, package) for host in hosts]
    assert "which" in str(refusal(them, config).violations[0].message)
    assert wrong(them) == []


def test_torch_missing_everywhere_is_no_agreement():
    them = members()
    for member in them:
        change(member, "versions.torch", None)
        change(member, "versions.deepspeed", None)
    assert wrong(them) == [("n1", "torch"), ("n2", "torch"), ("n3", "torch")]
    deepspeed = replace(SSH, backend=Backend(name="deepspeed"))
    assert ("n1", "deepspeed") in wrong(them, deepspeed)


def test_what_the_job_does_not_need_does_not_stop_it():
    them = members()
    change(them[1], "versions.deepspeed", None)
    change(them[1], "versions.driver", "580.0")
    change(them[1], "versions.python", "3.12.9")
    assert [check for _, check in wrong(them)] == ["python", "deepspeed", "driver"]
    assert refusal(them) is None
    assert refusal(them, replace(SSH, backend=Backend(name="deepspeed"))) is not None
    change(them[1], "versions.python", "3.11.9")
    assert "Python 3.11.9" in refusal(them).violations[0].message


def test_the_launchers_nanoscale_is_the_measure_and_nothing_else_is_believed_of_another():
    them = members()
    for member in them[1:]:
        member.facts = {"versions": {**member.facts["versions"], "nanoscale": "0.0.9 (x)"}}
        member.facts |= {"hostname": member.name, "executable": "/opt/python"}
    assert wrong(them) == [("n2", "nanoscale"), ("n3", "nanoscale")]
    said = refusal(them).violations
    assert [(one.source, one.message.split(",")[0]) for one in said] == [
        ("n2 and n3", "nanoscale 0.0.9 (x)")
    ]


def test_an_agent_that_fell_for_its_version_is_recognised():
    them = members()
    lose(them[1], "KeyError: 'probe'\n", 1)
    them[1].nanoscale = "0.0.9 (x)"
    assert ("n2", "nanoscale") in wrong(them)
    them[1].nanoscale = versions()["nanoscale"]
    assert wrong(them) == [("n2", "agent")]


# --- hosts that are lost ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "check"),
    [
        ("ssh: connect to host n2 port 22: No route to host", "ssh"),
        ("@ WARNING: REMOTE HOST IDENTIFICATION HAS CHANGED! @", "ssh"),
        ("bash: line 1: /no/python: No such file or directory", "interpreter"),
        ("/usr/bin/python3: No module named nanoscale", "interpreter"),
        ("nanoscale.agent: does not see the launcher's folder of runs: x", "run.root"),
        ("Traceback (most recent call last):\nValueError: odd\n", "agent"),
    ],
)
def test_a_lost_host_has_one_verdict_by_what_was_lost(words, check):
    them = members()
    lose(them[1], words)
    found = the_wrong_one(them)
    assert (found.host, found.check) == ("n2", check)
    assert words.strip("@ \n").splitlines()[-1] in found.finding
    assert [verdict for verdict in judge(them, SSH) if verdict.host == "n2"] == [found]


def test_a_lost_node_is_a_finding_about_the_command_that_reaches_it():
    """It was one about ssh, which starts nothing in a job of SLURM."""
    for name, check in (("slurm", "srun"), ("pdsh", "ssh")):
        them = members()
        lose(them[1], "", None)
        assert ("n2", check) in wrong(them, replace(SSH, launcher=Launcher(name=name)))


def test_lost_hosts_are_listed_beside_others_and_alone_left_to_the_attempt():
    them = members()
    lose(them[1], "Connection refused")
    assert refusal(them) is None
    change(them[2], "memory_gib", 0.2)
    assert [one.source for one in refusal(them).violations] == ["n2", "n3"]


def test_the_others_are_not_blamed_for_a_first_host_that_is_lost():
    them = members()  # all were asked for the way to n1
    lose(them[0], "Connection refused")
    assert wrong(them) == [("n1", "ssh")]
    assert [v.host for v in judge(them, SSH) if v.check == "port"] == ["n2"]


def test_a_single_host_that_is_left_still_has_to_be_found_by_others():
    them = members(2)
    lose(them[1], "Connection refused")
    change(them[0], "network.found", [])
    assert ("n1", "network") in wrong(them)


# --- devices, memory, folders -----------------------------------------------------------------------


def test_fewer_gpus_than_slots_are_refused_with_the_line_to_correct():
    them = members()
    change(them[1], "devices", {"kind": "cuda", "count": 4, "names": ["H200"] * 4, "cores": 64})
    (found, other) = [verdict for verdict in judge(them, SSH) if not verdict.good]
    assert (found.check, found.remedy) == ("devices", "slots=4 at hosts:2")
    assert found.finding == "4 GPUs for 8 slots"
    assert (other.check, other.needed) == ("GPUs", False)
    assert wrong(them, ON_CPU) == []


def test_bf16_is_refused_where_gpus_do_not_have_it():
    job = replace(SSH, precision=Precision(compute="bf16"))
    them = members()
    change(them[1], "devices.names", ["H200"] * 7 + ["Tesla V100-SXM2-32GB"])
    assert refusal(them, job) is not None
    found = [v for v in judge(them, job) if v.check == "precision"]
    assert [(v.finding, v.remedy) for v in found] == [
        ("Tesla V100-SXM2-32GB has no bf16", "precision=fp16")
    ]
    for other in (replace(job, precision=Precision(compute="fp16")), SSH):
        assert refusal(them, other) is None


def test_gpus_chosen_by_a_filter_are_counted_as_what_is_left():
    them = members(2)
    host = Host("n2", 2, devices=(0, 7), source="hosts:2")
    them[1].host = host  # CUDA_VISIBLE_DEVICES=0,7 leaves two
    change(them[1], "devices", {"kind": "cuda", "count": 2, "names": ["H200"] * 2, "cores": 64})
    assert ("n2", "devices") not in wrong(them)
    change(them[1], "devices", {"kind": "cuda", "count": 1, "names": ["H200"], "cores": 64})
    assert ("n2", "devices") in wrong(them)


def test_chosen_gpus_that_do_not_exist_are_refused():
    assert visible([("H200", f"GPU-{number}") for number in range(4)], "6,7") == []
    them = members(2)
    them[1].host = Host("n2", 2, devices=(6, 7), source="hosts:2")
    change(them[1], "devices", {"kind": "cpu", "count": 64, "names": [], "cores": 64})
    (found,) = [verdict for verdict in judge(them, SSH) if not verdict.good and verdict.needed]
    assert found.finding == "0 GPUs for 2 slots, which are to be 6, 7"
    assert "--include or --exclude" in found.remedy


def test_gpus_that_are_in_use_unlike_or_silent_are_told_and_do_not_stop_a_job():
    them = members()
    change(them[0], "gpu_memory_gib", [[140.0, 141.0]] * 3 + [[20.0, 141.0]])
    change(them[1], "devices.names", ["H100"] * 8)
    change(them[2], "gpu_problem", "Driver/library version mismatch")
    found = {v.host: v for v in judge(them, SSH) if not v.good}
    assert "GPU 3 (121 of 141 GiB)" in found["n1"].finding
    assert "8 × H100" in found["n2"].finding
    assert "mismatch" in found["n3"].finding
    assert refusal(them) is None


def test_a_small_job_needs_little_room() -> None:
    small = resolved(
        replace(
            SSH,
            run=Run(name="x", root="/tmp"),
            launcher=replace(SSH.launcher, devices=8),
            model=Model(layers=1, hidden=8, heads=1, kv_heads=1, ffn=8, vocab=8),
            parallel=Parallel(dp=24, virtual_stages=1),
            train=Train(micro_batch=1, steps=1),
        )
    )
    them = members()
    change(them[1], "root.free_gib", 0.03)
    assert wrong(them, small) == []
    change(them[1], "root.free_gib", 0.01)
    assert "only 10.2 MiB free" in the_wrong_one(them, small).finding


def test_checkpoints_in_memory_need_shared_memory() -> None:
    config = resolved(
        replace(
            SSH,
            run=Run(name="x", root="/tmp"),
            launcher=replace(SSH.launcher, devices=8),
            model=Model(layers=1, hidden=512, heads=1, kv_heads=1, ffn=512, vocab=2**20),
            parallel=Parallel(dp=24, virtual_stages=1),
            train=Train(micro_batch=1, steps=1),
            checkpoint=Checkpoint(memory_every=1),
            zero=Zero(stage=3),
        )
    )
    them = members()  # 2^30 parameters in embedding and head, of which a host has a third, twice
    needed = 2 * 2 * 2**30 * 12 / 3 / 2**30
    change(them[1], "shared_memory_gib", 1.01 * needed)
    assert wrong(them, config) == []
    change(them[1], "shared_memory_gib", 0.99 * needed)
    verdict = the_wrong_one(them, config)
    assert verdict.needed and verdict.check == "/dev/shm"
    assert "--shm-size=17g" in verdict.remedy and "memory_every=0" in verdict.remedy


@pytest.mark.parametrize(
    ("path", "check", "needed"),
    [
        ("memory_gib", "memory", True),
        ("root.free_gib", "run.root", True),
        ("cache.free_gib", "cache", True),
        ("shared_memory_gib", "/dev/shm", False),
    ],
)
def test_too_little_room_is_told_with_the_amount(path, check, needed):
    them = members()
    change(them[1], path, 0.1)
    found = the_wrong_one(them)
    assert (found.host, found.check, found.needed) == ("n2", check, needed)
    assert "only 102.4 MiB" in found.finding and " needed" in found.finding
    change(them[1], path, None)
    assert wrong(them) == []  # unknown facts are not fault


def test_a_folder_of_runs_that_is_not_seen_or_written_is_refused():
    them = members()
    change(them[0], "root.visible", False)
    change(them[1], "root.problem", "Read-only file system")
    assert wrong(them) == [("n1", "run.root"), ("n2", "run.root")]
    messages = [one.message for one in refusal(them).violations]
    assert "does not see" in messages[0] and "Read-only file system" in messages[1]
    assert all(can_compute(verdict) for verdict in judge(them, SSH))
    local = replace(SSH, launcher=Launcher(name="local"))
    alone = members(1)
    change(alone[0], "root.visible", False)
    assert wrong(alone, local) == []  # this machine needs no probe file


def test_the_cache_matters_to_jobs_that_prepare_their_data():
    them = members()
    change(them[1], "cache.problem", "Permission denied")
    assert refusal(them) is not None
    assert refusal(them, replace(SSH, data=Data(source="megatron", path="/x"))) is None


def test_a_lock_of_a_compilation_stops_deepspeed_alone():
    them = members()
    change(them[1], "stale_locks", ["/c/py312_cu130/cpu_adam/lock"])
    assert the_wrong_one(them).remedy == "rm -- /c/py312_cu130/cpu_adam/lock"
    assert refusal(them) is None
    assert refusal(them, replace(SSH, backend=Backend(name="deepspeed"))) is not None


# --- clock and network ------------------------------------------------------------------------------


@pytest.mark.parametrize("true_skew", [-60.0, -7.0, 7.0, 60.0])
def test_a_clock_that_is_wrong_is_measured_by_the_way_back(true_skew):
    asked, answered, heard = NOW, NOW + 4.0, NOW + 4.01  # an agent took long to start
    seen = {"asked_at": asked, "heard_at": heard, "time": answered + true_skew}
    assert skew_s(seen) == pytest.approx(true_skew, abs=0.1)
    them = members()
    them[1].facts |= seen
    assert the_wrong_one(them).check == "clock"
    assert f"{abs(true_skew):.1f} s {'ahead of' if true_skew > 0 else 'behind'}" in (
        the_wrong_one(them).finding
    )


def test_a_journey_is_no_wrong_clock():
    for late_s in (0.0, 0.5, 8.0):  # the launcher was busy
        assert skew_s({"asked_at": NOW - 6, "heard_at": NOW + late_s, "time": NOW}) == 0.0


def test_a_name_that_leads_nowhere_elsewhere_or_home_is_told():
    cases = [
        (1, {"found": []}, "cannot resolve n1"),
        (1, {"found": ["10.9.9.9"]}, "not one of the addresses of n1"),
        (0, {"found": ["10.9.9.9"]}, "not one of its addresses"),
        (0, {"found": ["127.0.1.1"], "interface": "lo"}, "no other host can reach"),
        (1, {"found": ["127.0.0.1"], "interface": "lo"}, "no other host can reach"),
        (1, {"found": ["::1"], "interface": "lo"}, "no other host can reach"),
        (1, {"interface": None}, "there is no route to it"),
    ]
    for number, said, text in cases:
        them = members()
        them[number].facts["network"] |= said
        found = the_wrong_one(them)
        assert (found.host, found.check) == (them[number].name, "network")
        assert text in found.finding
        assert "launcher.master_addr" in found.remedy


def test_one_host_alone_meets_nobody():
    alone = members(1)
    change(alone[0], "network.found", [])
    assert wrong(alone) == []


@pytest.mark.parametrize(
    ("name", "chosen", "good"),
    [
        ("GLOO_SOCKET_IFNAME", "eth0", True),
        ("GLOO_SOCKET_IFNAME", "eth", False),
        ("GLOO_SOCKET_IFNAME", "eth0,ib0", False),
        ("NCCL_SOCKET_IFNAME", "eth", True),
        ("NCCL_SOCKET_IFNAME", "ib,eth", True),
        ("NCCL_SOCKET_IFNAME", "=eth", False),
        ("NCCL_SOCKET_IFNAME", "=eth0", True),
        ("NCCL_SOCKET_IFNAME", "^lo,docker", True),
        ("NCCL_SOCKET_IFNAME", "^lo,eth", False),
        ("NCCL_SOCKET_IFNAME", "ens3", False),
    ],
)
def test_an_interface_that_was_chosen_must_exist(name, chosen, good):
    them = members()
    change(them[1], "network.chosen", {name: chosen})
    assert wrong(them) == ([] if good else [("n2", "interface")])


def test_two_names_of_one_machine_are_told():
    them = members()
    change(them[2], "machine", "machine 1")
    found = the_wrong_one(them)
    assert (found.host, found.finding) == ("n3", "is the same machine as n1")
    assert refusal(them) is not None
    assert refusal(them, ON_CPU) is None


def test_a_port_that_is_taken_matters_on_the_first_host_only():
    them = members()
    fixed = replace(SSH, launcher=replace(SSH.launcher, master_port=29500))
    change(them[1], "port", None)
    assert wrong(them, fixed) == []
    change(them[0], "port", None)
    found = the_wrong_one(them, fixed)
    assert (found.host, found.check) == ("n1", "port") and "29500" in found.finding


# --- many hosts -------------------------------------------------------------------------------------


def test_equal_findings_of_many_hosts_are_one_line_with_one_remedy():
    them = members(20)
    for member in them[:16]:
        change(member, "root.visible", False)
    for number, member in enumerate(them[:5]):
        change(member, "memory_gib", 0.1 * number)
    said = refusal(them, replace(SSH, cluster=Cluster(python="/opt/python"))).violations
    assert [(one.source, one.message) for one in said] == [
        ("n1, n2 and 3 more", "only 0.0 to 409.6 MiB of host memory free; 1 GiB needed"),
        ("n1, n2 and 14 more", "does not see the folder of runs (/runs) of the launcher"),
    ]
    assert all(one.remedy for one in said)


def test_judging_grows_with_the_hosts_and_not_with_their_square():
    import time

    def seconds(count):
        them = members(1)
        them = [copy.copy(them[0]) for _ in range(count)]
        usual = facts(1)
        for number, member in enumerate(them):
            member.host = Host(f"h{number}", 8)
            member.facts = usual | {"machine": str(number)}
        began = time.process_time()
        judge(them, SSH)
        return time.process_time() - began

    seconds(10)
    few, many = min(seconds(200) for _ in range(3)), min(seconds(2000) for _ in range(3))
    assert many < 30 * few

"""The hostfile: every valid line, every invalid one, and the selection from it."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from nanoscale.common.errors import UserError, Violation
from nanoscale.config.composing.compose import Setting, compose
from nanoscale.config.rules import Devices, Host, check
from nanoscale.launch.hosts.hosts import parse
from nanoscale.launch.transport.transport import read_hosts
from tests.support.recipes import changed

HOSTS = """\
# the cluster

h1 slots=4
  me@h2   slots=8   # the big one
[fe80::1%eth0]\tslots=2
10.0.0.7 slots=4\r
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    Path("hosts").write_text(HOSTS)
    return tmp_path


def asked(*words, hostfile="hosts", **options):
    """Compose the request of a command line with options."""
    options = {"hostfile": hostfile, **options}
    settings = {f"launcher.{k}": Setting(v, f"command line: --{k}") for k, v in options.items()}
    return changed(*words, options=settings)


def hosts(*words, **options):
    return read_hosts(asked(*words, **options))


def violations(*words, **options) -> list[Violation]:
    with pytest.raises(UserError) as caught:
        hosts(*words, **options)
    return caught.value.violations


def slots(text: str) -> list[tuple[str, int]]:
    found, wrong = parse(text, "x")
    assert not wrong
    return [(host.name, host.slots) for host in found]


# --- lines ----------------------------------------------------------------------------------------


def test_a_hostfile_is_read_in_its_order():
    assert hosts() == (
        Host("h1", 4, None, "hosts:3"),
        Host("me@h2", 8, None, "hosts:4"),
        Host("[fe80::1%eth0]", 2, None, "hosts:5"),
        Host("10.0.0.7", 4, None, "hosts:6"),
    )
    assert [host.address for host in hosts()] == ["h1", "h2", "fe80::1%eth0", "10.0.0.7"]


def test_a_byte_order_mark_and_a_missing_last_line_end_do_no_harm():
    Path("hosts").write_bytes(b"\xef\xbb\xbfh1 slots=1\nh2 slots=2")
    assert [host.slots for host in hosts()] == [1, 2]


def test_nothing_is_read_without_a_hostfile_or_for_this_machine():
    assert read_hosts(changed()) == ()
    assert hosts("launcher=local", hostfile="nowhere") == ()
    assert len(hosts("launcher=pdsh")) == 4


BAD = [
    ("h1", "h1 slots=N"),
    ("h1 slots=0", "# h1"),
    ("h1 slots=-4", "h1 slots=4"),
    ("h1 slots=4097", "# h1"),
    ("h1 slots=99999999999999999999999999", "h1 slots=N"),
    ("h1 slots=٤", "h1 slots=N"),
    ("h1 slots=4x", "h1 slots=N"),
    ("h1 slots=1.5", "h1 slots=N"),
    ("h1 slots=", "h1 slots=N"),
    ("h1 slots = 8", "h1 slots=8"),
    ("h1 slots: 8", "h1 slots=8"),
    ("h1 8", "h1 slots=8"),
    ("h1 slots=4 max_slots=8", "h1 slots=4"),
    ("h1 slots=4 h2 slots=4", "h1 slots=4"),
    ("h1:8", "h1 slots=N"),
    ("h1:22 slots=8", "h1 slots=8"),
    ("[h1] slots=8", "HOST slots=8"),
    ("-oProxyCommand=id slots=8", "HOST slots=8"),
    ("me@-h1 slots=8", "HOST slots=8"),
    ("-me@h1 slots=8", "HOST slots=8"),
    ("@h1 slots=8", "HOST slots=8"),
    ("a@b@h1 slots=8", "HOST slots=8"),
    ("$(id)@h1 slots=8", "HOST slots=8"),
    ("fe80::1%$(id) slots=8", "HOST slots=8"),
    ("fe80::1% slots=8", "HOST slots=8"),
    ("fe80::xyz slots=8", "HOST slots=8"),
    ("hôte slots=8", "HOST slots=8"),
    (f"{'h' * 254} slots=8", "HOST slots=8"),
    *((f"h{character}1 slots=8", None) for character in "$`;|&<>(){}*?!~'\"\\/=,[]^+"),
    *((f"h{character}1 slots=8", None) for character in "\x00\x07\x0b\x0c\x1b\x1f\x7f\u00a0\u2028"),
]


@pytest.mark.parametrize(("line", "meant"), BAD, ids=[repr(line)[:30] for line, _ in BAD])
def test_a_wrong_line_is_refused_where_it_stands(line, meant):
    found, (wrong,) = parse(f"ok slots=1\n\n{line}\n", "hosts")
    assert (wrong.key, wrong.source) == ("", "hosts:3")
    assert wrong.message
    if meant is not None:
        assert wrong.suggestions == (meant,)
    (proposed,) = wrong.suggestions
    repaired = proposed.replace("HOST", "h9").replace("=N", "=1")
    assert not parse(f"ok slots=1\n{repaired}\n", "hosts")[1]
    assert found[0] == Host("ok", 1, None, "hosts:1")


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("h1", "h1"),
        ("h1", "H1"),
        ("me@h1", "you@h1"),
        ("::1", "[0:0::1]"),
        ("FE80::A%eth0", "fe80::a%eth0"),
    ],
)
def test_a_host_stands_in_one_line(first, second):
    _, (wrong,) = parse(f"{first} slots=4\n{second} slots=2\n", "hosts")
    assert wrong.source == "hosts:2"
    assert "hosts:1" in wrong.message
    assert wrong.suggestions == (f"# {second} slots=2",)


def test_other_hosts_are_not_the_same():
    lines = ["h1", "h1.example.org", "10.0.0.1", "10.0.0.10", "fe80::1%eth0", "fe80::1%eth1", "h_1"]
    assert [name for name, _ in slots("".join(f"{line} slots=1\n" for line in lines))] == lines


def test_everything_that_is_wrong_in_a_file_is_said_at_once():
    Path("hosts").write_text("h1\nh2 slots=0\nh3 slots=3\nh3 slots=3\n-x slots=1\n")
    wrong = violations(include="nobody:7", nodes="0:1")
    sources = [each.source for each in wrong]
    assert sources == ["hosts:1", "hosts:2", "hosts:4", "hosts:5", "command line: --nodes"]


# --- files ----------------------------------------------------------------------------------------


def test_a_missing_file_is_an_error_that_knows_its_neighbors():
    (wrong,) = violations(hostfile="hots")
    assert (wrong.key, wrong.value) == ("launcher.hostfile", "hots")
    assert wrong.source == "command line: --hostfile"
    assert wrong.suggestions == ("--hostfile hosts",)
    (wrong,) = violations(hostfile="no/such/folder")
    assert "does not exist" in wrong.message


@pytest.mark.parametrize("content", ["", "\n\n", "# nobody\n   # here\n"])
def test_a_file_without_hosts_is_an_error(content):
    Path("hosts").write_text(content)
    (wrong,) = violations()
    assert (wrong.source, wrong.message.partition(";")[0]) == ("hosts", "holds no host")


def test_what_is_no_text_file_is_refused():
    (wrong,) = violations(hostfile=".")
    assert "is a folder" in wrong.message
    Path("hosts").write_bytes(b"h1 slots=1\n\nh\xff slots=2\n")
    (wrong,) = violations()
    assert (wrong.source, wrong.message) == ("hosts:3", "is not UTF-8 text")
    (wrong,) = violations(hostfile="a\0b")
    assert "cannot be read" in wrong.message
    (wrong,) = violations(hostfile="/dev/zero")
    assert "bytes" in wrong.message


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads every file")
def test_a_file_that_may_not_be_read_is_refused():
    Path("hosts").chmod(0)
    (wrong,) = violations()
    assert "Permission denied" in wrong.message


def test_a_file_in_the_users_home_is_found(folder, monkeypatch):
    monkeypatch.setenv("HOME", str(folder))
    assert len(hosts(hostfile="~/hosts")) == 4


def test_a_key_of_a_recipe_names_its_line():
    Path("mine.yaml").write_text("defaults: [debug]\nlauncher:\n  hostfile: gone\n")
    with pytest.raises(UserError) as caught:
        read_hosts(compose(["recipe=./mine.yaml"]))
    assert caught.value.violations[0].source == "mine.yaml:3"


# --- numbers --------------------------------------------------------------------------------------


def taken(**options):
    return [(host.address, host.slots, host.devices) for host in hosts(**options)]


def test_the_first_hosts_are_taken_after_the_filter():
    assert [name for name, *_ in taken(nodes=2)] == ["h1", "h2"]
    assert [name for name, *_ in taken(nodes=2, exclude="h1")] == ["h2", "fe80::1%eth0"]
    assert [name for name, *_ in taken(nodes="1:3")] == ["h1", "h2", "fe80::1%eth0"]
    assert len(taken(nodes="2:99")) == 4


def test_more_hosts_than_there_are_is_an_error():
    (wrong,) = violations(nodes=5)
    assert (wrong.key, wrong.value, wrong.suggestions) == ("launcher.nodes", 5, ("--num-nodes 4",))
    assert "4 hosts of hosts" in wrong.message
    (wrong,) = violations(nodes="3:9", include="h1@h2")
    assert wrong.suggestions == ("--num-nodes 2:9",)
    assert "filter" in wrong.message


def test_a_number_of_devices_takes_the_first_slots_of_every_host():
    assert taken(devices=2) == [
        ("h1", 2, None),
        ("h2", 2, None),
        ("fe80::1%eth0", 2, None),
        ("10.0.0.7", 2, None),
    ]
    assert taken(devices=2, include="h2:7,1,4") == [("h2", 2, (1, 4))]


def test_a_host_with_fewer_slots_is_named_with_its_line():
    (wrong,) = violations(devices=5)
    assert (wrong.key, wrong.suggestions) == ("launcher.devices", ("--num-gpus 2",))
    assert "h1 (hosts:3), [fe80::1%eth0] (hosts:5), 10.0.0.7 (hosts:6)" in wrong.message
    assert [host.slots for host in hosts(devices=8, include="h2")] == [8]
    assert [wrong.key for wrong in violations(devices=9, nodes=9)] == [
        "launcher.nodes",
        "launcher.devices",
    ]


# --- scale ----------------------------------------------------------------------------------------


def test_two_thousand_hosts_are_no_work():
    Path("many").write_text("".join(f"node{n:04}.example.org slots=8\n" for n in range(2048)))
    composed = asked("parallel.dp=auto", "train.global_batch=16384", hostfile="many")
    best = 9.0
    for _ in range(3):
        start = time.process_time()
        found = read_hosts(composed)
        config = check(composed, Devices("cpu", 2), found)
        best = min(best, time.process_time() - start)
    assert (len(found), config.parallel.dp) == (2048, 16384)
    assert best < 0.05


def test_a_filter_of_two_thousand_strangers_is_refused_at_once():
    Path("many").write_text("".join(f"node{n} slots=8\n" for n in range(2048)))
    start = time.process_time()
    wrong = violations(hostfile="many", include="@".join(f"nod{n}:9" for n in range(2048)))
    assert len(wrong) == 2048
    assert time.process_time() - start < 3

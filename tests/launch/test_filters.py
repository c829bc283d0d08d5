"""Filters of hosts, compared with DeepSpeed's own parser."""

from __future__ import annotations

import random
import re
from functools import partial
from pathlib import Path

import pytest

from nanoscale.common.errors import UserError, Violation
from nanoscale.config.composing.compose import Setting
from nanoscale.config.rules import Host
from nanoscale.launch.hosts.hosts import parse, read_filter, with_filter
from nanoscale.launch.transport.transport import read_hosts
from tests.support.recipes import changed

HOSTS = "w0 slots=4\nw1 slots=4\nme@w2 slots=1\nfe80::1%eth0 slots=4\n"


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("hosts").write_text(HOSTS)


include = partial(with_filter, includes=True)
exclude = partial(with_filter, includes=False)


def chosen(text: str, keep=include, hosts: str = HOSTS) -> dict[str, list[int]]:
    """Return the hosts of a legal filter: host → devices."""
    there, wrong = parse(hosts, "hosts")
    named, problems = read_filter(text, there, "hosts")
    assert not wrong and not problems
    return {h.address: list(h.devices or range(h.slots)) for h in keep(there, named)}


def violations(**filters: str) -> list[Violation]:
    options = {
        f"launcher.{name}": Setting(value, f"command line: --{name}")
        for name, value in {"hostfile": "hosts", **filters}.items()
    }
    with pytest.raises(UserError) as caught:
        read_hosts(changed(options=options))
    return caught.value.violations


def test_what_the_filters_leave():
    assert chosen("w1:2,0@w0") == {"w0": [0, 1, 2, 3], "w1": [0, 2]}
    assert chosen("w1:0@w1:2") == {"w1": [0, 2]}
    assert chosen("w1:1,1") == {"w1": [1]}
    assert chosen("w1:1@w1:0,1") == {"w1": [0, 1]}
    assert chosen("w1: 0, 2 @ w2") == {"w1": [0, 2], "w2": [0]}
    assert chosen("W1") == {"w1": [0, 1, 2, 3]}
    assert chosen("[fe80::1%eth0]:3") == {"fe80::1%eth0": [3]}
    assert chosen("[FE80:0::1%eth0]") == {"fe80::1%eth0": [0, 1, 2, 3]}
    assert chosen("w1:0@w2@[fe80::1%eth0]", exclude) == {"w0": [0, 1, 2, 3], "w1": [1, 2, 3]}
    assert chosen("w2:0", exclude).keys() == {"w0", "w1", "fe80::1%eth0"}


def test_hosts_that_no_filter_names_keep_their_devices_open():
    there, _ = parse(HOSTS, "hosts")
    named, _ = read_filter("w0:1@w1", there, "hosts")
    assert include(there, named)[1] == Host("w1", 4, None, "hosts:2")
    assert exclude(there, named)[0] == Host("w0", 3, (0, 2, 3), "hosts:1")
    assert exclude(there, named)[1] == Host("me@w2", 1, None, "hosts:3")


def test_every_legal_filter_means_what_it_means_to_deepspeed():
    runner = pytest.importorskip("deepspeed.launcher.runner")
    dice = random.Random(5)
    for _ in range(300):
        counts = {f"w{n}": dice.randint(1, 6) for n in range(dice.randint(1, 6))}
        hosts = "".join(f"{name} slots={count}\n" for name, count in counts.items())
        text = _legal_filter(dice, counts)
        pool = runner._parse_hostfile(hosts.splitlines())
        for keep, arguments in ((include, (text, "")), (exclude, ("", text))):
            theirs = runner.parse_inclusion_exclusion(pool, *arguments)
            ours = chosen(text, keep, hosts)
            assert (list(ours.items())) == list(theirs.items()), (hosts, text, keep)


def _legal_filter(dice: random.Random, counts: dict[str, int]) -> str:
    entries = []
    for name in dice.sample(list(counts), dice.randint(1, len(counts))):
        slots = dice.choices(range(counts[name]), k=dice.randint(0, counts[name]))
        cut = dice.randint(0, len(slots))
        parts = [part for part in (slots[:cut], slots[cut:]) if part]
        entries += [f"{name}:{','.join(map(str, part))}" for part in parts] or [name]
    dice.shuffle(entries)
    return "@".join(entries)


WRONG = [
    ("w9", "w9, which is not in hosts (w0, w1, w2, fe80::1%eth0)"),
    ("w01", "w01, which is not in hosts"),
    ("w0@ww1:0,2", "ww1, which is not in hosts"),
    ("strange", "strange, which is not in hosts"),
    ("w0:4", "slot 4 of w0, which has slots 0 to 3 (hosts:1)"),
    ("w2:1", "slot 1 of w2, which has slot 0 (hosts:3)"),
    ("w0:1,9", "slot 9"),
    ("w0:0-2", "the range 0-2 of w0; list slots one by one"),
    ("w0:0-1,3@w1", "the range 0-1"),
    ("w0:1-99999999", "the range"),
    ("w0@w0", "w0 twice"),
    ("w0@w0:1", "w0 twice"),
    ("w0:1@w0", "w0 twice"),
    ("w0:", "'' of w0, which is not a slot number"),
    ("w0:x", "'x' of w0, which is not a slot number"),
    ("w0:-1", "'-1' of w0, which is not a slot number"),
    ("w0:+1", "which is not a slot number"),
    ("w0:1_0", "which is not a slot number"),
    ("w0:٣", "which is not a slot number"),
    ("w0@", "nothing beside it"),
    ("w0@@w1", "nothing beside it"),
    ("", "nothing beside it"),
    (":0", "names no host"),
    ("me@w2:0", "the user me; write hosts without users here"),
    ("fe80::1%eth0", "in brackets"),
    ("fe80::1%eth0:0,2", "in brackets"),
    ("fe80::2:0", "in brackets"),
    ("w0:0:1", "in brackets"),
    ("[w0]:0:1", "in brackets"),
]


@pytest.mark.parametrize(("text", "message"), WRONG)
@pytest.mark.parametrize("name", ["include", "exclude"])
def test_a_wrong_filter_is_refused_and_what_it_proposes_is_legal(name, text, message):
    (wrong,) = violations(**{name: text})
    assert (wrong.key, wrong.value) == (f"launcher.{name}", text)
    assert wrong.source == f"command line: --{name}"
    assert message in wrong.message
    assert wrong.suggestions == (f"launcher.{name}=null",)


def test_all_entries_are_judged():
    assert len(violations(include="w0:0-1@w9:7@w1:8@w1:8")) == 4


def test_include_and_exclude_exclude_each_other():
    (wrong,) = violations(include="w0", exclude="w1")
    assert (wrong.key, wrong.source) == ("launcher.exclude", "command line: --exclude")
    assert wrong.suggestions == ("launcher.exclude=null", "launcher.include=null")


def test_hosts_of_an_exclude_file_are_not_used():
    Path("bad").write_text("\ufeff# known faults\n\nW0  # a fan\nunknown\nme@w2")
    key = Setting("bad", "command line")
    options = {"launcher.hostfile": Setting("hosts", ""), "launcher.exclude_file": key}
    assert [it.address for it in read_hosts(changed(options=options))] == ["w1", "fe80::1%eth0"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "No such file"),
        (b"\xff", "not UTF-8 text"),
        (b"# none\nw0, w1", "bad:2"),
        (HOSTS.encode(), "write one host a line"),
        (b"w0\nw1\nw2\n[fe80:0::1%eth0]", "names every host (4)"),
    ],
)
def test_a_wrong_exclude_file_is_refused(text, message):
    if text is not None:
        Path("bad").write_bytes(text)
    wrong = violations(exclude_file="bad")[0]
    assert message in f"{wrong.source} {wrong.message}"
    assert wrong.suggestions == (() if wrong.key == "" else ("launcher.exclude_file=null",))


def test_a_filter_that_leaves_nothing_is_refused():
    text = "w0@w1:0,1,2,3@w2:0@[fe80::1%eth0]"
    (wrong,) = violations(exclude=text)
    assert re.search("leaves no slot of hosts", wrong.message)

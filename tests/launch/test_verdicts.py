"""Equal verdicts of many hosts are shown once."""

from __future__ import annotations

import pytest

from nanoscale.launch.preflight.verdicts import Verdict, grouped, join_names


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (1, "n1"),
        (2, "n1 and n2"),
        (3, "n1, n2 and n3"),
        (4, "n1, n2 and 2 more"),
        (16, "n1, n2 and 14 more"),
    ],
)
def test_few_hosts_are_named_and_more_are_counted(count, text):
    assert join_names([f"n{number}" for number in range(1, count + 1)]) == text


def test_what_differs_by_the_hosts_name_alone_is_the_same():
    said = "ssh: connect to host {} port 22: No route to host"
    remedy = "'launcher.ssh_args=[-l,{}]', or --exclude {}"
    several = [
        Verdict(host, "ssh", False, said.format(address), remedy.format(host, host))
        for host, address in (("n1", "10.0.0.1"), ("n10", "10.0.0.10"), ("x", "fe80::1"))
    ]
    (group,) = grouped(several)
    assert group.hosts == ["n1", "n10", "x"]
    assert group.finding == "ssh: connect to host HOST port 22: No route to host"
    assert group.remedy == "'launcher.ssh_args=[-l,HOST]', or --exclude HOST"


@pytest.mark.parametrize("text", ["{}0 is lost", "{}-b is lost", "on-{} is lost", "a{} is lost"])
def test_a_name_within_another_is_not_replaced(text):
    several = [Verdict(host, "x", False, text.format(host), "y") for host in ("n1", "n2")]
    assert [group.finding for group in grouped(several)] == [verdict.text for verdict in several]


def test_what_is_said_of_one_host_keeps_its_name():
    (group,) = grouped([Verdict("n1", "ssh", False, "n1 port 22: closed", "ssh n1")])
    assert (group.finding, group.remedy) == ("n1 port 22: closed", "ssh n1")


def test_amounts_become_a_span():
    free = [Verdict(f"n{n}", "memory", True, "{} GiB free", amount=n / 4) for n in (3, 1, 2)]
    assert [verdict.finding for verdict in free] == ["0.8 GiB free", "0.2 GiB free", "0.5 GiB free"]
    assert [group.finding for group in grouped(free)] == ["0.2 to 0.8 GiB free"]
    assert [group.finding for group in grouped(free[:1] * 2)] == ["0.8 GiB free"]


def test_another_finding_check_or_judgement_is_another_group():
    one = Verdict("n1", "torch", True, "torch 1")
    others = [
        Verdict("n2", "torch", True, "torch 2"),
        Verdict("n2", "driver", True, "torch 1"),
        Verdict("n2", "torch", False, "torch 1"),
    ]
    assert len(grouped([one, *others])) == 4


def test_remedies_of_what_is_good_keep_nobody_apart():
    healthy = [Verdict(host, "port", True, "free", f"look at {host}-x") for host in ("a", "b")]
    assert len(grouped(healthy)) == 1

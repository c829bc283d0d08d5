from __future__ import annotations

import os
import pwd
import socket

import psutil
import pytest

from nanoscale.config.machines import address, canonical, is_here, is_loopback, problem


@pytest.mark.parametrize(
    ("name", "plain"),
    [
        ("h1", "h1"), ("me@h1.example.org", "h1.example.org"), ("::1", "::1"), ("me@::1", "::1"),
        ("[fe80::1%eth0]", "fe80::1%eth0"), ("me@[::1]", "::1"), ("10.0.0.7", "10.0.0.7"), ("node_1", "node_1"),
    ],
)  # fmt: skip
def test_a_legal_name_and_its_address(name, plain):
    assert problem(name) == ""
    assert address(name) == plain


@pytest.mark.parametrize("name", ["", "me@", "-h", "a b", "h\n", "h;id", "[h1]", "[::1", "h:", "%"])
def test_what_ssh_or_a_shell_could_misread_is_no_name(name):
    assert problem(name)


def test_two_names_of_one_host_are_known_by_sight():
    assert canonical("me@H1.Example.org") == canonical("h1.example.ORG")
    assert canonical("[0:0:0:0:0:0:0:1]") == canonical("::1")
    assert canonical("1.2.3.4.5") == "1.2.3.4.5"


def test_this_machine_is_known_by_its_names_and_addresses():
    name = socket.gethostname()
    assert is_here("localhost") and is_here("LocalHost") and is_here("127.3.2.1") and is_here("::1")
    assert is_here(name) and is_here(name.upper()) and is_here(name.partition(".")[0])
    for entries in psutil.net_if_addrs().values():
        for entry in entries:
            if entry.family in (socket.AF_INET, socket.AF_INET6):
                assert is_here(entry.address)
    assert is_here(f"{pwd.getpwuid(os.getuid()).pw_name}@localhost")


def test_other_machines_and_other_accounts_are_not_here():
    assert not is_here("192.0.2.1") and not is_here("2001:db8::1")  # for documentation only
    assert not is_here("localhost.example.org") and not is_here("h1")
    assert not is_here("somebody-else@localhost")
    assert not is_here(f"{socket.gethostname()}.elsewhere.example")


def test_no_name_server_is_asked(monkeypatch):
    def asked(*_):
        raise AssertionError("a name server was asked")

    for function in ("getaddrinfo", "gethostbyname", "gethostbyaddr", "getfqdn"):
        monkeypatch.setattr(socket, function, asked)
    assert not is_here("login.example.org")


def test_loopback_names_mean_every_machine():
    assert all(map(is_loopback, ("localhost", "127.0.0.1", "::1", "me@[::1]")))
    assert not is_loopback(socket.gethostname()) and not is_loopback("10.0.0.1")

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from nanoscale.config.rules import Host
from nanoscale.config.schema import Config, Launcher
from nanoscale.launch.hosts.hosts import read_filter, with_filter
from nanoscale.launch.transport.connection_errors import explain
from nanoscale.launch.transport.transport import Transport, transport_of
from tests.support.recipes import changed

NOISE = """[W1121 21:45:03.8 socket.cpp:207] [c10d] The hostname of the client socket cannot be retrieved.
/usr/lib/python3/resource_tracker.py:254: UserWarning: resource_tracker: There appear to be 4 leaked objects
  warnings.warn('resource_tracker: There appear to be %d '
"""


def by(launcher: Launcher) -> Transport:
    return transport_of(Config(launcher=launcher))


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("", "code 1"),
        (NOISE, "code 1"),
        (f"MemoryError\n{NOISE}", "code 1 (MemoryError)"),
        (f"{NOISE}\nquota exceeded for me\n\n", "code 1 (quota exceeded for me)"),
    ],
)
def test_the_last_words_of_an_agent_are_told_but_no_noise(words: str, said: str) -> None:
    diagnosis, _ = explain(Host("me@n1", 1), by(Launcher(name="ssh")), 1, words, 20.0)
    assert diagnosis.endswith(f"it ended with {said}")


HOSTS = [Host(name, 4, source="hosts:1") for name in ("me@n1", "node2.lab", "10.0.0.3", "fe80::4")]
KEY = "AAAAC3NzaC1lZDI1NTE5AAAAI" + "A" * 43
"""a public key of ssh-ed25519"""
ERRORS = {
    "Permission denied": "authorized_keys",
    "Connection refused": "launcher.ssh_args=[-pPORT]",
    "does not see the launcher's folder of runs": "run.root=FOLDER",
    "No module named nanoscale": "cluster.python",
    "No such file or directory": "cluster.python",
}
OVERRIDE = re.compile(r"'(?:[a-z]+\.[^'=]+=(?:[^']|'\"'\"')*)'|\b[a-z]+\.[\w.-]+=[\w/.-]+")
"""an override within a sentence"""


@pytest.mark.parametrize("host", HOSTS, ids=lambda host: host.name)
@pytest.mark.parametrize("words", ERRORS)
def test_the_override_that_a_remedy_names_is_typed_back(words: str, host: Host) -> None:
    _, remedy = explain(host, by(Launcher(name="ssh")), 255, words, 20.0)
    assert ERRORS[words] in remedy
    for override in OVERRIDE.findall(remedy):
        (word,) = shlex.split(override)
        config = changed(word.replace("PORT", "2222")).config
        if "cluster.python" in word:
            assert config.cluster.python == "/path/to/python"
        if "ssh_args" in word:
            assert config.launcher.ssh_args == ["-p2222"]


needs_ssh = pytest.mark.skipif(
    shutil.which("ssh") is None, reason="ssh is not installed: apt-get install openssh-client"
)


@needs_ssh
@pytest.mark.parametrize("host", HOSTS, ids=lambda host: host.name)
@pytest.mark.parametrize(
    ("ssh_args", "port"),
    [([], 22), (["-p22"], 22), (["-v", "-p", "2222"], 2222), (["-oPort=2222"], 2222)],
    ids=str,
)
def test_the_commands_for_a_changed_host_key_forget_it_and_lead_there(
    ssh_args: list[str], port: int, host: Host, tmp_path: Path
) -> None:
    launcher = Launcher(name="ssh", ssh_args=ssh_args)
    _, remedy = explain(host, by(launcher), 255, "Host key verification failed", 20.0)
    forget, ssh = (shlex.split(it) for it in remedy.split("`")[1::2])
    resolved = subprocess.run([ssh[0], "-G", *ssh[1:]], capture_output=True, text=True, check=True)
    leads_to = dict(line.split(" ", 1) for line in resolved.stdout.splitlines())
    assert leads_to["hostname"] == host.address and leads_to["port"] == str(port)
    assert leads_to["user"] == "me" or "@" not in host.name

    known, other = tmp_path / "known_hosts", "elsewhere.example.org ssh-ed25519 " + KEY
    kept_as = host.address if port == 22 else f"[{host.address}]:{port}"
    known.write_text(f"{kept_as} ssh-ed25519 {KEY}\n{other}\n")
    subprocess.run([*forget, "-f", known], check=True, capture_output=True)
    assert known.read_text() == f"{other}\n"


@needs_ssh
@pytest.mark.parametrize("ssh_args", [[], ["-p", "2222"]], ids=str)
def test_the_command_that_must_work_is_what_ssh_reads(ssh_args: list[str]) -> None:
    launcher = Launcher(name="ssh", ssh_args=ssh_args)
    _, remedy = explain(HOSTS[0], by(launcher), 255, "Permission denied", 20.0)
    ssh = shlex.split(remedy.split("`")[1])
    resolved = subprocess.run([ssh[0], "-G", *ssh[1:]], capture_output=True, text=True, check=True)
    assert "batchmode yes" in resolved.stdout and "hostname n1\n" in resolved.stdout
    assert ssh[-1] == "true" and f"port {ssh_args[1] if ssh_args else 22}\n" in resolved.stdout


@pytest.mark.parametrize("host", HOSTS, ids=lambda host: host.name)
@pytest.mark.parametrize("excluded", [None, "node2.lab:3"])
def test_the_filter_that_a_remedy_names_leaves_the_lost_host_out(
    host: Host, excluded: str | None
) -> None:
    launcher = Launcher(name="ssh", exclude=excluded)
    _, remedy = explain(host, by(launcher), None, "", 20.0)
    (text,) = shlex.split(remedy.partition("--exclude ")[2])
    chosen, problems = read_filter(text, HOSTS, "hosts")
    left = {one.name: one.slots for one in with_filter(HOSTS, chosen, includes=False)}
    assert not problems and host.name not in left
    if host.name != "node2.lab":
        assert left["node2.lab"] == (4 if excluded is None else 3)


def test_a_lost_host_is_taken_out_of_the_filter_that_chose_it() -> None:
    """`--exclude` is refused beside `--include`."""
    _, remedy = explain(HOSTS[0], by(Launcher(name="ssh", include="n1@fe80::4")), None, "", 20.0)
    assert "take n1 out of --include n1@fe80::4" in remedy


@pytest.mark.parametrize(("name", "word"), [("slurm", "cluster.python="), ("local", "use another")])
def test_only_what_the_launcher_takes_is_advised(name: Any, word: str) -> None:
    _, remedy = explain(HOSTS[0], by(Launcher(name=name)), 1, "No module named nanoscale", 20.0)
    assert word in remedy
    _, remedy = explain(HOSTS[0], by(Launcher(name=name)), None, "", 20.0)
    assert "--exclude" not in remedy

"""Nodes with a real sshd, as in a cluster without a batch system: `n1`, `n2`, `n3`, and `login` to launch from.

Every node is a machine of machines.py with an sshd on port 22 that has a host key of its own and lets root in
by one key. The client's configuration (addresses, key, all host keys, strict checking) is a file for `ssh -F`,
and it also stands at /etc/ssh/ssh_config on every node: plain `ssh n1` works there.

Pitfalls:

- sshd refuses to start without /run/sshd, which nobody makes where systemd does not run; a machine's own /run
  has it.
- The files of keys lie in pytest's folder below /tmp, which StrictModes refuses; it is off here.
- Whether sshd listens is read from its log. A client that tries until it is let in would count among the
  connections that sshd has seen and may refuse.
- pdsh's default is rsh; `pdsh_environment` says ssh, and with which configuration.
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.cluster.machines import Machines

NODES = ("n1", "n2", "n3")
LOGIN = "login"
CLIENT_CONFIG = "/etc/ssh/ssh_config"

_SSHD_CONFIG = """
HostKey {folder}/{name}/host_key
AuthorizedKeysFile {folder}/client_key.pub
PermitRootLogin prohibit-password
PasswordAuthentication no
KbdInteractiveAuthentication no
UsePAM no
StrictModes no
PidFile none
PrintMotd no
"""


class Nodes(Machines):
    """Three nodes and a login node, each with sshd, from `with` to its end."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, (*NODES, LOGIN))
        self._sshd: dict[str, subprocess.Popen[Any]] = {}

    @property
    def ssh_config(self) -> Path:
        """The configuration of a client on any node: for `ssh -F`."""
        return self.folder / "ssh_config"

    @property
    def pdsh_environment(self) -> dict[str, str]:
        """The environment with which pdsh reaches the nodes."""
        return {"PDSH_RCMD_TYPE": "ssh", "PDSH_SSH_ARGS_APPEND": f"-F {self.ssh_config}"}

    def change_host_key(self, node: str) -> None:
        """Its sshd shows another key from now on, as after a new installation, or as someone else would."""
        key = self._host_key(node)
        if not key.with_suffix(".kept").exists():
            key.rename(key.with_suffix(".kept"))
        key.unlink(missing_ok=True)
        _make_key(key)
        self._restart_sshd(node)

    def restore_host_key(self, node: str) -> None:
        key = self._host_key(node)
        if key.with_suffix(".kept").exists():
            key.with_suffix(".kept").rename(key)
            self._restart_sshd(node)

    def restore(self) -> None:
        super().restore()
        for node in self.names:
            self.restore_host_key(node)

    def _prepare(self) -> None:
        super()._prepare()
        _make_key(self.folder / "client_key")
        for node in self.names:
            _make_key(self._host_key(node))
            config = _SSHD_CONFIG.format(folder=self.folder, name=node)
            (self.folder / node / "sshd_config").write_text(config)
        (self.folder / "known_hosts").write_text("".join(map(self._known_host, self.names)))
        self.ssh_config.write_text(self._client_config())

    def _client_config(self) -> str:
        hosts = [f"Host {name}\n    HostName {self.address(name)}\n" for name in self.names]
        everywhere = {
            "IdentityFile": self.folder / "client_key",
            "IdentitiesOnly": "yes",
            "UserKnownHostsFile": self.folder / "known_hosts",
            "GlobalKnownHostsFile": "/dev/null",
            "StrictHostKeyChecking": "yes",
        }
        return "".join(
            [*hosts, "Host *\n", *(f"    {key} {word}\n" for key, word in everywhere.items())]
        )

    def _known_host(self, node: str) -> str:
        algorithm, key, *_ = self._host_key(node).with_suffix(".pub").read_text().split()
        return f"{node},{self.address(node)},{self.address6(node)} {algorithm} {key}\n"

    def _host_key(self, node: str) -> Path:
        return self.folder / node / "host_key"

    def _start_services(self, nodes: Sequence[str]) -> None:
        for node in nodes:
            bound = self.call(node, ["mount", "--bind", self.ssh_config, CLIENT_CONFIG])
            assert bound.returncode == 0, bound.stderr
            self._start_sshd(node)
        for node in nodes:
            self._await_sshd(node)

    def _restart_sshd(self, node: str) -> None:
        self._end_service(node, self._sshd[node])
        self._start_sshd(node)
        self._await_sshd(node)

    def _start_sshd(self, node: str) -> None:
        sshd = shutil.which("sshd") or "/usr/sbin/sshd"
        config = self.folder / node / "sshd_config"
        self._sshd[node] = self._serve(node, [sshd, "-D", "-e", "-f", config], "sshd.log")

    def _await_sshd(self, node: str) -> None:
        log = self.folder / node / "sshd.log"
        self._await_services(
            lambda: "Server listening on 0.0.0.0" in log.read_text(), f"sshd on {node}"
        )


def _make_key(path: Path) -> None:
    command = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "tests of nanoscale"]
    subprocess.run([*command, "-f", path], check=True, stdin=subprocess.DEVNULL)

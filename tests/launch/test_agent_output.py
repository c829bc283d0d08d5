"""The output of a command that starts the agents of several hosts."""

from __future__ import annotations

from nanoscale.config.machines import Host
from nanoscale.config.schema import Config, Launcher
from nanoscale.launch.fleet.agent_output import AgentOutput
from nanoscale.launch.fleet.connections import Member
from nanoscale.launch.transport.transport import transport_of


def test_a_line_of_srun_belongs_to_a_task_of_that_srun() -> None:
    """A restart starts the agents of lost hosts alone, and srun numbers its own tasks."""
    members = [Member(Host(name, 1)) for name in ("n1", "n2", "n3")]
    output = AgentOutput(transport_of(Config(launcher=Launcher(name="slurm"))), members)
    output.note(members, b"0: first\n1: second\n")
    output.note(members[1:], b"1: third\n")
    assert [member.output for member in members] == [b"first\n", b"second\n", b"third\n"]

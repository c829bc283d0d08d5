"""Output of agents and of the commands that start them: kept for diagnoses, and written to logs."""

from collections.abc import Sequence
from contextlib import suppress

from nanoscale.launch.fleet.connections import Member
from nanoscale.launch.transport.transport import Transport
from nanoscale.runs.directory import RunDirectory

_KEPT_BYTES = 1 << 16


class AgentOutput:
    """The output of the agents of these members, other than messages."""

    def __init__(self, transport: Transport, members: Sequence[Member]) -> None:
        self._transport = transport
        self._members = members
        self.logs: tuple[RunDirectory, int] | None = None
        """The run and the attempt to whose logs the output is written; None: it is kept for errors only."""

    @property
    def common_log(self) -> str | None:
        """The name of the log that all agents share, if one command has started them."""
        return self._transport.config.launcher.name if self._transport.is_reverse else None

    def write_to(self, run: RunDirectory, attempt: int) -> None:
        """Write the output to this attempt's logs from now on."""
        run.attempt_logs(attempt).mkdir(parents=True, exist_ok=True)
        is_first, self.logs = self.logs is None, (run, attempt)
        for member in self._members if is_first else ():
            self._write(member.name, member.output)

    def note(self, source: Member | Sequence[Member], data: bytes) -> None:
        """Keep the output of an agent, or of a command that started several of them, in their order."""
        if isinstance(source, Member):
            _keep(source, data)
            self._write(source.name, data)
        else:
            self._assign(source, data)
            self._write(str(self.common_log), data)

    def _assign(self, members: Sequence[Member], data: bytes) -> None:
        """Assign each host's lines to its member; both pdsh and srun prefix them with the host."""
        for line in data.splitlines(keepends=True):
            labels = line.split()[:2]
            name, code = self._transport.exit_code(line) or (None, None)
            for number, member in enumerate(members):
                prefix = f"{self._transport.label(number, member.host)}:".encode()
                if prefix in labels:
                    _keep(member, line.removeprefix(prefix + b" "))
                if member.name == name:
                    member.code = code

    def _write(self, log: str, data: bytes) -> None:
        if self.logs is None or not data:
            return
        run, attempt = self.logs
        with suppress(OSError), run.agent_log(attempt, log).open("ab") as file:
            file.write(data)


def _keep(member: Member, data: bytes) -> None:
    member.output = (member.output + data)[-_KEPT_BYTES:]

"""What ranks print: into files of this host, and from there line by line to the launcher."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch.distributed.elastic.multiprocessing import LogsDest, LogsSpecs

from nanoscale.agent.host import Host
from nanoscale.agent.link import Link
from nanoscale.channel import as_text
from nanoscale.runs.tail import LineTail


class RankLogs(LogsSpecs):
    """A file for each rank and stream in the agent's scratch folder; also hands the ranks their environment."""

    def __init__(self, link: Link, host: Host, environment: dict[str, str]) -> None:
        super().__init__()
        self._link = link
        self._environment = environment
        self._folder = link.scratch / f"attempt-{host.attempt}"
        self._folder.mkdir()
        self._tails = {
            (rank, stream): LineTail(self._path(rank, stream))
            for rank in host.ranks
            for stream in ("out", "err")
        }

    def failure(self, rank: int) -> Path:
        """Where a rank says why it failed."""
        return self._folder / f"rank-{rank}.failure.json"

    def forward(self, *, last: bool = False) -> None:
        """Send what is new; `last`: also what has no end of line."""
        for (rank, stream), tail in self._tails.items():
            data = b"".join(line + b"\n" for line in tail.poll()) + (tail.rest() if last else b"")
            if data:
                self._link.send("output", rank=rank, stream=stream, text=as_text(data))

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        ranks = {local: int(environment["RANK"]) for local, environment in envs.items()}
        for local, environment in envs.items():
            environment |= self._environment
            environment["TORCHELASTIC_ERROR_FILE"] = ""  # ranks write their own
            environment["NANOSCALE_FAILURE_FILE"] = str(self.failure(ranks[local]))
        return LogsDest(
            stdouts={local: str(self._path(rank, "out")) for local, rank in ranks.items()},
            stderrs={local: str(self._path(rank, "err")) for local, rank in ranks.items()},
            error_files=dict.fromkeys(envs, ""),
        )

    def _path(self, rank: int, stream: Any) -> Path:
        return self._folder / f"rank-{rank}.{stream}"

    @property
    def root_log_dir(self) -> str:
        return str(self._folder)

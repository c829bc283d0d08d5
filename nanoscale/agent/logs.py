"""What ranks print: into files of this host, and from there to the launcher.

The files hold what the launcher has not taken yet, so a rank never waits for a slow launcher, and nothing of it
is kept in memory.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from torch.distributed.elastic.multiprocessing import LogsDest, LogsSpecs

from nanoscale.agent.host import Host
from nanoscale.agent.link import Link
from nanoscale.channel import MOST_BYTES
from nanoscale.runs.tail import FileTail

_END_BYTES = 1 << 20
"""of a stream that are sent in any case"""


class RankLogs(LogsSpecs):
    """A file for each rank and stream in the agent's scratch folder; also hands the ranks their environment."""

    def __init__(self, link: Link, host: Host, environment: dict[str, str]) -> None:
        super().__init__()
        self._link = link
        self._environment = environment
        self._folder = link.scratch / f"attempt-{host.attempt}"
        self._folder.mkdir()
        self._tails = {
            (rank, stream): FileTail(self._path(rank, stream))
            for rank in host.ranks
            for stream in ("out", "err")
        }

    def failure(self, rank: int) -> Path:
        """Where a rank says why it failed."""
        return self._folder / f"rank-{rank}.failure.json"

    def forward(self, limit_s: float) -> bool:
        """Send what is new, for so long at most; True if there is more."""
        deadline = time.monotonic() + limit_s
        more = True
        while more and time.monotonic() < deadline:
            unfinished = [self._send_some(rank, stream) for rank, stream in self._tails]
            more = any(unfinished)
        return more

    def leave_out(self) -> None:
        """Send no more of what there is but the end of each stream, and a line that says so."""
        for (rank, stream), tail in self._tails.items():
            if count := tail.skip(_END_BYTES):
                note = f"\n[nanoscale: {count:,} bytes are left out here, for the job to end]\n"
                self._link.send("output", note.encode(), rank=rank, stream=stream)

    def _send_some(self, rank: int, stream: str) -> bool:
        data = self._tails[rank, stream].read(MOST_BYTES)
        if data:
            self._link.send("output", data, rank=rank, stream=stream)
        return len(data) == MOST_BYTES

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

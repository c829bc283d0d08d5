"""The ranks' output: straight into the run's logs, or into files of this host and from there to the launcher.

The ranks of a local launch write their logs in the run's folder themselves, and the launcher hears only that
there is more to read. On other hosts, files of the host hold what the launcher has not taken yet. So a rank
never waits for a slow launcher, and nothing of its output is kept in memory.
"""

from __future__ import annotations

import time
from pathlib import Path

from torch.distributed.elastic.multiprocessing import LogsDest, LogsSpecs

from nanoscale.agent.host import Host
from nanoscale.agent.link import Link
from nanoscale.processes.messages import MOST_BYTES
from nanoscale.runs.directory import STREAMS, RunDirectory, Stream
from nanoscale.runs.tail import FileTail

_END_BYTES = 1 << 20
"""of a stream that are sent in any case"""


class RankLogs(LogsSpecs):
    """A file for each rank and stream; also hands the ranks their environment.

    Args:
        run: the run whose logs the ranks write; None: they write into the agent's scratch folder, and their
            output is sent to the launcher.
    """

    def __init__(
        self, link: Link, host: Host, environment: dict[str, str], run: RunDirectory | None
    ) -> None:
        super().__init__()
        self._link = link
        self._host = host
        self._environment = environment
        self._scratch = RunDirectory(link.scratch)
        self._scratch.attempt_logs(host.attempt).mkdir(parents=True)
        self._directory = run or self._scratch
        self._send = self._send_some if run is None else self._send_growth
        self._tails = {
            (rank, stream): FileTail(self._path(rank, stream))
            for rank in host.ranks
            for stream in STREAMS
        }

    def failure(self, rank: int) -> Path:
        """Return the file in which a rank records why it failed."""
        return self._scratch.rank_failure(self._host.attempt, self._host.name, rank)

    def forward(self, limit_s: float) -> bool:
        """Send what is new, for so long at most; True if there is more."""
        deadline = time.monotonic() + limit_s
        more = True
        while more and time.monotonic() < deadline:
            unfinished = [self._send(rank, stream) for rank, stream in self._tails]
            more = any(unfinished)
        return more

    def leave_out(self) -> None:
        """Send no more of what there is but the end of each stream, and a line that says so."""
        for (rank, stream), tail in self._tails.items():
            if count := tail.skip(_END_BYTES):
                note = f"\n[nanoscale: {count:,} bytes are left out here, for the job to end]\n"
                self._link.send("output", note.encode(), rank=rank, stream=stream)

    def _send_growth(self, rank: int, stream: Stream) -> bool:
        """Report that a log has grown; there is nothing more to send."""
        if self._tails[rank, stream].skip(0):
            self._link.send("output", rank=rank, stream=stream)
        return False

    def _send_some(self, rank: int, stream: Stream) -> bool:
        """Send the next bytes of a stream; True if there may be more."""
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

    def _path(self, rank: int, stream: Stream) -> Path:
        return self._directory.log(self._host.attempt, self._host.name, rank, stream)

    @property
    def root_log_dir(self) -> str:
        return str(self._directory.attempt_logs(self._host.attempt))

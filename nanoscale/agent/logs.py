"""The ranks' output: directly into the run's logs, or into files of this host and from there to the launcher.

The ranks of a local launch write their logs in the run's folder themselves, and the agent only reports that a
log has grown. On other hosts, files of the host hold the output that is not sent yet. So a rank never waits
for a slow launcher, and none of its output is kept in memory.
"""

from __future__ import annotations

import time

from nanoscale.agent.link import Link
from nanoscale.agent.rank import RankFiles
from nanoscale.processes.messages import MOST_BYTES
from nanoscale.runs.directory import STREAMS, RunDirectory, Stream
from nanoscale.runs.job_messages import HostRanks
from nanoscale.runs.tail import FileTail

_END_BYTES = 1 << 20
"""The last bytes of a stream, which are always sent."""


class RankLogs:
    """A log file for each rank and stream.

    Args:
        run: the run whose logs the ranks write; None: they write into the agent's scratch folder, and their
            output is sent to the launcher.
    """

    def __init__(self, link: Link, host: HostRanks, run: RunDirectory | None) -> None:
        self._link = link
        scratch = RunDirectory(link.scratch)
        scratch.attempt_logs(host.attempt).mkdir(parents=True)
        self.files = {rank: _files(run or scratch, scratch, host, rank) for rank in host.ranks}
        self._send = self._send_output if run is None else self._send_growth
        self._tails = {
            (rank, stream): FileTail(path)
            for rank, files in self.files.items()
            for stream, path in zip(STREAMS, (files.stdout, files.stderr), strict=True)
        }

    def forward(self, limit_s: float) -> bool:
        """Send new output, for at most this long; True if there is more."""
        deadline = time.monotonic() + limit_s
        more = True
        while more and time.monotonic() < deadline:
            unfinished = [self._send(rank, stream) for rank, stream in self._tails]
            more = any(unfinished)
        return more

    def skip_to_end(self) -> None:
        """Skip all output but the end of each stream, with a line that says so."""
        for (rank, stream), tail in self._tails.items():
            if count := tail.skip(_END_BYTES):
                note = f"\n[nanoscale: {count:,} bytes are omitted here so that the job can end]\n"
                self._link.send("output", note.encode(), rank=rank, stream=stream)

    def _send_growth(self, rank: int, stream: Stream) -> bool:
        """Report that a log has grown; there is nothing more to send."""
        if self._tails[rank, stream].skip(0):
            self._link.send("output", rank=rank, stream=stream)
        return False

    def _send_output(self, rank: int, stream: Stream) -> bool:
        """Send the next bytes of a stream; True if there may be more."""
        data = self._tails[rank, stream].read(MOST_BYTES)
        if data:
            self._link.send("output", data, rank=rank, stream=stream)
        return len(data) == MOST_BYTES


def _files(logs: RunDirectory, scratch: RunDirectory, host: HostRanks, rank: int) -> RankFiles:
    stdout, stderr = (logs.log(host.attempt, host.name, rank, stream) for stream in STREAMS)
    failure = scratch.rank_failure(host.attempt, host.name, rank)
    return RankFiles(stdout, stderr, failure, failure.with_suffix(".outcome"))

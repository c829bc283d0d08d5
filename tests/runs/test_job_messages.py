"""Messages about a job's ranks: what one end writes as JSON, the other end reads as the same content."""

from __future__ import annotations

import json

import pytest

from nanoscale.runs.failure import Evidence, RankFailure
from nanoscale.runs.job_messages import Ended, Failing, HostRanks, LaunchOrder, message_of

HOST = HostRanks("n1", 0, 2, (0, 1), 4, "10.0.0.1", 29500, attempt=3)
FAILURE = RankFailure.of(ValueError("x"), rank=1, local_rank=1, host="n1")


@pytest.mark.parametrize(
    "content",
    [
        LaunchOrder(HOST, "/runs/a", 30.0, writes_logs=True),
        LaunchOrder(HOST, None, 30.0, 5.0, job="bench", config="a: 1", task={"steps": 2}),
        Failing(3, (FAILURE,)),
        Ended(3, "failed", (FAILURE,), Evidence(1, 2.5), {"loss": 1.0}),
        Ended(3, "completed"),
    ],
)
def test_a_message_is_read_as_it_was_written(content: LaunchOrder | Failing | Ended) -> None:
    message = json.loads(json.dumps(message_of(content)))
    assert message["kind"] == content.kind
    assert type(content).read(message) == content

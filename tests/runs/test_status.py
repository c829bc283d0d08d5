from __future__ import annotations

from nanoscale.runs import status
from tests.support.runs import create_run


def test_an_attempt_from_its_start_to_its_end(tmp_path):
    run = create_run(tmp_path, "x")
    first = status.prepared()
    status.write(run, first)
    status.write(run, status.read(run).starting(1).running().ending("preempted", 75))
    again = status.read(run).starting(2)
    assert (again.state, again.attempt, again.exit_code, again.ended) == ("starting", 2, None, None)
    assert again.created == first.created
    assert status.read(run).exit_code == 75


def test_a_damaged_status_counts_as_never_started(tmp_path):
    run = create_run(tmp_path, "x")
    for text in ("", "{", '{"state": "odd", "attempt": 1, "created": 0}', "[]"):
        run.status.write_text(text)
        assert status.read(run).state == "prepared"

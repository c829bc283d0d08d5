"""`nanoscale submit launcher=pbs` through the qsub, qstat and qdel that SLURM has for users of PBS."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from nanoscale.runs import submission
from nanoscale.runs.directory import RunDirectory
from tests.cluster.machines import LIMIT_S, wait_until
from tests.cluster.slurm import Slurm
from tests.cluster.test_submit import User, steps, wait_step

# SLURM has no qsig, and no sshd runs on its nodes.
_QSIG = 'exec scancel --batch --signal="$2" "$3"'
_SSH = """\
while [ "${1#-}" != "$1" ]; do shift 2; done
exec srun --overlap --quiet --nodes=1 --ntasks=1 --nodelist="$1" sh -c "$2"
"""


@pytest.fixture
def user(pbs: Slurm, tmp_path: Path) -> User:
    """Somebody whose jobs have qsig and ssh, made of SLURM's commands."""
    programs = tmp_path / "bin"
    programs.mkdir()
    for name, text in (("qsig", _QSIG), ("ssh", _SSH)):
        (programs / name).write_text(f"#!/bin/sh\n{text}\n")
        (programs / name).chmod(0o755)
    return User(pbs, tmp_path)


def submits(user: User, name: str, *words: str) -> tuple[RunDirectory, int]:
    setup = ["export PBS_NODEFILE=$(generate_pbs_nodefile)", f"export PATH={user.folder}/bin:$PATH"]
    return user.submits(name, "launcher=pbs", f"launcher.batch.setup={json.dumps(setup)}", *words)


def test_a_job_of_pbs_waits_and_completes_on_two_hosts(user: User) -> None:
    hold = 'launcher.batch.directives=["-h"]'
    run, job = submits(user, "one", "launcher.nodes=2", hold)
    assert user.says_of("one") == f"queued (job {job})"
    assert f"job {job}: PENDING, queued since" in user.types("runs", "show", "one")
    user.slurm.command("scontrol", "release", job)
    watched = user.types("runs", "watch", "one")
    assert "completed after 20 steps" in watched, user.types("runs", "logs", "one", "--batch")
    assert steps(run) == list(range(1, 21))
    assert "s1, s2" in user.types("runs", "logs", "one", "--batch")

    other, waiting = submits(user, "two", hold)
    assert f"job {waiting} was removed from the queue" in user.types("runs", "stop", "two")
    assert user.slurm.show(waiting)["JobState"] == "CANCELLED"
    assert user.says_of("two") == f"never began (job {waiting}: cancelled)"
    assert not other.launch.exists()


@pytest.mark.exhaustive
def test_a_job_of_pbs_is_queued_again_after_its_time_limit_and_stops(user: User) -> None:
    run, job = submits(user, "long", "train.steps=100000")
    wait_step(run, 3)
    user.slurm.command("scancel", "--batch", "--signal=USR1", job)  # what its alarm sends
    user.slurm.wait_state(job, "FAILED", limit_s=LIMIT_S)

    def again() -> bool:
        found = submission.find(run)
        return found is not None and (found.system, found.requeues) == ("pbs", 1)

    wait_until(again, "another job", LIMIT_S)
    second = submission.read(run)
    assert second is not None and second.job != str(job)
    before = steps(run)[-1]
    assert run.checkpoint_steps()[-1] == before
    wait_step(run, before + 3)
    path = {"PATH": f"{user.folder}/bin:{user.environment['PATH']}"}
    printed = user.types("runs", "stop", "long", env=path)
    assert f"asked job {second.job} to stop" in printed and "long is stopped" in printed
    assert steps(run) == list(range(1, steps(run)[-1] + 1))

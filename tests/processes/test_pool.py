"""A pool of processes: order, errors, a killed process, and a parent that is killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

import pytest

from nanoscale.common.errors import UserError, Violation
from nanoscale.processes.pool import LostProcessError, Pool
from nanoscale.processes.proc import is_alive
from tests.support.waiting import wait_until

WRONG = UserError("usage", "bad work", [Violation("--x", 3, "", "is bad", ("--x 4",))])


@dataclass(frozen=True)
class Squares:
    number: int

    def load(self) -> Callable[[int], tuple[int, int]]:
        if self.number == 9:
            raise WRONG
        return self.square

    def square(self, value: int) -> tuple[int, int]:
        if value == -1:
            raise WRONG
        if value == -2:
            os.kill(os.getpid(), signal.SIGKILL)
        if value == -3:
            raise ValueError("a bug")
        time.sleep(0.02 * (self.number == 0))  # the first process is the slower one
        return self.number, value**2


def test_results_come_in_order_from_all_processes() -> None:
    with Pool([Squares(0), Squares(1)], queued=2) as pool:
        found = list(pool.map(range(40)))
        assert [work for work, _ in found] == list(range(40))
        assert [square for _, (_, square) in found] == [n**2 for n in range(40)]
        assert {process for _, (process, _) in found} == {0, 1}
        assert list(pool.map([])) == [] and [r for _, (_, r) in pool.map([7])] == [49]


def test_errors() -> None:
    for setups, value, error in (
        ([Squares(0), Squares(1)], -1, UserError),
        ([Squares(9)], 1, UserError),
        ([Squares(0)], -2, LostProcessError),
        ([Squares(0)], -3, RuntimeError),
    ):
        with Pool(setups) as pool, pytest.raises(error) as caught:
            list(pool.map([1, value, 2]))
        if error is UserError:
            assert caught.value == WRONG
    with pytest.raises(LostProcessError, match="signal 9"), Pool([Squares(0)]) as pool:
        list(pool.map([-2]))


PARENT = """
from tests.processes.test_pool import Squares
from nanoscale.processes.pool import Pool
if __name__ == "__main__":
    with Pool([Squares(1)] * 2) as pool:
        list(pool.map([1]))
        print(*(process.pid for process in pool._processes), flush=True)
        input()
"""


@pytest.mark.slow
def test_the_processes_end_with_a_killed_parent() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", PARENT], stdout=subprocess.PIPE, stdin=subprocess.PIPE, text=True
    ) as parent:
        assert parent.stdout is not None
        pids = [int(pid) for pid in parent.stdout.readline().split()]
        parent.kill()
    assert len(pids) == 2
    wait_until(lambda: not any(is_alive(pid) for pid in pids))

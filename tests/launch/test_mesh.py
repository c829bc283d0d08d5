from __future__ import annotations

from nanoscale.config.schema import Parallel
from nanoscale.launch.lifecycle.command import RankPlacement, arrange


def test_every_rank_has_its_place():
    mesh = arrange([("a", (0, 1, 2)), ("b", (3, 4, 5))], Parallel(dp=3, pp=2))
    assert mesh.axes == {"pp": 2, "dp": 3, "cp": 1, "tp": 1}
    assert mesh.ranks[4] == RankPlacement(rank=4, host="b", local_rank=1, pp=1, dp=1, cp=0, tp=0)
    assert [place.rank for place in mesh.ranks] == list(range(6))

from __future__ import annotations

from nanoscale.config.schema import Parallel
from nanoscale.launch.lifecycle.command import RankPlacement, arrange, mesh_lines


def on_one_host(parallel: Parallel):
    world = parallel.dp * parallel.tp * parallel.pp * parallel.cp
    return arrange([("h", tuple(range(world)))], parallel)


def test_every_rank_has_its_place():
    mesh = arrange([("a", (0, 1, 2)), ("b", (3, 4, 5))], Parallel(dp=3, pp=2))
    assert mesh.axes == {"pp": 2, "dp": 3, "cp": 1, "tp": 1}
    assert mesh.ranks[4] == RankPlacement(rank=4, host="b", local_rank=1, pp=1, dp=1, cp=0, tp=0)
    assert [place.rank for place in mesh.ranks] == list(range(6))


def test_one_axis_is_one_line_and_one_rank_is_none():
    assert list(mesh_lines(on_one_host(Parallel(dp=1)))) == []
    assert list(mesh_lines(on_one_host(Parallel(dp=4)))) == ["mesh dp 4", "  h  ranks 0–3  dp 0–3"]


def test_four_axes_on_sixteen_ranks():
    first, *rows = mesh_lines(on_one_host(Parallel(dp=2, tp=2, pp=2, cp=2)))
    assert first == "mesh pp 2 × dp 2 × cp 2 × tp 2"
    assert len(rows) == 8
    assert rows[5] == "  h  ranks 10–11  pp 1  dp 0  cp 1  tp 0–1"


def test_a_row_ends_where_a_host_ends():
    hosts = [("a", (0, 1, 2)), ("b", (3,))]
    assert list(mesh_lines(arrange(hosts, Parallel(dp=4))))[1:] == [
        "  a  ranks 0–2  dp 0–2",
        "  b  ranks 3  dp 3",
    ]


def test_a_large_mesh_is_summed_up():
    assert list(mesh_lines(on_one_host(Parallel(dp=64, tp=2)))) == [
        "mesh dp 64 × tp 2",
        "  tp varies fastest; launch.json says where every rank is",
    ]

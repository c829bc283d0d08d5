from __future__ import annotations

from nanoscale.config.layout import Coordinates, coordinates
from nanoscale.config.schema import Parallel


def test_tp_varies_fastest_then_cp_then_dp_then_pp():
    layout = Parallel(dp=3, tp=2, pp=2, cp=2)
    places = [coordinates(rank, layout) for rank in range(24)]
    assert places[:5] == [
        Coordinates(pp=0, dp=0, cp=0, tp=0),
        Coordinates(pp=0, dp=0, cp=0, tp=1),
        Coordinates(pp=0, dp=0, cp=1, tp=0),
        Coordinates(pp=0, dp=0, cp=1, tp=1),
        Coordinates(pp=0, dp=1, cp=0, tp=0),
    ]
    assert places[12] == Coordinates(pp=1, dp=0, cp=0, tp=0)
    assert len(set(places)) == 24

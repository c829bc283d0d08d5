from __future__ import annotations

from pathlib import Path

import pytest

from nanoscale.config.composing.compose import Setting, compose
from nanoscale.config.composing.frozen import dump
from nanoscale.config.values.forms import elastic, node_range, nodes_violation


@pytest.mark.parametrize(
    ("nodes", "span"),
    [
        (None, None), (4, (4, 4)), ("4", (4, 4)), ("2:4", (2, 4)), ("02:04", (2, 4)), ("1:1", (1, 1)),
        (" 2:4 ", (2, 4)),
    ],
)  # fmt: skip
def test_a_number_or_a_range(nodes, span):
    assert node_range(nodes) == span
    assert elastic(nodes) == (span is not None and span[0] < span[1])


@pytest.mark.parametrize(
    ("nodes", "meant"),
    [
        (0, "1"), (-2, "2"), ("4:2", "2:4"), ("0:4", "1:4"), ("2-4", "2:4"), ("2..4", "2:4"), ("2:", "2"),
        (":4", "4"), ("2:4:8", None), ("all", None), ("", None), ("1e3", None), ("99999999999", None),
    ],
)  # fmt: skip
def test_anything_else_is_refused_with_what_it_may_have_meant(nodes, meant):
    with pytest.raises(ValueError, match="must be|MIN"):
        node_range(nodes)
    assert not elastic(nodes)
    wrong = nodes_violation(compose([], options={"launcher.nodes": Setting(nodes, "here")}))
    assert wrong is not None and wrong.source == "here"
    assert wrong.suggestions == ((f"launcher.nodes={meant}",) if meant else ())
    assert meant is None or nodes_violation(compose([*wrong.suggestions])) is None


def test_a_range_is_no_number_in_base_sixty(tmp_path: Path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("mine.yaml").write_text("launcher:\n  nodes: 2:4\n")
    for words in (["recipe=./mine.yaml"], ["launcher.nodes=2:4"], ["launcher={nodes: 2:4}"]):
        config = compose(words).config
        assert config.launcher.nodes == "2:4"
        Path("frozen.yaml").write_text(dump(config))
        assert compose([], config_file=Path("frozen.yaml")).config.launcher.nodes == "2:4"
    assert "nodes: '2:4'" in Path("frozen.yaml").read_text()  # for readers of YAML 1.1

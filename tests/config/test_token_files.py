"""Files of tokens that cannot be trained on are refused by a glance at them, before the launch."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from nanoscale.common.errors import UserError
from nanoscale.config.composing.compose import compose
from nanoscale.config.rules import Devices, check
from nanoscale.config.token_formats import FORMATS
from nanoscale.data.dataset import open_data
from tests.config.test_mixture import refused
from tests.support.token_files import write_indexed

CPU = Devices("cpu", 1)


def write(prefix: Path, dtype: str, *documents: list[int]) -> None:
    write_indexed(prefix, documents, dtype)


@pytest.mark.parametrize("dtype", ["u1", "i1", "i2", "i4", "i8", "u2"])
def test_whole_files_of_every_type(tmp_path: Path, dtype: str) -> None:
    write(tmp_path / "a", dtype, [1, 2, 100], [], [7], [])
    assert FORMATS["megatron"].read(str(tmp_path / "a"), 0).largest() == 100


@pytest.mark.parametrize("width", [2, 4])
def test_whole_files_of_datatrove(tmp_path: Path, width: int) -> None:
    path = tmp_path / "a.ds"
    path.write_bytes(np.array([1, 40_000, 5], f"<u{width}").tobytes())
    Path(f"{path}.index").write_bytes(np.array([2, 3], "<u8").tobytes())
    assert FORMATS["datatrove"].read(str(path), 0).largest() == 40_000


def cut(name: str, by: int) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        (folder / name).write_bytes((folder / name).read_bytes()[:-by])

    return damage


def exchange(folder: Path) -> None:
    (folder / "a.idx").write_bytes((folder / "b.idx").read_bytes())


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (cut("a.bin", 2), "a.bin: it holds 398 bytes, and a.idx declares 400"),
        (cut("a.idx", 1), "and its header declares"),
        (cut("a.idx", 10**6), "not a Megatron index"),
        (exchange, "it describes 200 bytes, and a.bin holds 400"),
        (lambda folder: write(folder / "a", "i4", [1, -1, 5]), "a negative token"),
        (lambda folder: write(folder / "a", "i4", [1, 320, 5]), "which holds token 320"),
        (lambda folder: write(folder / "a", "i4", []), "no tokens to train on"),
    ],
)
def test_damaged_files(tmp_path: Path, damage: Callable[[Path], None], words: str) -> None:
    write(tmp_path / "a", "u2", list(range(200)))
    write(tmp_path / "b", "u2", list(range(100)))
    damage(tmp_path)
    for key in ("data.path", "data.valid_path", "data.mixture.x.path"):
        given = [f"data.path={tmp_path}/b"] if key == "data.valid_path" else []
        assert words in refused(*given, f"{key}={tmp_path}/a")


def test_a_datatrove_file_cut_short(tmp_path: Path) -> None:
    path = tmp_path / "a.ds"
    path.write_bytes(bytes(9))
    Path(f"{path}.index").write_bytes(np.array([2, 4], "<u8").tobytes())
    assert "4 tokens of 2 or 4 bytes" in refused("data=datatrove", f"data.path={path}")


@pytest.mark.parametrize(
    ("words", "first"),
    [
        ("train.seq_len=512 model.max_seq_len=512 data.valid_fraction=0", "train.seq_len=256"),
        ("train.eval_every=5 data.valid_fraction=0.001", "data.valid_fraction=0.2"),
        (
            "train.seq_len=256 train.eval_every=5 train.stop_when.patience=2 data.valid_path=b "
            "model.max_seq_len=256",
            "train.seq_len=64",
        ),
        (
            "data.mixture.x.path=a data.mixture.y.path=b data.path=null train.seq_len=128 "
            "train.eval_every=5 model.max_seq_len=128 data.valid_fraction=0.02",
            "train.seq_len=32 data.valid_fraction=0.5",
        ),
        ("data.packing=whole train.eval_every=5 data.path=one data.valid_fraction=0.5", ""),
    ],
)
def test_too_few_tokens_are_refused_before_the_launch_with_remedies_that_hold(
    words: str, first: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write(Path("a"), "u2", [7] * 200, [8] * 200)
    write(Path("b"), "u2", [7] * 100)
    write(Path("one"), "u2", [7])
    given = ("recipe=debug", "data=megatron", "data.path=a", "train.steps=2", *words.split())
    with pytest.raises(UserError) as caught:
        check(compose(given), CPU)
    found = caught.value.violations[-1]
    assert "and a sample of train.seq_len=" in found.message
    assert found.suggestions[:1] == ((first,) if first else ())
    for remedy in found.suggestions:
        config = check(compose([*given, *remedy.split()]), CPU)
        assert open_data(config.data, config.train, config.model.vocab).train

"""Law 6: a checkpoint is data. No command calls the names in its index."""

from __future__ import annotations

import io
import os
import pickle
import re
from collections.abc import Callable
from dataclasses import replace
from enum import Enum
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata

from nanoscale.checkpoint import metadata, sharded, store
from nanoscale.checkpoint.reader import Reader
from nanoscale.cli.main import run as nanoscale
from nanoscale.common.errors import UserError
from nanoscale.config.schema import Data, Run
from nanoscale.models.transformer import Transformer
from nanoscale.parallel import process_group
from nanoscale.runs.directory import RunDirectory
from tests.support.jobs import SHAPE, make_run
from tests.support.ranks import run_ranks
from tests.support.recipes import complete

STATE = {
    "a": torch.arange(10.0),
    "b": torch.ones(3, 5, dtype=torch.bfloat16),
    "c": torch.tensor(7, dtype=torch.int64),
}


class Command:
    """Unpickled by pickle itself, it makes a file."""

    def __init__(self, proof: Path) -> None:
        self.proof = proof

    def __reduce__(self) -> tuple[Callable[[str], int], tuple[str]]:
        return os.system, (f"touch {self.proof}",)


def saved(workspace: Path, step: int = 1, state: dict[str, torch.Tensor] = STATE) -> Path:
    workspace.mkdir(parents=True, exist_ok=True)
    return sharded.save(workspace, state, {"step": step})


def prepare(path: Path, change: Callable[[Any], Any]) -> None:
    """Change a checkpoint's index and record it as if it had been written so."""
    file = path / metadata.FILE
    file.write_bytes(pickle.dumps(change(pickle.loads(file.read_bytes()))))
    record(path)


def record(path: Path) -> None:
    about = store.read_manifest(path)
    about["files"] = store.sum_files(
        it for it in sorted(path.iterdir()) if it.name != store.MANIFEST
    )
    (path / store.MANIFEST).write_text(store.render_manifest(about))


def with_command(proof: Path) -> Callable[[Metadata], Metadata]:
    def change(index: Metadata) -> Metadata:
        index.planner_data = Command(proof)
        return index

    return change


def test_the_index_is_what_torch_wrote(tmp_path: Path) -> None:
    path = saved(tmp_path / ".attempt-1")
    theirs = pickle.loads((path / metadata.FILE).read_bytes())
    ours = Reader(path).read_metadata()
    assert ours.state_dict_metadata == theirs.state_dict_metadata
    assert ours.storage_data == theirs.storage_data
    assert metadata.read(path / metadata.FILE)["b"].shape == (3, 5)


def test_members_of_enums_are_read_as_pythons_before_3_11_4_wrote_them(tmp_path: Path) -> None:
    class Older(pickle.Pickler):
        def reducer_override(self, value: Any) -> Any:
            by_name = getattr, (type(value), getattr(value, "name", ""))
            return by_name if isinstance(value, Enum) else NotImplemented

    path = saved(tmp_path / ".attempt-1")
    file = path / metadata.FILE
    index, expected = io.BytesIO(), metadata.read(file)
    Older(index).dump(pickle.loads(file.read_bytes()))
    assert b"getattr" in index.getvalue()
    file.write_bytes(index.getvalue())
    record(path)
    assert metadata.read(file) == expected


def test_a_command_in_the_index_is_named_and_not_run(tmp_path: Path) -> None:
    path = saved(tmp_path / ".attempt-1")
    prepare(path, with_command(tmp_path / "proof"))
    (damage,) = store.find_damage(path)
    assert (
        damage.startswith(".metadata: names posix.system")
        and "nothing from it was executed" in damage
    )
    assert store.find_damage(path, sums=False) == [damage]
    with pytest.raises(metadata.MetadataError, match=r"posix\.system"):
        Reader(path).read("a", (10,))
    assert not (tmp_path / "proof").exists()
    os.system("true")  # the proof would prove something:
    pickle.loads((path / metadata.FILE).read_bytes())
    assert (tmp_path / "proof").exists()


def test_an_entry_that_torch_would_unpickle_is_refused(tmp_path: Path) -> None:
    """torch.load of an entry that is marked as bytes, not as a tensor, is one with weights_only=False."""
    path = saved(tmp_path / ".attempt-1")
    data = io.BytesIO()
    torch.save(Command(tmp_path / "proof"), data)
    (path / "__0_0.distcp").write_bytes(data.getvalue())

    def change(index: Metadata) -> Metadata:
        index.state_dict_metadata["a"] = BytesStorageMetadata()
        ((old, place),) = [(k, v) for k, v in index.storage_data.items() if k.fqn == "a"]
        del index.storage_data[old]
        place.offset, place.length = 0, len(data.getvalue())
        index.storage_data[type(old)("a")] = place
        return index

    prepare(path, change)
    assert "BytesStorageMetadata" in store.find_damage(path)[0]
    with pytest.raises(Exception, match="damaged"):
        sharded.load_weights(store.StoredCheckpoint(path, 1), {"a": torch.zeros(10)})
    assert not (tmp_path / "proof").exists()


@pytest.mark.parametrize(
    ("field", "value"),
    [("relative_path", "../../../etc/passwd"), ("relative_path", 5), ("offset", 10**9)],
)
def test_bytes_outside_the_checkpoint_are_refused(
    tmp_path: Path, field: str, value: str | int
) -> None:
    path = saved(tmp_path / ".attempt-1")

    def change(index: Metadata) -> Metadata:
        setattr(next(iter(index.storage_data.values())), field, value)
        return index

    prepare(path, change)
    assert store.find_damage(path)[0].startswith(".metadata: ")


@pytest.mark.parametrize(
    "pickled",
    [
        b"",
        b"no pickle",
        pickle.dumps({"a": 1}),
        pickle.dumps([]),
        # BUILD on an admitted class, which would change it for every later reader
        b"ctorch.distributed.checkpoint.metadata\nMetadata\n(N(dV__init__\nctorch\nSize\nstb.",
        b"ctorch\nfloat32\n(V1\ntR.",
        b"cbuiltins\neval\n(V1\ntR.",
        b"ctorch.distributed.checkpoint.metadata\nos.system\n(Vtrue\ntR.",
    ],
)
def test_what_is_no_index_is_refused(tmp_path: Path, pickled: bytes) -> None:
    path = saved(tmp_path / ".attempt-1")
    (path / metadata.FILE).write_bytes(pickled)
    record(path)
    assert len(store.find_damage(path)) == 1
    assert (
        Reader(saved(tmp_path / ".attempt-1", 2)).read("a", (10,)).tolist() == STATE["a"].tolist()
    )


def test_an_instruction_that_takes_memory_is_refused_before_it_is_read(tmp_path: Path) -> None:
    path = saved(tmp_path / ".attempt-1")
    (path / metadata.FILE).write_bytes(b"\x80\x02]r\x00\x00\x00\x10.")
    with pytest.raises(metadata.MetadataError, match="instruction that torch does not write"):
        metadata.read(path / metadata.FILE)


def prepared_run(folder: Path) -> tuple[RunDirectory, Path]:
    """Create a run of bytes whose one checkpoint names a command, and return the file that it would make."""
    shape = replace(SHAPE, vocab=257)
    run = make_run(complete(run=Run("run", str(folder)), model=shape, data=Data(source="stdlib")))
    weights = {f"model.{name}": value for name, value in Transformer(shape).state_dict().items()}
    prepare(saved(run.workspace(1), 5, weights), with_command(folder / "proof"))
    return run, folder / "proof"


@pytest.mark.parametrize(
    "words",
    [
        ["generate", "RUN", "--prompt", "a"],
        ["checkpoints", "export", "RUN", "--format", "hf"],
        ["checkpoints", "inspect", "RUN"],
        ["checkpoints", "verify", "RUN"],
    ],
)
def test_no_command_runs_what_a_prepared_folder_says(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str]
) -> None:
    run, proof = prepared_run(tmp_path)
    code = nanoscale([str(run.path) if word == "RUN" else word for word in words])
    said = capsys.readouterr()
    assert not proof.exists() and (code in (1, 2) or "inspect" in words)
    assert "posix.system" in said.out + said.err and "whole" not in said.out


def load_rank(rank: int, workspace: Path, world: int) -> str:
    process_group.join(world, torch.device("cpu"), 120.0)
    try:
        sharded.load_newest(workspace, {})
    except UserError as error:
        return str(error)
    return "loaded"


def test_no_rank_runs_what_a_prepared_folder_says(tmp_path: Path) -> None:
    run, proof = prepared_run(tmp_path)
    for said in run_ranks(load_rank, 2, run.workspace(1), 2):
        assert "posix.system" in said
    assert not proof.exists()


def test_nothing_else_unpickles_a_file() -> None:
    """Whoever adds a reader of pickles has to justify it here.

    conformity.py reads tensors alone, from the temporary folder of its own ranks.
    """
    pattern = re.compile(
        r"pickle\.(load|Unpickler)|torch\.load|allow_pickle|load_state_dict_from_file"
        r"|FileSystemReader\(|weights_only"
    )
    sources = (Path(__file__).parents[2] / "nanoscale").rglob("*.py")
    readers = {path.name for path in sources if pattern.search(path.read_text())}
    assert readers == {"metadata.py", "conformity.py"}

"""Texts that are prepared beside the training: the same parts, and the same samples, whatever happens."""

from __future__ import annotations

import fcntl
import json
import resource
import threading
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nanoscale.cli.common import text_preparation
from nanoscale.cli.main import run as nanoscale
from nanoscale.common.errors import UserError
from nanoscale.config.schema import Data, Train
from nanoscale.data import open_data
from nanoscale.data.prepare import PreparationRequest, by_parts
from nanoscale.data.prepare.by_parts import prepare_first, prepare_rest
from nanoscale.data.prepare.chunks import Cursor, read_chunks
from nanoscale.data.prepare.sources import Reading, find_sources
from nanoscale.launch.lifecycle.data_preparation import RestOfTexts
from nanoscale.runs import metrics
from nanoscale.runs.directory import RunDirectory
from tests.data.texts import Silent, every_file, write_jsonl, write_parquet, write_records
from tests.support.waiting import wait_until

DOCUMENTS = [f"{number} " + "word " * (number % 60) for number in range(2000)]
SEQ_LEN = 32


def write_files(folder: Path) -> Path:
    folder.mkdir()
    write_jsonl(folder / "a.jsonl.zst", DOCUMENTS[:700])
    write_parquet(folder / "b.parquet", DOCUMENTS[700:1300], rows=150)
    write_jsonl(folder / "c.jsonl", DOCUMENTS[1300:])
    return folder


@pytest.fixture(autouse=True)
def _small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(by_parts, "PART", 20_000)
    monkeypatch.setattr("nanoscale.data.prepare.chunks.CHUNK", 1000)


def request(sources: Path, out: Path, **settings: Any) -> PreparationRequest:
    return PreparationRequest((str(sources),), out, tokenizer="byte", validation=0.02, **settings)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder of which all parts are prepared."""
    folder = prepare_first(request(write_files(tmp_path / "texts"), tmp_path / "out"), Silent())
    prepare_rest(folder, 1, print)
    return folder


def numbers_of(folder: Path) -> list[int]:
    return [int(part.name.removeprefix("part-")) for part in sorted(folder.glob("part-*"))]


NAMES = ["a.jsonl", "a.jsonl.gz", "a.txt", "a.csv", "a.json", "a.tar", "a.tar.gz", "a.parquet"]


@pytest.mark.parametrize("name", NAMES)
def test_chunks_end_at_the_same_records_from_every_border(name: str, tmp_path: Path) -> None:
    records = dict.fromkeys((".csv", ".json", ".tar"), write_records)
    write = {**records, ".parquet": write_parquet}
    path = write.get(Path(name).suffixes[0], write_jsonl)(tmp_path / name, DOCUMENTS[:500])
    reading = Reading(tuple(find_sources([str(path)])), separator="\n")
    chunks = list(read_chunks(reading, Cursor()))
    assert len(chunks) > 5
    for number, chunk in enumerate(chunks[:-1], 1):
        assert list(read_chunks(reading, chunk.after)) == chunks[number:]


def test_parts_do_not_depend_on_interruptions_and_hold_every_document(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert len(numbers_of(folder)) > 8
    other = prepare_first(request(tmp_path / "texts", tmp_path / "other", workers=2), Silent())
    assert other.name == folder.name
    for last in (1, 2, 5):
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(by_parts._Parts, "_publish", publishing_until(last))
            prepare_rest(other, 1, print)
        assert numbers_of(other) == list(range(last))
    begun = json.loads((other / "request.json").read_text())
    assert begun.pop("kind") == "text"  # an earlier version wrote:
    (other / "request.json").write_text(json.dumps(begun | {"chat": False, "pairs": False}))
    prepare_rest(other, 2, print)
    assert numbers_of(other) == numbers_of(folder)
    for number in numbers_of(folder):
        assert every_file(other / f"part-{number:05}") == every_file(folder / f"part-{number:05}")
    files = [part / f"{name}.bin" for part in folder.glob("part-*") for name in ("tokens", "valid")]
    held = sum(file.stat().st_size for file in files if file.is_file())
    assert held == 2 * sum(len(text) + 1 for text in DOCUMENTS)
    assert not list(other.glob(".*"))


def publishing_until(last: int) -> Any:
    publish = by_parts._Parts._publish

    def stopping(self: Any, part: Any) -> Any:
        if self.number == last:
            raise KeyboardInterrupt
        return publish(self, part)

    return stopping


def opened(folder: Path, **changes: Any) -> Any:
    data = Data(source="megatron", path=str(folder), valid_fraction=0.0)
    return open_data(data, replace(Train(seq_len=SEQ_LEN, seed=3, **changes)), 257).train


def read(train: Any, start: int, stop: int) -> np.ndarray:
    return np.concatenate(
        [batch.inputs for batch in train.micro_batches(start, stop - start, 0, 1, 1)]
    )


def test_every_epoch_has_each_sample_once_window_by_window(folder: Path) -> None:
    """The windows have 1, 1, 2, 4, 8 … parts; samples are windows of the tokens of a part."""
    expected = []
    for part in sorted(folder.glob("part-*")):
        tokens = np.fromfile(part / "tokens.bin", "<u2")
        count = (len(tokens) - 1) // SEQ_LEN
        expected.append([tuple(row) for row in tokens[: count * SEQ_LEN].reshape(count, SEQ_LEN)])
    total = sum(map(len, expected))
    train = opened(folder)
    assert train.are_ready(10 * total)
    epochs = [
        [tuple(row) for row in read(train, total * epoch, total * (epoch + 1))] for epoch in (0, 1)
    ]
    bounds = [0, 1, 2, 4, 8, len(expected)]
    for rows in epochs:
        start = 0
        for first, last in pairwise(bounds):
            window = [row for part in expected[first:last] for row in part]
            assert sorted(rows[start : start + len(window)]) == sorted(window)
            assert rows[start : start + len(window)] != window
            start += len(window)
    assert epochs[0] != epochs[1]


def test_samples_are_the_same_while_parts_are_missing_and_in_any_layout(
    folder: Path, tmp_path: Path
) -> None:
    whole = opened(folder)
    assert whole.are_ready(400)
    partial = prepare_first(request(tmp_path / "texts", tmp_path / "other"), Silent())
    train = opened(partial)
    assert train.are_ready(100)
    assert not train.are_ready(10_000)
    with pytest.raises(UserError, match="part 1 of .* is not prepared yet"):
        read(train, 10_000, 10_032)
    assert np.array_equal(read(train, 0, 100), read(whole, 0, 100))
    prepare_rest(partial, 1, print)
    assert train.are_ready(10_000)
    assert np.array_equal(read(train, 9_968, 10_000), read(whole, 9_968, 10_000))
    ranks = [list(train.micro_batches(9_968, 32, rank, 4, 2)) for rank in range(4)]
    rows = np.concatenate([batch.inputs for share in ranks for batch in share])
    assert np.array_equal(rows, read(whole, 9_968, 10_000))


def test_bad_records_after_the_first_part_are_left_out_and_reported(tmp_path: Path) -> None:
    sources = write_files(tmp_path / "texts")
    with (sources / "z.jsonl").open("w") as file:
        file.writelines(json.dumps({"text": text}) + "\n" for text in DOCUMENTS)
        file.write("{broken\n")
    folder = prepare_first(request(sources, tmp_path / "out"), Silent())
    said: list[str] = []
    prepare_rest(folder, 1, said.append)
    assert "1 bad record of part" in said[0] and f"{sources / 'z.jsonl'}:2001" in said[0]
    assert said[-1] == f"all texts are prepared, in {len(numbers_of(folder))} parts"
    assert len(said) == 2


def test_a_window_is_no_larger_if_a_shared_disk_shows_its_last_part_late(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usual = opened(folder)
    assert usual.are_ready(10_000)

    def is_dir(path: Path, plain: Any = Path.is_dir) -> bool:
        return path.name != "part-00003" and bool(plain(path))

    monkeypatch.setattr(Path, "is_dir", is_dir)
    late = opened(folder)
    assert late.are_ready(10_000)
    assert late._windows == usual._windows


def test_objects_below_an_address_are_fetched_one_by_one(folder: Path, tmp_path: Path) -> None:
    address = request(tmp_path / "texts", tmp_path / "stored")
    address = replace(address, sources=(f"file://{tmp_path / 'texts'}",))
    stored = prepare_first(address, Silent())
    prepare_rest(stored, 1, print)
    assert numbers_of(stored) == numbers_of(folder)
    for part in folder.glob("part-*"):
        assert (stored / part.name / "tokens.bin").read_bytes() == (
            part / "tokens.bin"
        ).read_bytes()


def test_a_folder_of_parts_is_inspected_and_has_no_epochs(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert nanoscale(["data", "inspect", str(folder)]) == 0
    first = (folder / "part-00000" / "tokens.bin").stat().st_size // 2
    assert f"{first:,} tokens" in capsys.readouterr().out
    words = ["recipe=debug", f"data.path={folder}", "data.source=megatron", "model.vocab=320"]
    assert nanoscale(["plan", *words, "train.epochs=1", "train.steps=null"]) == 2
    assert "these texts are prepared beside the training" in capsys.readouterr().err


def test_texts_that_have_changed_are_refused(tmp_path: Path) -> None:
    sources = write_files(tmp_path / "texts")
    folder = prepare_first(request(sources, tmp_path / "out"), Silent())
    write_jsonl(sources / "c.jsonl", DOCUMENTS[:1])
    with pytest.raises(UserError, match="have changed: start a new run"):
        prepare_rest(folder, 1, print)


def release_when_waiting(folder: Path, run: RunDirectory) -> threading.Thread:
    """Keep every process from preparing parts until the training waits for them; return the running thread."""
    lock = (folder / "lock").open()
    fcntl.flock(lock, fcntl.LOCK_EX)

    def release() -> None:
        with lock:
            wait_until(lambda: run.events.exists() and "waits for data" in run.events.read_text())

    thread = threading.Thread(target=release)
    thread.start()
    return thread


def write_lines(folder: Path) -> Path:
    folder.mkdir()
    for name in ("a.jsonl", "b.jsonl", "c.jsonl"):
        write_jsonl(folder / name, DOCUMENTS[:100])
    return folder


def words(tmp_path: Path, name: str) -> list[str]:
    return [
        "train", "recipe=debug", f"data.path={tmp_path / 'texts'}", "data.tokenizer=byte",
        f"train.seq_len={SEQ_LEN}", "model.vocab=320", "train.steps=30", "train.global_batch=8",
        "train.log_every=1", "precision=fp64",
        "launcher.device=cpu", f"run.root={tmp_path / 'runs'}", f"run.name={name}", "checkpoint=periodic",
    ]  # fmt: skip


def losses(run: RunDirectory) -> list[float]:
    return [record["loss"] for record in metrics.read(run)]


@pytest.mark.slow
def test_a_training_that_waits_is_the_one_that_does_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two ranks wait in about step 18 until the parts may be prepared; then one rank resumes the run."""
    monkeypatch.setenv("NANOSCALE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(text_preparation, "_MOST", 1000)
    monkeypatch.setattr(by_parts, "PART", 5000)
    write_lines(tmp_path / "texts")
    assert nanoscale([*words(tmp_path, "dry"), "--dry-run"]) == 0
    capsys.readouterr()
    (folder,) = (tmp_path / "cache" / "texts").glob("texts-*.parts")
    assert numbers_of(folder) == [0]
    run = RunDirectory(tmp_path / "runs" / "waits")
    thread = release_when_waiting(folder, run)
    assert nanoscale([*words(tmp_path, "waits"), "parallel.dp=2", "train.micro_batch=4"]) == 0
    thread.join()
    shares = {record["step"]: record.get("data_wait", 0) for record in metrics.read(run)}
    (waited,) = (step for step, share in shares.items() if share > 0.9)
    assert 10 < waited < 25
    capsys.readouterr()
    assert nanoscale([*words(tmp_path, "ready"), "--quiet"]) == 0
    assert capsys.readouterr().out.startswith("completed after 30 steps in ")
    ready = RunDirectory(tmp_path / "runs" / "ready")
    assert losses(run) == pytest.approx(losses(ready), rel=1e-9)
    assert not any("data_wait" in record for record in metrics.read(ready))
    assert nanoscale(["resume", str(ready.path), "train.steps=40"]) == 0
    assert nanoscale(["resume", str(run.path), "train.steps=40", "parallel.dp=1"]) == 0
    assert losses(run)[30:] == pytest.approx(losses(ready)[30:], rel=1e-9)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "code", "cause"),
    [
        ("changed", 2, "have changed: start a new run"),
        ("full", 1, "cannot be written: File too large"),
    ],
)
def test_a_training_whose_texts_cannot_be_prepared_ends_with_the_cause(
    fault: str, code: int, cause: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """A full disk takes not even the sentence that says so, so the launcher ends the ranks, which save."""
    monkeypatch.setenv("NANOSCALE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(text_preparation, "_MOST", 1000)
    monkeypatch.setattr(by_parts, "PART", 5000)
    folder = write_lines(tmp_path / "texts")
    start = RestOfTexts._start

    def start_without_disk(rest: RestOfTexts) -> Any:
        if fault == "changed":
            (folder / "c.jsonl").write_text('{"text": "other"}')
            return start(rest)
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, limits[1]))
        try:
            return start(rest)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)

    monkeypatch.setattr(RestOfTexts, "_start", start_without_disk)
    assert nanoscale(words(tmp_path, "fails")) == code
    assert cause in capsys.readouterr().err


@pytest.mark.parametrize("kills", [1, 3])
def test_a_killed_preparation_is_started_again(
    kills: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = prepare_first(request(write_files(tmp_path / "texts"), tmp_path / "out"), Silent())
    start, starts = RestOfTexts._start, []
    said: list[str] = []

    def start_and_kill(rest: RestOfTexts) -> Any:
        process = start(rest)
        starts.append(process)
        if len(starts) <= kills:
            process.kill()
        return process

    monkeypatch.setattr(RestOfTexts, "_start", start_and_kill)
    rest = RestOfTexts(folder, 1, said.append)
    rest.follow()
    killed = "the process that prepares the texts was killed by signal 9"
    assert said[0] == f"{killed}; it is started again"
    assert rest.problem == (killed if kills == 3 else "")
    assert (folder / "all.json").is_file() == (kills == 1)


def test_a_flipped_bit_in_a_part_is_noticed(folder: Path) -> None:
    tokens = folder / "part-00003" / "tokens.bin"
    content = bytearray(tokens.read_bytes())
    content[100] ^= 1
    tokens.write_bytes(content)
    with pytest.raises(UserError, match=r"part-00003/tokens.bin is damaged .* rm -r -- "):
        opened(folder).are_ready(10_000)

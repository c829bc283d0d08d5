"""Commands with s3:// addresses, on a real S3 server: uploads, a machine that is lost, and data."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from nanoscale.cli.main import run as nanoscale
from nanoscale.common import object_storage
from nanoscale.runs import events
from nanoscale.runs.directory import RunDirectory
from tests.support.jobs import EXACT, Curve
from tests.support.runs import create_run
from tests.support.s3_server import BUCKET, environment, s3_environment, s3_server

pytestmark = pytest.mark.usefixtures("forked_ranks")
UPLOAD = f"checkpoint.upload=s3://{BUCKET}/models"
WORDS = [
    "recipe=debug",
    "model.layers=2",
    "run.name=run",
    "train.log_every=1",
    "checkpoint.every=5",
]


@pytest.fixture(scope="module")
def server() -> Iterator[int]:
    with s3_server() as port, s3_environment(port):
        storage, _ = object_storage.open_storage(f"s3://{BUCKET}")
        storage.mkdir(BUCKET)
        yield port


@pytest.fixture
def storage(server: int):
    storage, _ = object_storage.open_storage(f"s3://{BUCKET}")
    yield storage
    if storage.find(BUCKET):
        storage.rm(storage.find(BUCKET))


def curve(run: Path) -> Curve:
    lines = (run / "metrics.jsonl").read_text().splitlines()
    return [{name: json.loads(line)[name] for name in EXACT} for line in lines]


@pytest.mark.slow
def test_a_run_continues_bit_for_bit_from_its_uploads(tmp_path, storage, capsys):
    words = [*WORDS, "train.steps=15", "parallel.dp=2"]
    assert nanoscale(["train", *words, f"run.root={tmp_path}/whole"]) == 0
    begun = [*words, f"run.root={tmp_path}/cut", UPLOAD, "train.stop_when.last_step=10"]
    assert nanoscale(["train", *begun]) == 0
    run = RunDirectory(tmp_path / "cut/run")
    uploaded = [event["step"] for event in events.read(run) if event["kind"] == "upload"]
    assert {5, 10} >= set(uploaded) >= {10}
    assert "step-00000010 uploaded to s3://bucket/models" in capsys.readouterr().out
    shutil.rmtree(run.checkpoints)
    further = ["resume", str(run.path), "train.stop_when.last_step=null"]
    assert nanoscale([*further, "--dry-run"]) == 0
    assert "fetching the checkpoint of step 10" in capsys.readouterr().err
    assert not run.checkpoints.exists()
    assert nanoscale(further) == 0
    assert curve(run.path) == curve(tmp_path / "whole/run")
    _require_no_secret(tmp_path)
    shutil.rmtree(tmp_path / "cut")  # another machine, with an empty disk
    assert nanoscale(["train", *words, f"run.root={tmp_path}/cut", UPLOAD, "train.steps=20"]) == 0
    assert "the run continues after step 15" in capsys.readouterr().err
    assert [record["step"] for record in curve(run.path)] == list(range(16, 21))
    assert nanoscale(["resume", str(run.path), "train.steps=21", "--dry-run"]) == 0


def _require_no_secret(folder: Path) -> None:
    for file in folder.rglob("*"):
        if file.is_file():
            assert environment(1)["AWS_SECRET_ACCESS_KEY"].encode() not in file.read_bytes(), file


def test_a_name_that_another_run_has_uploaded_is_refused(tmp_path, storage, capsys):
    from nanoscale.checkpoint.remote import RemoteCheckpoints
    from tests.checkpoint.test_upload import publish

    (tmp_path / "other").mkdir()
    run = create_run(tmp_path / "other", "run")
    from nanoscale.runs import fence

    fence.begin(run, 1)
    path = publish(run, 5)
    manifest = json.loads((path / "manifest.json").read_text())
    manifest["config"] = {"model.layers": 3}
    (path / "manifest.json").write_text(json.dumps(manifest))
    remote = RemoteCheckpoints(f"s3://{BUCKET}/models", "run")
    storage.put_file(str(path / "manifest.json"), f"{BUCKET}/models/run/{path.name}/manifest.json")
    assert remote.steps() == [5]
    words = [*WORDS, f"run.root={tmp_path}", UPLOAD]
    assert nanoscale(["train", *words, "--dry-run"]) == 2
    error = capsys.readouterr().err
    assert "model.layers differ" in error
    assert "run.name=run-2" in error
    assert nanoscale(["train", *words, "--dry-run", "run.name=run-2"]) == 0


@pytest.mark.exhaustive
def test_data_of_a_bucket_trains_as_the_same_data_here(tmp_path, storage, capsys, monkeypatch):
    monkeypatch.setenv("NANOSCALE_CACHE", str(tmp_path / "cache"))
    text = tmp_path / "texts.jsonl"
    lines = [json.dumps({"text": f"the number {n} " * 40}) for n in range(100)]
    text.write_text("\n".join(lines) + "\n")
    prepared = tmp_path / "prepared"
    words = ["data", "prepare", str(text), "--out", str(prepared), "--tokenizer", "byte"]
    assert nanoscale([*words, "--validation", "0.1"]) == 0
    storage.put(f"{prepared}/", f"{BUCKET}/prepared/", recursive=True)
    storage.put_file(str(text), f"{BUCKET}/texts.jsonl")
    curves = {}
    paths = {
        "folder": prepared, "file": text, "s3-folder": f"s3://{BUCKET}/prepared",
        "s3-file": f"s3://{BUCKET}/texts.jsonl",
    }  # fmt: skip
    for name, path in paths.items():
        kind = [] if "file" in name else ["data.source=megatron"]
        words = ["recipe=debug", f"data.path={path}", *kind, f"run.name={name}", "train.steps=3"]
        assert nanoscale(["train", *words, f"run.root={tmp_path}/runs", "train.log_every=1"]) == 0
        curves[name] = curve(tmp_path / "runs" / name)
    assert curves["folder"] == curves["s3-folder"]
    assert curves["file"] == curves["s3-file"]
    capsys.readouterr()
    words = ["recipe=debug", f"data.mixture={{a: {{path: s3://{BUCKET}/prepared/tokens}}}}"]
    words += ["data.source=megatron", "--dry-run", f"run.root={tmp_path}/runs"]
    assert nanoscale(["train", *words]) == 0
    error = capsys.readouterr().err
    assert f"s3://{BUCKET}/prepared is read from {tmp_path}/cache/fetched" in error
    assert "bytes (no tokenizer.json)" not in error
    assert "fetching" not in error  # it is in the cache
    storage.pipe_file(f"{BUCKET}/texts.jsonl", text.read_bytes().replace(b"number", b"figure"))
    assert nanoscale(["config", "show", "recipe=debug", f"data.path={paths['s3-file']}"]) == 0
    assert "fetching" in capsys.readouterr().err  # the object has changed


@pytest.mark.parametrize("key", ["data.path", "checkpoint.upload"])
@pytest.mark.parametrize(
    ("address", "problem"),
    [
        ("s3://no-such-bucket/x", "bucket does not exist"),
        ("s3://me:secret@bucket/x", "holds a credential"),
        ("ftp://bucket/x", "must begin with s3://"),
        ("gs://bucket/x", "needs gcsfs, which is not installed"),
    ],
)
def test_an_address_that_cannot_be_used_is_one_error(
    tmp_path, storage, capsys, monkeypatch, key, address, problem
):
    monkeypatch.setitem(sys.modules, "gcsfs", None)  # as if it were not installed
    words = [*WORDS, f"{key}={address}", "data.source=megatron", f"run.root={tmp_path}"]
    words = [word for word in words if key == "data.path" or not word.startswith("data.source")]
    assert nanoscale(["train", *words]) == 2
    error = capsys.readouterr().err
    assert key in error
    assert problem in error.replace("\n", " ")
    assert "secret" not in error or key == "checkpoint.upload"  # which the command line shows
    assert "Traceback" not in error
    assert list(tmp_path.iterdir()) == []
    if "gs:" in address:
        assert "install" in error
        assert "gcsfs" in error


@contextmanager
def _authentication(url: str) -> Iterator[None]:
    """Let the server check credentials within the block, so that it refuses ours."""
    for count in ("0", "inf"):
        if count == "inf":
            yield
        body = count.encode()
        request = urllib.request.Request(url, data=body, headers={"Content-Type": "text/plain"})
        urllib.request.urlopen(request).close()


def test_refused_access_is_one_error(tmp_path, server, storage, capsys):
    storage.pipe_file(f"{BUCKET}/x.jsonl", b"{}")
    url = f"http://127.0.0.1:{server}/moto-api/reset-auth"
    with _authentication(url):
        for word in (UPLOAD, f"data.path=s3://{BUCKET}/x.jsonl"):
            assert nanoscale(["train", *WORDS, word, f"run.root={tmp_path}"]) == 2
            error = capsys.readouterr().err
            assert word.partition("=")[0] in error
            assert "AWS_ACCESS_KEY_ID" in error or "access key" in error.lower()


def test_commands_without_an_address_import_no_storage(tmp_path):
    program = (
        "import sys; from nanoscale.cli.main import run\n"
        "assert run(['train', '--dry-run', 'recipe=debug', 'run.name=x']) == 0\n"
        "print(*{'fsspec', 's3fs', 'aiohttp', 'botocore'} & set(sys.modules), file=sys.stderr)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, timeout=60,
        check=True, env={"PATH": "/usr/bin:/bin", "PYTHONPATH": str(Path(__file__).parents[2])},
    )  # fmt: skip
    assert done.stderr.splitlines()[-1:] in ([], [""])

"""`nanoscale generate` from the command line."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from pathlib import Path

import pytest

from nanoscale.cli.jobs import generate
from nanoscale.cli.main import run as nanoscale
from nanoscale.common import display
from nanoscale.common.display import clean
from tests.cli import Capsys
from tests.support.jobs import run_of_bytes

GREEDY = ["--temperature", "0", "--max-tokens", "12"]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "runs").mkdir()
    run_of_bytes(tmp_path / "runs")
    monkeypatch.chdir(tmp_path)
    return tmp_path


class Typed(io.StringIO):
    """Standard input or output that is a terminal."""

    def isatty(self) -> bool:
        return True


def said(capsys: Capsys, *words: str) -> str:
    assert nanoscale(["generate", "run", *words]) == 0
    return capsys.readouterr().out


def test_one_prompt(folder: Path, capsys: Capsys, monkeypatch: pytest.MonkeyPatch) -> None:
    text = said(capsys, "--prompt", "abc", *GREEDY)
    document = json.loads(said(capsys, "--prompt", "abc", *GREEDY, "--json"))
    ended = document["text"] + "\n" * (not document["text"].endswith("\n"))
    assert clean(ended) == text  # control characters would act on a terminal behind the pipe
    assert (document["prompt_tokens"], document["model"]) == (4, "run, step-00000007")
    assert document["tokens"] == 12 or document["finish"] == "end"
    monkeypatch.setattr(sys, "stdin", io.StringIO("abc\n"))
    assert said(capsys, *GREEDY) == text
    warm = ["--prompt", "abc", "--temperature", "1", "--json"]
    seed = json.loads(said(capsys, *warm))["seed"]
    pair = [json.loads(said(capsys, *warm, "--seed", str(seed))) for _ in range(2)]
    assert pair[0]["text"] == pair[1]["text"] and pair[0]["seed"] == seed


def test_a_file_of_prompts(folder: Path, capsys: Capsys) -> None:
    Path("p.jsonl").write_text('{"prompt": "abc", "id": 7}\n\n{"prompt": "z"}\r\n')
    begins = json.loads(said(capsys, "--prompt", "abc", *GREEDY, "--json"))["text"][:1]
    assert nanoscale(["generate", "run", "--prompt", "abc", *GREEDY, "--stop", begins]) == 0
    assert "the answer is empty: it began with a text of --stop" in capsys.readouterr().err
    beams = said(capsys, "--prompt", "abc", "--beams", "3", "--max-tokens", "5")
    assert beams == said(capsys, "--prompt", "abc", "--beams", "3", "--max-tokens", "5")
    Path("p.txt").write_text("abc\nz\n")
    first, second = map(json.loads, said(capsys, "--prompts", "p.jsonl", *GREEDY).splitlines())
    assert (first["id"], first["prompt"], second["prompt"]) == (7, "abc", "z")
    assert said(capsys, "--prompts", "p.txt", *GREEDY, "--out", "out.jsonl") == ""
    lines = [json.loads(line) for line in Path("out.jsonl").read_text().splitlines()]
    assert [line["text"] for line in lines] == [first["text"], second["text"]]
    found = json.loads(said(capsys, "--prompts", "p.txt", *GREEDY, "--json"))
    assert found["results"] == lines and found["chat"] is False
    alone = json.loads(said(capsys, "--prompt", "z", *GREEDY, "--json"))
    assert alone["text"] == second["text"], "whatever was answered before"


@pytest.mark.slow
def test_prompts_on_several_devices(folder: Path, capsys: Capsys) -> None:
    """More batches than processes, the last one smaller; a process that cannot read the model is an error."""
    Path("p.txt").write_text("".join(f"prompt {number}\n" for number in range(150)))
    both = ["--prompts", "p.txt", *GREEDY, "--dtype", "fp64", "--device", "cpu"]
    one = said(capsys, *both)
    assert said(capsys, *both[:-2], "--num-gpus", "2") == one and len(one.splitlines()) == 150
    alone = json.loads(said(capsys, "--prompt", "prompt 149", *GREEDY, "--json", "--dtype", "fp64"))
    assert json.loads(one.splitlines()[-1])["text"] == alone["text"]
    (shard,) = folder.glob("runs/run/checkpoints/step-*/*.distcp")
    shard.write_bytes(shard.read_bytes()[:-5])
    assert nanoscale(["generate", "run", *both[:-2], "--num-gpus", "2"]) == 2
    seen = capsys.readouterr()
    assert seen.out == "" and "is damaged" in seen.err and "Traceback" not in seen.err


def test_what_is_wrong_is_one_error(folder: Path, capsys: Capsys) -> None:
    Path("bad.jsonl").write_text('{"prompt": "a"}\n{"promt": "b"}\n')
    Path("empty.txt").write_text("\n \n")
    Path("latin.txt").write_bytes(b"caf\xe9\n")
    Path("there").touch()
    prompt, many = ["--prompt", "x"], ["--prompts", "bad.jsonl"]
    for words, text in (
        ([*prompt, "--temperature", "-1"], "--temperature=-1.0: must be 0 or more"),
        ([*prompt, "--temperature", "nan"], "must be 0 or more"),
        ([*prompt, "--beams", "2", "--top-k", "5"], "--top-k draws a text, and --beams"),
        ([*prompt, "--top-k", "0"], "--top-k=0: must be at least 1"),
        ([*prompt, "--top-p", "1.5"], "--top-p=1.5: must be above 0 and at most 1"),
        ([*prompt, "--max-tokens", "0"], "--max-tokens=0"),
        ([*prompt, "--stop", ""], "must be a text"),
        ([*prompt, "--prompts", "p.txt"], "remove one of them"),
        ([*prompt, "--out", "o"], "--out is for the JSON lines"),
        ([*prompt, "--step", "3"], "--step 7"),
        (["a b"], "type instead: --prompt 'a b'\n"),
        ([*prompt, "--device", "cuda:77"], "not a device of this machine"),
        ([*prompt, "--num-gpus", "2"], "--num-gpus is for --prompts"),
        ([*many, "--num-gpus", "2", "--device", "cpu"], "remove one of them"),
        ([*many, "--num-gpus", "0"], "greater than or equal to 1"),
        (["--prompts", "none.txt"], "No such file"),
        (["--prompts", "empty.txt"], "holds no prompt"),
        (["--prompts", "latin.txt"], "is not UTF-8 at byte 3"),
        (["--prompts", "bad.jsonl"], 'bad.jsonl:2: is not a JSON object with a text "prompt"'),
        (["--prompts", "bad.jsonl", "--out", "there"], "already exists"),
        (["--prompts", "bad.jsonl", "--out", "no/o"], "there is no folder"),
        (["--prompt", "x" * 60], "has 61 tokens, and the model's context is 48"),
    ):
        assert nanoscale(["generate", "run", *words]) == 2, words
        seen = capsys.readouterr()
        assert text in seen.err and "Traceback" not in seen.err, words
        assert seen.out == ""
    assert nanoscale(["generate", "rum", *prompt]) == 2
    assert "type instead: run" in capsys.readouterr().err


def test_a_conversation(folder: Path, capsys: Capsys, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C while typing and while it answers, an empty line, a prompt that is too long, and Ctrl-D."""
    lines = iter(["abc", KeyboardInterrupt, "", "x" * 60, "slow", "abc", EOFError])
    stream = generate.Writer.stream

    def typed(_: str) -> str:
        line = next(lines)
        if isinstance(line, str):
            return line
        raise line

    def answer(writer, tokens, *rest, **how):  # type: ignore[no-untyped-def]
        if tokens[-4:] == list(b"slow"):
            raise KeyboardInterrupt
        return stream(writer, tokens, *rest, **how)

    alone = said(capsys, "--prompt", "abc", *GREEDY)
    monkeypatch.setattr("builtins.input", typed)
    monkeypatch.setattr(generate.Writer, "stream", answer)
    monkeypatch.setattr(sys, "stdin", Typed())
    monkeypatch.setattr(sys, "stdout", screen := Typed())
    assert nanoscale(["generate", "run", *GREEDY]) == 0
    shown = display.clean(alone)  # on a terminal
    assert screen.getvalue() == f"{shown}\n\n{shown}\n"
    assert "the prompt has 61 tokens" in capsys.readouterr().err
    monkeypatch.setattr(sys, "stdout", io.StringIO())
    assert nanoscale(["generate", "run"]) == 2, "nobody would see the question"


@pytest.mark.slow
def test_a_reader_that_has_seen_enough(folder: Path) -> None:
    words = [sys.executable, "-m", "nanoscale", "generate", "run", "--prompt", "abc", "--seed", "1"]
    with subprocess.Popen(
        words, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        env={"PATH": "/usr/bin:/bin", "PYTHONPATH": str(Path(__file__).parents[2])},
    ) as process:  # fmt: skip
        assert process.stdout is not None and process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == b""
    assert process.returncode == 0

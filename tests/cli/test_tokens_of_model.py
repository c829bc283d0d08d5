"""A pretrained model is trained on the tokens of its own tokenizer."""

from __future__ import annotations

import json
import shlex
import shutil
from pathlib import Path

import pytest

from nanoscale.cli.common import text_preparation
from nanoscale.cli.main import run as nanoscale
from nanoscale.config.objectives import RECORDS
from nanoscale.config.token_files import manifest
from nanoscale.data.tokens.tokenizer import digest, train_bpe
from tests.support import hf_families
from tests.support.hf_families import COMMON, FAMILIES

TEXTS = ("To be, or not to be, that is the question. ", "La vie est belle, et la mer est loin. ")


@pytest.fixture(autouse=True)
def _model(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    settings = COMMON | {"vocab_size": 300, "max_position_embeddings": 64}
    monkeypatch.setitem(FAMILIES, "llama", ("Llama", settings))
    hf_families.save("llama", Path("model"))
    Path("other").mkdir()
    for folder, text in zip(("model", "other"), TEXTS, strict=True):
        train_bpe([text * 20] * 9, 280, Path(folder, "tokenizer.json"))
    Path("a.jsonl").write_text(f"{json.dumps({'text': TEXTS[0] * 9})}\n" * 40)


def prepared(tokenizer, capsys):
    shutil.rmtree("tokens", ignore_errors=True)
    words = ["data", "prepare", "a.jsonl", "--tokenizer", tokenizer, "--out", "tokens", "--json"]
    assert nanoscale(words) == 0
    capsys.readouterr()


def training(capsys, *words):
    line = ["recipe=finetune", "model.init_from=./model", "data.path=tokens", "train.seq_len=64"]
    code = nanoscale(["train", *line, "launcher.device=cpu", "parallel.dp=1", "--dry-run", *words])
    return code, capsys.readouterr().err


@pytest.mark.parametrize(
    ("tokenizer", "made"), [("byte", "holds bytes"), ("other", "holds tokens of")]
)
def test_tokens_of_another_tokenizer_are_refused(tokenizer, made, capsys):
    prepared(tokenizer, capsys)
    code, said = training(capsys)
    assert code == 2
    assert made in said and f"--tokenizer {Path('model').absolute()}" in said


def test_tokens_of_its_own_tokenizer_are_trained(capsys):
    prepared("./model", capsys)
    assert training(capsys)[0] == 0
    own = Path("model/tokenizer.json")  # the same texts, written in another form
    own.write_text(json.dumps(json.loads(own.read_text()) | {"normalizer": None}, indent=4))
    assert training(capsys)[0] == 0
    own.unlink()
    assert training(capsys)[0] == 0


def test_the_tokens_of_inspect_eval_and_a_teacher_are_the_models_too(capsys):
    prepared("other", capsys)
    inspect = ["data", "inspect", "tokens", "recipe=finetune"]
    assert nanoscale([*inspect, "model.init_from=./model"]) == 1
    assert "the ids mean other texts to the model in" in "".join(capsys.readouterr())
    shutil.move("model/tokenizer.json", "kept.json")
    assert nanoscale([*inspect, "model.init_from=./model"]) == 0  # it is not known
    shutil.move("kept.json", "model/tokenizer.json")
    capsys.readouterr()
    words = ["eval", "./model", "train.seq_len=32", "launcher.device=cpu", "parallel.dp=1"]
    assert nanoscale(words) == 2  # by default Python's library in bytes
    advice = capsys.readouterr().err.partition("type instead: ")[2].splitlines()[0]
    assert advice == f"data.tokenizer={Path('model/tokenizer.json').absolute()}"
    hf_families.save("llama", Path("other"))
    prepared("./model", capsys)
    distill = ["train.objective=distill", "train.teacher=./other", "train.steps=30"]
    code, said = training(capsys, *distill)
    assert code == 2 and "train.teacher" in said and "needs the same tokenizer" in said
    Path("other/tokenizer.json").write_bytes(Path("model/tokenizer.json").read_bytes())
    assert training(capsys, *distill)[0] == 0


def test_what_was_prepared_is_trained_with_the_words_that_are_printed(capsys):
    assert nanoscale(["data", "prepare", "a.jsonl", "--tokenizer", "byte", "--out", "tokens"]) == 0
    line = capsys.readouterr().out.partition("nanoscale train recipe=… ")[2].split()
    assert "model.vocab=320" in line
    job = ["recipe=debug", "train.seq_len=32", "launcher.device=cpu", "parallel.dp=1"]
    assert nanoscale(["train", *job, *line, "--dry-run"]) == 0


@pytest.fixture
def line(tmp_path, monkeypatch):
    monkeypatch.setenv("NANOSCALE_CACHE", str(tmp_path / "cache"))
    job = ["recipe=debug", "train.seq_len=32", "launcher.device=cpu", "parallel.dp=1"]
    return ["train", *job, "--dry-run", "--json"]


def test_a_text_file_becomes_tokens_of_the_models_tokenizer_once(line, capsys):
    words = ["recipe=finetune", "model.init_from=./model", "data.path=a.jsonl", "--dry-run"]
    for command in ("train", "plan"):
        text_preparation._prepared.cache_clear()  # each command is a process of its own
        others = words[:-1] if command == "plan" else words
        assert nanoscale([command, *others, *line[2:5]]) == 0
        assert (
            "40 documents, " in (said := capsys.readouterr().err) and "tokenizer: ./model" in said
        )
    (folder,) = Path("cache/texts").iterdir()
    found = manifest(folder)
    assert found is not None and found["tokenizer"] == digest(Path("model/tokenizer.json"))
    Path("a.jsonl").write_text(json.dumps({"text": TEXTS[1] * 99}))
    text_preparation._prepared.cache_clear()
    assert nanoscale(["train", *words, *line[2:5]]) == 0
    assert len(list(Path("cache/texts").iterdir())) == 2


@pytest.mark.parametrize(
    "record",
    [
        {"messages": [{"role": "user", "content": "2+2"}, {"role": "assistant", "content": "4"}]},
        {"instruction": "2+2", "output": "4"},
    ],
)
def test_a_file_of_chats_is_recognised(line, record, capsys):
    Path("chats.jsonl").write_text(f"{json.dumps(record)}\n" * 60)
    assert nanoscale([*line, "data.path=chats.jsonl", "data.valid_path=chats.jsonl"]) == 0
    out, err = capsys.readouterr()
    assert "60 chats" in err and "texts/chats.jsonl-" in out


def test_a_large_text_file_is_prepared_with_the_command_that_is_shown(line, capsys, monkeypatch):
    monkeypatch.setattr(text_preparation, "_MOST", 1000)
    # data.path would be prepared beside the training
    assert nanoscale([*line, "data.path=a.jsonl", "data.valid_path=a.jsonl"]) == 2
    (command,) = json.loads(capsys.readouterr().out)["error"]["violations"][0]["suggestions"]
    assert nanoscale(shlex.split(command)[1:]) == 0
    assert nanoscale([*line, "data.path=a-tokens", "data=megatron"]) == 0


def errors(line, capsys, *words):
    capsys.readouterr()
    assert nanoscale([*line, *words]) == 2
    return json.loads(capsys.readouterr().out)["error"]["violations"]


def test_a_path_that_names_no_texts_is_answered_as_prepare_answers_it(line, capsys):
    Path("code.py").write_text("print(1)")
    for path, what in (("nope.jsonl", "no such file"), ("code.py", ".tar (all also .gz and .zst)")):
        (wrong,) = errors(line, capsys, f"data.path={path}")
        assert (wrong["key"], wrong["value"]) == ("data.path", path) and what in wrong["message"]
        assert wrong["source"] == "command line"
    inspect = ["data", "inspect", "--json"]
    (wrong,) = errors(inspect, capsys, "a.jsonl")
    (command,) = wrong["suggestions"]
    assert nanoscale(shlex.split(command)[1:]) == 0
    assert nanoscale([*inspect, "tokens"]) == 0


def test_the_objective_of_other_records_is_answered_with_their_form(line, capsys):
    (wrong,) = errors(line, capsys, "data.path=a.jsonl", "train.objective=dpo")
    assert '"chosen": "…"' in wrong["message"] and not wrong["suggestions"]
    Path("pairs.jsonl").write_text(
        "".join(
            json.dumps({"prompt": "?", "chosen": "1" * 9, "rejected": f"{i}"}) + "\n"
            for i in range(60)
        )
    )
    (wrong,) = errors(line, capsys, "train.objective=dpo")
    advice = wrong["suggestions"][0].replace("/path/to/", "").split()
    assert nanoscale([*line, "train.objective=dpo", *advice]) == 0
    for objective in ("classify", "masked"):
        wrong = errors(line, capsys, f"train.objective={objective}")[0]
        assert wrong["suggestions"] == ["model=hf model.name=/path/to/model"]


EARLY = {
    "lora.targets": ["lora.rank=4", "lora.targets=[nope]", "model.init_from=./model"],
    "launcher.device": ["launcher.device=cuda"],
    "precision.fp8": ["precision.fp8=true"],
    "train.teacher": ["train.objective=distill", "train.teacher=./nothing"],
    "train.objective": ["train.objective=dpo"],
}


@pytest.mark.parametrize("key", EARLY)
def test_what_needs_no_tokens_is_refused_before_texts_are_prepared(line, key, capsys):
    batch = ["cluster=h100-sxm", "--num-nodes", "2"]
    job = [*line[1:-2], "data.path=a.jsonl", *EARLY[key], "--json"]
    commands = (["train", "--dry-run"], ["plan"], ["submit", "--dry-run"], ["rehearse", *batch])
    commands += (["plan", *batch],)
    if key == "precision.fp8":  # an error about the hardware alone
        errors(["plan", "--search", *job], capsys)
    else:
        commands += (["plan", "--search"], ["plan", "--inference"])
    for command in commands if key != "launcher.device" else commands[:1]:  # only here is no GPU
        assert key in {it["key"] for it in errors([*command, *job], capsys)}, command
    if key == "train.objective":  # the records are wrong
        errors(["config", "show", *job], capsys)
    else:
        assert nanoscale(["config", "show", *job]) == 0
        shown = capsys.readouterr()
        assert "as it is written, since the job cannot start: " in shown.err
        assert json.loads(shown.out)["data"]["path"] == "a.jsonl"
    assert not Path("cache").exists()


def test_a_length_that_follows_from_the_texts_is_not_refused_before_they_are_prepared():
    job = ["recipe=chat", "model.init_from=./model", "data.path=a.jsonl", "launcher.device=cpu"]
    assert nanoscale(["train", *job, "--dry-run"]) == 0  # the model has 64 positions, not 2,048


KINDS = {
    "chat": ({"messages": [{"role": "user"}]}, ["recipe=chat"]),
    "pairs": ({"chosen": "1", "rejected": "2"}, ["recipe=dpo"]),
    "rated": ({"prompt": "1", "completion": "2", "label": "good"}, ["recipe=kto"]),
    "labels": (
        {"text": "abc", "class": "x"},
        ["recipe=classify", "model.name=./model", "train.labels=2"],
    ),
    "text": ({"question": "?", "answer": "!"}, ["recipe=chat"]),
}


@pytest.mark.parametrize("kind", KINDS)
def test_the_form_of_wrong_records_is_shown_once_with_a_command_that_skips_them(kind, capsys):
    record, job = KINDS[kind]
    right = json.loads(RECORDS[kind].replace("…", "yes", 2))
    lines = [record, *[right] * 60, record] if kind == "text" else [right] * 60 + [record]
    Path("r.jsonl").write_text("".join(f"{json.dumps(it)}\n" for it in lines))
    words = ["train", *job, "model.init_from=./model", "launcher.device=cpu", "--json"]
    *_, wrong = errors(words, capsys, "data.path=r.jsonl", "--dry-run")
    remedy = wrong["remedy"]
    assert remedy.count(RECORDS[kind]) == 1 and "with --bad skip" not in remedy
    command = remedy.partition("`")[2].partition("`")[0]
    assert nanoscale(shlex.split(command)[1:]) == 0
    assert manifest(Path(remedy.partition("data.path=")[2].partition(";")[0])) is not None


def test_labels_that_no_objective_reads_are_named(line, capsys):
    record = {"text": "abc def " * 20, "label": 1}
    Path("labels.jsonl").write_text(f"{json.dumps(record)}\n" * 60)
    assert nanoscale([*line, "data.path=labels.jsonl"]) == 0
    assert "`label` is not used" in capsys.readouterr().err

"""Every recipe of a task trains with a model and a file alone, whatever the form and the size of the file."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from nanoscale.cli.common import text_preparation
from nanoscale.cli.common.request import CommandLine
from nanoscale.cli.main import run as nanoscale
from nanoscale.common.devices import Devices
from nanoscale.config.resolved import ResolvedConfig
from nanoscale.config.rules import check
from nanoscale.config.token_files import times_seen
from nanoscale.data import open_data
from nanoscale.data.tokens.tokenizer import train_bpe
from tests.cli import Capsys
from tests.support import hf_families
from tests.support.hf_families import COMMON, FAMILIES
from tests.support.jobs import make_run, read_metrics, train

pytestmark = pytest.mark.usefixtures("forked_ranks")
FEW, MANY = 40, 4000
Records = Callable[[int], Any]


def _turns(number: int, answer: str = "") -> list[dict[str, str]]:
    answer = answer or f"{number + 1}"
    return [
        {"role": "user", "content": f"What comes after {number}?"},
        {"role": "assistant", "content": answer},
    ]


FORMS: dict[str, Records] = {
    "text": lambda i: {"text": f"The number after {i} is {i + 1}."},
    "messages": lambda i: {"messages": _turns(i)},
    "sharegpt": lambda i: {
        "conversations": [
            {"from": {"user": "human"}.get(it["role"], "gpt"), "value": it["content"]}
            for it in _turns(i)
        ]
    },
    "alpaca": lambda i: {"instruction": "Add 1.", "input": str(i), "output": str(i + 1)},
    "texts of pairs": lambda i: {"prompt": f"After {i}?", "chosen": f"{i + 1}", "rejected": f"{i}"},
    "lists of pairs": lambda i: {"chosen": _turns(i), "rejected": _turns(i, str(i))},
    "rated texts": lambda i: {
        "prompt": f"After {i}?",
        "completion": f"{i + i % 2}",
        "label": i % 2 > 0,
    },
    "rated chats": lambda i: {"messages": _turns(i), "label": i % 2},
    "names of labels": lambda i: {"text": f"It was good {i}", "label": ("positive", "bad")[i % 2]},
    "labels": lambda i: {"text": f"It was good {i}", "label": i % 3},
}
CHATS = ("messages", "sharegpt", "alpaca")
PAIRS = ("texts of pairs", "lists of pairs")
TASKS: dict[str, tuple[str, ...]] = {
    "finetune": ("text",),
    "lora": ("text",),
    "chat": CHATS,
    "chat-lora": CHATS,
    "qlora": ("text", *CHATS),
    "dpo": PAIRS,
    "orpo": PAIRS,
    "kto": ("rated texts", "rated chats"),
    "distill": ("text", "messages"),
    "classify": ("names of labels", "labels"),
    "encoder": ("text",),
}
"""The recipes of tasks, and the forms of files that they read."""
ENCODERS = ("classify", "encoder")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama and a BERT, whose contexts are shorter than the recipes' samples, and files of every form."""
    from transformers import AutoModelForMaskedLM, BertConfig

    here = tmp_path_factory.mktemp("tasks")
    sizes = {"hidden_size": 64, "intermediate_size": 64, "max_position_embeddings": 256}
    with pytest.MonkeyPatch.context() as patch:
        settings = COMMON | sizes | {"vocab_size": 320}
        patch.setitem(FAMILIES, "llama", ("Llama", settings))
        for name in ("model", "teacher"):
            hf_families.save("llama", here / name)
    torch.manual_seed(0)
    heads = {"num_hidden_layers": 2, "num_attention_heads": 4}
    bert = BertConfig(vocab_size=321, **sizes, **heads)
    AutoModelForMaskedLM.from_config(bert).save_pretrained(here / "encoder")
    lines = [json.dumps(form(i)) for form in FORMS.values() for i in range(30)]
    for name in ("model", "teacher", "encoder"):
        train_bpe(lines, 320, here / name / "tokenizer.json")
    file = here / "encoder" / "tokenizer.json"
    document = json.loads(file.read_text())
    mask = document["added_tokens"][0] | {"id": 320, "content": "[MASK]"}
    file.write_text(json.dumps(document | {"added_tokens": [*document["added_tokens"], mask]}))
    for name, form in FORMS.items():
        for count in (FEW, MANY):
            records = (json.dumps(form(i)) + "\n" for i in range(count))
            (here / f"{name}-{count}.jsonl").write_text("".join(records))
    return here


@pytest.fixture(autouse=True)
def _here(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    monkeypatch.setenv("NANOSCALE_CACHE", str(folder / "cache"))
    monkeypatch.setattr(text_preparation, "cores", lambda: 1)


def words_of(task: str, form: str, count: int) -> list[str]:
    model = "./encoder" if task in ENCODERS else "./model"
    words = [f"recipe={task}", f"model.init_from={model}", f"data.path={form}-{count}.jsonl"]
    return words + (["train.teacher=./teacher"] if task == "distill" else [])


def checked(task: str, form: str, count: int) -> ResolvedConfig:
    return check(CommandLine(words_of(task, form, count)).compose(), Devices("cpu", 1))


@pytest.mark.parametrize("count", [FEW, MANY])
@pytest.mark.parametrize(("task", "form"), [(it, form) for it in TASKS for form in TASKS[it]])
def test_a_file_as_people_have_it_is_all_that_a_task_needs(
    task: str, form: str, count: int
) -> None:
    config = checked(task, form, count)
    data = open_data(config.data, config.train, config.model.vocab)
    samples, epochs = len(data.train), config.train.epochs
    rows = 2 if task in ("dpo", "orpo") else 1
    assert samples > 0 and epochs is not None
    seen = times_seen(config)
    assert seen is not None and epochs <= seen < epochs + config.train.global_batch / samples / rows
    least = min(10, samples * rows * epochs // rows)
    assert config.train.steps >= least, "a small file has steps enough, too"
    assert config.train.seq_len <= 256 and config.scheduler.warmup_steps <= config.train.steps // 10
    if count == MANY:
        assert config.train.steps < 1000


@pytest.mark.parametrize("task", TASKS)
def test_a_task_trains(task: str, tmp_path: Path) -> None:
    """The losses of the first and the last steps are finite, and adapters are all that LoRA trains."""
    config = checked(task, TASKS[task][0], FEW)
    config = replace(config, run=replace(config.run, root=str(tmp_path)))
    run = make_run(config)
    train(run, config)
    losses = [record["loss"] for record in read_metrics(run)]
    assert losses and all(0 < loss < 20 for loss in losses)
    assert (config.lora.rank > 0) == ("lora" in task)


@pytest.mark.slow
def test_a_classifier_of_names_is_trained_and_exported(
    tmp_path: Path, capsys: Capsys, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import AutoModelForSequenceClassification

    text_preparation._prepared.cache_clear()
    assert nanoscale(["train", *words_of("classify", "names of labels", FEW)]) == 0
    out, err = capsys.readouterr()
    assert "labels: bad, positive" in err and "3.08 epochs" in out
    (run,) = Path("runs").iterdir()
    frozen = yaml.safe_load((run / "config.yaml").read_text())
    assert frozen["train"]["labels"] == 2
    export = ["checkpoints", "export", run.name, "--format", "hf", "--out", str(tmp_path / "out")]
    assert nanoscale(export) == 0
    model = AutoModelForSequenceClassification.from_pretrained(tmp_path / "out")
    assert model.config.id2label == {0: "bad", 1: "positive"}
    assert model.config.label2id == {"bad": 0, "positive": 1}

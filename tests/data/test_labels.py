"""Records of a text and a label become documents whose last token is the label."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from nanoscale.common.errors import UserError
from nanoscale.config.token_files import manifest
from nanoscale.data.inspect import inspect
from tests.data.test_chat import marked, write_chats
from tests.data.texts import prepared

RECORDS = [{"text": "good", "label": 1}, {"text": "so bad", "label": 0}]


def test_the_last_token_is_the_label(tmp_path: Path) -> None:
    prepared(tmp_path / "out", write_chats(tmp_path / "a.jsonl", RECORDS), kind="labels", labels=2)
    for record, (ids, answers) in zip(RECORDS, marked(tmp_path / "out"), strict=True):
        text = record["text"].encode()  # type: ignore[attr-defined]
        assert ids == [*text, record["label"]]
        assert answers == [0] * len(text) + [1]
    found = manifest(tmp_path / "out")
    assert found is not None and found["labels"] == 2 and found["train"]["answers"] == 2


@pytest.mark.parametrize("ending", [".csv", ".json", ".parquet"])
def test_tables_hold_labels(tmp_path: Path, ending: str) -> None:
    source, records = tmp_path / f"a{ending}", [{"id": 7, **record} for record in RECORDS]
    if ending == ".parquet":
        pq, pa = pytest.importorskip("pyarrow.parquet"), pytest.importorskip("pyarrow")
        pq.write_table(pa.Table.from_pylist(records), source)
    elif ending == ".json":
        source.write_text(json.dumps(records))
    else:
        source.write_text("id,text,label\n7,good,1\n7,so bad,0\n")
    prepared(tmp_path / "out", source, kind="labels", labels=2)
    assert [ids for ids, _ in marked(tmp_path / "out")] == [[*b"good", 1], [*b"so bad", 0]]


def test_the_tokenizers_own_special_tokens_are_around_a_text(tmp_path: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    names = ["[UNK]", "[CLS]", "[SEP]", "good", "bad"]
    native = Tokenizer(models.WordLevel({it: i for i, it in enumerate(names)}, unk_token="[UNK]"))
    native.pre_tokenizer = pre_tokenizers.Whitespace()
    native.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 1), ("[SEP]", 2)]
    )
    native.save(str(tmp_path / "tokenizer.json"))
    source = write_chats(tmp_path / "a.jsonl", [{"text": "good bad", "label": 4}])
    prepared(
        tmp_path / "out",
        source,
        kind="labels",
        labels=5,
        tokenizer=str(tmp_path / "tokenizer.json"),
    )
    assert marked(tmp_path / "out") == [([1, 3, 4, 2, 4], [0, 0, 0, 0, 1])]


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"text": "good"}, "'label' is not an integer in .0, 2.: None"),
        ({"text": "good", "label": 2}, "'label' is not an integer in .0, 2.: 2"),
        ({"text": "good", "label": True}, "'label' is not an integer in .0, 2.: True"),
        ({"text": "good", "label": "1"}, "'label' is not an integer in .0, 2.: '1'"),
        ({"label": 1}, "has no field 'text'"),
    ],
)
def test_a_bad_record_is_named(tmp_path: Path, record: dict[str, Any], message: str) -> None:
    source = write_chats(tmp_path / "a.jsonl", [RECORDS[0], record])
    with pytest.raises(UserError, match=message) as caught:
        prepared(tmp_path / "out", source, kind="labels", labels=2)
    assert "a.jsonl:2" in str(caught.value.violations[0].key)


def test_a_source_without_labels_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("good")
    with pytest.raises(UserError, match="no labels"):
        prepared(tmp_path / "out", tmp_path / "a.txt", kind="labels", labels=2)
    pq, pa = pytest.importorskip("pyarrow.parquet"), pytest.importorskip("pyarrow")
    pq.write_table(pa.Table.from_pylist([{"text": "good"}]), tmp_path / "a.parquet")
    with pytest.raises(UserError, match="'text' .--field. or 'label'"):
        prepared(tmp_path / "out", tmp_path / "a.parquet", kind="labels", labels=2)


NAMED = [
    {"text": t, "label": n} for t, n in (("a", "positive"), ("b", "negative"), ("c", "neutral"))
]


@pytest.mark.parametrize(
    ("given", "labels", "ids"),
    [
        (["positive", "negative", "neutral"], ["negative", "neutral", "positive"], [2, 0, 1]),
        ([True, False, True], ["false", "true"], [1, 0, 1]),
        ([4, 0, 2], 5, [4, 0, 2]),
    ],
)
def test_the_classes_of_a_file_are_found(tmp_path: Path, given: list[Any], labels: Any, ids: Any):
    records = [{"text": "x", "label": label} for label in given]
    source = write_chats(tmp_path / "a.jsonl", records)
    found = prepared(tmp_path / "out", source, kind="labels", labels=None)
    assert [tokens[-1] for tokens, _ in marked(tmp_path / "out")] == ids
    named = labels if isinstance(labels, list) else None
    assert found.get("label_names") == named
    assert found["labels"] == (len(named) if named else labels)
    if named:
        document = inspect(str(tmp_path / "out"), None, None, 3)
        shown = [sample["text"] for sample in document["splits"]["train"]["samples"]]
        assert shown == [f"x⟦{labels[number]}⟧" for number in ids]


def test_numbers_of_a_csv_are_numbers_and_other_texts_are_names(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("text,label\na,10\nb,2\n")
    assert prepared(tmp_path / "a", tmp_path / "a.csv", kind="labels", labels=None)["labels"] == 11
    (tmp_path / "b.csv").write_text("text,label\na,up\nb,down\n")
    assert prepared(tmp_path / "b", tmp_path / "b.csv", kind="labels", labels=None)[
        "label_names"
    ] == ["down", "up"]
    (tmp_path / "c.csv").write_text("text,label\na,10\nb,other\n")
    with pytest.raises(UserError, match=r"'label' is not an integer in .0, 11.: 'other'"):
        prepared(tmp_path / "c", tmp_path / "c.csv", kind="labels", labels=None)


def test_names_may_be_fewer_than_labels(tmp_path: Path) -> None:
    source = write_chats(tmp_path / "a.jsonl", NAMED)
    assert prepared(tmp_path / "few", source, kind="labels", labels=2)["labels"] == 3
    found = prepared(tmp_path / "out", source, kind="labels", labels=4)
    assert (found["labels"], found["label_names"][2]) == (4, "positive")

"""Records of preferences become pairs of documents, of which the answers that differ are learned."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from nanoscale.common.errors import UserError
from nanoscale.config.token_files import BAD, manifest
from nanoscale.data.prepare.by_parts import first_fields
from nanoscale.data.prepare.records import holds_pair
from nanoscale.data.prepare.sources import find_sources
from tests.data.test_chat import marked, write_chats
from tests.data.texts import prepared

QUESTION = {"role": "user", "content": "Hi"}
EARLIER = [QUESTION, {"role": "assistant", "content": "Yes?"}, {"role": "user", "content": "2+2"}]
FOUR, FIVE = ({"role": "assistant", "content": text} for text in ("4", "5"))
RECORDS: dict[str, dict[str, Any]] = {
    "texts": {"prompt": "Hi", "chosen": "4", "rejected": "5"},
    "lists": {"prompt": [QUESTION], "chosen": [FOUR], "rejected": [FIVE]},
    "conversations": {"chosen": [QUESTION, FOUR], "rejected": [QUESTION, FIVE]},
}


def learned(folder: Path) -> list[str]:
    """Return the answers that are learned, by document."""
    documents = marked(folder)
    return [
        "".join(chr(token) for token, is_answer in zip(ids, answers, strict=True) if is_answer)
        for ids, answers in documents
    ]


@pytest.mark.parametrize("name", RECORDS)
def test_forms_of_records_are_the_same_pairs(tmp_path: Path, name: str) -> None:
    source = write_chats(tmp_path / "a.jsonl", [RECORDS[name]] * 2)
    prepared(tmp_path / "out", source, kind="pairs", field="messages")
    (chosen, rejected, *_) = marked(tmp_path / "out")
    assert bytes(chosen[0][:-3]).decode() == "User: Hi\n\nAssistant: 4"
    assert bytes(rejected[0][:-3]).decode() == "User: Hi\n\nAssistant: 5"
    assert learned(tmp_path / "out") == [" 4Ā", " 5Ā"] * 2
    found = manifest(tmp_path / "out")
    assert found is not None and found["pairs"] is True and found["train"]["documents"] == 4
    (file,) = find_sources([str(source)])
    assert holds_pair(first_fields(file))


def test_answers_that_both_share_are_not_learned(tmp_path: Path) -> None:
    record = {"chosen": [*EARLIER, FOUR], "rejected": [*EARLIER, FIVE]}
    source = write_chats(tmp_path / "a.jsonl", [record])
    prepared(tmp_path / "out", source, kind="pairs", field="messages")
    assert learned(tmp_path / "out") == [" 4Ā", " 5Ā"]


@pytest.mark.parametrize("named", ["messages", "prompt"])
def test_rated_answers_have_marks_of_their_own(tmp_path: Path, named: str) -> None:
    forms = {
        "messages": {"messages": [*EARLIER, FOUR]},
        "prompt": {"prompt": EARLIER, "completion": [FOUR]},
    }
    records = [forms[named] | {"label": label} for label in (True, False, 1)]
    source = write_chats(tmp_path / "a.jsonl", records)
    prepared(tmp_path / "out", source, kind="rated", field="messages")
    assert learned(tmp_path / "out") == [" 4Ā"] * 3, "earlier answers belong to the question"
    assert [max(marks) for _, marks in marked(tmp_path / "out")] == [1, BAD, 1]
    found = manifest(tmp_path / "out")
    assert found is not None and found["rated"] is True and found["train"]["answers"] == 9
    wrong = write_chats(tmp_path / "b.jsonl", [forms[named] | {"label": "good"}])
    with pytest.raises(
        UserError, match="its 'label' is neither true for a good answer nor false: 'good'"
    ):
        prepared(tmp_path / "other", wrong, kind="rated", field="messages")


def test_both_documents_of_a_pair_are_in_one_split_and_tables_hold_pairs(tmp_path: Path) -> None:
    pq = pytest.importorskip("pyarrow.parquet")
    import pyarrow as pa

    records = [
        {"prompt": f"Say {i}", "chosen": str(i), "rejected": str(i + 1), "score": i}
        for i in range(200)
    ]
    pq.write_table(pa.Table.from_pylist(records), tmp_path / "a.parquet")
    source = tmp_path / "a.parquet"
    prepared(tmp_path / "out", source, kind="pairs", field="messages", validation=0.3)
    counts = []
    for name in ("tokens", "valid"):
        documents = marked(tmp_path / "out", name)
        texts = [bytes(ids[:-3]).decode() for ids, _ in documents]
        questions = [text.split("\n")[0] for text in texts]
        assert questions[0::2] == questions[1::2]
        counts.append(len(texts) // 2)
    assert sum(counts) == 200 and min(counts) > 30


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"prompt": "Hi", "chosen": "4"}, "has no fields 'chosen' and 'rejected'"),
        ({"chosen": "4", "rejected": "5"}, "answers without a question"),
        ({"prompt": "Hi", "chosen": "4", "rejected": "4"}, "the same chosen and rejected"),
        ({"prompt": "Hi", "chosen": 4, "rejected": "4"}, "neither a text nor a list"),
        ({"chosen": [*EARLIER], "rejected": [*EARLIER, FIVE]}, "no answer after the messages"),
        (
            {"prompt": "Hi", "chosen": "4", "rejected": "5", "images": ["a"]},
            "only texts are trained",
        ),
        ({"prompt": [3], "chosen": "4", "rejected": "5"}, "message 1 is not an object"),
    ],
)
def test_a_bad_pair_is_named(tmp_path: Path, record: dict[str, Any], message: str) -> None:
    source = write_chats(tmp_path / "a.jsonl", [RECORDS["texts"], record])
    with pytest.raises(UserError, match=message) as caught:
        prepared(tmp_path / "out", source, kind="pairs", field="messages")
    assert "a.jsonl:2" in str(caught.value.violations[0].key)
    prepared(tmp_path / "out", source, kind="pairs", field="messages", skip_bad=True)
    assert len(marked(tmp_path / "out")) == 2

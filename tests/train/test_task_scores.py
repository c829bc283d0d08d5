"""lm-eval's tasks while a model trains: the scores equal `nanoscale eval --tasks` in every layout."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from nanoscale.checkpoint.store import list_checkpoints
from nanoscale.cli.main import run as nanoscale
from nanoscale.config.resolved import ResolvedConfig
from nanoscale.config.schema import Checkpoint, Data
from nanoscale.generate.harness import Answers, evaluate_tasks
from nanoscale.generate.weights import open_model
from nanoscale.parallel import process_group
from nanoscale.train.job import make_engine
from tests.support.jobs import BYTES, make_config, make_run, read_metrics, train, write_tokens
from tests.support.layouts import MOE
from tests.support.ranks import run_ranks

TASKS = {
    "choice": {
        "output_type": "multiple_choice",
        "doc_to_text": "{{q}}",
        "doc_to_choice": "{{a}}",
        "doc_to_target": 0,
        "metric_list": [{"metric": "acc"}],
    },
    "rolling": {
        "output_type": "loglikelihood_rolling",
        "doc_to_text": "",
        "doc_to_target": "{{q}}",
        "metric_list": [{"metric": "bits_per_byte"}],
    },
    "exact": {
        "output_type": "loglikelihood",
        "doc_to_text": "{{q}}",
        "doc_to_target": "{{a[0]}}",
        "metric_list": [{"metric": "perplexity"}, {"metric": "acc"}],
    },
}
LAYOUTS = {
    "one": {},
    "zero3": {"dp": 2, "stage": 3},
    "tp": {"parallel": {"tp": 2}},
    "pp": {"parallel": {"pp": 2}},
    "cp": {"parallel": {"cp": 2}},
    "tp and pp": {"dp": 1, "parallel": {"tp": 2, "pp": 2}},
}


def write_tasks(folder: Path) -> Path:
    """Write the tasks on seven questions, one of them longer than the model's context."""
    import yaml

    questions = ("ab", "def", "import os", "class ", "return ", "k" * 70, "x")
    rows = [{"q": q, "a": ["e", "self", f" {len(q)}\n"]} for q in questions]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "tasks").mkdir()
    files = {"data_files": {"test": str(folder / "rows.jsonl")}}
    usual = {"dataset_path": "json", "dataset_kwargs": files, "test_split": "test"}
    for name, task in TASKS.items():
        text = yaml.safe_dump(usual | {"task": name} | task)
        (folder / "tasks" / f"{name}.yaml").write_text(text)
    return folder / "tasks"


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_scores_are_those_of_the_checkpoint(
    layout: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("lm_eval", reason="pip install lm-eval")
    monkeypatch.setenv("HF_DATASETS_OFFLINE", "1")
    folder = write_tasks(tmp_path)
    best: dict[str, Any] = {"keep_best": 1, "best_metric": "eval_tasks/rolling/bits_per_byte"}
    config = make_config(
        tmp_path,
        model=replace(BYTES, vocab=258),
        data=Data(source="stdlib", cache_dir=str(tmp_path), valid_fraction=0.1),
        checkpoint=Checkpoint(every=2, keep_last=None, **best),
        **LAYOUTS[layout],
    )
    tasks = {"eval_tasks": [*TASKS], "eval_tasks_dir": str(folder)}
    config = replace(config, train=replace(config.train, steps=4, eval_every=2, **tasks))
    run = make_run(config)
    train(run, config)
    evaluated = [record for record in read_metrics(run) if "eval_loss" in record]
    assert [record["step"] for record in evaluated] == [2, 4]
    for record in evaluated:
        answers = Answers(open_model(str(run.path), step=record["step"], dtype="fp64"))
        expected = evaluate_tasks(answers, [*TASKS], None, None, folder, errors=False)["results"]
        for task, metric in (
            ("choice", "acc"),
            ("exact", "acc"),
            ("exact", "perplexity"),
            ("rolling", "bits_per_byte"),
        ):
            score = record[f"eval_tasks/{task}/{metric}"]
            assert score == pytest.approx(expected[task][f"{metric},none"], rel=1e-9), (
                task,
                metric,
            )
    (best_step,) = (step for _, step in list_checkpoints(run.checkpoints)[-1].manifest["best"])
    assert best_step == min(evaluated, key=lambda it: it[best["best_metric"]])["step"]


ROWS = [
    [([1, 2, 3, 4], 2), ([5, 6, 7], 1), ([9, 8, 7, 6, 5], 3)],
    [([1, 5], 1), ([5, 2, 7], 2), ([9, 8], 1), ([3, 3, 3], 2)],
]


def score(rank: int, config: ResolvedConfig) -> list[float] | list[list[float]]:
    """Return the log-likelihoods of this rank's rows; of one process, of both ranks' rows."""
    process_group.join(config.world_size, torch.device("cpu"), 60.0)
    engine = make_engine(config, torch.device("cpu"))

    def figures(rows: list[tuple[list[int], int]]) -> list[float]:
        scored = engine.score_tokens(rows)
        assert scored is not None
        return (scored[3] - scored[0]).tolist()

    return figures(ROWS[rank]) if config.world_size > 1 else [figures(rows) for rows in ROWS]


def test_ranks_that_exchange_tokens_score_other_numbers_of_rows(tmp_path: Path) -> None:
    """One number is even, and the other is odd: batches are halved only in a training step."""
    write_tokens(tmp_path)
    layout = {"dp": 2, "stage": 3, "parallel": {"ep": 2}}
    together = run_ranks(score, 2, make_config(tmp_path, model=MOE, **layout))
    (alone,) = run_ranks(score, 1, make_config(tmp_path, model=MOE))
    assert together == [pytest.approx(its_own, rel=1e-9) for its_own in alone]


def test_what_is_wrong_is_an_error_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In the launcher, with lm-eval's own judgement of the tasks; the advice is right."""
    pytest.importorskip("lm_eval", reason="pip install lm-eval")
    monkeypatch.setenv("HF_DATASETS_OFFLINE", "1")
    monkeypatch.chdir(tmp_path)
    of_text = {"output_type": "generate_until", "doc_to_text": "{{q}}", "doc_to_target": "a"}
    monkeypatch.setitem(TASKS, "text", of_text | {"metric_list": [{"metric": "exact_match"}]})
    write_tasks(tmp_path)
    command = ["train", "recipe=debug", "train.eval_every=5", "train.eval_tasks_dir=tasks"]
    best = ["train.eval_tasks=[choice]", "checkpoint.keep_best=1"]
    wrong = {
        "lm_eval has no task chioce": (["train.eval_tasks=[exact,chioce]"], "train.eval_tasks=[exact,choice]"),
        "text generates text": (["train.eval_tasks=[choice,text]"], "train.eval_tasks=[choice]"),
        "is not a metric": (
            [*best, "checkpoint.best_metric=eval_tasks/choice/ac"],
            "checkpoint.best_metric=eval_tasks/choice/acc",
        ),
        "needs evaluations": (["train.eval_tasks=[choice]", "train.eval_every=0"], "train.eval_every="),
        "eval_tasks_dir": ([], "train.eval_tasks=[arc_easy]"),
    }  # fmt: skip
    for message, (overrides, advice) in wrong.items():
        assert nanoscale([*command, *overrides]) == 2
        error = capsys.readouterr().err
        assert message in error and advice in error
    assert not (tmp_path / "runs").exists()
    assert (
        nanoscale([*command, *best, "checkpoint.best_metric=eval_tasks/choice/acc", "--dry-run"])
        == 0
    )

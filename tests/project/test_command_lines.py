"""Every command line of README, docs and examples runs as it is written, with stand-ins for what is large.

The stand-ins: recipes of the same names with a tiny model, beside the user, where they come first; folders of
tiny models and a few texts at the paths that the lines name; one run with a checkpoint. A line that launches
stops before the launch (`--dry-run`), which checks, plans and shows all of it; what ranks would measure is
stood in for by fixed figures.
"""

from __future__ import annotations

import io
import json
import re
import shlex
import shutil
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nanoscale.cli.common import text_preparation
from nanoscale.cli.common.examples import LINES, examples
from nanoscale.cli.main import run as nanoscale
from nanoscale.config.composing import frozen
from nanoscale.config.schema import Model
from nanoscale.config.values.other_trainers import kinds
from nanoscale.data.tokens.tokenizer import train_bpe
from nanoscale.runs import jsonlines, status
from nanoscale.runs.directory import RunDirectory
from tests.data.texts import write_jsonl, write_parquet
from tests.support import hf_models
from tests.support.jobs import run_of_bytes
from tests.support.rows import exhaustive
from tests.support.token_files import write_indexed

ROOT = Path(__file__).parents[2]
PAGES = [
    ROOT / "README.md",
    ROOT / "AGENTS.md",
    *(page for folder in ("docs", "examples") for page in sorted((ROOT / folder).glob("*.md"))),
]
PLACEHOLDER = re.compile(r"[…\[\]|]|\b(RUN|DIR|SOURCES|PATH|NAME|KEY|GROUP|FILE|F)\b")

SHAPE = Model(
    layers=2, hidden=32, heads=4, kv_heads=4, head_dim=8, ffn=48, vocab=320, max_seq_len=4096
)
TINY = "defaults:\n  - debug\n  - _self_\ntrain:\n  steps: 40\n  global_batch: 480\n"
RECIPES = ("tiny", "llama-1b", "llama-8b")
EXCUSED = {
    "nanoscale sweep --resume rates": "needs an interrupted sweep: tests/sweep/test_sweep.py",
    **dict.fromkeys(
        (
            "nanoscale submit --resume big",
            "nanoscale submit --resume big train.steps=4000 --num-nodes 4",
        ),
        "needs a run that was stopped in a queue: tests/cli/test_submit.py",
    ),
    "nanoscale bench recipe=tiny": "measures with real ranks: tests/cli/test_bench.py",
    "nanoscale bench recipe=llama-1b": "measures with real ranks: tests/cli/test_bench.py",
    **dict.fromkeys(
        (
            "nanoscale bench recipe=tiny --devices 1,2,4 --html scaling.html",
            "nanoscale bench recipe=llama-8b --hostfile hosts --num-nodes 1,2,4 --weak",
        ),
        "measures with real ranks: tests/cli/test_bench.py",
    ),
    **dict.fromkeys(
        (
            "nanoscale train recipe=tiny run.name=first checkpoint.every=100 checkpoint.upload=s3://my-bucket/models",
            "nanoscale train recipe=tiny data.path=s3://my-bucket/texts.jsonl --dry-run",
        ),
        "needs a bucket: tests/cli/test_object_storage.py has one",
    ),
    "nanoscale conform recipe=debug parallel.dp=2 parallel.tp=2 zero=stage3": "compares real ranks: "
    "tests/cli/test_conform.py",
    "nanoscale conform --card qwen3": "compares real ranks: tests/cli/test_conform.py",
    "nanoscale conform --card TYPE": "compares real ranks: tests/cli/test_conform.py",
    "nanoscale train launcher=slurm": "needs an allocation: tests/cluster/test_slurm.py",
    "nanoscale doctor --hostfile hosts": "needs hosts with sshd: tests/cluster/test_doctor.py runs it on some",
    "nanoscale eval RUN --tasks hellaswag,arc_easy --limit 100 --few-shot 5": "fetches lm-eval's data sets: "
    "tests/generate/test_harness.py runs tasks of a folder",
    "nanoscale train recipe=llama-1b train.eval_every=500 'train.eval_tasks=[arc_easy,hellaswag]' "
    "train.eval_tasks_limit=200": "fetches lm-eval's data sets: tests/train/test_task_scores.py",
    "nanoscale eval RUN --tasks mine --tasks-dir ./tasks --json": "tests/generate/test_harness.py runs it",
    **dict.fromkeys(
        (
            "nanoscale runs compare adamw muon",
            "nanoscale runs compare stable decayed",
            "nanoscale resume stable train.steps=260 scheduler.decay_steps=60",
            "nanoscale generate both --chat --prompt 'Say 7.' --temperature 0",
            "nanoscale generate polite --chat --prompt 'Say 7.' --temperature 0",
            "nanoscale eval polite",
        ),
        "needs what the lines before it train: tests/train has tests of each method",
    ),
    **dict.fromkeys(
        (
            "python3 -m benchmarks.gpu.wheels --python 3.12",
            "python3 -m benchmarks.gpu correct 8b kernels experts lora packed stalls",
            "python3 -m benchmarks.gpu device fp8 3b 1b trainer",
            "python3 -m benchmarks.gpu fp8-rowwise grid",
        ),
        "needs a network or a GPU: tests/project/test_gpu_benchmark.py",
    ),
}
"""Lines that are not run here, and why."""
LONG = {
    "nanoscale rehearse recipe=debug cluster=h100-sxm cluster.hosts=1 parallel.tp=2 parallel.pp=2 zero=stage1",
    "nanoscale rehearse recipe=debug cluster=h200 cluster.hosts=1 parallel.dp=4 parallel.tp=2 zero=stage3 "
    "train.micro_batch=2",
    "nanoscale doctor backend.compile=on",
    "nanoscale train model=hf model.name=./bert data=megatron data.path=reviews train.objective=classify "
    "train.labels=4 train.seq_len=256 train.steps=500",
    "nanoscale train recipe=classify model.init_from=./bert data.path=reviews.jsonl --dry-run",
    "nanoscale train recipe=encoder model.init_from=./bert data.path=texts.jsonl --dry-run",
    "nanoscale train model=hf model.name=./pythia-160m train.seq_len=2k train.steps=1000 data=megatron "
    "data.path=/data/corpus",
}
"""Lines whose processes load torch: only `make test-exhaustive` runs them; the commands have other tests."""


def lines(page: Path) -> Iterator[str]:
    """Yield the command lines of a page: lines of its blocks, and whole ones within sentences."""
    kind = ""
    text = page.read_text()
    for line in text.splitlines():
        if line.startswith("```"):
            kind = "" if kind else line[3:] or "text"
        elif kind == "console" and line.startswith("$ "):
            yield _bare(line[2:])
        elif kind == "sh":
            yield _bare(line)
    sentences = re.sub(r"```.*?```", "", text, flags=re.S)
    for span in re.findall(r"`(nanoscale [^`]*)`", sentences):
        words = " ".join(span.replace("\\|", "|").split())
        if not PLACEHOLDER.search(words) and len(words.split()) > 2:
            yield words


MENTIONED = {
    "nanoscale runs stop",
    "nanoscale data prepare",
    "nanoscale data prepare --chat",
    "nanoscale data inspect",
    "nanoscale runs report",
    "nanoscale plan --calibrate",
    "nanoscale checkpoints verify",
}
"""Commands that a sentence names without their arguments."""


def shown(page: Path) -> dict[str, list[str]]:
    """Return what a page shows below each command line of its console blocks."""
    output: dict[str, list[str]] = {}
    for block in re.findall(r"```console\n(.*?)```", page.read_text(), flags=re.S):
        for part in re.split(r"^\$ ", block, flags=re.M)[1:]:
            line, *below = part.splitlines()
            output[_bare(line)] = below
    return output


def is_refused(below: list[str]) -> bool:
    """Return True if a page shows an error below a line, or the plan of a job that does not fit."""
    return is_error(below) or any(line.startswith("does not fit: ") for line in below)


def is_error(below: list[str]) -> bool:
    return bool(below) and below[0].startswith("error: ")


def _bare(line: str) -> str:
    """Without the remark behind it."""
    return re.sub(r"\s+#\s.*$", "", line).rstrip()


@pytest.fixture(scope="module")
def stand_ins(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that the lines are typed in."""
    here = tmp_path_factory.mktemp("here")
    documents = [
        f"def main(argument_{number}):\n    return {number}\n" * 9 for number in range(200)
    ]
    for name in ("corpus", "chats", "recipes", "runs", "models", "data", "tasks"):
        (here / name).mkdir()
    for name in RECIPES:
        (here / "recipes" / f"{name}.yaml").write_text(TINY)
    write_jsonl(here / "corpus" / "a.jsonl.zst", documents)
    write_parquet(here / "more.parquet", documents)
    answer = {"role": "assistant", "content": "def main():"}
    chats = "".join(
        json.dumps({"messages": [{"role": "user", "content": f"question {number}"}, answer]}) + "\n"
        for number in range(200)
    )
    for kind in kinds():
        if not kind.unread:
            (here / kind.file).write_text(kind.example)
    (here / "chats.jsonl").write_text(chats)
    (here / "chats" / "a.jsonl").write_text(chats)
    pairs = [{"prompt": f"def {i}", "chosen": "f():", "rejected": "1"} for i in range(400)]
    text = "".join(json.dumps(pair) + "\n" for pair in pairs)
    (here / "preferences.jsonl").write_text(text)
    rated = [{"prompt": f"def {i}", "completion": "f():", "label": i % 2 == 0} for i in range(400)]
    (here / "rated.jsonl").write_text("".join(json.dumps(each) + "\n" for each in rated))
    reviews = [{"text": document, "label": i % 4} for i, document in enumerate(documents)]
    (here / "reviews.jsonl").write_text("".join(json.dumps(each) + "\n" for each in reviews))
    write_jsonl(here / "texts.jsonl", documents)
    turns = [{"from": "human", "value": "2 + 2?"}, {"from": "gpt", "value": "4"}]
    (here / "sharegpt.jsonl").write_text(f"{json.dumps({'conversations': turns})}\n" * 200)
    alpaca = {"instruction": "Add.", "input": "2 and 2", "output": "4"}
    (here / "alpaca.jsonl").write_text(f"{json.dumps(alpaca)}\n" * 200)
    for name in ("bert", "models/bert"):
        _write_encoder(here / name, documents)
    for name in ("text", "noise"):
        (here / f"{name}.txt").write_text("".join(documents))
    (here / "questions.jsonl").write_text('{"prompt": "def "}\n')
    (here / "hosts").write_text("node1 slots=8\nnode2 slots=8\nme@node3 slots=4\n")
    hf_models.save("gpt_neox", here / "pythia-160m", vocab_size=320, max_position_embeddings=2048)
    write_indexed(here / "data" / "generate.md-other", [np.arange(4000) % 250])
    run = run_of_bytes(here / "runs", SHAPE, "first")
    config = frozen.load(run.config)
    parallel, launcher = (
        replace(config.parallel, dp=1, virtual_stages=1),
        replace(config.launcher, device="cpu"),
    )
    train = replace(config.train, micro_batch=1, steps=40, global_batch=480, seq_len=64)
    config = replace(config, parallel=parallel, launcher=launcher, train=train)
    run.config.write_text(frozen.dump(config))
    status.write(run, status.Status("prepared", 0, 100.0).starting(1).ending("stopped", 130))
    record = dict.fromkeys(("loss", "grad_norm", "lr", "step_time_s", "tokens_per_s"), 1.0)
    for step in range(1, 20):
        jsonlines.append(run.metrics, {"step": step, "tokens": 9, "memory_gib": 0.5, **record})
    for name in ("chats", "big", "slow"):
        shutil.copytree(run.path, here / "runs" / name, symlinks=True)
        ended = status.Status("prepared", 0, 100.0).starting(1).ending("completed", 0)
        status.write(RunDirectory(here / "runs" / name), ended)
    for name in ("models/llama", "models/Qwen3-0.6B", "Qwen3-0.6B", "Qwen3-8B"):
        _write_model(run, here / name, documents)
    tokenizer = here / "models" / "llama"
    prepare = [
        "data",
        "prepare",
        str(here / "more.parquet"),
        "--tokenizer",
        str(tokenizer),
        "--out",
    ]
    for name in ("generate.md-corpus", "models.md-corpus"):
        assert nanoscale([*prepare, str(here / "data" / name), "--validation", "0.1"]) == 0
    return here


def _write_encoder(folder: Path, documents: list[str]) -> None:
    """Write a small BERT of random weights, with a tokenizer."""
    from transformers import AutoModelForMaskedLM, BertConfig

    sizes = {"num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
    config = BertConfig(vocab_size=320, hidden_size=32, max_position_embeddings=256, **sizes)
    AutoModelForMaskedLM.from_config(config).save_pretrained(folder)
    train_bpe(documents, 300, folder / "tokenizer.json")
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    tokenizer["added_tokens"].append(
        tokenizer["added_tokens"][0] | {"id": 310, "content": "[MASK]"}
    )
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))


def _write_model(run: RunDirectory, folder: Path, documents: list[str]) -> None:
    """Write the run's model as a Hugging Face folder, with a tokenizer and a template for chats."""
    assert (
        nanoscale(["checkpoints", "export", str(run.path), "--format", "hf", "--out", str(folder)])
        == 0
    )
    train_bpe(documents, 300, folder / "tokenizer.json")
    template = (
        "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}{{ m.content }}"
        "{% endgeneration %}{% else %}{{ m.content }}\n{% endif %}{% endfor %}"
    )
    about = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|endoftext|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(about | {"chat_template": template}))


@pytest.fixture
def here(stand_ins: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(stand_ins)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    return stand_ins


def placed(line: str, page: str, here: Path) -> str:
    """Return the line with the stand-ins in place of large files."""
    line = line.replace("/data/", f"{here}/data/{page}-").replace("/models/", f"{here}/models/")
    line = line.replace("Qwen/Qwen3-0.6B", "./Qwen3-0.6B").replace("EleutherAI/", "./")
    line = re.sub(r"\bRUN\b", "first", line).replace("--step 4000", "--step 7")
    elided = (
        "data=random train.sample_tokens=0 " if "init_from=" in line else ""
    )  # of its tokenizer
    line = line.replace("…", f"{elided}train.steps=1000")  # the elided overrides
    return re.sub(r"\bDIR\b", f"{here}/exported-{page}", line)


FIGURES: dict[str, Any] = {
    "parts": [
        {
            "name": "all",
            "share": 1.0,
            "loss_sum": 8.0,
            "tokens": 4,
            "samples": 1,
            "seconds": 1.0,
            "bytes": 4,
        }
    ],
    "data": "what was held out",
    "findings": [],
    "largest": 1e-15,
    "first_difference": None,
    "resumed": None,
}
"""The figures that the ranks of an evaluation report."""


@pytest.mark.slow
@pytest.mark.parametrize(
    "left_out", [pytest.param(LONG, id="usual"), exhaustive(set(), name="whole")]
)
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_command_lines_of_a_page_run(
    page: Path, left_out: set[str], here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are typed in their order: a line may need what an earlier one made."""
    below = shown(page)
    for line in dict.fromkeys(lines(page)):
        if line.startswith("make "):
            assert f"\n{line.split()[1]}:" in (ROOT / "Makefile").read_text()
        elif line.startswith("pip "):
            needed = re.match(r"[\w-]+", shlex.split(line)[2])
            assert needed is not None and f'"{needed[0]}' in (ROOT / "pyproject.toml").read_text()
        elif line in MENTIONED:
            assert nanoscale([*shlex.split(line)[1:], "--help"]) == 0
        elif (
            line not in {*EXCUSED, *left_out} and "run.from_run=" not in line
        ):  # it needs a trained run
            refused = is_refused(below.get(line, []))
            _type(placed(line, page.name, here), monkeypatch, refused)


def _type(line: str, monkeypatch: pytest.MonkeyPatch, refused: bool) -> None:
    typed, pipe, after = line.partition(" | nanoscale ")
    said = shlex.split(typed)[1] + "\n" if pipe else "def main(\n"
    arguments = shlex.split((after if pipe else typed).replace(r"$'\n\n'", "'\n\n'"))
    arguments = arguments if pipe else arguments[1:]
    monkeypatch.setattr(sys, "stdin", io.StringIO(said))
    # the module that has its own name for it comes first: it must not import the stand-in
    for module in ("small_job", "job_execution"):
        monkeypatch.setattr(
            f"nanoscale.launch.lifecycle.{module}.run_one_shot_job", lambda *_: {**FIGURES}
        )
    if refused:  # nothing is started or written
        assert nanoscale(arguments) in (2, 3), line
        return
    if (
        arguments[0] in ("train", "submit", "resume", "replay", "sweep")
        and "--dry-run" not in arguments
    ):
        arguments.append("--dry-run")
    if arguments[0] == "rehearse":
        arguments += ["--ranks", "0"]
    if arguments[0] in ("train", "submit"):
        arguments.append("run.root=others")  # `first` exists already
    shutil.rmtree("runs/first/hf", ignore_errors=True)
    for written in ("answers.jsonl", "mine.yaml"):
        Path(written).unlink(missing_ok=True)
    assert nanoscale(arguments) == 0, line


EXACT = re.compile(r"nanoscale (plan recipe=llama-70b cluster=|config explain )")
"""Lines whose output is the same on every machine."""


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_errors_and_plans_that_a_page_shows_are_printed(
    page: Path, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its lines are among the printed ones, in their order; the folder of stand-ins is /home/you."""
    for line, below in shown(page).items():
        if is_refused(below) or EXACT.match(line):
            code = nanoscale(shlex.split(placed(line, page.name, here))[1:])
            assert (code != 0) == is_refused(below), line
            out, err = capsys.readouterr()
            text = (err if is_error(below) else out).replace(f"{here}/data/{page.name}-", "/data/")
            printed = iter(text.replace(str(here), "/home/you").splitlines())
            missing = [it for it in below if it and it != "…" and it not in printed]
            assert missing == [], (line, text)


@pytest.mark.slow
def test_the_page_of_tasks_shows_lines_as_they_are_printed(
    here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever their numbers and labels are, which depend on the file and on the tokenizer."""

    def form(text: str) -> str:
        text = re.sub(r"labels: .*?;", "labels: L;", text.replace(f"{here}/", "/home/you/"))
        return re.sub(r"epochs?|[\d,.]+", lambda it: "epochs" if it[0][0] == "e" else "N", text)

    for line, below in shown(ROOT / "docs" / "tasks.md").items():
        text_preparation._prepared.cache_clear()
        assert nanoscale(shlex.split(line)[1:]) == 0, line
        printed = form("\n".join(capsys.readouterr()))
        parts = [part for each in below for part in each.split("…") if part]
        assert [part for part in parts if form(part) not in printed] == [], line


def test_what_is_excused_is_written_somewhere() -> None:
    assert set(EXCUSED) | LONG | MENTIONED <= {line for page in PAGES for line in lines(page)}


EXCUSED_EXAMPLES = {
    "nanoscale doctor --hostfile hosts --quick": "needs hosts: tests/cluster",
    "nanoscale bench recipe=llama-1b --steps 20": "measures with real ranks: tests/cli/test_bench.py",
    "nanoscale eval first --tasks hellaswag --limit 100": "needs the hub: tests/generate/test_harness.py",
    "nanoscale runs stop first": "needs a running job: tests/cli/test_stop_and_resume.py",
    "nanoscale submit --resume first": "needs a run that was stopped in a queue: tests/cli/test_submit.py",
    "nanoscale runs explain first": "needs a running job: tests/runs/test_position.py",
    "nanoscale runs rm first": "asks a question: tests/cli/test_remove.py",
    "nanoscale top --root /shared/runs --web": "serves until it is stopped: tests/cli/test_top.py",
}
ABOUT_CLUSTERS = ("plan", "config", "recipes", "rehearse")
"""Commands whose examples are typed with the packaged recipes."""


@pytest.fixture(scope="module")
def example_files(stand_ins: Path) -> Path:
    """Return the stand-ins, with what the examples name in addition."""
    runs = stand_ins / "runs"
    shutil.copytree(runs / "chats", runs / "second", symlinks=True)
    (stand_ins / "texts").mkdir()
    for number in range(40):
        (stand_ins / "texts" / f"{number}.txt").write_text(f"text number {number}\n" * 20)
    (stand_ins / "questions.txt").write_text("def main():\n")
    (stand_ins / "ds_config.json").write_text('{"train_batch_size": 8}')
    (stand_ins / "axolotl.yml").write_text("base_model: x\nsequence_len: 64\nmicro_batch_size: 1\n")
    (stand_ins / "train.sh").write_text(
        "python train.py --learning_rate 1e-5 --model_name_or_path x --per_device_train_batch_size 2\n"
    )
    logs = runs / "first" / "logs" / "attempt-1"
    logs.mkdir(parents=True)
    for ending in ("out", "err"):
        (logs / f"here.rank-0.{ending}").touch()
    return stand_ins


@pytest.mark.slow
@pytest.mark.parametrize("command", dict.fromkeys(line.split()[1] for line in LINES))
def test_the_examples_of_every_help_run(
    command: str, here: Path, example_files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for line in examples(command):
        if line in EXCUSED_EXAMPLES:
            continue
        if command in ABOUT_CLUSTERS:
            monkeypatch.chdir(tmp_path)
            for name in ("ds_config.json", "axolotl.yml", "train.sh"):
                shutil.copy(example_files / name, tmp_path)
        elif command == "data":
            for folder in ("corpus", "chats"):
                shutil.rmtree(folder, ignore_errors=True)
        typed = placed(line, f"help-{command}", here)
        typed = typed.replace("inspect corpus", "inspect data/models.md-corpus")
        typed = typed.replace("--step 1200", "--step 7").replace("watch first", "watch second")
        _type(typed, monkeypatch, refused=False)

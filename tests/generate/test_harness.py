"""The scores for lm-eval, compared with sums of log-probabilities computed here; the library too, if
installed."""

from __future__ import annotations

import json
import shlex
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tokenizers import AddedToken, processors
from tokenizers import Tokenizer as Native

from nanoscale.cli.main import run as nanoscale
from nanoscale.common.errors import UserError
from nanoscale.data.tokens.tokenizer import END, FileTokenizer, bytes_native
from nanoscale.generate import harness, writing
from nanoscale.generate.harness import Answers, _no_task, evaluate_tasks
from nanoscale.generate.replicas import replicated
from nanoscale.generate.sampling import Sampling
from nanoscale.generate.weights import Opened, open_model
from nanoscale.generate.writing import Wish, Written, encode, write
from nanoscale.models.initialization import initialize
from nanoscale.models.transformer import Transformer
from tests.support import hf_families
from tests.support.hf_models import run_of_transformers
from tests.support.jobs import BYTES, run_of_bytes
from tests.support.rows import exhaustive

PAIRS = [("ab", "cd"), ("", "x"), ("a longer context ", "and more"), ("k" * 60, "lm"), ("q ", "")]


@pytest.fixture
def opened(tmp_path: Path) -> Opened:
    return open_model(str(run_of_bytes(tmp_path).path), dtype="fp64")


def requests(*arguments: Any) -> list[Any]:
    return [SimpleNamespace(args=it) for it in arguments]


def directly(text: bytes, count: int, first: int = 256) -> tuple[float, bool]:
    """Return the log-probability of the last `count` bytes, token by token, from another model without a
    cache."""
    model = Transformer(BYTES).double()
    initialize(model, replace(BYTES, init_std=0.3), seed=4)
    ids = [first, *text]
    total, greedy = 0.0, True
    for place in range(len(ids) - count, len(ids)):
        with torch.no_grad():
            seen = torch.tensor([ids[:place][-BYTES.max_seq_len :]])
            logits = model(seen)[0, -1].log_softmax(0)
        total += logits[ids[place]].item()
        greedy &= int(logits.argmax()) == ids[place]
    return total, greedy


def test_continuations(opened: Opened, monkeypatch: pytest.MonkeyPatch) -> None:
    """In batches of several, and of one; the longest context is cut at its beginning."""
    short = [pair for pair in PAIRS if len(pair[0]) < 40]
    expected = [directly((a + b).encode(), len(b) + len(a) - len(a.rstrip())) for a, b in short]
    for size in (1 << 26, 1):
        monkeypatch.setattr(harness, "_LOGITS", size)
        seen: list[tuple[int, int]] = []
        answers = Answers(opened, lambda *done: seen.append(done))  # noqa: B023
        found = answers.loglikelihood(requests(*short))
        assert seen[-1] == (len(short), len(short))
        for (score, greedy), (wanted, likely) in zip(found, expected, strict=True):
            assert score == pytest.approx(wanted, abs=1e-9) and greedy == likely
    ((cut, _),) = Answers(opened).loglikelihood(requests(PAIRS[3]))
    # 48 tokens are looked at, the one before the last byte among them.
    assert cut == pytest.approx(directly(b"k" * 46 + b"lm", 2, first=ord("k"))[0], abs=1e-9)


def test_whole_texts_window_by_window(opened: Opened) -> None:
    text = "The quick brown fox jumps over the lazy dog; " * 3
    (found,) = Answers(opened).loglikelihood_rolling(requests((text,)))
    ids = [256, *text.encode()]
    model = Transformer(BYTES).double()
    initialize(model, replace(BYTES, init_std=0.3), seed=4)
    total = 0.0
    for start in range(1, len(ids), 48):
        end = min(start + 48, len(ids))
        window = ids[max(0, end - 49) : end]
        with torch.no_grad():
            scores = model(torch.tensor([window[:-1]]))[0].log_softmax(-1)
        wanted = torch.tensor(window[1:])
        total += scores.gather(1, wanted[:, None])[-(end - start) :].sum().item()
    assert found == pytest.approx(total, abs=1e-9)
    (short,) = Answers(opened).loglikelihood_rolling(requests(("abc",)))
    assert short == pytest.approx(directly(b"abc", 3)[0], abs=1e-9)


@pytest.mark.parametrize(
    "family", ["qwen3", "nemotron_h", exhaustive("gemma3_text"), exhaustive("deepseek_v3")]
)
def test_a_run_of_transformers_model_is_scored_by_its_logits(family: str, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    run = run_of_transformers(family, tmp_path)
    model = AutoModelForCausalLM.from_pretrained(
        tmp_path / family, dtype=torch.float64, experts_implementation="eager"
    )
    pairs = [("ab", "cd"), ("a longer context", " and more"), ("x", "y")]
    found = Answers(open_model(str(run.path), dtype="fp64")).loglikelihood(requests(*pairs))
    for (before, wanted), (score, is_greedy) in zip(pairs, found, strict=True):
        ids = torch.tensor([[256, *(before + wanted).encode()]])
        with torch.no_grad():
            scores = model(ids[:, :-1]).logits[0].log_softmax(-1)[-len(wanted) :]
        tokens = ids[0, -len(wanted) :]
        assert score == pytest.approx(scores.gather(1, tokens[:, None]).sum().item(), abs=1e-5)
        assert is_greedy == bool((scores.argmax(-1) == tokens).all())


BOS = 257
TEXTS = ["abc", "y" * 47, "The quick brown fox jumps over the lazy dog; " * 2, ""]


def folder_of_transformers(folder: Path, bos: str, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Create a model of transformers whose tokenizer `adds` a `<s>` before a text, `names` one, has `none`, or
    adds one `unnamed`."""
    settings = hf_families.COMMON | {"vocab_size": 260, "max_position_embeddings": 48}
    monkeypatch.setitem(hf_families.FAMILIES, "llama", ("Llama", settings))
    hf_families.save("llama", folder)
    native = bytes_native()
    native.add_special_tokens([AddedToken("<s>", special=True)])
    about = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": END}
    if bos in ("adds", "names"):
        about["bos_token"] = "<s>"
    if bos in ("adds", "unnamed"):
        native.post_processor = processors.TemplateProcessing("<s> $A", None, [("<s>", BOS)])
    native.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(about))
    return folder


@pytest.mark.parametrize("bos", ["adds", "names", "none", "unnamed"])
def test_a_folder_is_scored_as_lm_eval_scores_a_model_of_transformers(
    bos: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Source: HFLM of lm-eval 0.4.13. A prefix token and the tokenizer's own tokens precede a whole text."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = folder_of_transformers(tmp_path, bos, monkeypatch)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    answers = Answers(open_model(str(folder), dtype="fp64"))
    prefix = BOS if bos in ("adds", "names") else tokenizer.eos_token_id

    def scored(before: list[int], wanted: list[int]) -> float:
        ids = torch.tensor([[*before, *wanted]])
        with torch.no_grad():
            scores = model(ids[:, :-1]).logits[0].log_softmax(-1)
        chosen = scores.gather(1, ids[0, 1:, None])[len(before) - 1 :]
        return chosen.sum().item()

    text = "abcdef"
    whole, context = tokenizer.encode(text), tokenizer.encode("abc")
    assert (whole[0] == BOS) is (bos in ("adds", "unnamed"))
    (rolling,) = answers.loglikelihood_rolling(requests((text,)))
    assert rolling == pytest.approx(scored([prefix], whole), rel=1e-6)
    (pair, alone) = answers.loglikelihood(requests(("abc", "def"), ("", text)))
    assert pair[0] == pytest.approx(scored(context, whole[len(context) :]), rel=1e-6)
    assert alone[0] == pytest.approx(scored([prefix], list(text.encode())), rel=1e-6)
    ids = torch.tensor([whole])
    after = model.generate(ids, max_new_tokens=6, do_sample=False)[0, len(whole) :].tolist()
    (written,) = answers.generate_until(requests((text, {"max_gen_toks": 6, "temperature": 0})))
    assert written == bytes(it for it in after if it < 256).decode(errors="replace")


def test_a_token_that_spans_the_border_is_scored_as_in_the_library(opened: Opened) -> None:
    """Source: `_encode_pair` of lm-eval 0.4.13. The continuation is what follows as many ids."""
    native = bytes_native()
    merged = json.loads(native.to_str())
    merged["model"]["vocab"]["cd"] = 257
    merged["model"]["merges"] = [["c", "d"]]
    native = Native.from_str(json.dumps(merged))
    tokenizer = FileTokenizer(native, Path("tokenizer.json"), 256)
    answers = Answers(replace(opened, tokenizer=tokenizer))
    assert tokenizer.encode("abcdef") == [*b"ab", 257, *b"ef"]
    assert answers._pair("abc", "def") == ([256, *b"abc"], [*b"ef"])
    for continuation in ("d", ""):
        with pytest.raises(UserError, match=f"the answer '{continuation}' has 0 tokens of its own"):
            answers.loglikelihood(requests(("abc", "def"), ("abc", continuation)))
    with pytest.raises(UserError, match="has 49 tokens of its own after 'k'; 1 to 48 can"):
        answers.loglikelihood(requests(("k", "l" * 49)))


@pytest.mark.parametrize("name", ["max_new_tokens", "max_tokens", "max_completion_tokens"])
def test_the_length_of_a_text_has_the_names_of_the_library(opened: Opened, name: str) -> None:
    answers = Answers(opened)
    usual = answers.generate_until(requests(("ab", {"max_gen_toks": 5})))
    assert answers.generate_until(requests(("ab", {name: 5}))) == usual
    both = {name: 9, "max_gen_toks": 5}
    assert answers.generate_until(requests(("ab", both))) == usual
    with pytest.raises(
        UserError, match=r"asks for 48 tokens of text, and the model's context has 48"
    ):
        answers.generate_until(requests(("ab", {name: 48})))  # as the library refuses it


@pytest.mark.parametrize("bos", ["adds", "names", "none", "unnamed"])
def test_lm_eval_scores_a_model_of_transformers_so(
    bos: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = pytest.importorskip("lm_eval.models.huggingface", reason="pip install lm-eval")
    folder = folder_of_transformers(tmp_path, bos, monkeypatch)
    merged = json.loads((folder / "tokenizer.json").read_text())
    merged["model"]["vocab"]["xy"] = 258
    merged["model"]["merges"] = [["x", "y"]]
    (folder / "tokenizer.json").write_text(json.dumps(merged))
    theirs = library.HFLM(str(folder), dtype="float64", device="cpu", batch_size=1, max_length=48)
    ours = Answers(open_model(str(folder), dtype="fp64"))
    texts, pairs = requests(*((text,) for text in TEXTS)), requests(*PAIRS[:4], ("abx", "yz"))
    expected = theirs.loglikelihood_rolling(texts, disable_tqdm=True)
    assert ours.loglikelihood_rolling(texts) == pytest.approx(expected, rel=1e-6)
    scored = theirs.loglikelihood(pairs, disable_tqdm=True)
    assert [it for it, _ in ours.loglikelihood(pairs)] == pytest.approx(
        [it for it, _ in scored], rel=1e-6
    )
    wish = {"max_gen_toks": 8, "until": ["\n"], "do_sample": False}
    written = requests(("ab", wish), ("hello world", wish))
    assert ours.generate_until(written) == theirs.generate_until(written, disable_tqdm=True)


def test_texts(opened: Opened) -> None:
    whole = Written()
    for _ in write(opened, encode(opened, "ab"), Wish(Sampling(0.0), 12), whole):
        pass
    stop = whole.text[4]
    wishes = ({"max_gen_toks": 12}, {"until": [stop], "max_gen_toks": 12}, {"until": stop})
    found = Answers(opened).generate_until(requests(*(("ab", wish) for wish in wishes)))
    assert found[0] == whole.text
    assert found[1] == found[2] == whole.text[: whole.text.index(stop)]
    with pytest.raises(UserError, match="num_beams"):
        Answers(opened).generate_until(requests(("ab", {"num_beams": 4})))


@pytest.mark.slow
def test_several_processes_come_to_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The batches are the same, and so are the figures, to the last bit."""
    name, options = str(run_of_bytes(tmp_path).path), {"dtype": "fp64"}
    monkeypatch.setattr(harness, "_LOGITS", 4000)
    monkeypatch.setattr(writing, "_MOST_ROWS", 2)
    here = open_model(name, **options)
    shell = open_model(name, **options, weights=False)
    pairs = requests(*(pair for pair in PAIRS), *((f"text {n} ", "x" * n) for n in range(1, 12)))
    texts = requests(*((text,) for text in TEXTS if text))
    wishes = ({"max_gen_toks": 8}, {"max_gen_toks": 5, "until": ["e"]})
    written = requests(*((f"q{n}", wishes[n % 2]) for n in range(7)))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        one = Answers(here)
        with replicated(name, options, shell, ["cpu", "cpu"]) as run_all:
            two = Answers(shell, run_all=run_all)
            assert two.loglikelihood(pairs) == one.loglikelihood(pairs)
            assert two.loglikelihood_rolling(texts) == one.loglikelihood_rolling(texts)
            assert two.generate_until(written) == one.generate_until(written)
        alone = [score for pair in pairs for score in one.loglikelihood([pair])]
        for (score, greedy), (wanted, likely) in zip(one.loglikelihood(pairs), alone, strict=True):
            assert score == pytest.approx(wanted, rel=1e-12, abs=1e-12) and greedy == likely
        singly = [text for request in written for text in one.generate_until([request])]
        assert one.generate_until(written) == singly
    finally:
        torch.set_num_threads(threads)


def test_without_the_library(opened: Opened, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        import lm_eval  # noqa: F401

        pytest.skip("lm_eval is installed")
    except ImportError:
        pass
    assert nanoscale(["eval", opened.source, "--tasks", "hellaswag"]) == 2
    assert "install 'lm-eval>=0.4.13'" in capsys.readouterr().err


def test_what_the_library_prints_is_not_in_the_document(
    opened: Opened,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def printing(*_: Any, **__: Any) -> dict[str, Any]:
        print("bootstrapping for stddev: mean")
        return {"results": {"choice": {"acc,none": 1.0}}}

    monkeypatch.setattr(harness, "require_library", lambda: None)
    monkeypatch.setattr(harness, "evaluate_tasks", printing)
    assert nanoscale(["eval", str(tmp_path / "run"), "--tasks", "choice", "--json"]) == 0
    captured = capsys.readouterr()
    assert json.loads(captured.out)["tasks"] == {"choice": {"acc,none": 1.0}}
    assert "bootstrapping" in captured.err


@pytest.mark.parametrize(
    "words",
    [
        ("--trust",),
        ("--num-nodes", "2"),
        ("--no-preflight",),
        ("--num-gpus", "1", "--hostfile", "hosts"),
    ],
)
def test_options_of_the_loss_are_refused(
    words: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    assert nanoscale(["eval", "x", "--tasks", "hellaswag", *words]) == 2
    option = next(word for word in words if word.startswith("--") and word != "--num-gpus")
    assert f"{option} cannot be used with --tasks" in capsys.readouterr().err


def test_the_tasks_that_are_advised_are_known_ones() -> None:
    known = ["arc_easy", "hellaswag", "my task"]
    for asked in ("hellaswg", "arc_esy", "my tsk"):
        (wrong,) = _no_task(asked, ["hellaswag", asked], known).violations
        for text in wrong.suggestions:
            option, tasks = shlex.split(text)
            assert option == "--tasks" and set(tasks.split(",")) <= set(known)
        assert wrong.suggestions


TASKS = {
    "choice": {
        "output_type": "multiple_choice",
        "doc_to_text": "{{q}}",
        "doc_to_choice": "{{a}}",
        "doc_to_target": "gold",
        "metric_list": [{"metric": "acc"}],
    },
    "rolling": {
        "output_type": "loglikelihood_rolling",
        "doc_to_text": "",
        "doc_to_target": "{{q}}",
        "metric_list": [{"metric": "bits_per_byte"}],
    },
    "text": {
        "output_type": "generate_until",
        "doc_to_text": "{{q}}",
        "doc_to_target": "{{said}}",
        "generation_kwargs": {"max_gen_toks": 8, "until": ["\n"]},
        "metric_list": [{"metric": "exact_match"}],
    },
}


def test_the_library_comes_to_the_same(
    opened: Opened, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("lm_eval", reason="pip install lm-eval")
    import yaml

    monkeypatch.setenv("HF_DATASETS_OFFLINE", "1")
    answers = Answers(opened)
    rows = [{"q": q, "a": ["xy", "0", "zz"]} for q in ("ab", "def", "import os")]
    for row in rows:
        scores = [directly((row["q"] + a).encode(), len(a))[0] for a in row["a"]]
        row["gold"] = scores.index(max(scores))
        wish = {"max_gen_toks": 8, "until": ["\n"]}
        (row["said"],) = answers.generate_until(requests((row["q"], wish)))
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "tasks").mkdir()
    files = {"data_files": {"test": str(tmp_path / "rows.jsonl")}}
    for name, task in TASKS.items():
        about = {
            "task": name,
            "dataset_path": "json",
            "dataset_kwargs": files,
            "test_split": "test",
        }
        (tmp_path / "tasks" / f"{name}.yaml").write_text(yaml.safe_dump(about | task))
    found = evaluate_tasks(answers, list(TASKS), None, None, tmp_path / "tasks")["results"]
    assert found["choice"]["acc,none"] == 1.0
    assert found["text"]["exact_match,none"] == 1.0
    nats = sum(directly(row["q"].encode(), len(row["q"]))[0] for row in rows)
    size = sum(len(row["q"]) for row in rows)
    bits = -nats / size / torch.tensor(2.0).log().item()
    assert found["rolling"]["bits_per_byte,none"] == pytest.approx(bits, rel=1e-6)
    with pytest.raises(UserError, match="no such task"):
        evaluate_tasks(answers, ["chioce"], None, None, tmp_path / "tasks")

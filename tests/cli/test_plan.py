"""`nanoscale plan`, run in this process."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from nanoscale.cli.main import run as nanoscale
from nanoscale.common.devices import detect
from nanoscale.config.composing.compose import compose
from nanoscale.config.composing.library import packaged
from nanoscale.config.rules import Devices, check
from nanoscale.launch.request import Request
from nanoscale.plan import saving
from nanoscale.plan.predict import SURE, predict
from nanoscale.view.plan.prediction import document
from nanoscale.view.run.launch_text import request_lines
from tests.cli import Capsys

H100 = (
    *("recipe=llama-8b", "cluster=h100-sxm", "parallel=dp", "zero=stage3", "train.micro_batch=1"),
    "parallel.activation_checkpointing=selective",
)


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def output(capsys: Capsys, *words: str, code: int = 0) -> str:
    assert nanoscale(["plan", *words]) == code
    captured = capsys.readouterr()
    assert captured.err == ""
    return captured.out


def refusal(capsys: Capsys, *words: str) -> str:
    assert nanoscale(["plan", *words]) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and "Traceback" not in captured.err
    return captured.err


def test_the_document_has_what_others_rely_on(capsys):
    plan = json.loads(output(capsys, *H100, "--json"))
    assert plan["fits"] is True and 0.5 <= plan["fits_probability"] <= 1
    memory = plan["memory"]
    assert memory["worst_rank"] == 0
    assert 0 < memory["allocated_gib"] <= memory["reserved_gib"] < memory["capacity_gib"]
    assert sum(memory["parts"].values()) == pytest.approx(memory["in_use_gib"])
    assert sum(plan["step_parts_s"].values()) == pytest.approx(plan["step_time_s"])
    assert plan["tokens_per_s_per_gpu"] * 8 == pytest.approx(512 * 8192 / plan["step_time_s"])
    assert 0 < plan["mfu_causal"] < plan["mfu"] <= plan["hfu"] < 1


def test_a_layout_that_does_not_fit_is_told(capsys):
    plan = json.loads(output(capsys, *H100, "zero.stage=0", "--json", code=3))
    assert plan["fits"] is False and plan["fits_probability"] < 0.01
    shown = output(capsys, *H100, "zero.stage=0", code=3)
    assert "does not fit: " in shown and f"{plan['remedy']}\n" in shown
    words = plan["remedy"].removeprefix("type ").partition(", which")[0].split()
    assert json.loads(output(capsys, *H100, *words, "--json"))["fits"]


def test_the_memory_of_inference_is_planned(capsys):
    job = ("model=llama-8b", "cluster=h100-sxm", "--inference")
    content = json.loads(output(capsys, *job, "--json"))
    assert content["fits"] and content["cache_bytes_per_token"] == 128 * 1024
    assert f"{content['generate']['longest_sequence']:,}" in output(capsys, *job)
    assert "does not fit" in output(capsys, *job, "model=llama-70b", code=3)
    for other in ("--explain", "--search", "--budget=2h", "--num-gpus=4"):
        assert "--inference" in refusal(capsys, *job, other)


def test_fp32_is_planned_in_tf32_and_what_bf16_gives_is_said(capsys):
    job = [
        "recipe=llama-1b",
        "cluster=h100-sxm",
        "parallel=dp",
        "zero=stage2",
        "train.micro_batch=1",
        "parallel.activation_checkpointing=selective",
    ]

    def speed(*words: str) -> float:
        return json.loads(output(capsys, *job, *words, "--json"))["tokens_per_s_per_gpu"]

    bf16, tf32 = speed(), speed("precision=fp32")
    assert bf16 > tf32 > 2 * speed("precision=fp32", "precision.tf32=false")
    shown = output(capsys, *job, "precision=fp32")
    assert ", tf32, native" in shown
    assert (
        f"precision=bf16 would give {bf16:,.0f} tokens/s per device instead of {tf32:,.0f}" in shown
    )
    assert "would give" not in output(capsys, *job)
    assert "would give" not in output(capsys, *job, "cluster=v100", "precision=fp32", code=3)
    assert "would give" not in output(capsys, "recipe=debug", "cluster=cpu")


def test_the_type_that_auto_becomes_is_planned(capsys):
    job = ["model=llama-1b", "train.steps=5", "train.seq_len=2k"]
    for cluster, kind, code in (("h100-sxm", "bf16", 0), ("v100", "fp16", 0), ("cpu", "fp32", 3)):
        assert f", {kind}, native" in output(capsys, *job, f"cluster={cluster}", code=code)
    peak = ["cluster=h100-sxm", "cluster.peak_tflops=100"]
    mine, usual = (
        json.loads(output(capsys, *job, *words, "--search", "--json"))["layouts"][0]["step_time_s"]
        for words in (peak, peak[:1])
    )
    assert mine > 2 * usual


@pytest.mark.parametrize(
    ("words", "ranks"),
    [
        ([], 8),
        (["--hostfile", "hosts"], 16),
        (["--hostfile", "hosts", "--include", "h1:0,1"], 2),
        (["--num-gpus", "4"], 4),
        (["launcher.devices=4", "cluster.hosts=2"], 8),
        (["launcher=slurm", "launcher.nodes=2", "launcher.devices=2"], 4),
    ],
)
def test_a_search_is_for_the_ranks_that_are_asked_for(capsys, words, ranks):
    Path("hosts").write_text("h1 slots=8\nh2 slots=8\n")
    job = ["recipe=debug", "cluster=h100-sxm", "launcher.device=cuda"]
    assert f"debug on {ranks} × h100-sxm" in output(capsys, *job, "--search", *words)


def test_a_launch_begins_with_job_length_and_folder_and_advice_on_precision(tmp_path):
    def lines(*words: str) -> list[str]:
        named = [f"run.root={tmp_path}", "run.name=first", "train.steps=100"]
        composed = compose(["recipe=llama-1b", "cluster=h100-sxm", *named, *words])
        devices = Devices("cuda", 8, ("NVIDIA H100 80GB HBM3",) * 8)
        config = check(composed, devices)
        return request_lines(Request(composed, config, devices, plan=document(predict(config))))

    job, length, folder = lines("precision=auto")
    assert job.startswith("llama-1b, 1.236 B parameters, bf16, native, dp 8 · tp 1 ")
    assert length.startswith("100 steps, 209.7 M tokens, 56.8 epochs; the plan expects ")
    assert re.search(r" at [\d,]+ tokens/s; does not fit: 344 of 79.1 GiB on h100-sxm, ", length)
    assert folder.startswith(f"run in {tmp_path / 'first'}; checkpoints of ")
    job, _, _, *warnings = lines("precision=fp32")
    assert ", tf32, native, " in job
    assert warnings[0].startswith("warning: precision=bf16 would give ")


@pytest.mark.slow
def test_hosts_are_counted_by_the_layout_where_nobody_says_how_many(capsys):
    layouts = {
        ("parallel.tp=8", "parallel.pp=4"): {"dp": 1, "tp": 8, "pp": 4},
        ("cluster.hosts=4",): {"dp": 32, "tp": 1, "pp": 1},
        ("parallel.dp=64",): {"dp": 64, "tp": 1, "pp": 1},
        ("parallel.tp=8", "cluster.hosts=2"): {"dp": 2, "tp": 8, "pp": 1},
    }
    for words, layout in layouts.items():
        plan = json.loads(output(capsys, *H100, "train.micro_batch=1", *words, "--json"))
        assert layout.items() <= plan["layout"].items()


def test_what_is_shown_is_the_document_in_words(capsys):
    words = [*H100, "parallel.tp=8", "parallel.pp=4", "cluster.hosts=8", "cluster.price=2.5"]
    plan = json.loads(output(capsys, *words, "--json"))
    shown = output(capsys, *words)
    assert "64 × h100-sxm on 8 hosts" in shown
    assert f"{plan['memory']['in_use_gib']:.3g} of 79.1 GiB" in shown
    assert f"MFU {plan['mfu']:.1%}" in shown
    fits, speed, length, empty, *_ = shown.splitlines()
    assert fits.startswith("fits: ") and not empty
    assert speed.startswith(f"{plan['tokens_per_s_per_gpu']:,.0f} tokens/s per device")
    assert length.endswith(f" device hours, {plan['training']['cost']:,.0f} at 2.5 an hour")
    assert "rank 3" in shown and "F" in shown
    assert "\x1b" not in shown


def test_every_number_can_be_explained(capsys):
    shown = output(capsys, *H100, "--explain")
    assert "4 B · 1,003," in shown.replace("\n", "")
    assert "2·m·n·k FLOPs" in shown


def test_the_page_needs_nothing_else(capsys):
    words = [*H100, "parallel.tp=8", "parallel.pp=4", "cluster.hosts=8", "--html", "plan.html"]
    output(capsys, *words)
    page = Path("plan.html").read_text()
    memory, pipeline = re.findall('<pre class="wide">(.*?)</pre>', page, re.DOTALL)
    assert memory.count("GiB") == 5 and pipeline.count("%") >= 4
    assert not re.search("https?://|<script|src=", page)


@pytest.mark.slow
def test_the_search_writes_a_recipe_and_a_page(capsys):
    words = ["recipe=llama-1b", "cluster=h100-sxm", "--search"]
    found = json.loads(output(capsys, *words, "--write", "best.yaml", "--html", "s.html", "--json"))
    best = found["layouts"][0]
    assert found["considered"] > found["fitting"] > 100 and found["why"]
    again = json.loads(output(capsys, "recipe=./best.yaml", "--json"))
    assert again["step_time_s"] == pytest.approx(best["step_time_s"])
    assert Path("s.html").read_text().count("<circle") > 100
    shown = output(capsys, *words)
    assert "type  " + " ".join(best["overrides"]) in shown


def test_a_search_in_vain_ends_with_3(capsys):
    words = ["recipe=llama-70b", "cluster=v100", "precision=fp16", "train.seq_len=2048", "--search"]
    assert "no layout fits; the smallest needs" in output(capsys, *words, code=3)
    assert json.loads(output(capsys, *words, "--json", code=3))["nearest"]["fits"] is False


def test_bad_requests(capsys):
    assert "cluster=h100-sxm" in refusal(capsys, "recipe=debug", "cluster.device=h101")
    assert "--search" in refusal(capsys, *H100, "--write", "x.yaml")
    assert "folder that exists" in refusal(capsys, *H100, "--html", "no/x.html")
    assert "parallel.tp" in refusal(capsys, *H100, "parallel.tp=3")
    assert not list(Path().iterdir())


def test_this_machine_is_planned_for_where_nothing_is_described(capsys):
    plan = json.loads(output(capsys, "recipe=debug", "launcher.device=cpu", "--json"))
    assert plan["fits"] and plan["hardware"]["device"] == "cpu"


@pytest.mark.skipif(detect().kind != "cpu", reason="this machine has a GPU")
@pytest.mark.parametrize(
    ("words", "device"),
    [
        (["recipe=llama-8b"], "h100-sxm"),
        (["recipe=./mine.yaml"], "h200"),
        (["recipe=llama-8b", "cluster=a100-80"], "a100-80"),
        (["recipe=llama-1b", "cluster=local"], "cpu"),
        (["recipe=llama-1b", "launcher.device=cpu"], "cpu"),
        (["recipe=debug"], "cpu"),
    ],
)
def test_a_recipe_for_gpus_is_planned_for_its_reference_where_there_are_none(words, device, capsys):
    Path("mine.yaml").write_text(
        "defaults: [llama-1b, _self_]\ncluster: {reference: [cluster=h200, cluster.hosts=1]}\n"
    )
    code = nanoscale(["plan", *words, "--json"])
    shown = capsys.readouterr()
    plan = json.loads(shown.out)
    assert (code == 0) == plan["fits"] and plan["hardware"]["device"] == device
    assert ("no GPU here" in shown.err) == (len(words) == 1 and device != "cpu")


FOR_GPUS = sorted(
    path.stem
    for folder in packaged()
    for path in folder.glob("*.yaml")
    if "\n  reference: [" in path.read_text()
)


@pytest.mark.slow
@pytest.mark.skipif(detect().kind != "cpu", reason="this machine has a GPU")
@pytest.mark.parametrize("recipe", FOR_GPUS)
def test_every_recipe_for_gpus_surely_fits_its_reference(recipe, capsys):
    assert nanoscale(["plan", f"recipe={recipe}", "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["fits"] and plan["fits_probability"] >= SURE


LARGE = (
    "recipe=debug", "launcher.device=cpu", "parallel.dp=2", "train.seq_len=512", "model.max_seq_len=512",
    "train.micro_batch=4", "run.name=x", "cluster.memory_gib=0.07",
)  # fmt: skip


@pytest.mark.parametrize(("recipe", "is_for_gpus"), [("llama-8b", True), ("debug", False)])
def test_train_says_that_a_job_for_gpus_would_run_on_the_cpu(capsys, recipe, is_for_gpus):
    nanoscale(["train", f"recipe={recipe}", "--dry-run"])
    assert ("would train on the CPU" in capsys.readouterr().err) == is_for_gpus


def test_train_does_not_launch_what_does_not_fit_and_says_what_would(capsys):
    assert nanoscale(["train", *LARGE, "--json"]) == 3
    error = json.loads(capsys.readouterr().out)["error"]
    assert error["kind"] == "plan" and "--force" in error["message"]
    assert not list(Path().iterdir())
    assert len(error["violations"]) == 3
    for proposal in error["violations"]:
        (words,) = proposal["suggestions"]
        plan = json.loads(output(capsys, *_with(words.split()), "--json"))
        assert plan["fits"] is True
        assert f"{plan['memory']['in_use_gib'] * 1024:.3g} of 71.7 MiB" in proposal["message"]
        assert f"{plan['tokens_per_s_per_gpu']:,.0f} tokens/s" in proposal["message"]


def _with(words):
    """Replace keys of a command line, which may set each key once."""
    keys = {word.partition("=")[0] for word in words}
    return [word for word in LARGE if word.partition("=")[0] not in keys] + words


def test_the_disk_of_a_described_machine_is_not_known(capsys, monkeypatch):
    monkeypatch.setattr(saving, "_free_bytes", lambda _: 1)
    line = ("recipe=debug", "--json")
    for cluster, free in (("local", 1), ("h100-sxm", None)):
        found = json.loads(output(capsys, *line, f"cluster={cluster}"))["checkpoints"]
        assert found["free_bytes"] == free and bool(found["warnings"]) == (free is not None)


def test_a_dry_run_shows_the_plan(capsys):
    assert nanoscale(["train", *LARGE, "--dry-run", "--json", "--force"]) == 0
    plan = json.loads(capsys.readouterr().out)["plan"]
    planned = json.loads(output(capsys, *LARGE, "--json", code=3))
    assert planned.pop("remedy")
    for found in (plan, planned):
        assert found["checkpoints"].pop("free_bytes") > 0  # other processes write to the disk
    assert plan == planned
    assert nanoscale(["train", *LARGE, "--dry-run", "--force"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "does not fit: " in shown and f"{plan['tokens_per_s']:,.0f} tokens/s" in shown
    assert not list(Path().iterdir())


@pytest.mark.parametrize(
    ("words", "code", "kind"),
    [
        ((), 3, "plan"),
        (("cluster.memory_gib=1",), 0, None),
        (("cluster.memory_gib=1", "run.name=taken"), 2, "run"),
        (("cluster.memory_gib=1", "run.root=/proc/runs"), 2, "run"),
        (("cluster.memory_gib=1", "run.root=file/runs"), 2, "run"),
    ],
)
@pytest.mark.parametrize("verb", ["train", "submit"])
def test_a_dry_run_shows_everything_and_exits_as_the_launch_would(verb, words, code, kind, capsys):
    Path("runs/taken").mkdir(parents=True)
    Path("file").touch()
    before = sorted(Path().rglob("*"))
    asked = [verb, *_with(list(words)), *(["--num-nodes", "1"] if verb == "submit" else [])]
    assert nanoscale([*asked, "--dry-run", "--json"]) == code
    document = json.loads(capsys.readouterr().out)
    assert document["derived"]["steps"] == 20
    assert document.get("error", {}).get("kind") == kind
    assert nanoscale([*asked, "--dry-run"]) == code
    out, err = capsys.readouterr()
    assert "#SBATCH" in out if verb == "submit" else "tokens/s" in out
    assert ("error: " in err) is (code != 0)
    if code:
        assert nanoscale([*asked, "--json"]) == code
        assert json.loads(capsys.readouterr().out)["error"] == document["error"]
    assert sorted(Path().rglob("*")) == before


def test_a_dry_run_of_an_array_exits_as_submit_would(capsys):
    Path("runs/x-1").mkdir(parents=True)
    asked = ["submit", *LARGE, "train.seed=1,2", "cluster.memory_gib=1", "--num-nodes", "1"]
    assert nanoscale([*asked, "--dry-run", "--json"]) == 2
    document = json.loads(capsys.readouterr().out)
    assert [run["name"] for run in document["runs"]] == ["x-0", "x-1"]
    assert document["error"]["violations"][0]["suggestions"] == ["run.name=x-2"]


def test_a_price_is_shown_with_every_layout(capsys):
    words = [*H100, "cluster.price=2.5", "--search"]
    found = json.loads(output(capsys, *words, "--json"))
    cost = found["layouts"][0]["training"]["cost"]
    assert cost == pytest.approx(2.5 * found["layouts"][0]["training"]["device_hours"])
    assert f"{cost:,.0f}" in output(capsys, *words)
    assert "cost" not in output(capsys, *H100, "parallel.tp=8", "--search").partition("\n- ")[0]


@pytest.mark.slow
@pytest.mark.usefixtures("forked_ranks")
def test_train_goes_on_by_force_and_keeps_its_plan(capsys):
    assert nanoscale(["train", *LARGE, "train.steps=2", "scheduler.warmup_steps=0", "--force"]) == 0
    shown = capsys.readouterr().out
    plan = json.loads(Path("runs/x/plan.json").read_text())
    assert plan["fits"] is False
    assert f"samples/s (last), planned {plan['tokens_per_s']:,.0f}" in shown


@pytest.mark.slow
def test_devices_of_other_hosts_are_no_guess(capsys):
    Path("hosts").write_text("a slots=8\nb slots=8\n")
    words = ["recipe=llama-8b", "--hostfile", "hosts", "train.micro_batch=1"]
    assert "cluster=h100-sxm" in refusal(capsys, *words)
    assert json.loads(output(capsys, *words, "cluster=h200", "--json"))["layout"]["dp"] == 16


COMBINED = (*H100, "cluster=h100-sxm,a100-80", "cluster.hosts=1,4")


def test_combinations_of_values_are_rows_of_one_table(capsys):
    rows = json.loads(output(capsys, *COMBINED, "--json"))["plans"]
    assert [tuple(row["values"].values()) for row in rows] == [
        *(("h100-sxm", "1"), ("h100-sxm", "4"), ("a100-80", "1"), ("a100-80", "4"))
    ]
    for row in rows:
        alone = json.loads(output(capsys, *row["overrides"], "--json"))
        assert {key: row[key] for key in alone} == alone
        assert row["world_size"] == 8 * row["hosts"] == 8 * int(row["values"]["cluster.hosts"])
    shown = output(capsys, *COMBINED)
    assert shown.startswith("4 combinations, 4 of them fit\n") and len(shown.splitlines()) == 6
    for row, line in zip(rows, shown.splitlines()[2:], strict=True):
        devices = f"{row['world_size']} × {row['hardware']['device']}"
        speed = f"{row['tokens_per_s_per_gpu']:,.0f}", f"{row['tokens_per_s']:,.0f}"
        assert line.startswith(devices) and f"{row['mfu']:.1%}" in line
        assert f" dp {row['layout']['dp']} · tp 1 " in line and " micro batch 1 " in line
        assert re.search(rf" +{row['hosts']} .* yes, .* +{speed[0]} +{speed[1]} ", line)


def test_a_combination_with_an_error_is_a_row_with_its_reason(capsys):
    refused, planned = json.loads(output(capsys, *H100, "parallel.tp=3,8", "--json"))["plans"]
    (violation,) = refused["error"]["violations"]
    assert violation["key"] == "parallel.tp" and planned["fits"]
    *_, row, _, reason = output(capsys, *H100, "parallel.tp=8,3").splitlines()
    assert re.fullmatch(r" +3 +error *", row)
    assert reason.startswith("parallel.tp=3: parallel.tp: must divide ") and "; type " in reason


def test_the_exit_code_of_combinations(capsys):
    assert "0 of them fit" in output(capsys, *H100, "zero.stage=0,1", code=3)
    assert "1 of them fits" in output(capsys, *H100, "zero.stage=0,3")
    said = refusal(capsys, *H100, "parallel.tp=3,5")
    assert "2 things are wrong" in said and "parallel.tp=3" in said and "parallel.tp=5" in said
    assert refusal(capsys, *H100, "parallel.tpp=3", "zero.stage=0,1").count("unknown key") == 1
    assert "unknown cluster" in refusal(capsys, *H100, "cluster=h1,h2", "train.seed=1,2")
    assert "one value twice" in refusal(capsys, *H100, "zero.stage=1,1")
    for option in ("--search", "--explain", "--inference", "--budget=2h", "--html=a.html"):
        said = refusal(capsys, *COMBINED, option)
        assert "is for one plan, without several values of cluster and cluster.hosts" in said
    assert "several values of zero.stage" in refusal(capsys, *H100, "zero.stage=1,2", "--search")


def test_combinations_note_the_reference_once(capsys, monkeypatch):
    monkeypatch.setattr("nanoscale.cli.inspect.plan.detect", lambda: Devices("cpu", 1))
    assert nanoscale(["plan", *H100[0:1], *H100[2:], "zero.stage=2,3"]) == 0
    shown = capsys.readouterr()
    assert shown.err.count("planned for the recipe's reference") == 1
    assert shown.out.startswith("2 combinations, ")

"""The limits of each backend: every limit refuses, and its suggestions are accepted."""

from __future__ import annotations

import json
import shlex

import pytest

from nanoscale.cli.main import main
from nanoscale.config import reference
from nanoscale.config.deepspeed import OWNED, deepspeed_settings
from nanoscale.config.rules.backends import OUTSIDE, limits, table
from tests.config.test_rules import CPU, checked, gpus, violations

DS = "backend=deepspeed"
OFFLOAD = ["zero=stage3-offload", "zero.offload_optimizer=nvme"]

BASE = "model.init_from=/models/base"
LAWS = [
    # words, where, the key that is named
    (["zero.offload_optimizer=cpu"], CPU, "zero.offload_optimizer"),
    (["zero.hpz=2"], CPU, "zero.hpz"),
    (["backend.reduce_bucket=5M"], CPU, "backend.reduce_bucket"),
    (["backend.overlap_comm=off"], CPU, "backend.overlap_comm"),
    (["backend.extra.steps_per_print=5"], CPU, "backend.extra"),
    ([DS, "precision=bf16", "precision.reduce=bf16"], CPU, "precision.reduce"),
    ([DS, "precision=fp8", "zero=stage1"], gpus(1), "precision.fp8"),
    ([DS, "optimizer=adamw8bit"], CPU, "optimizer.name"),
    ([DS, "parallel.dp=4", "parallel.dp_replicate=2", "zero=stage3"], CPU, "parallel.dp_replicate"),
    ([DS, "parallel.tp=2"], CPU, "parallel.sequence_parallel"),
    ([DS, "parallel.tp=2", "parallel.sequence_parallel=false", "model.qk_norm=true"], CPU,
     "model.qk_norm"),
    ([DS, "parallel.pp=2", "parallel.schedule=gpipe"], CPU, "parallel.schedule"),
    ([DS, "parallel.pp=2", "parallel.schedule=zbv"], CPU, "parallel.schedule"),
    ([DS, "parallel.pp=2", "zero=stage2"], CPU, "zero.stage"),
    ([DS, "parallel.pp=2", "precision=bf16"], CPU, "precision.compute"),
    ([DS, "backend.compile=on", "zero=stage3"], CPU, "backend.compile"),
    ([DS, "zero.offload_optimizer=cpu"], CPU, "zero.offload_optimizer"),
    ([DS, "zero=stage2", "zero.offload_param=cpu"], CPU, "zero.offload_param"),
    ([DS, "backend.overlap_comm=on"], CPU, "backend.overlap_comm"),
    ([DS, "backend.reduce_bucket=5M"], CPU, "backend.reduce_bucket"),
    ([DS, "zero=stage3", "backend.allgather_bucket=5M"], CPU, "backend.allgather_bucket"),
    ([DS, "zero=stage2", "backend.prefetch_bucket=5M"], CPU, "backend.prefetch_bucket"),
    ([DS, "zero=stage2", "zero.hpz=2", "parallel.dp=2"], CPU, "zero.hpz"),
    ([DS, "zero=stage3", "zero.hpz=3", "parallel.dp=4"], CPU, "zero.hpz"),
    ([DS, "zero=stage2", "zero.quantized_weights=true"], gpus(1), "zero.quantized_weights"),
    ([DS, "zero=stage3", "zero.quantized_weights=true"], CPU, "zero.quantized_weights"),
    ([DS, "zero=stage3", "zero.quantized_gradients=true"], CPU, "zero.quantized_gradients"),
    ([DS, "model.experts=8", "parallel.dp=2", "parallel.ep=2"], CPU, "parallel.ep"),
    ([DS, "model.experts=8", "model.balance=aux"], CPU, "model.balance"),
    ([DS, "model.experts=8", "parallel.tp=2", "parallel.sequence_parallel=false"], CPU,
     "model.experts"),
    ([DS, BASE, "lora.rank=4", "parallel.tp=2", "parallel.sequence_parallel=false"], CPU, "lora.rank"),
    ([DS, BASE, "lora.rank=4", "zero=stage3", "zero.offload_param=nvme",
      "zero.offload_optimizer=nvme", "zero.nvme_path=."], CPU, "zero.offload_param"),
    ([DS, "zero.nvme_path=."], CPU, "zero.nvme_path"),
    ([DS, "zero=stage2", "zero.offload_optimizer=nvme", "zero.nvme_path=."], CPU,
     "zero.offload_optimizer"),
]  # fmt: skip


@pytest.fixture(autouse=True)
def _every_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nanoscale.config.rules.resolution.find_spec", lambda name: name)


@pytest.mark.parametrize(("words", "on", "key"), LAWS, ids=[" ".join(w) for w, _, _ in LAWS])
def test_a_limit_names_what_breaks_it_and_suggests_what_keeps_it(words, on, key):
    (violation,) = violations(*words, on=on)
    assert violation.key == key
    assert violation.message
    assert violation.suggestions
    for suggestion in violation.suggestions:
        try:
            checked(*words, *shlex.split(suggestion), on=on)
        except Exception as error:  # other keys of the backend that was left, or a law that follows
            assert suggestion in ("backend=native", "backend=deepspeed"), error


def test_every_limit_has_such_a_test():
    tested = {(words[0] == DS, key) for words, _, key in LAWS}
    for limit in limits("deepspeed"):
        if limit.key != "precision.params":  # fp64, with which more is wrong: below
            assert (True, limit.key) in tested, limit.key


def test_fp64_is_not_deepspeeds():
    (violation,) = violations(DS, "precision=fp64")
    assert violation.key == "precision.params"
    assert violation.suggestions == ("precision=fp32", "backend=native")


def test_a_folder_for_nvme_must_be_there(tmp_path):
    assert violations(DS, *OFFLOAD)[0].key == "zero.nvme_path"
    assert violations(DS, *OFFLOAD, "zero.nvme_path=nowhere")[0].key == "zero.nvme_path"
    assert checked(DS, *OFFLOAD, f"zero.nvme_path={tmp_path}").zero.nvme_path == str(tmp_path)


def test_a_folder_for_nvme_is_refused_with_the_devices_that_are_set():
    (idle,) = violations(DS, "zero=stage3-offload", "zero.nvme_path=.")
    assert "zero.offload_optimizer=cpu and zero.offload_param=" in idle.message


def test_deepspeed_is_asked_for_where_it_is_not_installed(monkeypatch):
    monkeypatch.setattr("nanoscale.config.rules.resolution.find_spec", lambda _: None)
    (missing,) = violations(DS)
    assert "install 'deepspeed>=0.19'" in missing.message


def extra(path: str, value: object) -> str:
    text = str(value)
    for name in reversed(path.split(".")):
        text = f"{{{name}: {text}}}"
    return f"backend.extra={text}"


@pytest.mark.parametrize("path", OWNED)
def test_extra_cannot_set_what_a_key_decides(path):
    (violation,) = violations(DS, extra(path, 1))
    assert violation.key == "backend.extra"
    assert f"{path} (set {OWNED[path]} instead)" in violation.message


def test_everything_generated_is_owned_or_ours():
    ours = {"zero_allow_untested_optimizer", "zero_force_ds_cpu_optimizer", "pin_memory"}
    config = checked(DS, "zero=stage3-offload", "precision=fp16", "zero.hpz=1")
    for path in leaves(deepspeed_settings(config)):
        parents = [path[: len(path) - len(rest)].rstrip(".") for rest in _tails(path)]
        assert any(parent in OWNED for parent in parents) or path.split(".")[-1] in ours, path


def _tails(path: str) -> list[str]:
    parts = path.split(".")
    return [".".join(parts[i:]) for i in range(1, len(parts) + 1)]


def leaves(values: dict, prefix: str = "") -> list[str]:
    found: list[str] = []
    for name, value in values.items():
        found += leaves(value, f"{prefix}{name}.") if isinstance(value, dict) else [prefix + name]
    return found


def test_extra_is_merged_last_and_deep():
    word = extra("zero_optimization.round_robin_gradients", "true")
    settings = deepspeed_settings(checked(DS, word, "zero=stage2"))
    assert settings["zero_optimization"]["round_robin_gradients"] is True
    assert settings["zero_optimization"]["stage"] == 2


def test_the_table_has_every_key_that_concerns_a_backend(capsys):
    keys = [key for key, _, _ in table()]
    rest = [key for key in reference.declared() if key.partition(".")[0] not in OUTSIDE]
    assert keys == rest
    rows = {row["key"]: row for row in json.loads(said(capsys, 0, "config", "backends", "--json"))}
    assert rows["zero.offload_param"]["native"] == "no"
    assert rows["zero.offload_param"]["deepspeed"] == "with stage 3"
    assert rows["precision.fp8"] == {"key": "precision.fp8", "native": "yes", "deepspeed": "no"}


def said(capsys: pytest.CaptureFixture[str], code: int, *words: str) -> str:
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert ended.value.code == code
    return capsys.readouterr().out


def test_config_show_deepspeed(capsys):
    words = ["config", "show", "--deepspeed", "--json", "recipe=debug", "launcher.device=cpu"]
    shown = json.loads(said(capsys, 0, *words, "zero=stage2-offload", DS))
    assert shown["zero_optimization"]["offload_optimizer"]["device"] == "cpu"
    assert "backend=deepspeed" in said(capsys, 2, *words)

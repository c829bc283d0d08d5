"""The settings of DeepSpeed, the table of backends, and that each limit has a row in test_rules."""

from __future__ import annotations

import json

import pytest

from nanoscale.cli.main import main
from nanoscale.config import reference
from nanoscale.config.deepspeed import OWNED, deepspeed_settings
from nanoscale.config.rules import Devices
from nanoscale.config.rules.backends import DEEPSPEED, OUTSIDE, table
from tests.config.test_rules import DS, LAWS, checked, violations

OFFLOAD = ["zero=stage3-offload", "zero.offload_optimizer=nvme"]


@pytest.fixture(autouse=True)
def _every_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nanoscale.common.versions.find_spec", lambda name: name)


def test_every_limit_has_such_a_test():
    tested = {(DS in words, key) for words, _, key in LAWS}
    for limit in DEEPSPEED:
        # With fp64 more is wrong: below. tp_overlap needs compiled blocks, which DeepSpeed has without tp only;
        # ep_over_tp needs ep, which DeepSpeed does not have.
        if limit.key not in ("precision.params", "parallel.tp_overlap", "parallel.ep_over_tp"):
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
    for path in reference.flat(deepspeed_settings(config)):
        parents = [path[: len(path) - len(rest)].rstrip(".") for rest in _tails(path)]
        assert any(parent in OWNED for parent in parents) or path.split(".")[-1] in ours, path


def _tails(path: str) -> list[str]:
    parts = path.split(".")
    return [".".join(parts[i:]) for i in range(1, len(parts) + 1)]


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
    assert rows["zero.quantized_weights"]["native"] == "no"
    assert rows["zero.offload_param"]["native"].startswith("none or cpu")
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


def test_the_native_backend_returns_unused_memory_too():
    """The loop does it for both backends."""
    for words in ([], [DS]):
        assert (
            checked(
                *words, "backend.empty_cache=5", on=Devices("cuda", 1, ("NVIDIA H100",))
            ).backend.empty_cache
            == 5
        )

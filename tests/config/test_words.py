"""Every kind of mistake on the command line, and its message."""

from __future__ import annotations

import shlex

import pytest

from nanoscale.common.errors import UserError, Violation
from nanoscale.config.composing.compose import compose
from nanoscale.config.composing.library import Library
from nanoscale.config.composing.overrides import parsed, read_words
from nanoscale.config.violations import nearest_key


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def violations(*words: str) -> list[Violation]:
    with pytest.raises(UserError) as caught:
        compose(words)
    assert caught.value.kind == "config"
    assert str(caught.value)
    return caught.value.violations


def violation(*words: str) -> Violation:
    (only,) = violations(*words)
    return only


UNKNOWN = {
    "model.layer=8": "model.layers=8",
    "trian.steps=8": "train.steps=8",
    "steps=8": "train.steps=8",
    "lr=1e-4": "optimizer.lr=1e-4",
    "modle=llama-8b": "model=llama-8b",
    "recpe=tiny": "recipe=tiny",
    "model.rope_scaling.facto=2": "model.rope_scaling.factor=2",
    "train.phases.a.untl=5": "train.phases.a.until=5",
}


def test_plain_values_are_those_of_hydras_grammar():
    texts = ["llama-8b", "./a.yaml", "/a/1.5", "a.5e3", "null-x", "trueish", "a-"]
    for text in ["0", "12", "01", "1_0", "-1", "1e5", "TRUE", "null", "nan", "inf", *texts]:
        ((key, value),) = read_words([f"run.name={text}"], Library()).settings
        override = parsed(f"run.name={text}")
        assert override is not None
        assert (key, repr(value)) == ("run.name", repr(override.value()))


@pytest.mark.parametrize("prefix", ["", "+", "++"])
def test_an_unknown_key_is_refused_with_any_prefix(prefix):
    found = violations(*(prefix + word for word in UNKNOWN))
    for violation, (word, meant) in zip(found, UNKNOWN.items(), strict=True):
        assert violation.key == word.partition("=")[0]
        assert violation.source == "command line"
        assert "unknown key" in violation.message
        assert violation.suggestions[0] == meant


def test_a_key_that_resembles_nothing_lists_what_there_is():
    assert "layers" in violation("model.zzz=1").message
    assert "optimizer" in violation("zzz=1").message
    assert violation("_target_=os.system").message.startswith("unknown key")
    assert violation("model._target_=os.system").message.startswith("unknown key")


def test_a_known_key_may_carry_any_prefix():
    for prefix in ("", "+", "++"):
        assert compose([f"{prefix}model.layers=3"]).config.model.layers == 3


@pytest.mark.parametrize(
    ("word", "key", "meant"),
    [
        ("recipe=lama-8b", "recipe", "recipe=llama-8b"),
        ("recipe=llama_8b", "recipe", "recipe=llama-8b"),
        ("model=llama8b", "model", "model=llama-8b"),
        ("zero=3", "zero", "zero=stage3"),
        ("+model=llama8b", "model", "model=llama-8b"),
        ("precision=bf61", "precision", "precision=bf16"),
    ],
)
def test_an_unknown_option_is_refused(word, key, meant):
    found = violation(word)
    assert found.key == key
    assert found.suggestions[0] == meant


def test_an_option_like_no_other_lists_the_options():
    assert (
        "stage0, stage1, stage2, stage2-offload, stage3, stage3-offload"
        in violation("zero=xyz").message
    )
    assert (
        "stage0, stage1, stage2, stage2-offload, stage3, stage3-offload"
        in violation("zero=stage9").message
    )
    assert "bf16, bf16-pure, fp16, fp32, fp64, fp8" in violation("precision=fp16x").message
    assert "tiny" in violation("model=null").message


def test_all_mistakes_are_reported_at_once_and_in_order():
    found = violations("model.layer=8", "recipe=lama-8b", "train.steps=x", "zero.stage=9", "x y=3")
    keys = [each.key for each in found]
    assert keys == ["model.layer", "recipe", "x y=3", "zero.stage", "train.steps"]


def test_quoted_values_arrive_as_they_are():
    assert compose(["data.path='a=b, c'"]).config.data.path == "a=b, c"
    assert compose([r"data.path='it\'s C:\\'"]).config.data.path == "it's C:\\"
    assert compose(["data.path='${run.root}/x'"]).config.data.path == "runs/x"


@pytest.mark.parametrize(
    ("word", "meant"),
    [("llama-8b", "recipe=llama-8b"), ("steps", "train.steps=1"), ("zero", "zero=stage0")],
)
def test_a_lone_name_is_no_override(word, meant):
    found = violation(word)
    assert "KEY=VALUE" in found.message
    assert found.suggestions[0] == meant


@pytest.mark.parametrize("word", ["", "=3", "a b=3"])
def test_nonsense_is_refused(word):
    assert "KEY=VALUE" in violation(word).message


@pytest.mark.parametrize("word", ["train.steps=1,2", "train.steps=range(1,4)", "model=tiny,debug"])
def test_a_sweep_is_refused(word):
    message = violation(word).message
    assert "a single run takes one; `nanoscale plan` compares them" in message


def test_a_filter_of_hosts_is_one_value_with_commas():
    wrong = violation("launcher.include=h1@h2:0,2")
    assert wrong.suggestions == ("'launcher.include=\"h1@h2:0,2\"'",)
    assert wrong.source == "command line" and "needs quotes" in wrong.message


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("recipe=debug run.name=Müller lauf", "'run.name=\"Müller lauf\"'"),
        ("run.root=/data/my runs 2", "'run.root=\"/data/my runs 2\"'"),
        ("recipe=debug data.path=out dir train.steps=3", "'data.path=\"out dir\"'"),
        ("recipe=./my own.yaml", "'recipe=\"./my own.yaml\"'"),
        ("run.name=it's mine", shlex.quote(r"run.name='it\'s mine'")),
    ],
)
def test_a_text_that_the_shell_has_divided_is_quoted_at_once(typed, meant, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my own.yaml").write_text("train:\n  steps: 3\n")
    with pytest.raises(UserError) as caught:
        compose(typed.split(" "))
    (wrong,) = caught.value.violations
    assert "the shell divides it" in wrong.message
    assert wrong.suggestions == (meant,)
    compose(shlex.split(meant))


def test_a_list_of_words_with_equals_signs_is_quoted_word_by_word():
    (proposal,) = violation("launcher.slurm.directives=[--x=1, --y]").suggestions
    (word,) = shlex.split(proposal)
    assert compose([word]).config.launcher.slurm.directives == ["--x=1", "--y"]


def test_hydras_own_settings_and_packages_are_refused():
    assert "Hydra" in violation("hydra.run.dir=x").message
    assert "Hydra" in violation("hydra=x").message
    assert violation("model@other=tiny").suggestions == ("model=tiny",)


def test_lists_and_mappings_where_a_value_belongs():
    assert "not take a list" in violation("train.seed=[1]").message
    assert "not a mapping" in violation("train.seed={a: 1}").message
    assert violation("model=[tiny,debug]").suggestions == ("model=tiny", "model=debug")
    assert "model.rope_scaling.factor" in violation("model.rope_scaling=3").message
    assert violation("model={layers: 3, hiddn: 64}").key == "model.hiddn"
    assert compose(["model={layers: 3, hidden: 16}"]).config.model.hidden == 16


@pytest.mark.slow
def test_a_list_of_integers():
    key = "parallel.layers_per_stage"
    assert compose([f"{key}=[3,3,2]"]).config.parallel.layers_per_stage == [3, 3, 2]
    assert compose([f"{key}=[3,3,2]", f"~{key}"]).config.parallel.layers_per_stage is None
    assert compose(["parallel={layers_per_stage: [1, 2]}"]).config.parallel.layers_per_stage == [
        1,
        2,
    ]
    meant = (f"'{key}=[3,3,2]'",)
    assert violation(f"{key}=3,3,2").suggestions == meant
    assert violation(f"{key}='3 3 2'").suggestions == meant
    assert violation(f"{key}=[3.0,3,2]").suggestions == meant
    assert violation(f"{key}=3").suggestions == (f"'{key}=[3]'",)
    for wrong in ("[]", "[a]", "[true]", "[[1]]", "[null]", "[1.5]"):
        assert "a list of integers or null" in violation(f"{key}={wrong}").message
    assert "each at least 0" in violation(f"{key}=[-1,3]").message


@pytest.mark.parametrize("word", ["n=3", "l=3", "x=3", "bs=3", "model._partial_=3"])
def test_words_that_are_too_short_or_too_far_off_suggest_nothing(word):
    assert violation(word).suggestions == ()


def test_deleting_goes_back_to_the_schema():
    assert compose(["recipe=tiny"]).config.logger.tensorboard == "auto"
    assert compose(["recipe=tiny", "~logger"]).config.logger.tensorboard == "off"
    assert compose(["recipe=tiny", "~train"]).config.train.steps is None
    assert compose(["recipe=tiny", "~train.steps"]).config.train.steps is None
    assert compose(["recipe=tiny", "~recipe"]).recipe is None
    assert violation("~loger").suggestions == ("~logger",)


# --- values ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("word", "says", "meant"),
    [
        ("model.layers=1e1", "an integer", "model.layers=10"),  # no scale where none is declared
        ("model.layers=3k", "an integer", "model.layers=3000"),
        ("model.layers=8.0", "an integer", "model.layers=8"),
        ("model.layers=true", "an integer", None),
        ("model.layers='8'", "an integer", "model.layers=8"),
        ("model.layers=null", "an integer", None),
        ("model.layers=0", "at least 1", "model.layers=1"),
        ("optimizer.beta1=1.5", "at most 1", "optimizer.beta1=1"),
        ("optimizer.lr=fast", "a number", None),
        ("optimizer.lr=nan", "a number", None),
        ("optimizer.lr=inf", "a number", None),
        ("optimizer.lr=true", "a number", None),
        ("model.bias=1", "true or false", "model.bias=true"),
        ("zero.stage=2.0", "one of 0, 1, 2, 3", None),
        ("zero.stage=true", "one of 0, 1, 2, 3", None),
        ("model.mlp=swiglue", "swiglu, swiglu-clamped, geglu, gelu", "model.mlp=swiglu"),
        ("logger.tensorboard=true", "auto, on, off", "logger.tensorboard=auto"),
        ("parallel.dp=full", "an integer or auto", "parallel.dp=auto"),
        ("run.name=7", "a text", "'run.name=\"7\"'"),
        ("run.name=???", "a text", None),
        ("train.steps=-3", "at least 1", "train.steps=1"),
        ("train.steps=7x", "an integer", None),
        ("train.steps=1.5", "an integer", None),
    ],
)  # fmt: skip
def test_a_value_of_the_wrong_kind_is_refused(word, says, meant):
    found = violation(word)
    assert says in found.message
    if meant is not None:
        assert found.suggestions[0] == meant


def test_scaled_integers():
    config = compose(["train.steps=1e3", "train.seq_len=32k", "train.tokens=2.5k"]).config
    assert (config.train.steps, config.train.seq_len, config.train.tokens) == (1000, 32768, 2500)
    assert compose(["train.tokens=15T"]).config.train.tokens == 15 * 10**12
    assert compose(["train.tokens=9007199254740993"]).config.train.tokens == 2**53 + 1


def test_an_integer_is_a_number():
    assert compose(["optimizer.lr=1"]).config.optimizer.lr == 1.0
    assert isinstance(compose(["optimizer.lr=1"]).config.optimizer.lr, float)


KEYS = ("optimizer.lr", "scheduler.warmup_steps", "train.steps", "train.seed", "profile.steps")


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("steps", ("train.steps", "profile.steps")),
        ("train.stepz", ("train.steps",)),
        ("trian.steps", ("train.steps",)),
        ("profil.steps", ("profile.steps",)),
        ("train.lr", ("optimizer.lr",)),
        ("train.nothing", ()),
    ],
)
def test_the_section_counts_too(typed: str, meant: tuple[str, ...]) -> None:
    assert nearest_key(typed, KEYS) == meant

"""The search for files, and the precedence among their values."""

from __future__ import annotations

from pathlib import Path

import pytest

from nanoscale.common.errors import UserError
from nanoscale.config.composing.compose import Setting, compose
from nanoscale.config.composing.frozen import dump
from nanoscale.config.schema import Optimizer
from nanoscale.config.values.provenance import Composed


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def write(path: str, text: str) -> Path:
    file = Path(path)
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)
    return file


def violations(*words: str, **options: Path) -> list[tuple[str, str]]:
    with pytest.raises(UserError) as caught:
        compose(words, **options)
    return [(each.key, each.source) for each in caught.value.violations]


def writers(composed: Composed, key: str) -> list[tuple[object, str]]:
    return [(each.value, each.source) for each in composed.history[key]]


# --- precedence -----------------------------------------------------------------------------------


def test_a_recipe_wins_over_the_defaults_and_the_command_line_over_the_recipe():
    write("recipes/mine.yaml", "train:\n  steps: 7\n")
    assert compose(["recipe=mine"]).config.train.steps == 7
    composed = compose(["recipe=mine", "train.steps=9"])
    assert writers(composed, "train.steps") == [
        (None, "default"),
        (7, "recipes/mine.yaml:2"),
        (9, "command line"),
    ]


def test_a_group_chosen_on_the_command_line_wins_over_the_recipes_own_keys():
    write("recipes/mine.yaml", "zero:\n  stage: 2\n")
    assert compose(["recipe=mine"]).config.zero.stage == 2
    for words in (["recipe=mine", "zero=stage3"], ["zero=stage3", "recipe=mine"]):
        composed = compose(words)
        assert composed.config.zero.stage == 3
        assert composed.source("zero.stage") == "nanoscale/conf/zero/stage3.yaml:3"


def test_a_group_chosen_on_the_command_line_replaces_the_whole_section():
    """Keys that the option does not set have the schema's defaults, whatever the recipe or the file set."""
    write("mine/optimizer/mine.yaml", "lr: 1e-5\n")
    write("mine/recipes/wide.yaml", "optimizer: {beta1: 0.5, lr: 1}\n")
    assert compose(["recipe=wide"], config_dir=Path("mine")).config.optimizer.beta1 == 0.5
    chosen = compose(["recipe=wide", "optimizer=mine"], config_dir=Path("mine"))
    assert chosen.config.optimizer == Optimizer(lr=1e-5)
    frozen = write("config.yaml", dump(compose(["recipe=qwen3-30b-a3b"]).config))
    other = compose(["model=llama-8b"], config_file=frozen).config.model
    assert other == compose(["model=llama-8b"]).config.model and not other.qk_norm


def test_a_key_on_the_command_line_wins_over_a_group_there():
    assert compose(["zero.stage=1", "zero=stage3"]).config.zero.stage == 1


def test_a_recipe_chooses_groups_and_is_based_on_others():
    write("recipes/base.yaml", "defaults: [override /zero: stage2]\ntrain: {steps: 7, seed: 1}\n")
    write(
        "recipes/mine.yaml",
        "defaults:\n  - override /model: gpt2\n  - base\n  - _self_\ntrain: {steps: 9}\n",
    )
    config = compose(["recipe=mine"]).config
    assert (config.model.name, config.zero.stage) == ("gpt2", 2)
    assert (config.train.steps, config.train.seed) == (9, 1)


def test_the_outer_recipe_decides_about_a_group():
    write("recipes/base.yaml", "defaults: [override /zero: stage2]\n")
    write("recipes/mine.yaml", "defaults: [base, override /zero: stage3]\n")
    assert compose(["recipe=mine"]).config.zero.stage == 3


def test_null_empties_a_section_and_a_key_revives_it():
    assert compose(["model=llama-8b", "model.rope_scaling=null"]).config.model.rope_scaling is None
    composed = compose(["model=tiny", "model.rope_scaling.factor=2"])
    assert composed.config.model.rope_scaling.factor == 2
    assert composed.config.model.rope_scaling.original_seq_len == 8192
    assert writers(composed, "model.rope_scaling.factor") == [(8.0, "default"), (2, "command line")]


# --- search for files -----------------------------------------------------------------------------


def test_a_users_recipe_hides_ours_of_the_same_name():
    write("recipes/tiny.yaml", "train:\n  steps: 7\n")
    composed = compose(["recipe=tiny"])
    assert composed.source("train.steps") == "recipes/tiny.yaml:2"
    assert composed.recipe == "tiny"


def test_config_dir_comes_before_the_current_folder_and_before_ours():
    write("recipes/tiny.yaml", "train: {steps: 7}\n")
    write("mine/recipes/tiny.yaml", "train: {steps: 8}\n")
    write("mine/recipe/other.yaml", "train: {steps: 9}\n")
    write("mine/zero/stage3.yaml", "stage: 1\n")
    write("mine/model/small.yaml", "defaults: [tiny, _self_]\nlayers: 2\n")
    mine = Path("mine")
    assert compose(["recipe=tiny"], config_dir=mine).config.train.steps == 8
    assert compose(["recipe=other"], config_dir=mine).config.train.steps == 9
    composed = compose(["zero=stage3", "model=small"], config_dir=mine)
    assert composed.source("zero.stage") == "mine/zero/stage3.yaml:1"
    assert (composed.config.model.layers, composed.config.model.name) == (2, "tiny")


def test_a_config_dir_cannot_replace_the_order_of_merging():
    write("mine/config.yaml", "train: {steps: 7}\n")
    assert compose([], config_dir=Path("mine")).config.train.steps is None


@pytest.mark.parametrize("word", ["./sub/mine.yaml", "sub/mine.yaml", "{here}/sub/mine.yaml"])
def test_a_recipe_by_path(here, word):
    write("sub/mine.yaml", "# @package _global_\ntrain:\n  steps: 7\n")
    composed = compose([f"recipe={word.format(here=here)}"])
    assert composed.config.train.steps == 7
    assert composed.source("train.steps") == "sub/mine.yaml:3"
    assert composed.recipe == "mine"


def test_a_path_with_odd_characters():
    write("my jobs/a=b.yaml", "train: {steps: 7}\n")
    assert compose(["recipe='my jobs/a=b.yaml'"]).config.train.steps == 7


def test_a_recipe_by_path_finds_its_base_beside_it():
    write("sub/base.yaml", "train: {steps: 7, seed: 3}\n")
    write("sub/mine.yaml", "defaults: [./base.yaml, _self_]\ntrain: {steps: 8}\n")
    config = compose(["recipe=sub/mine.yaml"]).config
    assert (config.train.steps, config.train.seed) == (8, 3)


def test_recipes_in_sub_folders():
    write("recipes/team/mine.yaml", "train: {steps: 7}\n")
    assert compose(["recipe=team/mine"]).recipe == "team-mine"


def test_a_config_file_stands_in_the_recipes_place():
    file = write("runs/x/config.yaml", "train: {steps: 7}\nzero: {stage: 2}\n")
    composed = compose(["zero=stage3"], config_file=file)
    assert (composed.config.train.steps, composed.config.zero.stage) == (7, 3)
    assert composed.recipe == "x"
    assert violations("recipe=tiny", config_file=file) == [("recipe", "command line")]
    assert violations(config_file=Path("none.yaml")) == [("--config", "option --config")]


def test_an_options_file_outside_its_folder_is_out_of_reach(here):
    write("outside.yaml", "stage: 1\n")
    assert violations(f"zero={here}/outside", "zero=../outside") == [
        ("zero", "command line"),
        ("zero", "command line"),
    ]


# --- mistakes in files ----------------------------------------------------------------------------


def test_everything_wrong_in_all_files_and_words_comes_at_once():
    write("recipes/base.yaml", "train:\n  stepz: 3\n  micro_batch: full\n")
    write(
        "recipes/mine.yaml",
        "defaults:\n"
        "  - base\n"
        "  - bsae\n"
        "  - override /modle: tiny\n"
        "  - override /zero: stage9\n"
        "trian:\n"
        "  steps: 3\n"
        "model:\n"
        "  layerz: 3\n"
        "  rope_scaling:\n"
        "    factr: 2\n"
        "model.heads: 3\n"
        "launcher: 3\n"
        "_target_: os.system\n"
        "data:\n"
        "  path: ${oc.env:API_TOKEN}\n"
        "  cache_dir: [a]\n"
        "parallel:\n"
        "  layers_per_stage: [a, 3]\n",
    )
    found = violations("recipe=mine", "optimizer.lrr=1")
    assert set(found) == {
        ("optimizer.lrr", "command line"),
        ("defaults", "recipes/mine.yaml:3"),
        ("defaults", "recipes/mine.yaml:4"),
        ("defaults", "recipes/mine.yaml:5"),
        ("trian", "recipes/mine.yaml:6"),
        ("model.layerz", "recipes/mine.yaml:9"),
        ("model.rope_scaling.factr", "recipes/mine.yaml:11"),
        ("model.heads", "recipes/mine.yaml:12"),
        ("launcher", "recipes/mine.yaml:13"),
        ("_target_", "recipes/mine.yaml:14"),
        ("data.path", "recipes/mine.yaml:16"),
        ("data.cache_dir", "recipes/mine.yaml:17"),
        ("parallel.layers_per_stage", "recipes/mine.yaml:19"),
        ("train.stepz", "recipes/base.yaml:2"),
        ("train.micro_batch", "recipes/base.yaml:3"),
    }
    assert len(found) == 15


def test_a_list_replaces_another():
    write("recipes/mine.yaml", "parallel:\n  pp: 2\n  layers_per_stage: [2, 6]\n")
    assert compose(["recipe=mine"]).config.parallel.layers_per_stage == [2, 6]
    composed = compose(["recipe=mine", "parallel.layers_per_stage=[4,4]"])
    assert writers(composed, "parallel.layers_per_stage")[-2:] == [
        ([2, 6], "recipes/mine.yaml:3"),
        ([4, 4], "command line"),
    ]


def test_a_bad_value_below_a_good_one_does_not_matter():
    write("recipes/mine.yaml", "train: {steps: many}\n")
    assert violations("recipe=mine") == [("train.steps", "recipes/mine.yaml:1")]
    assert compose(["recipe=mine", "train.steps=3"]).config.train.steps == 3


def test_malformed_yaml_is_refused_with_file_and_line():
    write("recipes/mine.yaml", "a: 1\na: 2\n")
    assert violations("recipe=mine") == [("", "recipes/mine.yaml:2")]


@pytest.mark.parametrize(
    "key", ["data.path", "data.cache_dir", "data.mixture.a.path", "model.init_from", "run.root"]
)
def test_a_path_below_the_home_of_nobody_is_refused(key: str) -> None:
    with pytest.raises(UserError, match="home folder of a user that does not exist") as caught:
        compose(["recipe=debug", f"{key}='~nobody-of-this-name/x'"])
    assert key.startswith(caught.value.violations[0].key)
    python = compose(["recipe=debug", "cluster.python='~nobody-of-this-name/python'"])
    assert python.config.cluster.python == "~nobody-of-this-name/python"  # of other hosts


def test_a_recipe_on_a_path_based_on_a_recipe_by_name():
    write(
        "recipes/by-name.yaml",
        "defaults: [debug, override /zero: stage1, override /zero: stage2]\n",
    )
    write(
        "recipes/deep/by-path.yaml",
        "defaults: [_self_, ../by-name.yaml]\ntrain: {steps: 3, seed: 7}\n",
    )
    composed = compose(["recipe=deep/by-path"])
    assert composed.config.train.seed == 7 and composed.config.train.steps == 20
    assert composed.source("zero.stage") == "nanoscale/conf/zero/stage1.yaml:3"
    write("recipes/twice.yaml", "defaults: [_self_, debug, _self_]\n")
    assert violations("recipe=twice") == [("defaults", "recipes/twice.yaml:1")]


def test_recipes_in_a_circle():
    write("recipes/a.yaml", "defaults: [b]\n")
    write("recipes/b.yaml", "defaults: [a]\n")
    assert violations("recipe=a") == [("defaults", "recipes/a.yaml")]
    write("mine/model/odd.yaml", "defaults: [odd]\n")
    found = violations("model=odd", config_dir=Path("mine"))
    assert found == [("defaults", "mine/model/odd.yaml")]


def test_a_package_header_is_refused():
    write("mine/zero/odd.yaml", "# @package model\nlayers: 3\n")
    found = violations("zero=odd", config_dir=Path("mine"))
    assert ("", "mine/zero/odd.yaml:1") in found


def test_a_group_file_with_its_groups_name_is_told_so():
    write("mine/model/odd.yaml", "model:\n  layers: 3\n")
    with pytest.raises(UserError, match="left margin"):
        compose(["model=odd"], config_dir=Path("mine"))


def test_a_config_dir_that_is_none():
    assert violations(config_dir=Path("none")) == [("--config-dir", "option --config-dir")]


def test_a_recipe_that_is_not_there_names_the_ones_beside_it():
    write("sub/mine.yaml", "")
    with pytest.raises(UserError) as caught:
        compose(["recipe=./sub/mien.yaml"])
    assert caught.value.violations[0].suggestions[0] == "recipe=./sub/mine.yaml"


# --- options and who asked ------------------------------------------------------------------------


def test_an_option_wins_over_the_recipe_and_is_remembered():
    write("recipes/mine.yaml", "launcher: {nodes: 3}\n")
    option = Setting("2:4", "command line: --num-nodes")
    composed = compose(["recipe=mine", "launcher=ssh"], options={"launcher.nodes": option})
    assert composed.config.launcher.nodes == "2:4"
    assert composed.history["launcher.nodes"][-1] == option
    assert composed.by_hand("launcher.nodes") and not composed.by_hand("launcher.name")


def test_an_option_may_say_what_a_word_says():
    option = Setting(4, "command line: --num-nodes")
    composed = compose(["launcher.nodes=4"], options={"launcher.nodes": option})
    assert composed.config.launcher.nodes == 4


@pytest.mark.slow
def test_what_nobody_chose_was_not_asked_for():
    write("recipes/plain.yaml", "train: {steps: 3}\n")
    write("recipes/by-key.yaml", "launcher: {name: local}\n")
    write("recipes/by-group.yaml", "defaults: [override /launcher: local]\n")
    write("recipes/based.yaml", "defaults: [by-group]\n")
    write("mine/launcher/local.yaml", "name: local\n")
    for words, asked in (
        ([], False),
        (["recipe=plain", "train.steps=4"], False),
        (["launcher=local"], True),
        (["launcher.name=local"], True),
        (["recipe=by-key"], True),
        (["recipe=by-group"], True),
        (["recipe=based"], True),
        (["~launcher"], False),
    ):
        assert compose(words).asked_for("launcher.name") == asked, words
    assert not compose([], config_dir=Path("mine")).asked_for("launcher.name")
    assert not compose([], config_file=Path("recipes/by-key.yaml")).asked_for("launcher.name")

"""Each file of nanoscale that advises what to type is listed, with the tests that type its advice back."""

from __future__ import annotations

import ast
from pathlib import Path

import nanoscale

PACKAGE = Path(nanoscale.__file__).parent
TESTS = Path(__file__).parents[1]
_POSITION = {
    "Violation": 4,
    "violation": 2,
    "refuse": 2,
    "refuse_idle": 2,
    "refuse_value": 3,
    "refused": 3,
    "Rule": 4,
    "Verdict": 4,
    "agent_failure": 2,
}
"""constructors of errors and verdicts: how many arguments stand before the advice"""

TYPED_BACK = {
    "checkpoint/configuration.py": "checkpoint/test_configuration.py",
    "checkpoint/hf/adapters.py": "cli/test_advice_on_adapters.py",
    "checkpoint/store.py": "cli/test_advice_on_files.py",
    "common/errors.py": "cli/test_replay.py",
    "config/values/excluded_hosts.py": "launch/test_filters.py",
    "config/values/provenance.py": "launch/test_hosts.py",
    "common/object_storage.py": "cli/test_object_storage.py",
    "cli/common/rehearsal.py": "rehearse/test_command.py",
    "cli/common/text_preparation.py": "cli/test_tokens_of_model.py",
    "view/run/run_table.py": "cli/test_ls.py",
    "launch/batch/jobs.py": "cli/test_remove.py",
    "cli/inspect/config.py": "cli/test_advice.py",
    "cli/inspect/help.py": "cli/test_help.py",
    "cli/jobs/data.py": "cli/test_advice_on_files.py",
    "cli/common/output.py": "cli/test_advice_on_files.py",
    "cli/jobs/generate.py": "cli/test_advice_on_files.py",
    "cli/main.py": "cli/test_advice.py",
    "cli/inspect/recipes.py": "cli/test_advice.py",
    "launch/lifecycle/continuation.py": "cli/test_advice_on_files.py",
    "cli/inspect/run_changes.py": "cli/test_remove.py",
    "cli/inspect/run_output.py": "cli/test_runs.py",
    "launch/lifecycle/stopping.py": "launch/test_slurm_advice.py",
    "cli/jobs/sweep.py": "sweep/test_sweep.py",
    "cli/jobs/submit.py": "cli/test_advice_on_files.py",
    "launch/submission/batch_job.py": "cli/test_advice_on_files.py",
    "config/composing/compose.py": "config/test_run_as_model.py",
    "config/composing/interpolation.py": "cli/test_advice.py",
    "config/composing/library.py": "cli/test_advice.py",
    "config/composing/overrides.py": "cli/test_advice.py",
    "config/composing/variants.py": "cli/test_advice_on_files.py",
    "config/values/other_trainers.py": "config/test_from_file.py",
    "config/translation/from_file.py": "config/test_from_deepspeed.py",
    "config/hf/any_model.py": "config/test_any_model_advice.py",
    "config/hf/pretrained.py": "cli/test_advice.py",
    "plan/budget.py": "cli/test_budget.py",
    "config/translation/miniature.py": "cli/test_conform.py",
    "config/rules/backends.py": "cli/test_advice_on_files.py",
    "config/rules/data.py": "config/test_mixture.py",
    "config/rules/devices.py": "config/test_launcher_rules.py",
    "config/rules/launcher.py": "config/test_launcher_rules.py",
    "config/rules/layout.py": "config/test_rules.py",
    "config/rules/model.py": "config/test_rules.py",
    "config/rules/numbers.py": "config/test_rules.py",
    "config/rules/own_code.py": "cli/test_own_code.py",
    "config/rules/only_with.py": "config/test_rules.py",
    "config/rules/pipeline.py": "config/test_rules.py",
    "config/rules/resolution.py": "config/test_launcher_rules.py",
    "config/rules/rule.py": "config/test_rules.py",
    "config/rules/training.py": "config/test_rules.py",
    "config/values/convert.py": "cli/test_advice.py",
    "config/values/forms.py": "cli/test_advice_on_files.py",
    "data/corpus.py": "data/test_data_advice.py",
    "data/dataset.py": "train/test_evaluation.py",
    "data/loader.py": "data/test_data_advice.py",
    "data/prepare/records.py": "data/test_prepare_bad.py",
    "data/prepare/folder.py": "data/test_prepare_bad.py",
    "data/prepare/preparation.py": "cli/test_advice_on_files.py",
    "data/prepare/sources.py": "data/test_prepare_bad.py",
    "data/tokens/tokenizer.py": "cli/test_advice_on_files.py",
    "generate/harness.py": "generate/test_harness.py",
    "generate/weights.py": "cli/test_advice_on_files.py",
    "launch/fleet/connections.py": "launch/test_reach.py",
    "launch/fleet/fleet.py": "launch/test_reach.py",
    "launch/hosts/hosts.py": "cli/test_advice_on_runs.py",
    "launch/lifecycle/attempt.py": "runs/test_failure_advice.py",
    "launch/lifecycle/examination.py": "launch/test_bandwidth.py",
    "launch/lifecycle/prepare.py": "cli/test_advice_on_files.py",
    "launch/lifecycle/repetition.py": "cli/test_replay.py",
    "launch/preflight/by_library.py": "cli/test_advice_on_files.py",
    "launch/preflight/verdicts.py": "launch/test_preflight_advice.py",
    "launch/preflight/preflight.py": "launch/test_preflight_advice.py",
    "launch/batch/allocation.py": "launch/test_slurm_advice.py",
    "launch/batch/slurm.py": "cli/test_advice_on_files.py",
    "launch/hosts/outer_processes.py": "launch/test_outer_processes.py",
    "launch/submission/orchestrators.py": "launch/test_orchestrators.py",
    "plan/saving.py": "cli/test_advice_on_plans.py",
    "rehearse/rehearsals.py": "rehearse/test_command.py",
    "runs/directory.py": "cli/test_advice_on_files.py",
    "runs/failure.py": "runs/test_failure_advice.py",
    "runs/lock.py": "cli/test_advice_on_runs.py",
    "sweep/disk.py": "sweep/test_disk.py",
    "sweep/samplers.py": "sweep/test_sweep.py",
    "sweep/space.py": "sweep/test_sweep.py",
    "sweep/sweep.py": "sweep/test_sweep.py",
    "view/plan/verdict.py": "cli/test_plan.py",
}
"""file → the tests that type back what it advises, at least in part"""


def advises(node: ast.AST) -> bool:
    """Return True if a call makes an error or a verdict that says what to type or to do."""
    if not isinstance(node, ast.Call):
        return False
    name = ast.unparse(node.func).rpartition(".")[2]
    named = {word.arg for word in node.keywords} & {"suggestions", "remedy"}
    return name in _POSITION and (len(node.args) > _POSITION[name] or bool(named))


def test_every_file_that_advises_is_listed() -> None:
    paths = {
        str(path.relative_to(PACKAGE)): ast.parse(path.read_text("utf-8"))
        for path in PACKAGE.rglob("*.py")
    }
    advising = {path for path, tree in paths.items() if any(map(advises, ast.walk(tree)))}
    assert advising <= TYPED_BACK.keys() <= set(paths)
    assert all((TESTS / test).is_file() for test in TYPED_BACK.values())

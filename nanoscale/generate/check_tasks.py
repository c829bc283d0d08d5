"""A check of lm-eval's tasks for a training, in a separate process: the launcher never imports torch itself.

`python -m nanoscale.generate.check_tasks < question.json` prints what is wrong, or the metrics of the tasks.
"""

import json
import sys
from contextlib import redirect_stdout
from difflib import get_close_matches
from typing import Any


def check(names: list[str], folder: str | None) -> dict[str, Any]:
    """Return the first problem, if any, with the tasks to use instead; otherwise the metrics by full name."""
    from lm_eval.tasks import TaskManager

    manager = TaskManager(include_path=folder)
    for name in names:
        if not manager.match_tasks([name]):
            near = get_close_matches(name, manager.all_tasks, n=1)
            instead = [other for it in names for other in (near if it == name else [it])]
            return {"problem": f"lm_eval has no task {name}", "instead": instead}
    loaded = manager.load(manager.match_tasks(names))
    writing = [name for name, it in loaded["tasks"].items() if it.OUTPUT_TYPE == "generate_until"]
    if writing:
        problem = f"{', '.join(writing)} generates text, which `nanoscale eval --tasks` does after the training"
        return {"problem": problem, "instead": [name for name in names if name not in writing]}
    metrics = {name: [*task.higher_is_better()] for name, task in loaded["tasks"].items()}
    every = sorted({metric for each in metrics.values() for metric in each})
    metrics |= dict.fromkeys(loaded["groups"], every)
    found = [f"eval_tasks/{name}/{metric}" for name, each in metrics.items() for metric in each]
    return {"problem": None, "metrics": found}


def main() -> None:
    question = json.load(sys.stdin)
    with redirect_stdout(sys.stderr):  # the library prints lines of its own
        answer = check(question["tasks"], question["folder"])
    json.dump(answer, sys.stdout)


if __name__ == "__main__":
    main()

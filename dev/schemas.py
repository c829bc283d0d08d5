"""Write JSON schemas of the documents that commands print with `--json`, from documents: `make schemas`.

The first document of each name has its keys, and the types of its values except null.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import shutil
import tempfile
from pathlib import Path
from typing import Any

from genson import SchemaBuilder

from nanoscale.cli.main import run

FOLDER = Path(__file__).parent.parent / "docs" / "schemas"
_JOB = ("recipe=debug", "model.layers=2", "train.steps=6", "train.eval_every=3", "parallel.dp=1")
COMMANDS = {
    "error": ("train", *_JOB, "train.stepz=3", "--dry-run"),
    "train-dry-run": ("train", *_JOB, "--dry-run"),
    "train": ("train", *_JOB, "run.name=first", "checkpoint.every=3", "checkpoint.keep_last=null"),
    "resume": ("resume", "first", "train.steps=7"),
    "replay": ("replay", "first", "--steps", "5"),
    "plan": ("plan", "recipe=llama-8b", "cluster=h100-sxm", "launcher.devices=8"),
    "rehearse": ("rehearse", "recipe=debug", "parallel.dp=2", "launcher.devices=2"),
    "conform": ("conform", "recipe=debug", "parallel.dp=2"),
    "conform-card": ("conform", "--card", "qwen3"),
    "eval": ("eval", "first", "--samples", "8"),
    "generate": ("generate", "first", "--prompt", "def", "--max-tokens", "4", "--seed", "1"),
    "runs-ls": ("runs", "ls"),
    "top": ("top",),
    "runs-show": ("runs", "show", "first"),
    "runs-report": ("runs", "report", "first"),
    "runs-compare": ("runs", "compare", "first", "first-replay"),
    "runs-tag": ("runs", "tag", "first", "tag"),
    "checkpoints-ls": ("checkpoints", "ls", "first"),
    "checkpoints-inspect": ("checkpoints", "inspect", "first"),
    "checkpoints-verify": ("checkpoints", "verify", "first"),
    "checkpoints-export": ("checkpoints", "export", "first", "--format", "hf"),
    "checkpoints-prune": ("checkpoints", "prune", "first", "--keep-last", "1", "--yes"),
    "config-show": ("config", "show", "recipe=debug"),
    "config-ls": ("config", "ls", "train"),
    "config-explain": ("config", "explain", "train.steps"),
    "config-backends": ("config", "backends"),
    "config-from": ("config", "from", "ds.json"),
    "config-from-deepspeed": ("config", "from-deepspeed", "ds.json"),
    "recipes-ls": ("recipes", "ls"),
    "recipes-show": ("recipes", "show", "tiny"),
    "data-prepare": ("data", "prepare", "a.txt", "--out", "corpus", "--tokenizer", "byte"),
    "data-inspect": ("data", "inspect", "corpus"),
    "doctor": ("doctor", "--quick"),
    "bench": ("bench", *_JOB, "--steps", "2", "--warmup", "1"),
    "submit": ("submit", *_JOB, "--num-nodes", "1", "--num-gpus", "1", "--dry-run"),
    "sweep": ("sweep", *_JOB, "train.seed=1,2", "--dry-run"),
    "runs-rm": ("runs", "rm", "first-replay", "--yes"),
}
"""The commands by the names of their documents; a later one may need what an earlier one made."""
OTHERS = {
    "plan": (
        ("plan", "recipe=debug", "cluster=h100-sxm"),
        ("plan", "recipe=debug", "cluster=h100-sxm", "parallel.tp=1,3"),
        ("plan", "recipe=debug", "--search"),
        ("plan", "recipe=debug", "--inference"),
        ("plan", "--calibrate", "first"),
    ),
    "resume": (("resume", "first", "train.steps=8", "--dry-run"),),
    "generate": (("generate", "first", "--prompts", "a.jsonl", "--max-tokens", "2"),),
    "config-show": (
        ("config", "show", "--deepspeed", "recipe=debug", "backend=deepspeed"),
        ("config", "show", "recipe=tiny"),
    ),
    "config-explain": (("config", "explain", "model"),),
    "config-ls": (("config", "ls"),),
    "checkpoints-inspect": (("checkpoints", "inspect", "first", "--step", "6"),),
    "submit": (
        ("submit", *_JOB, "train.seed=1,2", "--num-nodes", "1", "--num-gpus", "1", "--dry-run"),
    ),
}
"""Further commands whose documents have the same name, and other keys: of each document all keys are known, and
the keys of all are required."""


def documents() -> dict[str, list[Any]]:
    """Run all commands in a new folder, and return what they print, by name."""
    here, found = Path.cwd(), dict[str, list[Any]]()
    folder = Path(tempfile.mkdtemp(prefix="nanoscale-schemas-"))
    os.chdir(folder)
    Path("a.txt").write_text("one line\n" * 4000)
    Path("a.jsonl").write_text('{"prompt": "def"}\n')
    Path("ds.json").write_text('{"train_batch_size": 8, "gradient_clipping": 1.0}')
    try:
        for name, first in COMMANDS.items():
            found[name] = [_printed(words) for words in (first, *OTHERS.get(name, ()))]
    finally:
        os.chdir(here)
        shutil.rmtree(folder)
    return found


def _printed(words: tuple[str, ...]) -> Any:
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        run([*words, "--json"])
    return json.loads(printed.getvalue())


def schema(found: list[Any]) -> dict[str, Any]:
    """Return the schema of documents."""
    builder = SchemaBuilder()
    for document in found:
        builder.add_object(document)
    whole = builder.to_schema()
    derived = {"$schema": whole["$schema"], **_widened(whole)}
    # What is nested depends on the job.
    return derived | ({"required": whole["required"]} if "required" in whole else {})


def _widened(value: dict[str, Any]) -> dict[str, Any]:
    """Let all values be null, what is null in a document and the value of an error have any type, and whole
    numbers be any number."""
    kinds = value.get("type")
    kinds = kinds if isinstance(kinds, list) else [kinds]
    if "anyOf" in value:
        return {"anyOf": [_widened(each) for each in value["anyOf"]]}
    if "null" in kinds or None in kinds:
        return {}
    wide: dict[str, Any] = {
        "type": sorted({"number" if it == "integer" else str(it) for it in kinds} | {"null"})
    }
    names = value.get("properties", {})
    if not all(re.fullmatch("[A-Za-z][A-Za-z0-9_]*", str(name)) for name in names):
        return wide  # its keys are names of a run, such as names of tensors
    if names:
        any_type = {"value"} if "message" in names else set()
        wide["properties"] = {
            name: {} if name in any_type else _widened(each) for name, each in names.items()
        }
    return wide | ({"items": _widened(value["items"])} if "items" in value else {})


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for name, found in documents().items():
        text = json.dumps(schema(found), indent=1, sort_keys=True) + "\n"
        text = re.sub(r'\[\s+"(\w+)",\s+"(\w+)"\s+\]', r'["\1", "\2"]', text)
        (FOLDER / f"{name}.json").write_text(text, encoding="utf-8")

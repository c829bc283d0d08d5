"""The examples under the help text of each command."""

EXAMPLES = {
    "train": (
        "nanoscale train recipe=tiny run.name=first",
        "nanoscale train recipe=llama-8b zero=stage3 --dry-run",
        "nanoscale train recipe=llama-8b --hostfile hosts launcher=ssh",
    ),
    "resume": ("nanoscale resume first", "nanoscale resume first train.steps=2400 parallel.dp=2"),
    "submit": (
        "nanoscale submit recipe=llama-8b --num-nodes 4 --num-gpus 8 --dry-run",
        "nanoscale submit recipe=tiny train.seed=1,2,3 --num-gpus 1",
        "nanoscale submit --resume first",
    ),
    "replay": (
        "nanoscale replay first --steps 21-40",
        "nanoscale replay first --steps 31 parallel.dp=1 precision=fp64 --tolerance 1e-3",
    ),
    "sweep": (
        "nanoscale sweep recipe=tiny optimizer.lr=1e-3,3e-4 train.seed=1,2",
        "nanoscale sweep recipe=tiny 'model.layers=range(2,9)' --sampler tpe --trials 5",
    ),
    "plan": (
        "nanoscale plan recipe=llama-8b cluster=h100-sxm launcher.devices=8",
        "nanoscale plan recipe=llama-70b cluster=h100-sxm launcher.nodes=8 --search",
    ),
    "rehearse": ("nanoscale rehearse recipe=debug parallel=4d",),
    "conform": (
        "nanoscale conform recipe=debug parallel.dp=2 parallel.tp=2 zero=stage3",
        "nanoscale conform --card qwen3",
    ),
    "doctor": ("nanoscale doctor", "nanoscale doctor --hostfile hosts --quick"),
    "data prepare": (
        "nanoscale data prepare texts/ --out corpus --train-tokenizer",
        "nanoscale data prepare chats.jsonl --out chats --chat --tokenizer /models/llama",
    ),
    "data inspect": ("nanoscale data inspect corpus recipe=tiny",),
    "generate": (
        "nanoscale generate first --prompt 'def main():' --max-tokens 100",
        "nanoscale generate /models/llama --prompts questions.txt --out answers.jsonl",
    ),
    "eval": ("nanoscale eval first", "nanoscale eval first --tasks hellaswag --limit 100"),
    "bench": ("nanoscale bench recipe=llama-1b --steps 20",),
    "runs ls": (
        "nanoscale runs ls",
        "nanoscale runs ls --columns lr,eval_loss --where state=completed --sort loss",
    ),
    "runs show": ("nanoscale runs show first",),
    "runs logs": ("nanoscale runs logs first --rank 0 --follow",),
    "runs watch": ("nanoscale runs watch first",),
    "runs explain": ("nanoscale runs explain first",),
    "runs stop": ("nanoscale runs stop first",),
    "runs compare": ("nanoscale runs compare first second --html comparison.html",),
    "runs tag": (
        "nanoscale runs tag first baseline paper",
        "nanoscale runs tag first --remove paper",
    ),
    "runs rm": ("nanoscale runs rm first",),
    "top": ("nanoscale top", "nanoscale top --root /shared/runs --web"),
    "runs report": ("nanoscale runs report first --html report.html",),
    "checkpoints ls": ("nanoscale checkpoints ls first",),
    "checkpoints inspect": ("nanoscale checkpoints inspect first --step 1200",),
    "checkpoints verify": ("nanoscale checkpoints verify first",),
    "checkpoints export": ("nanoscale checkpoints export first --format hf --out first-hf",),
    "checkpoints prune": ("nanoscale checkpoints prune first --keep-last 1 --keep-best 2",),
    "config show": ("nanoscale config show recipe=llama-8b parallel.tp=8",),
    "config explain": ("nanoscale config explain zero.stage recipe=llama-8b",),
    "config backends": ("nanoscale config backends",),
    "config from": (
        "nanoscale config from axolotl.yml --out mine.yaml",
        "nanoscale config from train.sh --dp 8",
    ),
    "config from-deepspeed": ("nanoscale config from-deepspeed ds_config.json",),
    "config ls": ("nanoscale config ls", "nanoscale config ls precision"),
    "recipes ls": ("nanoscale recipes ls",),
    "recipes show": ("nanoscale recipes show llama-8b",),
    "recipes copy": ("nanoscale recipes copy llama-8b recipes/mine.yaml",),
    "help": ("nanoscale help overrides", "nanoscale help train"),
}
"""Command → lines that can be typed."""


def epilog(command: str) -> str:
    """Return the examples of a command as the end of its help text; `\\b` keeps their lines."""
    return "\b\nExamples:\n" + "\n".join(f"  {line}" for line in EXAMPLES[command])

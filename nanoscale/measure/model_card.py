"""The rows of a model's card: the job of the ranks of `nanoscale conform --card`.

Ranks of the layouts train one layout after another. Then one process compares each with its own steps, packed
rows with separate documents, and an exported folder with the folder that was read. A row's result is written
when the row is complete, so a rank that fails ends its own row alone.
"""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from nanoscale.backends.native import NativeEngine
from nanoscale.checkpoint import store
from nanoscale.checkpoint.hf.export import export
from nanoscale.checkpoint.hf.load_any_model import judge
from nanoscale.common.errors import UserError
from nanoscale.common.json_text import Json
from nanoscale.config.composing.frozen import load
from nanoscale.config.hf.safetensors_headers import are_equal, read_folder
from nanoscale.config.resolved import ResolvedConfig
from nanoscale.data.batch import Batch
from nanoscale.measure import conformity
from nanoscale.models.attention import DocumentEnds
from nanoscale.models.mixers import recurrence
from nanoscale.parallel import process_group
from nanoscale.runs import fence
from nanoscale.runs.directory import RunDirectory, read_json, write_json
from nanoscale.runs.rank_context import RankContext


def run(context: RankContext) -> str:
    """Compute rows of a card.

    By row, the task holds `files` of configurations, next to which results are written, and `asked` of `judge`.
    """
    recurrence.CHUNK = 4  # each row of tokens has several
    process_group.join(context.world_size, torch.device("cpu"), 120.0, even_alone=True)
    task = read_json(context.run.task)
    works = {"documents": compare_documents, "export": compare_export}
    one = context.world_size == 1
    in_layout = conformity.compare_with_layout if one else conformity.record_layout
    for row, path in task["files"].items():
        file, folder = Path(path), RunDirectory(Path(path).parent)
        answer = judge(task["asked"][row])
        problem, kept = answer["problem"], answer.get("kept_tensors", 0)
        try:
            config, work = load(file), works.get(row, in_layout)
            config = replace(config, model=replace(config.model, kept_tensors=kept))
            result = {"refused": problem} if problem else work(config, folder, context.rank)
        except UserError as error:
            result = {"refused": str(error)}
        process_group.gather(None)
        if context.rank == 0:
            write_json(file.with_suffix(".json"), result)
    if context.rank == 0:
        write_json(context.run.result, {})
    process_group.leave()
    return "completed"


def compare_documents(config: ResolvedConfig, _: RunDirectory, __: int) -> Json:
    """Compare rows of several documents with each document alone, which needs no mask."""
    plain = replace(config, data=replace(config.data, document_mask=False))
    packed = conformity.SmallSamples(config, 0).batch([0, 1, 2])
    separate = _record(plain, list(_documents(packed)))
    return conformity.compare([_record(config, [packed])], [separate], conformity.limits(config))


def _documents(batch: Batch) -> Iterator[Batch]:
    assert batch.documents is not None
    for inputs, targets, documents in zip(
        batch.inputs, batch.targets, batch.documents, strict=True
    ):
        for number in np.unique(documents):
            one = documents == number
            yield Batch(inputs[None, one], targets[None, one])


def _record(config: ResolvedConfig, batches: list[Batch]) -> conformity.StepRecord:
    """Return the loss and gradients of batches."""
    engine, loss = NativeEngine(config, torch.device("cpu")), 0.0
    (model,) = engine.stages.values()
    for batch in batches:
        ends = batch.ends()
        documents = None if ends is None else DocumentEnds.of(ends)
        value = model(torch.from_numpy(batch.inputs), documents, torch.from_numpy(batch.targets))
        value.backward()
        loss += value.item()
    grads = ((name, it.grad) for name, it in engine.parameters())
    gradients = {name: conformity.whole(it) for name, it in grads if it is not None}
    norm = torch.stack([it.norm() for it in gradients.values()]).norm().item()
    return conformity.StepRecord(loss, norm, gradients)


def compare_export(config: ResolvedConfig, folder: RunDirectory, rank: int) -> Json:
    """Read the folder `model.init_from`, export it unchanged, and compare tensors and logits."""
    fence.begin(folder, 1)
    recorder = conformity.RecordedTraining(config, folder, rank, restores=True)
    recorder.training.checkpoints.save(waits=True, by_time=False)
    (stored,) = store.list_checkpoints(folder.checkpoints)
    out = folder.path / "exported"
    export(stored, config, out, "fp32", 1 << 40, lambda *_: None)
    before, after = read_folder(Path(str(config.model.init_from))), read_folder(out)
    findings = [
        f"{name} is not the same in the exported folder"
        for name in sorted(before.keys() | after.keys())
        if name not in before or name not in after or not are_equal(before[name], after[name])
    ]
    model = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float64).eval()
    model.set_experts_implementation("eager")  # the others have no fp64
    tokens = list(range(3, 3 + config.train.seq_len))
    with torch.no_grad():
        theirs = model(torch.tensor([tokens]), use_cache=False).logits[0, -1].double()
    difference = (recorder.engine.next_token_logits(tokens).double() - theirs).norm()
    relative = (difference / theirs.norm()).item()
    if not relative <= conformity.limits(config)["loss"]:
        findings.append(f"the logits of the exported folder differ by {relative:.1e} of their size")
    return {"largest": relative, "first_difference": None, "findings": findings}

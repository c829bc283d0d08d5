"""The memory of `generate` and `eval --tasks`, for people and as a document."""

from functools import partial

from nanoscale.common.json_text import Json
from nanoscale.common.units import GIB, byte_size
from nanoscale.config.model_math import parameters
from nanoscale.config.schema import Model
from nanoscale.plan.hardware.hardware import Hardware
from nanoscale.plan.inference import InferenceMemory
from nanoscale.plan.memory.peak import HOLES
from nanoscale.view.blocks import Lines, Report, Table
from nanoscale.view.job_text import size


def inference_document(model: Model, hardware: Hardware, *, on_gpu: bool) -> Json:
    """Return the document of `plan --inference --json`, in the default dtype of both commands."""
    memory, capacity = InferenceMemory(model, 2 if on_gpu else 4), hardware.memory_gib
    if on_gpu:  # the allocator leaves holes
        capacity = (capacity - hardware.context_gib) / (1 + HOLES)
    context = model.max_seq_len
    most = partial(memory.most, capacity=int(capacity * GIB))
    return {
        "fits": most("generate") > 0,
        "model": model.name,
        "parameters": parameters(model),
        "dtype": "bf16" if on_gpu else "fp32",
        "device": hardware.device,
        "capacity_gib": capacity,
        "weights_gib": memory.weights / GIB,
        "cache_bytes_per_token": memory.token,
        "context": context,
        **{
            name: {
                "largest_batch": most(name, length=context),
                "longest_sequence": min(context, most(name)),
            }
            for name in ("generate", "eval")
        },
    }


def inference_report(of: Json) -> Report:
    """Return what `plan --inference` shows, from its document."""
    weights, capacity = (byte_size(of[key] * GIB) for key in ("weights_gib", "capacity_gib"))
    rows = [
        (name, *(f"{number:,}" for number in of[name.split()[0]].values()))
        for name in ("generate", "eval --tasks")
    ]
    header = ("the most that fits", f"texts of {of['context']:,} tokens", "tokens of one text")
    lines = [
        f"weights {weights} of {capacity} for tensors, keys and values "
        f"{byte_size(of['cache_bytes_per_token'])} a token",
        *([] if of["fits"] else ["does not fit"]),
    ]
    model = f"{of['model']}, {size(of['parameters'])} parameters, {of['dtype']}"
    return Report(f"{model}, on one {of['device']}", [Lines(lines), Table(header, rows)])

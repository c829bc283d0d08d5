"""The description of a job: three lines that begin every report, and its settings by topic."""

import json
from contextlib import suppress
from pathlib import Path

from nanoscale.common.json_text import Json
from nanoscale.common.units import counted, three_digits
from nanoscale.config.hardware.data_sheets import kind, wide_kind
from nanoscale.config.layout import stage_layers
from nanoscale.config.model_math import describe_adapters, parameters
from nanoscale.config.resolved import ResolvedConfig
from nanoscale.config.rules.layout import row_step
from nanoscale.config.schema import Hooks, Parallel, Precision, Zero
from nanoscale.config.token_files import row_tokens, times_seen
from nanoscale.config.values.hooks import PARAMETERS, HookError, read

MANY = 10
"""The epochs after which fine-tuning is warned of."""
LONG = 1000
"""The times after which a training on the embedded corpus is longer than a trial."""


def what(config: ResolvedConfig) -> Json:
    """Describe the job in a few values."""
    data = {"data": config.data.source, "epochs": times_seen(config)}
    return {**shape(config), **data, "optimizer": config.optimizer.name}


def shape(config: ResolvedConfig) -> Json:
    """Return the values of `job_lines`, without a look at the data."""
    layout = config.parallel
    return {
        "model": config.model.name,
        "parameters": parameters(config.model),
        "precision": kind(config.precision),
        "backend": config.backend.name,
        "device": config.launcher.device,
        "world_size": config.world_size,
        "layout": {
            name: getattr(layout, name)
            for name in ("dp", "dp_replicate", "tp", "pp", "cp", "ep", "ep_over_tp")
        },
        "schedule": layout.schedule if layout.pp > 1 else None,
        "zero_stage": config.zero.stage,
        "recompute": layout.activation_checkpointing,
        "global_batch": config.train.global_batch,
        "micro_batch": config.train.micro_batch,
        "accumulation": config.accumulation,
        "seq_len": config.train.seq_len,
        "tokens_per_step": config.tokens_per_step,
    }


def job_lines(job: Json, on: str, details: str = "") -> list[str]:
    """Return the model and its devices, the layout, and the batch.

    Args:
        job: the values of `what`; unknown ones may be missing.
        on: the devices.
        details: what else is known of the training.
    """
    return [
        f"{model_text(job)}{details}, {on}",
        layout_line(job),
        f"global batch {job['global_batch']} = micro batch {job['micro_batch']} · dp {job['layout']['dp']} · "
        f"accumulation {job['accumulation']}, {job['seq_len']:,} tokens each",
    ]


def model_text(job: Json) -> str:
    """Return the model, its size, the dtype and the backend."""
    active = f", {size(job['active'])} active" if "active" in job else ""
    sizes = f"{size(job['parameters'])} parameters{active}"
    return f"{job['model']}, {sizes}, {job['precision']}, {job['backend']}"


def layout_line(job: Json) -> str:
    """Return the degrees, the schedule, the ZeRO stage and the recomputation."""
    layout = job["layout"]
    degrees = [f"{name} {layout[name]}" for name in ("dp", "tp", "pp", "cp")]
    if layout["ep"] > 1:
        degrees.append(f"ep {layout['ep']}" + (" over tp" if layout.get("ep_over_tp") else ""))
    if layout["dp_replicate"] > 1:
        degrees.insert(1, f"in {layout['dp_replicate']} replicas")
    if job.get("schedule"):
        degrees.append(job["schedule"])
    degrees.append(f"ZeRO {job['zero_stage']}")
    if job.get("recompute", "none") != "none":
        degrees.append(f"recompute {job['recompute']}")
    return " · ".join(degrees)


def layout_of(config: ResolvedConfig) -> str:
    """Return `layout_line` with the options of the recomputation, and the micro batch."""
    job = shape(config) | {"recompute": recomputation(config.parallel)}
    return f"{layout_line(job)} · micro batch {config.train.micro_batch}"


def expert_degree(layout: Parallel) -> str:
    """Return ep, and whether its ranks are ranks of tp too."""
    return f"{layout.ep} over tp" if layout.ep_over_tp else str(layout.ep)


def recomputation(layout: Parallel) -> str:
    """Return the mode of recomputation, with its options if they are not the usual ones."""
    mode, keep, options = layout.activation_checkpointing, layout.selective_keep, list[str]()
    if mode == "selective" and keep != Parallel().selective_keep:
        options.append(keep)
    if layout.checkpoint_every > 1:
        options.append(f"1 block in {layout.checkpoint_every}")
    return f"{mode} ({', '.join(options)})" if options else mode


def size(count: float) -> str:
    for unit, name in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if count >= unit:
            return f"{count / unit:.4g} {name}"
    return f"{count:.0f}"


# --- settings -------------------------------------------------------------------------------------


def derived_values(config: ResolvedConfig) -> dict[str, int]:
    """Return the numbers that follow from the configuration."""
    job = shape(config)
    names = ("global_batch", "micro_batch", "accumulation", "tokens_per_step", "parameters")
    shared = {name: job[name] for name in names}
    return {"dp": config.parallel.dp, "steps": config.train.steps} | shared


def settings(config: ResolvedConfig) -> dict[str, str]:
    """Describe the most important settings in words, by topic."""
    layout, launcher = config.parallel, config.launcher
    threads = "the cores of each host divided among its ranks"
    if launcher.threads != "auto":
        threads = f"{counted(launcher.threads, 'thread')} a rank"
    words = {
        "backend": config.backend.name,
        "device": "cuda" if launcher.device == "cuda" else f"cpu, {threads}",
        "data": _data(config),
        "precision": describe_precision(config.precision),
        "zero": _zero(config),
        "compile": config.backend.compile,
    }
    if (tokens := row_tokens(config)) is not None:
        words["padding"] = _padding(config, tokens)
    if config.hooks.path is not None:
        words["hooks"] = _hooks(config.hooks)
    if config.backend.extra:
        words["DeepSpeed's own"] = json.dumps(config.backend.extra)
    if layout.pp > 1:
        stages = layout.pp * layout.virtual_stages
        blocks = stage_layers(config.model, stages, layout.layers_per_stage)
        *others, last = blocks if len(set(blocks)) > 1 else blocks[:1]
        counts = "".join(f"{each}, " for each in others) + counted(last, "block")
        words["pipeline"] = f"{layout.schedule}, {stages} stages of {counts}"
    if layout.dp_replicate > 1:
        shards = layout.dp // layout.dp_replicate * layout.cp
        words["copies"] = f"{layout.dp_replicate}, each sharded over {counted(shards, 'rank')}"
    if layout.cp > 1:
        words["context"] = layout.cp_method
    if config.run.from_run is not None:
        moments = " and moments" if config.run.from_optimizer else ""
        step = config.run.from_step
        words["begins with"] = f"weights{moments} of {config.run.from_run}, step {step}"
    if config.model.experts:
        where = f", shared out over {layout.ep} ranks" if layout.ep > 1 else ""
        where += ", of tp too" if layout.ep_over_tp else ""
        chosen = config.model.experts_per_token
        words["experts"] = f"{config.model.experts}, {chosen} a token{where}"
    if config.lora.rank:
        words["trained"] = describe_adapters(config)
    if layout.activation_checkpointing != "none":
        words["recomputed"] = recomputation(layout)
    return words


def _data(config: ResolvedConfig) -> str:
    data = config.data
    where = ", ".join(data.mixture) if data.mixture else data.path
    source = data.source if where is None else f"{data.source} {where}"
    seen = [seen_text(times)] if (times := times_seen(config)) is not None else []
    tokens = [] if data.source in ("random", "hooks") else [f"tokens by {data.tokenizer}"]
    return ", ".join([source, *tokens, *seen])


def _padding(config: ResolvedConfig, tokens: float) -> str:
    seq_len = config.train.seq_len
    share = f"{100 * (1 - tokens / seq_len):.0f}% of rows of {seq_len:,} tokens"
    if row_step(config) is None:
        return f"{share}, which are computed too: a shorter train.seq_len is faster"
    return f"{share}; rows are cut to the longest one of a micro batch"


def _hooks(hooks: Hooks) -> str:
    names = ""
    with suppress(HookError):
        names = ", ".join(it for it in PARAMETERS if it in read(Path(str(hooks.path))).names)
    return f"{names} of {hooks.path}, sha256 {str(hooks.sha256)[:12]}"


def seen_text(times: float) -> str:
    """Return how often the data is seen, in words."""
    if times < 1:
        return f"{three_digits(100 * times)}% of an epoch"
    text = f"{times:,.0f}" if times >= 100 else f"{times:.3g}"
    return f"{text} epoch{'' if text == '1' else 's'}"


def data_warning(config: ResolvedConfig) -> list[str]:
    """Return a warning, as lines, if a training sees its data too often."""
    times = times_seen(config) or 0.0
    is_tuned = config.model.init_from is not None or config.run.from_run is not None
    if is_tuned and times > MANY:
        return [
            f"warning: {seen_text(times)} are many for fine-tuning: a model learns samples by heart if it "
            f"sees them more than {MANY} times. train.epochs=3 is usual"
        ]
    if config.data.source != "stdlib" or times < LONG:
        return []
    return [
        "warning: data=stdlib is for trials: Python's own source code, 10 MB of text, which this training "
        f"would see about {times:,.0f} times. Prepare your own text with `nanoscale data prepare`"
    ]


def describe_precision(precision: Precision) -> str:
    """Describe the dtypes in words."""
    words = [
        f"weights {precision.params}",
        f"products {wide_kind(precision)}",
        f"gradient sums {precision.reduce}",
    ]
    if precision.fp8:
        words.append(f"products of the blocks fp8, scaled {precision.fp8_recipe}")
    if precision.compute == "fp16":
        words.append(f"loss scale {precision.loss_scale:g} at first")
    return ", ".join(words)


def _zero(config: ResolvedConfig) -> str:
    """Describe the backend's meaning of the ZeRO stage."""
    stage = config.zero.stage
    kept = ("nothing is", "optimizer states are", "gradients too are", "parameters too are")[stage]
    if config.backend.name == "deepspeed":
        return f"stage {stage}: {kept} sharded (DeepSpeed){_offloaded(config.zero)}"
    detail = ("", "", ", not resharded after forward", ", resharded after forward")[stage]
    if stage > 1 and config.parallel.pp > 1:
        detail = "; in a pipeline, gathered and reduced once a step"
    how = f" (FSDP2{detail})" if stage else ""
    return f"stage {stage}: {kept} sharded{how}{_offloaded(config.zero)}"


def _offloaded(zero: Zero) -> str:
    waiting = {"optimizer states": zero.offload_optimizer, "parameters": zero.offload_param}
    places = {"cpu": "host memory", "nvme": str(zero.nvme_path)}
    return "".join(
        f", {what} wait in {places[where]}" for what, where in waiting.items() if where != "none"
    )

"""Rules of the model: its shape, experts, adapters, and models with transformers' code."""

from collections.abc import Callable
from dataclasses import replace

from nanoscale.common.units import listed
from nanoscale.config.hf import peft
from nanoscale.config.hf.families import families
from nanoscale.config.hf.pretrained import absolute_name
from nanoscale.config.model_math import FEED_FORWARD, adaptable_layers
from nanoscale.config.objectives import made_for
from nanoscale.config.parameters import block
from nanoscale.config.rules.resolution import Resolution
from nanoscale.config.rules.rule import Rule, of_kind, other_than, refused, several
from nanoscale.config.schema import Config, Model
from nanoscale.config.values.provenance import Composed
from nanoscale.config.violations import nearest, override, shown

_SIZES = ("model.source", "model.heads")


def _is_own(config: Config) -> bool:
    return config.model.source == "own"


def _turns_pairs(config: Config) -> bool:
    """True if rotary positions find an even width, or if the heads do not divide the width anyway."""
    model = config.model
    is_odd = model.position == "rope" and model.head_width % 2 == 1
    return not is_odd or not _is_own(config) or not _divide_width(config)


def _divide_width(config: Config) -> bool:
    model = config.model
    return model.head_dim is not None or model.hidden % model.heads == 0 or not _is_own(config)


def _rotates_pairs(config: Config) -> bool:
    """True if the rotated share of a head is an even width, or if another rule refuses the heads."""
    model = config.model
    others = not _is_own(config) or not _divide_width(config) or not _turns_pairs(config)
    is_even = model.rotated_width > 0 and model.rotated_width % 2 == 0
    return model.position != "rope" or others or is_even


_LATENT = {"model.kv_rank": other_than(None)}


def _latent_widths(config: Config) -> bool:
    model = config.model
    plain = model.head_width - model.rope_head_dim
    return not model.kv_rank or (plain > 0 and 1 <= model.value_width <= model.head_width)


def _narrower(config: Config) -> list[str]:
    width = config.model.head_width
    if config.model.value_width > width:
        return ["model.v_head_dim=null"]
    return [f"model.rope_head_dim={width // 4 * 2}"] if width >= 4 else []


SHAPE = of_kind("config",
    Rule("model.head_dim",
        (*_SIZES, "model.kv_rank",
            *(f"model.{name}" for name in ("head_dim", "hidden", "rope_head_dim", "v_head_dim"))),
        _latent_widths,
        "makes heads {c.model.head_width} wide, which must be more than model.rope_head_dim="
        "{c.model.rope_head_dim} and no less than the width of the values", _narrower),
    refused("lora.rank", {**_LATENT, "lora.rank": bool},
        "adapts the layers of queries, keys and values, and model.kv_rank has others", "lora.rank=0"),
    *(refused(f"model.{name}", {**_LATENT, f"model.{name}": value}, "does not go with model.kv_rank", advice)
        for name, value, advice in (
            ("bias", True, "model.bias=false"), ("qkv_bias", True, "model.qkv_bias=false"),
            ("qk_norm", True, "model.qk_norm=false"), ("attention_sinks", True, "model.attention_sinks=false"),
            ("rope_fraction", other_than(1), "model.rope_fraction=1"),
            ("position", other_than("rope"), "model.position=rope"))),
    Rule("model.kv_heads", (*_SIZES, "model.kv_heads", "model.kv_rank"),
        lambda config: not config.model.kv_rank or config.model.kv_head_count == config.model.heads,
        "must be null with model.kv_rank, which gives every head keys of its own", ("model.kv_heads=null",)),
    Rule("model.kv_heads", (*_SIZES, "model.kv_heads"),
        lambda config: not _is_own(config) or config.model.heads % config.model.kv_head_count == 0,
        "must divide model.heads={c.model.heads}", ("model.kv_heads",)),
    Rule("model.heads", (*_SIZES, "model.head_dim", "model.hidden"), _divide_width,
        "must divide model.hidden={c.model.hidden} unless model.head_dim is set", ("model.heads",)),
    Rule("model.head_dim", (*_SIZES, "model.head_dim", "model.hidden", "model.position"), _turns_pairs,
        "makes heads {c.model.head_width} wide, and rotary positions turn pairs: an even width is needed",
        lambda config: (
            f"model.head_dim={even}" for n in (1, -1) if (even := config.model.head_width + n)
        )),
    Rule("train.seq_len", ("train.seq_len", "model.max_seq_len", "model.source"),
        lambda config: config.train.seq_len <= config.model.max_seq_len,
        "is longer than the model allows (model.max_seq_len={c.model.max_seq_len})",
        ("train.seq_len={c.model.max_seq_len}",
            lambda config: [f"model.max_seq_len={config.train.seq_len}"] if _is_own(config) else [])),
    refused("model.position",
        {"model.rope_scaling": other_than(None), "model.position": other_than("rope")},
        "has no rotary frequencies for model.rope_scaling to stretch", "model.rope_scaling=null"),
    Rule("model.rope_fraction", (*_SIZES, "model.head_dim", "model.rope_fraction", "model.position"),
        _rotates_pairs,
        "rotates {c.model.rotated_width} numbers of a head, and rotary positions turn pairs",
        ("model.rope_fraction=1.0", "model.rope_fraction=0.5")),
    refused("model.norm", {"model.qk_norm_whole": True, "model.norm": other_than("rmsnorm")},
        "differs from the RMSNorm of model.qk_norm_whole", "model.norm=rmsnorm"),
    refused("backend.attention",
        {"model.attention_softcap": other_than(None), "backend.attention": other_than("auto", "math")},
        "has no kernel with model.attention_softcap={c.model.attention_softcap}, which is computed by single "
        "operations", "backend.attention=auto"),
)  # fmt: skip


def resolve_model(resolution: Resolution) -> Model:
    """Return the model with its heads resolved; transformers resolves the heads of its own models."""
    resolution.apply(SHAPE)
    model = resolution.config.model
    _check_scaling(resolution, model)
    if model.init_from is not None:
        model = replace(model, init_from=absolute_name(model.init_from))
    if model.source == "hf":
        return replace(model, name=absolute_name(model.name))
    return replace(model, kv_heads=model.kv_head_count, head_dim=max(1, model.head_width))


def _check_scaling(resolution: Resolution, model: Model) -> None:
    scaling, section = model.rope_scaling, "model.rope_scaling"
    if scaling is None:
        return
    if scaling.kind == "llama3" and scaling.high_freq_factor <= scaling.low_freq_factor:
        message = f"must be above low_freq_factor={scaling.low_freq_factor:g}"
        better = f"{section}.high_freq_factor={scaling.low_freq_factor * 4:g}"
        resolution.refuse(f"{section}.high_freq_factor", message, better)
    pairs = model.rotated_width // 2
    for name in ("short_factor", "long_factor"):
        factors = getattr(scaling, name)
        if scaling.kind == "longrope" and (len(factors) != pairs or min(factors, default=0) <= 0):
            key = f"{section}.{name}"
            what = "one for each pair of a head that is rotated"
            message = f"must be {pairs} numbers above 0, {what}"
            resolution.refuse(key, message, override(key, [1.0] * pairs))


# --- experts --------------------------------------------------------------------------------------

_ROUTED = {"model.experts": bool}


def _groups_hold(config: Config) -> bool:
    model = config.model
    if model.expert_groups == 1:
        return True
    size, left = divmod(model.experts, model.expert_groups)
    chosen = model.expert_groups_per_token
    has_room = model.experts_per_token <= chosen * size and chosen <= model.expert_groups
    return not left and size > 1 and has_room


EXPERTS = of_kind("config",
    Rule("model.expert_groups",
        tuple(f"model.{name}" for name in
              ("expert_groups", "expert_groups_per_token", "experts", "experts_per_token")),
        _groups_hold,
        "must divide model.experts={c.model.experts} into groups of two or more, and "
        "model.expert_groups_per_token={c.model.expert_groups_per_token} of them must hold "
        "model.experts_per_token={c.model.experts_per_token}", ("model.expert_groups=1",)),
    Rule("model.dense_layers", ("model.dense_layers", "model.layers"),
        lambda config: config.model.dense_layers < config.model.layers,
        "leaves no layer with experts: model.layers={c.model.layers}", ("model.dense_layers<",)),
    Rule("model.experts_per_token", ("model.experts_per_token", "model.experts"),
        lambda config: (
            not config.model.experts or config.model.experts_per_token <= config.model.experts
        ),
        "is more than model.experts={c.model.experts}",
        ("model.experts_per_token<", "model.experts={c.model.experts_per_token}")),
    refused("model.mlp", {**_ROUTED, "model.mlp": "gelu"},
        "is the block of a dense model; experts are gated", "model.mlp=swiglu"),
    refused("precision.fp8_recipe",
        {**_ROUTED, "precision.fp8": True, "precision.fp8_recipe": "rowwise_with_gw_hp"},
        "computes gradients of weights in 16 bits, and torchao's products of experts in 8",
        "precision.fp8_recipe=rowwise", "precision.fp8_recipe=tensorwise"),
)  # fmt: skip

# --- adapters -------------------------------------------------------------------------------------

_ADAPTED = {"lora.rank": bool}


def _absent(config: Config) -> list[str]:
    layers = adaptable_layers(config.model)
    return [name for name in config.lora.targets or [] if name not in layers]


def _absent_layers(config: Config) -> str:
    absent = _absent(config)
    why = f"a block here has {listed(list(adaptable_layers(config.model)))}"
    if config.model.experts and any(name in FEED_FORWARD for name in absent):
        why += ", and experts have no adapters"
    return f"names {listed(absent)}, and {why}"


def _near_targets(config: Config) -> list[str]:
    """Return the layers that were meant, each once."""
    layers, targets = adaptable_layers(config.model), config.lora.targets or []
    named = [peft.LAYERS.get(name, name) for name in targets]
    meant = [name if name in layers else "".join(nearest(name, layers)[:1]) for name in named]
    kept = list(dict.fromkeys(name for name in meant if name))
    return [override("lora.targets", kept)] if kept else []


_TARGETS = ("lora.rank", "lora.targets", "model.mlp", "model.experts", "model.source")

ADAPTERS = of_kind("config",
    refused("lora.rank", {**_ADAPTED, "model.init_from": None},
        "trains only adapters, and model.init_from names no base model",
        "model.init_from=/path/to/model", "lora.rank=0"),
    refused("lora.alpha", {**_ADAPTED, "lora.alpha": 0},
        "scales the adapters: with 0 nothing is trained",
        lambda config: [f"lora.alpha={2 * config.lora.rank}"]),
    refused("precision.fp8", {**_ADAPTED, "precision.fp8": True},
        "multiplies in torchao's layers, which do not support adapters",
        "precision=bf16", "lora.rank=0"),
    *(refused("lora.base", {**_ADAPTED, "lora.base": "nf4", key: value},
        f"keeps whole matrices in 4 bits, which {key} does not support", "lora.base=whole")
        for key, value in (
            ("parallel.tp", several), ("lora.dora", True), ("model.experts", bool))),
    Rule("lora.base",
        ("lora.base", "lora.rank", *(f"model.{name}" for name in ("hidden", "ffn", "heads", "head_dim"))),
        lambda config: config.lora.base == "whole" or not any(
            not it.is_vector and it.numel % 64 for it in block(config.model).values()),
        "quantizes 64 weights at a time, and a matrix of a block has another number of them",
        ("lora.base=whole",)),
    refused("lora.targets", {**_ADAPTED, "lora.targets": []},
        "names no layer: nothing would be trained", "lora.targets=null"),
    Rule("lora.targets", _TARGETS, lambda config: not (
            config.model.source == "own" and config.lora.rank and _absent(config)),
        _absent_layers, (_near_targets, "lora.targets=null")),
    refused("lora.targets",
        {**_ADAPTED, "lora.targets": lambda names: len({*(names or ())}) < len(names or ())},
        "names a layer twice", _near_targets),
)  # fmt: skip

# --- models of transformers and of your own ---------------------------------------------------------------

_FOREIGN = {"model.source": other_than("own")}
_OWN_CODE = {"model.source": "hooks"}
_BLOCKS = "parallel.activation_checkpointing"
_WITHIN = "masks the attention of layers that it knows"


def _of_others(why: str) -> Callable[[Config], str]:
    """Return the sentence that layers are not nanoscale's, and how nanoscale's own model is chosen."""

    def message(config: Config) -> str:
        if config.model.source == "hooks":
            return f"{why}, and those of model=hooks are your own"
        family = config.model.hf_config["model_type"]
        own = f"; nanoscale's own transformer supports it for {family}: use model.init_from instead of model=hf"
        return f"{why}, and those of model=hf belong to transformers{own if family in families() else ''}"

    return message


def with_whole_stream(composed: Composed) -> Composed:
    """Return the request with the default of `parallel.sequence_parallel` that its model supports."""
    key, config = "parallel.sequence_parallel", composed.config
    if config.model.source != "hf" or composed.source(key) not in composed.unasked:
        return composed
    parallel = replace(config.parallel, sequence_parallel=config.parallel.tp == 1)
    return replace(composed, config=replace(config, parallel=parallel))


_PREDICTS = {
    "masked": ("hidden tokens", "train.objective=masked train.mask_token=103"),
    "classify": ("classes", "train.objective=classify train.labels=2"),
    "next-token": ("the next token", "train.objective=next-token"),
}
"""The prediction of a transformers model, and the advice to train it, by `made_for`."""


def _fits_objective(config: Config) -> bool:
    objective = config.train.objective if config.train.objective in _PREDICTS else "next-token"
    return config.model.source != "hf" or made_for(config.model.hf_config) == objective


def _what_it_predicts(config: Config) -> str:
    classes = config.model.hf_config.get("architectures")
    predicts, _ = _PREDICTS[made_for(config.model.hf_config)]
    return f"is not what model.name={config.model.name} was made for: {shown(classes)} predicts {predicts}"


_AXES = {
    "parallel.tp": "divides matrices that it finds by their names",
    "parallel.pp": "splits a model between blocks that it can call one by one",
    "parallel.cp": "replaces the attention with one that exchanges keys and values between ranks",
    "parallel.ep": "distributes experts that it finds by their names",
}


FOREIGN = (
    *(refused(key, {**_OWN_CODE, key: several}, _of_others(why), f"{key}=1")
        for key, why in _AXES.items()),
    refused("parallel.tp", {"model.source": "hf", "backend.name": "deepspeed", "parallel.tp": several},
        "divides model=hf by transformers' own plan, which DeepSpeed's engine does not run",
        "parallel.tp=1", "backend=native"),
    refused("parallel.sequence_parallel",
        {"model.source": "hf", "parallel.tp": several, "parallel.sequence_parallel": True},
        "divides the stream between blocks, and those of model=hf take it whole",
        "parallel.sequence_parallel=false"),
    refused("parallel.pp", {"model.source": "hf", "backend.name": "deepspeed", "parallel.pp": several},
        "runs stages of transformers' model as one module each, and DeepSpeed's engine lists of layers",
        "parallel.pp=1", "backend=native"),
    refused("parallel.ep", {"model.source": "hf", "parallel.ep": several, "parallel.tp": several},
        "divides the experts of model=hf, as parallel.tp={c.parallel.tp} does",
        "parallel.ep=1", "parallel.tp=1"),
    *of_kind("config",
        refused("precision.fp8", {**_FOREIGN, "precision.fp8": True},
            _of_others("replaces linear layers that it finds by their names"),
            "precision=bf16"),
        refused("train.statistics_every", {**_FOREIGN, "train.statistics_every": other_than(0)},
            "reads the layers of nanoscale's own model, and model={c.model.source} has others",
            "train.statistics_every=0"),
        refused("train.z_loss", {**_FOREIGN, "train.z_loss": other_than(0.0)},
            "is a part of nanoscale's own loss, and model={c.model.source} computes its own", "train.z_loss=0"),
        refused("lora.rank", {**_OWN_CODE, **_ADAPTED},
            _of_others("adds adapters to layers that it finds by their names"),
            "lora.rank=0"),
        refused("lora.rank", {**_ADAPTED, "model.source": "hf", "parallel.tp": several},
            "adds adapters to whole layers of model=hf, and parallel.tp={c.parallel.tp} divides them",
            "parallel.tp=1", "lora.rank=0"),
        refused("lora.rank", {**_ADAPTED, "model.source": "hf", "train.objective": "classify"},
            "freezes all weights, and a new head of classes must be trained", "lora.rank=0"),
        refused("lora.base", {**_ADAPTED, "model.source": "hf", "lora.base": "nf4"},
            _of_others("keeps layers in 4 bits that it finds by their names"), "lora.base=whole"),
        refused("lora.init_from", {**_ADAPTED, "model.source": "hf", "lora.init_from": other_than(None)},
            _of_others("reads adapters by the names of layers"), "lora.init_from=null")),
    *of_kind("data",
        Rule("train.objective", ("train.objective", "model.hf_config", "model.source"),
            _fits_objective, _what_it_predicts,
            lambda config: [_PREDICTS[made_for(config.model.hf_config)][1]]),
        refused("data.packing", {**_OWN_CODE, "data.packing": "whole"},
            _of_others(_WITHIN), "data.packing=stream"),
        refused("data.document_mask", {**_OWN_CODE, "data.document_mask": True, "data.packing": "stream"},
            _of_others(_WITHIN), "data.document_mask=false")),
)  # fmt: skip

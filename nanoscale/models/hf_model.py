"""Any language model of transformers, causal or an encoder, in place of our own transformer.

Nothing here knows its structure in depth. Only its residual blocks are located; they are sharded, recomputed
and compiled one by one, and divided into stages. Dropout is never applied, since no layout
could repeat another's.

Parameters are built on the meta device. Other tensors that a model computes when it is built (rotary
frequencies and the like) are computed for real, and again after every operation that may have moved, emptied
or rounded them.
"""

import copy
import math
import os
import re
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import cached_property, partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from nanoscale.config.objectives import made_for
from nanoscale.config.schema import Model
from nanoscale.data.batch import IGNORED
from nanoscale.models import hf_attention, hf_mixers, hf_stage
from nanoscale.models.attention import AttentionSpan, DocumentEnds, Mask
from nanoscale.models.distillation import Distillation
from nanoscale.models.head import Head, logits_or_loss, sum_of_losses
from nanoscale.models.initialization import ADAPTER, Draw, draw, parameter_seed
from nanoscale.models.mixers.pieces import Division, Rows
from nanoscale.models.torchao_log import silence_torchao
from nanoscale.models.transformer import Transformer, positions_in_documents, scaled, whole_sequence

PREFIX = "hf."
"""The prefix of our names of transformers' parameters."""
_CODE_FOLDER = "HF_MODULES_CACHE"


class LossHead(Head):
    """The head of a model of transformers, which returns the loss of the batch's targets in place of logits.

    The model's own code multiplies what its head returns by `scale`; so does this head with its input.
    """

    scale: float
    batch: tuple[Tensor, Tensor | None] | None = None
    """Targets and references of a micro batch; None: logits are wanted."""

    def forward(self, hidden: Tensor, *_: Any) -> Tensor:
        if self.batch is None:
            return F.linear(hidden, self.weight)
        targets, references = self.batch
        hidden = scaled(hidden, self.scale)
        loss = logits_or_loss(hidden, self.weight, targets, self, references=references)
        return loss / self.scale


class HFModel(Transformer):
    """A model of transformers from token ids `[batch, seq]` to logits `[batch, seq, vocab]`."""

    head: LossHead | None = None  # type: ignore[assignment]
    """The head, which computes the loss in chunks; None: the loss needs all logits at once, because the head
    has a bias, the model's code does more with logits than scale them, or the model is the user's own."""
    distillation: Distillation | None = None
    attends_with_ours = False
    """True if our attention takes the place of transformers'."""
    division: Division | None = None
    """The division of rows over the ranks of cp, for recurrent layers; None: rows are whole."""
    hits: Tensor | None = None
    """The numbers of rows with labels, and of rows with the right class, since the last reading."""

    def __init__(self, shape: Model, *, real: bool = False, layers: range | None = None) -> None:
        """Build the model, or the stage with the blocks `layers`; with `real`, parameters are allocated, and
        the caller makes sure that they fit into memory."""
        nn.Module.__init__(self)  # without our own blocks
        self.shape = shape
        self.first = self.last = True
        self.sequence_shards = 1
        self.sequence_length = lambda seq: seq
        self.token_positions = whole_sequence
        self.run_layers = lambda layers, tokens, rotations, masks: self._logits(tokens, masks[0])
        self.hf: Any = self._build(real=real)
        self.hf.eval()  # training mode would enable dropout
        found = list(blocks(self.hf).values())
        own = range(len(found)) if layers is None else layers
        self.first, self.last = own.start == 0, own.stop == len(found)
        for name in [*tied_parameters(self.hf).values()][:1]:
            self.tied_name = PREFIX + name
        self._received: list[Tensor] = []
        if len(own) < len(found):
            hf_stage.cut(self.hf, found, own, hf_stage.ends_of(self._build, blocks), self._received)
        layers_by_number = nn.ModuleDict({str(i): found[i] for i in own})
        # transformers has registered each of them elsewhere
        object.__setattr__(self, "layers", layers_by_number)
        self._ties = tied_parameters(self.hf)
        scale = _logit_scale(self.hf) if self.last else None
        if scale is not None:
            head = self.hf.get_output_embeddings()
            head.__class__, head.scale = LossHead, scale
            object.__setattr__(self, "head", head)

    def forward(
        self,
        inputs: Tensor,
        documents: DocumentEnds | None = None,
        targets: Tensor | None = None,
        references: Tensor | None = None,
    ) -> Tensor:
        targets = targets if self.last else None
        if targets is not None and made_for(self.shape.hf_config) == "classify":
            return self._class_loss(inputs, targets)
        if self.head is not None:
            self.head.batch = None if targets is None else (targets, references)
        length = self.sequence_length(inputs.shape[1])
        masks = (
            self.make_masks(inputs, length, documents) if self.attends_with_ours else (None, None)
        )
        logits = self.run_layers(self.layers, inputs, (None, None), masks)
        if targets is None or self.head is not None:
            return logits
        if self.token_losses is not None:
            return sum_of_losses(self.token_losses, logits.flatten(0, 1), targets.flatten())
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        references = None if references is None else references.view(torch.float64)
        if self.distillation is not None and references is not None:
            return self.distillation.loss(_cross_entropy, logits, targets, references)
        if self.objective is None:
            return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
        assert references is not None, "pairs have them"
        rows = F.cross_entropy(logits.mT, targets, reduction="none").sum(1)
        value, weights = self.objective.value_and_weights(rows, targets, references)
        weighted = (rows * weights).sum()
        return value + (weighted - weighted.detach()) if torch.is_grad_enabled() else value

    def _class_loss(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Return the sum of the losses of the labels, each the target of the last token of a row's text."""
        numbers = torch.arange(targets.shape[1], device=targets.device)
        last = numbers.where(targets != IGNORED, 0).amax(1, keepdim=True)
        mask = numbers <= last
        tokens = tokens.where(mask, self.hf.config.pad_token_id)
        logits = self.run_layers(self.layers, tokens, (None, None), (mask, None))
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        labels = targets.gather(1, last).squeeze(1)
        counted = labels != IGNORED
        hits = (logits.detach().argmax(-1) == labels) & counted
        new = torch.stack([counted.sum(), hits.sum()]).double()
        self.hits = new if self.hits is None else self.hits + new
        return F.cross_entropy(logits, labels, reduction="sum")

    def _build(self, dtype: torch.dtype = torch.float32, *, real: bool = False) -> Any:
        return build(self.shape, dtype, real=real)

    def _logits(self, tokens: Tensor, mask: Mask) -> Tensor:
        """Return the logits of tokens `[batch, seq]`; a stage takes and returns the stream, too."""
        given = {"input_ids": tokens}
        if not self.first:  # what the code makes of its input before the blocks is not used
            given = {"inputs_embeds": torch.zeros_like(tokens)}
            self._received.append(tokens)
        if isinstance(mask, Tensor):
            given["attention_mask"] = mask.long()
        elif self.attends_with_ours:
            given["position_ids"] = self._set_documents(tokens, mask)
        try:
            return cast("Tensor", self.hf(**given).logits)
        except hf_stage.StageEnd as end:
            return cast("Tensor", end.args[0])
        finally:
            self._received.clear()

    def _set_documents(self, tokens: Tensor, mask: AttentionSpan | None) -> Tensor:
        """Tell our attention and mixers the documents; return the position of each token within its own."""
        rows, length = len(tokens), self.sequence_length(tokens.shape[1])
        span = mask or AttentionSpan.whole(rows, length, tokens.device)
        hf_attention.DOCUMENTS.set((span, mask is not None))
        positions = self.token_positions(tokens.shape[1], tokens.device).expand(rows, -1)
        first = span.first_seen(rows, length).gather(1, positions)
        hf_mixers.ROWS.set(Rows(first, positions[0], self.division))
        return positions_in_documents(span, rows, length).gather(1, positions)

    def attend_with(self, core: nn.Module) -> None:
        """Let the layers attend with `core`, a `CausalAttention`, within documents and divided sequences."""
        if not self.attends_with_ours:
            hf_mixers.install(self.hf)
        self.attends_with_ours = True
        hf_attention.set_core(self.hf, core)

    @property
    def has_separate_head(self) -> bool:
        return False

    def materialize(self, device: torch.device) -> None:
        self.to_empty(device=device)
        self.tie()
        self.reset_buffers(device)

    def tie(self) -> None:
        """Tie shared parameters again, after each of them has become a tensor of its own."""
        for alias, name in self._ties.items():
            owner, _, leaf = alias.rpartition(".")
            setattr(self.hf.get_submodule(owner), leaf, self.hf.get_parameter(name))

    @torch.no_grad()
    def reset_buffers(self, device: torch.device) -> None:
        dtype = torch.promote_types(next(self.parameters()).dtype, torch.float32)
        if dtype == torch.float64 and self.shape.source == "hf":
            # transformers' grouped products of experts have no fp64
            self.hf.set_experts_implementation("eager")
        present = dict(self.hf.named_buffers())
        for name, value in self._build(dtype).named_buffers():
            if name not in present:  # another stage's
                continue
            owner, _, leaf = name.rpartition(".")
            self.hf.get_submodule(owner)._buffers[leaf] = value.to(device)

    def initializer(self, seed: int, device: torch.device) -> Draw:
        return RandomWeights(self.shape, seed, device)


def _cross_entropy(
    logits: Tensor, targets: Tensor, token_weights: Tensor, temperature: float = 1.0
) -> Tensor:
    """Return the weighted sum of the losses of targets `[..., n]`."""
    logits = logits if temperature == 1 else logits / temperature
    picked = logits.log_softmax(-1).gather(-1, targets.clamp(min=0))
    return -(picked * token_weights * (targets >= 0)).sum()


def build(shape: Model, dtype: torch.dtype = torch.float32, *, real: bool = False) -> Any:
    """Build transformers' model, with parameters on the meta device unless `real`, and all else in memory.

    Raises:
        ValueError, OSError, ImportError: transformers does not know it, or lacks a package that it needs.
    """
    silence_torchao()
    import transformers
    from transformers.initialization import no_init_weights

    config = read_config(shape)
    config.use_cache = False
    classes: dict[str, Any] = {
        "next-token": transformers.AutoModelForCausalLM,
        "masked": transformers.AutoModelForMaskedLM,
        "classify": transformers.AutoModelForSequenceClassification,
    }
    parameter_device = nullcontext() if real else parameters_on_meta()
    with no_init_weights(), parameter_device:
        model = classes[made_for(shape.hf_config)].from_config(
            config, dtype=dtype, trust_remote_code=shape.trust_remote_code
        )
    model.tie_weights()
    return model


class _Outputs(tuple[Tensor]):
    """The outputs of a model without its head, of which only the last hidden states exist."""

    def __getattr__(self, name: str) -> Tensor | None:
        return self[0] if name == "last_hidden_state" else None


@torch.no_grad()
def _logit_scale(model: Any) -> float | None:
    """Return the factor by which a causal model multiplies its head's result, or None if it has no such head.

    The model's own code runs with two numbers in place of its head's result.
    """
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    base = getattr(model, getattr(model, "base_model_prefix", ""), None)
    if type(head) is not nn.Linear or head.bias is not None or base is None:
        return None
    hidden = torch.empty(1, 1, head.in_features, device="meta")
    tokens, numbers = hidden.new_zeros(1, 1, dtype=torch.long), torch.tensor([1.0, 1000.0])
    base.forward = lambda *_, **__: _Outputs((hidden,))
    head.forward = lambda *_: numbers
    try:
        one, thousand = model(input_ids=tokens).logits.tolist()
    except Exception:  # of any code, which wants more than these tokens
        return None
    finally:
        del base.forward, head.forward
    return one if one and math.isclose(thousand, 1000 * one, rel_tol=1e-6) else None


def read_config(shape: Model) -> Any:
    """Read config.json with transformers.

    Raises:
        ValueError: transformers does not know this `model_type`.
    """
    if shape.trust_remote_code and "AutoConfig" in shape.hf_config.get("auto_map", {}):
        return _remote_config(shape)
    from transformers import CONFIG_MAPPING, PreTrainedConfig

    family = shape.hf_config["model_type"]
    if family not in CONFIG_MAPPING:
        raise ValueError(f"model_type={family} is unknown to transformers")
    # The references to code that comes with a model are ignored.
    values = {name: value for name, value in shape.hf_config.items() if name != "auto_map"}
    # {"__float__": "Infinity"} is a number that JSON lacks.
    return CONFIG_MAPPING[family].from_dict(PreTrainedConfig._decode_special_floats(values))


def _remote_config(shape: Model) -> Any:
    # Ranks copy the code to the folder that it is imported from, and must not read each other's half-written
    # files.
    folder = tempfile.TemporaryDirectory(prefix="nanoscale-code-")
    os.environ.setdefault(_CODE_FOLDER, folder.name)
    _temporary_folders.append(folder)
    from transformers.dynamic_module_utils import get_class_from_dynamic_module

    reference = shape.hf_config["auto_map"]["AutoConfig"]
    config_class: Any = get_class_from_dynamic_module(reference, shape.name)
    config = config_class.from_dict(dict(shape.hf_config))
    config._name_or_path = shape.name
    return config


_temporary_folders: list[Any] = []
"""Temporary folders, kept until the process ends."""


@contextmanager
def parameters_on_meta() -> Iterator[None]:
    """Move each parameter to the meta device when a module registers it; vectors keep values, `constructed`."""
    original = nn.Module.register_parameter

    def register(self: nn.Module, name: str, param: nn.Parameter | None) -> None:
        if param is not None and not param.is_meta:
            constructed = param.detach() if param.ndim < 2 else None
            # not `param.to`, because a rehearsal plays large parameters without numbers
            empty = torch.empty(param.shape, dtype=param.dtype, device="meta")
            param = nn.Parameter(empty, requires_grad=param.requires_grad)
            param.constructed = constructed  # type: ignore[attr-defined]
        original(self, name, param)

    nn.Module.register_parameter = register  # type: ignore[method-assign]
    try:
        with torch.device("cpu"):
            yield
    finally:
        nn.Module.register_parameter = original  # type: ignore[method-assign]


def blocks(model: Any) -> dict[str, nn.Module]:
    """Return the residual blocks by name: the modules that transformers does not split, except modules that
    share a parameter, or the largest list of modules."""
    shared = {name for pair in tied_parameters(model).items() for name in pair}
    unsplit_classes = set(getattr(model, "_no_split_modules", None) or ())
    unsplit_blocks: dict[str, nn.Module] = {}
    for name, module in model.named_modules():
        inside = any(name.startswith(f"{outer}.") for outer in unsplit_blocks)
        is_shared = any(each.startswith(f"{name}.") for each in shared)
        if type(module).__name__ in unsplit_classes and not inside and not is_shared:
            unsplit_blocks[name] = module
    if unsplit_blocks:
        return unsplit_blocks
    module_lists = {
        name: list_ for name, list_ in model.named_modules() if isinstance(list_, nn.ModuleList)
    }
    if not module_lists:
        return {}
    name, largest = max(module_lists.items(), key=lambda pair: count_parameters(pair[1]))
    return {f"{name}.{i}": block for i, block in enumerate(largest)}


_SHARED = ("hidden_size_per_layer_input", "num_kv_shared_layers")
"""Settings by which blocks read more than the stream: embeddings of their own, or keys of other blocks."""


def require_stages(model: Any, shape: Model) -> None:
    """Raise ValueError if the blocks of a model cannot be divided into stages."""
    found, ties = blocks(model), tied_parameters(model)
    if len(found) != shape.layers:
        raise ValueError(f"it has {len(found)} blocks, and config.json {shape.layers} layers")
    if names := [name for name in _SHARED if getattr(model.config, name, 0)]:
        raise ValueError(f"its blocks read more than the stream ({names[0]})")
    head = model.get_output_embeddings()
    if any(model.get_parameter(name) is not getattr(head, "weight", None) for name in ties):
        raise ValueError(f"{next(iter(ties))} is shared, and only a head may share its weights")
    hf_stage.ends_of(partial(build, shape), blocks)


def expert_modules(model: nn.Module) -> list[Any]:
    """Return the modules that hold matrices of all experts of a block, and call them by number, with the
    copies of a divided block."""
    every = dict.fromkeys([*model.modules(), *getattr(model, "copied_modules", ())])
    return [module for module in every if hasattr(module, "_is_expert_parallel")]


def require_experts(model: Any, ep: int) -> None:
    """Raise ValueError if the experts of a model cannot be divided by their number."""
    found = expert_modules(model)
    if not found:
        raise ValueError("its experts are not matrices of all experts")
    if others := {it.num_experts for it in found if it.num_experts % ep}:
        raise ValueError(f"{ep} ranks do not divide {min(others)} experts")


_TP_STYLES = ("colwise", "rowwise", "replicated_with_grad_allreduce", "mla_kv_a_proj")
"""The divisions of layers, in transformers' plans of tensor parallelism, that are applied."""
_WHOLE = (
    *("colwise_gather_output", "rowwise_split_input", "embedding_rowwise", "embedding_colwise"),
    *("all_reduce", "local_params", "moe_identity_expert", "moe_tp_experts", "replicate"),
)
"""The divisions of layers with whole inputs and outputs, which stay whole here: every rank has all of them."""


def tp_styles(model: Any, tp: int) -> dict[str, str]:
    """Return how transformers' own plan divides layers over the ranks of tp, by their names.

    Experts are divided by their number. A vector with its own name in the result has a number for each head.

    Raises:
        ValueError: it has no plan, one with divisions that are not applied here, or sizes that tp does not
            divide.
    """
    plan = {re.compile(name.replace(".", r"\.").replace("*", r"\d+")): style
            for name, style in (model._tp_plan or {}).items()}  # fmt: skip
    modules, sizes = dict(model.named_modules()), dict[str, int]()
    styles = {name: style for name in modules for it, style in plan.items() if it.fullmatch(name)}
    others = {*styles.values()} - {*_TP_STYLES, *_WHOLE}
    if others:
        raise ValueError(f"transformers' plan for it has {', '.join(sorted(others))}")
    if whole := _NEEDS_WHOLE.get(model.config.model_type):
        raise ValueError(f"its code computes with the {whole}")
    applied = {name: style for name, style in styles.items() if style in _TP_STYLES}
    for name, style in styles.items():
        module, owner = modules[name], modules[name.rpartition(".")[0]]
        if style == "moe_tp_experts" and hasattr(module, "_is_expert_parallel"):
            applied[name], sizes[f"the experts of {name}"] = style, module.num_experts
        if style in ("colwise", "rowwise"):
            sizes[name] = module.weight.shape[style == "rowwise"]
        if style == "colwise" and name.endswith(".k_proj") and hasattr(owner, "head_dim"):
            sizes[f"the heads of {name}"] = sizes[name] // owner.head_dim
        elif style == "colwise" and _OF_HEADS.search(name):
            sizes["its heads"] = model.config.num_attention_heads
    if not {"colwise", "moe_tp_experts"} & {*applied.values()}:
        raise ValueError("transformers has no plan that divides its layers")
    by_column = [it for it, style in plan.items() if style == "colwise"]
    for name, value in model.named_parameters():
        if value.ndim == 1 and any(it.fullmatch(name) for it in by_column):
            applied[name], sizes[name] = "colwise", len(value)
    if undivided := [f"{name} ({size})" for name, size in sizes.items() if size % tp]:
        raise ValueError(f"{tp} ranks do not divide {undivided[0]}")
    return applied


_OF_HEADS = re.compile(r"\.([kq]_proj|kv_b_proj|qkv_proj|query_key_value)$")
"""The ends of the names of layers whose results are divided into heads."""
_HEADS = "number of all heads"
_NEEDS_WHOLE = {"deepseek_v4": _HEADS, "doge": _HEADS, "gemma3n_text": "mean of all columns"}
"""Families whose plans divide heads or columns that their code counts, groups or averages."""


def count_parameters(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def named_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the parameters and the persistent buffers: the tensors that files of the model hold."""
    yield from model.named_parameters()
    yield from saved_buffers(model)


def saved_buffers(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the buffers that files and checkpoints hold, such as the biases of routers, by name."""
    for prefix, module in model.named_modules():
        for name, value in module._buffers.items():
            if value is not None and name not in module._non_persistent_buffers_set:
                yield f"{prefix}.{name}".removeprefix("."), value


def tied_parameters(model: nn.Module) -> dict[str, str]:
    """Return the second names of shared parameters, with the first name of each."""
    first_names: dict[int, str] = {}
    aliases = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if first_names.setdefault(id(parameter), name) != name:
            aliases[name] = first_names[id(parameter)]
    return aliases


class RandomWeights:
    """Initial weights by transformers' own rules for the model, which depend on names and the seed alone.

    They are drawn block by block, each from a generator of its own, since some rules of a module also
    initialize its children. One block, or one module outside of all blocks, is in memory at a time.
    """

    def __init__(self, shape: Model, seed: int, device: torch.device) -> None:
        self.shape, self.seed, self.device = shape, seed, device
        self._unit, self._drawn = "", dict[str, Tensor]()

    def __call__(self, name: str, size: torch.Size) -> Tensor:
        if ADAPTER in name:
            return draw(name, size, self.shape, self.seed, self.device)
        name = name.removeprefix(PREFIX)
        containing_blocks = [block for block in self._blocks if name.startswith(f"{block}.")]
        unit = containing_blocks[0] if containing_blocks else name.rpartition(".")[0]
        if unit != self._unit or not self._drawn:
            self._unit, self._drawn = unit, self._draw(unit)
        return self._drawn[name]

    @cached_property
    def _model(self) -> Any:
        return build(self.shape)

    @cached_property
    def _blocks(self) -> list[str]:
        return list(blocks(self._model))

    @torch.no_grad()
    def _draw(self, unit: str) -> dict[str, Tensor]:
        empty = self._model.get_submodule(unit)
        module = copy.deepcopy(empty).to_empty(device=self.device)
        for value in module.parameters():
            value.fill_(math.nan)
        devices = [self.device] if self.device.type == "cuda" else []
        with torch.random.fork_rng(devices):
            torch.manual_seed(parameter_seed(self.seed, unit))
            module.apply(self._model._init_weights)
            for name, value in module.named_parameters():
                if value.isnan().any():  # no rule initializes it: the constructor does
                    vector = getattr(empty.get_parameter(name), "constructed", None)
                    # 0.02 is the deviation in transformers' Conv1D.
                    value.normal_(std=0.02) if vector is None else value.copy_(vector)
        prefix = f"{unit}." if unit else ""
        return {f"{prefix}{name}": value.detach() for name, value in module.named_parameters()}

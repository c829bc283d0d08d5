"""Loading a model to generate with, from a run's checkpoint in any layout or a Hugging Face folder.

A model over several devices of this machine has consecutive blocks on each of them.
"""

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from nanoscale.checkpoint import sharded
from nanoscale.checkpoint.configuration import require_model
from nanoscale.checkpoint.hf import load_any_model
from nanoscale.checkpoint.hf.adapters import require_base_of, with_adapter
from nanoscale.checkpoint.reader import Reader
from nanoscale.checkpoint.store import StoredCheckpoint, find_checkpoint
from nanoscale.common.errors import UserError, Violation, refuse_option
from nanoscale.common.json_text import parse
from nanoscale.common.versions import missing
from nanoscale.config.composing.frozen import load as load_config
from nanoscale.config.hf.families import UnsupportedError
from nanoscale.config.hf.safetensors_headers import BadFileError
from nanoscale.config.hf.shape import read_shape
from nanoscale.config.objectives import made_for
from nanoscale.config.resolved import ResolvedConfig
from nanoscale.config.schema import Model
from nanoscale.data import vocabulary
from nanoscale.data.tokens.tokenizer import ByteTokenizer, FileTokenizer, Tokenizer, find, in_folder
from nanoscale.data.tokens.tokenizer import load as load_tokenizer
from nanoscale.models.hf_cache import HFCache
from nanoscale.models.hf_model import HFModel, count_parameters, named_tensors
from nanoscale.models.kv_cache import Cache
from nanoscale.models.moe import MixtureOfExperts
from nanoscale.models.transformer import Transformer
from nanoscale.parallel.fsdp import TORCH_DTYPES
from nanoscale.runs.directory import RunDirectory
from nanoscale.runs.trust import is_own

_ENDS = ("config.json", "generation_config.json")
"""Files of a folder that may name several end-of-text tokens."""


@dataclass(frozen=True)
class Opened:
    """A model with its tokenizer."""

    model: Transformer
    tokenizer: Tokenizer
    device: torch.device
    source: str
    """The folder or checkpoint that it was read from."""
    before: tuple[int, ...]
    """Tokens that precede every text."""
    ends: frozenset[int]
    """Tokens that end a text."""
    start: int
    """The token that predicts the first one if a text has nothing before it."""
    added: tuple[int, ...] = ()
    """Tokens that a Hugging Face model's own tokenizer puts before a text, as a part of it."""
    trained_len: int | None = None
    """Tokens of a training sample; None if not known."""
    step: int | None = None
    """The step of the checkpoint; None for a folder."""
    on_chats: bool = False
    """True if it was trained on the answers of chats."""
    template: Path | None = None
    """The chat template of its training, if that is not the tokenizer's own."""

    @property
    def context(self) -> int:
        """The most tokens of the model's context."""
        return self.model.shape.max_seq_len

    @property
    def vocab(self) -> int:
        """The number of ids with a meaning; a model's embedding may be larger."""
        return min(self.model.shape.vocab, self.tokenizer.vocab_size)

    def cache(self, batch: int, max_length: int) -> Cache | HFCache:
        """Return a new cache of this number of sequences, with at most this number of tokens each."""
        if isinstance(self.model, HFModel):
            return HFCache(self.model, batch)
        return Cache(self.model, batch, max_length)


def open_model(
    name: str,
    *,
    step: int | None = None,
    device: str | None = None,
    dtype: str | None = None,
    tokenizer: str | None = None,
    weights: bool = True,
) -> Opened:
    """Read a run's checkpoint, or the folder of a Hugging Face model.

    Args:
        step: the checkpoint of this step, by default the newest.
        device: one of this machine, or several with commas between them, over which the blocks are divided
            (`find_devices`); by default the first GPU if there is one.
        dtype: a key of TORCH_DTYPES, by default bf16 on a GPU and fp32 elsewhere.
        tokenizer: `byte`, or a tokenizer.json or its folder, in place of the model's own.
        weights: False: the parameters stay on the meta device, to encode prompts for other processes.

    Raises:
        UserError: the name has no model, it is damaged, or no tokenizer is known.
    """
    (named,) = find_devices(device)
    places = [torch.device(name) for name in named.split(",")]
    kind = TORCH_DTYPES[dtype or ("bf16" if places[0].type == "cuda" else "fp32")]
    if not weights:
        places = [torch.device("meta")]
    folder = Path(name).expanduser()
    if (folder / "config.json").is_file():
        if step is not None:
            raise UserError("usage", f"--step {step}: {folder} is a Hugging Face model, not a run")
        return _open_folder(folder.absolute(), places, kind, tokenizer)
    return _open_run(RunDirectory.open(name), step, places, kind, tokenizer)


def _open_run(
    run: RunDirectory,
    step: int | None,
    devices: list[torch.device],
    dtype: torch.dtype,
    tokenizer_name: str | None,
) -> Opened:
    config, stored = load_config(run.config), find_checkpoint(run.checkpoints, step)
    require_model(run, stored)
    if config.model.source == "hooks":
        raise UserError(
            "model", f"{run.path}: its model is your own (model=hooks), which you can call yourself"
        )
    if (objective := made_for(config.model.hf_config)) != "next-token":
        what = f"was trained with train.objective={objective}, and predicts no next token"
        raise UserError("model", f"{run.path}: its model {what}")
    if config.model.trust_remote_code and not is_own(run):
        what = "was not made by your own runs, and model.trust_remote_code=true names code to run"
        raise UserError("trust", f"{run.path} {what}")
    tokenizer = _named(tokenizer_name) if tokenizer_name else vocabulary.tokenizer_of_run(config)
    if tokenizer is None:
        raise _no_tokenizer(
            f"{run.path}: data.source={config.data.source} names none", config.model.vocab
        )
    model = _empty(config.model, devices, dtype)
    if devices[0].type != "meta":
        _fill(model, config, stored)
    return Opened(
        model,
        _fitting(tokenizer, model),
        devices[0],
        f"{run.name}, {stored.path.name}",
        before=(tokenizer.eos,),  # the previous document has ended before a new one begins
        ends=frozenset([tokenizer.eos]),
        start=tokenizer.eos,
        trained_len=config.train.seq_len,
        step=stored.step,
        on_chats=config.data.loss_on == "answers",
        template=vocabulary.chat_template(config),
    )


def _open_folder(
    folder: Path, devices: list[torch.device], dtype: torch.dtype, tokenizer_name: str | None
) -> Opened:
    try:
        model = _empty(read_shape(folder), devices, dtype)
        if devices[0].type != "meta":
            load_any_model.load(folder, model.shape, dict(state_of(model)))
    except (UnsupportedError, BadFileError) as error:
        raise UserError("model", f"{folder}: {error}") from error
    if not tokenizer_name and in_folder(folder) is None:
        raise _no_tokenizer(f"{folder} has no tokenizer.json or tokenizer.model", model.shape.vocab)
    tokenizer = _named(tokenizer_name or str(folder))
    before: tuple[int, ...] = (tokenizer.eos,)
    added, start = tuple[int, ...](), tokenizer.eos
    if isinstance(tokenizer, FileTokenizer):
        before = added = tokenizer.prefix_ids()
        start = tokenizer.bos if tokenizer.bos is not None else tokenizer.eos
    ends = frozenset([tokenizer.eos, *_more_ends(folder)])
    fitting = _fitting(tokenizer, model)
    return Opened(model, fitting, devices[0], folder.name, before, ends, start, added)


def _fill(model: Transformer, config: ResolvedConfig, stored: StoredCheckpoint) -> None:
    state = dict(state_of(model))
    if not config.lora.rank:
        sharded.load_weights(stored, state)
        return
    require_base_of(
        config, stored.manifest, "nanoscale checkpoints export RUN --format hf --base DIR"
    )
    sharded.load_weights(stored, {})  # compares the sizes of files
    load_any_model.load(Path(str(config.model.init_from)), config.model, state)
    reader = Reader(stored.path)
    for name, value in state.items():
        is_stored = name in reader.tensors  # a counter of routers, or a buffer
        value.copy_(
            reader.read(name, tuple(value.shape))
            if is_stored
            else with_adapter(config.lora, reader, name, value)
        )


def find_devices(
    named: str | None, count: int | None = None, *, several: bool = False
) -> list[str]:
    """Return the devices to compute on, by their names in torch.

    Args:
        named: the one to use, by default the first GPU if there is one; several with commas between them are
            one place for a model.
        count: this many GPUs; without a GPU, this many processes on the CPU.
        several: by default all GPUs instead of the first.

    Raises:
        UserError: this machine does not have them.
    """
    gpus = [f"cuda:{number}" for number in range(torch.cuda.device_count())]
    if named is not None:
        return [",".join(_one_device(name, gpus) for name in named.split(","))]
    if count is None:
        return (gpus if several else gpus[:1]) or ["cpu"]
    if gpus and count > len(gpus):
        what = f"this machine has {len(gpus)}"
        refuse_option("--num-gpus", count, what, f"--num-gpus {len(gpus)}")
    return gpus[:count] or ["cpu"] * count


def _one_device(named: str, gpus: Sequence[str]) -> str:
    try:
        device = torch.device(named)
    except RuntimeError:
        device = torch.device("meta")
    count = len(gpus) if device.type == "cuda" else int(device.type == "cpu")
    if (device.index or 0) >= count:
        ways = (f"--device {name}" for name in ("cpu", *gpus))
        refuse_option("--device", named, "is not a device of this machine", *ways)
    return named


def _empty(shape: Model, devices: list[torch.device], dtype: torch.dtype) -> Transformer:
    """Create a model without values, except the counters of routers, which begin at 0."""
    if shape.source == "hf":
        model: Transformer = _hf_model(shape, devices)
    else:
        with torch.device("meta"):
            model = Transformer(shape)
    model.to(dtype).requires_grad_(False).eval()
    materialize(model, devices)
    return model


def _hf_model(shape: Model, devices: list[torch.device]) -> HFModel:
    if len(devices) > 1:
        raise UserError("usage", f"transformers' models run on one device: --device {devices[0]}")
    try:
        return HFModel(shape)
    except (ValueError, OSError, ImportError) as error:
        why = missing("transformers") or error
        raise UserError("model", f"{shape.name}: transformers cannot build it: {why}") from error


def state_of(model: Transformer) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors that a checkpoint holds of a model, by their names in the checkpoint."""
    for name, value in named_tensors(model):
        yield f"model.{name}", value.data
    for number, block in model.layers.items():
        layer = getattr(block, "mlp", None)
        if isinstance(layer, MixtureOfExperts) and model.shape.has_choice_bias:
            yield f"balance.bias.layers.{number}", layer.router.choice_bias


def _named(tokenizer_name: str) -> Tokenizer:
    if tokenizer_name == "byte":
        return ByteTokenizer()
    return load_tokenizer(find(tokenizer_name, "--tokenizer"), key="--tokenizer")


def _fitting(tokenizer: Tokenizer, model: Transformer) -> Tokenizer:
    if tokenizer.eos < model.shape.vocab:
        return tokenizer
    raise UserError(
        "model",
        f"the tokenizer's end token is {tokenizer.eos}, and the model's ids are in [0, "
        f"{model.shape.vocab}): it belongs to another model; give the right one with --tokenizer",
    )


def _no_tokenizer(why: str, vocab: int) -> UserError:
    byte = ("--tokenizer byte",) if vocab >= ByteTokenizer.vocab_size else ()
    ways = ("--tokenizer PATH/tokenizer.json", *byte)
    cause = Violation("--tokenizer", None, "", f"no tokenizer is known: {why}", ways)
    return UserError("model", f"no tokenizer is known: {why}", [cause])


def _more_ends(folder: Path) -> Iterator[int]:
    for name in _ENDS:
        with suppress(OSError, ValueError, AttributeError):
            numbers = parse((folder / name).read_text("utf-8")).get("eos_token_id")
            numbers = numbers if isinstance(numbers, list) else [numbers]
            yield from (number for number in numbers if number is not None)


def materialize(model: Transformer, devices: Sequence[torch.device]) -> None:
    """Allocate a model on the meta device over the devices, about equally, with uninitialized parameters.

    The first device has the embedding, and the last one the head, if that has weights of its own. Every part
    moves what it gets to its device.
    """
    if len(devices) == 1:
        model.materialize(devices[0])
        return
    layers = list(model.layers.values())
    sizes = [count_parameters(layer) for layer in layers]
    before, total = count_parameters(model) - sum(sizes), count_parameters(model)
    before = before // 2 if model.has_separate_head else before
    middles = [end - size / 2 for end, size in zip(accumulate(sizes), sizes, strict=True)]
    for layer, middle in zip(layers, middles, strict=True):
        _place(layer, devices[int((before + middle) / total * len(devices))])
    last = devices[-1] if model.has_separate_head else devices[0]
    for name, module in model.named_children():
        if name != "layers":
            _place(module, last if name in ("norm", "head") else devices[0])
    model.reset_buffers(devices[0])


def _place(module: nn.Module, device: torch.device) -> None:
    module.to_empty(device=device)

    def moved(_: nn.Module, *arguments: Any) -> Any:
        return tree_map_only(Tensor, lambda tensor: tensor.to(device), arguments)

    module.register_forward_pre_hook(moved, with_kwargs=True)

"""The export of a checkpoint of any layout and backend to a Hugging Face folder, tensor by tensor.

The folder is written next to its destination and renamed to it when all of it is on disk.
"""

import hashlib
import os
import shutil
import uuid
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nanoscale.checkpoint import store
from nanoscale.checkpoint.hf.adapters import is_adapted, merging, require_base_of, with_adapter
from nanoscale.checkpoint.hf.base_folder import Base, open_base
from nanoscale.checkpoint.hf.conversions import CHANGED, RecordedTensor, box_slices, reverted
from nanoscale.checkpoint.hf.load_any_model import find
from nanoscale.checkpoint.hf.names import (
    BIASES,
    TensorPosition,
    bias_positions,
    hf_positions,
    is_merged,
    shapes,
)
from nanoscale.checkpoint.hf.safetensors_files import (
    Entries,
    divide,
    entries_of,
    write_file,
    write_json,
)
from nanoscale.checkpoint.reader import Reader
from nanoscale.checkpoint.store import StoredCheckpoint
from nanoscale.common.errors import UserError
from nanoscale.config.dtypes import DTYPES, Dtype
from nanoscale.config.hf.families import UnsupportedError
from nanoscale.config.hf.safetensors_headers import IN_FP32, INDEX, BadFileError, Shapes
from nanoscale.config.hf.shape import family_of, write_shape
from nanoscale.config.hf.text_part import HEAD, read_config
from nanoscale.config.parameters import Shape
from nanoscale.config.resolved import ResolvedConfig
from nanoscale.config.schema import Model
from nanoscale.config.values.hooks import file_name
from nanoscale.data import vocabulary
from nanoscale.models.hf_model import PREFIX, build, named_tensors
from nanoscale.models.moe import BIAS_UNIT
from nanoscale.runs.directory import sync_folder

Tensors = dict[str, tuple[Shape, tuple[TensorPosition, ...]]]
"""Our parameters by name, each with its shape and its positions in the Hugging Face tensors."""
Note = Callable[[str, int, int], None]
"""A function called before each tensor with its name, its number from 1, and the number of tensors."""


@dataclass(frozen=True)
class Exported:
    """The result of an export."""

    folder: Path
    step: int
    dtype: str
    files: list[str]
    bytes: int
    tokenizer: bool
    dropped_bias: float
    """The largest dropped preference of an expert, in units of the router's softmax; mostly 0."""


def export(
    stored: StoredCheckpoint,
    config: ResolvedConfig,
    out: Path,
    dtype: str,
    largest: int,
    note: Note,
    drop_bias: bool = False,
) -> Exported:
    """Write a checkpoint that `sharded.require_whole` has verified.

    Args:
        dtype: fp32, bf16, fp16 or fp64.
        largest: the most bytes of a file, unless one tensor has more.
        drop_bias: drop the bias that `model.balance=bias` adds to the choice of experts.

    Raises:
        UserError: no family of transformers has this shape or a bias of its experts, `out` exists, or the disk
            is full; with lora, the weights that the adapters belong to have changed.
    """
    if config.lora.rank:
        require_base_of(config, stored.manifest, "--base /where/it/is/now")
    kind, base = DTYPES[dtype], open_base(config)
    hf_config = {} if base else _config(config.model, kind)
    source = _Source(stored.path, config, _tensors(stored, config, base), kind, note)
    trained = dict[str, str]()
    entries = entries_of(source.shapes(changed=base is not None), kind.safetensors_name)
    if base is not None:
        entries, trained = base.arrange(entries)
    files = divide(entries, largest)
    size = sum(entry.bytes for entry in entries.values())
    bias = _largest_bias(stored.path, config.model)
    if bias and not drop_bias:
        raise UserError(
            "model",
            f"model.balance=bias has moved preferences of experts by up to {bias:.3g}, where the mean of a "
            f"router's scores is {1 / config.model.experts:.3g}; transformers cannot store them, and its "
            f"model would choose other experts. --drop-bias exports the model without them; runs with "
            f"model.balance=aux or none have no such bias",
        )
    with new_folder(out, size) as temporary:
        read: Callable[[Entries], Iterator[memoryview]] = source.bytes_of
        if base is not None:
            has_new_head = HEAD in trained and HEAD not in base.tensors
            base.write_settings(temporary, kind, has_new_head=has_new_head)
            read = partial(base.content, trained_names=trained, read=source.bytes_of)
        else:
            special = vocabulary.write(temporary, config)
            if config.model.source == "hf":  # what the data leave open stays as in its config.json
                special = {name: number for name, number in special.items() if number is not None}
            hf_config |= special
            _require_accepted(hf_config, config.model)
            write_json(temporary / "config.json", hf_config)
        for name, contents in files.items():
            write_file(temporary / name, contents, read(contents))
        if len(files) > 1:
            file_of = {it: name for name, contents in files.items() for it in contents}
            index = {"metadata": {"total_size": size}, "weight_map": file_of}
            write_json(temporary / INDEX, index)
        _copy_code(stored, config, temporary)
    has_tokenizer = (out / "tokenizer.json").exists() or (out / "tokenizer.model").exists()
    return Exported(out, stored.step, dtype, list(files), size, has_tokenizer, bias)


def _copy_code(stored: StoredCheckpoint, config: ResolvedConfig, out: Path) -> None:
    """Copy the Python files of a model with code of its own.

    Raises:
        UserError: the file of hooks has changed since the launch.
    """
    if config.model.trust_remote_code and Path(config.model.name).is_dir():
        for file in sorted(Path(config.model.name).glob("*.py")):
            shutil.copyfile(file, out / file.name)
    if config.model.source == "hooks":
        hooks = stored.path.parents[1] / file_name(str(config.hooks.sha256))
        content = hooks.read_bytes()
        if hashlib.sha256(content).hexdigest() != config.hooks.sha256:
            raise UserError("hooks", f"{hooks} has changed since the launch")
        (out / "hooks.py").write_bytes(content)


@contextmanager
def new_folder(out: Path, size: int) -> Iterator[Path]:
    """Fill a folder that gets its name `out` when all of it is on disk; `size` bytes must be free.

    Raises:
        UserError: `out` exists.
        OSError: there is no room.
    """
    if out.exists():
        raise UserError("usage", f"{out} already exists; name another folder with --out")
    out.parent.mkdir(parents=True, exist_ok=True)
    store.require_space(out.parent, size)
    temporary = out.with_name(f".{out.name}.{uuid.uuid4().hex[:8]}")
    temporary.mkdir()
    try:
        yield temporary
        for file in temporary.iterdir():
            with file.open("rb") as stream:
                os.fsync(stream.fileno())
        sync_folder(temporary)
        temporary.rename(out)
        sync_folder(out.parent)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def _tensors(stored: StoredCheckpoint, config: ResolvedConfig, base: Base | None) -> Tensors:
    """Return our parameters and their positions, in the form of a base; of adapters, what they change there."""
    model = config.model
    if model.source == "own":
        family = family_of(model) if base is None else read_config(base.folder)["model_type"]
        merged = base is not None and is_merged(base.text_tensors)
        positions = hf_positions(model, family, merged=merged)
        tensors = {name: (shape, positions[name]) for name, shape in shapes(model).items()}
        biases = bias_positions(model)
        tensors |= {name: ((model.experts,), (it,)) for name, it in biases.items()}
        if base is None or not config.lora.rank:
            return tensors
        changed = {positions[name] for name in shapes(model) if is_adapted(config, name)}
        names = {it.name for both in changed for it in both}
        return {name: it for name, it in tensors.items() if it[1][0].name in names}
    prefix = f"model.{PREFIX}"
    own = stored.manifest["tensors"].items()
    named = {name.removeprefix(prefix): it for name, it in own if name.startswith(prefix)}
    return {
        f"{PREFIX}{name}": (tuple(description["shape"]), (TensorPosition(name),))
        for name, description in named.items()
    }


def _config(model: Model, kind: Dtype) -> dict[str, Any]:
    if model.source == "hooks":  # whose own code reads the weights
        sizes = {"vocab_size": model.vocab, "hidden_size": model.hidden}
        return {"model_type": "hooks", **sizes, "torch_dtype": kind.torch_name}
    if model.source == "hf":
        plain = {name: value for name, value in model.hf_config.items() if name != "dtype"}
        return plain | {"torch_dtype": kind.torch_name}
    try:
        return write_shape(model) | {"torch_dtype": kind.torch_name}
    except UnsupportedError as error:
        raise UserError("model", f"transformers has no such model: {error}") from error


def _require_accepted(hf_config: dict[str, Any], model: Model) -> None:
    """Raise a UserError if an installed transformers refuses this config.json.

    It has read the config.json of `model=hf` before.
    """
    if model.source != "own" or find_spec("transformers") is None:
        return
    import transformers

    try:
        transformers.CONFIG_MAPPING[hf_config["model_type"]].from_dict(dict(hf_config))
    except Exception as error:  # its own kinds, and a KeyError for a family that it does not know
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        name = f"transformers {transformers.__version__}"
        message = f"{name} refuses this model as model_type={hf_config['model_type']}: {reason}"
        raise UserError("model", message) from error


def _largest_bias(path: Path, model: Model) -> float:
    """Return the largest preference of an expert that its family's files cannot hold."""
    reader, largest = Reader(path), 0
    for name, stored in reader.tensors.items():
        if name.startswith(BIASES) and not bias_positions(model):
            choice_bias = reader.read(name, stored.shape)
            largest = max(largest, int(choice_bias.abs().max()))
    return largest * BIAS_UNIT


class _Source:
    """The Hugging Face tensors, made from a checkpoint's tensors one after another."""

    def __init__(
        self, path: Path, config: ResolvedConfig, tensors: Tensors, kind: Dtype, note: Note
    ) -> None:
        self.kind = kind
        self._note = note
        self._reader = Reader(path)
        self._parameter_shapes = {name: shape for name, (shape, _) in tensors.items()}
        self._weight: Callable[[str], Tensor] = self._stored
        if config.lora.rank and config.model.source == "own":
            self._weight = merging(config, self._reader)
        self._positions: dict[str, list[tuple[str, TensorPosition]]] = {}
        for name, (_, positions) in tensors.items():
            for position in positions:
                self._positions.setdefault(position.name, []).append((name, position))
        self._done = 0
        self._last_read: tuple[str, Tensor] | None = None
        self._published: dict[str, RecordedTensor] = {}
        if config.model.source == "hf":
            self._published = self._reverted(config)

    def shapes(self, *, changed: bool = False) -> Shapes:
        """Return the shapes of the tensors to write; with `changed`, of what differs from the base."""
        if self._published:
            return {
                name: tensor.shape
                for name, tensor in self._published.items()
                if not changed or not tensor.sources or CHANGED in tensor.sources
            }
        return {
            name: position.shape(self._parameter_shapes[own])
            for name, own_positions in self._positions.items()
            for own, position in own_positions
        }

    def _reverted(self, config: ResolvedConfig) -> dict[str, RecordedTensor]:
        """Return the tensors of published files, in the form of the base's if its folder is still there."""
        hf_model, frozen = build(config.model), dict[str, RecordedTensor]()
        if config.model.init_from is not None:
            with nullcontext() if config.lora.rank else suppress(BadFileError, OSError):
                # The model remembers the conversions of these files.
                frozen = find(Path(config.model.init_from), hf_model)

        def has_adapter(name: str) -> bool:
            return f"model.{PREFIX}{name.removesuffix('.weight')}.adapter.a" in self._reader.tensors

        def recorded(name: str, shape: Shape) -> RecordedTensor:
            own = f"{PREFIX}{name}"

            def fill(memory: Tensor, offsets: Shape) -> None:
                if f"model.{own}" in self._reader.tensors:
                    value = self._read_parameter(own, TensorPosition(name))
                elif has_adapter(name):
                    dtype = torch.promote_types(memory.dtype, torch.float32)
                    whole = torch.empty(shape, dtype=dtype)
                    frozen[name].fill(whole, (0,) * whole.ndim)
                    value = with_adapter(config.lora, self._reader, f"model.{own}", whole)
                else:
                    frozen[name].fill(memory, offsets)
                    return
                memory.copy_(value[box_slices(memory, offsets)])

            is_frozen = config.lora.rank and name in frozen and not has_adapter(name)
            return RecordedTensor(shape, fill, frozen[name].sources if is_frozen else [CHANGED])

        shapes = {name: tuple(it.shape) for name, it in named_tensors(hf_model)}
        return reverted({name: recorded(name, shape) for name, shape in shapes.items()}, hf_model)

    def bytes_of(self, names: Iterable[str]) -> Iterator[memoryview]:
        for name in names:
            self._done += 1
            self._note(name, self._done, len(self._published or self._positions))
            for block in self._hf_tensor(name):
                numbers: Any = block.contiguous().view(-1).view(torch.uint8).numpy()
                yield memoryview(numbers)

    def _hf_tensor(self, name: str) -> Iterator[Tensor]:
        """Yield one Hugging Face tensor; several of ours side by side form one, along its last dimension."""
        values = []
        dtype = torch.float32 if name.endswith(IN_FP32) else getattr(torch, self.kind.torch_name)
        if name in self._published:
            memory = torch.empty(self._published[name].shape, dtype=dtype)
            self._published[name].fill(memory, (0,) * memory.ndim)
            yield memory
            return
        for parameter_name, position in self._positions[name]:
            value = self._read_parameter(parameter_name, position).to(dtype)
            values.append(value.mT if position.transposed else value)
        if position.every > 1:
            yield torch.stack(values, dim=-1).flatten(-2)
        else:
            yield values[0] if len(values) == 1 else torch.cat(values, dim=position.axis)

    def _read_parameter(self, name: str, position: TensorPosition) -> Tensor:
        """Return one part; experts of a matrix follow each other, so it is read once and kept for all."""
        if self._last_read is None or self._last_read[0] != name:
            self._last_read = None
            read = self._bias if name.startswith(BIASES) else self._weight
            self._last_read = name, read(name)
        value = self._last_read[1]
        return value if position.expert is None else value[position.expert]

    def _bias(self, name: str) -> Tensor:
        return self._reader.read(name, self._parameter_shapes[name]) * BIAS_UNIT

    def _stored(self, name: str) -> Tensor:
        return self._reader.weights(f"model.{name}", self._parameter_shapes[name])

"""`torch.cuda` of a host whose GPUs are not there: streams, events and properties; waits are recorded."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from nanoscale.rehearse.played.patches import Patches


@dataclass(frozen=True)
class Gpu:
    """A GPU and its host, as torch.cuda describes them."""

    name: str
    memory: int
    """Bytes."""
    devices: int
    """GPUs of a host."""
    capability: Sequence[int] = (9, 0)
    """CUDA's compute capability, major and minor."""


class Streams:
    """The stream that operations go to, by number: 0 is the default stream."""

    def __init__(self, wait: Callable[[str], None]) -> None:
        self.current = 0
        self.wait = wait
        self._made = 0

    def patch(self, patches: Patches, index: int) -> None:
        """Replace the streams and events of torch.cuda and torch.accelerator."""
        streams, device = self, torch.device("cuda", index)

        class Event:
            def __init__(self, *_: Any, **__: Any) -> None:
                self.device = device

            def record(self, *_: Any) -> Event:
                return self

            def wait(self, *_: Any) -> None: ...

            def synchronize(self) -> None:
                streams.wait("Event.synchronize")

            def query(self) -> bool:
                return True

            def elapsed_time(self, _: Any) -> float:
                return 1.0

        class Stream:
            device_index = index

            def __init__(self, *_: Any, number: int | None = None, **__: Any) -> None:
                if number is None:
                    streams._made += 1
                    number = streams._made
                self.number, self.device = number, device

            def wait_stream(self, *_: Any) -> None: ...

            def wait_event(self, *_: Any) -> None: ...

            def record_event(self, *_: Any) -> Event:
                return Event()

            def synchronize(self) -> None:
                streams.wait("Stream.synchronize")

            def query(self) -> bool:
                return True

            def is_capturing(self) -> bool:
                return False

            def __enter__(self) -> Stream:
                return self

            def __exit__(self, *_: Any) -> None: ...

        @contextmanager
        def on_stream(stream: Any) -> Iterator[None]:
            before, streams.current = streams.current, getattr(stream, "number", 0)
            try:
                yield
            finally:
                streams.current = before

        def current(*_: Any) -> Stream:
            return Stream(number=streams.current)

        for name, value in {
            "Stream": Stream,
            "Event": Event,
            "stream": on_stream,
            "current_stream": current,
            "default_stream": lambda *_: Stream(number=0),
            "is_current_stream_capturing": lambda: False,
            "synchronize": lambda *_: streams.wait("torch.cuda.synchronize"),
        }.items():
            patches.replace(torch.cuda, name, value)
        patches.replace(torch.accelerator, "current_stream", current)


class _Generator(torch.Generator):
    """Nothing is drawn on the GPU, so one of the host serves."""

    def __new__(cls, device: Any = None) -> Any:
        return super().__new__(cls)


def pretend(patches: Patches, gpu: Gpu, index: int, memory: Any) -> None:
    """Let torch.cuda describe GPU `index` of such a host; `memory` has the bytes `live` and `peak`."""

    class Properties:
        name, total_memory = gpu.name, gpu.memory
        major, minor = gpu.capability
        multi_processor_count, warp_size = 132, 32

    values = {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "_lazy_init": lambda: None,
        "device_count": lambda: gpu.devices,
        "current_device": lambda: index,
        "set_device": lambda *_: None,
        "device": lambda *_: nullcontext(),
        "get_device_name": lambda *_: gpu.name,
        "get_device_capability": lambda *_: tuple(gpu.capability),
        "get_device_properties": lambda *_: Properties,
        "is_bf16_supported": lambda *_, **__: True,
        "memory_allocated": lambda *_: memory.live,
        "max_memory_allocated": lambda *_: memory.peak,
        "memory_reserved": lambda *_: memory.allocator.reserved,
        "max_memory_reserved": lambda *_: memory.allocator.reserved,
        "reset_peak_memory_stats": lambda *_: memory.reset_peak(),
        "empty_cache": lambda: None,
        "manual_seed": lambda *_: None,
        "manual_seed_all": lambda *_: None,
        "get_rng_state": lambda *_: torch.empty(0, dtype=torch.uint8),
        "set_rng_state": lambda *_: None,
    }
    for name, value in values.items():
        patches.replace(torch.cuda, name, value)
    patches.replace(torch, "Generator", _Generator)
    patches.replace(torch.accelerator, "is_available", lambda: True)
    kind = torch.device("cuda")
    patches.replace(torch.accelerator, "current_accelerator", lambda *_, **__: kind)
    patches.replace(torch.backends.cuda, "is_flash_attention_available", lambda: True)
    patches.replace(torch.Tensor, "pin_memory", lambda it, *_: it)
    patches.replace(torch.Tensor, "is_pinned", lambda *_: False)
    patches.replace(torch.Tensor, "record_stream", lambda *_: None)
    from nanoscale.checkpoint import staging

    for name in ("pin_memory", "unpin_memory"):
        patches.replace(staging, name, lambda *_: None)

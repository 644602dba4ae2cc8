"""A driver for triton, of a GPU that is not there: kernels are compiled for it, and their launches are written down."""

from __future__ import annotations

from typing import Any

import triton  # type: ignore[import-not-found,import-untyped,unused-ignore]
from triton.backends.compiler import GPUTarget  # type: ignore[import-not-found,import-untyped,unused-ignore]

STREAM = 77


class NoGpu:
    """``launches``: the grid and the other arguments of each. All public names but this one are triton's."""

    def __init__(self, capability: int = 90) -> None:
        self.capability = capability
        self.launches: list[tuple[Any, ...]] = []
        self.utils = self

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.capability, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int | None = None) -> int:
        return STREAM

    def get_device_properties(self, device: int) -> dict[str, int]:
        return {"max_shared_mem": 1 << 16}

    def load_binary(self, *binary: Any) -> tuple[Any, ...]:
        module, function, registers, spills, threads = self, 2, 32, 0, 1024  # another driver would refuse to unload self
        return (module, function, registers, spills, threads)[: 5 if hasattr(triton, "knobs") else 4]

    def unload_module(self, module: NoGpu) -> None:
        pass

    def launcher_cls(self, source: Any, metadata: Any) -> NoGpu:
        return self

    def __call__(self, x: int, y: int, z: int, *arguments: Any) -> None:
        self.launches.append(((x, y, z), *arguments))

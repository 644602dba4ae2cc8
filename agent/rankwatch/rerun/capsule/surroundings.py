"""What a forward computes with beside its inputs: random state, autocast, gradients, and flags of torch that change numbers."""

from __future__ import annotations

import functools
import os
import platform
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.distributed
from torch import Tensor

_DEVICES = ("cpu", "cuda")

_FLAGS = {
    "torch.backends.cuda.matmul": (
        "allow_tf32", "allow_fp16_reduced_precision_reduction", "allow_bf16_reduced_precision_reduction",
        "allow_fp16_accumulation",
    ),
    "torch.backends.cudnn": ("enabled", "benchmark", "deterministic", "allow_tf32"),
    "torch.backends.mkldnn": ("enabled",),
}  # fmt: skip


def surroundings() -> dict[str, Any]:
    """As JSON. The random state is not in it: it consists of tensors; see ``random_state``."""
    return {
        "grad": torch.is_grad_enabled(),
        "inference": torch.is_inference_mode_enabled(),
        "autocast": {
            device: [torch.is_autocast_enabled(device), _name_of(torch.get_autocast_dtype(device))] for device in _DEVICES
        },
        "default_dtype": _name_of(torch.get_default_dtype()),
        "matmul_precision": torch.get_float32_matmul_precision(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "threads": torch.get_num_threads(),
        "world_size": _world_size(),
        "flush_denormal": _flushes_denormals(),
        "flags": {place: {name: value for name, value in _flags(place)} for place in _FLAGS},
        "sdp": {name: getattr(torch.backends.cuda, f"{name}_sdp_enabled")() for name in _SDP},
    }


_SDP = ("flash", "mem_efficient", "math")


def versions() -> dict[str, str]:
    found = {"python": platform.python_version(), "torch": torch.__version__, "platform": platform.platform()}
    if torch.version.cuda:
        found["cuda"] = torch.version.cuda
    if torch.cuda.is_initialized():
        found["gpu"] = torch.cuda.get_device_name()
        found["cudnn"] = str(torch.backends.cudnn.version())
    found["cpu"] = torch.backends.cpu.get_cpu_capability()
    return found


def random_state(devices: set[torch.device]) -> dict[str, Tensor]:
    """The state of torch's random numbers now, on the CPU and on these devices."""
    found = {"cpu": torch.get_rng_state()}
    found.update({str(device): torch.cuda.get_rng_state(device) for device in devices if device.type == "cuda"})
    return found


@contextmanager
def surrounded(by: Mapping[str, Any]) -> Iterator[None]:
    """The flags and modes that ``surroundings`` returned, for a while."""
    before = surroundings()
    with ExitStack() as stack:
        try:
            _set(by)
            stack.enter_context(torch.inference_mode(by["inference"]))
            stack.enter_context(torch.set_grad_enabled(by["grad"]))
            for device, (is_on, dtype) in by["autocast"].items():
                if device == "cpu" or torch.cuda.is_available():
                    stack.enter_context(torch.autocast(device, dtype=getattr(torch, dtype), enabled=is_on))
            yield
        finally:
            _set(before)


def _set(by: Mapping[str, Any]) -> None:
    torch.set_default_dtype(getattr(torch, by["default_dtype"]))
    torch.set_float32_matmul_precision(by["matmul_precision"])
    torch.use_deterministic_algorithms(by["deterministic"], warn_only=True)
    torch.set_flush_denormal(by["flush_denormal"])
    if by["threads"] <= (os.cpu_count() or 1):
        torch.set_num_threads(by["threads"])
    for place, flags in by["flags"].items():
        for name, value in flags.items():
            if name in _FLAGS.get(place, ()) and hasattr(_at(place), name):
                setattr(_at(place), name, value)
    for name, value in by["sdp"].items():
        if name in _SDP:
            getattr(torch.backends.cuda, f"enable_{name}_sdp")(value)


def _at(place: str) -> Any:
    return functools.reduce(getattr, place.split(".")[1:], torch)


def _flags(place: str) -> Iterator[tuple[str, bool]]:
    for name in _FLAGS[place]:
        try:
            value = getattr(_at(place), name)
        except (AttributeError, RuntimeError):  # not in this release, or set by the newer interface
            continue
        if type(value) is bool:
            yield name, value


def _name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _world_size() -> int:
    has_group = torch.distributed.is_available() and torch.distributed.is_initialized()
    return torch.distributed.get_world_size() if has_group else 1


def _flushes_denormals() -> bool:
    smallest = torch.finfo(torch.float32).tiny
    return bool((torch.tensor([smallest, smallest], device="cpu") / 2 == 0).all())

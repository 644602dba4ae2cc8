"""Names the GPU that computed, so that a person finds it in the rack."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

_DRIVER = Path("/proc/driver/nvidia/version")


def describe_gpus(devices: Iterable[torch.device]) -> str:
    """``GPU 3: NVIDIA H200, GPU-5f3a..., PCI bus 0000:9a:00.0, driver 550.54.15``; empty on the CPU."""
    indices = sorted({device.index or 0 for device in devices if device.type == "cuda"})
    found = [*map(_describe_gpu, indices)]
    if indices and (driver := _driver()):
        found.append(f"driver {driver}")
    return ", ".join(found)


def gpu_of(device: torch.device) -> str:
    """``GPU-5f3a...``, or its PCI bus where torch does not tell the UUID; empty if it is none."""
    if device.type != "cuda":
        return ""
    uuid, bus = _identifiers(torch.cuda.get_device_properties(device))
    return f"GPU-{uuid}" if uuid is not None else bus


def _describe_gpu(index: int) -> str:
    properties = torch.cuda.get_device_properties(index)
    uuid, bus = _identifiers(properties)
    parts = [f"GPU {index}: {properties.name}"]
    if uuid is not None:
        parts.append(f"GPU-{uuid}")
    if bus:
        parts.append(bus)
    return ", ".join(parts)


def _identifiers(properties: Any) -> tuple[Any, str]:
    """The UUID or None, and the PCI bus or an empty text: not each version of torch has them."""
    bus = [int(getattr(properties, f"pci_{part}_id", -1)) for part in ("domain", "bus", "device")]
    return getattr(properties, "uuid", None), "PCI bus {:04x}:{:02x}:{:02x}.0".format(*bus) if min(bus) >= 0 else ""


def _driver() -> str:
    """The version of NVIDIA's driver; empty if it cannot be read."""
    try:
        found = re.search(r"Kernel Module(?: for \w+)?\s+(\S+)", _DRIVER.read_text())
    except OSError:
        return ""
    return found[1] if found else ""

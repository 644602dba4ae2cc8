"""Names the GPU that computed, so that a person finds it in the rack."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

import torch

_DRIVER = Path("/proc/driver/nvidia/version")


def describe_gpus(devices: Iterable[torch.device]) -> str:
    """``GPU 3: NVIDIA H200, GPU-5f3a..., PCI bus 0000:9a:00.0, driver 550.54.15``; empty on the CPU."""
    indices = sorted({device.index or 0 for device in devices if device.type == "cuda"})
    found = [*map(_describe_gpu, indices)]
    if indices and (driver := _driver()):
        found.append(f"driver {driver}")
    return ", ".join(found)


def _describe_gpu(index: int) -> str:
    properties = torch.cuda.get_device_properties(index)
    uuid = getattr(properties, "uuid", None)
    bus = [int(getattr(properties, f"pci_{part}_id", -1)) for part in ("domain", "bus", "device")]
    parts = [f"GPU {index}: {properties.name}"]
    if uuid is not None:
        parts.append(f"GPU-{uuid}")
    if min(bus) >= 0:
        parts.append("PCI bus {:04x}:{:02x}:{:02x}.0".format(*bus))
    return ", ".join(parts)


def _driver() -> str:
    """The version of NVIDIA's driver; empty if it cannot be read."""
    try:
        found = re.search(r"Kernel Module(?: for \w+)?\s+(\S+)", _DRIVER.read_text())
    except OSError:
        return ""
    return found[1] if found else ""

"""Names the GPU that computed, so that a person finds it in the rack."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import torch

from ...shared.types.gpu import NO_GPU, Gpu

log = logging.getLogger(__name__)

_DRIVERS = Path("/proc/driver/nvidia/version"), Path("/sys/module/amdgpu/version")


def describe_gpus(devices: Iterable[torch.device]) -> str:
    """``GPU 3: NVIDIA H200, GPU-5f3a..., PCI bus 0000:9a:00.0, driver 550.54.15``; empty on the CPU."""
    found = {device.index or 0: gpu_of(device) for device in devices if device.type == "cuda"}
    drivers = dict.fromkeys(f"driver {gpu.driver}" for gpu in found.values() if gpu.driver)
    gpus = (f"GPU {index}: {replace(found[index], driver='').describe()}" for index in sorted(found))
    return ", ".join([*gpus, *drivers])


def gpu_of(device: torch.device | None) -> Gpu:
    """NO_GPU on the CPU: CUDA is asked only where a tensor is on it already, so it is never initialised here.

    What cannot be read is empty: no training ends because its GPU has no name.
    """
    if device is None or device.type != "cuda":
        return NO_GPU
    try:
        properties = torch.cuda.get_device_properties(device)
        uuid = getattr(properties, "uuid", None)  # not each version of torch has it, nor the PCI bus
        bus = [int(getattr(properties, f"pci_{part}_id", -1)) for part in ("domain", "bus", "device")]
        place = "{:04x}:{:02x}:{:02x}.0".format(*bus) if min(bus) >= 0 else ""
        return Gpu(str(properties.name), f"GPU-{uuid}" if uuid is not None else "", place, _driver())
    except Exception:
        log.exception("rankwatch: an error of ours: the name of %s cannot be read; training goes on", device)
        return NO_GPU


def _driver() -> str:
    """The version of NVIDIA's or AMD's driver; empty if it cannot be read."""
    for path in _DRIVERS:
        try:
            text = path.read_text(encoding="utf-8", errors="replace").strip()
        except OSError:
            continue
        found = re.search(r"Kernel Module(?: for \w+)?\s+(\S+)", text) or re.fullmatch(r"(\S+)", text)
        if found:
            return found[1]
    return ""

"""Checks of this rank's torch and GPU."""

from __future__ import annotations

import platform
import re
from pathlib import Path

import torch
import torch.distributed as dist

from ... import __version__
from ..result import CheckResult, fail, ok, skip, warn

MIB = 2**20
ALLOCATED = 256 * MIB
SIDE = 512
BUSY = 0.9
"""A GPU with less than this share of its memory free is also used by another process."""
_DRIVER = Path("/proc/driver/nvidia/version")


def versions() -> dict[str, str]:
    """The versions that must be the same on all ranks."""
    return {
        "torch": torch.__version__,
        "CUDA": str(torch.version.cuda or getattr(torch.version, "hip", None) or "none"),
        "NCCL": ".".join(map(str, torch.cuda.nccl.version())) if has_nccl() else "none",
        "driver": driver(_DRIVER.read_text()) if _DRIVER.exists() else "none",
        "Python": platform.python_version(),
        "rankwatch": __version__,
    }


def driver(text: str) -> str:
    """The version in ``/proc/driver/nvidia/version``."""
    found = re.search(r"Kernel Module(?: for \w+)?\s+(\S+)", text)
    return found[1] if found else "unknown"


def has_nccl() -> bool:
    return torch.cuda.is_available() and dist.is_nccl_available()


def target(backend: str, local_rank: int) -> torch.device:
    """The device of this rank's tensors. Some launchers show each rank only its own GPU, as number 0."""
    if backend != "nccl":
        return torch.device("cpu")
    return torch.device("cuda", local_rank if torch.cuda.device_count() > 1 else 0)


def gpu(backend: str, local_rank: int, local_ranks: int) -> CheckResult:
    """Writes to the GPU's memory and checks a product of matrices."""
    if not torch.cuda.is_available() and backend == "nccl":
        advice = "nvidia-smi on that host; CUDA_VISIBLE_DEVICES; does the container or the job have its GPUs?"
        return fail("gpu", "torch finds no GPU here, and others have one", advice)
    if not torch.cuda.is_available():
        return _without(_DRIVER.exists())
    count = torch.cuda.device_count()
    if count > 1 and local_rank >= count:
        advice = "start at most one rank for each GPU: --nproc-per-node, CUDA_VISIBLE_DEVICES, --gpus-per-node"
        return fail("gpu", f"local rank {local_rank} has no GPU: {count} here, for {local_ranks} ranks", advice)
    device = target("nccl", local_rank)
    name = torch.cuda.get_device_name(device)
    free, total = torch.cuda.mem_get_info(device)
    torch.full((ALLOCATED // 8,), 1, dtype=torch.int64, device=device).sum().item()
    if not product_is_right(device):
        return fail(
            "gpu", f"{name}: a product of matrices has wrong elements", "take this GPU out of service: it miscalculates"
        )
    found = f"{name}: {free // MIB} of {total // MIB} MiB free, {ALLOCATED // MIB} MiB written, a product is right"
    if free < BUSY * total:
        return warn("gpu", found, "something else is on this GPU: nvidia-smi; end what an earlier job left")
    return ok("gpu", found)


def product_is_right(device: torch.device) -> bool:
    """Multiplies small whole numbers: every precision, TF32 included, must give the exact product."""
    numbers = torch.arange(SIDE * SIDE).reshape(SIDE, SIDE)
    left, right = (numbers % 5).float(), (numbers % 7).float()
    return torch.equal((left.to(device) @ right.to(device)).cpu(), left @ right)


def _without(has_driver: bool) -> CheckResult:
    if has_driver and torch.version.cuda is None:
        found = f"this host has an NVIDIA driver, and torch {torch.__version__} is built without CUDA"
        return warn("gpu", found, "install a CUDA build of torch")
    if has_driver:
        return warn(
            "gpu", "this host has an NVIDIA driver, and torch finds no GPU", "nvidia-smi; CUDA_VISIBLE_DEVICES; --gpus"
        )
    if not product_is_right(torch.device("cpu")):
        return fail("gpu", "a product of matrices has wrong elements on this CPU", "take this host out of service")
    return skip("gpu", "no GPU here: all is tried on the CPU, by gloo")

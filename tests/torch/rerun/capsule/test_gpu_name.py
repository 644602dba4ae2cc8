"""The name of a rank's GPU: read only where a tensor is on one, and never at the cost of the training."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from rankwatch.rerun.capsule import gpu_name as machine
from rankwatch.shared.types.gpu import NO_GPU, Gpu

FULL = SimpleNamespace(name="NVIDIA H200", uuid="5f3a", pci_domain_id=0, pci_bus_id=0x9A, pci_device_id=0)
CUDA = torch.device("cuda", 3)
NVIDIA = """\
NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  550.54.15  Release Build  (dvs-builder@U16)
GCC version:  gcc version 11.4.0"""


@pytest.fixture(autouse=True)
def of_nvidia(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    driver = tmp_path / "version"
    driver.write_text(NVIDIA)
    monkeypatch.setattr(machine, "_DRIVERS", (tmp_path / "missing", driver))
    return driver


def test_on_the_cpu_cuda_is_not_asked() -> None:
    assert machine.gpu_of(None) is NO_GPU
    assert machine.gpu_of(torch.device("cpu")) is NO_GPU
    assert machine.gpu_of(torch.device("meta")) is NO_GPU
    assert torch.cuda.is_available() or not torch.cuda.is_initialized()


@pytest.mark.parametrize(
    ("properties", "found", "name"),
    [
        (FULL, Gpu("NVIDIA H200", "GPU-5f3a", "0000:9a:00.0", "550.54.15"), "GPU-5f3a"),
        (
            SimpleNamespace(name="NVIDIA H200", pci_domain_id=1, pci_bus_id=2, pci_device_id=3),
            Gpu("NVIDIA H200", "", "0001:02:03.0", "550.54.15"),
            "PCI bus 0001:02:03.0",
        ),
        (SimpleNamespace(name="NVIDIA H200"), Gpu("NVIDIA H200", driver="550.54.15"), ""),  # torch 2.4
    ],
)
def test_what_torch_knows_of_it(properties: SimpleNamespace, found: Gpu, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    assert machine.gpu_of(CUDA) == found
    assert found.id == name
    assert found.is_known


def test_what_cannot_be_read_costs_nothing(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    def broken(device: torch.device) -> None:
        raise RuntimeError("CUDA error: unknown error")

    monkeypatch.setattr(torch.cuda, "get_device_properties", broken)
    assert machine.gpu_of(CUDA) is NO_GPU
    assert "the name of cuda:3 cannot be read; training goes on" in caplog.text


@pytest.mark.parametrize(("text", "version"), [("6.7.0\n", "6.7.0"), ("", ""), ("what is this", "")])
def test_other_drivers(text: str, version: str, of_nvidia: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    of_nvidia.write_text(text)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: FULL)
    assert machine.gpu_of(CUDA).driver == version


def test_the_name_in_a_close_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: FULL)
    described = "GPU 3: NVIDIA H200, GPU-5f3a, PCI bus 0000:9a:00.0, driver 550.54.15"
    assert machine.describe_gpus([CUDA, torch.device("cpu"), CUDA]) == described
    assert machine.describe_gpus([torch.device("cpu")]) == ""

"""The GPU that a rank's model is on, by all that finds it again: in the rack, and in other runs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from .fields import string

_Text = Annotated[str, string(128)]


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU. Each text is empty where it is not known, and all are on the CPU.

    ``name`` is the model's, such as ``NVIDIA H200``; ``uuid`` begins with ``GPU-``; ``bus`` is the PCI bus, ``0000:9a:00.0``;
    ``driver`` is the version of the host's driver.
    """

    name: _Text = ""
    uuid: _Text = ""
    bus: _Text = ""
    driver: _Text = ""

    @property
    def is_known(self) -> bool:
        return bool(self.id or self.name)

    @property
    def id(self) -> str:
        """What tells it from the other GPUs of its host: the UUID, or else the PCI bus."""
        return self.uuid or (f"PCI bus {self.bus}" if self.bus else "")

    def describe(self) -> str:
        """``NVIDIA H200, GPU-5f3a..., PCI bus 0000:9a:00.0, driver 550.54.15``; empty on the CPU."""
        bus = f"PCI bus {self.bus}" if self.bus else ""
        driver = f"driver {self.driver}" if self.driver else ""
        return ", ".join(part for part in (self.name, self.uuid, bus, driver) if part)


NO_GPU = Gpu()

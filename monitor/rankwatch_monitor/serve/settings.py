"""How a collector is set up: what ``rankwatch run`` and ``rankwatch collector`` are told alike."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from ..decide.core.options import Options
from ..views.text import FRAMES_ON_SCREEN


@dataclass(frozen=True, slots=True)
class Settings:
    """The settings of one collector."""

    runs_dir: Path
    options: Options = field(default_factory=Options)
    """What it decides by."""
    listen: str | None = None
    """``tcp://HOST:PORT``; port 0 picks a free one. None: the address of the connection file, or the default one."""
    address: str | None = None
    """The address in the connection file, where it is not ``listen``; port 0 stands for the bound port."""
    connection_file: Path | None = None
    """Where ranks find the address and the keys. If it exists and its server key lies beside it, the keys and the address are
    used again: to the ranks, this collector is the one that crashed. None: of ``run`` a private file."""
    job: str = ""
    """The job name for ranks that know none."""
    frames: int = FRAMES_ON_SCREEN
    """So many of the last frames are printed above a verdict."""
    on_verdict: str = ""
    """A shell command; see ``Notifier``."""
    archive: str = ""
    """The URL of an archive; see ``Archiver``."""
    keep_keys: bool = False
    """At the end the connection file and the keys stay, for the next collector."""
    insecure: bool = False
    """Links are in plain text, and every process of this machine may speak; on loopback alone."""

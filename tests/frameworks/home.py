"""Where a framework is installed: a virtual environment of its own, which sees the packages of the one that runs us."""

from __future__ import annotations

import importlib.metadata
import os
import subprocess
import sys
import venv
from pathlib import Path

from frameworks.script import Script

KEPT = ("torch", "numpy")
"""Not replaced by what a framework would rather have: two builds of torch in one environment break each other."""


class Home:
    """``folder`` is made where it is not there. Its packages are installed once, and again when the script names others."""

    def __init__(self, cache: Path, script: Script) -> None:
        self.folder = cache / script.name
        self.python = self.folder / "bin" / "python"
        done = self.folder / "packages"
        wanted = " ".join(script.packages)
        if not self.python.exists():
            venv.create(self.folder, with_pip=True, symlinks=True)
            ours = [path for path in sys.path if path.endswith("site-packages")]
            self._site().joinpath("ours.pth").write_text(
                "".join(f"import site; site.addsitedir({path!r})\n" for path in ours)
            )
        if not done.exists() or done.read_text() != wanted:
            kept = [f"{name}=={importlib.metadata.version(name).partition('+')[0]}" for name in KEPT]
            constraints = self.folder / "constraints.txt"
            constraints.write_text("\n".join(kept) + "\n")
            install = ["-m", "pip", "install", "-q", "-c", str(constraints), *script.packages]
            subprocess.run([self.python, *install], check=True)
            done.write_text(wanted)

    def _site(self) -> Path:
        return next(self.folder.glob("lib/python*/site-packages"))

    def version(self, package: str) -> str:
        ask = f"import importlib.metadata as m; print(m.version({package!r}))"
        return subprocess.run([self.python, "-c", ask], capture_output=True, text=True, check=True).stdout.strip()

    def command(self, launch: tuple[str, ...], path: Path) -> list[str]:
        """``torchrun`` is started as a module: the program of that name belongs to the environment that has torch."""
        run = [str(self.python), "-m", "torch.distributed.run", "--standalone"]
        return [*run, *launch[1:], str(path)] if launch[0] == "torchrun" else [*launch, str(path)]

    def environment(self, **more: str) -> dict[str, str]:
        """As a user has it: nothing of ours is on ``PYTHONPATH``. One thread: sums are added in one order."""
        path = f"{self.folder / 'bin'}{os.pathsep}{os.environ['PATH']}"
        calm = {"OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "0", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
        kept = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        return kept | {"PATH": path, "VIRTUAL_ENV": str(self.folder)} | calm | more

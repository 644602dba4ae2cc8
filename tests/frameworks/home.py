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
            for program in importlib.metadata.entry_points(group="console_scripts"):
                self._write_program(program.name, program.module, program.attr)
        if not done.exists() or done.read_text() != wanted:
            kept = [f"{name}=={importlib.metadata.version(name).partition('+')[0]}" for name in KEPT]
            constraints = self.folder / "constraints.txt"
            constraints.write_text("\n".join(kept) + "\n")
            install = ["-m", "pip", "install", "-q", "-c", str(constraints), *script.packages]
            subprocess.run([self.python, *install], check=True)
            done.write_text(wanted)

    def _site(self) -> Path:
        return next(self.folder.glob("lib/python*/site-packages"))

    def _write_program(self, name: str, module: str, function: str) -> None:
        """``torchrun`` of the environment that has torch would start its own interpreter, which has no framework."""
        path = self.python.parent / name
        if not path.exists():
            path.write_text(f"#!{self.python}\nimport sys\nfrom {module} import {function}\nsys.exit({function}())\n")
            path.chmod(0o755)

    def version(self, package: str) -> str:
        ask = f"import importlib.metadata as m; print(m.version({package!r}))"
        return subprocess.run([self.python, "-c", ask], capture_output=True, text=True, check=True).stdout.strip()

    def environment(self, **more: str) -> dict[str, str]:
        """As a user has it: nothing of ours is on ``PYTHONPATH``. One thread: sums are added in one order."""
        path = f"{self.folder / 'bin'}{os.pathsep}{os.environ['PATH']}"
        calm = {"OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "0", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
        kept = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        return kept | {"PATH": path, "VIRTUAL_ENV": str(self.folder)} | calm | more

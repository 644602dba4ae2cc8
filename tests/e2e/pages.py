"""The README and the pages of ``docs/``, and a user's folder in which their commands run."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

from jobs import INTERPRETER, ROOT, environment, finished
from ports import free_port

README = (ROOT / "README.md").read_text()
FOLDER = ROOT / "docs" / "pages"
PAGES = {"README.md": README} | {path.relative_to(FOLDER).as_posix(): path.read_text() for path in FOLDER.rglob("*.md")}
ALL = "".join(PAGES.values())


def blocks(text: str, language: str) -> list[str]:
    fenced = re.findall(r"^``` ?\{?\.?(\w*)\}?\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    return [block for word, block in fenced if word == language]


def commands(page: str) -> list[str]:
    return [line for block in blocks(PAGES[page], "bash") for line in block.splitlines()]


def python_of(page: str, first_line: str) -> str:
    """The only Python block that begins with this line."""
    (found,) = (block for block in blocks(PAGES[page], "python") if block.startswith(first_line))
    return found


def shell_environment(folder: Path) -> dict[str, str]:
    """An environment in which ``rankwatch`` and ``torchrun`` are this Python's."""
    tools = folder / "bin"
    tools.mkdir(exist_ok=True)
    for name, module in (("rankwatch", "rankwatch_monitor"), ("torchrun", "torch.distributed.run")):
        (tools / name).write_text(f'#!/bin/sh\nexec {INTERPRETER} -m {module} "$@"\n')
        (tools / name).chmod(0o755)
    return environment(PATH=f"{tools}:{os.environ['PATH']}", MASTER_PORT=str(free_port()))


def run(command: str, folder: Path) -> subprocess.CompletedProcess[str]:
    return finished(["bash", "-c", command], folder, shell_environment(folder))

"""Whose code a file is: the user's, torch's, Python's, an installed package's, or ours."""

from __future__ import annotations

import linecache
import os
import sys
import sysconfig
import time
from functools import lru_cache

_STARTED = time.time()
OURS = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_DEMO = f"{OURS}demo.py"
SITE = f"{os.sep}site-packages{os.sep}", f"{os.sep}dist-packages{os.sep}"
"""In the path of each installed package."""
STANDARD = tuple({os.path.abspath(sysconfig.get_path(name)) + os.sep for name in ("stdlib", "platstdlib")})
"""The folders of Python's own libraries."""

_AROUND = (
    "torch",
    "functorch",
    "triton",
    "einops",
    "opt_einsum",
    "accelerate",
    "lightning",
    "lightning_fabric",
    "pytorch_lightning",
)
"""torch, and packages that only call its operators, or the user's forward, in a way of their own."""


@lru_cache(maxsize=4096)
def owner_of(file: str) -> str:
    """Who has called an operator where a line of this file does: ``user``, ``torch`` or ``ours``.

    Python's own libraries count as torch's. An installed package that is not around torch counts as the user's.
    """
    if file.startswith("<frozen"):
        return "torch"
    path = os.path.abspath(file)
    if path.startswith(OURS):
        return "user" if path == _DEMO else "ours"
    folder = next((folder for folder in SITE if folder in path), None)
    if folder is not None:
        return "torch" if path.rpartition(folder)[2].partition(os.sep)[0] in _AROUND else "user"
    return "torch" if path.startswith((*STANDARD, *_built_from_source())) else "user"


def _built_from_source() -> list[str]:
    """The folders of torch and what is around it, if torch is not in a folder of installed packages."""
    file = getattr(sys.modules.get("torch"), "__file__", None)  # not imported: without it, nothing on a stack is torch's
    return [os.path.join(os.path.dirname(os.path.dirname(file)), name, "") for name in _AROUND] if file else []


@lru_cache(maxsize=4096)
def is_installed(file: str) -> bool:
    """Whether a file is no code of the user's own: Python's, an installed package's, or ours."""
    return owner_of(file) != "user" or any(folder in os.path.abspath(file) for folder in SITE)


def short(file: str) -> str:
    """The path as a person knows it: below the folder they work in, or below the library's."""
    for folder in SITE:
        if folder in file:
            return file.rpartition(folder)[2]
    folders = *STANDARD, *(os.path.join(path, "") for path in (os.environ.get("PWD"), *sys.path[:1]) if path)
    return next((file[len(folder) :] for folder in folders if file.startswith(folder)), file)


def text_of(file: str, line: int) -> str:
    """The line itself; empty if the file cannot be read, or was changed after this process began."""
    try:
        if os.path.getmtime(file) > _STARTED:
            return ""
    except OSError:  # no file: a notebook's cell, say, which linecache knows
        pass
    return linecache.getline(file, line).strip()

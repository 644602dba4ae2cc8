"""A Python that has just started waits until torch is there, and then looks for the model to watch (see attach.py)."""

from __future__ import annotations

import importlib.abc
import os
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType


def wait_for_torch() -> None:
    """Begins to look for the model as soon as torch is there, if this process is to be watched."""
    if os.environ.get("RANKWATCH_ATTACH") != "1" or os.environ.get("RANKWATCH_MODE") == "disabled":
        return
    if "torch" in sys.modules:  # by a .pth file, say
        _look()
    else:
        sys.meta_path.insert(0, _AtImport("torch"))


class _AtImport(importlib.abc.MetaPathFinder):
    """Finds a module as the others do; once it is there, the look-out begins."""

    def __init__(self, name: str) -> None:
        self._name = name

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name != self._name:
            return None
        others = (finder for finder in sys.meta_path if finder is not self)
        spec = next((spec for finder in others if (spec := finder.find_spec(name, path, target)) is not None), None)
        if spec is not None and spec.loader is not None:
            run = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                run(module)
                sys.meta_path.remove(self)
                _look()

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def _look() -> None:
    from .finder import Finder

    Finder().start()

"""What Python runs as it starts in a command that is watched without a change to it: PYTHONPATH leads here (see attach.py).

It waits for torch, and then looks for the model to watch. All else is as without us: this folder is off ``sys.path``, and the
``sitecustomize`` of the user's own has run. Every Python of the command starts like this, so nothing else is imported.
"""

from __future__ import annotations

import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType

_HERE = os.path.dirname(os.path.abspath(__file__))


class _AtImportOfTorch:
    """Finds torch as the other finders do; once it is there, the look-out begins."""

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name != "torch":
            return None
        # As Python does, this passes over those of scripts that can find nothing in this way.
        finds = [find for one in sys.meta_path if one is not self and (find := getattr(one, "find_spec", None))]
        spec = next((spec for find in finds if (spec := find(name, path, target)) is not None), None)
        if spec is not None and spec.loader is not None:
            run = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                run(module)
                if self in sys.meta_path:
                    sys.meta_path.remove(self)
                    _look()

            spec.loader.exec_module = exec_module
        return spec


def _look() -> None:
    try:
        from rankwatch.finder import Finder

        Finder().start()
    except ImportError as error:
        sys.stderr.write(f"rankwatch: this process is not watched: {sys.executable} cannot import rankwatch ({error})\n")
    except Exception:
        import logging

        logging.getLogger("rankwatch").exception("rankwatch: this process is not watched, by an error of its own")


def _run_the_users() -> None:
    ours = sys.modules.pop("sitecustomize")
    try:
        __import__("sitecustomize")
    except ImportError as error:
        if error.name != "sitecustomize":
            raise
    finally:
        sys.modules.setdefault("sitecustomize", ours)  # Python's import looks for what it has begun with


sys.path[:] = [place for place in sys.path if os.path.abspath(place) != _HERE]
if os.environ.get("RANKWATCH_ATTACH") == "1" and os.environ.get("RANKWATCH_MODE") != "disabled":
    sys.meta_path.insert(0, _AtImportOfTorch())
_run_the_users()

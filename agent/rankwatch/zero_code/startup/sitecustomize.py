"""Python runs this file at its start when a command is watched without code: attach.py puts this folder on PYTHONPATH.

Once torch is imported, the search for the model to watch begins. A rank of torchrun that crashes before says why in torchrun's
summary. Nothing else changes for the command: this folder is taken off ``sys.path``, and the user's own ``sitecustomize`` runs.
Every Python process of the command starts here, so this file imports only what Python itself has imported by then, or has
built in.
"""

from __future__ import annotations

import atexit
import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType

_HERE = os.path.dirname(os.path.abspath(__file__))


class _AtImportOfTorch:
    """Finds torch by the other finders, and starts the search for models once torch is imported."""

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name != "torch":
            return None
        # A finder without find_spec, which some scripts install, is skipped: so does Python.
        finds = [find for one in sys.meta_path if one is not self and (find := getattr(one, "find_spec", None))]
        spec = next((spec for find in finds if (spec := find(name, path, target)) is not None), None)
        if spec is not None and spec.loader is not None:
            run = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                run(module)
                if self in sys.meta_path:
                    sys.meta_path.remove(self)
                    _start_finder()

            spec.loader.exec_module = exec_module
        return spec


def _start_finder() -> None:
    import logging  # not before torch: many a process that starts here never imports either
    from contextlib import suppress

    log = logging.getLogger("rankwatch")
    try:
        from rankwatch.errors import UsageError
        from rankwatch.shared.system.log_lines import write_lines_of_a_rank
        from rankwatch.zero_code.finder import Finder

        with suppress(UsageError):  # the watch raises it, as for any bad option
            write_lines_of_a_rank()
        Finder().start()
    except ImportError as error:
        log.warning("rankwatch: this process is not watched: %s cannot import rankwatch (%s)", sys.executable, error)
    except Exception:
        log.exception("rankwatch: this process is not watched, by an error of its own")


def _report_crash() -> None:
    error = getattr(sys, "last_value", None)  # of an exception that nobody caught
    if error is None:
        return
    try:
        from rankwatch.zero_code.crash import report
    except ImportError:  # this Python has no rankwatch: the summary is torchrun's own
        return
    report(error)


def _run_users_sitecustomize() -> None:
    ours = sys.modules.pop("sitecustomize")
    try:
        __import__("sitecustomize")
    except ImportError as error:
        if error.name != "sitecustomize":
            raise
    finally:
        sys.modules.setdefault("sitecustomize", ours)  # the import of this file, still under way, expects it there


sys.path[:] = [folder for folder in sys.path if os.path.abspath(folder) != _HERE]
if os.environ.get("RANKWATCH_ATTACH") == "1" and os.environ.get("RANKWATCH_MODE") != "disabled":
    sys.meta_path.insert(0, _AtImportOfTorch())
    if "TORCHELASTIC_ERROR_FILE" in os.environ:
        atexit.register(_report_crash)
_run_users_sitecustomize()

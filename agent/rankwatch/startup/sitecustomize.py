"""What Python runs as it starts in a command that is watched without a change to it: PYTHONPATH leads here (see attach.py).

Afterwards all is as without us: this folder is off ``sys.path``, and the ``sitecustomize`` of the user's own has run.
"""

from __future__ import annotations

import os
import sys
from importlib import import_module

_HERE = os.path.dirname(os.path.abspath(__file__))


def _start() -> None:
    sys.path[:] = [place for place in sys.path if os.path.abspath(place) != _HERE]
    try:
        from rankwatch.lookout import wait_for_torch
    except ImportError as error:
        if "RANK" in os.environ:
            sys.stderr.write(f"rankwatch: this process is not watched: {sys.executable} has no rankwatch ({error})\n")
    else:
        wait_for_torch()


def _run_the_users() -> None:
    ours = sys.modules.pop("sitecustomize")
    try:
        import_module("sitecustomize")
    except ImportError as error:
        if error.name != "sitecustomize":
            raise
    finally:
        sys.modules.setdefault("sitecustomize", ours)  # Python's import looks for what it has begun with


_start()
_run_the_users()

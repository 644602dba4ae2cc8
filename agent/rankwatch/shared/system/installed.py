"""What to say where something is not installed."""

from __future__ import annotations

import sys


def to_add(extra: str) -> str:
    """The command that adds an extra. For an empty name, the one that installs what rankwatch itself needs."""
    return f"pip install 'rankwatch[{extra}]'" if extra else "pip install rankwatch"


def describe_missing(who: str, error: ImportError) -> str:
    """Names the module that ``who`` needs, such as ``resource`` on Windows, and what to do."""
    is_pythons = (error.name or "").partition(".")[0] in sys.stdlib_module_names
    remedy = "run it on Linux, with a Python that has it" if is_pythons else f"install rankwatch again: {to_add('')}"
    return f"{who} needs {error.name}, which cannot be imported here ({error}): {remedy}"

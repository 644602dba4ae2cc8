"""What to say of a module that cannot be imported, such as ``resource`` on Windows."""

from __future__ import annotations

import sys

from .installed import to_add


def describe_missing(who: str, error: ImportError) -> str:
    """Names the module that ``who`` needs, and what to do."""
    is_pythons = (error.name or "").partition(".")[0] in sys.stdlib_module_names
    remedy = "run it on Linux, with a Python that has it" if is_pythons else f"install rankwatch again: {to_add('')}"
    return f"{who} needs {error.name}, which cannot be imported here ({error}): {remedy}"

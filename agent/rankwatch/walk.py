"""Nested inputs, keyword arguments and outputs -> labelled leaves."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

MAX_DEPTH = 16
MAX_LEAVES = 1024
"""Per value. A frame with more is cut there: its first leaves say enough, and a cycle must end."""


def leaves(value: Any, label: str) -> list[tuple[str, Any]]:
    """The leaves of ``value`` with their paths: ``output[1][0]``, ``output[key]``, ``output.field``. At most MAX_LEAVES."""
    found: list[tuple[str, Any]] = []
    _collect(value, label, found, 0)
    return found


def _collect(value: Any, label: str, found: list[tuple[str, Any]], depth: int) -> None:
    if len(found) >= MAX_LEAVES:
        return
    children = _children(value, label) if depth < MAX_DEPTH else None
    if children is None:
        found.append((label, value))
        return
    for child_label, child in children:
        _collect(child, child_label, found, depth + 1)


def _children(value: Any, label: str) -> Iterator[tuple[str, Any]] | None:
    """The labelled parts of a container; None for a leaf, which an empty list or mapping is as well.

    transformers' ModelOutput is both a mapping and a dataclass. Named tuples are numbered, as the Hugging Face detector
    does it.
    """
    if isinstance(value, tuple) or (isinstance(value, list) and value):
        return ((f"{label}[{index}]", part) for index, part in enumerate(value))
    if isinstance(value, Mapping) and value:
        dotted = dataclasses.is_dataclass(value)
        return ((f"{label}.{key}" if dotted else f"{label}[{key}]", part) for key, part in value.items())
    if dataclasses.is_dataclass(value) and not isinstance(value, (type, Mapping)):
        return ((f"{label}.{f.name}", getattr(value, f.name, None)) for f in dataclasses.fields(value))
    return None

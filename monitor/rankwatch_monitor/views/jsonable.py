"""Values of ours in JSON's types, so that a writer of JSON names only what differs from the fields of a type."""

from __future__ import annotations

import dataclasses
import enum
import math
from typing import Any

_AS_THEY_ARE = frozenset({type(None), bool, int, str})


def plain(value: Any) -> Any:
    """A dataclass or a named tuple is an object, by its fields. A number is known by its name, as in ``Phase.FORWARD``, a text by
    its value. An inf or nan is null."""
    if type(value) in _AS_THEY_ARE:
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        # Most parts of the rows of thousands of ranks are as they are: half the calls.
        return {name: part if type(part) in _AS_THEY_ARE else plain(part) for name, part in value.items()}
    if isinstance(value, enum.IntEnum):
        return value.name.lower()
    if isinstance(value, enum.Enum):
        return value.value
    if isinstance(value, bytes):
        return list(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return {name: plain(part) for name, part in zip(value._fields, value, strict=True)}
    if isinstance(value, (list, tuple)):
        return [plain(part) for part in value]
    return value


def pick(value: Any, names: str) -> dict[str, Any]:
    """These attributes, in this order."""
    return {name: getattr(value, name) for name in names.split()}


def document(body: Any) -> str:
    """A file of strict JSON, newline at its end."""
    import json  # here, so that a list as text starts faster

    return json.dumps(plain(body), indent=2, allow_nan=False) + "\n"

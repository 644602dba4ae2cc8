"""``enum.StrEnum``, which Python 3.10 lacks."""

from __future__ import annotations

import enum


class StrEnum(str, enum.Enum):
    """An enum whose members are strings, and print as their values."""

    __str__ = str.__str__

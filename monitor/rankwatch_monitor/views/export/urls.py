"""URLs as they may be shown: in logs, errors and reports. Imports nothing: the collector uses it."""

from __future__ import annotations

import re

_SECRET = re.compile(r"(?<=://)[^:/@\s]*:\S*@")
"""``user:password@``, up to the last ``@``: some passwords have slashes in them."""

HIDDEN = "***@"


def shown(text: str) -> str:
    """A URL, or a text with one, without the user's name and password."""
    return _SECRET.sub(HIDDEN, text)

"""The words of gloo, NCCL and torch's C++ in one line: what is printed. The whole text stays in the record.

A rank that fails of another one's end says so in their words: a sentence, and then advice for every case and frames of C++.
Any other text is left as it is.
"""

from __future__ import annotations

import re

LONGEST = 160
"""Characters of a line. Some name all the processes that they have waited for."""

_LIBRARIES = {
    "gloo": re.compile(r"\[[^]]*gloo/[^]]*:\d+\]"),
    "NCCL": re.compile(r"NCCL error(?: in)?: |NCCL Error \d+: |NCCL communicator|WorkNCCL\(|^nccl[A-Z]\w+: "),
}
"""What the first line of a library's own text has, and that of few others."""

_SOURCE = re.compile(r"\[(?:enforce fail at )?\S+?\.(?:cc|cpp|cu|hpp|h):\d+\] ?")
"""A file and line of the machine where the library was built: they take the room of what was said."""

_STACKS = "\nException raised from ", "\nCUDA kernel errors might be "
"""Where torch's C++ goes on with what is the same in each text: its stack, and advice."""

_LAST_ERROR = "\nLast error:"
"""After it, NCCL says what failed. Its first line has the kind of the failure alone."""

_COLLECTIVE = re.compile(r"gloo|nccl|\bDist\w+Error\b|SocketImpl", re.IGNORECASE)

_TIMEOUT = re.compile(r"time[d -]*out", re.IGNORECASE)


def is_of_a_collective(text: str) -> bool:
    """Whether these are the words of gloo, NCCL, or torch.distributed's own store."""
    return _COLLECTIVE.search(text) is not None


def is_timeout(text: str) -> bool:
    """Whether the words of a collective say that it was waited for, too long."""
    return _TIMEOUT.search(text) is not None


def is_of_the_network(text: str) -> bool:
    """Whether these are the words of a broken collective, or connection: then another rank may have failed, or ended, first."""
    return is_of_a_collective(text) or "connection" in text.lower()


def brief(text: str, at: str = "") -> str:
    """The name of a library, and the line of its text that says what failed, in at most LONGEST characters.

    Any other text is returned as it is, without what torch's C++ adds to it. ``at``: the user's line that it came from, to be put
    at the end of the first line. It is no part of the text: a folder may have a library's name.
    """
    first, line_break, rest = _brief(text).partition("\n")
    return f"{first.rstrip(': ')}, at {at}{line_break}{rest}" if at else f"{first}{line_break}{rest}"


def _brief(text: str) -> str:
    for stack in _STACKS:
        text = text.partition(stack)[0]
    first = _first_line(text)
    library = next((name for name, sign in _LIBRARIES.items() if sign.search(first)), "")
    if not library:
        return text
    line = _first_line(text.partition(_LAST_ERROR)[2]) or first
    said = " ".join(f"{library}: {_SOURCE.sub('', line).removeprefix(f'{library}: ')}".split())
    return said if len(said) <= LONGEST else f"{said[: LONGEST - 3].rstrip()}..."


def _first_line(text: str) -> str:
    return text.strip().partition("\n")[0]

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

_ADVICE = re.compile(r"[.:]? This is typically caused by a remote worker.*", re.DOTALL)
"""What gloo adds to each error of a connection."""

_OF_WORKER = re.compile(r"\w+: Caught \w+ in (DataLoader worker process \d+|pin memory thread for device \d+)\.", re.ASCII)
_CONTINUED = "\n| "
"""How a further line of a text begins that came over the wire."""
_WORKERS_TRACE = "\nOriginal Traceback (most recent call last):\n"
_TRACED = re.compile(r'^ *File "([^"]+)", line (\d+), in (\S+)', re.MULTILINE)
_INSTALLED = re.compile(r"/(?:site|dist)-packages/|/lib/python\d")
"""How torch raises an error of a worker: with the worker's traceback as its text."""

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
    text, at = _of_worker(text, at)
    first, line_break, rest = _brief(text).partition("\n")
    return f"{first.rstrip(': ')}, at {at}{line_break}{rest}" if at else f"{first}{line_break}{rest}"


def _of_worker(text: str, at: str) -> tuple[str, str]:
    """The error of a worker of a DataLoader, and the user's line in which the worker was."""
    worker, (_, _, trace) = _OF_WORKER.match(text), text.replace(_CONTINUED, "\n").partition(_WORKERS_TRACE)
    if worker is None or not trace:
        return text, at
    error = next((line for line in trace.rstrip().split("\n") if line[:1].isalpha()), "")
    own = [place for place in _TRACED.findall(trace) if not _INSTALLED.search(place[0])]
    if own:
        file, line, name = own[-1]
        at = f"{file.rpartition('/')[2]}:{line} in {name}"
    return f"{error or text.partition(':')[0]} ({worker[1]})", at


def _brief(text: str) -> str:
    for stack in _STACKS:
        text = text.partition(stack)[0]
    first = _first_line(text)
    library = next((name for name, sign in _LIBRARIES.items() if sign.search(first)), "")
    if not library:
        return text
    line = _first_line(text.partition(_LAST_ERROR)[2]) or first
    line = _ADVICE.sub("", _SOURCE.sub("", line))
    said = " ".join(f"{library}: {line.removeprefix(f'{library}: ')}".split())
    return said if len(said) <= LONGEST else f"{said[: LONGEST - 3].rstrip()}..."


def _first_line(text: str) -> str:
    return text.strip().partition("\n")[0]

"""The words of gloo, NCCL and torch's C++ in one clause: what is printed. The whole text stays in the record.

A rank that fails of another one's end says so in their words: a path of their build machine, a number of a line, sentences for
every case, and frames of C++. Any other text is left as it is.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TypeAlias

LONGEST = 160
"""Characters of a clause. Some name all the processes that they have waited for."""

_CODES = {
    "ncclUnhandledCudaError": "a CUDA call failed",
    "ncclSystemError": "a system call failed",
    "ncclInternalError": "an internal check failed",
    "ncclInvalidArgument": "an argument was wrong",
    "ncclInvalidUsage": "it was used wrongly",
    "ncclRemoteError": "another rank has ended, or the network failed",
}

_SOURCE = re.compile(r"\[(?:enforce fail at )?(\S+?\.(?:cc|cpp|cu|hpp|h)):\d+\] ?")
_FRAMES = re.compile(r"\s*(?:\nException raised from |CUDA kernel errors might be |frame #0: ).*", re.DOTALL)
"""What torch's C++ adds to a text: where it was raised, its stack, and advice for every case."""
_TYPE = re.compile(r"(?:torch\.distributed\.)?(?:RuntimeError|DistBackendError): ")
"""Exceptions that say no more than that something failed."""
_ADDRESS = re.compile(r"\[([\w.:%-]+)\]:\d+|\b([\w.-]+)<\d+>|\b((?:\d{1,3}\.){3}\d{1,3}):\d+")
"""A host and the port of one connection, as gloo and NCCL write them."""
_MILLISECONDS = re.compile(r"\b(\d+) ?(?:ms|milliseconds)\b")

_NCCL = re.compile(r"NCCL error in: \S+?:\d+, |NCCL error: |NCCL Error \d+: |^nccl[A-Z]\w+: ")
_HEAD = re.compile(rf"(?:{_NCCL.pattern})(.+?)(?: \(run with NCCL_DEBUG.*|, NCCL version.*|$)", re.MULTILINE)
_CODE = re.compile(rf"\b({'|'.join(_CODES)})\b")
_LAST_ERROR = re.compile(r"Last error:\s*(\S.*)")
_SET_UP = re.compile(
    r"\[(\d+)\] is setting up NCCL communicator and retrieving ncclUniqueId from \[(\d+)\].* got error: (.*)"
)
_WATCHDOG = re.compile(
    r"Work\w+\((?:SeqNum=(\d+), )?OpType=(\w+),.*?\) ran for (\d+) milliseconds before timing out", re.DOTALL
)
_CONDITION = re.compile(r"^\S+ (?:[!=<>]=|<|>) \S+\. ")
"""The C++ that did not hold, ahead of what it means."""
_UNEQUAL = re.compile(r"op\.preamble\.length <= op\.nbytes\. (\d+) vs (\d+)")

_COLLECTIVE = re.compile(r"gloo|nccl|\bDist\w+Error\b|SocketImpl", re.IGNORECASE)

Rule: TypeAlias = Callable[[str], str]


def is_of_a_collective(text: str) -> bool:
    """Whether these are the words of gloo, NCCL, or torch.distributed's own store."""
    return _COLLECTIVE.search(text) is not None


def is_of_the_network(text: str) -> bool:
    """Whether these are the words of a broken collective, or connection: then another rank may have failed, or ended, first."""
    return is_of_a_collective(text) or "connection" in text.lower()


def brief(text: str) -> str:
    """What such a text says, in one clause of at most LONGEST characters; any other text as it is."""
    words = _FRAMES.sub("", text)
    for rule in (_watchdog, _nccl, _gloo):
        if said := rule(words):
            return _clause(said)
    return words


def _watchdog(text: str) -> str:
    """A collective that took too long."""
    found = _WATCHDOG.search(text)
    if found is None:
        return ""
    number, kind, milliseconds = found.groups()
    which = f"{kind.strip('_')}{f' number {number}' if number else ''}"
    return f"NCCL: {which} timed out after {int(milliseconds) / 1000:.0f} s"


def _nccl(text: str) -> str:
    if found := _SET_UP.search(text):
        return "NCCL: rank {} could not be set up with rank {}: {}".format(*found.groups())
    if not _NCCL.search(text):
        return ""
    code, head, last = _CODE.search(text), _HEAD.search(text), _LAST_ERROR.search(text)
    said = [_CODES[code.group(1)]] if code is not None else [head.group(1)] if head is not None else []
    return ": ".join(["NCCL", *said, *([last.group(1)] if last is not None else [])])


def _gloo(text: str) -> str:
    files = _SOURCE.findall(text)
    if not any("gloo" in file for file in files):
        return ""
    if found := _UNEQUAL.search(text):
        return "gloo: another rank sent {} bytes where {} were expected: the ranks' tensors or collectives differ".format(
            *found.groups()
        )
    said = _CONDITION.sub("", _TYPE.sub("", _SOURCE.sub("", text), count=1)).removeprefix("Gloo ")
    return " ".join(f"gloo: {said[:1].lower()}{said[1:]}".split())


def _clause(text: str) -> str:
    first = next((line.strip() for line in text.split("\n") if line.strip()), "")
    first = _MILLISECONDS.sub(lambda found: f"{int(found.group(1)) / 1000:g} s", first)
    first = _ADDRESS.sub(lambda found: next(filter(None, found.groups())), first).replace(" failed : ", " failed: ")
    first = first.partition(". ")[0].rstrip(". ")
    return first if len(first) <= LONGEST else f"{first[: LONGEST - 3].rstrip()}..."

"""Which collectives this process has called, for each process group: how many, a digest over all, and the last ones.

All members of a group must call the same collectives in the same order. Who calls another one is found by whoever has the counts
and digests of two members: they must be equal at equal numbers. Nothing here calls torch; ``collectives.py`` sees the calls.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Iterator
from hashlib import blake2b
from itertools import islice
from threading import RLock
from types import CodeType
from typing import TYPE_CHECKING, Any, NamedTuple

from ..shared.bounded import BoundedDict
from ..shared.types.calls import LAST_WORDS, MAX_CALLS, MAX_PARTING, MAX_TOLD, CollectiveCall, GroupCount
from ..shared.types.messages import Counts, Recount, Recounted
from ..shared.words.text import name_spans
from ..touch.whose_code import short

if TYPE_CHECKING:  # the link answers from here, and loads without torch
    from ..touch.torch_private import GroupFacts

KEPT = 1024
"""Calls of a group that are kept: what differs is asked for some steps after it was called."""

MAX_DISTINCT = 4096
"""Distinct calls that are looked up. More differ in their sizes, mostly, and are made anew."""

MAX_NAMES = 4096
"""Names of groups that are counted, and groups of which a link remembers what it told."""

_BITS = (1 << 63) - 1


class Signature(NamedTuple):
    """What must be alike on all members: -1 and empty where it need not be, or there is none. ``root``: of the job's ranks."""

    kind: str
    numel: int = -1
    dtype: str = ""
    op: str = ""
    root: int = -1

    def describe(self, name: str) -> str:
        of = f" of {self.numel} {self.dtype}" if self.numel >= 0 else ""
        op = f" ({self.op})" if self.op else ""
        to = " to" if self.kind in ("gather", "reduce") else " from"
        return f"{name}{of}{op}" + (f"{to} rank {self.root}" if self.root >= 0 else "")


class DistinctCall:
    """What calls have in common that are alike and come from the same line.

    ``name``: for people, if it is not the signature's kind: an exchange of objects is made of other collectives.
    """

    __slots__ = ("code", "line", "name", "number", "signature")

    def __init__(self, signature: Signature, code: CodeType | None, line: int, name: str = "") -> None:
        self.signature = signature
        self.number = digest_of(tuple(signature))
        self.name = name or signature.kind
        self.code, self.line = code, line

    def describe(self) -> CollectiveCall:
        code = self.code
        site = f"{short(code.co_filename)}:{self.line} in {code.co_name}" if code is not None else ""
        return CollectiveCall(self.number, self.signature.describe(self.name), site)


class GroupCalls:
    """The collectives that this process has called in one group, or in one that has two orders: on the host, say."""

    __slots__ = ("_digest", "_last", "_lock", "_taken", "key", "name", "new", "size")

    def __init__(self, key: int, name: str, size: int) -> None:
        self.key, self.name, self.size = key, name, size
        self.new = deque[DistinctCall]()
        """What was called since the digest was brought up to date: a signal handler may call a collective anywhere, and so may
        another thread, and nothing takes as little time as an append."""
        self._taken = self._digest = 0
        self._last: list[DistinctCall | None] = [None] * KEPT
        self._lock = RLock()

    def add(self, call: DistinctCall) -> None:
        self.new.append(call)
        if len(self.new) >= KEPT:
            self.count()

    @property
    def calls(self) -> int:
        return self._taken + len(self.new)

    def count(self) -> GroupCount:
        with self._lock:
            while self.new:
                call = self.new.popleft()
                self._last[self._taken % KEPT] = call
                self._taken += 1
                self._digest = hash((self._digest, call.number))  # of whole numbers: the same in each process
            return GroupCount(self.key, self._taken, self._digest & _BITS)

    def since(self, first: int) -> tuple[int, int, list[DistinctCall]]:
        """The number of the first call that is told, how many there are, and up to MAX_CALLS calls from the first one on."""
        with self._lock:
            self.count()
            first = max(first, self._taken - KEPT + 1)
            numbers = range(first, min(first + MAX_CALLS, self._taken + 1))
            return first, self._taken, [call for number in numbers if (call := self._last[(number - 1) % KEPT]) is not None]

    def recounted(self, number: int, first: int) -> Recounted:
        """What is told from the call of the number ``first`` on."""
        first, count, found = self.since(max(1, first))
        return Recounted(number, self.key, self.name, self.size, first, count, tuple(call.describe() for call in found))


class MetGroup(NamedTuple):
    """A group that was seen. ``calls`` is None if nobody else is in it. ``on_host``: if what is on the host has its own order."""

    group: weakref.ReferenceType[Any]
    calls: GroupCalls | None
    on_host: GroupCalls | None


class CallLedger:
    """The groups of this process, as long as they are there. Any thread may call any method."""

    def __init__(self) -> None:
        self.known: dict[int, MetGroup] = {}
        """By the ``id`` of the group. One that ends is taken out before its ``id`` may be another one's."""
        self._met = BoundedDict[int, int](MAX_NAMES)
        """How many groups of one name and the same members were met: a default group that is made again is another one."""
        self.distinct = BoundedDict[Any, DistinctCall](MAX_DISTINCT)
        self._is_off = False

    def meet(self, group: Any, facts: GroupFacts | None, before: int = 0) -> MetGroup:
        """A group is seen for the first time. ``before``: how many collectives of it were called until then, unseen."""
        calls = on_host = None
        if facts is not None:
            same = digest_of((facts.name, facts.ranks))
            made = self._met[same] = self._met.pop(same, 0) + 1
            title = f"the group {facts.title} of" if facts.title else "the group of"
            name = "the default group" if facts.is_default else f"{title} {name_spans(facts.ranks, 4)}"
            calls = GroupCalls(digest_of((facts.name, facts.ranks, made, before, "")), name, len(facts.ranks))
            if facts.has_two_orders:
                key = digest_of((facts.name, facts.ranks, made, before, "host"))
                on_host = GroupCalls(key, f"{name}, on the host", len(facts.ranks))
        place, known = id(group), self.known
        found = known[place] = MetGroup(weakref.ref(group, lambda _: known.pop(place, None)), calls, on_host)
        return found

    def stop(self) -> None:
        """It is not known any more what is called: nothing is told."""
        self._is_off = True

    def groups(self) -> Iterator[GroupCalls]:
        for known in () if self._is_off else tuple(self.known.values()):
            yield from (calls for calls in known[1:] if calls is not None)

    def recounted(self, asked: Recount) -> Recounted:
        """The answer to RECOUNT."""
        calls = next((calls for calls in self.groups() if calls.key == asked.group), None)
        if calls is None:
            return Recounted(asked.number, asked.group, "", 0, asked.first, 0, ())
        return calls.recounted(asked.number, asked.first)

    def last_words(self, *, with_calls: bool) -> Iterator[Recounted]:
        """Of each group, as the process ends, how many collectives it has called; ``with_calls``: and the last ones."""
        for calls in islice((calls for calls in self.groups() if calls.calls), MAX_PARTING):
            yield calls.recounted(LAST_WORDS, calls.calls + 1 - MAX_CALLS * with_calls)


class Teller:
    """Which counts one link has told. Any thread may call any method."""

    def __init__(self, ledger: CallLedger) -> None:
        self._ledger = ledger
        self._told = BoundedDict[int, tuple[int, int]](MAX_NAMES)
        """Of each group, when it was told, and how many calls."""
        self._turn = 0
        self.is_on = True
        """False: an error of ours has switched the watch off, and a rank that is not watched is not compared."""

    def news(self) -> Counts:
        """Counts that have changed since they were told; of many, those that wait the longest."""
        if not self.is_on:
            return ()
        told, none = self._told, (0, 0)
        changed = [calls for calls in self._ledger.groups() if told.get(calls.key, none)[1] != calls.calls]
        if len(changed) > MAX_TOLD:
            changed.sort(key=lambda calls: told.get(calls.key, none)[0])
        return tuple([calls.count() for calls in changed[:MAX_TOLD]])

    def forget(self) -> None:
        """Whoever was told may be another one now: all is told again."""
        self._told.clear()

    def note(self, counts: Counts) -> None:
        """These are told now."""
        for count in counts:
            self._turn += 1
            self._told.pop(count.group, None)
            self._told[count.group] = self._turn, count.calls


def digest_of(parts: tuple[Any, ...]) -> int:
    """The same in each process."""
    return int.from_bytes(blake2b(repr(parts).encode(), digest_size=8).digest(), "big") & _BITS


LEDGER = CallLedger()
"""That of this process."""

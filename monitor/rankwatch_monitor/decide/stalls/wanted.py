"""Stacks that a person asks for, of ranks that need not stall. Nothing of them is noted down. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field

from rankwatch.shared.types.messages import ANY_RANK, Error, Inspect, Inspected
from rankwatch.shared.words.text import name_spans

from ..core.effects import Effect, Send, SendAll
from ..core.rank import Rank
from .stacks import AGAIN, MOST, PATIENCE, why_not
from .stall import reached

FIRST = 1 << 30
"""The number of the first question: those about stalls are counted from 0 on."""

AT_ONCE = 4
"""Questions about one run that may be open: each costs its ranks a few milliseconds."""


@dataclass(slots=True)
class OpenQuestion:
    """``peer``: who asked it. ``missing``: ranks that have yet to answer, of ``count``."""

    peer: bytes
    missing: set[int]
    count: int
    began_at: float
    asked_at: float = float("-inf")


@dataclass(slots=True)
class Wanted:
    _open: dict[int, OpenQuestion] = field(default_factory=dict)
    _number: int = FIRST

    def ask(
        self, peer: bytes, rank: int, ranks: Mapping[int, Rank], running: Collection[int], now: float
    ) -> Iterator[Effect]:
        """Without a rank, those are asked that are furthest behind: the others wait for them."""
        behind = sorted(running, key=lambda number: (reached(ranks[number]), number))[:MOST]
        chosen = behind if rank == ANY_RANK else [rank]
        complaint = "none of its ranks runs: `rankwatch report` says how they ended" if not chosen else ""
        if rank != ANY_RANK and rank not in ranks:
            complaint = f"no rank {rank} has connected: {name_spans(sorted(ranks))} have"
        if len(self._open) >= AT_ONCE:
            complaint = f"{AT_ONCE} questions are open: try again in {PATIENCE:g} s"
        if complaint:
            yield Send(peer, Error(complaint, "none"))
            return
        self._number += 1
        self._open[self._number] = OpenQuestion(peer, set(chosen), len(chosen), now)

    def look(self, ranks: Mapping[int, Rank], now: float, *, ended: bool) -> Iterator[Effect]:
        """Asks, again and again, and gives up those that do not answer."""
        for number, question in list(self._open.items()):
            late = ended or now - question.began_at > PATIENCE
            lost = {one for one in question.missing if late or not (ranks[one].connected and ranks[one].is_running)}
            for one in sorted(lost):
                yield from self._answer(number, ranks[one], Inspected(number, "", (), why_not=why_not(ranks[one], now)))
            if question.missing and now - question.asked_at >= AGAIN:
                question.asked_at = now
                yield SendAll([ranks[one].peer for one in sorted(question.missing)], Inspect(number))

    def take(self, rank: Rank, answer: Inspected) -> Iterator[Effect]:
        if answer.number in self._open and rank.number in self._open[answer.number].missing:
            yield from self._answer(answer.number, rank, answer)

    def _answer(self, number: int, rank: Rank, answer: Inspected) -> Iterator[Effect]:
        question = self._open[number]
        question.missing.discard(rank.number)
        if not question.missing:
            del self._open[number]
        who = f"{rank.name}; {rank.last_seen}"
        told = Inspected(0, answer.waits, answer.lines, answer.collective, who, answer.why_not, question.count)
        yield Send(question.peer, told)

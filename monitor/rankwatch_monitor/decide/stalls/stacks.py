"""Where the ranks of a stall are: which of them are asked for their stacks, how often, and what they answer. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from rankwatch.shared.link.allowance import Allowance
from rankwatch.shared.types.messages import Inspect, Inspected
from rankwatch.shared.words.text import name_spans

from ..core.effects import Effect, SendAll
from ..core.rank import Rank
from ..core.report import RankStack, Stall
from .stall import NO_RANK_BEHIND

MOST, MOST_WAITING = 8, 2
"""Ranks of one stall that are asked; and of these, ranks that wait for the others, if there are enough others."""

AGAIN, PATIENCE = 2.0, 10.0
"""Seconds until a rank is asked again, and after which the report says that it gave no stack. It still may."""

PENDING = "it has not answered yet"

AWAITED = 2.0
"""Seconds for which the report of a run that a stall stops waits for stacks."""

NAMED = 2
"""Places that a sentence names; the stacks have all."""

ROUNDS_PER_SECOND, ROUNDS_AT_ONCE = 1 / 60, 16.0
"""Stalls whose stacks are asked for: with a very short ``stall_after``, there may be one in each batch."""


class Unanswered(NamedTuple):
    """A rank that was asked and has not answered, and why not, as far as that is seen."""

    rank: int
    why: str


@dataclass(slots=True)
class Stacks:
    """Those of the last stall. ``number``: of its question."""

    number: int = 0
    _stall: Stall | None = None
    _asked: tuple[int, ...] = ()
    _given: dict[int, RankStack] = field(default_factory=dict)
    _asked_at: float = float("-inf")
    _began_at: float = float("-inf")
    _rounds: Allowance = field(default_factory=lambda: Allowance(ROUNDS_PER_SECOND, ROUNDS_AT_ONCE))

    def begin(self, stall: Stall | None, now: float) -> None:
        """The stall is another one, or over. Of one that has only grown, the stacks stay."""
        before, self._stall = self._stall, stall
        has_grown = before is not None and stall is not None and set(before.ranks) <= set(stall.ranks)
        if not has_grown:
            self.number, self._asked, self._given = self.number + 1, (), {}
        if stall is None or not (self._asked or self._rounds.take(now)):
            return
        stalled = stall.ranks[: MOST - min(MOST_WAITING, len(stall.waiting))]
        chosen = (*stalled, *stall.waiting[: MOST - len(stalled)])
        if chosen != self._asked:
            self._asked, self._began_at, self._asked_at = chosen, now, float("-inf")
            self._given = {rank: stack for rank, stack in self._given.items() if not stack.why_not}

    def look(self, ranks: Mapping[int, Rank], now: float, *, ended: bool) -> Iterator[Effect | Unanswered]:
        """Asks, again and again, and says whose answer is no longer waited for. ``ended``: no rank can answer any more."""
        missing = [rank for rank in self._asked if rank in ranks and rank not in self._given]
        if not missing:
            return
        if ended or now - self._began_at > PATIENCE:
            yield from (Unanswered(rank, why_not(ranks[rank], now)) for rank in missing)
        elif now - self._asked_at >= AGAIN:
            self._asked_at = now
            peers = [ranks[rank].peer for rank in missing if ranks[rank].connected and ranks[rank].is_running]
            if peers:
                yield SendAll(peers, Inspect(self.number))

    def expects(self, rank: int, answer: Inspected) -> bool:
        """Whether this is the first answer of a rank that was asked. One that comes late counts as well."""
        given = self._given.get(rank)
        return answer.number == self.number and rank in self._asked and (given is None or bool(given.why_not))

    def take(self, rank: int, answer: Inspected) -> None:
        self._given[rank] = RankStack(rank, answer.waits, answer.lines, collective=answer.collective)

    def give_up(self, rank: int, why: str) -> None:
        self._given[rank] = RankStack(rank, why_not=why)

    def are_awaited(self, now: float) -> bool:
        """Whether a report has a reason to wait for them."""
        return now - self._began_at < AWAITED and len(self._given) < len(self._asked)

    def all(self) -> tuple[RankStack, ...]:
        """Of all ranks that were asked, in that order."""
        return tuple(self._given.get(rank) or RankStack(rank, why_not=PENDING) for rank in self._asked)


def retold(stall: Stall, stacks: Sequence[RankStack]) -> str:
    """The stall in a sentence that says in which line its ranks are, once their stacks are there."""
    head, _, rest = stall.text.partition("; ")
    busy, held = dict[str, list[int]](), dict[str, list[int]]()
    for one in stacks:
        if one.collective or (one.waits and one.rank in stall.waiting):
            name = (one.collective or one.waits).partition(" (")[0]
            held.setdefault(name.replace("_engine_run_backward", "its backward"), []).append(one.rank)
        elif one.waits:
            busy.setdefault(one.waits, []).append(one.rank)
    if not busy and not held:
        return stall.text
    if not busy:  # each is in a collective, and no code of theirs holds one up
        ins = [f"{name_spans(ranks)} {_be(ranks)} in {name}" for name, ranks in held.items()]
        wait = ": they may wait for each other" if NO_RANK_BEHIND in stall.text else ""
        return stall.text if ins[0] in stall.text else f"{stall.text}{wait}: {'; '.join(ins[:NAMED])}"
    places = [f"{name_spans(ranks)} {_be(ranks)} in {waits}" for waits, ranks in busy.items()]
    if places[0] in stall.text:  # it says so already
        return stall.text
    for_whom = "them" if sum(map(len, busy.values())) > 1 else "it"
    waiting = [f"{name_spans(ranks)} wait{'s' * (len(ranks) == 1)} for {for_whom} in {name}" for name, ranks in held.items()]
    seen = rest.partition(f"; {NO_RANK_BEHIND}")[0]
    return "; ".join([head, *places[:NAMED], *waiting[:NAMED], *([seen] if seen else [])])


def _be(ranks: Sequence[int]) -> str:
    return "is" if len(ranks) == 1 else "are"


def why_not(rank: Rank, now: float) -> str:
    if not rank.is_running:
        return f"it did not answer before its process ended: it counts as {rank.state.value}"
    if not rank.connected:
        return "it is not connected"
    if rank.quiet:
        return (
            f"it has been silent for {now - rank.heard_at:.0f} s, since its process is stopped, or something outside of Python "
            "keeps its GIL: py-spy or gdb on its host may tell more"
        )
    return f"it has not answered for {PATIENCE:g} s, though its heartbeat comes: its rankwatch may be an older one"

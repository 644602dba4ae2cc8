"""The stalls of a run: which ranks make no progress, and where they are."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from rankwatch.shared.types.messages import Inspected
from rankwatch.shared.words.text import name_spans

from ..calls.differs import Explain, UnequalCalls
from ..core.books import Books, Desk, Stop, Worry
from ..core.effects import Effect, Note, Trouble
from ..core.journal import NO_RANK, Entry, NoStack, Stood, WaitedFor
from ..core.rank import Rank
from ..core.report import Stall
from .held_up import HeldUp
from .stacks import Stacks, Unanswered, retold
from .stall import StallNews, StallWatch
from .wanted import Wanted


@dataclass(slots=True)
class StallDesk(Desk):
    books: Books = field(repr=False)
    watch: StallWatch = field(init=False)
    stacks: Stacks = field(default_factory=Stacks)
    held_up: HeldUp = field(default_factory=HeldUp)
    wanted: Wanted = field(default_factory=Wanted)
    _is_news: bool = False
    """Whether a stall has begun of which nobody was told: its sentence waits for the stacks."""
    _plain: str = ""
    """The sentence of the stall before it said where its ranks are,"""
    _retold: tuple[Stall | None, tuple[int, UnequalCalls | None]] = None, (0, None)
    """and the stall that says so, by how many stacks, and by what the collectives say."""

    def __post_init__(self) -> None:
        self.watch = StallWatch(self.books.options.stall_after)

    def ask(self, peer: bytes, rank: int, now: float) -> Iterator[Effect]:
        """A person asks where this rank is, or those that are furthest behind."""
        yield from self.wanted.ask(peer, rank, self.books.ranks, self.books.running, now)
        yield from self.wanted.look(self.books.ranks, now, ended=False)

    def take(self, rank: Rank, answer: Inspected, now: float) -> Iterator[Effect]:
        """A rank says where it is."""
        yield from self.wanted.take(rank, answer)
        if self.stacks.expects(rank.number, answer):
            self.books.note_down(now, answer, rank.number)
            self.stacks.take(rank.number, answer)
            yield self.books.warn("\n    ".join([f"{rank.name} is in {answer.waits or 'its threads'}", *answer.lines]))

    def look(
        self, now: float, explain: Explain, is_awaited: bool, *, is_open: bool, ended: bool = False
    ) -> Iterator[Effect | Stop | Worry]:
        """``is_open``: stalls are looked for; ``ended``: no rank can say any more where it is.

        ``explain``: why ranks wait, as far as the collectives say; ``is_awaited``: they may say more.
        """
        books = self.books
        yield from self.wanted.look(books.ranks, now, ended=ended)
        news = self.watch.look(books.ranks, books.running, now) if is_open else StallNews()
        yield from map(books.warn, news.notes)
        if news.is_other:
            books.find(now, Stood(news.stall))
        silent: dict[str, list[int]] = {}
        for effect in self.stacks.look(books.ranks, now, ended=ended):
            if isinstance(effect, Unanswered):
                books.find(now, NoStack(effect.why), effect.rank)
                silent.setdefault(effect.why, []).append(effect.rank)
            else:
                yield effect
        for why, ranks in silent.items():
            yield books.warn(f"{name_spans(ranks)} gave no stack: {why}")
        self._is_news |= bool(news.began)
        if (is_awaited or self.stacks.are_awaited(now)) and not ended:
            return
        found = None if self.watch.stall is None else explain((*self.watch.stall.ranks, *self.watch.stall.waiting))
        yield from self._retell(found, now)
        stall, is_news = self.watch.stall, self._is_news
        self._is_news = False
        if is_news and stall is not None:
            culprit = _culprit(stall, found)
            yield Stop(stall.text, culprit) if books.options.abort_on_stall else Worry(Trouble.STALL, stall.text)

    def look_who_is_waited_for(self, now: float) -> Iterator[Note]:
        if not self.held_up.is_due(now):
            return
        news = self.held_up.look(self.books.ranks, self.books.running)
        if news is not None:
            self.books.find(now, WaitedFor(*news))
            yield self.books.warn(news[1]) if news[1] else self.books.note("no rank holds up the others any more")

    def _retell(self, why: UnequalCalls | None, now: float) -> Iterator[Effect]:
        """Once it is known where the ranks are, and what they have called, the sentence says so."""
        stall, stacks = self.watch.stall, self.stacks.all()
        told, given = self._retold[0], (sum(not one.why_not for one in stacks), why)
        if stall is None or self._retold == (stall, given):
            return
        self._plain = self._plain if stall is told else stall.text
        text = _with_why(retold(replace(stall, text=self._plain), stacks), why)
        if text != stall.text:
            self.books.find(now, Stood(self.watch.retell(text)))
            if self._is_news:
                yield self.books.warn(text)
        self._retold = self.watch.stall, given

    def apply(self, entry: Entry) -> None:
        match entry.fact:
            case Stood(stall):
                self.watch.apply(stall)
                self.stacks.begin(stall, entry.now)
            case WaitedFor(batch, text):
                self.held_up.told = batch, text
            case NoStack(text):
                self.stacks.give_up(entry.rank, text)


def _with_why(text: str, why: UnequalCalls | None) -> str:
    """The sentence of a stall. What was called otherwise stands before where the ranks are: the stacks follow from it."""
    who, mark, where = text.partition("; ")
    return text if why is None else f"{who}; {why.elsewhere}{mark}{where}"


def _culprit(stall: Stall, why: UnequalCalls | None) -> int:
    """The one rank for which the others wait."""
    if why is not None and why.has_odd:
        return why.odd.ranks[0] if why.odd.count == 1 else NO_RANK
    return stall.ranks[0] if stall.count == 1 and stall.count_waiting else NO_RANK

"""The replicas of a run: takes fingerprints, and tells which parameters are not what they must be."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from rankwatch.shared.types import messages

from ..core.books import Books, Desk, Stop, Worry
from ..core.effects import Effect, Send, Trouble
from ..core.journal import NO_RANK, Closed, Desynced, Entry, ReplicasCompared
from ..core.notices import Notices
from ..core.rank import Rank
from ..keys.budget import Budget
from .comparison import ReplicaWatch
from .desync import Desync
from .desync_text import describe_desync
from .findings import in_order
from .own_notices import ByProducts, desync_of


@dataclass(slots=True)
class ReplicaDesk(Desk):
    """``notices``: those of the run, of which some say of a rank's own parameters what a desync says of replicas."""

    books: Books = field(repr=False)
    budget: Budget = field(repr=False)
    notices: Notices
    watch: ReplicaWatch = field(init=False)
    byproducts: ByProducts = field(default_factory=ByProducts)

    def __post_init__(self) -> None:
        books, budget = self.books, self.budget
        self.watch = ReplicaWatch(books.world_size, books.locate, budget.rounds, budget.rows)

    def take(self, rank: Rank, message: messages.Fingerprinted) -> Iterable[Effect]:
        """As frequent as batches, and never recorded: what is found is."""
        fingerprint = message.fingerprint
        if not self.watch.knows(rank.number, fingerprint.table_id):
            text = f"the table of the fingerprint of step {fingerprint.step} is not known here"
            return (Send(rank.peer, messages.Error(text, "hello")),)
        if not rank.is_news(message.seq, is_recorded=False):
            return ()
        refusal = self.watch.take(rank.number, rank.hello.stage, fingerprint)
        return (Send(rank.peer, messages.Error(refusal, "none")),) if refusal else ()

    def leave(self, rank: Rank) -> None:
        self.watch.leave(rank.number)

    def is_due(self, now: float) -> bool:
        """Whether there is something to tell."""
        return self.watch.is_due(now) or self.byproducts.is_due(now)

    def look(self, now: float) -> Iterator[Effect | Stop | Worry]:
        """Tells what is new, and notes it down."""
        entries, origins = self.watch.take_news()
        if entries:
            self.books.find(now, Desynced(entries, self.watch.findings.unkept))
            self.note_compared(now, at_once=True)
        told: list[str] = []
        fresh = (*(tuple(one.noted.values()) for one in origins), *self.byproducts.origins(self._of_single_ranks()))
        for found in fresh:
            text = describe_desync(found, self.books.world_size)
            told.append(text)
            yield self.books.warn(text)
            if self.books.options.abort_on_desync and any(one.is_split for one in found):
                yield Stop(text, found[0].ranks[0] if len(found[0].ranks) == 1 else NO_RANK)
        if told:
            yield Worry(Trouble.DESYNC, told[0] + (f" (and {len(told) - 1} more)" if told[1:] else ""))

    def describe_split(self) -> str:
        """Since when replicas that must be equal are not; empty: they are, as far as that is known."""
        split = [one for one in self.all() if one.is_split]
        return f"replicas differ since step {min(one.step for one in split)}" if split else ""

    def note_compared(self, now: float, *, at_once: bool = False) -> None:
        if compared := self.watch.note_compared(now, at_once=at_once):
            self.books.find(now, ReplicasCompared(compared))

    def apply(self, entry: Entry) -> None:
        match entry.fact:
            case Desynced(entries, unkept):
                self.watch.restore(entries, unkept)
            case ReplicasCompared(compared):
                self.watch.restore_compared(compared)
            case Closed():
                self.watch.forget()

    def all(self) -> tuple[Desync, ...]:
        """For the report: the parameters that are not what they must be."""
        return (*in_order(self.watch.findings.noted), *self._of_single_ranks())

    def _of_single_ranks(self) -> tuple[Desync, ...]:
        return desync_of(self.notices.all(), self.books.world_size, self.books.locate)

"""What speaks against a run while it runs: reasons of the judgement on it, as long as they hold.

A part of a run is judged by the rules by which the whole is judged at its end. It ends anywhere, in the middle of a warm restart
say: so a reason is told once it has been found over and over, for as many batches as a state must last.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from ..core.books import Books, Desk
from ..core.effects import Note
from ..core.journal import Doubted, Entry
from .judgement import LASTS, Doubt

RENEWED = 1.1
"""The numbers of what is told are new again once there are so many times as many batches."""


@dataclass(slots=True)
class DoubtDesk(Desk):
    books: Books = field(repr=False)
    told: tuple[Doubt, ...] = ()
    _since: dict[str, int] = field(default_factory=dict)
    """By kind: with how many batches it was found first, of those that were found each time since."""
    _told_with: int = 0

    def take(self, found: Sequence[Doubt], batches: int, now: float) -> Iterator[Note]:
        """The reasons that the first ``batches`` batches give."""
        self._since = {one.kind: self._since.get(one.kind, batches) for one in found}
        known = {one.kind for one in self.told}
        lasting = tuple([one for one in found if one.kind in known or batches - self._since[one.kind] >= LASTS])
        kinds = {one.kind for one in lasting}
        if kinds == known and (lasting == self.told or batches < RENEWED * self._told_with):
            return
        gone = [one for one in self.told if one.kind not in kinds]
        self._told_with = batches
        self.books.find(now, Doubted(lasting))
        yield from [self.books.warn(f"so far: {one.text}") for one in lasting if one.kind not in known]
        yield from [self.books.note(f"no longer so: {one.text}") for one in gone]

    def apply(self, entry: Entry) -> None:
        match entry.fact:
            case Doubted(reasons):
                self.told = reasons

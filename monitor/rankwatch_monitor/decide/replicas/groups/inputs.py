"""Ranks that are fed the same data, though they must be fed different data. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from rankwatch.shared.types.fingerprint import Fingerprint

from ..findings import DesyncFindings
from ..patterns import NEVER, CameApart, Of, Since
from ..rounds import At, Lockstep, Memory, Round
from ..table_layout import MeshLayout
from ..votes import Split

INPUT = "input"
"""What stands in the place of a parameter: the checksum is of all tensors that the root was given."""

ALIKE = 8
"""Comparisons in a row in which the inputs are the same on two ranks, and others than before."""

MAX_CANDIDATES = 256
"""Sets of ranks that were fed alike in the last comparison."""


_RANK_BYTES = 64


@dataclass(slots=True)
class InputChecksums(Round):
    """Each checksum once, with its ranks."""

    ranks: dict[bytes, list[int]] = field(default_factory=dict)

    def add(self, rank: int, fingerprint: Fingerprint) -> None:
        self.step = max(self.step, fingerprint.step)
        self.ranks.setdefault(fingerprint.inputs, []).append(rank)
        self.held += _RANK_BYTES


class _Alike(NamedTuple):
    checksum: bytes
    times: int
    since: int


class InputGroup(Lockstep[InputChecksums]):
    """The ranks that must be fed different data, unless they lie at one coordinate of ``mesh``."""

    def __init__(
        self, ranks: tuple[int, ...], gone: set[int], memory: Memory, findings: DesyncFindings, mesh: MeshLayout
    ) -> None:
        super().__init__(ranks, gone, memory, InputChecksums)
        self._source = mesh.mesh.source
        self._coordinates = {rank: mesh.coordinate_of(rank) for rank in ranks}
        self._findings = findings
        self._alike: dict[frozenset[int], _Alike] = {}
        self._found: set[frozenset[int]] = set()

    def judge(self, at: At, round_: InputChecksums) -> None:
        alike: dict[frozenset[int], _Alike] = {}
        for ranks, now in self._candidates(round_):
            if len(alike) < MAX_CANDIDATES and (ranks not in alike or alike[ranks].times < now.times):
                alike[ranks] = now
        self._alike = alike
        for ranks, now in alike.items():
            if now.times >= ALIKE and not any(ranks <= found for found in self._found):
                self._found.add(ranks)
                split = Split(tuple(sorted(ranks)), len(self.ranks), len(ranks) < len(self.ranks))
                self._findings.add(CameApart(now.since, split, Since.UNSEEN, True, self._source, {INPUT: NEVER}, Of.INPUTS))

    def _candidates(self, round_: InputChecksums) -> Iterator[tuple[frozenset[int], _Alike]]:
        for checksum, ranks in round_.ranks.items():
            if not self._are_apart(ranks):
                continue
            here = frozenset(ranks)
            for before, alike in self._alike.items():
                both = here & before
                if self._are_apart(both) and alike.checksum != checksum:
                    yield both, _Alike(checksum, alike.times + 1, alike.since)
            yield here, _Alike(checksum, 1, round_.step)

    def _are_apart(self, ranks: list[int] | frozenset[int]) -> bool:
        """Whether two of these ranks must be fed different data."""
        return len(ranks) > 1 and len({self._coordinates[rank] for rank in ranks}) > 1

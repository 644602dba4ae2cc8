"""Shards that are gathered for the forward: whether what each rank got is what the shards add up to. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from rankwatch.shared.types.fingerprint import UNKNOWN, Fingerprint, RankMesh

from ..findings import DesyncFindings
from ..patterns import NEVER, CameApart, Of, Since
from ..rounds import At, Lockstep, Memory, Round
from ..table_layout import Section
from ..votes import UNKNOWN_LANES, Split

_ALL_KNOWN = np.ones(1, np.bool_)


@dataclass(slots=True)
class GatherSums(Round):
    """The sum of the shards that were handed to the gather, and each result once, with its ranks."""

    section: Section | None = None
    count: int = 0
    sums: npt.NDArray[np.uint64] | None = None
    known: npt.NDArray[np.bool_] | None = None
    """Of which rows all shards so far could be read."""
    results: dict[bytes, list[int]] = field(default_factory=dict)

    def add(self, rank: int, fingerprint: Fingerprint, section: Section) -> None:
        self.step = max(self.step, fingerprint.step)
        data = fingerprint.gathers[section.start : section.end]
        lanes = np.frombuffer(data, "<u8").reshape(-1, 2, 2)
        known = _ALL_KNOWN if data.find(UNKNOWN) < 0 else (lanes[:, 0] != UNKNOWN_LANES).any(1)
        if self.section is None or self.sums is None or self.known is None:
            self.section, self.sums, self.known = section, lanes[:, 0, 0].copy(), known
        elif self.section.key == section.key:
            self.sums += lanes[:, 0, 0]
            self.known = self.known & known
        else:
            return  # the round stays without this shard, and is not judged
        self.count += 1
        result = lanes[:, 1].tobytes()
        if result not in self.results:
            self.held += len(result)
        self.results.setdefault(result, []).append(rank)


class GatherGroup(Lockstep[GatherSums]):
    """The ranks whose shards are gathered together."""

    def __init__(
        self, ranks: tuple[int, ...], gone: set[int], memory: Memory, findings: DesyncFindings, mesh: RankMesh
    ) -> None:
        super().__init__(ranks, gone, memory, GatherSums)
        self.parameters: set[str] = set()
        self._findings = findings
        self._mesh = mesh

    def judge(self, at: At, round_: GatherSums) -> None:
        if round_.count < len(self.ranks) or round_.section is None:
            return
        self.count(round_.step)
        rows = [round_.section.kin.rows[row] for row in round_.section.chosen.tolist()]
        self.parameters.update(row.parameter for row in rows)
        wrong: dict[tuple[int, ...], list[str]] = {}
        for row, ranks in _wrong(round_):
            wrong.setdefault(ranks, []).append(rows[row].parameter)
        for ranks, parameters in wrong.items():
            split = Split(ranks, len(self.ranks), len(ranks) < len(self.ranks))
            equal_at = dict.fromkeys(parameters, NEVER)
            mesh = self._mesh
            self._findings.add(
                CameApart(round_.step, split, Since.UNSEEN, mesh.is_declared, mesh.source, equal_at, Of.GATHERED)
            )


def _wrong(round_: GatherSums) -> Iterator[tuple[int, tuple[int, ...]]]:
    """The rows whose result is not the sum, and on which ranks."""
    assert round_.known is not None
    ranks_of: dict[int, list[int]] = {}
    for result, ranks in round_.results.items():
        lanes = np.frombuffer(result, "<u8").reshape(-1, 2)
        is_wrong = (lanes[:, 0] != round_.sums) & (lanes != UNKNOWN_LANES).any(1) & round_.known
        for row in np.flatnonzero(is_wrong).tolist():
            ranks_of.setdefault(row, []).extend(ranks)
    return ((row, tuple(sorted(ranks))) for row, ranks in sorted(ranks_of.items()))

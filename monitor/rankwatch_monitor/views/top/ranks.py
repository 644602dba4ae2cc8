"""The ranks of a view and their nodes, those in trouble first. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from rankwatch.shared.types.frame import NO_LOSS

from ...decide.core.report import RankRow, RankState
from ...decide.core.standing import RankStanding
from ...decide.stalls.stall import PHASE_ORDER
from ...record.follow import View
from .. import roles

STILL_AFTER = 10.0
"""Seconds without progress after which a rank is ``still``. If another still rank is further behind, the rank is ``waiting``."""

NO_HOST = "(not heard of)"

TROUBLE = (
    "lost", "failed", "silent", "still", "aborted", "missing", "waiting", "running", "ended", "finished",
)  # fmt: skip
"""The states of a rank on the screen, the worst first."""

MEANINGS = {
    "lost": "its connection broke, and it did not come back",
    "failed": "an exception ended it",
    "silent": "no sign of life, though it is connected",
    "still": f"no progress for {STILL_AFTER:.0f} s, and no other rank is further behind: look at this one",
    "waiting": "no progress either, but another rank is further behind",
    "aborted": "it was stopped by a verdict, or with the job",
    "missing": "it has never connected",
    "running": "it trains",
    "ended": "its process ended without an exception",
    "finished": "its watch was closed: all is well",
}
"""The states in words, for the help."""

USUAL_LAG = 2
"""Batches that healthy ranks may be apart. A smaller lag does not change their order."""


class RankLine(NamedTuple):
    """A rank on the screen. ``state``: one of TROUBLE; ``lag``: batches behind the furthest rank.

    ``role``: what it has to do with how the run ends (see ``roles``); ``place``: where it stands because of that.
    """

    row: RankRow
    standing: RankStanding | None
    state: str
    batch: int
    lag: int
    place: int
    role: str
    is_cause: bool
    loss: float | None = None

    @property
    def order(self) -> tuple[int, int, int, int]:
        return self.place, TROUBLE.index(self.state), -self.lag if self.lag > USUAL_LAG else 0, self.row.rank


class Node(NamedTuple):
    """The ranks of a host. ``slowest``: the one furthest behind."""

    host: str
    ranks: tuple[RankLine, ...]
    slowest: RankLine

    @property
    def counts(self) -> str:
        return describe_states(rank.state for rank in self.ranks)

    @property
    def still(self) -> float:
        """The longest time, in seconds, since one of its running ranks made progress."""
        return max((rank.standing.still for rank in self.ranks if rank.standing and is_live(rank)), default=0.0)


def ranks_of(view: View) -> list[RankLine]:
    """All ranks of the run: where it is known how the run ends, first those with a role in that; then those in trouble."""
    standings = {rank: standing.batch for rank, standing in view.standings.items()}
    batches = {
        row.rank: max(row.last_batch, standings.get(row.rank, -1), view.batches.get(row.rank, -1))
        for row in view.report.ranks
    }
    known = view.digests[view.digests["loss"] != NO_LOSS]
    losses = dict(zip(known["rank"].tolist(), known["loss"].tolist(), strict=True))  # the last one of each
    furthest = max(batches.values(), default=-1)
    states = _states(view)
    blamed = [role for role in roles.in_order(view.report) if role.text] if view.is_decided else []
    places = {role.row.rank: (place, role.text, role.is_cause) for place, role in enumerate(blamed)}
    found = [
        RankLine(
            row, view.standings.get(row.rank), states[row.rank], batches[row.rank], furthest - batches[row.rank],
            *places.get(row.rank, (len(places), "", False)), losses.get(row.rank),
        )
        for row in view.report.ranks
    ]  # fmt: skip
    return sorted(found, key=lambda rank: rank.order)


def nodes_of(ranks: Sequence[RankLine]) -> list[Node]:
    """The nodes of these ranks, in the order of the ranks."""
    by_host: dict[str, list[RankLine]] = {}
    for rank in ranks:
        by_host.setdefault(rank.row.host or NO_HOST, []).append(rank)
    found = [
        Node(host, tuple(of_host), max(filter(is_live, of_host), key=lambda rank: rank.lag, default=of_host[0]))
        for host, of_host in by_host.items()
    ]
    return sorted(found, key=_order)


def short_names(hosts: Sequence[str]) -> dict[str, str]:
    """The hosts without their domain, where all have the same one."""
    shorts = {host: host.partition(".")[0] for host in hosts}
    domains = {host.partition(".")[2] for host in hosts if host != NO_HOST}
    are_unique = len(set(shorts.values())) == len(shorts)
    return shorts if len(domains) == 1 and are_unique else {host: host for host in shorts}


def describe_states(states: Iterable[str]) -> str:
    """``2 lost, 1022 running``, the worst first."""
    counts = Counter(states)
    return ", ".join(f"{counts[state]} {state}" for state in TROUBLE if counts[state])


def is_live(rank: RankLine) -> bool:
    return rank.state in ("running", "silent", "still", "waiting")


def _order(node: Node) -> tuple[int, int, int, int]:
    place, trouble, _, _ = min(rank.order for rank in node.ranks)
    return place, trouble, node.slowest.order[2], min(rank.row.rank for rank in node.ranks)


def _states(view: View) -> Mapping[int, str]:
    """The state of each rank, one of TROUBLE."""
    states = {row.rank: row.state.value for row in view.report.ranks}
    running = {
        rank: standing
        for rank, standing in view.standings.items()
        if states.get(rank) == RankState.RUNNING.value and not view.is_over
    }
    behind = min(map(_place, running.values()), default=None)
    stall = view.report.stall
    stalled, waiting = (stall.ranks, stall.waiting) if stall is not None else ((), ())
    for rank, standing in running.items():
        if standing.quiet:
            states[rank] = "silent"
        elif rank in stalled or rank in waiting:
            states[rank] = "still" if rank in stalled else "waiting"
        elif standing.still > STILL_AFTER:
            states[rank] = "still" if _place(standing) == behind else "waiting"
    return states


def _place(standing: RankStanding) -> tuple[int, ...]:
    return standing.batch, standing.eval, standing.frame, PHASE_ORDER.get(standing.phase, 0)

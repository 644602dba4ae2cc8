"""Facts <-> rows of the table ``events``, and how a fact changes its run's row in a list. Batches are not events."""

from __future__ import annotations

import dataclasses
import json
from typing import Any, cast

from rankwatch.shared.link import wire
from rankwatch.shared.printable import cleaned, paragraph
from rankwatch.shared.types import messages
from rankwatch.shared.types.fields import MAX_RANKS

from ..decide.core import journal
from ..decide.core.fact import OWN_FACTS, OwnFact
from ..decide.core.gaps import Gap, describe_gap
from ..decide.core.journal import Fact
from ..decide.trip.skipped import is_left_out
from .checked import Unsound, reader_of
from .runs import RunRow

AND_MORE = ", and more: see its report"

_LINES = frozenset({"reason", "text", "so_far", "stops"})
"""Fields that may have many lines."""


def kind_of(fact: Fact) -> str:
    return type(fact).__name__.lower()


def encode(fact: Fact) -> tuple[str, str | bytes]:
    """The kind of a fact, and its body: JSON for what comes from the collector itself, the wire's bytes for messages."""
    kind = kind_of(fact)
    if isinstance(fact, OwnFact):
        return kind, json.dumps(dataclasses.asdict(cast(Any, fact)))
    return kind, wire.encode(cast(messages.Message, fact))


def decode(kind: str, body: str | bytes) -> Fact:
    """Raises ValueError, LookupError, TypeError, AttributeError or ProtocolError when the body is no fact of this kind."""
    if isinstance(body, bytes):
        return wire.decode(body)
    read = reader_of(cast(Any, OWN_FACTS[kind]))
    fields: dict[str, Any] = {
        name: paragraph(of) if name in _LINES else cleaned(of) for name, of in json.loads(body).items()
    }
    fact: Fact = read(fields)
    if isinstance(fact, journal.Opened) and not 0 < fact.world_size <= MAX_RANKS:
        raise Unsound(f"a run of {fact.world_size} ranks")  # a table of all of them would be made
    return fact


def row_after(row: RunRow, fact: Fact) -> RunRow:
    """The run's row in a list after this fact; a replay of all facts gives the same outcome, reason and end."""
    if isinstance(fact, journal.Opened):
        return row._replace(job=fact.job, restart=fact.restart, world_size=fact.world_size)
    if isinstance(fact, messages.Hello):
        return row._replace(is_over=False, outcome="", reason="") if row.is_over and not row.is_final else row
    if isinstance(fact, messages.Tripped):
        batches = max(row.batches, fact.trip.position.batch + 1)
        return row._replace(batches=batches, is_final=row.is_final or not (row.outcome or is_left_out(fact.trip)))
    if isinstance(fact, journal.Reached):
        return row._replace(batches=max(row.batches, *(batch + 1 for _, batch, _, _ in fact.moments), 0))
    if isinstance(fact, messages.Bye):
        return row._replace(batches=max(row.batches, fact.moment.batch + 1))
    if isinstance(fact, journal.Decided):
        is_final = row.is_final or fact.abort
        return row._replace(outcome=fact.outcome.value, reason=fact.reason, is_final=is_final, judged="")
    if isinstance(fact, journal.Doubted):
        return row._replace(judged="; ".join(one.text for one in fact.reasons))
    if isinstance(fact, journal.Skipped):
        return row._replace(skipped=fact.so_far)
    if isinstance(fact, journal.Stood):
        return row._replace(stalled="" if fact.stall is None else fact.stall.text)
    if isinstance(fact, Gap):
        text = describe_gap(fact, row.world_size)
        return row._replace(gaps=text if row.gaps in ("", text) else f"{row.gaps.removesuffix(AND_MORE)}{AND_MORE}")
    if isinstance(fact, journal.Closed):
        return row._replace(is_over=True)
    return row

"""What happened in a run: a line for each fact in its record."""

from __future__ import annotations

import json
from typing import Any

from rankwatch.shared.types import messages
from rankwatch.shared.types.notice import describe_notice
from rankwatch.shared.words.brief import brief
from rankwatch.shared.words.closeup_text import describe_closeup
from rankwatch.shared.words.text import describe_culprit, describe_position, describe_rank

from ..decide.core.fact import OwnFact
from ..decide.core.journal import NO_RANK, Entry
from ..record.facts import kind_of


def to_dict(time: float, entry: Entry) -> dict[str, Any]:
    """``rank`` is null for a fact about the whole run."""
    return {
        "time": time,
        "rank": None if entry.rank == NO_RANK else entry.rank,
        "kind": kind_of(entry.fact),
        "text": describe(entry),
    }


def describe(entry: Entry) -> str:
    """The fact of an entry in words, without its rank."""
    fact = entry.fact
    match fact:
        case OwnFact():
            return fact.describe(entry.rank)
        case messages.Hello():
            who = describe_rank(fact.rank, fact.world_size, fact.host, fact.local_rank, fact.stage)
            gpu = f", {fact.gpu.describe()}" if fact.gpu.is_known else ""
            return f"{who} connected: process {fact.pid}, {fact.device}{gpu}, torch {fact.torch}"
        case messages.Tripped():
            return f"tripped: {describe_culprit(f'rank {entry.rank}', fact.trip)}"
        case messages.LookedCloser():
            return f"looked closer: {describe_closeup(fact.closeup)}"
        case messages.Noticed():
            return f"noticed: {describe_notice(fact.notice)}"
        case messages.Beat():
            return (
                f"was in {describe_position(fact.moment.position)}, frame {fact.moment.position.frame}, phase {fact.phase}"
            )
        case messages.Off():
            return f"its watch {fact.text}"
        case messages.Ack():
            return "acknowledged the abort"
        case messages.Bye():
            return ": ".join(filter(None, ("said goodbye", fact.outcome, brief(fact.text, fact.at))))
        case messages.Tune():
            return f"options changed: {fact.tuning.describe()}"
        case messages.Inspected():
            return f"stalls: it is in {fact.waits or 'its threads'}"
    return json.dumps(str(fact))

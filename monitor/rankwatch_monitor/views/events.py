"""What happened in a run: a line for each fact in its record."""

from __future__ import annotations

import json
from typing import Any

from rankwatch.shared.types import messages
from rankwatch.shared.types.frame import Position
from rankwatch.shared.types.notice import describe_notice
from rankwatch.shared.words.closeup_text import describe_closeup
from rankwatch.shared.words.divergence import describe_divergence
from rankwatch.shared.words.text import describe_culprit, describe_position, describe_rank, name_ranks

from ..decide.core import journal
from ..decide.core.gaps import Gap, describe_gap
from ..decide.core.journal import Entry
from ..decide.replicas.desync_text import describe_compared
from ..record.facts import kind_of

MAX_ENTRIES = 4
"""Desynced parameters that a line names."""


def to_dict(time: float, entry: Entry) -> dict[str, Any]:
    """``rank`` is null for a fact about the whole run."""
    return {
        "time": time,
        "rank": None if entry.rank == journal.NO_RANK else entry.rank,
        "kind": kind_of(entry.fact),
        "text": describe(entry),
    }


def describe(entry: Entry) -> str:
    """The fact of an entry in words, without its rank."""
    fact = entry.fact
    match fact:
        case journal.Opened():
            model = f", model {fact.model + 1}" if fact.model else ""
            return f"job {fact.job}, restart {fact.restart}{model}, {fact.world_size} ranks"
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
            return f"said goodbye: {fact.outcome}" + (f": {fact.text}" if fact.text else "")
        case messages.Tune():
            return f"options changed: {fact.tuning.describe()}"
        case journal.Died():
            return fact.how
        case journal.Left():
            return f"counted as {fact.state.value}"
        case journal.InTurn():
            return f"what it said before its {'trip' if fact.kind == messages.Tripped.__name__ else 'close-up'} is here"
        case journal.Reached():
            if entry.rank != journal.NO_RANK:
                ((_, batch, evaluation, frame),) = fact.moments
                return f"answered: it was in {describe_position(Position(batch, evaluation, frame))}, frame {frame}"
            return f"where the {len(fact.ranks)} ranks were when one of them tripped"
        case journal.Miscounted():
            return fact.text
        case Gap():
            return describe_gap(fact, len(fact.ranks))
        case journal.Waited():
            return "the decision window ended"
        case journal.Stood():
            return "no rank is stalled any more" if fact.stall is None else fact.stall.text
        case messages.Inspected():
            return f"stalls: it is in {fact.waits or 'its threads'}"
        case journal.NoStack():
            return f"gave no stack: {fact.text}"
        case journal.Diverged():
            return f"diverged: {describe_divergence(fact.found)}"
        case journal.Desynced():
            return "; ".join(
                f"desynced ({one.pattern.value}): {one.parameter} of {name_ranks(one.ranks)} since step {one.step}"
                for one in fact.entries[:MAX_ENTRIES]
            ) + (f"; and {len(fact.entries) - MAX_ENTRIES} more parameters" if len(fact.entries) > MAX_ENTRIES else "")
        case journal.ReplicasCompared():
            return f"replicas compared: {describe_compared(fact.compared, fact.compared.ranks)}"
        case journal.JobInterrupted():
            return f"the command received {fact.signal}"
        case journal.JobEnded():
            how = "exit code unknown" if fact.exit_code is None else f"exit code {fact.exit_code}"
            return f"the command ended: {how}" + (f", stopped by {fact.interrupted}" if fact.interrupted else "")
        case journal.Decided():
            return f"decided: {fact.outcome.value}{', all ranks are to stop' if fact.abort else ''}: {fact.reason}"
        case journal.Closed():
            return "the run is over"
    return json.dumps(str(fact))

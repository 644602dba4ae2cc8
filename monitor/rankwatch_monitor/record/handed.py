"""Looks in a record for whether a stage of a pipeline was handed what the stage before it had sent in that batch."""

from __future__ import annotations

import math
from collections.abc import Iterator

from rankwatch.shared.figures import figure
from rankwatch.shared.types.frame import ALL_FINITE, NO_STAGE, NON_FINITE, Kind, Phase, Reading, State
from rankwatch.shared.words.text import name_ranks

from ..decide.core.report import Report
from .reader import RunRecord

MOST_SENDERS = 16
"""Ranks of the stage before that are looked at. Which of them sends to which rank is not known: one that fits is enough."""

TOLERANCE = 0.05
"""By how much what arrived may differ: a link in bfloat16 rounds."""

_NUMBERS = NON_FINITE | ALL_FINITE


def find_handed(report: Report, record: RunRecord) -> str:
    """What the culprit's stage was handed otherwise than it was sent; empty: nothing, or it is not known.

    Raises StoreError.
    """
    verdict = report.verdict
    stage = report.ranks[verdict.tripped].stage if verdict is not None else NO_STAGE
    if verdict is None or stage in (NO_STAGE, 0):
        return ""
    batch = verdict.trip.position.batch
    given = [one for one in verdict.trip.root_inputs if one.kind is Kind.INPUT and one.state in _NUMBERS]
    senders = [row.rank for row in report.ranks if row.stage == stage - 1][:MOST_SENDERS]
    sent = {rank: list(_outputs(record, rank, batch)) for rank in senders}
    told = {rank: next(_differences(outputs, given), None) for rank, outputs in sent.items() if outputs}
    if not told or None in told.values():
        return ""
    rank, pair = next(iter(told.items()))
    assert pair is not None
    output, arrived = pair
    return (
        f"stage {stage} was handed what stage {stage - 1} did not send: the {output.label} of {name_ranks([rank])} was "
        f"{_describe(output)} in batch {batch}, and {arrived.label} of rank {verdict.tripped} {_describe(arrived)}"
    )


def _outputs(record: RunRecord, rank: int, batch: int) -> Iterator[Reading]:
    """What the forward of the root returned."""
    for part in record.history(rank, (batch, batch)):
        row = 0
        for spec in part.table.specs:
            for one in spec.readings:
                state = State(int(part.states[row]))
                if not spec.module and spec.phase is Phase.FORWARD and one.kind is Kind.OUTPUT and state in _NUMBERS:
                    yield Reading(one.label, one.kind, one.dtype, 0.0, float(part.abs_max[row]), state)
                row += 1


def _differences(sent: list[Reading], given: list[Reading]) -> Iterator[tuple[Reading, Reading]]:
    for output, arrived in zip(sent, given, strict=False):
        is_same = output.state is arrived.state or {output.state, arrived.state} == ALL_FINITE
        if is_same and output.state is State.FINITE:
            is_same = math.isclose(output.abs_max, arrived.abs_max, rel_tol=TOLERANCE)
        if not is_same:
            yield output, arrived


def _describe(reading: Reading) -> str:
    value = f"abs max {figure(reading.abs_max)}" if reading.state is State.FINITE else reading.state.word
    return f"{reading.dtype}, {value}"

"""What a replay found, as text and as JSON."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..shared.types.trip import Operator
from ..shared.words.closeup_text import describe_operator
from ..shared.words.text import format_head
from .trial import ForwardResult

AS_TRAINED = "as trained"


@dataclass
class ReplayFindings:
    """``recurred`` of ``of`` forwards were bad; ``same_bits``: all returned the same. ``as_trained``: those of the training.
    ``differs``: code or inputs are not those of the training.

    ``table`` has an outcome for each precision and device. ``rows``: from, to before, of how many. ``others_bad``: whether
    the other rows are bad without these.
    """

    capsule: Path
    about: dict[str, Any]
    device: str
    recurred: int = 0
    of: int = 0
    same_bits: bool = True
    as_trained: bool | None = None
    error: str = ""
    differs: bool = False
    operator: Operator | None = None
    no_operator: str = ""
    table: dict[str, dict[str, ForwardResult]] = field(default_factory=dict)
    rows: tuple[int, int, int] | None = None
    others_bad: bool | None = None
    why_no_rows: str = ""
    repro: str = ""
    notes: list[str] = field(default_factory=list)

    @property
    def is_backward(self) -> bool:
        """Whether a gradient was bad, and not an output."""
        return bool(self.about["gradients"])


def render(found: ReplayFindings) -> str:
    about, trip = found.about, found.about["trip"]
    where = f"{about['name'] or '(root)'} ({about['class']})"
    what = f"{where}, of rank {about['rank']}, batch {trip['batch']} (optimizer step {trip['optimizer_step']})"
    if found.is_backward:
        what += f", in whose backward {trip['module'] or '(root)'} ({trip['class']}) had {trip['label']} {trip['state']}"
    elif about["inner"] is None:
        what += f": {trip['label']} was {trip['state']}"
    else:
        what += f", in which {trip['module']} ({trip['class']}) had {trip['label']} {trip['state']}"
    fields = [("capsule", what), ("recurs", _recurs(found))]
    if found.operator is not None:
        fields.append(("operator", describe_operator(found.operator)))
    elif found.no_operator:
        fields.append(("operator", found.no_operator))
    fields += [("precision", "\n".join(_table(found)))] if found.table else []
    fields += [("rows", _rows(found))] if found.rows is not None or found.why_no_rows else []
    fields += [("repro", found.repro)] if found.repro else []
    fields += [("note", note) for note in found.notes]
    return format_head(f"replay of {found.capsule}", fields)


def to_json(found: ReplayFindings) -> str:
    operator = found.operator
    source = operator.source._asdict() if operator is not None and operator.source is not None else None
    told = {
        "capsule": str(found.capsule),
        "module": found.about["name"],
        "module_class": found.about["class"],
        "rank": found.about["rank"],
        "batch": found.about["trip"]["batch"],
        "device": found.device,
        "backward": found.is_backward,
        "recurred": found.recurred,
        "of": found.of,
        "same_bits": found.same_bits,
        "bits_of_the_training": found.as_trained,
        "error": found.error or None,
        "operator": None if operator is None else {"operator": operator.name, "source": source},
        "precision": {
            dtype: {device: _outcome_to_dict(one) for device, one in row.items()} for dtype, row in found.table.items()
        },
        "rows": None if found.rows is None else dict(zip(("from", "to_before", "of"), found.rows, strict=True)),
        "other_rows_bad": found.others_bad,
        "repro": found.repro or None,
        "notes": found.notes,
    }
    return json.dumps(told, indent=2, allow_nan=False) + "\n"


def _outcome_to_dict(one: ForwardResult) -> dict[str, Any]:
    largest = one.abs_max if math.isfinite(one.abs_max) and not one.error else None
    return {"state": None if one.error else one.state.name.lower(), "abs_max": largest, "error": one.error or None}


def _recurs(found: ReplayFindings) -> str:
    times = f"{found.recurred} of {found.of}"
    if found.error:
        return f"not known: the {'backward' if found.is_backward else 'forward'} raises {found.error}"
    if not found.recurred:
        finite = f"no: finite {found.of} of {found.of} times here"
        if found.differs:
            return f"{finite}. It was not the same forward as in the training: see the notes"
        return (
            f"{finite}. Replay it on the machine of the report, with its torch: if it is finite there, too, suspect the hardware "
            "of that machine, or what is not in the capsule: another thread, an environment variable, a file that it reads"
        )
    bits = "the same bits each time" if found.same_bits else "but other bits each time: an operator is not deterministic"
    if found.of == 1:
        bits = ""
    trained = {True: "the bits of the training", False: "not the bits of the training", None: ""}[found.as_trained]
    return ", ".join(part for part in (times, bits, trained) if part)


def _table(found: ReplayFindings) -> list[str]:
    devices = list(next(iter(found.table.values())))
    lines = [f"{'':10} " + " ".join(f"{device:>12}" for device in devices)]
    errors = []
    for name, row in found.table.items():
        cells = []
        for device in devices:
            one = row[device]
            if one.error:
                fixed = " (its code may fix another dtype)" if "dtype" in one.error else ""
                errors.append(f"{name} on {device}: {one.error}{fixed}")
            cells.append(f"{'error' if one.error else one.state.name.lower() if one.is_bad else f'{one.abs_max:.2e}':>12}")
        lines.append(f"{name:10} " + " ".join(cells))
    return [*lines, *errors]


def _rows(found: ReplayFindings) -> str:
    if found.rows is None:
        return found.why_no_rows
    begin, end, of = found.rows
    if end - begin == of:
        return f"all {of} rows: neither half of the batch alone is enough"
    others = {True: "; the others are bad without it, too", False: "; the others without it are finite", None: ""}[
        found.others_bad
    ]
    if end - begin == 1:
        return f"row {begin} of {of} is enough (counted from 0){others}"
    others = others.replace(" it", " them")
    return f"rows {begin} to {end - 1} of {of} are enough (counted from 0), and neither half of them{others}"

"""A list of runs, for people and for programs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rankwatch.shared.printable import one_line
from rankwatch.shared.system.colour import amber

from ..record.runs import RunRow
from .jsonable import document, pick

UNFINISHED = "no collector writes it any more, and how it ended is not on record"

_HEAD = ("run", "state", "ranks", "batches", "why")


_CUT = "..."


def render(runs: Sequence[RunRow], columns: int = 0, *, is_coloured: bool = False) -> str:
    """One line for each run under a line of names, newline at its end; cut to the ``columns`` of a terminal, if there is one.

    ``is_coloured``: a run that goes on or finished, and does not go well, is amber.
    """
    rows = [_HEAD, *map(_cells, runs)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(_HEAD) - 1)] + [0]
    lines = ("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)
    cut = [_cut(line.rstrip(), columns) for line in lines]
    doubtful = [False, *(is_coloured and bool(run.judged) for run in runs)]
    return "".join((amber(line) if of else line) + "\n" for line, of in zip(cut, doubtful, strict=True))


def _cut(line: str, columns: int) -> str:
    return line[: max(0, columns - len(_CUT))] + _CUT if 0 < columns < len(line) else line


def to_json(runs: Sequence[RunRow]) -> str:
    """As JSON; ``outcome`` is null until the run is over."""
    return document([to_dict(run) for run in runs])


def to_dict(run: RunRow) -> dict[str, Any]:
    return {
        **pick(run, "run job restart is_over"),
        "state": state_of(run),
        "gaps": run.gaps,
        "stalled": run.stalled if _is_stalled(run) else "",
        "outcome": run.outcome if run.is_over else None,
        **pick(run, "reason skipped judged world_size batches"),
    }


def _cells(run: RunRow) -> tuple[str, ...]:
    state = f"{state_of(run)}, but" if run.judged else state_of(run)
    return run.run, state, str(run.world_size), str(run.batches), one_line(why(run))


def state_of(run: RunRow) -> str:
    """``running``, ``stalled``, how it ended, or ``unfinished``: no collector writes it, and its end is not on record."""
    if _is_stalled(run):
        return "stalled"
    return run.outcome if run.is_over else "running" if run.is_alive else "unfinished"


def why(run: RunRow) -> str:
    notes = [run.stalled] if _is_stalled(run) else []
    notes += [told for told in (run.judged or run.reason, run.judged or run.skipped) if told]
    if not run.is_alive:
        notes.append(UNFINISHED)
    return "; ".join(dict.fromkeys([*notes, run.gaps] if run.gaps else notes))


def _is_stalled(run: RunRow) -> bool:
    """Whether ranks of it are stalled now."""
    return bool(run.stalled) and run.is_alive and not (run.is_over or run.outcome)

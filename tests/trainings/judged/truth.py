"""How a training went that ended without a verdict."""

from __future__ import annotations

from dataclasses import dataclass

from trainings.case import Row

BATCHES = 320


@dataclass(frozen=True)
class Went:
    """``badly``: the kind of the reason that is told; empty: nothing may be. ``well``: and it is said to look healthy."""

    badly: str = ""
    well: bool = False


def well(batches: int = BATCHES, **options: object) -> Row[Went]:
    """It learns, and the report says so."""
    return Row(Went(well=True), batches, options=options)


def peace(batches: int = BATCHES, **options: object) -> Row[Went]:
    """Healthy, though its loss may not show that."""
    return Row(Went(), batches, options=options)


def badly(kind: str, batches: int = BATCHES, **options: object) -> Row[Went]:
    return Row(Went(badly=kind), batches, options=options)

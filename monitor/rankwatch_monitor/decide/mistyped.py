"""The answer to a change of options whose patterns match nothing that a run has measured. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import chain, islice

from rankwatch.shared.types.frame import FrameTable
from rankwatch.shared.types.tuning import Tuning
from rankwatch.shared.words.patterns import describe_unmatched, ignorable, names_of

MOST_SPECS = 50_000
"""Frames whose names are looked at: the collector has other work."""


def mistyped(tuning: Tuning, tables: Iterable[FrameTable]) -> Iterator[str]:
    """A line for each pattern that matches none of the names in these tables; none before there are any."""
    if not (tuning.modules or tuning.ignore):
        return
    specs = list(islice(chain.from_iterable(table.specs for table in tables), MOST_SPECS))
    modules = {name for spec in specs for name in names_of(spec)}
    so_far = f"among the {len(modules)} module{'s' * (len(modules) != 1)} measured so far"
    yield from describe_unmatched("modules", tuning.modules or (), modules, f"name {so_far}")
    if tuning.ignore:
        readings = {name for spec in specs for row in spec.readings for name in ignorable(spec, row)}
        yield from describe_unmatched("ignore", tuning.ignore, readings, f"name or reading {so_far}")

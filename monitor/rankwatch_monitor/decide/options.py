"""What can be set of a collector."""

from __future__ import annotations

from dataclasses import dataclass

from rankwatch.shared import wire


@dataclass(frozen=True, slots=True)
class Options:
    """The collector's options, in seconds.

    ``cut_off_after``: ranks that all fell silent at once, before their connections ended, are lost only after so long, and
    have ``return_window`` to come back once the first is heard again.
    ``abort_on_lost``: whether a lost or failed rank stops the others; ``abort_on_stall``: whether one does that made no
    progress for ``stall_after`` (0: never asked). ``job_end_is_told``: whether somebody will say how the
    job's command ended; until then no run is over. ``every``: ranks look at each batch of this many (None: as they were told).
    ``room``: how many ranks can connect. Very large worlds beat more slowly, and have longer to answer (see ``Run``).
    """

    heartbeat: float = 1.0
    decision_window: float = 2.0
    abort_grace: float = 10.0
    abort_repeat: float = 0.5
    acknowledge_window: float = 3.0
    abort_on_lost: bool = True
    cut_off_after: float = 600.0
    return_window: float = 10.0
    stall_after: float = 300.0
    abort_on_stall: bool = False
    job_end_is_told: bool = False
    every: int | None = None
    room: int = wire.MAX_RANKS

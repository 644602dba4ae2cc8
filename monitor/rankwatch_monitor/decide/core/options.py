"""The options of a collector."""

from __future__ import annotations

from dataclasses import dataclass, replace

from rankwatch.shared.types.fields import MAX_RANKS
from rankwatch.shared.types.stream_limit import WINDOW

MAX_BEATS = 2048
"""Heartbeats of one run, each second."""

MAX_ABORTS = 8192
"""Aborts of one run, each second: of very many ranks, one that has not acknowledged may only be waiting for its turn."""

MAX_ANSWERS = 4096
"""Ranks of one run, each second, that answer an election or an abort: of very many ranks, the last answer later."""

WINDOWS = 16 << 20
"""Bytes of the windows of all ranks of one run: a thousand batches, which take 25 ms to receive when all come at once. A rank may
always send one batch."""


@dataclass(frozen=True, slots=True)
class Options:
    """The collector's options, in seconds.

    ``abort_grace`` begins when a rank holds no work any more, ``hold_limit`` after the abort at the latest.
    ``unseen_after``: a rank that fell silent before its connection ended, and that nobody saw end, is lost only after this
    time: TCP sends a packet again after 1, 2, 4, 8 and 16 s, and where every third is lost, one of five comes through.
    ``cut_off_after``: ranks that all fell silent at once, before their connections ended, are lost only after this time.
    Once the first of them is heard again, the others have ``return_window`` to reconnect. ``abort_on_lost``: whether a lost
    or failed rank stops the others. ``abort_on_stall``: whether a stalled rank does, one that made no progress for
    ``stall_after`` (0: stalls are not looked for). ``abort_on_desync``: whether replicas that must be equal and are not do.
    ``expects_job_end``: an event will say how the command of the job ended, and no run is over before. ``every``: ranks
    measure one batch of this many (None: as each rank was told). ``launch``: the id of the command that the collector was started
    for; empty: of none. ``room``: how many ranks can connect. ``runs_dir``: the absolute path of the folder of all runs.
    ``host``: the collector's. Where one of these two is empty, ranks are not told it. ``window``: of each rank, in bytes.
    """

    heartbeat: float = 1.0
    decision_window: float = 2.0
    abort_grace: float = 10.0
    hold_limit: float = 300.0
    abort_repeat: float = 0.5
    acknowledge_window: float = 3.0
    abort_on_lost: bool = True
    unseen_after: float = 30.0
    cut_off_after: float = 600.0
    return_window: float = 10.0
    stall_after: float = 300.0
    abort_on_stall: bool = False
    abort_on_desync: bool = False
    expects_job_end: bool = False
    every: int | None = None
    launch: str = ""
    room: int = MAX_RANKS
    runs_dir: str = ""
    host: str = ""
    window: int = WINDOW

    @property
    def lost_after(self) -> float:
        return 3 * self.heartbeat

    def folder_of(self, run: str) -> str:
        """Where the files of a run are; empty: not known."""
        return f"{self.runs_dir}/{run}" if self.runs_dir else ""

    def for_world(self, size: int) -> Options:
        """The options of a run of ``size`` ranks: very many beat more slowly, have longer to answer, and smaller windows."""
        return replace(
            self,
            heartbeat=max(self.heartbeat, size / MAX_BEATS),
            decision_window=max(self.decision_window, size / MAX_ANSWERS),
            acknowledge_window=max(self.acknowledge_window, size / MAX_ANSWERS),
            abort_repeat=max(self.abort_repeat, size / MAX_ABORTS),
            window=min(self.window, max(1, WINDOWS // size)),
        )

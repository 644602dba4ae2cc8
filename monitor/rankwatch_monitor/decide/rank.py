"""What a run knows of one of its ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rankwatch.shared import messages
from rankwatch.shared.cause import Trip
from rankwatch.shared.frame import NOWHERE, Phase, Position
from rankwatch.shared.text import describe_position, describe_rank, name_spans

from .report import RankRow, RankStanding, RankState
from .verdict import Liveness, Witness

# An election asks all ranks, and the abort waits for it: of thousands the names alone would take milliseconds.
_RUNNING, _FINISHED = RankState.RUNNING, RankState.FINISHED
_LIVE, _GONE, _DONE = Liveness.LIVE, Liveness.GONE, Liveness.DONE


@dataclass(slots=True)
class Rank:
    """A rank that has connected.

    ``full_batch`` is the last batch of which it told more than the root: ``forward_frames`` in its forward, ``frames`` with
    its backward as far as that has been told, and ``frames_before`` in the full batch before.
    """

    hello: messages.Hello
    peer: bytes
    heard_at: float
    moved_at: float = 0.0
    state: RankState = RankState.RUNNING
    connected: bool = True
    gone_at: float = 0.0
    """When its connection ended, the last time that one did."""
    cut_off: bool = False
    """Whether it was silent before its connection ended."""
    quiet: str = ""
    """How it is silent, while it is."""
    progress: Position = NOWHERE
    phase: str = "idle"
    seq: int = 0
    """The last of its messages that was taken in, and of those the last that is on record: what it need not keep any more."""
    stored: int = 0
    awaits_receipt: bool = False
    """Whether it is to hear at once that all it sent is on record."""
    last_batch: int = -1
    reported_batch: int = -1
    """The last batch whose whole forward it has reported: all of it was finite."""
    full_batch: int = -1
    forward_frames: int = 0
    frames: int = 0
    frames_before: int = 0
    queued: int = 0
    dropped: int = 0
    trip: Trip | None = None
    acknowledged_at: float | None = None
    farewell: str = ""
    rival: str = ""

    @property
    def is_running(self) -> bool:
        return self.state is RankState.RUNNING

    @property
    def name(self) -> str:
        hello = self.hello
        return describe_rank(hello.rank, hello.world_size, hello.host, hello.local_rank, hello.stage)

    @property
    def last_seen(self) -> str:
        return f"last seen in {describe_position(self.progress)}, frame {self.progress.frame}, phase {self.phase}"

    def hear(self, now: float) -> None:
        self.heard_at, self.connected, self.quiet, self.cut_off = now, True, "", False

    def is_news(self, seq: int) -> bool:
        """Whether a message of this number is not in already: one that was sent again after a reconnect may be."""
        if seq <= self.seq:
            return False
        self.seq = seq
        return True

    def take(self, batch: int, first_frame: int, frames: int) -> None:
        """So many frames, a part of a batch: its forward, or what was recorded in its backward."""
        end = first_frame + frames
        if batch > self.last_batch:
            self.last_batch = batch
        if batch > self.reported_batch:
            self.reported_batch = batch
        if first_frame == 0 and frames > 1:
            self.full_batch, self.frames_before, self.forward_frames, self.frames = batch, self.frames, end, 0
        if batch == self.full_batch and end > self.frames:
            self.frames = end
        if (batch, 0, end) > self.progress:
            self.advance(Position(batch, 0, end), "backward")

    def advance(self, position: Position, phase: str) -> None:
        """The rank was here. It never goes back: what it says of itself may be older than the batch that came before it."""
        if position >= self.progress:
            if (position, phase) != (self.progress, self.phase):
                self.moved_at = self.heard_at
            self.progress, self.phase = position, phase

    def frames_around(self, trip: Trip) -> int | None:
        """How many frames a batch like that of ``trip`` has, as this rank counted them: a trip's forward has those up to the
        root's, which is its last; its backward those of the whole batch. None: this rank does not know."""
        spec, position = trip.frame.spec, trip.position
        if spec.phase is Phase.FORWARD:
            frames = self.forward_frames if spec.module else position.frame + 1
        else:
            tells_root_alone = self.full_batch < position.batch == self.last_batch
            frames = 0 if tells_root_alone else max(self.frames, self.frames_before)
        return frames if frames > position.frame else None

    def witness(self) -> Witness:
        standing = _LIVE if self.state is _RUNNING else _DONE if self.state is _FINISHED else _GONE
        return Witness(standing, self.progress, self.trip, self.hello.stage, self.reported_batch)

    def standing(self, now: float) -> RankStanding:
        return RankStanding(
            self.hello.rank, self.state, *self.progress, self.phase, round(now - self.heard_at, 3), round(now - self.moved_at, 3),
            self.quiet, self.queued, self.dropped,
        )  # fmt: skip

    def row(self) -> RankRow:
        """The rank as reports show it."""
        return RankRow(
            rank=self.hello.rank,
            local_rank=self.hello.local_rank,
            host=self.hello.host,
            pid=self.hello.pid,
            last_batch=max(self.last_batch, self.progress.batch),
            state=self.state,
            acknowledged=self.acknowledged_at is not None,
            dropped=self.dropped,
            farewell=self.farewell,
            rival=self.rival,
            stage=self.hello.stage,
        )


def describe_several(records: Sequence[Rank]) -> str:
    """``rank 3 of 8 (node1, local rank 1) is`` or ``ranks 8-15 of 32 (node1) are``: the beginning of a sentence."""
    if len(records) == 1:
        return f"{records[0].name} is"
    hosts = list(dict.fromkeys(record.hello.host for record in records))
    shown = ", ".join(hosts[:4]) + (f" and {len(hosts) - 4} more hosts" if len(hosts) > 4 else "")
    ranks = name_spans([record.hello.rank for record in records])
    return f"{ranks} of {records[0].hello.world_size} ({shown}) are"

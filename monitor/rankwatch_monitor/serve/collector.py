"""The shell round the ledger: one socket, the clock, the runs' folder. Events go in, and the ledger's effects are performed."""

from __future__ import annotations

import logging
import resource
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path

import zmq

from rankwatch.shared.link import sockets, wire
from rankwatch.shared.link.own_time import OwnTime
from rankwatch.shared.link.wake import Wake
from rankwatch.shared.printable import printable
from rankwatch.shared.system.exit_queue import end_process
from rankwatch.shared.types import messages
from rankwatch.shared.types.fields import MAX_RANKS

from ..decide.core.effects import (
    Alert,
    Effect,
    EndProcess,
    FollowProcess,
    IssueKey,
    Note,
    PointLatest,
    Publish,
    RecordTrace,
    Send,
    SendAll,
    Show,
)
from ..decide.core.journal import JobEnded, JobInterrupted
from ..decide.core.ledger import (
    CommandEnded,
    Disconnected,
    Event,
    Ledger,
    Malformed,
    RankExited,
    Received,
    Stored,
    Tick,
    Unrecorded,
)
from ..decide.core.report import Report
from ..record.reader import RunRecord
from ..record.schema import StoreError
from ..record.store import Limits
from .door.backlog import Backlog
from .door.credentials import Credentials
from .door.decoder import DecoderThread, decode
from .door.fair_queue import SLICE, Turns, is_long
from .door.inbox import Dropped, Ended, Found, Inbox, Letter, Parted
from .files.publisher import Publisher
from .files.run_folder import RunsFolder
from .files.run_judge import RunJudge
from .files.unwritten import FileWrite
from .files.writer import RecordWriter
from .metrics.meters import LoopCounts, Meters
from .processes.archiver import Archiver
from .processes.process_ends import ExitWatch
from .settings import Settings

log = logging.getLogger(__name__)

DEFAULT_LISTEN = "tcp://127.0.0.1:27077"

BUSY_TICK, IDLE_TICK = 50, 500
"""Milliseconds between looks at the clock, with and without a run under way."""

LAST_WORDS, LONGEST_LAST_WORDS = 50, 1.0
"""How long, at the end, messages are still received: until none came for 50 ms, and for a second at most."""

BURST, LONGEST_BURST = 1000, 0.05
"""Messages received in a row before the clock is looked at, and seconds: the messages of one key may take long."""

BATCHES_SLICE = 0.001
"""Seconds for which batches are handled before the socket is looked at. Few messages of one peer fit into the socket: a trip may
come only after several looks."""

LAST_TURNS = 10.0
"""Seconds at the end for which these are still handled."""

AGAIN = messages.Error("too much of this key waits here: say HELLO, and repeat what is not on record", "hello")

SEVERAL_PARTS = "a message of several parts, which no message has: nothing more is taken from this connection"

TO_PEER = zmq.NOBLOCK | zmq.SNDMORE
"""Flags for a peer's name, which a ROUTER is given ahead of each message. Combined once, for thousands of sends."""

OWN_FILES = 96
"""File descriptors that are not for ranks' connections. Each run under way takes four more, for its record and its lock."""

FEW_RANKS = 1024
"""With room for fewer ranks than this, the collector says so when it starts."""


class Collector:
    """Binds on construction; ``serve`` until ``stop``.

    Args:
        runs: where runs are recorded.
        show: called with each report that is written, and whether it is news; in any thread.
        show_ranks: called once a heartbeat with the standings of a run's ranks; must not block.
        alert: called with trouble in a run that goes on; must not block.
        meters: receive what other threads may read of the runs and of this loop.
        archiver: is given each run that is over, and those that the collector before this one left.

    Raises:
        UsageError: the address cannot be listened on, or the connection file cannot be used or written.
    """

    def __init__(
        self,
        settings: Settings,
        connection_file: Path,
        runs: RunsFolder,
        show: Callable[[Report, bool], None],
        *,
        show_ranks: Callable[[Show], None] = lambda shown: None,
        alert: Callable[[Alert], None] = lambda alert: None,
        meters: Meters | None = None,
        archiver: Archiver | None = None,
    ) -> None:
        options = settings.options
        room = min(options.room, raise_descriptor_limit())
        self._host = printable(socket.gethostname())
        options = replace(options, room=room, runs_dir=str(runs.path.resolve()), host=self._host)
        self._runs = runs
        self._own_time = OwnTime(time.monotonic())
        self._longest_turn = max(options.heartbeat, IDLE_TICK / 1000)
        self._show_ranks, self._alert = show_ranks, alert
        self._meters = meters
        self._publisher = Publisher(runs, self._write, show, lambda run, late: self._writer.unstored(run, late=late))
        self._judge = RunJudge(runs.record_of, self._write)
        self._received = self._received_bytes = 0
        self._backlog = Backlog()
        self._turns = Turns()
        self._stop = threading.Event()
        self._job_ended: JobEnded | None = None
        self._interrupted = ""
        self._gives_up = False
        self.ledger = Ledger(options, runs.claim)
        self._keys = Credentials(connection_file, insecure=settings.insecure)
        with ExitStack() as opened:  # `close` closes in the reverse order, and so does a failure in here
            opened.callback(self._keys.release if settings.keep_keys else self._keys.withdraw)
            self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
            opened.callback(self._context.destroy, linger=0)
            self._context.set(zmq.MAX_SOCKETS, sockets.MAX_PEERS)
            self._authenticator = sockets.authenticator(self._context, self._keys.ring.admits)
            opened.callback(self._authenticator.stop)
            wanted = settings.listen or self._keys.listening or DEFAULT_LISTEN
            self._socket, self.address = sockets.router(self._context, wanted, self._keys.server, settings.address)
            opened.callback(self._socket.close, 0)
            self._inbox = Inbox(self._socket)
            opened.callback(self._inbox.close)
            bound = self._socket.getsockopt_string(zmq.LAST_ENDPOINT).rpartition(":")[2]
            self.connection = self._keys.publish(self.address, f"{wanted.rpartition(':')[0]}:{bound}", settings.job)
            self._wake = Wake()
            opened.callback(self._wake.close)
            self._decoder = DecoderThread(self._wake)
            opened.callback(self._decoder.close)
            self._exited: deque[RankExited] = deque()
            self.exits = ExitWatch(self._take_exit)
            opened.callback(self.exits.close)
            name = self._keys.server.public or self.address
            runs.sweep(self._keys.server.public)
            archiver = archiver or Archiver("", runs.path)
            self._writer = RecordWriter(
                runs.path, self._wake, Limits(), runs.begin, self._gauge_headroom, archiver.add,
                collector=name, connection=str(connection_file.absolute()),
            )  # fmt: skip
            opened.callback(self._publisher.show_late, 0.0)
            opened.callback(self._writer.close)
            if self._keys.are_taken_over:
                self._resume(runs.unfinished(name))
            archiver.begin(name, takes_over=self._keys.are_taken_over)
            self._opened = opened.pop_all()

    def _resume(self, runs: Iterable[str]) -> None:
        """Takes over the runs that the collector before this one left unfinished."""
        now = self._now()
        for run in runs:
            try:
                with RunRecord(self._runs.record_of(run)) as record:
                    entries, progress = record.entries(), record.progress()
                lag = now - entries[-1].now  # the clock may have begun anew meanwhile
                resumed = self.ledger.restore(run, [entry._replace(now=entry.now + lag) for entry in entries], progress, now)
                self._writer.adopt(run, resumed.opened.bound)
                log.info("run %s: resumed from its record", run)
            except (StoreError, ValueError, LookupError) as error:
                log.error("cannot go on with run %s, its ranks make a new one: %s", run, error)
            except Exception:  # whatever is in that file, the other runs go on
                log.exception("an error of ours in the record of run %s; its ranks make a new one", run)

    def serve(self) -> None:
        """Receives messages and performs effects until ``stop`` is called; then ends every run that is under way."""
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._wake.reader, zmq.POLLIN)
        while not self._stop.is_set():
            self._turn(poller)
        if self._job_ended is not None and self._job_ended.exit_code:
            self._turn(poller)
            self._perform(CommandEnded())
            while not self._gives_up and self.ledger.awaits_orphans(self._now()):
                self._turn(poller)
        deadline = time.monotonic() + LONGEST_LAST_WORDS
        while time.monotonic() < deadline and poller.poll(LAST_WORDS):
            self._drain()
            self._record()
        self._drain()  # the ends of connections, for which no poll returns
        while self._backlog:
            self._handle(self._backlog.next())
        deadline += LAST_TURNS
        while self._turns and time.monotonic() < deadline:
            if not self._turns.is_ready:
                poller.poll(LAST_WORDS)  # the decoder wakes it
            self._take_turns()
            self._record()
        self.exits.settle()
        self._record()
        self._perform(self._job_ended or JobEnded(None))
        self._record()

    def _turn(self, poller: zmq.Poller) -> None:
        poller.poll(0 if self._backlog or self._turns.is_ready else IDLE_TICK if self.ledger.is_idle else BUSY_TICK)
        if self._interrupted:
            self._perform(JobInterrupted(self._interrupted))
            self._interrupted = ""
        self._drain()
        self._perform(Tick())
        self._record()
        self._publisher.show_late()
        self._judge.look(self.ledger.runs.values(), time.monotonic())
        self._count()

    def interrupt(self, signal: str) -> None:
        """The job's command is being ended by this signal. Callable from a signal handler."""
        self._interrupted = signal
        self._wake()

    def stop(self, exit_code: int | None = None, interrupted: str = "") -> None:
        """Ends ``serve``. Callable from any thread and from a signal handler. ``exit_code``: the job's, if known."""
        self._job_ended = JobEnded(exit_code, interrupted)
        self._stop.set()

    def give_up(self) -> None:
        """``serve`` no longer waits for ranks that outlive the command. Callable from a signal handler."""
        self._gives_up = True
        self._wake()

    def close(self) -> None:
        """Closes the record and the socket, and removes the connection file unless ``keep_keys``."""
        self._opened.close()

    # --- what comes in -------------------------------------------------------------------------------------------------

    def _drain(self) -> None:
        """Receives what waits in the socket. Batches and fingerprints wait in the backlog while there is anything else."""
        now = time.monotonic()
        self._backlog.log_pressure(now)
        self._turns.begin(now)
        due, until = now + SLICE, now + LONGEST_BURST
        if self._turns:
            self._take_turns()
        for _ in range(BURST):
            if now > until:
                break
            item = None if self._backlog.is_full else self._inbox.take()
            if item is not None:
                now = time.monotonic()
                self._accept(item, now)
                if now > due:
                    self._take_turns()
                    due = time.monotonic() + SLICE
                continue
            if not self._backlog and not self._turns.is_ready:
                return
            self._handle_batches()
            self._take_turns()
            now = time.monotonic()
        self._handle_batches()  # if something else comes all the time, they are handled all the same

    def _handle_batches(self) -> None:
        """Handles, for a while, batches that wait: what comes meanwhile goes before the rest."""
        until = time.monotonic() + BATCHES_SLICE
        while self._backlog and time.monotonic() < until:
            self._handle(self._backlog.next())

    def _accept(self, item: Found, now: float) -> None:
        if isinstance(item, (Parted, Dropped)):
            if isinstance(item, Parted):
                self._refuse(item.peer, item.key, SEVERAL_PARTS)
        elif self._turns.waits(item, now):
            if not self._turns.add(item, self._backlog.take(item.peer)):
                self._send((item.peer,), AGAIN)
        elif isinstance(item, Ended):
            self._catch_up(item.peer)  # what a peer said before it went comes first
            self._end(item)
        elif wire.is_columns(item.body):
            self._backlog.add(item)
        elif wire.is_beat(item.body) or wire.is_ack(item.body):
            # These may overtake their peer's batches: a BEAT says no less than the batches before it, and an ACK says
            # nothing of batches, and thousands come at a time.
            self._handle(item)
        elif wire.is_trip(item.body) and item.peer in self._backlog and not self._backlog.is_short:
            # Its batches take long, and those of all ranks if all trip: it counts now, and again in its turn.
            self._handle(item, is_ahead=True)
        else:
            self._catch_up(item.peer)
            self._handle(item)

    def _catch_up(self, peer: bytes) -> None:
        for letter in self._backlog.take(peer):
            self._handle(letter)

    def _take_turns(self) -> None:
        """Handles, for a while, what waits for its turn."""
        for letter, message, error, seconds in self._decoder.done():
            self._turns.decoded(letter)
            self._turns.spend(letter.key, seconds, time.monotonic())
            self._take(letter, message, error)
        until = (now := time.monotonic()) + SLICE
        while now < until and (item := self._turns.next(now)) is not None:
            if isinstance(item, Ended):
                self._end(item)
            elif is_long(item):
                self._decoder.submit(item)
            else:
                self._handle(item)
            now = time.monotonic()

    def _end(self, ended: Ended) -> None:
        self._turns.forget(ended.peer)
        self._perform(Disconnected(ended.peer))

    def _handle(self, letter: Letter, *, is_ahead: bool = False) -> None:
        begun = time.monotonic() if self._turns.is_contested else None
        message, error = decode(letter)
        if is_ahead and isinstance(message, messages.Tripped):
            self._backlog.add(letter)
            message = replace(message, seq=messages.AHEAD)
        self._take(letter, message, error)
        if begun is not None:
            now = time.monotonic()
            self._turns.spend(letter.key, now - begun, now)

    def _take(self, letter: Letter, message: messages.Message | None, error: str) -> None:
        size = len(letter.body)
        self._received += 1
        self._received_bytes += size
        job = self._keys.ring.job_of(letter.key)
        if message is None:
            self._refuse(letter.peer, letter.key, error)
        elif job is not None:  # the authenticator lets in no other key
            self._perform(Received(letter.peer, message, job, size))

    def _refuse(self, peer: bytes, key: str, error: str) -> None:
        if (job := self._keys.ring.job_of(key)) is not None:
            self._perform(Malformed(peer, error, job))

    # --- what is decided -----------------------------------------------------------------------------------------------

    def _now(self) -> float:
        """The clock by which runs decide."""
        return self._own_time.read(time.monotonic(), self._longest_turn)

    def _perform(self, event: Event) -> None:
        # The runs of all ranks depend on this loop: no event may end it, and a failed effect must not hold back the next.
        left: Iterator[Effect] | None = None
        try:
            effects = self.ledger.handle(event, self._now())
            left = iter(effects) if effects else None  # most batches have no effects
        except Exception:
            log.exception("an error of ours while handling %s; the collector goes on", type(event).__name__)
        while left is not None:
            try:
                self._do(left)
                left = None
            except Exception:
                log.exception("an error of ours after %s; the collector goes on", type(event).__name__)

    def _do(self, effects: Iterator[Effect]) -> None:
        for effect in effects:
            if isinstance(effect, Send):
                self._send((effect.peer,), effect.message)
            elif isinstance(effect, SendAll):
                self._send(effect.peers, effect.message)
            elif isinstance(effect, Note):
                log.log(effect.level, "%s", effect.text)
            elif isinstance(effect, IssueKey):
                self._do(iter([Send(effect.peer, self._keys.issue(effect.job))]))
            elif isinstance(effect, Show):
                self._writer.show(effect)
                if self._meters is not None:
                    self._meters.show(effect, time.monotonic())
                self._show_ranks(effect)
            elif isinstance(effect, RecordTrace):
                self._write(effect.run, FileWrite(partial(self._record_trace, effect)))
            elif isinstance(effect, EndProcess):
                if effect.host == self._host and end_process(effect.pid, effect.incarnation):
                    log.info("ended process %d", effect.pid)
            elif isinstance(effect, FollowProcess):
                if effect.host == self._host:
                    self.exits.follow(effect)
            elif isinstance(effect, PointLatest):
                self._write(effect.run, FileWrite(partial(self._runs.point_latest_at, effect.run)))
            elif isinstance(effect, Publish):
                self._publisher.publish(effect)
            elif isinstance(effect, Alert):
                self._alert(replace(effect, report=self._runs.locate(effect.report)))

    def _send(self, peers: Iterable[bytes], message: messages.Message) -> None:
        """A ROUTER drops what finds no room in a peer's queue, and what is for a peer that is gone: what matters is repeated."""
        body, send = wire.encode(message), self._socket.send
        failed: zmq.ZMQError | None = None
        for peer in peers:
            try:
                send(peer, TO_PEER)
                send(body, zmq.NOBLOCK)
            except zmq.ZMQError as error:  # the other peers must hear it all the same
                failed = error
        if failed is not None:
            raise failed

    # --- what other threads do -----------------------------------------------------------------------------------------

    def _take_exit(self, exited: RankExited) -> None:
        self._exited.append(exited)
        self._wake()

    def _record(self) -> None:
        """Hands new entries to the writer, and tells the ledger what is stored by now."""
        self._hand_over_entries()
        self._wake.drain()
        while self._exited:
            self._perform(self._exited.popleft())
        for judged in self._judge.found():
            self._perform(judged)
        for run, gaps in self._writer.lost().items():
            self._perform(Unrecorded(run, gaps))
        for run, seqs in self._writer.stored().items():
            self._perform(Stored(run, seqs))

    def _write(self, run: str, action: FileWrite) -> None:
        """Has the writer write a file of a run, after the run's first entry: the entry makes the run's folder."""
        self._hand_over_entries()
        self._writer.do(run, action)

    def _record_trace(self, traced: RecordTrace) -> None:
        if self._writer.disk.may_grow(traced.run, time.monotonic()):
            frames = tuple(traced.summary.frames(traced.table))
            size = self._runs.record_trace(traced.run, traced.rank, traced.summary.batch, frames)
            self._writer.disk.spend(traced.run, size)

    def _hand_over_entries(self) -> None:
        for run, entries in self.ledger.take_journals():
            self._writer.append(run, entries)

    def _count(self) -> None:
        if self._meters is not None:
            counts = LoopCounts(
                self._received, self._received_bytes, self.ledger.refused, self._backlog.size, self._writer.unwritten
            )
            self._meters.count(counts, time.monotonic())

    def _gauge_headroom(self, run: str, doublings: float) -> None:
        if self._meters is not None:
            self._meters.headroom(run, doublings, time.monotonic())


def raise_descriptor_limit() -> int:
    """Raises the soft limit of open files, usually 1024, to the hard one: each rank is a connection.

    Returns:
        How many ranks there is room for.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    room = MAX_RANKS if hard == resource.RLIM_INFINITY else hard - OWN_FILES
    if room < FEW_RANKS:
        log.warning("this process may have %d files open, so at most %d ranks can connect: raise `ulimit -Hn`", hard, room)
    return room

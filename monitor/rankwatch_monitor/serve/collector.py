"""The shell round the ledger: one socket, the clock, the runs' folder. It performs what the ledger decides."""

from __future__ import annotations

import gc
import logging
import resource
import signal
import socket
import sys
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import FrameType

import zmq

from rankwatch.errors import ProtocolError
from rankwatch.shared import messages, sockets, wire
from rankwatch.shared.printable import printable

from ..decide.effects import Effect, IssueKey, Note, Publish, RecordTrace, Send, SendAll, Show
from ..decide.journal import JobEnded, JobInterrupted
from ..decide.ledger import Disconnected, Event, Ledger, Malformed, Received, Stored, Tick
from ..decide.options import Options
from ..decide.report import Report
from ..record import reader as record
from ..record import store
from ..record.store import StoreError
from ..views import text
from .credentials import Credentials
from .inbox import Ended, Inbox, Letter
from .metrics.meters import LoopCounts, Meters
from .precedence import DECIDING, SWITCH_INTERVAL, yield_to_others
from .printer import Printer
from .run_folder import RunsFolder
from .writer import RecordWriter

log = logging.getLogger(__name__)

DEFAULT_LISTEN = "tcp://127.0.0.1:27077"
BUSY_TICK, IDLE_TICK = 50, 500
"""Milliseconds between looks at the clock, with and without a run under way."""

LAST_WORDS = 50
"""Milliseconds without a message after which, at the end, no more are waited for."""

LONGEST_LAST_WORDS = 1.0
"""Seconds after which they are not waited for either."""

MAX_PUT_OFF = 256 * 2**20
"""Bytes of batches put off; beyond it no more messages are taken until some were handled."""

PUT_OFF_AT_ONCE = 50
"""Peers whose batches are handled before it is looked again whether anything else has come."""

OWN_FILES = 64
"""File descriptors that are not for ranks' connections; each run under way takes three more, for its record."""

FEW_RANKS = 1024
"""Room for fewer is told at the start."""

TO_PEER = zmq.NOBLOCK | zmq.SNDMORE
"""How a peer's name is sent, ahead of what is for it; made once, for thousands of sends."""

BURST = 1000
"""Messages taken in a row before the clock is looked at."""


class Collector:
    """Binds on construction; ``serve`` until ``stop``.

    Args:
        listen: ``tcp://HOST:PORT``; port 0 picks a free one.
        connection_file: where ranks find the address and the keys. One that exists is taken over, keys and address, when
            its server key still lies beside it: a collector that died comes back as the one the ranks know.
        runs: where runs are recorded.
        show: called with each report that is written, and whether it is news.
        show_ranks: called once a heartbeat with where the ranks of a run are; it must not wait for anything.
        job: the name of runs whose ranks know none.
        address: what the connection file says, where that is not ``listen``; its port 0 is the one bound.
        keep_keys: the connection file and the keys stay at the end, for the next collector to be the one that ranks know.
        insecure: links are in plain text, and everybody on this machine may speak; on loopback alone.
        meters: are told what others may read of the runs and of the work.

    Raises:
        UsageError: the address cannot be listened on, or the connection file cannot be used or written.
    """

    def __init__(
        self,
        *,
        listen: str | None,
        connection_file: Path,
        runs: RunsFolder,
        options: Options,
        show: Callable[[Report, bool], None],
        show_ranks: Callable[[Show], None] = lambda shown: None,
        job: str = "",
        address: str | None = None,
        keep_keys: bool = False,
        insecure: bool = False,
        meters: Meters | None = None,
    ) -> None:
        options = replace(options, room=min(options.room, raise_descriptor_limit()))
        self._runs = runs
        self._show = show
        self._meters = meters
        self._received = self._received_bytes = 0
        self._show_ranks = show_ranks
        self._keep_keys = keep_keys
        self._stop = threading.Event()
        self._put_off: OrderedDict[bytes, list[Letter]] = OrderedDict()  # of a dict, taking the first is slow
        """Batches that are yet to be handled, in the order in which their peers' first ones came."""
        self._put_off_bytes = 0
        self._is_behind = False
        """Since so much was put off that no more was taken, until nothing is."""
        self._job_ended: JobEnded | None = None
        self._interrupted = ""
        self.ledger = Ledger(options, runs.is_free)
        self._keys = Credentials(connection_file, insecure=insecure)
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._context.set(zmq.MAX_SOCKETS, sockets.MAX_PEERS)
        self._authenticator = sockets.authenticator(self._context, self._keys.ring.admits)
        try:
            wanted = listen or self._keys.listening or DEFAULT_LISTEN
            self._socket, self.address = sockets.router(self._context, wanted, self._keys.server, address)
            self._inbox = Inbox(self._socket)
            bound = self._socket.getsockopt_string(zmq.LAST_ENDPOINT).rpartition(":")[2]
            self.connection = self._keys.publish(self.address, f"{wanted.rpartition(':')[0]}:{bound}", job)
            self._wake_read, self._wake_write = socket.socketpair()
            self._wake_read.setblocking(False)
            self._wake_write.setblocking(False)
            name = self._keys.server.public or self.address
            tell = self._tell_headroom
            self._writer = RecordWriter(runs.path, self._wake, store.Limits(), runs.begin, tell, collector=name)
            if self._keys.are_taken_over:
                self._go_on_with(runs.unfinished(name))
        except BaseException:
            self.close()
            raise

    def serve(self) -> None:
        """Takes messages and performs effects until ``stop`` was called; then ends every run that is under way."""
        yield_to_others(DECIDING)
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._wake_read, zmq.POLLIN)
        while not self._stop.is_set():
            poller.poll(0 if self._put_off else IDLE_TICK if self.ledger.is_idle else BUSY_TICK)
            if self._interrupted:
                self._perform(JobInterrupted(self._interrupted))
                self._interrupted = ""
            self._drain()
            self._perform(Tick())
            self._record()
            self._tell_counts()
        deadline = time.monotonic() + LONGEST_LAST_WORDS
        while time.monotonic() < deadline and poller.poll(LAST_WORDS):
            self._drain()
            self._record()
        self._drain()  # the ends of connections, which no poll tells of
        for peer in list(self._put_off):
            self._catch_up(peer)
        self._perform(self._job_ended or JobEnded(None))
        self._record()

    def interrupt(self, signal: str) -> None:
        """Somebody is ending the job's command by this signal; callable from a signal handler."""
        self._interrupted = signal
        self._wake()

    def stop(self, exit_code: int | None = None, interrupted: str = "") -> None:
        """Ends ``serve``; callable from any thread and from a signal handler. ``exit_code`` is that of the job, if known."""
        self._job_ended = JobEnded(exit_code, interrupted)
        self._stop.set()

    def close(self) -> None:
        """Closes the record and the socket, and takes the connection file away unless it is to be kept."""
        if hasattr(self, "_writer"):
            self._writer.close()
            self._wake_read.close()
            self._wake_write.close()
        if hasattr(self, "_socket"):
            self._inbox.close()
            self._socket.close(0)
            if self._keep_keys:
                self._keys.release()
            else:
                self._keys.withdraw()
        self._authenticator.stop()
        self._context.destroy(linger=0)

    def _drain(self) -> None:
        """Takes what waits. Batches are put off while there is anything else: no abort is to wait for thousands of them."""
        for _ in range(BURST):
            is_full = self._put_off_bytes >= MAX_PUT_OFF
            item = None if is_full else self._inbox.take()
            if item is None:
                if is_full or not self._put_off:
                    self._tell_whether_behind(is_full)
                if not self._put_off:
                    return
                for _ in range(min(PUT_OFF_AT_ONCE, len(self._put_off))):
                    self._catch_up(next(iter(self._put_off)))
            elif isinstance(item, Ended):
                self._catch_up(item.peer)  # what a peer said before it went comes first
                self._perform(Disconnected(item.peer))
            elif wire.is_batch(item.parts[0]):
                self._put_off.setdefault(item.peer, []).append(item)
                self._put_off_bytes += len(item.parts[0])
            elif wire.is_beat(item.parts[0]) or wire.is_ack(item.parts[0]):
                # A beat tells no less than the batches before it do, an ACK nothing of them, and thousands come at a time.
                self._handle(item)
            else:
                self._catch_up(item.peer)
                self._handle(item)

    def _catch_up(self, peer: bytes) -> None:
        """Handles what was put off of a peer."""
        for letter in self._put_off.pop(peer, ()):
            self._put_off_bytes -= len(letter.parts[0])
            self._handle(letter)

    def _handle(self, letter: Letter) -> None:
        peer, key, parts = letter
        self._received += 1
        self._received_bytes += len(parts[0])
        try:
            if len(parts) != 1:
                raise ProtocolError(f"a message of {len(parts)} parts instead of one")
            message = wire.decode(parts[0])
        except (ProtocolError, MemoryError) as error:
            self._perform(Malformed(peer, str(error) or "there is no memory for it"))
        else:
            job = self._keys.ring.job_of(key)
            if job is not None:  # else nobody was to come in
                self._perform(Received(peer, message, job))

    def _go_on_with(self, runs: Iterable[str]) -> None:
        """Takes over the runs that the collector before this one has left unfinished."""
        now = time.monotonic()
        for run in runs:
            try:
                kept = record.read(self._runs.record_of(run))
                lag = now - kept.entries[-1].now  # the clock may have begun anew meanwhile
                self.ledger.restore(run, [entry._replace(now=entry.now + lag) for entry in kept.entries], kept.progress, now)
                log.info("run %s: goes on", run)
            except (StoreError, ValueError, LookupError) as error:
                log.error("cannot go on with run %s, its ranks make a new one: %s", run, error)

    def _wake(self) -> None:
        with suppress(OSError):  # full: a wake-up is under way already
            self._wake_write.send(b"\0")

    def _record(self) -> None:
        """Hands over what is to be put on record, and takes note of what now is."""
        for run, entries in self.ledger.take_journals():
            self._writer.keep(run, entries)
        with suppress(BlockingIOError):
            self._wake_read.recv(4096)
        for run, seqs in self._writer.stored().items():
            self._perform(Stored(run, seqs))

    def _tell_counts(self) -> None:
        if self._meters is not None:
            counts = LoopCounts(
                self._received, self._received_bytes, self.ledger.refused, self._put_off_bytes, self._writer.unwritten
            )
            self._meters.count(counts, time.monotonic())

    def _tell_whether_behind(self, is_behind: bool) -> None:
        if is_behind and not self._is_behind:
            log.warning(
                "batches come faster than they are handled: %d MiB of them wait here, more in the ranks, and an abort may come "
                "late. Give the collector a core of its own, or let ranks tell of fewer: rankwatch tune --every 2",
                self._put_off_bytes >> 20,
            )
        elif self._is_behind and not is_behind:
            log.info("the collector keeps up again")
        self._is_behind = is_behind

    def _tell_headroom(self, run: str, doublings: float) -> None:
        if self._meters is not None:
            self._meters.headroom(run, doublings, time.monotonic())

    def _perform(self, event: Event) -> None:
        # The runs of all ranks hang on this loop: no single event may end it, and no effect keep back those after it.
        left: Iterator[Effect] | None = None
        try:
            effects = self.ledger.handle(event, time.monotonic())
            left = iter(effects) if effects else None  # of a batch mostly none
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
                log.info("%s", printable(effect.text))
            elif isinstance(effect, IssueKey):
                self._do(iter([Send(effect.peer, self._keys.issue(effect.job))]))
            elif isinstance(effect, Show):
                self._writer.show(effect)
                if self._meters is not None:
                    self._meters.show(effect, time.monotonic())
                self._show_ranks(effect)
            elif isinstance(effect, RecordTrace):
                self._writer.do(partial(self._runs.record_trace, effect.run, effect.rank, effect.batch, effect.frames))
            elif isinstance(effect, Publish):
                self._writer.do(partial(self._runs.publish, effect.report))
                self._show(effect.report, effect.news)

    def _send(self, peers: Iterable[bytes], message: messages.Message) -> None:
        body, send = wire.encode(message), self._socket.send
        failed: zmq.ZMQError | None = None
        for peer in peers:
            try:
                send(peer, TO_PEER)
                send(body, zmq.NOBLOCK)
            except zmq.Again:  # it takes nothing just now: what matters is repeated
                continue
            except zmq.ZMQError as error:  # the others are to hear it all the same
                failed = error
        if failed is not None:
            raise failed


GARBAGE_THRESHOLDS = 1_000_000, 20, 100
"""So many objects wait for the disk at most: nothing is looked through for cyclic garbage, of which there is next to none, only
because much is under way. Among the records of 16,384 ranks that takes 70 ms, in which no abort is sent."""


def run_daemon(
    listen: str | None,
    connection_file: Path,
    runs_dir: Path,
    options: Options,
    *,
    address: str | None = None,
    keep_keys: bool = False,
    insecure: bool = False,
    meters: Meters | None = None,
) -> int:
    """``rankwatch collector``: serves until SIGTERM or SIGINT; a second signal ends it at once."""
    runs = RunsFolder(runs_dir)
    gc.set_threshold(*GARBAGE_THRESHOLDS)
    sys.setswitchinterval(SWITCH_INTERVAL)

    def show(report: Report, news: bool) -> None:
        if news:
            printer.print(sys.stdout, text.render(report))

    with Printer() as printer:
        collector = Collector(
            listen=listen,
            connection_file=connection_file,
            runs=runs,
            options=options,
            show=show,
            address=address,
            keep_keys=keep_keys,
            insecure=insecure,
            meters=meters,
        )

        def end(number: int, frame: FrameType | None) -> None:
            signal.signal(number, signal.SIG_DFL)
            collector.stop()

        signal.signal(signal.SIGTERM, end)
        signal.signal(signal.SIGINT, end)
        if insecure:
            log.warning("links are in plain text: every process of this machine can read the runs, and stop them")
        log.info("collecting on %s; ranks find it by RANKWATCH_CONNECTION=%s", collector.address, connection_file.absolute())
        try:
            collector.serve()
        finally:
            collector.close()
    return 0


def raise_descriptor_limit() -> int:
    """Each rank is a connection, and the usual soft limit is 1024 files. Returns how many ranks there is room for."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    room = wire.MAX_RANKS if hard == resource.RLIM_INFINITY else hard - OWN_FILES
    if room < FEW_RANKS:
        log.warning("this process may have %d files open, so at most %d ranks can connect: raise `ulimit -Hn`", hard, room)
    return room

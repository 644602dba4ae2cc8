"""The thread that connects a rank to the collector: it sends the spool and heartbeats, reconnects, receives ABORT and TUNE.

The training thread only appends to the bounded spool. It waits for the collector at the start and after its own trip, each
time with a timeout.
"""

from __future__ import annotations

import logging
import math
import os
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Protocol

import zmq

from ..errors import ProtocolError
from ..measure.ledger import LEDGER, Teller
from ..shared.link import wire
from ..shared.link.allowance import Allowance
from ..shared.link.connection import Connection
from ..shared.link.sockets import dealer
from ..shared.link.wake import Wake
from ..shared.system.exit_queue import ExitQueue
from ..shared.system.process import age, resident
from ..shared.types import messages
from ..shared.types.closeup import CloseUp
from ..shared.types.fingerprint import Fingerprint, FingerprintTable
from ..shared.types.frame import BatchSummary, FrameTable, Moment, Whereabouts
from ..shared.types.notice import Notice
from ..shared.types.trip import MAX_RERUN, Trip
from .contact import Contact
from .departure import DEPARTURE, STAYING, LastStay, Stuck, abort_of_orphan
from .fork import keep_from_children
from .holds import HOLDS
from .outbox import Outbox
from .reception import MAX_RECEIVED_BYTES, PAUSE, Reception, Tunings
from .spool import Spool
from .stacks import Inspector, may_wait_for_ranks, place_of

log = logging.getLogger(__name__)

CONNECT_TIMEOUT = 3.0
"""Seconds that the training waits for the collector at the start, and after a trip while there is no connection."""

HELLO_INTERVAL = 0.5
WELCOMES_PER_SECOND, WELCOMES_AT_ONCE = 0.5, 20.0
"""After more WELCOMEs, HELLO waits: with each one, all that the collector has not stored is sent again."""

ANSWERS = 2
"""To a probe: see ``_answers_to``."""

PROBE_INTERVAL = 0.002
PROBE_SHARE = 0.05
"""Seconds between checks of the training thread's position while the collector waits for this rank to pass one: the larger
of the first, and this share of the time waited so far."""

FAREWELL_TIMEOUT = 4.0
"""Seconds that ``close`` waits for the last messages to be acknowledged, even if the collector has just become unreachable:
a rank whose BYE does not arrive counts as lost. A rank that ended well waits longer where the network fails, see ``Contact``."""

STUCK_INTERVAL = 0.25
"""Seconds between looks at whether the training, which is to stop, is stuck in a collective."""

TRIP_TIMEOUT = 0.2
"""Seconds that a close-up waits until the collector has the trip."""

RECOUNTS_PER_SECOND, RECOUNTS_AT_ONCE = 20.0, 64.0
"""Answers to RECOUNT, of up to 16 KiB each, for which no thread of the training waits. All calls that are kept take 16."""

VERDICT_MARGIN = 1.0
"""Seconds on top of the decision window that a tripped rank waits for its verdict."""

UNWELCOME = messages.Welcome(run="", heartbeat=1.0, decision_window=0.0, seq=0)
"""Before the first WELCOME."""

WELL = ("finished", "ended")
"""Outcomes without an error."""


class Linked(Protocol):
    """A watch, as far as the thread of its link needs it."""

    def where(self) -> Whereabouts:
        """Where the training thread is. For any thread."""

    def on_abort(self, abort: messages.Abort) -> None:
        """ABORT came. Called once."""

    def on_stay(self, seconds: float) -> None:
        """Other ranks hold work or have yet to close, for which this one waits so long; 0: they have."""

    def has_raised(self) -> bool:
        """Whether the training thread has been given the exception of the ABORT."""

    def on_tune(self, tune: messages.Tune) -> None:
        """All changes of options in the run so far: before ``start`` returns if there are any, at every change, and again
        after a reconnection."""


class Link:
    """One rank's link to the collector.

    Args:
        hello: who this rank is; its age is set when HELLO is sent.
        source: the file of the connection, to be read again while no collector answers; or the connection's text.
    """

    def __init__(self, connection: Connection, hello: messages.Hello, watch: Linked, source: str = "") -> None:
        self._hello = hello
        self._watch = watch
        self._who = f"rankwatch: rank {hello.rank}"
        self._contact = Contact(self._who, connection, source)
        self.refusal = ""
        """Why the collector has refused this rank for good; empty if it has not."""
        self.is_unused: Callable[[], bool] = lambda: False
        """Whether the model was never trained, while another one was."""
        self.aside: Callable[[Whereabouts], tuple[str, ...]] = lambda at: ()
        """What the process has done beside its training."""

        self._spool = Spool()
        self._outbox = Outbox(self._spool)
        self._welcome = UNWELCOME
        self._online = threading.Event()
        self._settled = threading.Event()  # welcomed or refused
        self._aborted = threading.Event()
        self._stop = False
        self._released = False
        self._farewell_until = 0.0
        self._parting = ""  # how the process ends, until it has told what it called last
        self.complaint = ""
        """The last refusal that was logged; empty once the collector has taken this rank."""
        self._reception = Reception(self._who, self._handle, self._aborted.is_set)
        self._welcomes = Allowance(WELCOMES_PER_SECOND, WELCOMES_AT_ONCE)
        self._recounts = Allowance(RECOUNTS_PER_SECOND, RECOUNTS_AT_ONCE)
        self._tunings = Tunings(self._who, lambda tune: self._watch.on_tune(tune))
        self._has_asked = False  # whether a HELLO has no WELCOME yet
        self._pid = os.getpid()
        self._exit_queue = ExitQueue(hello.incarnation)
        self._was: tuple[bool, bool] = False, False
        """Whether it held, and had left, at the last beat."""
        self._last_stay = LastStay(self._who)
        self._stuck = Stuck()
        self._has_said_bye = self._stays = False

        self._probe: Moment | None = None
        self._rerun = 0.0
        """Seconds for which a verdict on this rank's trip waits for what other ranks run again."""
        self._probed_at = 0.0
        self._answered = 0
        self._next_hello = 0.0
        self._next_beat = 0.0
        self.calls = Teller(LEDGER)
        """What is told of the collectives of this process."""
        self._wake = Wake()
        self._inspector = Inspector(hello.rank, self._wake)
        self._thread = threading.Thread(target=self._run, name="rankwatch-link", daemon=True)

    # --- the training thread's side -----------------------------------------------------------------------------------

    def start(self) -> bool:
        """Starts the thread; returns whether WELCOME came within CONNECT_TIMEOUT.

        Raises:
            ProtocolError: the collector refused this rank for good (another version of the protocol, say).
        """
        keep_from_children(self._contact.connection.address)
        HOLDS.listen(self._wake)
        DEPARTURE.listen(self._wake)
        STAYING.clear()  # a process that trains again does not end
        self._thread.start()
        self._settled.wait(CONNECT_TIMEOUT)
        if self.refusal:
            raise ProtocolError(self.refusal)
        return self._online.is_set()

    @property
    def is_online(self) -> bool:
        return self._online.is_set()

    @property
    def run(self) -> str:
        """The run's id, from WELCOME; empty before it."""
        return self._welcome.run

    @property
    def folder(self) -> str:
        """The run's folder on the collector's host, from WELCOME; empty before it."""
        return self._welcome.folder

    def send_batch(self, table: FrameTable, summary: BatchSummary, calls: messages.Counts = ()) -> None:
        self.calls.note(calls)
        self._append(lambda seq: messages.Batch(seq, summary, calls), table)

    def send_trip(self, trip: Trip) -> None:
        self._append(lambda seq: messages.Tripped(seq, trip))
        self._rerun = MAX_RERUN if trip.unfound else 0.0
        if trip.has_closeup and self._online.is_set():  # which would keep this process busy
            self._spool.wait_until_empty(TRIP_TIMEOUT)

    def send_closeup(self, closeup: CloseUp) -> None:
        self._append(lambda seq: messages.LookedCloser(seq, closeup))

    def send_notice(self, notice: Notice) -> None:
        self._append(lambda seq: messages.Noticed(seq, notice))

    def send_fingerprint(self, table: FingerprintTable, fingerprint: Fingerprint) -> None:
        self._append(lambda seq: messages.Fingerprinted(seq, fingerprint), table)

    def send_fault(self, text: str) -> None:
        self.calls.is_on = False
        self._append(lambda seq: messages.Off(seq, text))

    def wait_for_verdict(self) -> bool:
        """Waits for the run's verdict, with a timeout; returns whether ABORT came."""
        if not self._online.wait(CONNECT_TIMEOUT):
            return False
        return self._aborted.wait(self._welcome.decision_window + self._rerun + VERDICT_MARGIN)

    def close(self, outcome: str, text: str = "", error: BaseException | None = None) -> None:
        """Sends BYE, waits for its acknowledgement for a while, and ends the thread. ``error``: what ended the rank."""
        if os.getpid() != self._pid or self._stop or self._stays:
            return
        self._exit_queue.close()
        outcome = "unused" if outcome in WELL and self.is_unused() else outcome
        self._say_bye(outcome, text, "" if error is None else place_of(error))
        if self.run and not self.refusal and self._thread.is_alive():
            is_heard = self._spool.wait_until_empty(FAREWELL_TIMEOUT)
            if not is_heard and outcome in WELL:
                is_heard = self._spool.wait_until_empty(self._contact.time_to_return(self._welcome.heartbeat))
            if is_heard:
                self._last_stay.hear_nothing()
            if left := self._last_stay.left():
                self._watch.on_stay(left)  # where the process is ending, it has a deadline
                self._stays = True
                STAYING.append(self._stay)
                return
        self._end()

    def _say_bye(self, outcome: str, text: str = "", at: str = "") -> None:
        if not self._has_said_bye:
            self._has_said_bye = True
            self._parting = outcome
            moment = self._watch.where().moment
            self._append(lambda seq: messages.Bye(seq, outcome, text, moment, at))

    def _stay(self) -> None:
        if os.getpid() == self._pid:
            self._last_stay.wait()
            self._end()

    def _end(self) -> None:
        self._stop = True
        self._wake()
        self._thread.join(FAREWELL_TIMEOUT)

    def release(self) -> None:
        """Ends the link later. Takes no lock and does not wait: a garbage collection may call it anywhere."""
        self._released = True
        self._wake()

    def _append(self, make: Callable[[int], messages.Sequenced], table: FrameTable | FingerprintTable | None = None) -> None:
        self._spool.append(make, table)
        self._wake()

    # --- the link's thread --------------------------------------------------------------------------------------------

    def _run(self) -> None:
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        socket = dealer(context, self._contact.connection, MAX_RECEIVED_BYTES)
        before: list[zmq.Socket[bytes]] = []  # to the collector, a process whose last connection ends is dead
        try:
            while not self._stop:
                if self._loses_the_collector() or self._finds_another_collector():
                    _close(before)
                    before.append(socket)
                    self._contact.wait_for_room(lambda: self._stop)
                    socket = dealer(context, self._contact.connection, MAX_RECEIVED_BYTES)
                self._turn(socket)
                if self._online.is_set():
                    _close(before)
                if self._stays:
                    self._stop = self._stop or not self._last_stay.left()
                elif self._released and not self._stop:
                    self._say_farewell()
            self._send_last(socket)
        except ProtocolError as error:
            log.error(
                "%s: the collector at %s sent %s; training goes on without it",
                self._who,
                self._contact.connection.address,
                error,
            )
            self._online.clear()
        except Exception:
            log.exception(
                "%s: the link to the collector ended by an error of its own; training goes on without it", self._who
            )
            self._online.clear()
        finally:
            HOLDS.forget(self._wake)
            DEPARTURE.forget(self._wake)
            self._exit_queue.close()
            self._settled.set()
            _close(before)
            socket.close(100)  # milliseconds to send what is queued
            context.term()
            self._wake.close()

    def _say_farewell(self) -> None:
        """Of a model that is gone: nobody waits, but what the window holds back is still sent."""
        now = time.monotonic()
        if not self._farewell_until:
            outcome = "unused" if self.is_unused() else "finished"
            self._append(lambda seq: messages.Bye(seq, outcome, ""))
            self._farewell_until = now + FAREWELL_TIMEOUT
        self._stop = not (self._online.is_set() and self._spool.is_behind and now < self._farewell_until)

    def _loses_the_collector(self) -> bool:
        if not self._online.is_set() or not self._contact.is_lost(self._welcome.heartbeat):
            return False
        self._last_stay.lose()
        self._online.clear()
        return True

    def _finds_another_collector(self) -> bool:
        if self._online.is_set() or self.refusal or not self._contact.is_renewed():
            return False
        self._next_hello = 0.0
        return True

    def _turn(self, socket: zmq.Socket[bytes]) -> None:
        poller = zmq.Poller()
        before = time.monotonic()
        wait = self._next_event() - before
        if self._reception.is_exhausted(before):
            wait = min(wait, PAUSE)
        else:
            poller.register(socket, zmq.POLLIN)
        poller.register(self._wake.reader, zmq.POLLIN)
        poller.poll(max(0, math.ceil(1000 * wait)))
        self._wake.drain()
        heard = self._reception.receive(socket)
        now = time.monotonic()
        self._contact.listen(now, self._welcome.heartbeat, heard=heard)
        self._tunings.pass_on()
        if not self._online.is_set():
            if self._last_stay.is_orphaned and self.run and not self.refusal:
                self._abort(abort_of_orphan(self._hello.rank))
            may_ask = now >= self._next_hello and not self.refusal and self._welcomes.has(now)
            if may_ask and self._send(socket, replace(self._hello, age=age())):
                self._next_hello = now + HELLO_INTERVAL
                self._has_asked = True
            return
        if self._aborted.is_set() and not self._has_said_bye:
            self._look_whether_stuck(now)
        self._tell_last_calls(socket)
        self._outbox.send(partial(self._send, socket))
        if (stacks := self._inspector.take()) is not None:
            self._send(socket, stacks)
        answers = self._answers_to(self._probe) if self._probe is not None else 0
        if answers > self._answered or now >= self._next_beat or (bool(HOLDS), DEPARTURE.has_left) != self._was:
            self._send_beat(socket)
            self._next_beat = now + self._welcome.heartbeat
            self._answered, self._probe = answers, None if answers == ANSWERS else self._probe

    def _look_whether_stuck(self, now: float) -> None:
        """A rank that waits for stopped ones cannot save: it is through, though its process lives until it is ended."""
        waits = not (self._watch.has_raised() or HOLDS) and may_wait_for_ranks()
        if self._stuck.look(now, time.process_time(), waits=waits):
            self._say_bye("aborted")

    def _answers_to(self, probe: Moment) -> int:
        """How often the probe is answered by now: as its moment is passed, and as all before it is settled."""
        at = self._watch.where()
        return (at.moment > probe) + (at.settled > probe)

    def _next_event(self) -> float:
        if not self._online.is_set():
            return max(self._next_hello, time.monotonic() + 0.02)
        if self._probe is not None:
            now = time.monotonic()
            return min(self._next_beat, now + max(PROBE_INTERVAL, PROBE_SHARE * (now - self._probed_at)))
        if self._stays or (self._aborted.is_set() and not self._has_said_bye):
            return min(self._next_beat, time.monotonic() + STUCK_INTERVAL)
        return self._next_beat

    # --- sending ---

    def _send(self, socket: zmq.Socket[bytes], message: messages.Message) -> int:
        """Returns the bytes that were sent."""
        data = wire.encode(message)
        try:
            socket.send(data, zmq.NOBLOCK)
        except zmq.Again:  # not connected, or the collector reads too slowly
            return 0
        return len(data)

    def _send_beat(self, socket: zmq.Socket[bytes]) -> None:
        beat = self._beat()
        if self._spool.is_behind:  # a TRIP must be sent before a BEAT with a later moment
            self._outbox.send(partial(self._send, socket))
        self._was = beat.holds, beat.departed
        if self._send(socket, beat):
            self.calls.note(beat.calls)

    def _beat(self) -> messages.Beat:
        at, spool = self._watch.where(), self._spool
        return messages.Beat(
            at.moment, at.phase, len(spool), spool.dropped, time.time(), bool(HOLDS), self._last_stay.is_orphaned,
            at.first_of_step, at.settled, DEPARTURE.has_left, self.calls.news(), at.spent, resident(),
            self.aside(at), at.cost,
        )  # fmt: skip

    def _tell_last_calls(self, socket: zmq.Socket[bytes]) -> None:
        """Before BYE: what the others wait for now, they wait for in vain. A process that only closes the watch calls more."""
        outcome, self._parting = self._parting, ""
        if outcome in ("ended", "failed") and self.calls.is_on:
            for told in LEDGER.last_words(with_calls=outcome == "failed"):
                self._send(socket, told)

    def _send_last(self, socket: zmq.Socket[bytes]) -> None:
        self._tell_last_calls(socket)
        self._outbox.send(partial(self._send, socket))
        if self._online.is_set() and self._spool.is_behind:  # a rank without a BYE would count as lost
            self._spool.give_up()
            self._send(socket, self._beat())
            self._outbox.send(partial(self._send, socket))

    # --- receiving ---

    def _handle(self, socket: zmq.Socket[bytes], message: messages.Message) -> None:
        if isinstance(message, messages.Welcome):
            if self._has_asked:
                self._welcomes.spend(1.0)
                self._go_online(message)
        elif isinstance(message, messages.Ack):
            self._outbox.take_ack(message)
        elif isinstance(message, messages.Probe):
            if self._probe is None:
                self._probed_at = time.monotonic()
            self._probe, self._answered = message.moment, 0
        elif isinstance(message, messages.Inspect):
            self._inspector.ask(message.number)
        elif isinstance(message, messages.Recount):
            if self._recounts.take(time.monotonic()):
                self._send(socket, LEDGER.recounted(message))
        elif isinstance(message, messages.Abort):
            self._send(socket, messages.Ack(self._spool.sent, abort=True))
            self._abort(message)
        elif isinstance(message, messages.Stay):
            self._last_stay.tell(message.seconds)
            self._watch.on_stay(message.seconds)
        elif isinstance(message, messages.Tune):
            self._tunings.take(message)
        elif isinstance(message, messages.Error):
            self._refused(message)

    def _abort(self, message: messages.Abort) -> None:
        if not self._aborted.is_set():
            self._last_stay.stop(message.grace)
            try:
                self._watch.on_abort(message)
            finally:
                self._aborted.set()

    def _go_online(self, welcome: messages.Welcome) -> None:
        self._contact.find()
        self._has_asked = False
        self.complaint = ""
        self._welcome = welcome
        self._outbox.renew(welcome)
        self.calls.forget()
        self._next_beat = 0.0
        self._online.set()
        self._settled.set()

    def _refused(self, error: messages.Error) -> None:
        if self.refusal:
            return
        if error.remedy == "stop":
            log.error("%s: the collector refuses this rank: %s", self._who, error.text)
            self.refusal = self.complaint = error.text
            self._online.clear()
            self._settled.set()
        elif error.remedy == "hello":
            self._online.clear()
        elif error.text != self.complaint:
            refused = "the collector refused a message"
            if not self._online.is_set():
                refused = "the collector refused this process, which is not watched until then"
            self._reception.complain(f"{refused}: {error.text}")
            self.complaint = error.text


def _close(before: list[zmq.Socket[bytes]]) -> None:
    while before:
        before.pop().close(0)

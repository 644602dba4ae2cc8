"""Every decision of the collector: events in, effects out, through ``Ledger.handle``. No sockets, no files, no clock."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

from rankwatch.shared import messages, wire
from rankwatch.shared.identity import safe_name

from .effects import Effect, IssueKey, Note, Send
from .journal import Entry, JobEnded, JobInterrupted, Opened, Progress
from .keyring import ANY_JOB, belongs_to
from .options import Options
from .run import Run

KEPT_RUNS = 16
"""Runs that are over and stay in memory, to answer ranks that come back; their records are on disk."""

MAX_RUNS = 1024
"""Runs under way. More are refused."""

LOGGED_REFUSALS = 1000
"""Refusals that are logged one by one; after these the 1024th, the 2048th, and so on."""


class Received(NamedTuple):
    """A peer sent a well-formed message. ``job``: the job that its key speaks for, or ANY_JOB."""

    peer: bytes
    message: messages.Message
    job: str = ANY_JOB


@dataclass(frozen=True, slots=True)
class Malformed:
    """A peer sent something else."""

    peer: bytes
    text: str


@dataclass(frozen=True, slots=True)
class Stored:
    """The record of a run has all messages of these ranks up to these sequence numbers."""

    run: str
    seqs: Mapping[int, int]


@dataclass(frozen=True, slots=True)
class Disconnected:
    """A peer's connection has ended, with its process or by the network."""

    peer: bytes


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed."""


Event: TypeAlias = Received | Malformed | Stored | Disconnected | Tick | JobInterrupted | JobEnded


class Ledger:
    """The runs of one collector.

    Args:
        options: the options of every run.
        is_free: whether a run may have this name; False, for one, where a folder of that name exists.
    """

    def __init__(self, options: Options, is_free: Callable[[str], bool] = lambda name: True) -> None:
        self.runs: dict[str, Run] = {}
        """The runs under way and the last ones that are over, by id, in the order of their first HELLO."""
        self.refused = 0
        """How many messages were malformed."""
        self._refusals = 0
        self._options = options
        self._is_free = is_free
        self._current: dict[tuple[str, int, int], Run] = {}
        self._peers: dict[bytes, tuple[Run, int]] = {}

    def handle(self, event: Event, now: float) -> list[Effect]:
        """The effects of one event at ``now``, in seconds of any clock that does not run backwards."""
        if isinstance(event, Received):
            return list(self._receive(event.peer, event.message, event.job, now))
        if isinstance(event, Stored):
            return list(self.runs[event.run].stored(event.seqs)) if event.run in self.runs else []
        if isinstance(event, Malformed):
            self.refused += 1
            return [
                *self._note_refusal(f"refused a message: {event.text}"),
                Send(event.peer, messages.Error(event.text, "none")),
            ]
        if isinstance(event, Disconnected):
            if event.peer in self._peers:
                run, rank = self._peers[event.peer]
                run.disconnected(rank, event.peer, now)
            return []
        effects: list[Effect] = []
        for run in self.runs.values():
            if run.over:
                continue
            if isinstance(event, Tick):
                effects += run.tick(now)
            elif isinstance(event, JobInterrupted):
                run.interrupt_job(event, now)
            else:
                effects += run.end_job(event, now)
        return effects

    def take_journals(self) -> list[tuple[str, list[Entry]]]:
        """By run, the entries since the last call, to be recorded; ``Stored`` says when they are. Forgets old runs."""
        taken = []
        for name, run in self.runs.items():
            if run.journal:
                taken.append((name, run.journal))
                run.journal = []
        self._forget_old_runs()
        return taken

    def restore(self, name: str, entries: Sequence[Entry], progress: Iterable[Progress], now: float) -> Run:
        """Takes over a run that another collector recorded; its entries lie before ``now``.

        Raises:
            ValueError: these are not the entries of a run.
        """
        if not entries or not isinstance(opened := entries[0].fact, Opened):
            raise ValueError("it does not begin with a run's beginning")
        run = Run(name, opened.job, opened.restart, opened.world_size, self._options)
        for entry in entries:
            run.replay(entry)
        run.resume(progress, now)
        return self._add(run)

    def _forget_old_runs(self) -> None:
        over = [name for name, run in self.runs.items() if run.over]
        for name in over[:-KEPT_RUNS]:
            run = self.runs.pop(name)
            for rank in run.ranks.values():
                if self._peers.get(rank.peer, (None,))[0] is run:
                    del self._peers[rank.peer]
            if self._current.get((run.job, run.restart, run.world_size)) is run:
                del self._current[run.job, run.restart, run.world_size]

    @property
    def is_idle(self) -> bool:
        """Whether no run is under way."""
        return all(run.over for run in self.runs.values())

    def _receive(self, peer: bytes, message: messages.Message, bound: str, now: float) -> Iterable[Effect]:
        if isinstance(message, messages.Unknown):
            return ()
        if isinstance(message, messages.Hello):
            return self._hello(peer, message, bound, now)
        if peer in self._peers:
            run, rank = self._peers[peer]
            return run.receive(rank, message, now)
        if isinstance(message, messages.Tune):
            return self._tune(peer, message, bound, now)
        if isinstance(message, messages.Invite):
            return self._invite(peer, message.job, bound)
        # A collector that was restarted knows no peers.
        return (Send(peer, messages.Error("you are not known here: say HELLO", "hello")),)

    def _note_refusal(self, text: str) -> Iterator[Effect]:
        """Logs all of a few refusals and some of many: a peer that never stops must not fill the disk."""
        self._refusals += 1
        if self._refusals <= LOGGED_REFUSALS or self._refusals.bit_count() == 1:
            more = f" ({self._refusals} refusals by now)" if self._refusals > LOGGED_REFUSALS else ""
            yield Note(text + more)

    def _invite(self, peer: bytes, job: str, bound: str) -> Iterator[Effect]:
        """A control client asks for the keys of one job."""
        if not job:
            yield Send(peer, messages.Error("a job needs a name", "none"))
        elif bound:
            yield from self._note_refusal(f"refused to invite job {job}: the key that asked speaks for job {bound} alone")
            yield Send(peer, messages.Error(f"this connection file speaks for job {bound} alone", "none"))
        else:
            yield IssueKey(peer, job)

    def _tune(self, peer: bytes, tune: messages.Tune, bound: str, now: float) -> Iterator[Effect]:
        """A control client, not a rank, changes options of the ranks."""
        live = {name: run for name, run in self.runs.items() if not run.over and (not bound or belongs_to(run.job, bound))}
        chosen = [run for name, run in live.items() if tune.run in ("", name)]
        if not chosen:
            under_way = f"under way here: {', '.join(live)}" if live else "no run is under way here"
            yield Send(peer, messages.Error(f"no run {tune.run}; {under_way}" if tune.run else under_way, "none"))
            return
        ranks = 0
        for run in chosen:
            send = run.tune(tune.tuning, now)
            ranks += len(send.peers)
            yield send
            yield Note(f"run {run.id}: options changed: {tune.tuning.describe()}")
        yield Send(peer, messages.Tuned(tuple(run.id for run in chosen), ranks))

    def _hello(self, peer: bytes, hello: messages.Hello, bound: str, now: float) -> Iterator[Effect]:
        complaint = _complaint(hello, bound)
        run = self._run_of(hello)
        if not complaint and run is None and sum(not known.over for known in self.runs.values()) >= MAX_RUNS:
            complaint = f"{MAX_RUNS} runs are under way here, and that is the most"
        if complaint:
            yield from self._note_refusal(f"refused rank {hello.rank} of job {hello.job} on {hello.host}: {complaint}")
            yield Send(peer, messages.Error(complaint, "stop"))
            return
        if run is None:
            run = self._open(hello)
            yield Note(f"run {run.id}: {hello.world_size} rank(s), first heard of on {hello.host}")
            if hello.world_size > self._options.room:
                yield Note(
                    f"run {run.id}: only {self._options.room} ranks can connect, for want of file descriptors: "
                    "raise `ulimit -Hn` and start the collector again"
                )
        held = run.ranks.get(hello.rank)
        if held is not None and held.hello.incarnation != hello.incarnation:
            # The agent asks again: if the other process is dead, this one can connect once that one counts as lost.
            text = f"rank {hello.rank} of run {run.id} is held by process {held.hello.pid} on {held.hello.host}"
            rival = f"process {hello.pid} on {hello.host}"
            if held.rival != rival:
                held.rival = rival
                yield Note(f"refused {rival}: {text}")
            yield Send(peer, messages.Error(text, "none"))
            return
        self._assign(peer, run, hello.rank, now)
        yield from run.welcome(hello, peer, now)

    def _assign(self, peer: bytes, run: Run, rank: int, now: float) -> None:
        """From now on this peer alone speaks for this rank, and for no other rank."""
        before = self._peers.pop(peer, None)
        if before is not None and (before[0] is not run or before[1] != rank):
            before[0].disconnected(before[1], peer, now)  # no other event would ever say so
        held = run.ranks.get(rank)
        if held is not None and held.peer in self._peers:
            its_run, its_rank = self._peers[held.peer]
            if its_run is run and its_rank == rank:  # else that peer speaks for another rank by now
                del self._peers[held.peer]
        self._peers[peer] = run, rank

    def _run_of(self, hello: messages.Hello) -> Run | None:
        """The run this rank belongs to; None: it begins a new one."""
        for known in self.runs.values():
            rank = known.ranks.get(hello.rank)
            is_same_start = (known.job, known.restart) == (hello.job, hello.restart)
            if is_same_start and rank is not None and rank.hello.incarnation == hello.incarnation:
                return known  # even when it is over: a process that was stopped for a while must still be aborted
        run = self._current.get((hello.job, hello.restart, hello.world_size))
        if run is None or run.over:
            return None
        rank = run.ranks.get(hello.rank)
        # A rank that has ended does not come back: the same job was started anew.
        return None if rank is not None and not rank.is_running else run

    def _open(self, hello: messages.Hello) -> Run:
        base = f"{safe_name(hello.job)}-{hello.restart}"
        name, attempt = base, 1
        while name in self.runs or not self._is_free(name):
            attempt += 1
            name = f"{base}.{attempt}"
        return self._add(Run(name, hello.job, hello.restart, hello.world_size, self._options))

    def _add(self, run: Run) -> Run:
        self.runs[run.id] = run
        self._current[run.job, run.restart, run.world_size] = run
        return run


def _complaint(hello: messages.Hello, bound: str) -> str:
    """Why a rank is refused for good; empty: it is not. ``bound``: the job that its key speaks for, or ANY_JOB."""
    if bound and not belongs_to(hello.job, bound):
        return f"its connection file speaks for job {bound} alone, not for {hello.job}"
    if hello.major != wire.VERSION[0]:
        ours = ".".join(map(str, wire.VERSION))
        return (
            f"the rank speaks protocol {hello.major}.{hello.minor}, the collector {ours}: use the same release on both sides"
        )
    if hello.rank >= hello.world_size:
        return f"rank {hello.rank} does not lie in a world of {hello.world_size}"
    return ""

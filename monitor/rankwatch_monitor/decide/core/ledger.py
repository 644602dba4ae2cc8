"""Every decision of the collector: events in, effects out, through ``Ledger.handle``. No sockets, no files, no clock."""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, count, islice
from operator import attrgetter
from typing import NamedTuple, TypeAlias

from rankwatch.shared.bounded import BoundedDict
from rankwatch.shared.link import wire
from rankwatch.shared.printable import printable
from rankwatch.shared.system.identity import safe_name
from rankwatch.shared.types import messages
from rankwatch.shared.types.frame import FrameTable
from rankwatch.shared.types.tuning import Tuning
from rankwatch.shared.words.patterns import describe_unmatched, ignorable, names_of

from ..ending.judgement import Doubt
from ..keys.budget import LINES_AT_ONCE, MAX_RUNS, WORDS_OVERHEAD, Budget
from ..keys.keyring import ANY_JOB
from ..launch.launches import Launches, moves
from .effects import Effect, IssueKey, Note, PointLatest, Send
from .gaps import Gap
from .journal import Entry, JobEnded, JobInterrupted, Opened, Progress
from .options import Options
from .report import RankState
from .run import Run

RUNS_AT_ONCE, LOOK_AFTER = 64, 0.0005
"""A run takes 20 us to look at. Of more runs than this only so many are looked at before the next message; and each again after
this many seconds for each run, so that 1,024 runs take a twentieth of the collector's time."""

KEPT_RUNS = 16
"""Runs of one key that are over and stay in memory, to answer ranks that come back; their records are on disk."""

MOST_SPECS = 50_000
"""Frames whose names are looked at for patterns that match nothing: the collector has other work."""

NOTHING_CHANGED = "nothing was changed; modules that are not measured now are known after --modules ''"

KNOWN_NAMES = 4096
"""Names whose last number is remembered; of any other name, the free number is searched for."""

TRIED_NAMES = 16
"""Numbers of one name that are tried one after the other: each one is a look at the disk, which may be a network away."""


class Received(NamedTuple):
    """A peer sent a well-formed message of ``size`` bytes. ``job``: the job that its key speaks for, or ANY_JOB."""

    peer: bytes
    message: messages.Message
    job: str = ANY_JOB
    size: int = 0


@dataclass(frozen=True, slots=True)
class Malformed:
    """A peer sent something else."""

    peer: bytes
    text: str
    job: str = ANY_JOB


@dataclass(frozen=True, slots=True)
class Stored:
    """The record of a run has all messages of these ranks up to these sequence numbers."""

    run: str
    seqs: Mapping[int, int]


@dataclass(frozen=True, slots=True)
class Unrecorded:
    """The record of a run will never have these batches."""

    run: str
    gaps: tuple[Gap, ...]


@dataclass(frozen=True, slots=True)
class Judged:
    """The record of a run has been looked at: its first ``batches`` batches give these reasons against it."""

    run: str
    reasons: tuple[Doubt, ...]
    batches: int


@dataclass(frozen=True, slots=True)
class Disconnected:
    """A peer's connection has ended, with its process or by the network."""

    peer: bytes


class RankExited(NamedTuple):
    """The process of this rank has ended; ``how`` says in what way, as in ``killed by SIGKILL``."""

    run: str
    rank: int
    incarnation: str
    how: str


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed."""


@dataclass(frozen=True, slots=True)
class CommandEnded:
    """The command has ended by a failure or a signal. ``JobEnded`` follows, once no rank is waited for."""


Event: TypeAlias = (
    Received | Malformed | Stored | Unrecorded | Judged | Disconnected | RankExited | Tick | JobInterrupted
    | CommandEnded | JobEnded
)  # fmt: skip


class Ledger:
    """The runs of one collector.

    Args:
        options: the options of every run.
        claim: takes a name for a new run; False where another one has it. A name that was taken is used.
    """

    def __init__(self, options: Options, claim: Callable[[str], bool] = lambda name: True) -> None:
        self.runs: dict[str, Run] = {}
        """The runs under way and the last ones that are over, by id, in the order of their first HELLO."""
        self.refused = 0
        """How many messages were malformed."""
        self._budgets: defaultdict[str, Budget] = defaultdict(Budget)
        """By the job that a key speaks for."""
        self._options = options
        self._claim = claim
        self._peers: dict[bytes, tuple[Run, int]] = {}
        self._launches = Launches()
        self._names = BoundedDict[str, int](KNOWN_NAMES)
        """The last number that a run of this name got: a search from the first one would take ever longer."""

    def handle(self, event: Event, now: float) -> list[Effect]:
        """The effects of one event at ``now``, in seconds of any clock that does not run backwards."""
        if isinstance(event, Received):
            effects = list(self._receive(event, now))
            if event.peer in self._peers:
                self._tell_siblings(self._peers[event.peer][0], now)
            return effects
        if isinstance(event, Stored):
            return list(self.runs[event.run].intake.stored(event.seqs)) if event.run in self.runs else []
        if isinstance(event, Unrecorded):
            if event.run in self.runs:
                self.runs[event.run].batches.gaps.take(event.gaps)
            return []
        if isinstance(event, Judged):
            return list(self.runs[event.run].judged(event.reasons, event.batches, now)) if event.run in self.runs else []
        if isinstance(event, Malformed):
            self.refused += 1
            return [
                *self._note_refusal(f"refused a message: {event.text}", event.job),
                Send(event.peer, messages.Error(event.text, "none")),
            ]
        if isinstance(event, Disconnected):
            if event.peer in self._peers:
                run, rank = self._peers[event.peer]
                run.intake.disconnected(rank, event.peer, now)
                return list(run.ending.look_for_holds(now))
            return []
        if isinstance(event, RankExited):
            if event.run in self.runs:
                self.runs[event.run].intake.exited(event.rank, event.incarnation, event.how, now)
            return []
        effects = []
        if isinstance(event, Tick):
            for run in self._due(now):
                effects += run.tick(now)
                self._tell_siblings(run, now)
                effects += self._leave_latest(run)
            return effects
        for run in self.runs.values():
            if run.over:
                continue
            if isinstance(event, JobEnded):  # of another command's ranks, only the collector ends
                effects += run.end_job(event if run.is_own else JobEnded(None), now)
            elif not run.is_own:
                continue
            elif isinstance(event, CommandEnded):
                run.command_ended(now)
            else:
                effects += run.interrupt_job(event, now)
        return [*effects, *(effect for run in self.runs.values() for effect in self._leave_latest(run))]

    def _due(self, now: float) -> list[Run]:
        """The runs for which time is to pass: of many only some at once, those first that have waited longest."""
        live = [run for run in self.runs.values() if not run.over]
        if len(live) > RUNS_AT_ONCE:
            pause = len(live) * LOOK_AFTER
            waiting = (run for run in live if now - run.ticked_at >= pause)
            live = heapq.nsmallest(RUNS_AT_ONCE, waiting, key=attrgetter("ticked_at"))
        return live

    def take_journals(self) -> list[tuple[str, list[Entry]]]:
        """By run, the entries since the last call, to be recorded; ``Stored`` says when they are. Forgets old runs."""
        taken = []
        for name, run in self.runs.items():
            if entries := run.take_journal():
                taken.append((name, entries))
        self._forget_old_runs()
        return taken

    def restore(self, name: str, entries: Sequence[Entry], progress: Iterable[Progress], now: float) -> Run:
        """Takes over a run that another collector recorded; its entries lie before ``now``.

        Raises:
            ValueError: these are not the entries of a run.
        """
        if not entries or not isinstance(opened := entries[0].fact, Opened):
            raise ValueError("it does not begin with a run's beginning")
        run = Run(name, opened, self._options, budget=self._budgets[opened.bound])
        for entry in entries:
            run.replay(entry)
        run.resume(progress, now)
        self._add(name, run)
        self._launches.note_successors(run)
        return run

    def _add(self, name: str, run: Run) -> None:
        self.runs[name] = run
        self._launches.add(run)

    def _forget_old_runs(self) -> None:
        over = defaultdict[str, list[str]](list)
        for name, run in self.runs.items():
            if run.over:
                over[run.opened.bound].append(name)
        for name in [name for names in over.values() for name in names[:-KEPT_RUNS]]:
            run = self.runs.pop(name)
            self._launches.forget(run)
            for rank in run.ranks.values():
                if self._peers.get(rank.peer, (None,))[0] is run:
                    del self._peers[rank.peer]

    @property
    def is_idle(self) -> bool:
        """Whether no run is under way."""
        return all(run.over for run in self.runs.values())

    def awaits_orphans(self, now: float) -> bool:
        """Whether ranks may live on after the command, and be stopped yet."""
        return any(run.ending.awaits_orphans(now) for run in self.runs.values())

    def _receive(self, received: Received, now: float) -> Iterable[Effect]:
        peer, message, bound, size = received
        if isinstance(message, messages.Unknown):
            return ()
        if isinstance(message, messages.Hello):
            return self._hello(peer, message, bound, now, size)
        if peer in self._peers:
            run, rank = self._peers[peer]
            if run.later is not None and moves(run, rank, run.later):
                return (Send(peer, messages.Error(f"this launch is run {run.later.id} by now: say HELLO", "hello")),)
            return run.intake.receive(rank, message, now, size)
        if isinstance(message, messages.Tune):
            return self._tune(peer, message, bound, now)
        if isinstance(message, messages.Inspect):
            return self._inspect(peer, message, bound, now)
        if isinstance(message, messages.Invite):
            return self._invite(peer, message.job, bound)
        # A collector that was restarted knows no peers.
        return (Send(peer, messages.Error("you are not known here: say HELLO", "hello")),)

    def _note_refusal(self, text: str, bound: str) -> Iterator[Effect]:
        budget = self._budgets[bound]
        if budget.logs_refusal():
            more = f" ({budget.refusals} refusals by now)" if budget.refusals > LINES_AT_ONCE else ""
            yield Note(text + more)

    def _invite(self, peer: bytes, job: str, bound: str) -> Iterator[Effect]:
        """A control client asks for the keys of one job."""
        if not job:
            yield Send(peer, messages.Error("a job needs a name", "none"))
        elif bound:
            yield from self._note_refusal(
                f"refused to invite job {job}: the key that asked speaks for job {bound} alone", bound
            )
            yield Send(peer, messages.Error(f"this connection file speaks for job {bound} alone", "none"))
        else:
            yield IssueKey(peer, job)

    def _chosen(self, name: str, bound: str) -> tuple[list[Run], str]:
        """The runs under way of this name, or all where it is empty, and what is wrong if there is none."""
        live = {run.id: run for run in self.runs.values() if not run.over and bound in (ANY_JOB, run.opened.job)}
        chosen = [run for run in live.values() if name in ("", run.id)]
        under_way = f"under way here: {', '.join(live)}" if live else "no run is under way here"
        return chosen, "" if chosen else f"no run {name}; {under_way}" if name else under_way

    def _inspect(self, peer: bytes, question: messages.Inspect, bound: str, now: float) -> Iterator[Effect]:
        """A control client, not a rank, asks where ranks are."""
        chosen, complaint = self._chosen(question.run, bound)
        if complaint:
            yield Send(peer, messages.Error(complaint, "none"))
            return
        (run, *_) = chosen
        yield from run.stalls.ask(peer, question.rank, now)

    def _tune(self, peer: bytes, tune: messages.Tune, bound: str, now: float) -> Iterator[Effect]:
        """A control client, not a rank, changes options of the ranks."""
        chosen, complaint = self._chosen(tune.run, bound)
        if complaint:
            yield Send(peer, messages.Error(complaint, "none"))
            return
        if not self._budgets[bound].changes.take(now):
            text = "options are changed once a second at most: try again"
            yield from self._note_refusal(f"refused a change of options: {text}", bound)
            yield Send(peer, messages.Error(text, "none"))
            return
        if mistyped := list(_mistyped(tune.tuning, (table for run in chosen for table in run.batches.tables))):
            yield Send(peer, messages.Error("; ".join([*mistyped, NOTHING_CHANGED]), "none"))
            return
        ranks = 0
        for run in chosen:
            send = run.tune(tune.tuning, now)
            ranks += len(send.peers)
            yield send
            yield Note(f"run {run.id}: options changed: {tune.tuning.describe()}")
        yield Send(peer, messages.Tuned(tuple(run.id for run in chosen), ranks))

    def _hello(self, peer: bytes, hello: messages.Hello, bound: str, now: float, size: int) -> Iterator[Effect]:
        complaint = _complaint(hello, bound)
        run = self._launches.run_of(hello, now)
        remedy = "stop"
        if not complaint and run is None:
            yield from self._make_room(bound, now)
            complaint, remedy = self._lack(bound, hello.world_size, now), "none"  # the rank asks again, and trains meanwhile
        is_noted = not complaint and size > 0 and _is_noted_down(hello, run)
        if is_noted and not self._budgets[bound].words.take(now, size + WORDS_OVERHEAD):
            complaint, remedy = "too many ranks connect at once with one key: this one is watched in a moment", "none"
        if complaint:
            yield from self._note_refusal(
                f"refused rank {hello.rank} of job {hello.job} on {hello.host}: {complaint}", bound
            )
            yield Send(peer, messages.Error(complaint, remedy))
            return
        is_new = run is None
        if run is None:
            run = self._open(hello, bound)
            ranks = f"{hello.world_size} rank{'s' * (hello.world_size != 1)}"
            where = self._options.folder_of(run.id)
            told = f"; its record goes to {printable(where)}, and with capsule=on its capsules" if where else ""
            yield Note(f"run {run.id}: {ranks}, first heard of on {hello.host}{told}")
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
                yield from self._note_refusal(f"refused {rival}: {text}", bound)
            yield Send(peer, messages.Error(text, "none"))
            return
        self._launches.let_go(run, hello, now)
        self._assign(peer, run, hello.rank, now)
        yield from run.intake.welcome(hello, peer, now)
        if is_new:
            self._launches.note_successors(run)
            self._launches.note_later(run)

    def _assign(self, peer: bytes, run: Run, rank: int, now: float) -> None:
        """From now on this peer alone speaks for this rank, and for no other rank."""
        before = self._peers.pop(peer, None)
        if before is not None and (before[0] is not run or before[1] != rank):
            before[0].intake.disconnected(before[1], peer, now)  # no other event would ever say so
        held = run.ranks.get(rank)
        if held is not None and held.peer in self._peers:
            its_run, its_rank = self._peers[held.peer]
            if its_run is run and its_rank == rank:  # else that peer speaks for another rank by now
                del self._peers[held.peer]
        self._peers[peer] = run, rank

    def _under_way(self, bound: str) -> list[Run]:
        """The runs that one key began."""
        return [run for run in self.runs.values() if not run.over and run.opened.bound == bound]

    def _make_room(self, bound: str, now: float) -> Iterator[Effect]:
        """Of too many runs of one key, one without a connected rank counts as lost: the oldest, or one that never trained."""
        if len(own := self._under_way(bound)) < MAX_RUNS:
            return
        deserted = [run for run in own if run.is_deserted]
        if deserted:
            left = min(deserted, key=lambda run: run.has_trained)
            yield Note(
                f"run {left.id}: none of its ranks is connected, and they count as lost: {MAX_RUNS} runs are under way"
            )
            yield from left.desert(now)

    def _lack(self, bound: str, world_size: int, now: float) -> str:
        """Why this key can begin no run now; empty: it can."""
        if len(self._under_way(bound)) >= MAX_RUNS:
            return f"{MAX_RUNS} runs are under way here, the most for one key: this one is watched when one of them ends"
        if not self._budgets[bound].begins_run(world_size, now):
            return "too many runs begin at once with one key: this one is watched in a moment"
        return ""

    def _open(self, hello: messages.Hello, bound: str) -> Run:
        number = f".{hello.model + 1}" if hello.model else ""
        base = f"{safe_name(hello.job)}{number}-{hello.restart}"
        for attempt in _attempts(self._names.get(base, 0) + 1):
            name = base if attempt == 1 else f"{base}.{attempt}"
            if name not in self.runs and self._claim(name):
                break
        opened = Opened(
            hello.job, hello.restart, hello.world_size, hello.start, hello.model, bound, self._options.expects_job_end,
            hello.earlier,
        )  # fmt: skip
        self._names[base] = attempt
        run = Run(name, opened, self._options, budget=self._budgets[bound])
        self._add(name, run)
        return run

    def _tell_siblings(self, run: Run, now: float) -> None:
        """Once: a verdict on one model of a process ends the process, and with it the runs of its other models."""
        if not run.stops_siblings or run.has_told_siblings:
            return
        run.has_told_siblings = True
        for other in self.runs.values():
            if other.opened.model != run.opened.model and not other.over and _share_processes(other, run):
                other.hear_of_sibling(run.id, now)

    def _leave_latest(self, run: Run) -> Iterator[Effect]:
        """Once: a model that was called and never trained, a teacher say, is not the one that people look for."""
        if not (run.over and run.is_own and run.ending.is_unused) or run.has_told_siblings:
            return
        run.has_told_siblings = True
        for other in self.runs.values():
            if other.is_own and not other.ending.is_unused and _share_processes(other, run):
                yield PointLatest(other.id)


def _attempts(first: int) -> Iterator[int]:
    """Numbers that a run's name may have, the last ones ever further apart: 100,000 names in use take 33 looks."""
    yield from range(first, first + TRIED_NAMES)
    for doublings in count():
        yield first + TRIED_NAMES + (1 << doublings)


def _share_processes(run: Run, other: Run) -> bool:
    """Whether these are the runs of two models that the same processes train."""
    processes = ((rank.hello, other.ranks[number].hello) for number, rank in run.ranks.items() if number in other.ranks)
    return any((a.host, a.pid) == (b.host, b.pid) for a, b in processes)


def _is_noted_down(hello: messages.Hello, run: Run | None) -> bool:
    """Whether it is in the journal that this rank connects: for the first time, or after it was lost."""
    rank = None if run is None else run.ranks.get(hello.rank)
    return rank is None or rank.state is RankState.LOST


def _complaint(hello: messages.Hello, bound: str) -> str:
    """Why a rank is refused for good; empty: it is not. ``bound``: the job that its key speaks for, or ANY_JOB."""
    if bound not in (ANY_JOB, hello.job):
        return f"its connection file speaks for job {bound} alone, not for {hello.job}"
    if hello.major != wire.VERSION[0]:
        ours = ".".join(map(str, wire.VERSION))
        return (
            f"the rank speaks protocol {hello.major}.{hello.minor}, the collector {ours}: use the same release on both sides"
        )
    if hello.rank >= hello.world_size:
        return f"rank {hello.rank} does not lie in a world of {hello.world_size}"
    return ""


def _mistyped(tuning: Tuning, tables: Iterable[FrameTable]) -> Iterator[str]:
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

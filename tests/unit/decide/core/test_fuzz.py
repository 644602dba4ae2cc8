"""Hostile input: what ``wire`` accepts, and what the ledger makes of it, from any peer and in any order."""

from __future__ import annotations

import struct
import tracemalloc
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import msgpack
import pytest
from hypothesis import Phase, example, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

import makers
from fuzz import atheris_wire, make_corpus
from fuzz.atheris_wire import check, decode_or_refuse, perform
from invariants import CheckedLedger
from rankwatch.errors import ProtocolError
from rankwatch.shared.link import wire
from rankwatch.shared.types import messages
from rankwatch.shared.types.frame import FrameTable, Position
from rankwatch.shared.types.tuning import Tuning
from rankwatch_monitor.decide.core import ledger as ledger_module
from rankwatch_monitor.decide.core import notices as notices_module
from rankwatch_monitor.decide.core.effects import Effect, Note, RecordTrace, Send
from rankwatch_monitor.decide.core.journal import JobEnded
from rankwatch_monitor.decide.core.ledger import Disconnected, Event, Ledger, Malformed, Received, Tick
from rankwatch_monitor.decide.core.options import Options
from rankwatch_monitor.decide.core.report import RankState
from rankwatch_monitor.decide.core.run import Run
from rankwatch_monitor.decide.keys import tables as tables_module

REFUSED, READ = make_corpus.read("refused"), make_corpus.read("read")
NOT_HELLO = [message for message in map(wire.decode, READ.values()) if not isinstance(message, messages.Hello)]

MEMORY_PER_BYTE = 160
"""Bytes that decoding may hold for each byte of a message: an empty array is one byte on the wire and 80 bytes in memory."""

MEMORY_AT_LEAST = 128 * 1024

bounded = settings(derandomize=True, max_examples=80)


# --- the corpus -----------------------------------------------------------------------------------------------------------


def test_the_corpus_is_what_its_script_writes() -> None:
    on_disk = {
        f"{folder}/{name}.bin": data for folder in ("refused", "read") for name, data in make_corpus.read(folder).items()
    }
    assert on_disk == make_corpus.entries(), "run: PYTHONPATH=agent:tests python tests/fuzz/make_corpus.py"


def test_every_kind_of_message_and_every_field_of_it_is_in_the_corpus() -> None:
    for message in make_corpus.ONE_OF_EACH:
        kind, *_ = make_corpus.parts_of(message)
        for name in message.__dataclass_fields__:
            assert any(entry.startswith(f"{kind.lower()}.{name}-") for entry in REFUSED), (kind, name)
    assert {type(message) for message in make_corpus.ONE_OF_EACH} | {messages.Unknown} == set(messages.Message.__args__)


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_broken_is_refused(name: str) -> None:
    with pytest.raises(ProtocolError):
        wire.decode(REFUSED[name])


@pytest.mark.parametrize("name", READ)
def test_what_is_read_is_written_as_it_was_read(name: str) -> None:
    check(wire.decode(READ[name]))


@pytest.mark.parametrize("name", [*REFUSED, *READ])
def test_the_fuzz_target_runs_over_the_corpus_without_atheris(name: str) -> None:
    for corpus in (REFUSED, READ):
        if name in corpus:
            atheris_wire.one_input(corpus[name])


# --- wire -----------------------------------------------------------------------------------------------------------------


def decode_in_bounds(data: bytes) -> None:
    """Decodes and measures the memory held meanwhile. That bounds the time too: items that are missing cost none."""
    tracemalloc.start()
    try:
        decode_or_refuse(data)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak <= MEMORY_PER_BYTE * len(data) + MEMORY_AT_LEAST, f"{peak} bytes held for a message of {len(data)}"


@st.composite
def damaged(draw: st.DrawFn) -> bytes:
    """An entry of the corpus with bytes changed, removed, doubled, or replaced by bytes of another entry."""
    one, other = (draw(st.sampled_from([*READ.values(), *REFUSED.values()])) for _ in range(2))
    data = bytearray(one[:2000])
    for _ in range(draw(st.integers(1, 4))):
        start, end = sorted(draw(st.integers(0, len(data))) for _ in range(2))
        data[start:end] = draw(st.sampled_from([b"", bytes(data[start:end]) * 2, other[start:end]]) | st.binary(max_size=5))
    return bytes(data)


items = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text(max_size=9) | st.binary(max_size=9),
    lambda inner: st.lists(inner, max_size=4),
    max_leaves=8,
)


@settings(bounded, max_examples=400)
@given(st.binary(max_size=100) | damaged() | items.map(msgpack.packb))
def test_any_bytes_are_a_message_or_refused(data: bytes) -> None:
    decode_or_refuse(data)


@settings(bounded, max_examples=80)
@given(data=st.data(), message=st.sampled_from(make_corpus.ONE_OF_EACH))
def test_anything_in_place_of_any_part_is_a_message_or_refused(data: st.DataObject, message: messages.Message) -> None:
    parts = make_corpus.parts_of(message)
    path: list[int] = [data.draw(st.integers(1, len(parts) - 1))]
    while isinstance(inner := make_corpus.pick(parts, *path), list) and inner and data.draw(st.booleans()):
        path.append(data.draw(st.integers(0, len(inner) - 1)))
    decode_or_refuse(make_corpus.broken(parts, data.draw(items), *path))


HEADERS = dict.fromkeys([0xDC, 0xDE, 0xDA, 0xC5], ">BH") | dict.fromkeys([0xDD, 0xDF, 0xDB, 0xC6, 0xC9], ">BI")
claims = st.tuples(st.sampled_from(sorted(HEADERS)), st.integers(0, 2**32 - 1) | st.integers(0, 20_000))


@settings(bounded, phases=[Phase.explicit, Phase.generate])  # shrinking a failure is slow, and failures here are plain
@given(claimed=st.lists(claims, min_size=1, max_size=5), times=st.integers(1, 300), rest=st.integers(0, 20_000))
@example(claimed=[(0xDD, 9_999)], times=1000, rest=6_000)
@example(claimed=[(0xDC, 1), (0xDD, 19_999)], times=500, rest=16_000)
def test_a_length_that_is_claimed_costs_nothing(claimed: Sequence[tuple[int, int]], times: int, rest: int) -> None:
    short = [(head, size % 65536 if HEADERS[head] == ">BH" else size) for head, size in claimed]
    heads = b"".join(struct.pack(HEADERS[head], head, size) for head, size in short)
    decode_in_bounds(heads * times + b"\xc0" * rest)
    decode_in_bounds(b"\x93\xa3ACK" + heads * times + b"\xc0" * rest)


@pytest.mark.parametrize(
    "item", [b"\x90", b"\x80", b"\xc0", b"\xa1x", b"\xc4\0", b"\xc7\0\x01", b"\xcd\xff\xff", b"\x94\x00\xa0\xa0\xc0"]
)
def test_what_a_message_holds_is_bounded_by_its_bytes(item: bytes) -> None:
    many = b"\xdd" + struct.pack(">I", 20_000) + item * 20_000
    decode_in_bounds(b"\x92\xa1X" + many)
    decode_in_bounds(b"\x92\xa5TABLE" + many)


def test_the_densest_table_is_bounded_by_its_bytes() -> None:
    rows = b"\xdd" + struct.pack(">I", 5_000) + b"\x93\x00\xa0\xa0" * 5_000
    decode_in_bounds(b"\x92\xa5TABLE\x91\x95\xa0\xa0" + rows + b"\x90\x00")


# --- the ledger -----------------------------------------------------------------------------------------------------------

PEERS = [b"peer-%d" % number for number in range(5)]
JOBS = ("train", "gan")
TABLES = [makers.table(), *(FrameTable((makers.frame(module=f"m{number}").spec,)) for number in range(5))]
SMALL = {"tables": 3, "notices": 4, "runs": 2}
"""Limits small enough for a short test to reach."""

positions = st.builds(Position, st.integers(-1, 4), st.integers(0, 1), st.integers(0, 4))
seqs = st.integers(messages.AHEAD, 9)
tables = st.sampled_from(TABLES)
hellos = st.builds(
    lambda job, restart, rank, world_size, incarnation, start, earlier: makers.hello(
        rank, world_size, job=job, restart=restart, incarnation=incarnation, start=start, earlier=earlier, age=1.0
    ),
    st.sampled_from(JOBS),
    st.sampled_from([0, 0, 0, 1]),
    st.integers(0, 3),
    st.sampled_from([2, 2, 2, 1, 3]),
    st.sampled_from(["one", "two"]),
    st.sampled_from(["", "", "a", "b"]),
    st.sampled_from(["", "a", "b"]),
)
batches = st.builds(
    lambda seq, batch, first, traced, table: messages.Batch(seq, makers.summary(batch, first=first, traced=traced, of=table)),
    seqs, st.integers(0, 4), st.integers(0, 2), st.booleans(), tables,
)  # fmt: skip
trips = st.builds(
    lambda seq, at, within: messages.Tripped(seq, replace(makers.trip(at=at), closeup_within=within)),
    seqs, positions, st.sampled_from([0.0, 0.5, 3600.0]),
)  # fmt: skip
closeups = st.builds(
    lambda seq, recurred: messages.LookedCloser(seq, makers.closeup(recurred=recurred)), seqs, st.integers(0, 3)
)
notices = st.builds(
    lambda seq, module, value: messages.Noticed(seq, makers.notice(module=module, value=value)),
    seqs, st.sampled_from("abcdefgh"), st.floats(0, 1e38),
)  # fmt: skip
byes = st.builds(messages.Bye, seqs, st.sampled_from(sorted(messages.OUTCOMES)), st.sampled_from(["", "KeyError: 'x'"]))
misfits = st.builds(
    lambda batch: replace(batch, summary=batch.summary._replace(abs_min=b"", abs_max=b"", states=b"")), batches
)
tabled = st.builds(messages.Table, tables)
sequenced = st.one_of(batches, misfits, trips, closeups, notices, notices, byes)
words: st.SearchStrategy[messages.Message] = st.one_of(
    st.builds(lambda at, phase: makers.beat(*at, phase=phase), positions, st.sampled_from(sorted(messages.PHASES))),
    tabled,
    sequenced,
    sequenced,
    st.builds(messages.Ack, st.integers(0, 9), st.booleans()),
    st.builds(
        messages.Tune, st.sampled_from(["", "train-0", "no such run"]), st.builds(Tuning, st.none() | st.integers(1, 3))
    ),
    st.sampled_from(NOT_HELLO),
)
"""Any message but HELLO."""


def state_of(run: Run) -> tuple[str, object]:
    """All that a run knows, and its report."""
    return repr(run), run.report()


def tables_of(run: Run) -> OrderedDict[str, FrameTable]:
    return run.batches.tables._tables


@contextmanager
def small_limits() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tables_module, "MAX_TABLES", SMALL["tables"])
        patch.setattr(notices_module, "MAX_NOTICES", SMALL["notices"])
        patch.setattr(ledger_module, "KEPT_RUNS", SMALL["runs"])
        yield


class Peers(RuleBasedStateMachine):
    """Several peers that send what they like to a ledger of several runs."""

    def __init__(self) -> None:
        super().__init__()
        self._limits = small_limits()
        self._limits.__enter__()
        self.ledger = CheckedLedger(Options())
        self.now = 0.0
        self.said = 0
        self.places: dict[bytes, tuple[str, int]] = {}
        """The run and rank that each peer was last welcomed as."""
        self.verdicts: dict[str, tuple[Run, object]] = {}

    def teardown(self) -> None:
        """Once all peers are gone, every run ends, and all but the last ones are forgotten."""
        try:
            for peer in PEERS:
                self.handle(Disconnected(peer))
            for _ in range(4):
                self.pass_time(400.0)  # ranks that were cut off are lost only after this
            assert [run.id for run in self.ledger.runs.values() if not run.over] == []
        finally:
            self._limits.__exit__(None, None, None)

    @initialize()
    def begin_with_two_runs(self) -> None:
        for number, (job, rank) in enumerate([("train", 0), ("train", 1), ("gan", 0)]):
            self.say_hello(PEERS[number], makers.hello(rank, 2, job=job, incarnation="one"))
            self.say(PEERS[number], messages.Table(TABLES[0]))

    def handle(self, event: Event) -> list[Effect]:
        effects = self.ledger.handle(event, self.now)
        perform(effects)
        self.ledger.take_journals()  # which forgets old runs
        self.places = {peer: place for peer, place in self.places.items() if place[0] in self.ledger.runs}
        return effects

    def changed_by(self, event: Event) -> tuple[set[str], list[Effect]]:
        """The runs that an event changed, without new ones. A run that was over is not changed when it is forgotten."""
        before = {name: state_of(run) for name, run in self.ledger.runs.items()}
        over = {name for name, run in self.ledger.runs.items() if run.over}
        effects = self.handle(event)
        after = {name: state_of(run) for name, run in self.ledger.runs.items()}
        forgotten = over - after.keys()
        return {name for name, state in before.items() if after.get(name) != state} - forgotten, effects

    @rule(peer=st.sampled_from(PEERS), hello=hellos)
    def say_hello(self, peer: bytes, hello: messages.Hello) -> None:
        changed, effects = self.changed_by(Received(peer, hello))
        named = {name for name, run in self.ledger.runs.items() if run.opened.job == hello.job}
        left = {self.places[peer][0]} if peer in self.places else set()
        assert changed <= named | left
        welcomes = [
            effect.message for effect in effects if isinstance(effect, Send) and isinstance(effect.message, messages.Welcome)
        ]
        for welcome in welcomes:
            place = welcome.run, hello.rank
            self.places = {other: taken for other, taken in self.places.items() if taken != place}
            self.places[peer] = place
            assert self.ledger.runs[welcome.run].ranks[hello.rank].hello.incarnation == hello.incarnation
        if not welcomes:
            assert changed <= named  # at most, the run notes who else tried to be this rank

    @rule(peer=st.sampled_from(PEERS), message=words)
    def say(self, peer: bytes, message: messages.Message) -> None:
        tunings = {name: run.tuning for name, run in self.ledger.runs.items()}
        place = self.places.get(peer)  # which is gone afterwards, if this ends the run and the run is forgotten at once
        changed, effects = self.changed_by(Received(peer, message))
        if place is not None:
            assert changed <= {place[0]}
        elif isinstance(message, messages.Tune):
            assert changed <= {name for name in tunings if message.run in ("", name)}
            for name in changed:
                self.ledger.runs[name].tuning = tunings[name]  # a control client changes nothing else
        else:
            assert changed == set()
            assert isinstance(message, messages.Unknown | messages.Invite) or [type(effect) for effect in effects] == [Send]

    @rule(peer=st.sampled_from(PEERS), told=st.lists(sequenced | tabled, min_size=1, max_size=8))
    def say_in_order(self, peer: bytes, told: list[messages.Message]) -> None:
        for message in told:
            self.said += 1
            self.say(peer, replace(message, seq=self.said) if isinstance(message, messages.Sequenced) else message)

    @rule(peer=st.sampled_from(PEERS))
    def say_rubbish(self, peer: bytes) -> None:
        refused = self.ledger.refused
        assert self.changed_by(Malformed(peer, "no"))[0] == set()
        assert self.ledger.refused == refused + 1

    @rule(peer=st.sampled_from(PEERS))
    def hang_up(self, peer: bytes) -> None:
        changed, _ = self.changed_by(Disconnected(peer))
        assert changed <= ({self.places[peer][0]} if peer in self.places else set())

    @rule(seconds=st.sampled_from([0.0, 0.3, 1.0, 4.0]))
    def pass_time(self, seconds: float) -> None:
        self.now += seconds
        self.handle(Tick())
        assert sum(run.over for run in self.ledger.runs.values()) <= SMALL["runs"]

    @rule(exit_code=st.sampled_from([None, 0, 1]), interrupted=st.sampled_from(["", "SIGTERM"]), now=st.integers(0, 9))
    def end_the_job(self, exit_code: int | None, interrupted: str, now: int) -> None:
        if now == 0:  # seldom
            self.handle(JobEnded(exit_code, interrupted))
            self.pass_time(0.0)

    @invariant()
    def a_peer_is_connected_as_one_rank_at_most(self) -> None:
        records = [record for run in self.ledger.runs.values() for record in run.ranks.values()]
        peers = [record.peer for record in records if record.connected and record.state is RankState.RUNNING]
        assert len(peers) == len(set(peers))

    @invariant()
    def who_speaks_for_a_rank_is_who_was_welcomed_as_it(self) -> None:
        assert {peer: (run.id, rank) for peer, (run, rank) in self.ledger._peers.items()} == self.places

    @invariant()
    def what_is_kept_is_bounded(self) -> None:
        runs = self.ledger.runs
        for run in runs.values():
            assert len(run.batches.tables) <= SMALL["tables"]
            assert run.notices._count == len(run.notices.all()) <= SMALL["notices"]
            assert all(run.notices._kept.values())

    @invariant()
    def a_verdict_stands(self) -> None:
        for name, run in self.ledger.runs.items():
            known, verdict = self.verdicts.get(name, (run, run.verdict))
            # A run that was forgotten may have left its name to a new one.
            assert run.verdict is verdict or verdict is None or known is not run
            self.verdicts[name] = run, run.verdict


TestPeers = Peers.TestCase
# Shrinking takes minutes here: add Phase.shrink when a run has failed.
TestPeers.settings = settings(bounded, max_examples=40, stateful_step_count=30, phases=[Phase.generate])


def ledger_of(*hellos: tuple[bytes, messages.Hello]) -> Ledger:
    ledger = CheckedLedger(Options())
    for peer, hello in hellos:
        ledger.handle(Received(peer, hello), 0.0)
    ledger.take_journals()
    return ledger


def say(ledger: Ledger, peer: bytes, *messages: messages.Message, now: float = 0.0) -> list[Effect]:
    effects = [effect for message in messages for effect in ledger.handle(Received(peer, message), now)]
    perform(effects)
    ledger.take_journals()
    return effects


@bounded
@given(said=st.lists(sequenced, max_size=9), data=st.data())
def test_what_is_said_again_is_taken_once(said: list[messages.Sequenced], data: st.DataObject) -> None:
    """Messages that are sent again, in between others, change nothing."""
    numbered = [replace(message, seq=seq) for seq, message in enumerate(said, 1)]
    told: list[Any] = []
    for is_replayed in (False, True):
        ledger = ledger_of((b"a", makers.hello(0, 2)), (b"b", makers.hello(1, 2)))
        say(ledger, b"a", *map(messages.Table, TABLES))
        effects: list[Effect] = []
        for index, message in enumerate(numbered):
            effects += say(ledger, b"a", message)
            if is_replayed:
                effects += say(ledger, b"a", *data.draw(st.lists(st.sampled_from(numbered[: index + 1]), max_size=3)))
        effects += ledger.handle(JobEnded(0), 1.0)
        report = ledger.runs["train-0"].report()
        told.append((report, [effect for effect in effects if isinstance(effect, Note | RecordTrace)]))
    assert told[0] == told[1]


@bounded
@given(said=st.lists(words, min_size=1, max_size=9))
def test_who_has_not_said_hello_speaks_for_nobody(said: list[messages.Message]) -> None:
    ledger = ledger_of((b"a", makers.hello(0, 2)))
    run = ledger.runs["train-0"]
    for message in said:
        before, tuning = state_of(run), run.tuning
        effects = say(ledger, b"stranger", message)
        if isinstance(message, messages.Tune):  # a control client's
            run.tuning = tuning
        elif not isinstance(message, messages.Unknown | messages.Invite):
            assert effects == [Send(b"stranger", messages.Error("you are not known here: say HELLO", "hello"))]
        assert state_of(run) == before
    assert list(ledger.runs) == ["train-0"]


@bounded
@given(
    hello=st.builds(
        lambda world_size, pid, host: makers.hello(0, world_size, incarnation="another", pid=pid, host=host),
        st.integers(1, 3), st.integers(0, 200), st.sampled_from(["node0", "node1"]),
    ),
    said=st.lists(words, max_size=9),
)  # fmt: skip
def test_nobody_speaks_for_a_rank_that_a_live_process_holds(hello: messages.Hello, said: list[messages.Message]) -> None:
    ledger = ledger_of((b"a", makers.hello(0, 2)))
    run = ledger.runs["train-0"]
    before = state_of(run)
    effects = say(ledger, b"impostor", hello)
    assert [effect for effect in effects if isinstance(effect, Send) and effect.peer != b"impostor"] == []
    say(ledger, b"impostor", *(message for message in said if not isinstance(message, messages.Tune)))
    run.ranks[0].rival = ""  # the report names the process that tried
    assert state_of(run) == before


def test_a_peer_that_says_hello_as_rank_after_rank_holds_only_the_last_place() -> None:
    ledger = CheckedLedger(Options())
    for rank in range(4):
        say(ledger, b"greedy", makers.hello(rank, 4, incarnation="greedy"))
    assert [rank for rank, record in ledger.runs["train-0"].ranks.items() if record.connected] == [3]
    ledger.handle(Disconnected(b"greedy"), 1.0)
    for second in range(10, 20):
        ledger.handle(Tick(), float(second))
    assert ledger.is_idle


def test_a_peer_that_says_hello_as_job_after_job_leaves_no_run_that_never_ends() -> None:
    ledger = CheckedLedger(Options())
    for number in range(100):
        say(ledger, b"greedy", makers.hello(job=f"job{number}"))
    ledger.handle(Disconnected(b"greedy"), 1.0)
    for second in range(10, 20):
        ledger.handle(Tick(), float(second))
        ledger.take_journals()
    assert ledger.is_idle
    assert len(ledger.runs) == ledger_module.KEPT_RUNS
    assert len(ledger._peers) <= 1


def test_a_rank_that_comes_back_does_not_cut_off_what_its_old_connection_speaks_for_now() -> None:
    ledger = ledger_of((b"x", makers.hello()), (b"x", makers.hello(job="gan")), (b"y", makers.hello()))
    assert say(ledger, b"x", makers.beat(0, 0, 1)) == [Send(b"x", messages.Ack(0, abort=False))]
    assert say(ledger, b"y", makers.beat(0, 0, 1)) == [Send(b"y", messages.Ack(0, abort=False))]


def test_a_hello_of_another_world_size_does_not_split_a_run() -> None:
    stray = makers.hello(0, 3, incarnation="stray")
    ledger = ledger_of((b"a", makers.hello(0, 2)), (b"x", stray), (b"b", makers.hello(1, 2)))
    assert {name: sorted(run.ranks) for name, run in ledger.runs.items()} == {"train-0": [0, 1], "train-0.2": [0]}


def test_tables_are_kept_up_to_their_limit() -> None:
    ledger = ledger_of((b"a", makers.hello()))
    for number in range(tables_module.MAX_TABLES + 5):
        say(ledger, b"a", messages.Table(FrameTable((makers.frame(module=f"m{number}").spec,))))
    assert len(tables_of(ledger.runs["train-0"])) == tables_module.MAX_TABLES

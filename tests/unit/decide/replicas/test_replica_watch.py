"""Properties of what is found of replicas: in whatever order it arrives, and whatever ranks vanish, lag or repeat."""

from __future__ import annotations

import struct
import tracemalloc
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rankwatch.shared.types.fingerprint import ALL_ROWS, UNKNOWN, Fingerprint, FingerprintRow, FingerprintTable, RankMesh
from rankwatch.shared.types.frame import NO_STAGE
from rankwatch_monitor.decide.replicas import comparison as replicas_module
from rankwatch_monitor.decide.replicas.comparison import ReplicaWatch
from rankwatch_monitor.decide.replicas.desync import Compared, Desync
from rankwatch_monitor.decide.replicas.findings import in_order
from rankwatch_monitor.decide.replicas.rounds import MAX_ROUNDS, Memory

SLOTS = 4

Value = Callable[[int, int, int], int | None]
"""The checksum of a row on a rank at an ordinal; None: it cannot be read."""

bounded = settings(derandomize=True, max_examples=25, deadline=None)


def mesh(ranks: int, **changes: object) -> RankMesh:
    return replace(RankMesh(tuple(range(ranks)), (ranks,), (True,), source="DDP"), **changes)  # type: ignore[arg-type]


def table(rows: int, *meshes: RankMesh, names: Sequence[str] = (), inputs: RankMesh | None = None) -> FingerprintTable:
    """The rows are shared out evenly among the meshes."""
    named = names or [f"block{number}.weight" for number in range(rows)]
    made = [FingerprintRow(name, "float32", 64, len(meshes) * at // rows, at % SLOTS, True) for at, name in enumerate(named)]
    return FingerprintTable(tuple(made), meshes, inputs)


def packed(values: Iterable[int | None]) -> bytes:
    return b"".join(UNKNOWN if value is None else struct.pack("<QQ", value, 3 * value) for value in values)


def taken(of: FingerprintTable, rank: int, ordinal: int, value: Value, **changes: object) -> Fingerprint:
    slot = ALL_ROWS if ordinal <= 2 else ordinal % SLOTS
    rows = [at for at, row in enumerate(of.rows) if slot in (ALL_ROWS, row.slot)]
    lanes = packed(value(rank, at, ordinal) for at in rows)
    made = Fingerprint(of.id, 0, ordinal, ordinal, slot, False, False, True, lanes)
    return made._replace(**changes)  # type: ignore[arg-type]


class Watched:
    def __init__(self, ranks: int, of: FingerprintTable) -> None:
        self.of = of
        self.watch = ReplicaWatch(ranks, lambda rank: (f"node{rank}", ""))
        for rank in range(ranks):
            assert self.watch.take_table(rank, of) == ""

    def take(self, rank: int, ordinal: int, value: Value, **changes: object) -> None:
        assert self.watch.take(rank, NO_STAGE, taken(self.of, rank, ordinal, value, **changes)) == ""

    def train(self, ranks: int, ordinals: Iterable[int], value: Value, **changes: object) -> None:
        for ordinal in ordinals:
            for rank in range(ranks):
                self.take(rank, ordinal, value, **changes)

    def found(self) -> set[Desync]:
        self.watch.end()
        self.watch.take_news()
        return {replace(one, origin=0) for one in self.watch.findings.noted}

    def patterns(self) -> set[tuple[str, str]]:
        return {(one.pattern.value, one.parameter) for one in self.found()}


def equal(rank: int, row: int, ordinal: int) -> int:
    return 1000 * row + ordinal


# --- any order ------------------------------------------------------------------------------------------------------------


@bounded
@given(st.data(), st.integers(2, 5), st.integers(1, 7))
def test_findings_do_not_depend_on_the_order_of_arrival(data: st.DataObject, ranks: int, rows: int) -> None:
    steps = 12
    bad = data.draw(
        st.lists(st.tuples(st.integers(0, ranks - 1), st.integers(0, rows - 1), st.integers(0, steps)), max_size=4)
    )

    def value(rank: int, row: int, ordinal: int) -> int:
        return equal(rank, row, ordinal) + sum(
            10**6 + who for who, what, since in bad if (who, what) == (rank, row) and since <= ordinal
        )

    of = table(rows, mesh(ranks))
    one, other = Watched(ranks, of), Watched(ranks, of)
    one.train(ranks, range(steps + 6), value)
    order = data.draw(st.permutations([rank for rank in range(ranks) for _ in range(steps + 6)]))
    at = [0] * ranks
    for rank in order:
        other.take(rank, at[rank], value)
        at[rank] += 1
    assert one.found() == other.found()
    assert {entry.parameter for entry in one.found()} == {f"block{row}.weight" for _, row, _ in bad}


@bounded
@given(st.data())
def test_the_report_does_not_depend_on_the_order_of_arrival(data: st.DataObject) -> None:
    """Ranks that are fed alike, and a replica that differs in each of two groups, all since the same steps."""
    groups = RankMesh((0, 1, 2, 3, 4, 5), (3, 2), (True, False))

    def value(rank: int, row: int, ordinal: int) -> int:
        return equal(rank, row, ordinal) + 10**6 * (rank in (2, 3) and row == 0 and ordinal >= 8)

    job = Watched(6, table(1, groups, inputs=mesh(6, replicated=(False,))))
    for ordinal in range(20):
        for rank in data.draw(st.permutations(range(6))):
            job.take(rank, ordinal, value, inputs=struct.pack("<QQ", rank % 3 * 1000 + ordinal, 0))
    job.found()
    ranks_named = [(one.parameter, one.ranks) for one in in_order(job.watch.findings.noted)]
    fed_alike = [("input", (rank, rank + 3)) for rank in range(3)]
    assert ranks_named == [*fed_alike, ("block0.weight", (2,)), ("block0.weight", (3,))]


@bounded
@given(st.integers(2, 9).flatmap(lambda n: st.lists(st.integers(0, 3) | st.none(), min_size=n, max_size=n)))
def test_the_dissenters_of_any_values_are_named(values: list[int | None]) -> None:
    ranks = len(values)
    job = Watched(ranks, table(2, mesh(ranks)))
    job.train(ranks, range(4), lambda rank, row, at: equal(rank, row, at))
    job.train(ranks, range(4, 8), lambda rank, row, at: equal(rank, row, at) if row else values[rank])
    known = [value for value in values if value is not None]
    most = max(known, key=known.count, default=-1)
    has_majority = 2 * known.count(most) > len(known)
    apart = tuple(rank for rank, value in enumerate(values) if value is not None and not (has_majority and value == most))
    found = job.found()
    if len(set(known)) < 2:
        assert not found
        return
    (one,) = found
    assert (one.ranks, one.replicas, one.parameter, one.step) == (apart, len(known), "block0.weight", 4)
    assert one.host == (f"node{apart[0]}" if len(apart) == 1 else "")


# --- equal replicas -------------------------------------------------------------------------------------------------------


@bounded
@given(st.data(), st.integers(2, 5), st.booleans())
def test_equal_replicas_are_never_blamed(data: st.DataObject, ranks: int, is_declared: bool) -> None:
    """Ranks vanish, come back, lag, skip what their spool dropped, and send again what was not acknowledged."""
    job = Watched(ranks, table(3, mesh(ranks, is_declared=is_declared)))
    at = [0] * ranks
    for rank in data.draw(st.lists(st.integers(0, ranks - 1), max_size=120)):
        does = data.draw(st.sampled_from(["step", "step", "step", "step", "leave", "skip", "repeat", "jump"]))
        if does == "leave":
            job.watch.leave(rank)
        elif does == "repeat":
            at[rank] = max(0, at[rank] - 3)
        elif does != "step":
            at[rank] += 2 if does == "skip" else 1000
        job.take(rank, at[rank], equal)
        at[rank] += 1
    assert not job.found()


def test_a_rank_that_never_reports_is_not_waited_for_in_the_end() -> None:
    job = Watched(3, table(4, mesh(3)))
    for ordinal in range(MAX_ROUNDS + 50):
        for rank in (0, 1):
            job.take(rank, ordinal, lambda rank, row, at: equal(rank, row, at) + (rank == 1 and row == 2 and at > 20))
    job.watch.take_news()
    assert {entry.parameter for entry in job.watch.findings.noted} == {"block2.weight"}


def test_ranks_that_have_other_parameters_too_are_compared_by_name() -> None:
    less, more = table(3, mesh(3)), table(4, mesh(3), names=[f"block{row}.weight" for row in (0, 9, 1, 2)])
    watch = ReplicaWatch(3, lambda rank: ("", ""))
    names = {0: [0, 1, 2], 1: [0, 1, 2], 2: [0, 9, 1, 2]}
    value = lambda r, row, at: names[r][row] * 100 + at + (r == 2 and row == 3 and at == 2)  # noqa: E731
    for rank in range(3):
        watch.take_table(rank, more if rank == 2 else less)
    for ordinal in range(3):
        for rank in range(3):
            of = more if rank == 2 else less
            watch.take(rank, NO_STAGE, taken(of, rank, ordinal, value))
    watch.take_news()
    assert {(entry.parameter, entry.ranks) for entry in watch.findings.noted} == {("block2.weight", (2,))}


# --- learned groups -------------------------------------------------------------------------------------------------------

PLAIN = {"is_declared": False, "source": "none"}


@pytest.mark.parametrize(
    ("period", "rows", "begins"), [(2, 3, 0), (3, 7, 0), (4, 7, 50), (8, 1, 50), (16, 7, 0), (40, 3, 50)]
)
def test_weights_that_are_averaged_now_and_then_are_silent(period: int, rows: int, begins: int) -> None:
    job = Watched(3, table(rows, mesh(3, **PLAIN)))
    job.train(3, range(150), lambda r, row, at: equal(r, row, at) + (r + 1) * 10**6 * (at > begins and at % period > 0))
    assert not job.found()


def test_what_was_equal_is_told_though_it_came_apart_before_it_was_noted_down() -> None:
    job = Watched(2, table(4, mesh(2, **PLAIN)))
    job.train(2, range(12), lambda r, row, at: equal(r, row, at) + 10**6 * r * (at > 2))
    assert job.watch.note_compared(0.0, at_once=False) == Compared(2, 4, 2, 3, True)
    assert job.watch.note_compared(1e6, at_once=True) is None


def test_a_router_that_is_left_out_is_found_after_a_while() -> None:
    names = ["block.weight", "block.bias", "router.weight", "router.bias"]
    job = Watched(2, table(4, mesh(2), mesh(2, is_declared=False, source="DDP ignores it"), names=names))
    value = lambda r, row, at: equal(r, row, at) + 10**6 * r * (row > 1 and at > 0)  # noqa: E731
    job.train(2, range(20), value)
    assert not job.watch.findings.origins
    job.train(2, range(20, 60), value)
    assert {(one.pattern.value, one.parameter, one.is_declared, one.step) for one in job.found()} == {
        ("subset", "router.weight", False, 1),
        ("subset", "router.bias", False, 1),
    }


# --- gathers and inputs ---------------------------------------------------------------------------------------------------


def gathered(of: FingerprintTable, rank: int, ordinal: int, shares: Sequence[int], result: int) -> Fingerprint:
    made = taken(of, rank, ordinal, lambda r, row, at: 100 * r + row)
    rows = len(made.lanes) // 16
    one = struct.pack("<QQQQ", shares[rank], 7, result % 2**64, 9)
    return made._replace(gathers=one * rows)


@pytest.mark.parametrize("wrong", [(), (2,), (0, 1, 2)])
def test_what_was_gathered_is_what_the_shards_add_up_to(wrong: tuple[int, ...]) -> None:
    of = table(2, mesh(3, replicated=(False,), gathers=0, source="FSDP"))
    watch = ReplicaWatch(3, lambda rank: ("", ""))
    shares = [2**64 - 5, 11, 300]
    for rank in range(3):
        watch.take_table(rank, of)
    for ordinal in range(3):
        for rank in (2, 0, 1):
            watch.take(rank, NO_STAGE, gathered(of, rank, ordinal, shares, 306 + (ordinal == 2 and rank in wrong)))
    watch.take_news()
    assert {(one.pattern.value, one.ranks, one.step) for one in watch.findings.noted} == (
        {("gather", wrong, 2)} if wrong else set()
    )
    compared = watch.note_compared(0.0, at_once=True)
    assert compared == Compared(2, 2, 3, 3, True)


@pytest.mark.parametrize(
    ("data", "found"),
    [
        (lambda rank, at: rank % 2 * 1000 + at, {(0, 2), (1, 3)}),
        (lambda rank, at: rank * 1000 + at, set()),
        (lambda rank, at: 7, set()),
        (lambda rank, at: at if at % 7 else rank, set()),
    ],
)
def test_ranks_that_are_fed_alike(data: Callable[[int, int], int], found: set[tuple[int, ...]]) -> None:
    inputs = mesh(4, replicated=(False,))
    job = Watched(4, table(1, mesh(4), inputs=inputs))
    for ordinal in range(40):
        for rank in range(4):
            job.take(rank, ordinal, equal, inputs=struct.pack("<QQ", data(rank, ordinal), 0))
    assert {one.ranks for one in job.found()} == found
    assert {one.pattern.value for one in job.found()} <= {"same-input"}


def test_ranks_of_one_tensor_parallel_group_are_fed_alike_by_right() -> None:
    inputs = RankMesh((0, 1, 2, 3), (2, 2), (False, True))
    job = Watched(4, table(1, mesh(4), inputs=inputs))
    for ordinal in range(40):
        for rank in range(4):
            job.take(rank, ordinal, equal, inputs=struct.pack("<QQ", rank // 2 * 1000 + ordinal, 0))
    assert not job.found()


# --- bounds ---------------------------------------------------------------------------------------------------------------


def test_a_hostile_rank_cannot_make_the_collector_grow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replicas_module, "HELD_AT_LEAST", 1 << 20)
    monkeypatch.setattr(replicas_module, "HELD_FOR_EACH_RANK", 0)
    job = Watched(64, table(64, mesh(64)))
    tracemalloc.start()
    for era in range(800):
        job.take(0, 0, equal, era=era)
    for number in range(60):
        meshes = [RankMesh((0, *range(1 + number % 60, 64)), (64 - number % 60,), (True,)) for _ in range(10)]
        assert job.watch.take_table(0, table(10, *meshes, names=[f"{number}-{row}" for row in range(10)])) == ""
        of = list(job.watch._layouts.values())[-1]
        ahead = Fingerprint(of.id, 9999, number, number, ALL_ROWS, False, False, True, packed(range(10)))
        job.watch.take(0, NO_STAGE, ahead)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 12 << 20
    assert len(job.watch._layouts) <= 1 + replicas_module.TABLES_OF_RANK
    assert max(map(len, job.watch._groups_of.values())) <= replicas_module.GROUPS_OF_RANK


def test_all_runs_of_a_key_hold_rounds_and_tables_within_bounds() -> None:
    rounds, rows = Memory(20_000), Memory(100)

    def begin() -> ReplicaWatch:
        return ReplicaWatch(2, lambda rank: ("", ""), rounds, rows)

    def ahead(watch: ReplicaWatch) -> str:
        of = table(40, mesh(2), names=[f"{id(watch)}-{row}" for row in range(40)])
        refusal = watch.take_table(0, of)
        for step in range(50):
            watch.take(0, NO_STAGE, Fingerprint(of.id, step, 0, step, ALL_ROWS, False, False, True, packed(range(40))))
        return refusal

    watches = [begin() for _ in range(3)]
    assert [ahead(watch).endswith("no room for 40 more") for watch in watches] == [False, False, True]
    assert 18_000 < rounds.held < 22_000
    assert rows.held == 80
    for watch in watches:
        watch.end()
        watch.forget()
    assert (rounds.held, rows.held) == (0, 0)


def test_a_table_that_is_too_large_is_refused_and_asked_for_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replicas_module, "MAX_TABLE_ROWS", 10)
    watch = ReplicaWatch(2, lambda rank: ("", ""))
    of = table(11, mesh(2))
    assert "over the limit of 10" in watch.take_table(0, of)
    assert watch.knows(0, of.id)
    assert watch.take(0, NO_STAGE, taken(of, 0, 0, equal)) == ""


def test_what_does_not_fit_its_table_is_refused() -> None:
    job = Watched(2, table(3, mesh(2)))
    for changes in ({"lanes": b""}, {"lanes": bytes(16)}, {"gathers": bytes(32)}, {"inputs": bytes(3)}, {"slot": 77}):
        assert "does not fit" in job.watch.take(0, NO_STAGE, taken(job.of, 0, 0, equal)._replace(**changes))


def test_findings_are_bounded() -> None:
    job = Watched(2, table(600, mesh(2)))
    job.train(2, range(3), lambda r, row, at: equal(r, row, at) + r * 10**6)
    assert len(job.found()) == 256
    assert job.watch.findings.unkept == 344


# --- what depends on how many came apart --------------------------------------------------------------------------------------

HYBRID = RankMesh((0, 1, 2, 3), (2, 2), (True, False), gathers=1, source="HSDP")


def lines(job: Watched) -> list[tuple[str, int]]:
    job.found()
    return [(origin.pattern.value, len(origin.noted)) for origin in job.watch.findings.origins]


def test_blocks_left_out_of_the_average_are_a_subset_however_many_they_are() -> None:
    job = Watched(4, table(22, HYBRID))
    job.train(4, range(10), lambda r, row, at: equal(r, row, at) + 10**6 * r * (row > 3 and at > 0))
    assert lines(job) == [("subset", 18)]
    decayed = Watched(4, table(22, HYBRID))
    decayed.train(4, range(10), lambda r, row, at: equal(r, row, at) + 10**6 * r * (row > 0 and at > 0))
    assert lines(decayed) == [("unsynchronised", 21)]


def test_norms_that_all_hold_are_a_subset_though_nothing_else_is_replicated() -> None:
    shards = RankMesh((0, 1), (2,), (False,), source="DTensor")
    job = Watched(2, table(4, shards, mesh(2)))
    job.train(2, range(10), lambda r, row, at: equal(r, row, at) + 10**6 * r * (row < 2 or at > 0))
    assert lines(job) == [("subset", 2)]


def test_ranks_that_come_apart_in_mid_run_are_one_line() -> None:
    job = Watched(3, table(9, mesh(3)))
    job.train(3, range(30), lambda r, row, at: equal(r, row, at) + 10**6 * r * (at > 20))
    assert lines(job) == [("unsynchronised", 9)]
    few = Watched(3, table(9, mesh(3)))
    few.train(3, range(30), lambda r, row, at: equal(r, row, at) + 10**6 * r * (at > 20 and row < 2))
    assert lines(few) == [("unknown", 2)]


def test_what_a_flipped_bit_leads_to_in_another_group_of_two_is_the_same_line() -> None:
    job = Watched(4, table(9, HYBRID))
    since = {(2, 1): 8, (3, 5): 20}
    job.train(4, range(40), lambda r, row, at: equal(r, row, at) + (at > since.get((r, row), 99)))
    assert lines(job) == [("one-rank", 2)]
    assert {(one.parameter, one.ranks) for one in job.found()} == {("block1.weight", (0, 2)), ("block5.weight", (1, 3))}


def test_a_buffer_like_parameter_that_each_rank_sets_by_itself() -> None:
    frozen = table(9, mesh(3))
    frozen = FingerprintTable((*frozen.rows[:8], frozen.rows[8]._replace(is_trainable=False)), frozen.meshes)
    job = Watched(3, frozen)
    job.train(3, range(30), lambda r, row, at: equal(r, row, at) + 10**6 * r * (at > 0 and row == 8))
    assert lines(job) == [("subset", 1)]


# --- a collector that was restarted -------------------------------------------------------------------------------------------


def test_a_restarted_collector_goes_on_where_the_journal_ends() -> None:
    before = Watched(3, table(4, mesh(3)))

    def flipped(r: int, row: int, at: int) -> int:
        return equal(r, row, at) + (r == 1 and row == 2 and at > 8)

    before.train(3, range(20), flipped)
    entries, _ = before.watch.take_news()
    compared = before.watch.note_compared(0.0, at_once=True)
    assert compared is not None

    again = Watched(3, before.of)
    again.watch.restore(entries, 0)
    again.watch.restore_compared(compared)
    again.watch.resume()
    again.train(3, range(20, 30), flipped)
    assert again.watch.take_news() == ((), [])
    again.train(3, range(30, 40), lambda r, row, at: flipped(r, row, at) + (r == 0 and row == 1))
    (entry,), _ = again.watch.take_news()
    assert (entry.parameter, entry.ranks, entry.pattern.value, entry.equal_at) == ("block1.weight", (0,), "one-rank", 29)
    after = again.watch.note_compared(0.0, at_once=True)
    assert after is not None
    assert (after.step, after.times, after.equal) == (39, 40, False)


def test_a_restarted_collector_learns_anew() -> None:
    """What never was equal may be a rank's own: that it differs at the first look after the restart says nothing."""
    of = table(4, mesh(2), mesh(2, **PLAIN), names=["a.weight", "a.bias", "w.weight", "w.bias"])
    value = lambda r, row, at: equal(r, row, at) + 10**6 * r * (row > 1)  # noqa: E731
    before = Watched(2, of)
    before.train(2, range(20), value)
    again = Watched(2, of)
    compared = before.watch.note_compared(0.0, at_once=True)
    assert compared is not None
    again.watch.restore_compared(compared)
    again.watch.resume()
    again.train(2, range(20, 150), value)
    assert not again.found()

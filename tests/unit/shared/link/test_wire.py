"""The wire format: golden bytes, every message round-trips, and all other data raises ProtocolError."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

import makers
from fuzz.atheris_wire import decode_or_refuse
from fuzz.make_corpus import ONE_OF_EACH
from rankwatch.errors import ProtocolError
from rankwatch.shared.link import wire
from rankwatch.shared.link.codec import LATER
from rankwatch.shared.printable import printable
from rankwatch.shared.types import fields, messages
from rankwatch.shared.types.calls import CollectiveCall
from rankwatch.shared.types.closeup import CloseUp
from rankwatch.shared.types.fingerprint import FingerprintTable, RankMesh
from rankwatch.shared.types.frame import FrameTable, Moment, Phase
from rankwatch.shared.types.notice import Notice, NoticeKind, describe_notice
from rankwatch.shared.types.trip import Trip
from rankwatch.shared.types.tuning import MAX_PATTERNS, MAX_TRACED, NO_CHANGE, Check, Tuning

MESSAGES: list[messages.Message] = [
    *ONE_OF_EACH,
    messages.Table(FrameTable(tuple(makers.frame(phase=phase).spec for phase in Phase))),
    messages.Batch(4, makers.summary(149, first=43, traced=True)),
    messages.Tripped(5, makers.trip(makers.reading("input[0]", 3e4, dtype="float16"), makers.reading("output", makers.INF))),
    messages.Tripped(5, makers.trip(makers.reading("weight.grad", makers.INF), loss_scale=2.0**90)),
    messages.Tripped(5, makers.evidenced_trip()),
    messages.LookedCloser(6, CloseUp(operator=makers.made_by(node="SqrtBackward0"))),
    messages.LookedCloser(6, CloseUp(note="not repeated: it communicates by c10d.allreduce_")),
    messages.Noticed(6, makers.notice(growth=-0.25)),
    messages.Noticed(7, makers.notice(NoticeKind.ZEROS, value=1.0, dtype="float32")),
    makers.beat(3, 0, 17, phase="backward"),
    messages.Probe(Moment(0, -1, 2, 0)),
    messages.Bye(10, "failed", "KeyError: 'x'"),
    messages.Tune("train-0", Tuning(10, ("a.*",), (), (149,), Check.ASYNC)),
    messages.Tune(),
]
OF_EACH = pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)

OPTIONAL = {messages.Tripped: (12, 19, 26, 27, 28), messages.LookedCloser: (0,)}
"""The parts that may be nothing: the operator, whether the trip recurs, the weight that grew, the call outside of the model, what
became of the step."""


# fmt: off
def test_golden_bytes() -> None:
    """The meaning of these bytes may never change within a major version."""
    assert wire.encode(messages.Ack(9, abort=True, handled=11)).hex() == "94a341434b09c30b"
    assert wire.encode(makers.beat(3, 0, 17)).hex() == (
        "dc0010a4424541549403030011a7666f72776172640000cb408f400000000000c2c2" "ff" "9400ff0000" "c2" "90"
        "9500" + 4 * "cb0000000000000000" + "00" + "90" + "9500" + 3 * "cb0000000000000000" + "a0"
    )
    batch = wire.encode(messages.Batch(4, makers.summary(149)))
    first, norm = "cc9500cc95cb4024000000000000cb4026000000000000c2", "cb3fe0000000000000"
    numbers = "b0" + makers.table().id.encode().hex() + "c40c" + 3 * "0000803f" + "c40c" + 3 * "0000803f" + "c403000000"
    assert batch.hex() == f"94a54241544348049c{first}{numbers}{norm}ce40000000" "90"
    counted = wire.encode(messages.Batch(4, makers.summary(149), makers.counts()))
    assert counted.hex() == batch.hex()[:-2] + "93" "4d" "cd1408" "cf4000000000000000"
    assert wire.encode(messages.Recount(4, 77, 5065)).hex() == "94a75245434f554e54" "04" "4d" "cd13c9"
    assert wire.encode(makers.recounted(4, 5128, CollectiveCall(12, "barrier", "a.py:1 in f"))).hex() == (
        "98a95245434f554e544544" "04" "4d" "b1" + b"the default group".hex() + "02" "cd1408" "cd1408"
        "91" "93" "0c" "a7" + b"barrier".hex() + "ab" + b"a.py:1 in f".hex()
    )
    assert makers.table().id == "4600ca21ebaae7f7"
    layer, linear, output, float32 = "a56c61796572", "a64c696e656172", "a66f7574707574", "a7666c6f61743332"
    table = wire.encode(messages.Table(FrameTable((makers.frame(phase=Phase.BACKWARD).spec,))))
    assert table.hex() == "92a55441424c45" "9195" + layer + linear + "919303" + output + float32 + "90" "02"
    assert wire.encode(messages.Noticed(6, makers.notice())).hex() == (
        "93a64e4f54494345069a" "02" + layer + linear + output + "a7666c6f61743136" "0a0c"
        "cb40affc0000000000" "cb3ff0000000000000" "a0"
    )
    tune = messages.Tune("train-0", Tuning(10, ("a.*",), None, (149,), Check.ASYNC))
    rest = "91a3612e2a" "c0" "91cc95" "a56173796e63" "c0c0c0"
    assert wire.encode(tune).hex() == "93a454554e45" "a7747261696e2d30" "98" "0a" + rest
    assert wire.encode(messages.Tuned(("train-0",), 8)).hex() == "94a554554e4544" "91a7747261696e2d30" "08" "90"
    assert wire.encode(makers.hello(3, 8, stage=2)).hex() == (
        "dc0015a548454c4c4f" "0100" "a5747261696e" "00030803" "a56e6f646531" "67" "a3637075" "a6322e31332e30"
        "a970726f636573732d33" "02" "94a0a0a0a0" "a0" "00" "cb0000000000000000" "a0" "a0" "90"
    )
    trip = wire.encode(messages.Tripped(1, makers.trip(loss_scale=1024.0)))
    assert trip.hex().endswith(
        "9202030600" "01" "cb408f400000000000" "cb4090000000000000" "90" "c0" "90" "a0" "ff" "a0a0" "c2" "c0"
        "cb0000000000000000" "c2a0" "ff" "9400ff0000" "90c0" "c0" "c0"
        "c408000000000000f0bf"
    )


# fmt: on


@OF_EACH
def test_every_message_round_trips(message: messages.Message) -> None:
    assert wire.decode(wire.encode(message)) == message


@OF_EACH
def test_the_kind_is_known_before_a_message_is_decoded(message: messages.Message) -> None:
    data = memoryview(wire.encode(message))
    told = wire.is_batch(data), wire.is_beat(data), wire.is_ack(data)
    assert told == tuple(isinstance(message, kind) for kind in (messages.Batch, messages.Beat, messages.Ack))


def test_nan_and_inf_travel_in_the_columns() -> None:
    sent = messages.Tripped(1, makers.trip(makers.reading("input[0]"), makers.reading("output", makers.NAN)))
    received = wire.decode(wire.encode(sent))
    assert isinstance(received, messages.Tripped)
    assert str(received.trip.culprit) == str(sent.trip.culprit)


def test_float64_values_keep_their_range() -> None:
    big = makers.reading("output", 1e300, low=1e-300, dtype="float64")
    sent = messages.Tripped(1, makers.trip(big, makers.reading("bias", makers.INF)))
    received = wire.decode(wire.encode(sent))
    assert isinstance(received, messages.Tripped)
    assert received.trip.frame.readings[0] == big


def test_names_are_cut_to_the_limit_when_encoded() -> None:
    cut = wire.decode(wire.encode(messages.Bye(1, "failed", "x" * (fields.MAX_TEXT + 1))))
    assert isinstance(cut, messages.Bye)
    assert len(cut.text) == fields.MAX_TEXT


def test_of_a_ring_that_is_too_long_the_last_frames_are_sent() -> None:
    trip = makers.trip()
    earlier = dataclasses.replace(trip.frame, position=trip.position._replace(frame=0))
    sent = messages.Tripped(1, dataclasses.replace(trip, frames=(earlier,) * fields.MAX_RING + trip.frames))
    received = wire.decode(wire.encode(sent))
    assert isinstance(received, messages.Tripped)
    assert received.trip.frames == sent.trip.frames[-fields.MAX_RING :]


def test_invalid_utf8_is_escaped_when_encoded() -> None:
    received = wire.decode(wire.encode(messages.Bye(1, "failed", "no such file: data-\udcff.bin")))
    assert received == messages.Bye(1, "failed", "no such file: data-\\udcff.bin")


def test_a_newer_minor_version_may_add_fields_and_kinds() -> None:
    parts = msgpack.unpackb(wire.encode(messages.Ack(9, abort=False)))
    assert wire.decode(msgpack.packb([*parts, "more", [1, 2]])) == messages.Ack(9, abort=False)
    assert wire.decode(msgpack.packb(["SURPRISE", 1])) == messages.Unknown("SURPRISE")


@OF_EACH
def test_every_field_is_checked(message: messages.Message) -> None:
    """A wrong value in any field of any message is refused, and the refusal names the message."""
    wrong_for_all: tuple[Any, ...] = (None, {}, [None] * 99, -(2**40), b"\xff", makers.NAN)
    kind, *values = msgpack.unpackb(wire.encode(message))
    for index in range(len(dataclasses.fields(message))):
        for wrong in wrong_for_all:
            broken = [kind, *values[:index], wrong, *values[index + 1 :]]
            with pytest.raises(ProtocolError, match=kind):
                wire.decode(msgpack.packb(broken))
    with pytest.raises(ProtocolError, match="fields instead of"):
        wire.decode(msgpack.packb([kind, *values[: -1 - LATER.get(type(message), 0)]]))


def test_what_an_older_agent_does_not_send_has_its_default() -> None:
    beat, trip = makers.beat(3, 0, 17), makers.trip()
    assert wire.decode(msgpack.packb(msgpack.unpackb(wire.encode(beat))[:-3])) == beat
    batch = messages.Batch(4, makers.summary(149))
    assert wire.decode(msgpack.packb(msgpack.unpackb(wire.encode(batch))[:-1])) == batch
    kind, seq, parts = msgpack.unpackb(wire.encode(messages.Tripped(5, trip)))
    older = messages.Tripped(5, trip)
    assert repr(wire.decode(msgpack.packb([kind, seq, parts[:-4]]))) == repr(older)
    assert repr(wire.decode(msgpack.packb([kind, seq, [*parts, "more"]]))) == repr(older)


# --- long messages --------------------------------------------------------------------------------------------------------

leaves = st.none() | st.integers(-(2**40), 2**40) | st.text(max_size=4) | st.binary(max_size=40)
values = st.recursive(leaves | leaves.map(lambda one: [one] * 70), lambda inner: st.lists(inner, max_size=5), max_leaves=30)


@given(sent=st.lists(values, max_size=6), bytes_at_once=st.sampled_from([0, 1, 16, 100, 1000]), cut=st.integers(0, 50))
def test_a_message_is_the_same_in_parts_as_at_once(sent: list[Any], bytes_at_once: int, cut: int) -> None:
    body = memoryview(msgpack.packb(sent))
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(wire, "PART_BYTES", bytes_at_once)
        assert wire._unpack_parts(body, 100, 1000) == sent
        for broken in (body[: -1 - cut], memoryview(bytes(body) + b"\x90" * (1 + cut))):
            with pytest.raises((ValueError, msgpack.UnpackException)):
                wire._unpack_parts(broken, 100, 1000)


@OF_EACH
def test_every_message_round_trips_in_parts(message: messages.Message, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "PART_BYTES", 8)
    assert wire._decode(wire.encode(message)) == message


def test_no_part_of_a_long_message_keeps_other_threads_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    trip = dataclasses.replace(makers.trip(), frames=makers.trip().frames * 2000)
    table = FrameTable(makers.table().specs * 4000)
    rows = makers.fingerprint_table(5000)
    batch = makers.summary(of=table)
    longest, unpack = 0, msgpack.unpackb

    def unpackb(part: memoryview, **options: Any) -> Any:
        nonlocal longest
        longest = max(longest, len(part))
        return unpack(part, **options)

    monkeypatch.setattr(msgpack, "unpackb", unpackb)
    for message in (messages.Tripped(1, trip), messages.Table(table), messages.Fingerprints(rows), messages.Batch(1, batch)):
        body = wire.encode(message)
        assert len(body) > 4 * wire.PART_BYTES
        assert wire._decode(body) == message
    assert 0 < longest <= wire.PART_BYTES


@pytest.mark.parametrize("nested", [[0] * 100_000, [[[0] * 60] * 60] * 60, [[[[[0] * 20] * 20] * 20] * 20]])
@pytest.mark.parametrize("kind", ["BATCH", "FINGERPRINT"])
def test_a_message_with_columns_takes_no_arrays_in_arrays(kind: str, nested: list[Any]) -> None:
    for fields_ in ([1, nested], [1, [nested] * 12], [nested, 1], nested):
        with pytest.raises(ProtocolError):
            wire.decode(msgpack.packb([kind, *fields_]))


def test_columns_must_fit_each_other_and_their_specs() -> None:
    kind, seq, summary, _ = msgpack.unpackb(wire.encode(messages.Batch(4, makers.summary(1))))
    with pytest.raises(ProtocolError, match="do not fit each other"):
        wire.decode(msgpack.packb([kind, seq, [*summary[:7], summary[7][:-1], *summary[8:]]]))
    halves = [column[: len(column) // 2] for column in summary[7:9]]
    with pytest.raises(ProtocolError, match="do not fit each other"):  # neither four bytes a number nor eight
        wire.decode(msgpack.packb([kind, seq, [*summary[:7], *halves, *summary[9:]]]))
    with pytest.raises(ProtocolError, match="is no state"):
        wire.decode(msgpack.packb([kind, seq, [*summary[:9], b"\xff\x00\x00", *summary[10:]]]))
    norms, memories = [(norm, 0, "gradient_norm") for norm in (-2.0, 1)], [(1.0, memory, "memory") for memory in (-1, 2**63)]
    for norm, memory, said in (*norms, *memories):
        with pytest.raises(ProtocolError, match=said):
            wire.decode(msgpack.packb([kind, seq, [*summary[:10], norm, memory]]))
    kind, seq, trip = msgpack.unpackb(wire.encode(messages.Tripped(4, makers.trip())))
    with pytest.raises(ProtocolError, match="not the one that tripped"):
        wire.decode(msgpack.packb([kind, seq, [trip[0], 99, *trip[2:]]]))


@pytest.mark.parametrize(
    "message",
    [
        messages.Batch(4, makers.summary(1)),
        messages.Tripped(5, makers.trip(loss_scale=1024.0)),
        messages.LookedCloser(6, makers.closeup()),
        messages.Noticed(6, makers.notice()),
        messages.Noticed(6, makers.notice(NoticeKind.ZEROS, value=0.5)),
    ],
    ids=["summary", "trip", "closeup", "headroom", "zeros"],
)
def test_every_part_of_a_field_is_checked(message: messages.Message) -> None:
    kind, seq, parts, *_ = msgpack.unpackb(wire.encode(message))
    for index in range(len(parts)):
        wrong: Any
        for wrong in (None, {}, "x" * (fields.MAX_NAME + 1), -(2**40), b"\xff", makers.NAN):
            if isinstance(message, messages.Noticed) and index == 8 and isinstance(wrong, int):
                continue  # growth may be negative
            if isinstance(message, messages.Batch) and index == 10 and wrong is makers.NAN:
                continue  # the norm of gradients that are nan, which a policy lets pass
            if wrong is None and index in OPTIONAL.get(type(message), ()):
                continue
            with pytest.raises(ProtocolError, match=kind):
                wire.decode(msgpack.packb([kind, seq, [*parts[:index], wrong, *parts[index + 1 :]]]))
    later = {messages.Tripped: LATER[Trip], messages.Noticed: LATER[Notice]}.get(
        type(message)
    )  # fields may be appended to them
    for wrong_length in (parts[:-1], [*parts, 0]) if later is None else (parts[: -later - 1],):
        with pytest.raises(ProtocolError, match=f"{kind}.*expected an array of"):
            wire.decode(msgpack.packb([kind, seq, wrong_length]))


def test_an_unknown_phase_is_refused() -> None:
    kind, (spec,) = msgpack.unpackb(wire.encode(messages.Table(FrameTable((makers.frame().spec,)))))
    for wrong in (len(Phase), -1, None, True):
        with pytest.raises(ProtocolError, match=r"TABLE\.table: expected a whole number from 0 to 2"):
            wire.decode(msgpack.packb([kind, [[*spec[:4], wrong]]]))


def test_a_loss_scale_may_be_inf_but_no_share_exceeds_one() -> None:
    infinite = messages.Tripped(5, makers.trip(loss_scale=makers.INF))
    assert wire.decode(wire.encode(infinite)) == infinite
    for notice in (makers.notice(NoticeKind.ZEROS, value=1.01), makers.notice(value=makers.INF)):
        with pytest.raises(ProtocolError, match="expected a number from 0 to"):
            wire.decode(wire.encode(messages.Noticed(1, notice)))


@given(
    kind=st.sampled_from(NoticeKind),
    dtype=st.sampled_from(["float16", "bfloat16", "float32", "float64", "complex64", ""]),
    value=st.floats(0, 1e308) | st.floats(0, 1),
    growth=st.floats(allow_nan=False, allow_infinity=False),
)
def test_every_notice_that_is_decoded_can_be_printed(kind: NoticeKind, dtype: str, value: float, growth: float) -> None:
    sent = messages.Noticed(1, makers.notice(kind, dtype=dtype, value=value, growth=growth))
    try:
        received = wire.decode(wire.encode(sent))
    except ProtocolError:
        assert kind is NoticeKind.ZEROS
        assert value > 1
        return
    assert received == sent
    assert "layer (Linear), output" in describe_notice(sent.notice)
    assert sent.notice.urgency >= (False, -1.0)


patterns = st.none() | st.lists(st.text(max_size=9).map(printable), max_size=3).map(tuple)
tunings = st.builds(
    Tuning,
    every=st.none() | st.integers(1, 9),
    modules=patterns,
    ignore=patterns,
    trace_batch_nums=st.none() | st.lists(st.integers(0, 99), max_size=3).map(tuple),
    check=st.none() | st.sampled_from(Check),
)


@given(tunings, tunings, tunings)
def test_merging_tunings_is_associative(one: Tuning, two: Tuning, three: Tuning) -> None:
    assert one.then(NO_CHANGE) == NO_CHANGE.then(one) == one
    assert one.then(two).then(three) == one.then(two.then(three))
    for name in (field.name for field in dataclasses.fields(Tuning)):
        later = getattr(two, name)
        assert getattr(one.then(two), name) == (getattr(one, name) if later is None else later)


@given(tunings)
def test_a_tuning_round_trips(tuning: Tuning) -> None:
    received = wire.decode(wire.encode(messages.Tune("train-0", tuning)))
    assert isinstance(received, messages.Tune)
    assert received == messages.Tune("train-0", tuning)
    assert type(received.tuning.check) is type(tuning.check)


@pytest.mark.parametrize(
    ("options", "fault"),
    [
        ([0, None, None, None, None], "every: expected a whole number from 1"),
        ([True, None, None, None, None], "every: expected a whole number from 1"),
        ([1, "a", None, None, None], "modules: expected an array"),
        ([1, None, [1], None, None], "ignore: expected text"),
        ([1, None, None, [-1], None], "trace_batch_nums: expected a whole number from 0"),
        ([1, None, None, None, ""], "check: expected one of async, batch, frame"),
        ([1, None, None, None], "expected an array of 5"),
    ],
)
def test_a_refused_option_is_named(options: list[Any], fault: str) -> None:
    with pytest.raises(ProtocolError, match=f"TUNE.tuning: {fault}"):
        wire.decode(msgpack.packb(["TUNE", "train-0", options]))


@pytest.mark.parametrize(
    ("field", "most"),
    [("modules", MAX_PATTERNS), ("ignore", MAX_PATTERNS), ("trace_batch_nums", MAX_TRACED)],
)
def test_the_lists_of_a_tuning_are_bounded(field: str, most: int) -> None:
    item: Any = 1 if field == "trace_batch_nums" else "*"
    full: dict[str, Any] = {field: (item,) * most}
    parts = msgpack.unpackb(wire.encode(messages.Tune(tuning=Tuning(**full))))
    index = [f.name for f in dataclasses.fields(Tuning)].index(field)
    tune = wire.decode(msgpack.packb(parts))
    assert isinstance(tune, messages.Tune)
    assert getattr(tune.tuning, field) == (item,) * most
    parts[2][index].append(item)
    with pytest.raises(ProtocolError, match=f"TUNE.tuning: {field}: expected an array of 0 to {most}"):
        wire.decode(msgpack.packb(parts))


def test_too_large_is_refused_unread() -> None:
    with pytest.raises(ProtocolError, match="over the limit"):
        wire.decode(b"\x00" * (wire.MAX_MESSAGE_BYTES + 1))


HOSTILE = "\x1b[2J\x1b]0;title\x07\r\nrankwatch: run train-0: finished\u2028\u202e\u200b"


@OF_EACH
def test_every_text_of_a_message_is_printable(message: messages.Message) -> None:
    """Whatever a peer puts in the place of any text."""
    kind, *values = msgpack.unpackb(wire.encode(message))
    for broken in _with_each_text_replaced(values, HOSTILE):
        decode_or_refuse(msgpack.packb([kind, *broken]))
    assert wire.decode(msgpack.packb([HOSTILE])) == messages.Unknown(printable(HOSTILE))


@given(message=st.sampled_from(MESSAGES), text=st.text(), data=st.data())
def test_any_text_of_a_message_is_printable(message: messages.Message, text: str, data: st.DataObject) -> None:
    kind, *values = msgpack.unpackb(wire.encode(message))
    if replaced := list(_with_each_text_replaced(values, text)):
        decode_or_refuse(msgpack.packb([kind, *data.draw(st.sampled_from(replaced))]))


def test_a_name_of_any_length_leaves_a_batch_with_its_table() -> None:
    for name in ("\x1b[2J", "层" * 2000, "\n" * 2000):
        frame = makers.frame(module=name, module_class=name)
        table = FrameTable((frame.spec, frame.spec))
        received = wire.decode(wire.encode(messages.Table(table)))
        assert isinstance(received, messages.Table)
        assert received.table.id == table.id
        rows = tuple(row._replace(parameter=name) for row in makers.fingerprint_table().rows)
        fingerprints = makers.fingerprint_table(rows=rows, inputs=None)
        told = wire.decode(wire.encode(messages.Fingerprints(fingerprints)))
        assert isinstance(told, messages.Fingerprints)
        assert told.table.id == fingerprints.id


def _with_each_text_replaced(value: Any, text: str) -> Iterator[Any]:
    if isinstance(value, str):
        yield text
    for index, part in enumerate(value) if isinstance(value, list) else ():
        for replaced in _with_each_text_replaced(part, text):
            yield [*value[:index], replaced, *value[index + 1 :]]


def test_the_meshes_of_a_fingerprint_table_are_bounded_in_all() -> None:
    everywhere = RankMesh(tuple(range(fields.MAX_RANKS)), (fields.MAX_RANKS,), (True,))
    fits = FingerprintTable((), (everywhere,) * 8)
    assert wire.decode(wire.encode(messages.Fingerprints(fits))) == messages.Fingerprints(fits)
    with pytest.raises(ProtocolError, match="ranks in all"):
        wire.decode(wire.encode(messages.Fingerprints(FingerprintTable((), (everywhere,) * 9))))


def test_arrays_of_a_long_message_lie_no_deeper_than_the_limit() -> None:
    long = b"x" * wire.PART_BYTES  # short parts are unpacked at once
    nested: list[Any] = [long]
    for _ in range(wire.MAX_DEPTH + 5):
        nested = [long, nested]
    unpacked, depth = wire._unpack(msgpack.packb(["FUTURE", nested])), 0
    while isinstance(unpacked, list):
        unpacked, depth = unpacked[-1], depth + 1
    assert (unpacked, depth) == (wire._UNREAD, wire.MAX_DEPTH)


def test_an_array_of_more_items_than_the_limit_is_not_read() -> None:
    for count, is_read in ((fields.MAX_ROWS, True), (fields.MAX_ROWS + 1, False)):
        body = b"\x92\xa6FUTURE\xdd" + count.to_bytes(4, "big") + bytes(count)
        assert (wire._unpack(body)[1] is not wire._UNREAD) == is_read

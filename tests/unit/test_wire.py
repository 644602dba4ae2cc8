"""The wire format: golden bytes, every message there and back, and nothing but ProtocolError for what is not one."""

from __future__ import annotations

from typing import Any

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

import makers
from rankwatch import wire
from rankwatch.errors import ProtocolError
from rankwatch.frame import Position

MESSAGES: list[wire.Message] = [
    makers.hello(3, 8),
    wire.Welcome("train-0", 1.0, 2.0, 7),
    wire.Table(makers.table()),
    wire.Batch(4, makers.summary(149, traced=True)),
    wire.Tripped(5, makers.trip(makers.reading("input[0]", 3e4, dtype="float16"), makers.reading("output", makers.INF))),
    makers.beat(3, 0, 17, phase="backward"),
    wire.Probe(Position(-1, 2, 0)),
    wire.Abort("rank 1 of 2", 1, 1000.0, 10.0),
    wire.Ack(9, abort=True),
    wire.Bye(10, "failed", "KeyError: 'x'"),
    wire.Error("no", "hello"),
]


def test_golden_bytes() -> None:
    """What these bytes say may never change within a major version."""
    assert wire.encode(wire.Ack(9, abort=True)).hex() == "93a341434b09c3"
    assert wire.encode(makers.beat(3, 0, 17)).hex() == "96a44245415493030011a7666f72776172640000cb408f400000000000"
    batch = wire.encode(wire.Batch(4, makers.summary(149)))
    assert batch.hex() == (
        "93a5424154434804" "99cc95cc95cb4024000000000000cb4026000000000000c2"
        "b0" + makers.table().id.encode().hex() + "c40c" + 3 * "0000803f" + "c40c" + 3 * "0000803f" + "c403000000"
    )  # fmt: skip
    assert makers.table().id == "3d6685ddfcf20da0"


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_there_and_back(message: wire.Message) -> None:
    assert wire.decode(wire.encode(message)) == message


def test_nan_and_inf_travel_in_the_columns() -> None:
    sent = wire.Tripped(1, makers.trip(makers.reading("input[0]"), makers.reading("output", makers.NAN)))
    received = wire.decode(wire.encode(sent))
    assert isinstance(received, wire.Tripped)
    assert str(received.trip.culprit) == str(sent.trip.culprit)


def test_float64_values_keep_their_range() -> None:
    big = makers.reading("output", 1e300, low=1e-300, dtype="float64")
    sent = wire.Tripped(1, makers.trip(big, makers.reading("bias", makers.INF)))
    received = wire.decode(wire.encode(sent))
    assert isinstance(received, wire.Tripped)
    assert received.trip.frame.readings[0] == big


def test_names_are_cut_to_the_limit_on_their_way_out() -> None:
    cut = wire.decode(wire.encode(wire.Bye(1, "failed", "x" * (wire.MAX_TEXT + 1))))
    assert isinstance(cut, wire.Bye)
    assert len(cut.text) == wire.MAX_TEXT


def test_what_is_no_utf8_is_replaced_on_its_way_out() -> None:
    received = wire.decode(wire.encode(wire.Bye(1, "failed", "no such file: data-\udcff.bin")))
    assert received == wire.Bye(1, "failed", "no such file: data-?.bin")


def test_a_newer_minor_version_may_add_fields_and_kinds() -> None:
    parts = msgpack.unpackb(wire.encode(wire.Ack(9, abort=False)))
    assert wire.decode(msgpack.packb([*parts, "more", [1, 2]])) == wire.Ack(9, abort=False)
    assert wire.decode(msgpack.packb(["SURPRISE", 1])) == wire.Unknown("SURPRISE")


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_every_field_is_checked(message: wire.Message) -> None:
    """Each field of each message, replaced by what it cannot be, is named in the refusal."""
    wrong_for_all: tuple[Any, ...] = (None, {}, [None] * 99, -(2**40), b"\xff", makers.NAN)
    kind, *values = msgpack.unpackb(wire.encode(message))
    for index in range(len(values)):
        for wrong in wrong_for_all:
            broken = [kind, *values[:index], wrong, *values[index + 1 :]]
            with pytest.raises(ProtocolError, match=kind):
                wire.decode(msgpack.packb(broken))
    with pytest.raises(ProtocolError, match="fields instead of"):
        wire.decode(msgpack.packb([kind, *values[:-1]]))


def test_columns_must_fit_each_other_and_their_specs() -> None:
    kind, seq, summary = msgpack.unpackb(wire.encode(wire.Batch(4, makers.summary(1))))
    with pytest.raises(ProtocolError, match="do not fit each other"):
        wire.decode(msgpack.packb([kind, seq, [*summary[:6], summary[6][:-1], *summary[7:]]]))
    with pytest.raises(ProtocolError, match="is no state"):
        wire.decode(msgpack.packb([kind, seq, [*summary[:8], b"\xff\x00\x00"]]))
    kind, seq, trip = msgpack.unpackb(wire.encode(wire.Tripped(4, makers.trip())))
    with pytest.raises(ProtocolError, match="not the one that tripped"):
        wire.decode(msgpack.packb([kind, seq, [trip[0], 99, *trip[2:]]]))


def test_too_large_is_refused_unread() -> None:
    with pytest.raises(ProtocolError, match="over the limit"):
        wire.decode(b"\x00" * (wire.MAX_MESSAGE_BYTES + 1))


@given(st.binary(max_size=200))
def test_noise_is_refused(data: bytes) -> None:
    _decode_or_refuse(data)


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text() | st.binary(), st.lists
    )
)
def test_any_msgpack_is_refused_or_read(value: Any) -> None:
    _decode_or_refuse(msgpack.packb(value))


@given(message=st.sampled_from(MESSAGES), data=st.data())
def test_a_damaged_message_is_refused_or_read(message: wire.Message, data: st.DataObject) -> None:
    whole = bytearray(wire.encode(message))
    for _ in range(data.draw(st.integers(1, 4))):
        whole[data.draw(st.integers(0, len(whole) - 1))] = data.draw(st.integers(0, 255))
    _decode_or_refuse(bytes(whole[: data.draw(st.integers(0, len(whole)))]))


def _decode_or_refuse(data: bytes) -> None:
    try:
        message = wire.decode(data)
    except ProtocolError:
        return
    if not isinstance(message, wire.Unknown):
        wire.encode(message)

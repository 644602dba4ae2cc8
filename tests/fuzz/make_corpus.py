"""Writes the corpus beside this file: hostile and broken messages, one per file, named after their fault.

``refused`` holds what ``wire.decode`` must refuse, ``read`` what it must read although the content is malicious.
Run this script after the wire format has changed:

    PYTHONPATH=agent:tests python tests/fuzz/make_corpus.py
"""

from __future__ import annotations

import dataclasses
import struct
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgpack

import makers
from rankwatch.shared.link import wire
from rankwatch.shared.link.codec import LATER
from rankwatch.shared.types import fields, messages
from rankwatch.shared.types.frame import FrameTable, pack
from rankwatch.shared.types.notice import NoticeKind
from rankwatch.shared.types.tuning import MAX_EVERY, MAX_PATTERNS, Check, Tuning

EVIL = "EVIL"

FOLDER = Path(__file__).resolve().parent / "corpus"

ONE_OF_EACH: list[messages.Message] = [
    makers.hello(1, 2, gpu=makers.gpu()),
    messages.Welcome("train-0", 1.0, 2.0, 7, "/runs/train-0", "head", 8192),
    messages.Table(makers.table()),
    messages.Batch(4, makers.summary(149), makers.counts()),
    messages.Tripped(5, makers.trip(root_inputs=(makers.reading("input[0]"),), loss_scale=1024.0)),
    messages.LookedCloser(7, makers.closeup()),
    messages.Noticed(6, makers.notice()),
    messages.Fingerprints(makers.fingerprint_table()),
    messages.Fingerprinted(12, makers.fingerprint(makers.fingerprint_table())),
    messages.Off(8, "switched itself off in batch 3"),
    makers.beat(3, 0, 17),
    messages.Probe(makers.moment(3, 0, 17)),
    messages.Inspect(3),
    messages.Inspected(3, "train.py:31 in load", ("main thread", "  train.py:31 in load")),
    messages.Recount(4, 77, 5065),
    makers.recounted(),
    messages.Abort("rank 1 of 2", 1, 1000.0, 10.0, 300.0, 7, "decoder.wo", "overflow"),
    messages.Stay(300.0),
    messages.Ack(9, abort=True, handled=11),
    messages.Bye(10, "failed", "KeyError: 'x'", makers.moment(3, 0, 17)),
    messages.Error("no", "hello"),
    messages.Tune("train-0", Tuning(10, ("a.*",), ("b",), (149,), Check.ASYNC)),
    messages.Tuned(("train-0",), 16, ("modules: 'encodr.*' matches no module measured so far",)),
    messages.Invite("train"),
    messages.Invited("train", "p" * 40, "s" * 40),
]

NOT_BROKEN = {"batch.summary.gradient_norm-is-nan"}
"""Of gradients that are nan, which a policy lets pass."""

Breakage = tuple[str, Any, tuple[int, ...]]
"""A name, a wrong value, and the path of the part that it replaces."""

INT64 = 2**63 - 1


def array(*items: bytes) -> bytes:
    """A short msgpack array of items that are already packed, correctly or not."""
    return bytes([0x90 + len(items)]) + b"".join(items)


def claim(header: int, length: int, rest: bytes = b"") -> bytes:
    """A header with a length of four bytes, and fewer bytes than it claims."""
    return struct.pack(">BI", header, length) + rest


def pick(items: list[Any], *path: int) -> Any:
    for index in path:
        items = items[index]
    return items


def put(items: list[Any], value: Any, *path: int) -> list[Any]:
    """The nested list with one of its items replaced."""
    index, *rest = path
    return [*items[:index], put(items[index], value, *rest) if rest else value, *items[index + 1 :]]


def parts_of(message: messages.Message) -> list[Any]:
    parts: list[Any] = msgpack.unpackb(wire.encode(message))
    return parts


def wrong_ones(value: Any) -> Iterator[tuple[str, Any]]:
    """Values that a field with this value can never have, by name."""
    if type(value) is bool:
        yield "is-a-number", 1
    elif type(value) is int:
        yield "is-huge", 2**64 - 1
        yield "is-negative", -(2**63)
    elif type(value) is float:
        yield "is-nan", makers.NAN
    elif type(value) is str:
        yield "is-not-utf8", b"\xff\xfe"  # written as text by ``broken``
    elif type(value) is bytes:
        yield "is-text", "\0" * len(value)
    else:
        yield "is-a-map", {}


def broken(parts: list[Any], value: Any, *path: int) -> bytes:
    """The message with one field replaced; bytes that replace text become text that is not UTF-8."""
    if type(value) is not bytes:
        packed: bytes = msgpack.packb(put(parts, value, *path))
        return packed
    marker = "\x01\x02\x03 here"
    return bytes(msgpack.packb(put(parts, marker, *path))).replace(msgpack.packb(marker), bytes([0xA0 + len(value)]) + value)


def parts_in(value: Any) -> list[str]:
    """The parts of a large field; of a frame table, which is sent as its specs, none."""
    if dataclasses.is_dataclass(value) and not isinstance(value, FrameTable):
        return [field.name for field in dataclasses.fields(value) if field.init]
    return list(getattr(value, "_fields", ()))


def fields_broken() -> Iterator[tuple[str, bytes]]:
    """Every message with one field mutated, and with each part of a field mutated."""
    for message in ONE_OF_EACH:
        parts = parts_of(message)
        kind = parts[0]
        places = list[tuple[str, tuple[int, ...]]]()
        for index, field in enumerate(dataclasses.fields(message), 1):
            parts_of_field = enumerate(parts_in(getattr(message, field.name)))
            places += [(field.name, (index,)), *((f"{field.name}.{part}", (index, at)) for at, part in parts_of_field)]
        for name, path in places:
            for what, wrong in wrong_ones(pick(parts, *path)):
                if (entry := f"{kind.lower()}.{name}-{what}") not in NOT_BROKEN:
                    yield entry, broken(parts, wrong, *path)
        yield f"{kind.lower()}.last-field-missing", msgpack.packb(parts[: -1 - LATER.get(type(message), 0)])
        yield f"{kind.lower()}.cut-in-the-middle", msgpack.packb(parts)[: len(msgpack.packb(parts)) // 2]


def deep_parts_broken() -> Iterator[tuple[str, bytes]]:
    """Faults deeper inside: specs, rows, frames, readings, columns."""
    table, batch, trip = (parts_of(message) for message in (ONE_OF_EACH[2], ONE_OF_EACH[3], ONE_OF_EACH[4]))
    of_table: list[Breakage] = [
        ("spec-is-short", ["layer"], (1, 0)),
        ("spec.module-is-too-long", "x" * (fields.MAX_NAME + 1), (1, 0, 0)),
        ("spec.phase-is-none", 99, (1, 0, 4)),
        ("row.kind-is-none", 99, (1, 0, 2, 0, 0)),
        ("row.kind-is-true", True, (1, 0, 2, 0, 0)),
        ("row.dtype-is-too-long", "x" * 65, (1, 0, 2, 0, 2)),
        ("aliases-are-too-many", ["a"] * 17, (1, 0, 3)),
    ]
    for name, value, path in of_table:
        yield f"table.{name}", msgpack.packb(put(table, value, *path))
    of_batch: list[Breakage] = [
        ("states-are-none", b"\xff\xff\xff", (2, 9)),
        ("abs_min-is-short", b"\0" * 11, (2, 7)),
        ("columns-are-without-states", b"", (2, 9)),
        ("started_at-is-inf", makers.INF, (2, 3)),
        ("started_at-is-negative", -1.0, (2, 3)),
    ]
    for name, value, path in of_batch:
        yield f"batch.{name}", msgpack.packb(put(batch, value, *path))
    of_trip: list[Breakage] = [
        ("position-is-of-floats", [3.0, 0.0, 0.0], (2, 0)),
        ("position-is-nan", [makers.NAN, 0, 0], (2, 0)),
        ("position-is-inf", [makers.INF, 0, 0], (2, 0)),
        ("position-is-before-all", [-2, 0, 0], (2, 0)),
        ("position-is-huge", [2**63, 0, 0], (2, 0)),
        ("position-is-not-its-frames", [9, 9, 9], (2, 0)),
        ("reading-is-beyond-its-frame", 2, (2, 1)),
        ("frames-are-none", [], (2, 2)),
        ("frame.columns-are-short", b"\0" * 4, (2, 2, 0, 2)),
        ("frame.column-is-no-whole-number", b"\0" * 7, (2, 2, 0, 2)),
        ("root_input.value-is-of-two", b"\0" * 16, (2, 3, 0, 3)),
        ("root_input.value-is-empty", b"", (2, 3, 0, 3)),
        ("shape-is-too-deep", [1] * (fields.MAX_DIMS + 1), (2, 5)),
        ("shape-is-negative", [-1], (2, 5)),
        ("loss_scale-is-negative-inf", -makers.INF, (2, 10)),
    ]
    for name, value, path in of_trip:
        yield f"trip.{name}", msgpack.packb(put(trip, value, *path))
    counts: list[Breakage] = [
        ("of-nine", [1, 2, 3] * 9, (3,)),
        ("without-a-digest", [1, 2], (3,)),
        ("of-arrays", [[1, 2, 3]], (3,)),
        ("negative", [1, -1, 3], (3,)),
        ("huge", [2**63, 1, 3], (3,)),
    ]
    for name, wrong, path in counts:
        yield f"batch.calls-are-{name}", msgpack.packb(put(batch, wrong, *path))
    of_recounted: list[Breakage] = [
        ("are-too-many", [[1, "barrier", "a.py:1 in f"]] * 65, (7,)),
        ("call-is-short", [1, "barrier"], (7, 0)),
        ("signature-is-huge", 2**63, (7, 0, 0)),
        ("what-is-too-long", "x" * 81, (7, 0, 1)),
        ("site-is-too-long", "x" * 161, (7, 0, 2)),
    ]
    for name, wrong, path in of_recounted:
        yield f"recounted.calls-{name}", msgpack.packb(put(parts_of(makers.recounted()), wrong, *path))
    beat = parts_of(makers.beat(3, 0, 17))
    for name, wrong in (
        ("nan", [makers.NAN] * 4),
        ("inf", [makers.INF] * 4),
        ("of-five", [0] * 5),
        ("negative", [0, 0, -1, 0]),
        ("of-a-negative-step", [-1, 0, 0, 0]),
    ):
        yield f"beat.moment-is-{name}", msgpack.packb(put(beat, wrong, 1))


def no_messages() -> Iterator[tuple[str, bytes]]:
    """Data that is no array with a kind in front, and headers that claim more than follows."""
    ack = wire.encode(messages.Ack(9, abort=True))
    yield "nothing", b""
    yield "zeros", b"\0" * 64
    yield "text", b"GET / HTTP/1.1\r\n\r\n"
    yield "never-used-byte", b"\xc1"
    yield "nil", b"\xc0"
    yield "bare-kind-without-array", msgpack.packb("HELLO")
    yield "empty-array", b"\x90"
    yield "kind-is-a-number", msgpack.packb([1, 2, 3])
    yield "kind-is-bytes", msgpack.packb([b"ACK", 9, True])
    yield "kind-is-an-array", msgpack.packb([["ACK"], 9, True])
    yield "kind-is-not-utf8", array(b"\xa2\xff\xfe", b"\x09", b"\xc3")
    yield "kind-alone", msgpack.packb(["HELLO"])
    yield "map-instead-of-array", msgpack.packb({"kind": "ACK", "seq": 9})
    yield "map-with-duplicate-keys", b"\x82\xa3seq\x01\xa3seq\x02"
    yield "field-is-a-map-with-duplicate-keys", array(b"\xa3ACK", b"\x82\xa1a\x01\xa1a\x02", b"\xc3")
    yield "map-with-an-array-for-a-key", array(b"\xa3ACK", b"\x81\x91\x01\x02", b"\xc3")
    yield "trailing-byte", ack + b"\0"
    yield "two-messages", ack + ack
    yield "ext-type", array(b"\xa3ACK", b"\xd4\x01\0", b"\xc3")
    yield "ext-type-without-content", array(b"\xa3ACK", b"\xc7\0\x01", b"\xc3")
    yield "ext-timestamp", array(b"\xa3ACK", b"\xd6\xff\0\0\0\0", b"\xc3")
    yield "ext-timestamp-out-of-range", array(b"\xa3ACK", b"\xd7\xff" + b"\xff" * 8, b"\xc3")
    yield "ext-timestamp-without-content", array(b"\xa3ACK", b"\xc7\0\xff", b"\xc3")
    for name, header in (("array", 0xDD), ("text", 0xDB), ("bytes", 0xC6), ("map", 0xDF), ("ext", 0xC9)):
        yield f"claims-4-gib-{name}", claim(header, 2**32 - 1)
        yield f"claims-4-gib-{name}-as-field", array(b"\xa3ACK", claim(header, 2**32 - 1))
    yield "claims-as-many-items-as-bytes", claim(0xDD, 2000, b"\xc0" * 1990)
    # Each claim is small enough to be believed; only all of them together are not.
    yield "claims-nested-and-each-believable", claim(0xDD, 4000) * 800
    yield "deep-nesting-500", b"\x91" * 500 + b"\xc0"
    yield "deep-nesting-5000", b"\x91" * 5000 + b"\xc0"
    yield "deep-nesting-in-a-field", array(b"\xa3ACK", b"\x91" * 900 + b"\xc0", b"\xc3")
    yield "deep-maps", b"\x81\xa1a" * 600 + b"\xc0"


def saying(text: str, message: messages.Message) -> bytes:
    """The message with this text in the place of EVIL, as no sender of ours would encode it."""

    def swapped(value: Any) -> Any:
        if isinstance(value, list):
            return [swapped(part) for part in value]
        return text if value == EVIL else value

    return bytes(msgpack.packb(swapped(parts_of(message))))


def read_all_the_same() -> Iterator[tuple[str, bytes]]:
    """Well-formed messages with malicious content."""
    for message in ONE_OF_EACH:
        yield f"{type(message).__name__.lower()}.plain", wire.encode(message)
        yield f"{type(message).__name__.lower()}.more-fields-than-known", msgpack.packb([*parts_of(message), {}, [[[]]], -1])
    for name, kind in (("", ""), ("long", "X" * 3000), ("with-escapes", "\x1b[2J\r\n"), ("lower-case", "hello")):
        yield f"unknown-kind-{name or 'empty'}", msgpack.packb([kind, 1])
    yield "unknown-kind-that-is-deep", array(b"\xa1X", b"\x91" * 900 + b"\xc0")
    names = {
        "climbs-out": "../../../etc/passwd",
        "is-empty": "",
        "is-dots": "..",
        "has-escapes": "\x1b[31m\n\0",
        "is-long": "é" * 1024,
    }
    for name, job in names.items():
        yield f"hello.job-{name}", saying(job, makers.hello(job=EVIL, incarnation="fuzz"))
    yield "hello.another-major", wire.encode(makers.hello(job="major", major=2))
    yield "hello.rank-outside-its-world", wire.encode(makers.hello(7, 2, job="outside"))
    yield "hello.world-is-large", wire.encode(makers.hello(1_999, 2_000, job="large"))
    yield "hello.another-world-size", wire.encode(makers.hello(0, 3, incarnation="fuzz"))
    yield "hello.impostor", saying("\x1b]0;x\x07", makers.hello(1, 2, incarnation="fuzz", pid=INT64, host=EVIL))
    yield "table.empty", wire.encode(messages.Table(FrameTable(())))
    yield "table.frames-without-rows", msgpack.packb(["TABLE", [["", "", [], [], 0]] * 200])
    empty = makers.summary(0)._replace(abs_min=b"", abs_max=b"", states=b"", table_id=FrameTable(()).id)
    yield "batch.empty", wire.encode(messages.Batch(1, empty._replace(traced=True)))
    yield "batch.table-never-seen", wire.encode(messages.Batch(2, makers.summary(1)._replace(table_id="")))
    nans = pack("f", [makers.NAN, -makers.INF, -0.0])
    odd = makers.summary(2, traced=True)._replace(abs_min=nans, abs_max=nans, states=b"\0\7\3")
    yield "batch.columns-are-nan-and-states-finite", wire.encode(messages.Batch(3, odd))
    yield (
        "batch.wider-than-its-table",
        wire.encode(messages.Batch(4, odd._replace(abs_min=b"\xff" * 24, abs_max=b"\xff" * 24))),
    )
    last = makers.summary(INT64, first=INT64, traced=True)._replace(optimizer_step=INT64)
    yield "batch.numbers-are-the-last", wire.encode(messages.Batch(INT64, last))
    yield (
        "beat.moment-is-the-last",
        wire.encode(messages.Beat(makers.moment(INT64, INT64, INT64), "idle", INT64, INT64, 1e18)),
    )
    yield "beat.moment-is-before-all", wire.encode(makers.beat(-1, 0, 0))
    yield "ack.abort-nobody-sent", wire.encode(messages.Ack(INT64, abort=True))
    for outcome in sorted(messages.OUTCOMES):
        yield f"bye.{outcome}", saying("\x1b[2J\0\nrankwatch: " + "x" * 200, messages.Bye(20, outcome, EVIL))
    yield from trips_that_are_read()
    yield "notice.value-is-the-smallest", wire.encode(messages.Noticed(40, makers.notice(value=5e-324, growth=5e-324)))
    yield (
        "notice.value-is-the-largest",
        wire.encode(messages.Noticed(41, makers.notice(value=sys.float_info.max, growth=-1e308))),
    )
    yield "notice.dtype-is-none", wire.encode(messages.Noticed(42, makers.notice(NoticeKind.ZEROS, value=0, dtype="\0")))
    yield (
        "tune.all-runs",
        wire.encode(messages.Tune(tuning=Tuning(every=MAX_EVERY, modules=(), trace_batch_nums=(INT64,)))),
    )
    yield "tune.nothing", wire.encode(messages.Tune())
    yield "invite.job-has-line-breaks", saying('a\n["", "b", "c"]\n', messages.Invite(EVIL))
    yield "tuned.many", wire.encode(messages.Tuned(("",) * MAX_PATTERNS, INT64))


def trips_that_are_read() -> Iterator[tuple[str, bytes]]:
    inf, nan = makers.reading("output", makers.INF), makers.reading("output", makers.NAN)
    unheard_of = makers.reading("output", makers.INF, dtype="float4_e2m1")
    trips = {
        "position-is-the-last": makers.trip(at=(INT64, INT64, INT64), step=INT64),
        "position-is-before-all": makers.trip(at=(-1, 0, 0)),
        "dtype-is-unheard-of": makers.trip(makers.reading("input[0]", dtype="float4_e2m1"), unheard_of),
        "values-are-nan-and-states-finite": dataclasses.replace(
            makers.trip(nan), frames=(dataclasses.replace(makers.frame(nan), states=b"\0"),)
        ),
        "reading-was-never-measured": dataclasses.replace(
            makers.trip(inf), frames=(dataclasses.replace(makers.frame(inf), states=b"\7"),)
        ),
        "ring-goes-backwards": makers.trip(inf, before=tuple(makers.frame(at=(9 - i, i, i)) for i in range(9))),
        "name-has-escapes": makers.trip(inf, module=EVIL),
        "loss_scale-is-inf": makers.trip(makers.reading("weight.grad", makers.INF), loss_scale=makers.INF),
        "counts-are-more-than-elements": dataclasses.replace(makers.trip(inf), numel=0, nan_count=INT64, inf_count=INT64),
        "culprit-is-finite": dataclasses.replace(makers.trip(makers.reading("input[0]"), inf), reading=0),
    }
    for number, (name, trip) in enumerate(trips.items(), 30):
        yield f"trip.{name}", saying("\x1b[2J\n\0", messages.Tripped(number, trip))


def entries() -> dict[str, bytes]:
    """The whole corpus: content by path below its folder."""
    refused = [*no_messages(), *fields_broken(), *deep_parts_broken()]
    found = [(f"refused/{name}.bin", data) for name, data in refused]
    found += [(f"read/{name}.bin", data) for name, data in read_all_the_same()]
    corpus = dict(found)
    if len(corpus) != len(found):
        raise AssertionError("two entries of the corpus have one name")
    return corpus


def read(folder: str) -> dict[str, bytes]:
    """The files of ``refused`` or ``read``, by name."""
    return {path.stem: path.read_bytes() for path in sorted((FOLDER / folder).glob("*.bin"))}


def main() -> None:
    corpus = entries()
    for path in FOLDER.rglob("*.bin"):
        if path.relative_to(FOLDER).as_posix() not in corpus:
            path.unlink()
    for name, content in corpus.items():
        path = FOLDER / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    print(f"{len(corpus)} files in {FOLDER}")


if __name__ == "__main__":
    main()

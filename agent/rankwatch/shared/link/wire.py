"""The wire format: how each message is encoded, its limits, and the strict decoding. The only file that imports msgpack.

A message is a msgpack array ``[kind, field, ...]``; the fields are those of the kind's dataclass, in order. A newer minor
version may append fields and add kinds: this version ignores both. HELLO carries the version, and the collector refuses
another major version. ``decode`` is the only place that checks what comes from outside; a peer's fault raises ProtocolError,
which names the kind and the field. It makes all texts printable: names in one line.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any, get_args

import msgpack

from ...errors import ProtocolError
from ..printable import printable
from ..types.fields import MAX_NAME, MAX_ROWS
from ..types.messages import Message, Unknown
from .codec import SHORT_ARRAY, FieldArray

VERSION = (1, 0)
"""Major, minor."""

MAX_MESSAGE_BYTES = 32 * 1024 * 1024
SHORT_BYTES, REMEMBERED_BYTES = 16, 1024 * 1024
"""Messages up to SHORT_BYTES and tables up to REMEMBERED_BYTES are decoded once and cached."""

PART_BYTES = 16 * 1024
"""What is unpacked at once: in less than a millisecond."""

MAX_DEPTH = 16
"""Arrays in arrays of a long message."""


def encode(message: Message) -> bytes:
    """The bytes of a message."""
    kind, array = _ARRAY_OF[type(message)]
    packed: bytes = msgpack.packb([kind, *array.write(message)], use_bin_type=True)
    return packed


def decode(data: bytes | memoryview) -> Message:
    """The message in ``data``.

    Raises:
        ProtocolError: too large, not msgpack, of a wrong shape, type, range or length.
    """
    if len(data) > MAX_MESSAGE_BYTES:
        raise ProtocolError(f"a message of {len(data)} bytes is over the limit of {MAX_MESSAGE_BYTES}")
    if len(data) <= SHORT_BYTES:
        return _decode_short(bytes(data))
    return _decode_once(bytes(data)) if len(data) <= REMEMBERED_BYTES and is_table(data) else _decode(data)


def _teller_of(kind: str) -> Callable[[bytes | memoryview], bool]:
    """What tells whether bytes are of this kind, if they are a message at all.

    The name of the kind comes after the array's header, of one byte; with more than 15 fields, of three.
    """
    head: bytes = msgpack.packb(kind)
    size = len(head)
    return lambda data: data[1 : 1 + size] == head or data[3 : 3 + size] == head


is_fingerprints, is_batch, is_fingerprint = map(_teller_of, ("FINGERPRINTS", "BATCH", "FINGERPRINT"))
is_beat, is_abort, is_trip, is_ack = map(_teller_of, ("BEAT", "ABORT", "TRIP", "ACK"))
is_hello, _is_specs = map(_teller_of, ("HELLO", "TABLE"))


def is_table(data: bytes | memoryview) -> bool:
    """Whether these bytes, if they are a message at all, are a TABLE or FINGERPRINTS."""
    return _is_specs(data) or is_fingerprints(data)


def is_columns(data: bytes | memoryview) -> bool:
    """Whether these bytes, if they are a message at all, are a BATCH or FINGERPRINT: they decode fast, however long."""
    return is_batch(data) or is_fingerprint(data)


def _decode(data: bytes | memoryview) -> Message:
    try:
        parts = _unpack(data)
    except (ValueError, msgpack.UnpackException, RecursionError) as error:
        raise ProtocolError(f"not a message: {error or type(error).__name__}") from None
    if not isinstance(parts, list) or not parts or not isinstance(parts[0], str):
        raise ProtocolError("not a message: no array that begins with a kind")
    kind, *values = parts
    array = _ARRAYS.get(kind)
    if array is None:
        return Unknown(printable(kind, MAX_NAME))
    if len(values) < array.least:
        raise ProtocolError(f"{kind}: {len(values)} fields instead of {len(array)}")
    try:
        message: Message = array.read_open(values)
    except ValueError as error:
        raise ProtocolError(f"{kind}.{error}") from None
    return message


# Thousands of ranks send the same table within seconds, and decoding one takes milliseconds.
_decode_once = lru_cache(maxsize=8)(_decode)
# All ranks acknowledge an abort at once, in the same few bytes.
_decode_short = lru_cache(maxsize=64)(_decode)


def _unpack(data: bytes | memoryview) -> Any:
    if len(data) <= PART_BYTES:
        try:  # most messages have no long arrays
            return msgpack.unpackb(data, **_STRICT)
        except ValueError:
            pass
    if is_columns(data):
        return _unpack_parts(memoryview(data), 2, SHORT_ARRAY)
    return _unpack_parts(memoryview(data), MAX_DEPTH, MAX_ROWS)


def _unpack_parts(data: memoryview, depth: int, most: int) -> Any:
    """As msgpack unpacks it, but part by part where it is long: other threads wait for one part alone.

    Nor does a header cost more than what follows it. To unpack a whole allocates what the headers claim before it sees that
    items are missing: 10 KB of nested headers of long arrays cost 80 MB, which msgpack 1.1 and older never free.

    Args:
        depth: how many arrays may lie in each other.
        most: how many items an array may have. In the place of an array that has more, or lies deeper, is _UNREAD.
    """
    if len(data) <= PART_BYTES:
        try:
            return msgpack.unpackb(data, **_STRICT)
        except ValueError:  # perhaps of an array's length
            pass
    if not data or not _is_array(data[0]):
        return msgpack.unpackb(data, **_STRICT)
    unpacker = msgpack.Unpacker(max_buffer_size=len(data), **_STRICT)
    unpacker.feed(data)
    count = unpacker.read_array_header()
    if not depth or count > most:
        return _UNREAD
    items: list[Any] = []
    for left in reversed(range(count)):
        begin = unpacker.tell()
        if begin == len(data) or not _is_array(data[begin]):
            items.append(unpacker.unpack())
        elif left:
            unpacker.skip()
            items.append(_unpack_parts(data[begin : unpacker.tell()], depth - 1, most))
        else:
            return [*items, _unpack_parts(data[begin:], depth - 1, most)]
    if unpacker.tell() < len(data):
        raise ValueError("more bytes follow")
    return items


def _is_array(head: int) -> bool:
    return head >> 4 == 0x9 or head in (0xDC, 0xDD)


_UNREAD = object()
"""No field takes it."""

_STRICT: dict[str, Any] = {
    "raw": False, "strict_map_key": True, "max_ext_len": 0, "max_map_len": 0, "max_array_len": SHORT_ARRAY,
}  # fmt: skip

_ARRAY_OF = {cls: (cls.KIND, FieldArray(cls)) for cls in get_args(Message) if cls is not Unknown}
_ARRAYS = dict(_ARRAY_OF.values())

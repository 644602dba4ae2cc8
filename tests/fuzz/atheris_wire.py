"""A fuzz target: any bytes through ``wire.decode`` and the ledger, as a known and as an unknown peer.

atheris is no dependency of ours; install it where you fuzz, and give it the corpus as seeds:

    pip install atheris && mkdir -p build/found
    PYTHONPATH=agent:monitor:tests python tests/fuzz/atheris_wire.py build/found tests/fuzz/corpus/read tests/fuzz/corpus/refused

Findings land in the first folder. A crash is an exception out of ``one_input``; to see one again, pass its file instead of
the folders. The options are libFuzzer's (``-max_len=65536``).
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterable, Iterator
from typing import Any

import makers
from invariants import CheckedLedger
from rankwatch.errors import ProtocolError
from rankwatch.shared.link import wire
from rankwatch.shared.printable import paragraph, printable
from rankwatch.shared.types import messages
from rankwatch_monitor.decide.core.effects import Effect, Publish, Send
from rankwatch_monitor.decide.core.journal import JobEnded
from rankwatch_monitor.decide.core.ledger import Disconnected, Event, Ledger, Malformed, Received, Tick
from rankwatch_monitor.decide.core.options import Options
from rankwatch_monitor.views import as_json as json
from rankwatch_monitor.views import text

LINES = {messages.Bye: "text", messages.Off: "text", messages.Error: "text", messages.Abort: "reason"}
"""The texts that may have many lines."""

HEALTHY, KNOWN, UNKNOWN = b"healthy", b"known", b"unknown"


def one_input(data: bytes) -> None:
    """Raises where ``data`` would break the collector."""
    ledger = CheckedLedger(Options())
    _do(ledger, Received(HEALTHY, makers.hello(job="healthy", incarnation="healthy")))
    _do(ledger, Received(KNOWN, makers.hello(1, 2)))
    _do(ledger, Received(KNOWN, messages.Table(makers.table())))
    healthy = ledger.runs["healthy-0"]
    before = repr(healthy)
    try:
        message = wire.decode(data)
    except ProtocolError as error:
        for peer in (KNOWN, UNKNOWN):
            _do(ledger, Malformed(peer, str(error)))
    else:
        check(message)
        for peer in (KNOWN, UNKNOWN, KNOWN):
            _do(ledger, Received(peer, message))
        if isinstance(message, messages.Tune | messages.Inspect | messages.Hello):  # these may name any run
            before = repr(healthy)
    if repr(healthy) != before:
        raise AssertionError("a peer of one run changed another run")
    for event in (Disconnected(UNKNOWN), Disconnected(KNOWN), Tick(), JobEnded(1), Tick()):
        _do(ledger, event, now=60.0)


def decode_or_refuse(data: bytes) -> None:
    """Raises where ``data`` is neither refused nor a message that is fit to be handled."""
    try:
        message = wire.decode(data)
    except ProtocolError:
        return
    check(message)


def check(message: messages.Message) -> None:
    """A message that was read is written as it was read, and each of its texts is safe to print."""
    of_lines = getattr(message, LINES[type(message)]) if type(message) in LINES else None
    for told in _texts(message):
        if told != (paragraph(told) if told == of_lines else printable(told)):
            raise AssertionError(f"{told!r} is not safe to print")
    if isinstance(message, messages.Unknown):
        return  # ignored, and never sent
    encoded = wire.encode(message)
    again = wire.decode(encoded)
    if wire.encode(again) != encoded or not (again == message or "nan" in repr(message)):
        raise AssertionError("a message that was read is not what it is written as")


def _texts(value: Any) -> Iterator[str]:
    """Every text in a message, at any depth: those of fields that are added later as well."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, (tuple, list)):
        for part in value:
            yield from _texts(part)
    elif dataclasses.is_dataclass(value):
        for field in dataclasses.fields(value):
            yield from _texts(getattr(value, field.name))


def _do(ledger: Ledger, event: Event, now: float = 0.0) -> None:
    perform(ledger.handle(event, now))
    ledger.take_journals()


def perform(effects: Iterable[Effect]) -> None:
    """Carries out effects as the collector does, without sockets and files."""
    for effect in effects:
        if isinstance(effect, Send):
            wire.decode(wire.encode(effect.message))
        elif isinstance(effect, Publish):
            text.render(effect.report).encode()
            json.render(effect.report).encode()


def main() -> None:
    import atheris  # type: ignore[import-not-found, import-untyped, unused-ignore]

    atheris.instrument_all()
    atheris.Setup(sys.argv, one_input)
    atheris.Fuzz()


if __name__ == "__main__":
    main()

"""The messages that the ranks of a training sent: a file of them, and what a collector says of them. Free of torch."""

from __future__ import annotations

import json
import lzma
import struct
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import zip_longest
from pathlib import Path
from typing import Any, NamedTuple

from desk import Desk
from rankwatch.errors import ProtocolError
from rankwatch.shared.link import wire
from rankwatch.shared.types import messages
from rankwatch_monitor.decide.core.effects import Note, Send
from rankwatch_monitor.decide.core.journal import JobEnded
from rankwatch_monitor.decide.core.ledger import Received, Tick
from rankwatch_monitor.views import as_json

from .truths import Alike

HERE = Path(__file__).parent
COMMAND = "PYTHONPATH=agent:monitor:tests python -m recorded.replicas"

_HEAD = struct.Struct("<HBI")
_ROW_SECONDS, _TICK_SECONDS = 0.01, 0.05
"""Of the clock: between two messages of one rank, and between two looks of the collector."""


class Sent(NamedTuple):
    """A message as it is sent, of one model of a rank."""

    rank: int
    model: int
    data: bytes


@dataclass(frozen=True)
class Played:
    """``reports``: of the runs, in the order in which they began, as in ``report.json``; ``said``: lines for the operator;
    ``refused``: errors that ranks were sent.
    """

    reports: list[dict[str, Any]]
    said: list[str]
    refused: list[str]


@dataclass(frozen=True)
class Recording:
    """``sent``: of all ranks, a message of each in turn. ``alike``: what the ranks noted of their weights, where they did."""

    sent: tuple[Sent, ...]
    alike: Alike = field(default_factory=dict)

    def write(self, file: Path) -> None:
        notes = json.dumps({step: dict(values) for step, values in self.alike.items()}).encode()
        file.parent.mkdir(exist_ok=True)
        whole = struct.pack("<I", len(notes)) + notes + framed(self.sent)
        file.write_bytes(lzma.compress(whole, preset=9 | lzma.PRESET_EXTREME))

    def messages(self) -> Iterator[tuple[Sent, messages.Message]]:
        for one in self.sent:
            yield one, wire.decode(one.data)

    def play(self) -> Played:
        """Has the ledger of a collector receive all messages."""
        desk, ranks = Desk(), len({one.rank for one in self.sent})
        ticked_at = 0.0
        for one, message in self.messages():
            desk.now += _ROW_SECONDS / ranks
            desk.handle(Received(b"%d of %d" % (one.model, one.rank), message))
            if desk.now - ticked_at >= _TICK_SECONDS:
                ticked_at = desk.now
                desk.handle(Tick())
        desk.handle(JobEnded(0))
        said = [effect.text for effect in desk.effects if isinstance(effect, Note)]
        sends = [effect.message for effect in desk.effects if isinstance(effect, Send)]
        refused = [message.text for message in sends if isinstance(message, messages.Error)]
        return Played([as_json.to_dict(run.report()) for run in desk.ledger.runs.values()], said, refused)

    def differences(self, other: Recording) -> list[str]:
        """What else the ranks send now, by the first message of each model of each rank that is not as in this recording.

        Checksums are not compared: the last bits of a weight depend on the processor and on the order of a sum.
        """
        recorded, sent = self._by_model(), other._by_model()
        if recorded.keys() != sent.keys():
            return [f"ranks and models: {sorted(sent)}, recorded are {sorted(recorded)}"]
        found = []
        for rank, model in recorded:
            pairs = enumerate(zip_longest(recorded[rank, model], sent[rank, model]))
            first = next(((number, was, now) for number, (was, now) in pairs if was != now), None)
            if first is not None:
                found.append("rank {0}, model {1}: message {2} is\n{4}, recorded is\n{3}".format(rank, model, *first))
        return found

    def _by_model(self) -> dict[tuple[int, int], list[Any]]:
        found: dict[tuple[int, int], list[Any]] = {}
        for one, message in self.messages():
            found.setdefault((one.rank, one.model), []).append(_told(message))
        return found


def read(file: Path) -> Recording:
    """
    Raises:
        AssertionError: this version would not send these bytes.
    """
    whole = lzma.decompress(file.read_bytes())
    (size,) = struct.unpack_from("<I", whole)
    sent = unframed(whole[4 + size :])
    first_of_kind = {one.data[:3]: one for one in reversed(sent)}.values()
    assert all(_is_current(one.data) for one in first_of_kind), (
        f"{file.name} is of another wire format; record it again: {COMMAND} {file.parent.name}/{file.stem}"
    )
    notes = {int(step): values for step, values in json.loads(whole[4 : 4 + size]).items()}
    return Recording(tuple(sent), notes)


def file_of(table: str, name: str) -> Path:
    return HERE / table / f"{name}.xz"


def framed(sent: Iterable[Sent]) -> bytes:
    return b"".join(_HEAD.pack(rank, model, len(data)) + data for rank, model, data in sent)


def unframed(whole: bytes) -> list[Sent]:
    at, sent = 0, []
    while at < len(whole):
        rank, model, length = _HEAD.unpack_from(whole, at)
        at += _HEAD.size + length
        sent.append(Sent(rank, model, whole[at - length : at]))
    return sent


def in_turn(sent: Iterable[Sent]) -> tuple[Sent, ...]:
    """One message of each rank after the other, all BYEs last, however fast each rank was."""
    of_ranks: dict[int, list[Sent]] = {}
    for one in sorted(sent, key=lambda one: one.rank):
        of_ranks.setdefault(one.rank, []).append(one)
    rows = [one for row in zip_longest(*of_ranks.values()) for one in row if one is not None]
    return tuple(sorted(rows, key=lambda one: isinstance(wire.decode(one.data), messages.Bye)))


def _is_current(data: bytes) -> bool:
    try:
        return wire.encode(wire.decode(data)) == data
    except (ProtocolError, KeyError):  # a kind that is not known is not encoded
        return False


def _told(message: messages.Message) -> Any:
    """What is the same each time that the training runs."""
    if isinstance(message, messages.Fingerprints):
        return message.table
    if isinstance(message, messages.Fingerprinted):
        fields: Mapping[str, Any] = message.fingerprint._asdict()
        return {name: len(value) if isinstance(value, bytes) else value for name, value in fields.items()}
    if isinstance(message, messages.Noticed):
        return message.notice.key
    if isinstance(message, messages.Bye):
        return message.outcome
    return message

"""For a rank: writes down what it sends of its replicas."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from rankwatch.measure.ledger import LEDGER
from rankwatch.shared.link import wire
from rankwatch.shared.types import messages
from rankwatch.shared.types.fingerprint import LANE_BYTES, UNKNOWN, FingerprintTable
from rankwatch.shared.types.frame import FrameTable
from rankwatch.shared.types.gpu import NO_GPU
from rankwatch.tell.link import Link

from .recording import Sent, framed

NOT_SHORTENED = (UNKNOWN, bytes(LANE_BYTES))


def note_what_is_sent(folder: Path) -> None:
    """From now on, what this rank hands to its link is added to the file ``sent`` of ``folder``, all but batches.

    Nothing is buffered: a watch that is never closed sends its last messages when the process ends.
    """
    append = Link._append
    noted: set[Sent] = set()

    def note(hello: messages.Hello, message: messages.Message) -> None:
        one = Sent(hello.rank, hello.model, wire.encode(message))
        if one not in noted:  # as HELLO and the tables
            noted.add(one)
            with (folder / "sent").open("ab", buffering=0) as file:
                file.write(framed([one]))

    def appended(
        self: Link, make: Callable[[int], messages.Sequenced], table: FrameTable | FingerprintTable | None = None
    ) -> None:
        def made(seq: int) -> messages.Sequenced:
            message = make(seq)
            if not isinstance(message, messages.Batch):
                note(self._hello, _without_the_machine(self._hello))
                if isinstance(table, FingerprintTable):
                    note(self._hello, messages.Fingerprints(table))
                note(self._hello, _with_short_checksums(message))
            return message

        append(self, made, table)

    Link._append = appended  # type: ignore[method-assign]


def note_calls(folder: Path, rank: int) -> None:
    """Writes down how many collectives this rank has called in each group, their digest, and the last ones."""
    noted = {}
    for calls in LEDGER.groups():
        count = calls.count()
        told = LEDGER.recounted(messages.Recount(0, calls.key, max(1, count.calls - 20)))
        noted[calls.key] = calls.name, count.calls, count.digest, [f"{one.what} at {one.site}" for one in told.calls]
    (folder / f"calls{rank}.json").write_text(json.dumps(noted))


def _without_the_machine(hello: messages.Hello) -> messages.Hello:
    """As from the same machine and the same start each time."""
    return replace(
        hello, job="recorded", host="host", pid=hello.rank + 1, torch="", start="start", launch="", age=0.0, gpu=NO_GPU,
        made_with=(), incarnation=f"{hello.model} of {hello.rank}",
    )  # fmt: skip


def _with_short_checksums(message: messages.Sequenced) -> messages.Sequenced:
    """With 4 random bytes of each 16, which do not compress: checksums of replicas and of inputs are either equal or not, zero
    or not. Those of gathers are added up, and stay as they are.
    """
    if not isinstance(message, messages.Fingerprinted):
        return message
    sent = message.fingerprint
    return replace(message, fingerprint=sent._replace(lanes=_short(sent.lanes), inputs=_short(sent.inputs)))


def _short(checksums: bytes) -> bytes:
    each = [checksums[at : at + LANE_BYTES] for at in range(0, len(checksums), LANE_BYTES)]
    hashes = [hashlib.blake2b(one, digest_size=4).digest().ljust(LANE_BYTES, b"\0") for one in each]
    return b"".join(one if one in NOT_SHORTENED else short for one, short in zip(each, hashes, strict=True))

"""``rankwatch``, which also writes each HELLO and BEAT that it receives to the file ``FAULT_NOTES``."""

from __future__ import annotations

import json
import os
import sys

from rankwatch.shared import messages
from rankwatch_monitor.cli import main
from rankwatch_monitor.decide.effects import Effect
from rankwatch_monitor.decide.ledger import Event, Ledger, Received


def note(kind: str, *fact: object) -> None:
    with open(os.environ["FAULT_NOTES"], "a") as notes:
        notes.write(json.dumps([kind, os.getpid(), *fact]) + "\n")


handle = Ledger.handle


def noted_handle(self: Ledger, event: Event, now: float) -> list[Effect]:
    match event:
        case Received(peer, messages.Hello() as hello):
            note("hello", hello.restart, hello.rank, peer.hex())
        case Received(_, messages.Beat() as beat):
            note("beat", *beat.moment.position, beat.phase)
    return handle(self, event, now)


Ledger.handle = noted_handle  # type: ignore[method-assign]

if __name__ == "__main__":
    sys.exit(main())

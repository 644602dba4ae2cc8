"""``rankwatch``, which also writes each HELLO and BEAT that it receives to the file ``FAULT_NOTES``.

``FAULT_DISK``, the seed of its faults, makes transactions of the records slow, or fail before or after their work.
"""

from __future__ import annotations

import errno
import json
import os
import random
import sys
import time
from typing import Any

from rankwatch.shared.types import messages
from rankwatch_monitor.cli import main
from rankwatch_monitor.decide.core.effects import Effect
from rankwatch_monitor.decide.core.ledger import Event, Ledger, Received
from rankwatch_monitor.record.store import Store


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
            if beat.holds:
                note("held", *beat.moment.position)
    return handle(self, event, now)


Ledger.handle = noted_handle  # type: ignore[method-assign]

write = Store.write
disk = random.Random(os.environ.get("FAULT_DISK"))


def flaky_write(self: Store, *arguments: Any, **more: Any) -> float | None:
    fault = disk.choice(["none", "none", "slow", "before", "after"])
    if fault == "slow":
        time.sleep(disk.uniform(0, 0.5))
    if fault == "before":
        raise OSError(errno.EIO, "planted")
    result = write(self, *arguments, **more)
    if fault == "after":
        raise OSError(errno.EIO, "planted")
    return result


if "FAULT_DISK" in os.environ:
    Store.write = flaky_write  # type: ignore[method-assign]

if __name__ == "__main__":
    sys.exit(main())

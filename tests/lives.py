"""The lives of batches, as a net: what each test of the hooks has its detector send, trip and number, against what is recorded.

    PYTHONPATH=agent:monitor:tests python -m lives     records anew: runs the tests twice, and keeps what was the same both times

A log has one line for each call of the detector's observer, with the position, the phase and the progress that the rank shows at
this moment. Numbers of tensors are not in it: they are what the tests themselves look at. ``torch/lives.json.xz`` has the logs.
"""

from __future__ import annotations

import functools
import json
import lzma
import sys
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

FILE = Path(__file__).parent / "torch" / "lives.json.xz"
FOLDERS = ("tests/torch/hook/", "tests/torch/judge/", "tests/torch/api/", "tests/torch/replicas/", "tests/torch/test_zoo.py")

Log = list[str]


class Told:
    """In the place of a detector's observer: notes each call, and passes it on."""

    def __init__(self, detector: Any, observer: Any, log: Log) -> None:
        self._detector, self._observer, self._log = detector, observer, log

    def __getattr__(self, name: str) -> Any:
        value: Any = getattr(self._observer, name)
        if not name.startswith("on_"):
            return value

        def told(*given: Any) -> Any:
            shown = self._detector
            place = f"{tuple(shown.position)} {shown.phase} {tuple(shown.progress)}" if hasattr(shown, "_hooks") else ""
            described = _DESCRIBED[name](*given) if name in _DESCRIBED else ""
            self._log.append(f"{name} {described} | {place}")
            return value(*given)

        return told


def _batch(table: Any, summary: Any, _: Any) -> str:
    states = zlib.crc32(summary.states)
    at = f"{summary.batch}.{summary.first_frame} step {summary.optimizer_step}"
    return f"{at} traced {summary.traced} {len(table.specs)} {table.id} {states:08x}"


def _trip(trip: Any, *_: Any) -> str:
    frames = [tuple(frame.position) for frame in trip.frames]
    return (
        f"{tuple(trip.position)} reading {trip.reading} step {trip.optimizer_step} of {frames} {trip.recurs} {trip.unfound}"
    )


def _fingerprint(table: Any, fingerprint: Any) -> str:
    return repr(tuple(fingerprint)[1:5])


def _notice(notice: Any) -> str:
    return f"{notice.kind.name} batch {notice.batch}"


def _trace(frames: list[Any]) -> str:
    return repr([tuple(frame.position) for frame in frames])


_DESCRIBED: dict[str, Callable[..., str]] = {
    "on_batch": _batch,
    "on_found": _trip,
    "on_trip": _trip,
    "on_fingerprint": _fingerprint,
    "on_notice": _notice,
    "on_trace": _trace,
    "on_limit": repr,
}


def watch_lives(monkeypatch: pytest.MonkeyPatch, log: Log) -> None:
    """From here on, each detector that is made writes to ``log``."""
    from rankwatch.hook.detector import Detector

    original = Detector.__init__

    def made(self: Any, model: Any, config: Any, observer: Any, **options: Any) -> None:
        original(self, model, config, Told(self, observer, log), **options)

    monkeypatch.setattr(Detector, "__init__", made)


def is_logged(item: pytest.Item) -> bool:
    """Whether the log of a test is recorded: not where hypothesis chooses other examples with each change of a constant."""
    return item.nodeid.startswith(FOLDERS) and not hasattr(getattr(item, "obj", None), "hypothesis")


@functools.cache
def recorded() -> dict[str, Log]:
    known: dict[str, Log] = json.loads(lzma.decompress(FILE.read_bytes())) if FILE.exists() else {}
    return known


class LifeRecorder:
    """A plugin of pytest: has the logs of one run."""

    def __init__(self) -> None:
        self.logs: dict[str, Log] = {}


def main() -> int:
    runs = []
    for _ in range(2):
        recorder = LifeRecorder()
        pytest.main(["-q", "-n", "0", "-m", "not slow", *FOLDERS], plugins=[recorder])
        runs.append(recorder.logs)
    first, second = runs
    kept = {name: log for name, log in sorted(first.items()) if second.get(name) == log and log}
    FILE.write_bytes(lzma.compress(json.dumps(kept, indent=0).encode(), preset=9))
    unstable = sorted(name for name in first if first[name] != second.get(name))
    print(f"{len(kept)} logs of {sum(map(len, kept.values()))} lines; not the same twice:", *unstable, sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())

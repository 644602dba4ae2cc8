"""The ranks of one run, forked, and what its record and its report must say of them."""

from __future__ import annotations

import contextlib
import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import records
from collectors import until
from e2e.site import ABORTED, Forge, Rank, trained
from rankwatch_monitor.decide.core.journal import Opened
from rankwatch_monitor.record.reader import RunRecord
from rankwatch_monitor.record.runs import folders
from rankwatch_monitor.record.schema import FILE

PACE = 0.05
"""Seconds from batch to batch."""


class Crew:
    """The ranks of one run. They wait for ``go``, so that many runs can start at one moment.

    Args:
        connections: each rank's connection file.
    """

    def __init__(self, forge: Forge, folder: Path, start: str, connections: Sequence[Path], job: str = "train") -> None:
        folder.mkdir()
        self.start = start
        self.folder = folder
        self.ranks: list[Rank] = []
        self.done: list[int] = []
        """Batches that each rank has trained, once it has halted."""
        for rank, connection in enumerate(connections):
            env = {
                "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(len(connections)), "FAULT_WAITS": "1",
                "RANKWATCH_JOB": job, "RANKWATCH_START": start, "RANKWATCH_CONNECTION": str(connection),
                "RANKWATCH_ABORT_GRACE": "60", "TORCHELASTIC_ERROR_FILE": str(folder / f"error-{rank}.json"),
            }  # fmt: skip
            self.ranks.append(Rank(forge, folder / f"rank-{rank}", env, str(folder / f"out-{rank}")))
        for started in self.ranks:
            assert started.hear() == "waiting"

    def go(self) -> None:
        for rank in self.ranks:
            rank.tell("go")

    def is_ready(self) -> None:
        """Waits until each rank has its watch, and lets it train."""
        for rank in self.ranks:
            assert rank.hear() == "ready"

    def train(self) -> None:
        for rank in self.ranks:
            rank.tell("train", PACE)

    def connect(self) -> None:
        """Waits until each rank, which does not train yet, is connected."""
        until(lambda: all(rank.ask("is_connected") for rank in self.ranks))

    def halt(self) -> None:
        """All ranks still train: nobody has stopped them."""
        self.done = [rank.ask("stop") for rank in self.ranks]

    def finish(self) -> None:
        self.halt()
        self.close()

    def close(self) -> None:
        for rank in self.ranks:
            rank.tell("close")
        assert [rank.wait() for rank in self.ranks] == [0] * len(self.ranks), [rank.errors for rank in self.ranks]

    def overflow(self, culprit: int) -> int:
        """One rank overflows while the others train; returns the batch. All of them are stopped."""
        batch = int(self.ranks[culprit].ask("stop"))
        self.ranks[culprit].tell("trip")
        assert [rank.wait() for rank in self.ranks] == [ABORTED] * len(self.ranks), [rank.errors for rank in self.ranks]
        return batch

    def let_go(self) -> list[int]:
        """Tells each rank that still trains to close its watch; returns the exit codes."""
        for rank in self.ranks:
            with contextlib.suppress(OSError):
                rank.tell("stop")
                rank.tell("close")
        return [rank.wait() for rank in self.ranks]

    def clear(self) -> None:
        for rank in self.ranks:
            if rank.code is None:
                rank.kill()
                rank.wait()


class Runs:
    """The runs in a folder, by the start ids of their ranks."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._starts: dict[Path, str] = {}

    def of(self, crew: Crew) -> Path:
        """The folder of this crew's run: it has exactly one."""
        for folder in folders(self.path):
            if folder not in self._starts and (folder / FILE).exists():
                opened = records.read(folder / FILE, RunRecord.entries)[0].fact
                assert isinstance(opened, Opened)
                self._starts[folder] = opened.start
        found = [folder for folder, start in self._starts.items() if start == crew.start]
        assert len(found) == 1, f"start {crew.start} has the folders {found}"
        return found[0]

    def report(self, crew: Crew) -> dict[str, Any]:
        """The last report of a crew that has ended."""
        path = self.of(crew) / "report.json"
        ended: list[dict[str, Any]] = []

        def is_over() -> bool:
            found = json.loads(path.read_text()) if path.exists() else {"ranks": [{"state": "running"}]}
            ended[:] = [found]
            return all(rank["state"] not in ("running", "stalled", "waiting") for rank in found["ranks"])

        until(is_over)
        return ended[0]

    def recorded(self, crew: Crew) -> Counter[tuple[int, int]]:
        """How often each (rank, batch) is on record."""
        digests = records.read(self.of(crew) / FILE, RunRecord.digests)
        return Counter(zip(digests["rank"].tolist(), digests["batch"].tolist(), strict=True))

    # --- checks ---------------------------------------------------------------------------------------------------------

    def check_finished(self, crew: Crew) -> None:
        """All that its ranks trained is on record, once, but for what a rank said that it dropped at its end."""
        report = self.report(crew)
        assert (report["outcome"], report["gaps"]) == ("finished", []), report
        assert [rank["state"] for rank in report["ranks"]] == ["finished"] * len(crew.ranks)
        dropped = [rank["dropped"] for rank in report["ranks"]]
        assert self.recorded(crew) == trained(*[done - one for done, one in zip(crew.done, dropped, strict=True)])

    def check_overflow(self, crew: Crew, culprit: int, batch: int) -> None:
        verdict = self.report(crew)["verdict"]
        assert (verdict["rank"], verdict["batch"], verdict["module"], verdict["also"]) == (culprit, batch, "gate", []), (
            verdict
        )
        self.check_no_holes(crew)

    def check_no_holes(self, crew: Crew) -> None:
        """Of each rank, the batches up to some one are on record, once each."""
        recorded = self.recorded(crew)
        last = [sum(of == rank for of, _ in recorded) for rank in range(len(crew.ranks))]
        assert recorded == trained(*last)

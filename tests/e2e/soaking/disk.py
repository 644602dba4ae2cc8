"""The disk of the runs gets full and is freed again, or its operations fail and are slow: what is missing is told."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

import records
from collectors import until
from e2e.site import Site
from e2e.soaking.crew import Crew
from e2e.soaking.part import Part
from rankwatch_monitor.record.reader import RunRecord
from rankwatch_monitor.record.schema import FILE

FAULTS = (1, 4)
"""At least and at most, in a job."""

PAUSES = (0.1, 1.5)
"""Seconds between faults."""

SIZE = "2m"


class FlakyDisk(Part):
    """Operations fail, also after their work is done, and are slow (``scripts/fault_collector.py``)."""

    def begin(self) -> None:
        self.site = Site([self.forge], self.folder)
        self.crews: list[Crew] = []

    def round(self) -> None:
        self.site.faults = self._faults()
        self.site.collect(heartbeat=0.5)
        job = f"job-{self.rounds}"
        crew = Crew(self.forge, self.folder / job, job, [self.site.connection] * 2, job=job)
        self.crews = [crew]
        self._maybe(self._break)
        crew.go()
        crew.is_ready()
        crew.connect()
        crew.train()
        for _ in range(self.random.randint(*FAULTS)):
            self._break()
            self.pause(*PAUSES)
            self._mend()
            self.pause(*PAUSES)
        self._maybe(self._break)
        if self.random.random() < 0.5:
            self._overflow(crew)
        else:
            crew.finish()
        self._maybe(self._mend)
        assert self.site.end() == 0
        self._mend()
        self._check(crew)

    def end(self) -> None:
        for crew in self.crews:
            crew.clear()
        self.site.clear()

    def _faults(self) -> dict[str, str]:
        self.counts["flaky collectors"] += 1
        return {"FAULT_DISK": str(self.random.randrange(1 << 30))}

    def _break(self) -> None:
        """Nothing to do: the collector breaks its own disk."""

    def _mend(self) -> None:
        """See above."""

    def _maybe(self, action: Callable[[], None]) -> None:
        if self.random.random() < 0.5:
            action()

    def _overflow(self, crew: Crew) -> None:
        culprit = self.random.randrange(len(crew.ranks))
        batch = crew.overflow(culprit)
        self.counts["overflows"] += 1
        until(lambda: "\n  record " in self._told(crew))  # a report waits for the disk, for some seconds
        told = self._told(crew)
        assert f"culprit    rank {culprit} of {len(crew.ranks)}" in told, told
        assert f"batch {batch}" in told, told

    def _told(self, crew: Crew) -> str:
        """What the collector printed of the crew's run."""
        return self.site.out.partition(f"in run {crew.start}-0")[2]

    def _check(self, crew: Crew) -> None:
        """What the ranks trained, and nobody stopped, is on record or in a gap that the last report names."""
        folder = self.site.runs / f"{crew.start}-0"
        recorded = set()
        if (folder / FILE).exists():
            digests = records.read(folder / FILE, RunRecord.digests)
            listed = list(zip(digests["rank"].tolist(), digests["batch"].tolist(), strict=True))
            recorded = set(listed)
            assert len(recorded) == len(listed)
        trained = {(rank, batch) for rank, count in enumerate(crew.done) for batch in range(count)}
        assert not crew.done or recorded <= trained
        if missing := trained - recorded:
            self.counts["batches in gaps"] += len(missing)
            self._check_gaps(folder / "report.json", crew, missing)
        self.counts["batches"] += len(recorded)
        assert "Traceback" not in self.site.log

    def _check_gaps(self, path: Path, crew: Crew, missing: set[tuple[int, int]]) -> None:
        gaps = json.loads(path.read_text())["gaps"] if path.exists() else []
        for gap in gaps:
            missing -= {(rank, batch) for rank in gap["ranks"] for batch in range(gap["first"], gap["last"] + 1)}
        assert not missing or "not on record" in self.site.out.rpartition(f"run {crew.start}-0")[2], sorted(missing)


class FullDisk(FlakyDisk):
    """A small file system in the runs' folder."""

    def begin(self) -> None:
        if os.geteuid() != 0:
            pytest.skip("only root can mount a file system")
        super().begin()
        self.site.runs.mkdir()
        mount = ["mount", "-t", "tmpfs", "-o", f"size={SIZE}", "tmpfs", str(self.site.runs)]
        mounted = subprocess.run(mount, capture_output=True, text=True, check=False)
        if mounted.returncode:
            pytest.skip(f"no file system can be mounted here: {mounted.stderr}")

    def end(self) -> None:
        super().end()
        subprocess.run(["umount", "--lazy", str(self.site.runs)], check=True)

    def _faults(self) -> dict[str, str]:
        for record in self.site.runs.glob(f"*/{FILE}*"):
            record.unlink()  # the disk is small
        return {}

    def _break(self) -> None:
        self.counts["disk filled"] += 1
        with contextlib.suppress(OSError), open(self.site.runs / "filler", "wb", buffering=0) as filler:
            while True:
                filler.write(bytes(512))

    def _mend(self) -> None:
        (self.site.runs / "filler").unlink(missing_ok=True)

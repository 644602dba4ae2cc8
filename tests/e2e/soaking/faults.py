"""Jobs of eight ranks under random faults, checked against the ranks' own logs.

Each job trains while its collector is killed and restarted or suspended, and its ranks are suspended; then it ends: cleanly, by
an overflow, by an overflow while the collector is away, or by a killed rank.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from collectors import PATIENCE, until
from e2e.site import Site
from e2e.soaking.part import Part
from jobs import environment, processes_of, torchrun
from rankwatch_monitor.record.reader import RunRecord

RANKS = 8
FAULTS = (2, 5)
"""At least and at most, in a job."""

PAUSES = (1.0, 4.0)
"""Seconds between faults."""

HEARTBEAT = 0.5


@dataclass
class Truth:
    """What a rank logged about itself."""

    pid: int = 0
    begun: list[int] = field(default_factory=list)
    done: list[int] = field(default_factory=list)
    trip: int | None = None
    end: str = ""


class Faults(Part):
    """The collector, one job after another, and the findings for each."""

    def begin(self) -> None:
        self.site = Site([], self.folder)
        self.site.collect(heartbeat=HEARTBEAT)

    def end(self) -> None:
        assert self.site.collectors[-1].poll() is not None or self.site.end() == 0

    def round(self) -> None:
        job = Job(self, f"soak{self.rounds}")
        try:
            job.start()
            for _ in range(self.random.randint(*FAULTS)):
                self.pause(*PAUSES)
                fault = self.random.choice([job.collector_killed, job.collector_stopped, job.rank_stopped])
                self.counts[fault.__name__.replace("_", " ")] += 1
                fault()
            end = self.random.choice([job.finish, job.trip, job.trip_without_collector, job.kill_rank])
            self.counts[end.__name__.replace("_", " ")] += 1
            end()
            job.check()
        finally:
            job.clear()
        assert "Traceback" not in self.site.log
        assert "an error of ours" not in self.site.log


class Job:
    def __init__(self, soak: Faults, name: str) -> None:
        self.soak, self.site = soak, soak.site
        self.random = soak.random
        self.name = name
        self.folder = soak.folder / name
        self.folder.mkdir()
        self.expect: Callable[[dict[str, Any]], None] = lambda report: None
        self.cut_short: set[int] = set()
        """Ranks that could not deliver what they had."""

    def start(self) -> None:
        env = environment(
            RANKWATCH_CONNECTION=str(self.site.connection), RANKWATCH_JOB=self.name, TEST_JOB_MARKER=str(self.folder)
        )
        with (self.folder / "output").open("w") as output:
            command = torchrun("soak_rank.py", str(self.folder), ranks=RANKS)
            self.process = subprocess.Popen(command, env=env, stdout=output, stderr=output)
        until(lambda: all(len(truth.done) > 2 for truth in self.truths()))

    def truths(self) -> list[Truth]:
        return [self._truth(rank) for rank in range(RANKS)]

    def _truth(self, rank: int) -> Truth:
        truth, path = Truth(), self.folder / f"rank-{rank}"
        for line in path.read_text().splitlines() if path.exists() else []:
            what, value = line.split(maxsplit=1)
            if what in ("begun", "done"):
                getattr(truth, what).append(int(value))
            else:
                setattr(
                    truth, {"pid": "pid", "trip": "trip", "ended": "end"}[what], int(value) if value.isdigit() else value
                )
        return truth

    # --- faults -------------------------------------------------------------------------------------------------------------

    def collector_killed(self) -> None:
        self._kill_collector()
        self.soak.pause(0, 3)
        self.site.collect(heartbeat=HEARTBEAT)

    def _kill_collector(self) -> None:
        self.site.collectors[-1].kill()
        self.site.collectors[-1].wait()

    def collector_stopped(self) -> None:
        self._stop(self.site.collectors[-1].pid)

    def rank_stopped(self) -> None:
        self._stop(self.random.choice(self.truths()).pid)

    def _stop(self, pid: int) -> None:
        os.kill(pid, signal.SIGSTOP)
        self.soak.pause(0.3, 3)
        os.kill(pid, signal.SIGCONT)

    # --- ends ---------------------------------------------------------------------------------------------------------------

    def finish(self) -> None:
        self._command("finish")
        assert self._wait() == 0

        def expect(report: dict[str, Any]) -> None:
            assert (report["outcome"], report["gaps"]) == ("finished", [])
            assert [row["state"] for row in report["ranks"]] == ["finished"] * RANKS

        self.expect = expect

    def trip(self) -> None:
        self._await_connected()
        culprit = self._plant()
        assert self._wait() != 0

        def expect(report: dict[str, Any]) -> None:
            verdict = report["verdict"]
            assert (verdict["rank"], verdict["batch"]) == (culprit, self.truths()[culprit].trip)
            assert verdict["module"] == "1"
            assert verdict["certainty"] == "complete"
            assert verdict["also"] == []

        self.expect = expect

    def trip_without_collector(self) -> None:
        """The rank acts alone: it does not wait for an absent collector."""
        self._kill_collector()
        culprit = self._plant()
        assert self._wait() != 0
        assert "ended OverflowDetected" in (self.folder / f"rank-{culprit}").read_text()
        self.cut_short = set(range(RANKS))
        self.site.collect(heartbeat=HEARTBEAT)

    def kill_rank(self) -> None:
        self._await_connected()
        victim = self.random.randrange(RANKS)
        os.kill(self.truths()[victim].pid, signal.SIGKILL)
        assert self._wait() != 0
        self.cut_short = set(range(RANKS))  # torchrun ends the others with a signal

        def expect(report: dict[str, Any]) -> None:
            assert report["outcome"] in ("lost", "failed")
            assert report["ranks"][victim]["state"] == "lost"

        self.expect = expect

    def _plant(self) -> int:
        culprit = self.random.randrange(RANKS)
        at = max(truth.begun[-1] for truth in self.truths()) + 20
        self._command(f"trip {culprit} {at}")
        return culprit

    def _command(self, text: str) -> None:
        part = self.folder / "command.part"
        part.write_text(text)
        part.replace(self.folder / "command")

    def _wait(self) -> int:
        return self.process.wait(PATIENCE)

    def _await_connected(self) -> None:
        """Waits until the current collector has heard each rank."""
        run = self.site.runs / f"{self.name}-0" / "run.db"
        before = {truth.pid: truth.done[-1] for truth in self.truths()}
        until(lambda: set(self._last_recorded(run)) == set(range(RANKS)))
        until(lambda: all(self._last_recorded(run)[rank] > before[t.pid] for rank, t in enumerate(self.truths())))

    @staticmethod
    def _last_recorded(run: Path) -> dict[int, int]:
        with RunRecord(run) as record:
            digests = record.digests()
        return dict(zip(digests["rank"].tolist(), digests["batch"].tolist(), strict=True))

    # --- checks of results ----------------------------------------------------------------------------------------------------

    def check(self) -> None:
        run = self.site.runs / f"{self.name}-0"
        if not self.cut_short:
            until(lambda: (run / "report.json").exists())
        until(lambda: processes_of(str(self.folder)) == [])
        assert not (self.site.runs / f"{self.name}-0.2").exists()
        told = Counter[int]()
        if self.expect.__name__ == "expect":
            until(lambda: (run / "report.json").exists())
            report = json.loads((run / "report.json").read_text())
            self.expect(report)
            told += _missing_of(report)
        with RunRecord(run / "run.db") as record:
            digests = record.digests()
        recorded = Counter(zip(digests["rank"].tolist(), digests["batch"].tolist(), strict=True))
        assert max(recorded.values()) == 1
        for rank, truth in enumerate(self.truths()):
            assert truth.begun == list(range(len(truth.begun)))
            of_rank = sorted(batch for its_rank, batch in recorded if its_rank == rank)
            assert of_rank == list(range(len(of_rank))), f"{self.name}: rank {rank} has holes in its record"
            assert set(of_rank) <= set(truth.begun)
            if rank not in self.cut_short:
                missing = set(truth.done) - set(of_rank)
                assert len(missing) <= told[rank], (
                    f"{self.name}: rank {rank}: {missing} are missing, and {told[rank]} are told"
                )
        self.soak.counts["batches"] += sum(recorded.values())

    def clear(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        for truth in self.truths():
            if truth.pid:
                try:
                    os.kill(truth.pid, signal.SIGKILL)
                except ProcessLookupError:
                    continue


def _missing_of(report: dict[str, Any]) -> Counter[int]:
    """By rank: how many batches are not on record, as it says. A rank that is ended may not have sent all."""
    missing = Counter({row["rank"]: row["dropped"] for row in report["ranks"]})
    for gap in report["gaps"]:
        missing.update(dict.fromkeys(gap["ranks"], gap["last"] - gap["first"] + 1))
    return missing
